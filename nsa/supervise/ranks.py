"""Reads the state of every rank of a run: its last events, and the state of its process.

This module never signals a process: a run folder may come from anywhere, and its files may name any process id.
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from nsa.files import LARGEST_LOG, read_regular
from nsa.run_folder import HEARTBEAT, Event, format_event, parse_events

LAST_EVENTS = 5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankState:
    """`boot` is the newest event `boot`, `events` are the newest events, `age_s` is the time since the last event."""

    rank: int
    boot: Event
    events: list[Event]
    age_s: float
    process: str  # psutil's status such as "sleeping" or "stopped", or "gone" or "unknown"

    def to_dict(self) -> dict[str, Any]:
        last, boot = self.events[-1], self.boot
        known = {"rank": self.rank, "step": last["step"], "event": last["event"], "age_s": self.age_s}
        return {**known, "pid": boot.get("pid"), "host": boot.get("host"), "state": self.process}

    @property
    def is_hung(self) -> bool:
        return bool(self.events[-1]["event"] == "hang")

    @property
    def is_stalled(self) -> bool:
        """Whether the rank waits for data. False after a hang, since other threads report stalls until the exit."""
        newest = [e["event"] for e in takewhile(lambda e: e["event"] in ("data_stall", "hang"), reversed(self.events))]
        return bool(newest) and "hang" not in newest

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended or is stopped."""
        return self.process in ("gone", psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def read_ranks(folder: Path, size: int) -> list[RankState]:
    """Every rank of `size` that has written events; a larger world may have left files of others. Ranks with a damaged
    file are skipped."""
    found = []
    for rank, path in HEARTBEAT.find(folder).items():
        with suppress(OSError, ValueError, TypeError, KeyError, IndexError):
            if rank < size:
                found.append(_read_rank(rank, path))
    return found


def format_ranks(ranks: list[RankState]) -> str:
    line = "rank {rank}: step {step}, event {event}, {age_s:.0f} s ago; process {pid} on {host}: {state}\n"
    text = "where each rank stood:\n" + "".join(line.format(**rank.to_dict()) for rank in ranks)
    for rank in ranks:
        text += f"\nlast events of rank {rank.rank}:\n" + "".join(map(format_event, rank.events[-LAST_EVENTS:]))
    return text


def identify(pid: int) -> dict[str, Any]:
    """Fields that identify a process uniquely, without the time of day, which may jump."""
    found: dict[str, Any] = {"pid": pid, "host": socket.gethostname(), "boot_id": None, "start_ticks": None}
    with suppress(OSError):  # the process is gone, or this is not Linux
        found["boot_id"] = BOOT_ID.read_text().strip()
        found["start_ticks"] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return found


def _read_rank(rank: int, path: Path) -> RankState:
    lines = read_regular(path, LARGEST_LOG).splitlines()
    boot = next(iter(parse_events(line for line in reversed(lines) if b'"boot"' in line)), {})
    events = parse_events(lines[-100:])
    # The monotonic clocks of two processes can be compared if the same kernel runs both.
    is_same_clock = boot.get("boot_id") is not None and boot["boot_id"] == identify(os.getpid())["boot_id"]
    age_s = time.monotonic() - float(events[-1]["clock"]) if is_same_clock else time.time() - events[-1]["time"]
    return RankState(rank, boot, events, age_s, _process_state(boot))


def _process_state(boot: Event) -> str:
    if boot.get("start_ticks") is None or boot.get("host") != socket.gethostname():
        return "unknown"
    now = identify(int(boot["pid"]))
    if all(boot[key] == value for key, value in now.items()):
        with suppress(psutil.Error):
            return psutil.Process(now["pid"]).status()
    return "gone"
