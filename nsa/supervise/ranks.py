"""Reads the state of every rank of a run: its last events, and the state of its process.

This module never signals a process: a run folder may come from anywhere, and its files may name any process id.
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from nsa.files import open_regular
from nsa.run_folder import HEARTBEAT, Event, format_event, newest_boot, parse_events

LAST_EVENTS = 5
TAIL = 2**18  # bytes of a heartbeat that hold its newest events
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankState:
    """`events` are the newest events. The rest is read on demand: the heartbeat of a long run is large, and a rank that
    waits for others looks at the newest events of all ranks once per second."""

    rank: int
    path: Path
    events: list[Event]

    @cached_property
    def boot(self) -> Event:
        return newest_boot(self.path.parent, self.rank)

    @cached_property
    def age_s(self) -> float:
        """The time since the last event. Monotonic clocks can be compared if the same kernel runs both processes."""
        boot_id = self.boot.get("boot_id")
        with suppress(KeyError, TypeError, ValueError):
            if boot_id is not None and boot_id == identify(os.getpid())["boot_id"]:
                return time.monotonic() - float(self.events[-1]["clock"])
        return time.time() - float(self.events[-1]["time"])

    @cached_property
    def process(self) -> str:
        """psutil's status such as "sleeping" or "stopped", or "gone" or "unknown"."""
        with suppress(KeyError, TypeError, ValueError):
            if self.boot["start_ticks"] is not None and self.boot["host"] == socket.gethostname():
                now = identify(int(self.boot["pid"]))
                if any(self.boot[key] != value for key, value in now.items()):
                    return "gone"
                try:
                    return psutil.Process(now["pid"]).status()
                except psutil.Error:
                    return "gone"
        return "unknown"

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
    """Every rank of `size` that has written events; a larger world may have left files of others. Ranks without a
    readable event are skipped."""
    found = []
    for rank, path in HEARTBEAT.find(folder).items():
        with suppress(OSError):
            if rank < size:
                with open_regular(path) as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                    found.append(RankState(rank, path, parse_events(file)))
    return [state for state in found if state.events]


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
