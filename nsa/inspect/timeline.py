"""The timeline of a run, from the heartbeats of all ranks: starts, stalls, incidents, hangs, ends."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nsa.inspect.run_files import HeartbeatFile, number
from nsa.run_folder import Event

_BAD = ("incident", "data_stall", "hang")


@dataclass(frozen=True)
class Entry:
    """Equal reports of several ranks are one entry, with the time of the first report."""

    time: float
    step: int
    kind: str
    message: str
    is_bad: bool
    ranks: tuple[int, ...]


def timeline(heartbeats: Mapping[int, HeartbeatFile]) -> list[Entry]:
    """The entries, the newest first."""
    found: defaultdict[tuple[int, int, str, str, bool], list[tuple[float, int]]] = defaultdict(list)
    for rank, heartbeat in heartbeats.items():
        for event in heartbeat.events:
            if described := _describe(event):
                is_bad = event["event"] in _BAD
                found[event["attempt"], event["step"], *described, is_bad].append((event["time"], rank))
    entries = []
    for (_, step, kind, message, is_bad), reports in found.items():
        first, ranks = min(reports)[0], sorted({rank for _, rank in reports})
        entries.append(Entry(first, step, kind, message, is_bad, tuple(ranks)))
    return sorted(entries, key=lambda entry: entry.time, reverse=True)


def _describe(event: Event) -> tuple[str, str] | None:
    """Kind and message of an event; None if it does not belong to the timeline."""
    kind = event["event"]
    if kind == "incident":
        return str(event.get("kind", "incident")), str(event.get("message", ""))
    if kind in ("data_stall", "attention"):
        return kind.replace("_", " "), str(event.get("message", ""))
    if kind == "hang":
        return "hang", describe_hang(event)
    if kind == "save_wait":
        return "save wait", f"{number(event.get('seconds')):.1f} s for the save of step {event.get('writing')}"
    if kind == "preempted":
        return "preempted", "asked to stop; everything is saved"
    if kind == "start":
        checkpoint = event.get("from_checkpoint")
        host = f" on {event['host']}" if event.get("host") else ""
        return "start", f"resumes from {checkpoint}{host}" if checkpoint else f"from the beginning{host}"
    return ("end", "all steps are done") if kind == "end" else None


def describe_hang(event: Event) -> str:
    where = f" (phase {event['phase']})" if "phase" in event else ""
    dump = f"; stacks in {event['file']}" if event.get("file") else ""
    return f"no progress for {number(event.get('silent_s')):.0f} s in step {event['step']}{where}{dump}"
