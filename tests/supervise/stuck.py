"""A process that gets stuck under a watchdog, in the way its first argument names; the second is the run's folder."""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from nsa.record.failures import Failures
from nsa.supervise.ranks import identify
from nsa.supervise.watchdog import Watchdog

FLOOR_S = 0.5
LONG_S = 1000
RANKS = 9  # of the run, at most
keeping_the_gil = ctypes.PyDLL(None)


def sleeping(dog: Watchdog) -> None:
    time.sleep(LONG_S)  # here: sleeping


def lock(dog: Watchdog) -> None:
    taken = threading.Lock()
    taken.acquire()
    taken.acquire()  # here: lock


def gil(dog: Watchdog) -> None:
    mutex = (ctypes.c_char * 64)()
    for _ in range(2):  # the second time it waits for ever, whatever signal comes
        keeping_the_gil.pthread_mutex_lock(mutex)  # here: gil


def gil_again_and_again(dog: Watchdog) -> None:
    while True:
        keeping_the_gil.usleep(200_000)  # here: gil_again_and_again


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


def report_that_never_ends(dog: Watchdog) -> None:
    """As when the file system does not answer."""
    dog._on_hang = lambda report, message: time.sleep(LONG_S)
    sleeping(dog)


def end_while_it_is_reported(dog: Watchdog) -> None:
    """As when the rank that this one waited for goes on."""
    reported, record = threading.Event(), dog._on_hang

    def slowly(report: dict[str, object], message: str) -> None:
        reported.set()
        time.sleep(0.2)
        record(report, message)

    dog._on_hang = slowly
    reported.wait()


def device(dog: Watchdog) -> None:
    with dog.allow(120):
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


def first_step(dog: Watchdog) -> None:
    time.sleep(1.5 * FLOOR_S)


def allowed(dog: Watchdog) -> None:
    with dog.allow(60 * FLOOR_S), dog.allow(0.1):
        keeping_the_gil.usleep(int(1.5e6 * FLOOR_S))
        time.sleep(1.5 * FLOOR_S)


def allowed_for_long(dog: Watchdog) -> None:
    with dog.allow(LONG_S):
        time.sleep(LONG_S)  # here: allowed_for_long


def after_allowed(dog: Watchdog) -> None:
    allowed(dog)
    sleeping(dog)


def working(dog: Watchdog) -> None:
    """Until the file `stop` exists."""
    step = 0
    print("working", flush=True)
    while not Path(sys.argv[2], "stop").exists():
        step += 1
        dog.beat(step, "step")
        time.sleep(0.05)
    print("stopped itself", flush=True)


def aborting(dog: Watchdog) -> None:
    os.abort()  # here: aborting


def raising(dog: Watchdog) -> None:
    raise KeyError("caught below")


def nothing(dog: Watchdog) -> None:
    pass


def emit(folder: Path, rank: int, **values: object) -> None:
    """A line as a run writes it."""
    with suppress(OSError), (folder / f"heartbeat_rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "clock": time.monotonic(), "rank": rank, **values}) + "\n")


def main(how: str, folder: Path, rank: int = 0) -> None:
    emit(folder, rank, event="boot", step=0, **identify(os.getpid()))
    emit(folder, rank, event="step", step=11)
    before = signal.getsignal(signal.SIGUSR2), threading.active_count()
    failures, first_step_s = Failures(), 20 * FLOOR_S if how == "first_step" else FLOOR_S
    common = {
        "floor_s": FLOOR_S,
        "on_hang": lambda report, message: emit(folder, rank, event="hang", **report),
        "counted": failures.counted,
    }
    dog = Watchdog(folder, rank, RANKS, first_step_s=first_step_s, **common)
    try:
        with dog:
            dog.beat(12, "backward")
            print("armed", flush=True)
            globals()[how](dog)
    except KeyError:
        time.sleep(5 * FLOOR_S)
    with Watchdog(folder, rank, RANKS, first_step_s=FLOOR_S, **common) as second:
        second.beat(13, "step")
    assert (signal.getsignal(signal.SIGUSR2), threading.active_count()) == before
    print(f"done with {failures.count} failures")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
