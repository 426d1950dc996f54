"""`nsa trace`: where each rank stood, which parameters got no gradient, and where the ranks first differ.

Reads the `trace_rank{r}.jsonl` of all ranks (see record/tracer.py), without torch. Damaged lines are skipped and
counted. If a run was started several times, only the last start is shown.
"""

import json
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from sys import intern
from typing import Any

from nsa.errors import ConfigError
from nsa.files import open_regular
from nsa.formatting import clock, one_line, seconds
from nsa.run_folder import OLDER_TRACE, TRACE, newest_boot, reading_run

Lines = Iterator[tuple[str, str]]  # label and text
ONE_START_S = 600.0  # the ranks of one start begin within this time; an older trace belongs to an earlier start
MOST_RANKS = 2**16
MOST, ENTRY = 8, " " * 11  # maximum number of list entries, and the label of each
GRADIENT, LOSS, STARTED = "gradient #", "the loss", "started"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_DAMAGED = (LookupError, ValueError, TypeError, AttributeError, RecursionError)


def _facts(event: dict[str, Any]) -> dict[str, str]:
    """An event as facts that can be compared between ranks by name. Equal digests mean equal tensors."""
    match event["event"]:
        case "grad" | "module_bwd" as kind:
            return {f"{GRADIENT if kind == 'grad' else 'backward #'}{event['order'] + 1}": event["name"]}
        case "bucket":
            return {f"bucket {event['index']} of step {event['step']}": STARTED if event["done"] is None else "done"}
        case "digest":
            kinds = {"gradient of": event["gradients"], "parameter": event["parameters"]}
            tensors = ((f"{kind} {name}", digest) for kind, found in kinds.items() for name, digest in found.items())
            return {name: f"sum {float(s)!r}, norm {float(n)!r}, checksum {int(c):x}" for name, (s, n, c) in tensors}
        case "step_end":
            return {LOSS: str(event["loss"])}
    return {}


class RankTrace:
    """The last start of one rank. `steps` has the facts of each step in their order; step 0 is before step 1."""

    def __init__(self, folder: Path, rank: int):
        self.rank, self.damaged, self.started, self.world_size, self.last_time = rank, 0, 0.0, 1, 0.0
        self.kinds, self.trainable, self.notes, self.ended = list[str](), list[str](), list[str](), False
        self.steps: dict[int, dict[str, str]] = {}
        for path in (OLDER_TRACE.path(folder, rank), TRACE.path(folder, rank)):
            for line in filter(bytes.strip, open_regular(path) if path.exists() else ()):
                try:
                    self._add(json.loads(line))
                except _DAMAGED:
                    self.damaged += 1
        self.complete = next((number for number, facts in reversed(self.steps.items()) if LOSS in facts), 0)
        self.current = next((n for n, facts in [*self.steps.items()][-1:] if LOSS not in facts), 0)  # 0: between steps
        self.facts = self.steps[self.current] if self.current else {}
        last = " ".join([*self.facts.items()][-1]) if self.facts else "began" if self.current else "outside a step"
        self.place = float("inf") if self.ended else self.current or self.complete + 0.5, len(self.facts), last

    def _add(self, event: dict[str, Any]) -> None:
        kind, self.last_time = event["event"], float(event["time"])
        if kind == "start":
            if not event.get("continued"):
                self.steps, self.notes, self.started, self.ended = {}, [], self.last_time, False
            self.kinds, self.trainable = ([*map(intern, event[field])] for field in ("kinds", "trainable"))
            if event["world_size"] > MOST_RANKS:
                raise ValueError
            self.world_size, self.started = int(event["world_size"]), self.started or self.last_time
        elif kind == "note":
            self.notes.append(str(event["text"]))
        elif kind == "end":
            self.ended = True
        else:
            facts = {intern(name): intern(value) for name, value in _facts(event).items()}  # ranks share the texts
            number = 0 if kind == "digest" and event["before"] else int(event["step"])
            if kind == "step_begin":
                self.steps.pop(number, None)  # the step runs again
            self.steps.setdefault(number, {}).update(facts)

    def arrived(self, number: int) -> list[str]:
        """Parameters in the order in which their gradients were accumulated."""
        return [value for name, value in self.steps.get(number, {}).items() if name.startswith(GRADIENT)]


def explain(folder: Path) -> Iterator[str]:
    """Summarizes the traces of a run in lines of at most 80 columns."""
    with reading_run(folder):
        found = [RankTrace(folder, rank) for rank in TRACE.find(folder)]
    if not found:
        remedy = "telemetry.trace_grads=true, telemetry.trace_modules=true or telemetry.trace_buckets=true"
        raise ConfigError(f"{folder}: holds no trace_rank*.jsonl; tracing is off by default. Start with {remedy}")
    # A rank of the newest start may not have traced yet.
    present = [trace for trace in found if trace.started >= newest_boot(folder, trace.rank).get("time", 0.0)]
    for label, text in _explain(present or found):
        yield from textwrap.wrap(one_line(text, 800), 80, initial_indent=f"{label:<9}", subsequent_indent=" " * 13)


