"""The watchdog of a rank: without progress for too long it reports where each rank stood and ends the process.

The training loop calls `beat`, which writes into memory that the guard (guard.py), a small process beside the rank,
watches. The guard decides, and asks the thread here to report: the stacks of all threads into
`stackdump_{time}_rank{r}.txt`, then where every rank stood, their last events and the memory. If this thread cannot,
the guard reports. In the end the guard ends the rank with exit code 6.

SIGUSR2 appends all stacks to the same file and the run goes on; SIGABRT and other fatal signals do it before they end
the process. The file exists from the start, since C code can only write to an open file, and is removed at the end if
it is empty. The time in its name is that of its newest stacks; where nothing could rename it after them, of the start.

Nothing that fails here stops a run: it is counted. Without a guard, hangs are not found.
"""

import faulthandler
import json
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from nsa.files import regular
from nsa.record.exit_switch import arm_exit_switch
from nsa.record.failures import Failures
from nsa.record.guard import BEAT, EXIT_CODE, STDERR, dump_name, headline, report_s, time_limited
from nsa.record.schema import NCCL_TRACE

STEPS_OF_MEDIAN = 101
GUARD_END_S = 5.0  # then it is killed


class Watchdog:
    """Active while it is entered. `floor_s` is the shortest silence that counts as a hang.

    `on_hang` gets a report that can be written as JSON, in the watchdog's thread. What it wants to keep must be written
    when it returns: no cleanup follows.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        floor_s: float,
        first_step_s: float,
        on_hang: Callable[[dict[str, Any]], None] = lambda report: None,
        failures: Failures | None = None,
    ):
        self.failures = failures or Failures()
        self._folder, self._rank, self._floor_s, self._on_hang = folder, rank, floor_s, on_hang
        self._steps: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)
        self._limit_s = first_step_s
        self._allowed: list[float] = []
        self._step, self._phase = 0, b"start"
        self._memory: mmap.mmap | bytearray = bytearray(BEAT.size)
        self._path: Path | None = None
        self._file = STDERR
        self._guard: subprocess.Popen[bytes] | None = None
        self._closing, self._has_hung, self._reporting = False, False, threading.Lock()

    def __enter__(self) -> Self:
        with self.failures.counted():
            self._remove_empty_dumps()  # of a process that was killed
            path = self._folder / dump_name(self._rank, time.time())
            self._file = regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._path = path
        self._were_enabled = faulthandler.is_enabled()
        with self.failures.counted():
            faulthandler.enable(file=self._file, all_threads=True)
        with self.failures.counted():
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        with self.failures.counted():
            self._start_guard()
        return self

    def __exit__(self, *_: object) -> None:
        is_free = self._reporting.acquire(timeout=2 * report_s(self._floor_s))
        if self._has_hung:  # the end of a rank that was stopped may wake this one: the hang is still the reason
            self._wait_for_end()
        self._closing = True
        if is_free:
            self._reporting.release()
        with self.failures.counted():
            self._end_guard()
        with self.failures.counted():
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            if self._were_enabled:
                faulthandler.enable(file=STDERR)  # Python's default; faulthandler cannot say where it was before
        with self.failures.counted():
            if self._path is not None:
                os.close(self._file)
                self._remove_empty_dumps()

    def beat(self, step: int, phase: str) -> None:
        """Progress: called a few times a step. Costs a few microseconds."""
        self._step, self._phase = step, phase.encode()
        self._write_beat()

    def step_done(self, seconds: float) -> None:
        """How long the step took; the limit follows the median."""
        self._steps.append(seconds)
        self._limit_s = max(self._floor_s, 5.0 * statistics.median(self._steps))
        self._write_beat()

    @property
    def limit_s(self) -> float:
        """The silence that counts as a hang now."""
        return max([self._limit_s, *self._allowed])

    @contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """For what may take longer than a step: inside, the limit is at least `seconds`."""
        self._allowed.append(seconds)
        self._write_beat()
        try:
            yield
        finally:
            self._allowed.remove(seconds)
            self._write_beat()

    def _write_beat(self) -> None:
        BEAT.pack_into(self._memory, 0, time.monotonic_ns(), self.limit_s, self._step, self._phase)

    def _remove_empty_dumps(self) -> None:
        for path in self._folder.glob(dump_name(self._rank)):
            if path.lstat().st_size == 0:
                path.unlink()

    def _start_guard(self) -> None:
        memory = _open_memory()
        self._link, link = socket.socketpair()
        try:
            self._memory = mmap.mmap(memory, BEAT.size)
            self._write_beat()
            settings = {
                "folder": str(self._folder),
                "rank": self._rank,
                "pid": os.getpid(),
                "floor_s": self._floor_s,
                "beat": memory,
                "link": link.fileno(),
                "stacks": self._file,
                "path": str(self._path) if self._path else None,
                "exit_switch": arm_exit_switch(EXIT_CODE),
            }
            self._guard = _start_process(settings)
        finally:
            os.close(memory)
            link.close()
        self._thread = threading.Thread(target=self._serve, name="watchdog", daemon=True)
        self._thread.start()

    def _end_guard(self) -> None:
        if self._guard is None:
            return
        with suppress(OSError):  # the guard is gone already
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._guard.wait(GUARD_END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            raise
        finally:
            self._thread.join(GUARD_END_S)
            self._link.close()

    def _wait_for_end(self) -> None:
        """The guard ends this process when the other ranks have left their stacks."""
        if self._guard is not None:
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(4 * report_s(self._floor_s))
        os._exit(EXIT_CODE)

    def _serve(self) -> None:
        """Does what the guard asks for, until one of the two closes the connection."""
        with self.failures.counted(), self._link.makefile("rb") as messages:
            for line in messages:
                message = json.loads(line)
                if "end" in message:
                    os._exit(EXIT_CODE)
                with self._reporting:
                    if self._closing:
                        return
                    if time.monotonic() < message["until"]:  # later the guard reports; two reports are one too many
                        self._has_hung = True
                        self._report(message["report"], message["standing"])
        if not self._closing:
            self.failures.add("the guard of the watchdog is gone, and nothing is watched any more")

    def _report(self, report: dict[str, Any], standing: str) -> None:
        """Writes all that is known, the most important first. The guard limits how long it may take."""
        self._link.sendall(b"started ")
        if self._path is not None:
            self._path = Path(report["file"])
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        here = f"process {os.getpid()} on {socket.gethostname()}"
        text = f"{headline(self._rank, report)}\n{at}, limit {report['limit_s']:.1f} s, {here}\n"
        self._put(f"{text}\nstacks of all threads:\n")
        with self.failures.counted():
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        report["file"] = str(self._path) if self._path else None
        self._put(f"\n{standing}")
        with self.failures.counted():
            self._on_hang({**report, "reported_by": "thread"})
        self._link.sendall(b"recorded ")
        with self.failures.counted():
            time_limited(report_s(self._floor_s) / 4, self._report_last, report)
        self._link.sendall(b"done ")

    def _put(self, text: str) -> None:
        """Into the file; to standard error from the first time that the file cannot be written."""
        content = text.encode(errors="replace")
        with suppress(OSError):
            if os.write(self._file, content) == len(content):
                return
        self.failures.add("a stack dump cannot be written")
        if self._path is not None:
            self._file, self._path = STDERR, None
            self._put(text)

    def _report_last(self, report: dict[str, Any]) -> None:
        """What may block: a terminal that nobody reads, a hung device. The device itself is not asked, only what
        PyTorch and NCCL keep of it on the host."""
        with self.failures.counted():
            print(headline(self._rank, report), file=sys.stderr, flush=True)
        torch = sys.modules.get("torch")  # never imported here: whoever hangs may hold the import lock
        if torch is None or not torch.cuda.is_initialized():
            return
        with self.failures.counted():
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(device):
                    self._put(f"\n{torch.cuda.memory_summary(device)}\n")
        with self.failures.counted():
            recorder = getattr(torch._C, "_distributed_c10d", None)
            dump = getattr(recorder, "_dump_nccl_trace_json", None) or getattr(recorder, "_dump_fr_trace_json", None)
            if dump is not None:
                with open(NCCL_TRACE.path(self._folder, self._rank), "wb", opener=regular) as file:
                    file.write(dump())


def _open_memory() -> int:
    """A file without a name, in memory where the system has such files."""
    if sys.platform == "linux":
        file = os.memfd_create("nsa-beat")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.truncate(file, BEAT.size)
    return file


def _start_process(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The guard, without site-packages: it starts in some 30 ms and takes about 13 MB."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from nsa.record.guard import main; main()"
    shared = [settings[name] for name in ("beat", "link", "stacks", "exit_switch") if settings[name] is not None]
    # A blocked signal stays blocked in the new process: what a terminal or a scheduler sends is for the rank alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(  # noqa: S603  (our own interpreter and code)
            [sys.executable, "-I", "-S", "-c", code, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=shared,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
