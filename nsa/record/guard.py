"""The guard: a small process that watches one rank from outside and ends it when it makes no progress.

`Watchdog` starts it as a child of the rank. The rank writes its progress into shared memory, which the guard reads once
a tick. The guard needs no torch, no installed package and nothing of the rank's interpreter, so it also acts when C
code in the rank never releases the GIL. On a hang, in this order:

1. It reads where every rank stood and kills ranks on this host that are stopped (SIGSTOP): they cannot end themselves.
2. It asks the watchdog thread of its rank for a report. If the thread does not answer (held GIL) or does not finish
   (dead file system), the guard reports: SIGUSR2 makes faulthandler write the stacks from C.
3. It gives the other ranks time to leave their stacks and asks those that do not.
4. It ends the rank with exit code 6, and by SIGKILL if that does not help.

Time in which the rank was stopped, or in which the guard itself did not run (a suspended machine), is not silence.
Every access to the run folder has a time limit. The guard starts with all signals blocked, and ends when the rank
closes the connection or is gone.
"""

import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nsa.files import LARGEST_LOG, open_regular, read_regular, regular, write_whole
from nsa.record.schema import HEARTBEAT, METRICS_FILE, format_event, make_event, parse_events, read_events, stack_dumps

EXIT_CODE = 6
BEAT = struct.Struct("<qdq32s")  # when (ns), limit in seconds, step, phase
DATA_PHASE = "data"  # as the training loop calls the wait for a batch
STDERR = 2
LAST_EVENTS = 5
LOOK_S = 3.0  # limit for reading the run folder
STOPPED = ("stopped", "tracing stop")

P = ParamSpec("P")
T = TypeVar("T")
Report = dict[str, Any]


class Silence:
    """How long a rank has made no progress. The caller provides the clock."""

    def __init__(self, now: float, longest_wait_s: float):
        self._now, self._longest_wait_s = now, longest_wait_s
        self._beat, self._seconds = b"", 0.0

    def measure(self, beat: bytes, now: float, *, stopped: bool) -> float:
        """Seconds without a new beat. A wait that took too long means that the guard did not run: clamped."""
        waited, self._now = min(now - self._now, self._longest_wait_s), now
        if beat != self._beat:
            self._beat, self._seconds = beat, 0.0
        elif not stopped:
            self._seconds += waited
        return self._seconds


