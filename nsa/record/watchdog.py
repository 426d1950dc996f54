"""A watchdog in every process of a run: without progress for too long it says where each rank stood and ends it.

The training loop calls `beat`. A thread looks how long ago that was; past the limit it appends to
`stackdump_{time}_rank{r}.txt` the stacks of all threads, where every rank stood, their last events and the memory, asks
the other ranks on this host for their stacks, kills those that are stopped, and ends the process with exit code 6. The
same thread keeps setting the dead man of `deadman.py` anew, which does the most needed part (stacks, exit code 6)
if the thread cannot: it gets no turn because C code holds the GIL, or its report is stuck in a dead file system.

Time in which the thread itself had no turn although it asked for one is not counted, three times at most while nothing
moves: a process that was stopped and goes on is not hung. A machine that sleeps stops the clock as well. While another
rank says that its data does not come, that rank is the one to judge: it goes on, ends with its own error, or hangs.

SIGUSR2 appends all stacks to the same file and the run goes on; SIGABRT and other fatal signals do it before they end
the process. The file is there from the start, since C code can only write to an open file, and is removed at the end
when it is empty. The time in its name is that of its newest stacks; where no Python ran after them, of the start.
Nothing that fails here stops a run: it is counted in `failures`.
"""

import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import psutil

from nsa.record.deadman import DeadMan, make_dead_man
from nsa.record.schema import HEARTBEAT, NCCL_TRACE, stack_dumps

EXIT_CODE = 6
STEPS_OF_MEDIAN = 101
LAST_EVENTS = 5
DATA_PHASE = "data"  # as the training loop calls the wait for a batch
STDERR = 2
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass
class RankState:
    """Where a rank stood: its last event, and its process if it is on this host."""

    rank: int
    step: int | None = None
    event: str | None = None
    age_s: float | None = None
    pid: int | None = None
    host: str | None = None
    state: str = "unknown"
    killed: bool = False

    def __str__(self) -> str:
        stood = f"step {self.step}, event {self.event}, {self.age_s:.0f} s ago" if self.event else "no event"
        return f"rank {self.rank}: {stood}; process {self.pid} on {self.host}: {self.state}"


