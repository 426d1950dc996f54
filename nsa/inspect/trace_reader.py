"""Reads `trace_rank{r}.jsonl` of all ranks, as trace.py writes them. Needs no torch.

Damaged lines are skipped and counted. Of a file that several starts of a run wrote, the last start counts.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from nsa.errors import ConfigError
from nsa.files import open_regular
from nsa.record.schema import OLDER_TRACE, TRACE, reading_run

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass
class Step:
    """What one rank did in one step. Of its digest only a hash is kept: `values` reads it again."""

    number: int | None  # None: before the first step
    arrived: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)  # modules, by backward
    waiting: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # bytes, names: buckets not done
    buckets: int = 0
    missing: list[str] = field(default_factory=list)
    digest: int | None = None
    digest_at: tuple[Path, int] | None = None
    cleared: bool = False
    loss: Any = None
    done: bool = False

    def values(self) -> dict[str, str]:
        """The loss and the digest of each tensor, in the order in which they are computed. They are given in full: two
        that read the same are the same."""
        found = {} if self.loss is None else {"the loss": str(self.loss)}
        if self.digest_at is not None:
            path, offset = self.digest_at
            with open_regular(path) as file:
                file.seek(offset)
                event = json.loads(file.readline())
            gradients, parameters = event["gradients"], event["parameters"]
            names = [name for name in dict.fromkeys([*self.arrived, *gradients]) if name in gradients]
            digests = {f"gradient of {name}": gradients[name] for name in names}
            digests |= {f"parameter {name}": digest for name, digest in parameters.items()}
            for name, (total, norm, checksum) in digests.items():
                found[name] = f"sum {total}, norm {norm}, checksum {int(checksum):x}"
        return found


@dataclass
class RankTrace:
    """The last start of one rank. `steps` are in the order in which they were made."""

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
        """The last step that is complete."""
        return next((step for step in reversed(self.steps.values()) if step.done), None)

    @property
    def current(self) -> Step | None:
        """The step it was in when the trace stopped."""
        step = next(reversed(self.steps.values()), None)
        return None if step is None or step.done else step

    def add(self, event: dict[str, Any], path: Path, offset: int) -> None:
        """Adds the line that begins at `offset`. Raises KeyError, TypeError or ValueError if it is damaged."""
        moment = float(event["time"])
        match event["event"]:
            case "start":
                self.world_size, self.kinds = int(event["world_size"]), [str(kind) for kind in event["kinds"]]
                self.trainable = [intern(name) for name in event["trainable"]]
                self.started = self.started or moment
            case "note":
                self.notes.append(str(event["text"]))
            case "end":
                self.ended = True
            case "digest":
                step = self.before if event["before"] else self._step(event)
                step.digest, step.cleared = _hash_of_digest(event), bool(event["cleared"])
                step.digest_at = path, offset
            case "step_begin":
                self.steps.pop(int(event["step"]), None)  # the step is made again
                self.last = f"began step {self._step(event).number}"
            case "grad":
                self._step(event).arrived.append(intern(event["name"]))
                self.last = f"gradient of {event['name']}"
            case "module_bwd":
                self._step(event).reached.append(intern(event["name"]))
                self.last = f"backward came to {event['name']}"
            case "missing":
                self._step(event).missing = [intern(name) for name in event["names"]]
                self.last = f"end of backward in step {event['step']}"
            case "bucket":
                self._add_bucket(self._step(event), event)
            case "step_end":
                step = self._step(event)
                step.loss, step.done = event["loss"], True
                self.last = f"ended step {step.number}"
            case kind:
                raise ValueError(f"unknown event {kind!r}")
        self.last_time = moment

    def _add_bucket(self, step: Step, event: dict[str, Any]) -> None:
        index = int(event["index"])
        if event["done"] is None:
            step.waiting[index] = int(event["bytes"]), tuple(map(str, event["parameters"])) or ("?",)
            step.buckets += 1
        else:
            step.waiting.pop(index, None)
        self.last = f"bucket {index} {'started' if event['done'] is None else 'was done'}"

    def _step(self, event: dict[str, Any]) -> Step:
        number = int(event["step"])
        return self.steps.setdefault(number, Step(number))


def _hash_of_digest(event: dict[str, Any]) -> int:
    tensors = [sorted(event[kind].items()) for kind in ("gradients", "parameters")]
    for _, (total, norm, checksum) in (pair for kind in tensors for pair in kind):
        float(total), float(norm), int(checksum)  # raises if it is damaged
    return hash(repr(tensors))


def read_traces(folder: Path) -> tuple[list[RankTrace], int]:
    """A trace for every rank that left one, by rank, and how many lines were damaged. Raises ConfigError if there are
    none."""
    with reading_run(folder):
        if ranks := list(TRACE.find(folder)):
            traces, damaged = zip(*(_read(folder, rank) for rank in ranks), strict=True)
            return list(traces), sum(damaged)
    raise ConfigError(
        f"{folder}: holds no trace_rank*.jsonl: tracing is off by default. Start the run with "
        "telemetry.trace_grads=true, telemetry.trace_modules=true or telemetry.trace_buckets=true "
        "(also NSA_TRACE_GRADS=1, NSA_TRACE_MODULE_BWD=1, NSA_TRACE_DDP_BUCKETS=1)"
    )


def _read(folder: Path, rank: int) -> tuple[RankTrace, int]:
    trace, damaged = RankTrace(rank), 0
    for path in (OLDER_TRACE.path(folder, rank), TRACE.path(folder, rank)):
        offset = 0
        for line in open_regular(path) if path.exists() else ():
            try:
                event = json.loads(line) if line.strip() else None
                if event is not None:
                    if event["event"] == "start" and not event.get("continued"):
                        trace = RankTrace(rank)
                    trace.add(event, path, offset)
            except _UNREADABLE:
                damaged += 1
            offset += len(line)
    return trace, damaged
