"""What happened to a run, from the heartbeats of all ranks: starts, stalls, incidents, ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from nsa.inspect.run_files import Heartbeat, Row, number

BAD, NOTE = "bad", "note"


@dataclass(frozen=True)
class Happening:
    """One line of the story; what several ranks said alike is one, with the time of the first of them."""

    time: float
    step: int
    kind: str
    message: str
    weight: str  # BAD or NOTE
    attempt: int
    ranks: tuple[int, ...]


def happenings(beats: Mapping[int, Heartbeat]) -> list[Happening]:
    """The newest first."""
    found: dict[tuple[int, int, str, str], Happening] = {}
    for rank, beat in beats.items():
        for event in beat.events:
            told = _tell(event)
            if told is None:
                continue
            kind, message, weight = told
            key = (event["attempt"], event["step"], kind, message)
            before = found.get(key)
            ranks = (*(before.ranks if before else ()), *(() if before and rank in before.ranks else (rank,)))
            at = min(event["time"], before.time) if before else event["time"]
            found[key] = Happening(at, event["step"], kind, message, weight, event["attempt"], ranks)
    return sorted(found.values(), key=lambda happening: happening.time, reverse=True)


def _tell(event: Row) -> tuple[str, str, str] | None:
    """Kind, words and weight of an event that belongs to the story."""
    kind = event["event"]
    if kind == "incident":
        return str(event.get("kind", "incident")), str(event.get("message", "")), BAD
    if kind == "data_stall":
        return "data stall", str(event.get("message", "")), BAD
    if kind == "hang":
        silent = number(event.get("silent_s"))
        where = f" (phase {event['phase']})" if "phase" in event else ""
        dump = f"; stacks in {event['file']}" if event.get("file") else ""
        return "hang", f"no progress for {silent:.0f} s in step {event['step']}{where}{dump}", BAD
    if kind == "preempted":
        return "preempted", "asked to stop; everything is saved", NOTE
    if kind == "start":
        taken = event.get("from_checkpoint")
        where = f" on {event['host']}" if event.get("host") else ""
        return "start", f"goes on from {taken}{where}" if taken else f"from the beginning{where}", NOTE
    return ("end", "all steps are done", NOTE) if kind == "end" else None