class Watchdog:
    """Armed while it is entered. `floor_s` is the shortest silence that counts as a hang.

    `on_hang` gets a report that can be written as JSON, in the watchdog's thread. What it wants to keep must be written
    when it returns: no cleaning up follows.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        floor_s: float,
        first_step_s: float,
        on_hang: Callable[[dict[str, Any]], None] = lambda report: None,
    ):
        self.failures = 0
        self._folder, self._rank, self._floor_s, self._on_hang = folder, rank, floor_s, on_hang
        self._tick_s = min(1.0, max(0.05, floor_s / 20))
        self._report_s = min(20.0, max(3.0, floor_s / 3))  # a report that takes longer is cut off
        self._steps: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)
        self._limit_s = first_step_s
        self._patience: list[float] = []
        self._last = (time.monotonic(), 0, "start")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._dead_man: DeadMan | None = None
        self._path: Path | None = None
        self._file = STDERR
        self._written = 0  # bytes of stacks that the name of the file knows of

    def __enter__(self) -> Self:
        self._open_file()
        self._were_enabled = faulthandler.is_enabled()
        with self._counted():
            faulthandler.enable(file=self._file, all_threads=True)
        with self._counted():
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
            place = _place(self._folder / _dump_name(self._rank) if self._path else None)
            text = f"hang: rank {self._rank}: no progress, and Python cannot report it; {place}; last beat: "
            self._dead_man = make_dead_man(EXIT_CODE, min(10.0, max(0.5, self._floor_s / 6)), self._file, text)
        self._last = (time.monotonic(), 0, "start")
        with self._counted():
            self._thread.start()
            self._set_dead_man(self.limit_s)  # only with a thread that will set it anew
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._counted():
            self._thread.join()
        with self._counted():
            if self._dead_man is not None:
                self._dead_man.close()
        with self._counted():
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            if self._were_enabled:
                faulthandler.enable(file=STDERR)  # where Python itself has it; nobody can ask for another place
        with self._counted():
            self._name_new_stacks()
        with self._counted():
            if self._path is not None:
                os.close(self._file)
                _remove_empty(self._path)

    def beat(self, step: int, phase: str) -> None:
        """Progress: called a few times a step. Costs about a microsecond."""
        self._last = (time.monotonic(), step, phase)
        if self._dead_man is not None:
            self._dead_man.note(f"step {step} (phase {phase})")

    def step_done(self, seconds: float) -> None:
        """How long the step took; the limit follows the median."""
        self._again()
        self._steps.append(seconds)
        self._limit_s = max(self._floor_s, 5.0 * statistics.median(self._steps))

    @property
    def limit_s(self) -> float:
        """The silence that counts as a hang now."""
        return max([self._limit_s, *self._patience])

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """For what may take longer than a step: inside, the limit is at least `seconds`."""
        self._patience.append(seconds)
        self._again()
        self._set_dead_man(self.limit_s)  # at once: what follows may keep the GIL
        try:
            yield
        finally:
            self._again()  # before the limit shrinks: the thread would take the patience for silence
            self._patience.remove(seconds)

    def _again(self) -> None:
        """Progress at the same place."""
        _, step, phase = self._last
        self._last = (time.monotonic(), step, phase)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Whatever fails inside is counted and left out."""
        try:
            yield
        except Exception:
            self.failures += 1

    def _open_file(self) -> None:
        with self._counted():
            for path in self._folder.glob(_dump_name(self._rank)):
                _remove_empty(path)  # of a process that was killed
            path = self._folder / _dump_name(self._rank, time.time())
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._path, self._written = path, self._place_in_file()

    def _place_in_file(self) -> int:
        """Grows with whatever was written, by C code too. Asks no file system, which may hang: cheap at any time."""
        return os.lseek(self._file, 0, os.SEEK_CUR)

    def _name_new_stacks(self) -> None:
        """Stacks that were asked for by a signal since the last look give the file their time."""
        if self._path is not None and self._place_in_file() != self._written:
            self._name_after(time.time())

    def _name_after(self, at: float) -> None:
        if self._path is not None:
            self._written = self._place_in_file()
            target = self._folder / _dump_name(self._rank, at)
            if not target.exists():
                self._path = self._path.rename(target)

    def _set_dead_man(self, seconds: float) -> None:
        with self._counted():
            if self._dead_man is not None:
                self._dead_man.set(seconds + 2 * self._tick_s)  # the thread, which says more, comes first

    def _watch(self) -> None:
        seen, lost_s, forgiven = self._last, 0.0, 0
        asked = time.monotonic()
        while not self._ended.wait(self._tick_s):
            now = time.monotonic()
            late_s, asked = now - asked - self._tick_s, now
            last = self._last
            if last is not seen:
                seen, lost_s, forgiven = last, 0.0, 0
            if late_s > 3 * self._tick_s and forgiven < 3:
                lost_s += min(late_s, now - last[0])
                forgiven += 1
            limit_s = self.limit_s
            silent_s = now - last[0] - lost_s
            if silent_s >= limit_s:
                if not self._another_waits_for_data(limit_s):
                    self._end(silent_s, limit_s)
                silent_s = 0.0
            self._set_dead_man(limit_s - silent_s)
            with self._counted():
                self._name_new_stacks()

    def _another_waits_for_data(self, within_s: float) -> bool:
        """Whether this rank may be waiting for one that said, not long ago, that its data does not come."""
        if self._last[2] == DATA_PHASE:  # its own data does not come either: each judges for itself
            return False
        with self._counted():
            stalls = [_newest_stall(path) for path in HEARTBEAT.find(self._folder).values()]
            return any(time.time() - stall["time"] < within_s for stall in stalls if stall)
        return False

    def _end(self, silent_s: float, limit_s: float) -> None:
        """Tells all it can, what matters most first, and ends the process. The dead man bounds the time it takes."""
        now = time.time()
        try:
            self._set_dead_man(self._report_s)
            with self._counted():
                self._name_after(now)
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            here = f"process {os.getpid()} on {socket.gethostname()}"
            self._put(f"{self._headline(silent_s)}\n{at}, limit {limit_s:.1f} s, {here}\n\nstacks of all threads:\n")
            with self._counted():
                self._put_stacks()
            ranks: list[RankState] = []
            with self._counted():
                ranks = self._look_at_ranks()
            with self._counted():
                self._on_hang(self._report(silent_s, limit_s, ranks))
            with self._counted():
                print(self._headline(silent_s), file=sys.stderr, flush=True)
            self._put_memory()
            with self._counted():
                self._wait_for(ranks, now - silent_s)
        finally:
            os._exit(EXIT_CODE)

    def _headline(self, silent_s: float) -> str:
        _, step, phase = self._last
        what = f"no progress for {silent_s:.0f} s in step {step} (phase {phase})"
        return f"hang: rank {self._rank}: {what}; {_place(self._path)}"

    def _report(self, silent_s: float, limit_s: float, ranks: list[RankState]) -> dict[str, Any]:
        _, step, phase = self._last
        file = str(self._path) if self._path else None
        stood = [asdict(rank) for rank in ranks]
        return {"step": step, "phase": phase, "silent_s": silent_s, "limit_s": limit_s, "file": file, "ranks": stood}

    def _put(self, text: str) -> None:
        """Into the file, or where it takes nothing to standard error."""
        for file in (self._file, STDERR):
            try:
                os.write(file, text.encode(errors="replace"))
                return
            except OSError:
                self.failures += 1

    def _put_stacks(self) -> None:
        before = os.fstat(self._file).st_size
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        if self._path is not None and os.fstat(self._file).st_size == before:  # it does not say that the disk is full
            self.failures += 1
            self._file, self._path = STDERR, None
            faulthandler.dump_traceback(file=STDERR, all_threads=True)

    def _look_at_ranks(self) -> list[RankState]:
        """Where all ranks stood; those on this host that are stopped are killed."""
        found = []
        for number, path in HEARTBEAT.find(self._folder).items():
            with self._counted():
                found.append(_read_rank(number, path))
        self._put("\n\nwhere each rank stood:\n" + "".join(f"{rank}\n" for rank, _ in found))
        for rank, events in found:
            self._put(f"\nlast events of rank {rank.rank}:\n" + "".join(f"{line}\n" for line in events))
        for rank, _ in found:
            with self._counted():
                _kill_stopped(rank)
            if rank.killed:
                self._put(f"\nrank {rank.rank} was stopped and could not end itself: killed\n")
        return [rank for rank, _ in found]

    def _wait_for(self, ranks: list[RankState], since: float) -> None:
        """The other ranks are about to find out too, and the end of this process would cut them off: they get the time
        to leave their stacks. Only one that does not is asked by a signal, because the answer to a signal looks at
        threads while they run, which may crash."""
        self._set_dead_man(self._report_s + 1.0)
        waiting = [rank for rank in ranks if _is_alive_elsewhere(rank)]
        deadline = time.monotonic() + self._report_s / 2
        while waiting and time.monotonic() < deadline:
            time.sleep(self._tick_s)
            waiting = [r for r in waiting if _is_alive_elsewhere(r) and not self._has_stacks(r, since)]
        for rank in waiting:
            with self._counted():
                _ask_for_stacks(rank)
        time.sleep(2 * self._tick_s if len(ranks) > 1 else 0.0)

    def _has_stacks(self, rank: RankState, since: float) -> bool:
        """Of this hang: a run before, or somebody's question, may have left others."""
        for dump in self._folder.glob(_dump_name(rank.rank)):
            with suppress(FileNotFoundError):  # it just got another name
                if dump.stat().st_size > 0 and dump.stat().st_mtime >= since:
                    return True
        return False

    def _put_memory(self) -> None:
        """Last and aside, because a hung device may block it."""
        helper = threading.Thread(target=self._memory, daemon=True)
        with self._counted():
            helper.start()
            helper.join(self._report_s / 4)

    def _memory(self) -> None:
        """Memory, and what NCCL recorded. All of it is kept on the host: the device is not asked."""
        with self._counted():
            self._put(f"\nmemory: {psutil.Process().memory_info().rss / 2**30:.3f} GiB resident\n")
        torch = sys.modules.get("torch")  # never imported here: whoever hangs may hold the import lock
        if torch is None or not torch.cuda.is_initialized():
            return
        with self._counted():
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(device):
                    self._put(f"\n{torch.cuda.memory_summary(device)}\n")
        with self._counted():
            recorder = getattr(torch._C, "_distributed_c10d", None)
            dump = getattr(recorder, "_dump_nccl_trace_json", None) or getattr(recorder, "_dump_fr_trace_json", None)
            if dump is not None:
                NCCL_TRACE.path(self._folder, self._rank).write_bytes(dump())