def _explain(found: list[RankTrace]) -> Lines:
    newest, size = max((trace.started, trace.world_size) for trace in found)
    traces = [trace for trace in found if trace.started > newest - ONE_START_S and trace.world_size == size]
    kinds = max((trace.kinds for trace in traces), key=len)
    yield "trace", f"{len(traces)} of {size} ranks since {clock(newest)}: {', '.join(kinds) or 'nothing'}"
    if absent := set(range(size)) - {trace.rank for trace in traces}:
        yield "absent", f"{_listed('rank', absent)}: left no trace of this start"
    yield from _where(traces)
    if "grads" in kinds:
        yield from _missing(traces)
        yield from _compare("order", traces, lambda name: name.startswith(GRADIENT))
    if "buckets" in kinds:
        stuck = _grouped((name, t.rank) for t in traces for name, value in t.facts.items() if value == STARTED)
        lines = [f"{name} started and was never done on {_listed('rank', ranks)}" for name, ranks in stuck[:MOST]]
        yield from (("bucket", line) for line in lines or ["every bucket that started was done"])
    yield from _compare("values", traces, lambda name: name == LOSS or name.startswith(("gradient of", "parameter")))
    yield from (("note", note) for note in dict.fromkeys(note for trace in traces for note in trace.notes))
    if damaged := sum(trace.damaged for trace in found):
        yield "damage", f"{damaged} {'lines were' if damaged > 1 else 'line was'} damaged and left out"


def _where(traces: list[RankTrace]) -> Lines:
    """Where each rank stood, the slowest first. Ranks at the same place share an entry."""
    groups = sorted(_grouped((trace.place, trace) for trace in traces), key=lambda group: group[0])
    for place, members in groups[:MOST]:
        trace, at = members[0], members[0].last_time
        arrived, order = trace.arrived(trace.current), trace.arrived(trace.complete)
        done = f"{f'step {trace.complete}' if trace.complete else 'no step'} complete{', ended' if trace.ended else ''}"
        now = f", in step {trace.current} after {len(arrived)} of {len(order or trace.trainable)} gradients"
        behind = "; BEHIND THE OTHERS" if groups[0][0][:2] == place[:2] < groups[-1][0][:2] else ""
        yield "where", f"{_listed('rank', (t.rank for t in members))}: {done}{now if trace.current else ''}{behind}"
        if not trace.ended:
            yield "", f"last: {place[2]}, at {clock(at, '%H:%M:%S')}, {seconds(time.time() - at)} ago"
        if trace.current and order[: len(arrived)] == arrived != order:
            yield "", f"next would be the gradient of {order[len(arrived)]}"
    if len(groups) > MOST:
        yield "", f"and {len(groups) - MOST} other places, further on"


def _missing(traces: list[RankTrace]) -> Lines:
    """Parameters without a gradient, except in a step that stopped before its first gradient."""
    seen = ((t, n, set(t.arrived(n))) for t in traces for n in t.steps if t.arrived(n) or LOSS in t.steps[n])
    places = _grouped(sorted((name, (n, t.rank)) for t, n, arrived in seen for name in {*t.trainable} - arrived))
    for at, names in _grouped((tuple(at), name) for name, at in places)[:MOST]:
        layers = _grouped((_LAYER.sub("*", name, count=1), _LAYER.findall(name)[:1]) for name in names)
        numbers = {shape: [int(n) for found in each for n in found] for shape, each in layers}
        merged = (f"{shape} ({_listed('layer', found)})" if found else shape for shape, found in numbers.items())
        steps, ranks = _listed("step", (number for number, _ in at)), _listed("rank", (rank for _, rank in at))
        yield "missing", f"no gradient in {steps} on {ranks}: {', '.join(merged)}"
    if not places:
        yield "missing", "none: every trainable parameter got a gradient in every complete step"


def _compare(label: str, traces: list[RankTrace], is_wanted: Callable[[str], bool]) -> Lines:
    """The first fact that differs between the ranks that have it."""
    compared = []
    for number in sorted({number for trace in traces for number in trace.steps}):
        steps = [(trace.rank, trace.steps[number]) for trace in traces if number in trace.steps]
        names = [name for name in steps[0][1] if is_wanted(name) and all(name in facts for _, facts in steps)]
        for name in names:
            values = _grouped((facts[name], rank) for rank, facts in steps)
            if len(values) > 1:
                yield label, f"DIFFERS first {f'in step {number}' if number else 'before the first step'}: {name}"
                yield from ((ENTRY, f"{_listed('rank', ranks)}: {value}") for value, ranks in values[:MOST])
                return
        compared += [number] if number and names and len(steps) > 1 else []
    if compared:
        yield label, f"the same on all ranks in {_listed('step', compared)}"


def _listed(word: str, numbers: Iterable[int]) -> str:
    """For example "steps 1-3, 7" for 1, 2, 3, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(set(numbers))), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{word}{'s' if sum(map(len, runs)) > 1 else ''} {text}"


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.items())