class Guard:
    """The arguments are what `Watchdog` passes: the rank and its process, and the descriptors that both share."""

    def __init__(
        self,
        folder: str,
        rank: int,
        pid: int,
        floor_s: float,
        beat: int,
        link: int,
        stacks: int,
        path: str | None,
        exit_switch: int | None,
    ):
        self.folder, self.rank, self.pid = Path(folder), rank, pid
        self.tick_s, self.report_s = min(1.0, max(0.05, floor_s / 20)), report_s(floor_s)
        self.answer_s = min(10.0, max(0.5, floor_s / 6))
        self.beat = mmap.mmap(beat, BEAT.size, access=mmap.ACCESS_READ)
        self.link = socket.socket(fileno=link)
        self.stacks, self.path, self.exit_switch = stacks, Path(path) if path else None, exit_switch
        self.replies, self.is_left = b"", False
        self.written = self._position()

    def watch(self) -> None:
        """Returns when the rank no longer wants to be watched, is gone, or has been ended."""
        silence = Silence(time.monotonic(), 4 * self.tick_s)
        while self._wait(self.tick_s):
            beat = self.beat[:]
            _, limit_s, step, name = BEAT.unpack(beat)
            phase = name.rstrip(b"\0").decode(errors="replace")
            silent_s = silence.measure(beat, time.monotonic(), stopped=process_state(self.pid) in STOPPED)
            self._name_new_stacks()
            if silent_s < limit_s or time_limited(LOOK_S, data_is_missing_elsewhere, self.folder, phase, limit_s):
                continue
            self._handle_hang({"step": step, "phase": phase, "silent_s": silent_s, "limit_s": limit_s})
            return
        self._name_new_stacks()

    def _wait(self, seconds: float) -> bool:
        """Waits for a reply of the rank. False: it is gone, or no longer wants to be watched."""
        if select.select([self.link], [], [], seconds)[0]:
            reply = b""
            with suppress(OSError):
                reply = self.link.recv(4096)
            self.replies += reply
            self.is_left = not reply
        self.is_left |= os.getppid() != self.pid
        return not self.is_left

    def _handle_hang(self, report: Report) -> None:
        now = time.time()
        time_limited(LOOK_S, self._name_stacks, now)
        found = kill_stopped_ranks(self.folder)
        ranks = [rank for rank, _ in found]
        report |= {"file": str(self.path) if self.path else None, "ranks": [asdict(rank) for rank in ranks]}
        resident_gib = int(_process_status(self.pid).get("VmRSS", "0").split()[0]) / 2**20
        standing = format_ranks(found) + f"\nmemory: {resident_gib:.3f} GiB resident\n"
        self._send({"report": report, "standing": standing, "until": time.monotonic() + self.answer_s})
        if not self._is_recorded_by_thread():
            if self.is_left:  # it goes on after all, and ends by itself; a signal could crash it
                return
            time_limited(self.report_s, self._report, report, standing)
        others = [rank for rank in ranks if rank.pid != self.pid and rank.is_alive_here]
        if others:
            time_limited(self.report_s, self._wait_for_stacks, others, now - report["silent_s"])
        self._end_rank()

    def _is_recorded_by_thread(self) -> bool:
        """Waits until the watchdog thread is done or out of time."""
        began = time.monotonic()
        while b"done" not in self.replies and self._wait(self.tick_s):
            if time.monotonic() > began + (self.report_s if b"started" in self.replies else self.answer_s):
                break
        return b"recorded" in self.replies

    def _report(self, report: Report, standing: str) -> None:
        """What the thread would have written, as far as it is known outside; the most important first."""
        self._write(f"{headline(self.rank, report)}\nreported by the guard: the watchdog thread does not answer\n\n")
        if self._wait(0.0):
            self._ask_for_own_stacks()
        self._write(f"\n{standing}")
        heartbeat = HEARTBEAT.path(self.folder, self.rank)
        with suppress(OSError), open(heartbeat, "a", encoding="utf-8", opener=regular) as file:
            file.write(format_event(make_event("hang", self.rank, **report, reported_by="guard")))
        with suppress(OSError):
            events = reversed(read_events(self.folder, self.rank))
            steps = next((event["step"] for event in events if event["event"] in ("start", "step")), 0)
            end = {"status": "failed", "exit_code": EXIT_CODE, "reason": hang_reason(self.rank, report)}
            text = json.dumps({**end, "steps": steps, "rank": self.rank}, indent=2) + "\n"
            write_whole(self.folder / METRICS_FILE, text)
        os.write(STDERR, f"{headline(self.rank, report)}\n".encode())

    def _ask_for_own_stacks(self) -> None:
        before = self._position()
        ask_for_stacks(self.pid)
        deadline = time.monotonic() + self.answer_s
        while self._position() == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(self.tick_s)  # faulthandler writes many small pieces

    def _wait_for_stacks(self, ranks: list["RankState"], since: float) -> None:
        """The other ranks are about to find the hang too, and the end of this rank may cut them off: they get the time
        to leave their stacks. Only a rank that does not is asked by a signal, because the answer to a signal reads the
        stacks of threads while they run, which may crash."""
        deadline = time.monotonic() + self.report_s / 2
        while ranks and time.monotonic() < deadline:
            time.sleep(self.tick_s)
            ranks = [rank for rank in ranks if process_state(rank.pid) != "gone"]
            ranks = [rank for rank in ranks if not has_stacks(self.folder, rank.rank, since)]
        for rank in ranks:
            ask_for_stacks(rank.pid)
        time.sleep(2 * self.tick_s)

    def _end_rank(self) -> None:
        self._send({"end": True})
        if self.exit_switch is not None:
            with suppress(BrokenPipeError):  # the thread was faster
                os.write(self.exit_switch, b"x")
        deadline = time.monotonic() + 2.0
        while self._wait(self.tick_s):
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                return

    def _send(self, message: dict[str, Any]) -> None:
        """To the watchdog thread of the rank, which may not read."""
        self.link.settimeout(2.0)
        with suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self.stacks, text.encode(errors="replace"))

    def _position(self) -> int:
        """End of what was written so far, by the rank too. Does not ask the file system, which may hang."""
        return 0 if self.path is None else os.lseek(self.stacks, 0, os.SEEK_CUR)

    def _name_new_stacks(self) -> None:
        """Stacks that a signal asked for give the file their time."""
        if self._position() != self.written:
            time_limited(LOOK_S, self._name_stacks, time.time())

    def _name_stacks(self, now: float) -> None:
        if self.path is not None:
            self.written = self._position()
            target = self.folder / dump_name(self.rank, now)
            if not target.exists():
                self.path = self.path.rename(target)


def report_s(floor_s: float) -> float:
    """A report that takes longer is cut off."""
    return min(20.0, max(1.0, floor_s))


