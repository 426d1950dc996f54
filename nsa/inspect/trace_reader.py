"""`trace_rank{r}.jsonl` of all ranks, as trace.py writes them, read back.

Needs no torch. Lines that cannot be read are left out and counted; of a file that several attempts wrote, the last one
counts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from nsa.errors import ConfigError
from nsa.record.schema import TRACE
from nsa.record.trace_file import older_path, trace_path

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass
class Step:
    """What one rank did in one step. Of its tensors only a hash is kept: `values` reads them again."""

    number: int | None  # None: before the first one
    arrived: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)  # modules, by backward
    waiting: dict[int, dict[str, Any]] = field(default_factory=dict)  # buckets that are on their way
    buckets: int = 0
    missing: list[str] = field(default_factory=list)
    digest: int | None = None
    digest_at: tuple[Path, int] | None = None
    cleared: bool = False
    loss: Any = None
    done: bool = False

    def values(self) -> dict[str, Any]:
        """The loss and [sum, norm, checksum] of each tensor, in the order in which they come about."""
        found: dict[str, Any] = {} if self.loss is None else {"the loss": self.loss}
        if self.digest_at is not None:
            path, offset = self.digest_at
            with path.open("rb") as file:
                file.seek(offset)
                event = json.loads(file.readline())
            names = dict.fromkeys([*self.arrived, *event["gradients"]])
            found |= {f"gradient of {n}": event["gradients"][n] for n in names if n in event["gradients"]}
            found |= {f"parameter {n}": values for n, values in event["parameters"].items()}
        return found


@dataclass
class RankTrace:
    """The last attempt of one rank. `steps` are in the order in which they were made."""

    rank: int
    started: float = 0.0
    world_size: int = 1
    kinds: list[str] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    before: Step = field(default_factory=lambda: Step(None))
    steps: dict[int, Step] = field(default_factory=dict)
    ended: bool = False
    last: str = "started"
    last_time: float = 0.0

    @property
    def complete(self) -> Step | None:
        """The last step that was done to its end."""
        return next((step for step in reversed(self.steps.values()) if step.done), None)

    @property
    def current(self) -> Step | None:
        """The step it was in when the trace stopped."""
        step = next(reversed(self.steps.values()), None)
        return None if step is None or step.done else step

    def take(self, event: dict[str, Any], path: Path, offset: int) -> None:
        """Adds the line that begins at `offset`. Raises what wrong types raise."""
        kind, moment = event["event"], float(event["time"])
        if kind == "start":
            self.world_size, self.kinds = int(event["world_size"]), [str(kind) for kind in event["kinds"]]
            self.trainable = [intern(name) for name in event["trainable"]]
            self.started = self.started or moment
        elif kind == "note":
            self.notes.append(str(event["text"]))
        elif kind == "end":
            self.ended = True
        elif kind == "digest":
            step = self.before if event["before"] else self._step(event)
            step.digest, step.cleared = _hash_of_digest(event), bool(event["cleared"])
            step.digest_at = path, offset
        elif kind == "step_begin":
            self.steps.pop(int(event["step"]), None)  # made again
            self.last = f"began step {self._step(event).number}"
        else:
            self.last = _TAKE[kind](self._step(event), event)
        self.last_time = moment

    def _step(self, event: dict[str, Any]) -> Step:
        number = int(event["step"])
        return self.steps.setdefault(number, Step(number))


def _hash_of_digest(event: dict[str, Any]) -> int:
    tensors = [sorted(event[kind].items()) for kind in ("gradients", "parameters")]
    for _, (total, norm, checksum) in (pair for kind in tensors for pair in kind):
        float(total), float(norm), int(checksum)  # or it is damaged
    return hash(repr(tensors))


def _take_gradient(step: Step, event: dict[str, Any]) -> str:
    step.arrived.append(intern(event["name"]))
    return f"gradient of {event['name']}"


def _take_module(step: Step, event: dict[str, Any]) -> str:
    step.reached.append(intern(event["name"]))
    return f"backward came to {event['name']}"


def _take_missing(step: Step, event: dict[str, Any]) -> str:
    step.missing = [intern(name) for name in event["names"]]
    return f"end of backward in step {step.number}"


def _take_bucket(step: Step, event: dict[str, Any]) -> str:
    index = int(event["index"])
    if event["done"] is None:
        step.waiting[index] = {"bytes": int(event["bytes"]), "names": [str(n) for n in event["parameters"]] or ["?"]}
        step.buckets += 1
        return f"bucket {index} started"
    step.waiting.pop(index, None)
    return f"bucket {index} was done"


def _take_end(step: Step, event: dict[str, Any]) -> str:
    step.loss, step.done = event["loss"], True
    return f"ended step {step.number}"


_TAKE: dict[str, Callable[[Step, dict[str, Any]], str]] = {
    "grad": _take_gradient,
    "module_bwd": _take_module,
    "missing": _take_missing,
    "bucket": _take_bucket,
    "step_end": _take_end,
}


def read_traces(folder: Path) -> tuple[list[RankTrace], int]:
    """A trace for every rank that left one, by rank, and how many lines were damaged.

    Where there is none, an error says how to get them.
    """
    try:
        ranks = list(TRACE.find(folder))
        if ranks:
            traces, damaged = zip(*(_read(folder, rank) for rank in ranks), strict=True)
            return list(traces), sum(damaged)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}; give the out_dir of a run") from None
    raise ConfigError(
        f"{folder}: holds no trace_rank*.jsonl: tracing is off by default. Start the run with "
        "telemetry.trace_grads=true, telemetry.trace_modules=true or telemetry.trace_buckets=true "
        "(also NSA_TRACE_GRADS=1, NSA_TRACE_MODULE_BWD=1, NSA_TRACE_DDP_BUCKETS=1)"
    )


def _read(folder: Path, rank: int) -> tuple[RankTrace, int]:
    trace, damaged = RankTrace(rank), 0
    for path in (older_path(folder, rank), trace_path(folder, rank)):
        offset = 0
        for line in path.open("rb") if path.exists() else ():
            try:
                event = json.loads(line) if line.strip() else None
                if event is not None:
                    if event["event"] == "start" and not event.get("continued"):
                        trace = RankTrace(rank)
                    trace.take(event, path, offset)
            except _UNREADABLE:
                damaged += 1
            offset += len(line)
    return trace, damaged