def _dump_name(rank: int, at: float | None = None) -> str:
    """Of a dump of that time, or as a pattern for all of the rank's."""
    stamp = "*" if at is None else time.strftime("%Y%m%dT%H%M%S", time.localtime(at))
    return stack_dumps(stamp).name(rank)


def _place(path: Path | None) -> str:
    return f"stacks {f'in {path}' if path else 'above'}; exit code {EXIT_CODE}"


def _remove_empty(path: Path) -> None:
    if path.stat().st_size == 0:
        path.unlink()


def _read_rank(number: int, path: Path) -> tuple[RankState, list[str]]:
    """What a rank's events say of it, and the last of them."""
    rank = RankState(number)
    start: dict[str, Any] = {}
    last: deque[str] = deque(maxlen=LAST_EVENTS)
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            last.append(line.rstrip())
            if '"pid"' in line and "pid" in (event := _parse(line)):  # at boot, and again when the run starts
                start = event
    newest = next(filter(None, map(_parse, reversed(last))), None)
    if newest is not None:
        rank.step, rank.event, rank.age_s = newest["step"], newest["event"], time.time() - newest["time"]
    rank.pid, rank.host = start.get("pid"), start.get("host")
    if rank.host == socket.gethostname() and rank.pid is not None:
        rank.state = _process_state(rank.pid, start["time"])
    return rank, list(last)