def time_limited(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Its result, or None if it fails or takes longer, as on a dead file system."""
    results: list[T] = []

    def work() -> None:
        with suppress(Exception):
            results.append(function(*args, **kwargs))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def headline(rank: int, report: Report) -> str:
    what = f"no progress for {report['silent_s']:.0f} s in step {report['step']} (phase {report['phase']})"
    place = f"in {report['file']}" if report["file"] else "above"
    return f"hang: rank {rank}: {what}; stacks {place}; exit code {EXIT_CODE}"


def hang_reason(rank: int, report: Report) -> str:
    """Why the run ended and where to look, for metrics.json."""
    where = "waiting for data" if report["phase"] == DATA_PHASE else f"phase {report['phase']}"
    stacks = Path(report["file"]).name if report["file"] else "the log"
    return (
        f"rank {rank}: no progress for {report['silent_s']:.0f} s in step {report['step']} ({where}); {stacks} shows "
        "where every rank stood; the same command goes on from the last checkpoint"
    )


def dump_name(rank: int, at: float | None = None) -> str:
    """Of a dump of that time, or as a pattern for all of the rank's."""
    stamp = "*" if at is None else time.strftime("%Y%m%dT%H%M%S", time.localtime(at))
    return stack_dumps(stamp).name(rank)


def has_stacks(folder: Path, rank: int, since: float) -> bool:
    """Of this hang: an earlier run or an earlier SIGUSR2 may have left others."""
    for dump in folder.glob(dump_name(rank)):
        with suppress(FileNotFoundError):  # it was just renamed
            if dump.stat().st_size > 0 and dump.stat().st_mtime >= since:
                return True
    return False


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

    @property
    def is_alive_here(self) -> bool:
        return not self.killed and self.state not in ("gone", "unknown")

    def kill_if_stopped(self) -> None:
        if self.pid is not None and self.state in STOPPED:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                self.killed = True


def read_ranks(folder: Path) -> list[tuple[RankState, list[str]]]:
    """Every rank that left events, and the last of them."""
    found = []
    for rank, path in HEARTBEAT.find(folder).items():
        with suppress(OSError, ValueError, TypeError):  # one damaged file hides no other rank
            found.append(_read_rank(rank, path))
    return found


def kill_stopped_ranks(folder: Path) -> list[tuple[RankState, list[str]]]:
    """What `read_ranks` finds, after ranks on this host that are stopped (SIGSTOP) were killed."""
    found = time_limited(LOOK_S, read_ranks, folder) or []
    for rank, _ in found:
        rank.kill_if_stopped()
    return found


def format_ranks(found: list[tuple[RankState, list[str]]]) -> str:
    text = "\nwhere each rank stood:\n" + "".join(f"{rank}\n" for rank, _ in found)
    for rank, events in found:
        text += f"\nlast events of rank {rank.rank}:\n" + "".join(f"{line}\n" for line in events)
    return text + "".join(f"\n{line}\n" for line in killed_lines(found))


def killed_lines(found: list[tuple[RankState, list[str]]]) -> list[str]:
    return [f"rank {rank.rank} was stopped and could not end itself: killed" for rank, _ in found if rank.killed]


def data_is_missing_elsewhere(folder: Path, phase: str, within_s: float) -> bool:
    """Whether this rank may be waiting for one that recently reported missing data: that one is the one to judge."""
    if phase == DATA_PHASE:  # its own data is missing too: each rank judges for itself
        return False
    return any(time.time() - _newest_stall(path) < within_s for path in HEARTBEAT.find(folder).values())


def _read_rank(rank: int, path: Path) -> tuple[RankState, list[str]]:
    lines = read_regular(path, LARGEST_LOG).decode(errors="replace").splitlines()
    last = lines[-LAST_EVENTS:]
    state = RankState(rank)
    for event in parse_events(last)[-1:]:
        state.step, state.event, state.age_s = event["step"], event["event"], time.time() - event["time"]
    starts = [event for event in parse_events(line for line in lines if '"pid"' in line) if "pid" in event]
    for start in starts[-1:]:  # the newest of `boot` and `start`
        state.pid, state.host = int(start["pid"]), start.get("host")
        if state.host == socket.gethostname():
            state.state = process_state(state.pid, start["time"])
    return state, last


def _newest_stall(path: Path) -> float:
    """When the rank last reported missing data. Minus infinity where it goes on, or has found a hang: until its end
    its other threads may still report missing data."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**16))
        events = parse_events(file.read().splitlines())
    stalls = list(takewhile(lambda event: event["event"] in ("data_stall", "hang"), reversed(events)))
    if not stalls or any(event["event"] == "hang" for event in stalls):
        return -math.inf
    return float(stalls[0]["time"])


def _process_status(pid: int | None) -> dict[str, str]:
    """The fields of /proc/PID/status; none where the process is gone or there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def process_state(pid: int | None, seen_at: float = math.inf) -> str:
    """Such as "sleeping" or "stopped". A process that started after `seen_at` is another one with the same number."""
    if not Path("/proc/self").exists():
        return "unknown"
    state = _process_status(pid).get("State", "").partition("(")[2].rstrip(")")
    with suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if booted + ticks / os.sysconf("SC_CLK_TCK") > seen_at + 2.0:
            return "gone"
    return "gone" if state in ("", "zombie", "dead") else state


def ask_for_stacks(pid: int | None) -> None:
    """By SIGUSR2, unless the process does not handle it and would die."""
    caught = int(_process_status(pid).get("SigCgt", "0"), 16)
    if pid is not None and caught >> (signal.SIGUSR2 - 1) & 1:
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR2)


def main() -> None:
    Guard(**json.loads(sys.argv[1])).watch()
    os._exit(0)  # a thread that a dead file system holds is not waited for
