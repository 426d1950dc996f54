"""A process that gets stuck under a watchdog, in the way its first argument says; the second is the run's folder."""

import ctypes
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from nsa.record.watchdog import Watchdog

FLOOR_S = 1.0
LONG_S = 1000
keeping_the_gil = ctypes.PyDLL(None)


def sleeping(dog: Watchdog) -> None:
    time.sleep(LONG_S)  # here: sleeping


def lock(dog: Watchdog) -> None:
    taken = threading.Lock()
    taken.acquire()
    taken.acquire()  # here: lock


def gil(dog: Watchdog) -> None:
    while True:  # a signal ends a sleep
        keeping_the_gil.sleep(LONG_S)  # here: gil


def gil_again_and_again(dog: Watchdog) -> None:
    while True:
        keeping_the_gil.usleep(400_000)  # here: gil_again_and_again


def pipe(dog: Watchdog) -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)  # here: pipe


def data_thread(dog: Watchdog) -> None:
    batches: queue.Queue[int] = queue.Queue()

    def load() -> None:
        time.sleep(LONG_S)  # here: data_thread
        batches.put(1)

    threading.Thread(target=load, daemon=True).start()
    batches.get()


def another_rank_waits_for_data(dog: Watchdog) -> None:
    """It says so all the time, gets its data, and this rank, which waited for it, goes on."""
    for _ in range(12):
        emit(Path(sys.argv[2]), 1, event="data_stall", step=12)
        time.sleep(FLOOR_S / 5)


def another_rank_waits_and_hangs(dog: Watchdog) -> None:
    another_rank_waits_for_data(dog)
    emit(Path(sys.argv[2]), 1, event="hang", step=12)
    another_rank_waits_for_data(dog)  # until it is gone its other threads still say so


def all_ranks_wait_for_data(dog: Watchdog) -> None:
    dog.beat(12, "data")
    another_rank_waits_for_data(dog)


def device(dog: Watchdog) -> None:
    with dog.patient(120):
        import torch
        import torch.distributed as dist

        x = torch.ones(1024, 1024, device="cuda")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000_000)  # about 12 s
    torch.cuda.synchronize()  # here: device


def full_disk(dog: Watchdog) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sleeping(dog)


def stderr_that_nobody_reads(dog: Watchdog) -> None:
    while True:
        os.write(2, b"x" * 4096)  # here: stderr_that_nobody_reads


def slow_steps(dog: Watchdog) -> None:
    for step in range(1, 3):
        with dog.patient(2 * FLOOR_S) if step == 1 else dog.patient(0):
            time.sleep(1.3 * FLOOR_S)
        dog.step_done(1.3 * FLOOR_S)
        dog.beat(step, "step")
        assert dog.limit_s == 5 * 1.3 * FLOOR_S
    time.sleep(1.3 * FLOOR_S)


def first_step(dog: Watchdog) -> None:
    time.sleep(2 * FLOOR_S)


def patience(dog: Watchdog) -> None:
    with dog.patient(4 * FLOOR_S):
        assert dog.limit_s == 4 * FLOOR_S
        with dog.patient(0.1):
            keeping_the_gil.usleep(int(2e6 * FLOOR_S))
        time.sleep(1.5 * FLOOR_S)
    assert dog.limit_s == FLOOR_S
    time.sleep(0.3)


def after_patience(dog: Watchdog) -> None:
    with dog.patient(2 * FLOOR_S):
        time.sleep(1.5 * FLOOR_S)
    sleeping(dog)


def working(dog: Watchdog) -> None:
    """Until a file says stop."""
    step = 0
    print("working", flush=True)
    while not Path(sys.argv[2], "stop").exists():
        step += 1
        dog.beat(step, "step")
        for _ in range(8):  # so that most of a step is still to come when a stop ends
            time.sleep(0.05)
    print("stopped itself", flush=True)


def elsewhere(dog: Watchdog) -> None:
    gil(dog)


def working_then_gil(dog: Watchdog) -> None:
    working(dog)
    gil(dog)


def aborting(dog: Watchdog) -> None:
    os.abort()  # here: aborting


def raising(dog: Watchdog) -> None:
    raise KeyError("caught below")


def nothing(dog: Watchdog) -> None:
    pass


def emit(folder: Path, rank: int, **values: object) -> None:
    """A line as a run writes it."""
    with suppress(OSError), (folder / f"heartbeat_rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "rank": rank, **values}) + "\n")


def main(how: str, folder: Path, rank: int = 0) -> None:
    if how == "elsewhere":
        platform.machine = lambda: "riscv64"
    emit(folder, rank, event="start", step=0, pid=os.getpid(), host=socket.gethostname())
    first_step_s = 3 * FLOOR_S if how == "first_step" else FLOOR_S
    before = signal.getsignal(signal.SIGUSR2), threading.active_count()
    dog = Watchdog(
        folder,
        rank,
        floor_s=FLOOR_S,
        first_step_s=first_step_s,
        on_hang=lambda report: emit(folder, rank, event="hang", **report),
    )
    try:
        with dog:
            dog.beat(12, "backward")
            print("armed", flush=True)
            globals()[how](dog)
    except KeyError:
        time.sleep(2.5 * FLOOR_S)
    with Watchdog(folder, rank, floor_s=FLOOR_S, first_step_s=FLOOR_S) as second:
        second.beat(13, "step")
    assert (signal.getsignal(signal.SIGUSR2), threading.active_count()) == before
    print(f"done with {dog.failures} failures")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