def _newest_stall(path: Path) -> dict[str, Any]:
    """What the rank last said of data that does not come; nothing where it goes on, or has judged already: one that is
    about to end may speak of its data until then."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().decode(errors="replace").splitlines()
    events = list(filter(None, map(_parse, reversed(lines))))
    stalls = list(takewhile(lambda event: event.get("event") in ("data_stall", "hang"), events))
    return stalls[0] if stalls and all(event["event"] == "data_stall" for event in stalls) else {}


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:  # cut off in the middle
        return {}
    return event if isinstance(event, dict) else {}


def _process_state(pid: int, seen_at: float) -> str:
    try:
        process = psutil.Process(pid)
        if process.create_time() > seen_at + 2.0:
            return "gone"  # its number is another process's now
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def _is_alive_elsewhere(rank: RankState) -> bool:
    """Whether a rank's process is another one of this host that still runs."""
    if rank.pid is None or rank.pid <= 1 or rank.pid == os.getpid() or rank.killed:
        return False
    return rank.state not in ("gone", "unknown") and psutil.pid_exists(rank.pid)


def _kill_stopped(rank: RankState) -> None:
    if _is_alive_elsewhere(rank) and rank.state in STOPPED:
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        rank.killed = True


def _ask_for_stacks(rank: RankState) -> None:
    """Asks by SIGUSR2, unless the process would die of the question."""
    assert rank.pid is not None
    fields = (line.split() for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines())
    caught = next((int(values[1], 16) for values in fields if values[0] == "SigCgt:"), 0)
    if caught >> (signal.SIGUSR2 - 1) & 1:
        os.kill(rank.pid, signal.SIGUSR2)
