"""The watchdog of a rank: if the rank makes no progress for too long, it reports where each rank stood and exits.

The training loop calls `beat`. If no beat comes within the limit, a thread writes the stacks of all threads into
`stackdump_{time}_rank{r}.txt`, then the memory, where every rank stood and its last events. It waits until the other
ranks have done the same and ends the process with exit code 6.

While C code holds the GIL, no Python thread runs. For this case the watchdog arms `faulthandler.dump_traceback_later`
again after every beat: a C thread that writes the stacks into the same file and ends the process with exit code 1.

SIGUSR2 appends all stacks to the file and the run goes on; SIGABRT and other fatal signals do it before they end the
process. The file is open from the start, since C code cannot open it, and is removed at the end if it is empty.
"""

import faulthandler
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from nsa.errors import HangError, printable
from nsa.files import regular
from nsa.run_folder import NCCL_TRACE, stack_dumps
from nsa.supervise.ranks import RankState, format_ranks, read_ranks

STEPS_OF_MEDIAN = 101
DATA_PHASE = "data"  # the training loop waits for a batch
READ_S = 3.0  # limit for reading the heartbeat files
STDERR = 2
T = TypeVar("T")


class Watchdog:
    """A context manager. `floor_s` is the shortest silence that counts as a hang.

    `on_hang` is called in the watchdog's thread with the fields of the event `hang` and a message; the process ends
    soon after it returns, without any cleanup. Errors of the watchdog itself are raised inside `counted()`.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        *,
        floor_s: float,
        first_step_s: float,
        on_hang: Callable[[dict[str, Any], str], None],
        counted: Callable[[], AbstractContextManager[None]],
    ):
        self._folder, self._rank, self._size, self._floor_s = folder, rank, size, floor_s
        self._on_hang, self._counted = on_hang, counted
        self._tick_s, self._report_s = min(1.0, max(0.05, floor_s / 20)), min(20.0, max(1.0, floor_s))
        self._steps: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)
        self._limit_s, self._allowed = first_step_s, [0.0]
        self._step, self._phase, self._beat_at = 0, "start", time.monotonic()
        self._stalls: dict[tuple[int, float], float] = {}  # newest stalls of other ranks, and when they were seen
        self._file = STDERR
        self._path: Path | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        with self._counted():
            self._remove_empty_dumps()  # left by a process that was killed
            path = stack_dumps(time.strftime("%Y%m%dT%H%M%S")).path(self._folder, self._rank)
            self._file = regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._path = path
        self._was_enabled = faulthandler.is_enabled()
        with self._counted():
            faulthandler.enable(file=self._file)
            faulthandler.register(signal.SIGUSR2, file=self._file)
        self._beat_at = time.monotonic()
        with self._counted():
            self._thread.start()
            self._arm(self.limit_s + self._report_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()  # does not return if the thread reports a hang: the thread ends the process
        faulthandler.cancel_dump_traceback_later()
        with self._counted():
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            if self._was_enabled:
                faulthandler.enable(file=STDERR)  # Python's default; faulthandler does not tell its previous file
        with self._counted():
            if self._path is not None:
                os.close(self._file)
                self._remove_empty_dumps()

    def beat(self, step: int, phase: str) -> None:
        """Reports progress. The training loop calls it several times per step."""
        self._step, self._phase, self._beat_at = step, phase, time.monotonic()

    def step_done(self, seconds: float) -> None:
        """Records the duration of a step; the limit follows the median."""
        self._steps.append(seconds)
        self._limit_s = max(self._floor_s, 5.0 * statistics.median(self._steps))
        self._beat_at = time.monotonic()

    @property
    def limit_s(self) -> float:
        """The current limit: a longer silence is a hang."""
        return max(self._limit_s, *self._allowed)

    @contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """Inside, the limit is at least `seconds`: for work that may take longer than a step."""
        self._allowed.append(seconds)
        self._beat_at = time.monotonic()
        try:
            yield
        finally:
            self._allowed.remove(seconds)
            self._beat_at = time.monotonic()

    def _remove_empty_dumps(self) -> None:
        for path in self._folder.glob(stack_dumps().name(self._rank)):
            if path.lstat().st_size == 0:
                path.unlink()

    def _watch(self) -> None:
        armed, has_dumped = (0.0, 0.0), False
        while not self._ended.wait(self._tick_s):
            with self._counted():
                at, limit_s = self._beat_at, self.limit_s
                silent_s = time.monotonic() - at
                if (at, limit_s) != armed:
                    armed, has_dumped = (at, limit_s), False
                    self._arm(limit_s - silent_s + self._report_s)
                if silent_s < self._limit_s:
                    continue
                ranks = time_limited(READ_S, lambda: read_ranks(self._folder, self._size)) or []
                if silent_s < limit_s:  # another rank that hangs may end this one before its own limit
                    if not has_dumped and any(rank.is_hung and rank.age_s < silent_s for rank in ranks):
                        has_dumped = True
                        time_limited(self._report_s, lambda: self._dump("another rank reports a hang"))
                elif self._phase != DATA_PHASE and self._waits_for_data_of_others(ranks, limit_s):
                    self._arm(limit_s + self._report_s)  # this rank waits for the stalled one, whose own limit applies
                elif at == self._beat_at and not self._ended.is_set():
                    self._end_process(silent_s, limit_s)

    def _waits_for_data_of_others(self, ranks: list[RankState], limit_s: float) -> bool:
        """Whether another rank has reported a stall within the limit. The time of the report does not tell, because
        hosts have different clocks: a report counts from when it is first seen here."""
        now = time.monotonic()
        newest = {(r.rank, r.events[-1]["time"]) for r in ranks if r.is_stalled and r.rank != self._rank}
        self._stalls = {stall: self._stalls.get(stall, now) for stall in newest}
        return any(now - seen_at < limit_s for seen_at in self._stalls.values())

    def _arm(self, seconds: float) -> None:
        """Restarts the C timer."""
        seconds = min(max(seconds, self._report_s), threading.TIMEOUT_MAX / 2)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _end_process(self, silent_s: float, limit_s: float) -> None:
        with self._counted():
            self._arm(3 * self._report_s)
        time_limited(self._report_s, lambda: self._report(silent_s, limit_s))
        time_limited(self._report_s, self._wait_for_other_ranks)
        os._exit(HangError.exit_code)

    def _report(self, silent_s: float, limit_s: float) -> None:
        """Writes the report, the most important parts first; calls that may block come last."""
        what = f"rank {self._rank}: no progress for {silent_s:.0f} s in step {self._step} (phase {self._phase})"
        self._dump(f"hang: {what}; limit {limit_s:.1f} s")
        self._write(f"\nmemory: {psutil.Process().memory_info().rss / 2**30:.3f} GiB resident\n\n")
        ranks: list[RankState] = []
        with self._counted():
            ranks = read_ranks(self._folder, self._size)
            self._write(format_ranks(ranks))
        report = {"step": self._step, "phase": self._phase, "silent_s": silent_s, "limit_s": limit_s}
        report |= {"file": str(self._path) if self._path else None, "ranks": [rank.to_dict() for rank in ranks]}
        message = printable(f"{what}; stacks {f'in {self._path}' if self._path else 'above'}")
        with self._counted():
            self._on_hang(report, message)
        print(f"hang: {message}; exit code {HangError.exit_code}", file=sys.stderr, flush=True)
        torch = sys.modules.get("torch")  # not imported here: the thread that hangs may hold the import lock
        if torch is None or not torch.cuda.is_initialized():
            return
        with self._counted():
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(device):  # PyTorch's own count, without a call to the device
                    self._write(f"\n{torch.cuda.memory_summary(device)}\n")
        recorder = getattr(torch._C, "_distributed_c10d", None)
        dump = getattr(recorder, "_dump_nccl_trace_json", None) or getattr(recorder, "_dump_fr_trace_json", None)
        if dump is not None:
            with open(NCCL_TRACE.path(self._folder, self._rank), "wb", opener=regular) as file:
                file.write(dump())

    def _dump(self, why: str) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        self._write(f"{why}\n{at}, process {os.getpid()} on {socket.gethostname()}\n\nstacks of all threads:\n")
        with self._counted():
            faulthandler.dump_traceback(file=self._file)

    def _write(self, text: str) -> None:
        """Writes to the file, or to standard error after the first failed write."""
        with self._counted():
            os.write(self._file, text.encode(errors="replace"))
            return
        self._file, self._path = STDERR, None
        with suppress(OSError):
            os.write(self._file, text.encode(errors="replace"))

    def _wait_for_other_ranks(self) -> None:
        """When this rank exits, torchrun ends the others: they must have written their stacks before."""
        while not all(r.rank == self._rank or r.is_hung or r.has_ended for r in read_ranks(self._folder, self._size)):
            time.sleep(self._tick_s)


def time_limited(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`, or None if it raises or takes longer, as on a file system that does not answer."""
    results: list[T] = []

    def work() -> None:
        with suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
