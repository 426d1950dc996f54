"""What the traces of all ranks show: who stopped where, what never arrived, who differs. Needs no torch."""

import math
import re
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from nsa.inspect.trace_reader import RankTrace, Step, read_traces
from nsa.record.numbers import clock, one_line, seconds

Lines = Iterator[tuple[str, str]]  # a label and a text, to be wrapped
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_ONE_START_S = 600.0  # the ranks of one start come this close together; an older trace is of an earlier one
_MOST = 8  # lines of one kind, so that all of it fits on a screen
_WIDTH = 80
_LABEL = 9
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def explain(folder: Path) -> Iterator[str]:
    """What the traces of a run show, as lines of at most 80 columns."""
    for label, text in _explain(folder):
        indent = " " * (len(text) - len(text.lstrip()))
        yield from textwrap.wrap(
            one_line(text),
            _WIDTH,
            initial_indent=f"{label:<{_LABEL}}{indent}",
            subsequent_indent=" " * _LABEL + indent + "  ",
            break_on_hyphens=False,
        )


def _explain(folder: Path) -> Lines:
    found, damaged = read_traces(folder)
    newest = max(trace.started for trace in found)
    traces = [trace for trace in found if trace.started > newest - _ONE_START_S]
    size = max(trace.world_size for trace in traces)
    traces = [trace for trace in traces if trace.rank < size]
    kinds = {"grads": "gradients", "modules": "modules", "buckets": "buckets"}
    traced = [word for kind, word in kinds.items() if any(kind in trace.kinds for trace in traces)]
    yield "trace", f"{len(traces)} of {size} ranks since {clock(newest)}: {', '.join(traced) or 'nothing'}"
    absent = sorted(set(range(size)) - {trace.rank for trace in traces})
    if absent:
        yield "absent", f"{_ranks(absent)}: left no trace of this start"
    yield from _where(traces, time.time())
    if "gradients" in traced:
        yield from _missing(traces)
        yield from _order(traces)
    if "buckets" in traced:
        yield from _buckets(traces)
    yield from _values(traces)
    for note in dict.fromkeys(note for trace in traces for note in trace.notes):
        yield "note", note
    if damaged:
        yield "damage", f"{damaged} {'lines were' if damaged > 1 else 'line was'} damaged and left out"


def _where(traces: list[RankTrace], now: float) -> Lines:
    """Where each rank stood. Ranks that stood alike are one entry, the furthest behind first."""

    def place(trace: RankTrace) -> tuple[float, ...]:
        done, step = trace.complete, trace.current
        if trace.ended or step is None or step.number is None:
            return (math.inf if trace.ended else done.number if done and done.number else 0, math.inf)
        return (step.number, len(step.arrived), len(step.reached), step.buckets, -len(step.waiting))

    groups = sorted(_grouped_by(traces, lambda trace: (place(trace), trace.last)))
    for (at, last), members in groups[:_MOST]:
        trace = members[0]
        done, step = trace.complete, trace.current
        text = f"{_ranks(member.rank for member in members)}: "
        text += f"step {done.number} complete" if done else "no step complete"
        text += f", in step {step.number}{_how_far(trace, step)}" if step else ""
        text += ", ended" if trace.ended else "; BEHIND THE OTHERS" if groups[0][0][0] == at < groups[-1][0][0] else ""
        yield "where", text
        if not trace.ended:
            moment = max(member.last_time for member in members)
            yield "", f"last: {last}, at {clock(moment, '%H:%M:%S')}, {seconds(now - moment)} ago"
            yield from _what_next(trace, step)
    if len(groups) > _MOST:
        yield "", f"and {len(groups) - _MOST} other places, further on"


def _how_far(trace: RankTrace, step: Step) -> str:
    if "grads" not in trace.kinds:
        return ""
    expected = len(trace.complete.arrived) if trace.complete else len(trace.trainable)
    of = f" of {expected}" if len(step.arrived) <= expected else ""
    return f" after {len(step.arrived)}{of} gradients"


def _what_next(trace: RankTrace, step: Step | None) -> Lines:
    """What a rank that stopped in a step was at, and what it would have done next."""
    if step is None:
        return
    if step.reached:
        yield "", f"backward came to {step.reached[-1]} and to no module after it"
    count, order = len(step.arrived), trace.complete.arrived if trace.complete else []
    waited_for = set(trace.trainable) - set(step.arrived)
    if count < len(order) and order[:count] == step.arrived:
        yield "", f"next would be the gradient of {order[count]}"
    elif not order and step.arrived and waited_for:
        yield "", "did not come yet: " + ", ".join(_merged(waited_for)[:_MOST])


def _missing(traces: list[RankTrace]) -> Lines:
    """Parameters without a gradient; those of the same ranks and steps are one entry."""
    where: dict[str, dict[int, int]] = defaultdict(dict)
    for trace in traces:
        for name, times in Counter(n for step in trace.steps.values() for n in step.missing).items():
            where[name][trace.rank] = times
    done = {trace.rank: sum(step.done for step in trace.steps.values()) for trace in traces}
    if not where and any(done.values()):
        yield "missing", "none: every trainable parameter got a gradient in every complete step"
    for at, names in _grouped_by(where, lambda name: tuple(where[name].items()))[:_MOST]:
        when = "in any step" if all(n >= done[rank] for rank, n in at) else f"in {max(n for _, n in at)} steps"
        on = "" if len(traces) == 1 else " on any rank" if len(at) == len(traces) else f" on {_ranks(r for r, _ in at)}"
        yield "missing", f"no gradient {when}{on}:"
        merged = _merged(names)
        for name in merged[:_MOST]:
            yield "", f"  {name}"
        if len(merged) > _MOST:
            yield "", f"  and {len(merged) - _MOST} more"


def _order(traces: list[RankTrace]) -> Lines:
    shared = _shared_steps(traces)
    for steps in shared:
        for place, names in enumerate(zip(*(step.arrived for step in steps.values()), strict=False)):
            if len(set(names)) > 1:
                number = next(iter(steps.values())).number
                yield "order", f"of gradients DIFFERS first in step {number}, gradient {place + 1}:"
                for name, found in _grouped_by(zip(steps, names, strict=True), lambda m: m[1])[:_MOST]:
                    yield "", f"  {_ranks(rank for rank, _ in found)}: {name}"
                return
    if shared:
        yield "order", "of gradients is the same on all ranks"


def _buckets(traces: list[RankTrace]) -> Lines:
    current = [(trace.rank, trace.current) for trace in traces if trace.current]
    stuck = [(rank, step.number, *waiting) for rank, step in current for waiting in step.waiting.items()]
    for (number, index, (size, names)), members in _grouped_by(stuck, lambda s: s[1:])[:_MOST]:
        ranks = _ranks(rank for rank, *_ in members)
        yield "bucket", f"bucket {index} of step {number} started and was never done on {ranks}"
        yield "", f"  {size / 2**20:.2f} MiB, {len(names)} parameters: {names[0]} to {names[-1]}"
    last = next((trace.complete for trace in traces if trace.complete), None)
    if not stuck and last and last.buckets:
        yield "bucket", f"every bucket that started was done; {last.buckets} in step {last.number}"


def _values(traces: list[RankTrace]) -> Lines:
    """The first loss or tensor that is not the same on all ranks."""
    same: list[Step] = []
    for steps in [{trace.rank: trace.before for trace in traces}, *_shared_steps(traces)]:
        ends = {rank: step for rank, step in steps.items() if step.done or step.number is None}
        digests = {step.digest for step in ends.values() if step.digest is not None}
        if len(digests) > 1 or len({str(step.loss) for step in ends.values()}) > 1:
            yield from _difference(ends)
            return
        same += [step for step in ends.values() if step.done][:1]
    if len(traces) > 1 and same:
        what = "the loss is" if same[-1].digest is None else "loss, gradients and parameters are"
        yield "values", f"{what} the same on all ranks, steps {same[0].number} to {same[-1].number}"
    cleared = sorted({s.number for t in traces for s in t.steps.values() if s.cleared and s.number is not None})
    if cleared:
        yield "values", f"of gradients are not known in skipped steps: {_numbers(cleared)}"


def _difference(steps: dict[int, Step]) -> Lines:
    found = {rank: step.values() for rank, step in steps.items()}

    def of_ranks(name: str) -> dict[int, str]:
        """Of those that recorded their tensors."""
        recorded = (rank for rank in found if name in found[rank] or steps[rank].digest is not None)
        return {rank: found[rank].get(name, "none") for rank in recorded}

    names = dict.fromkeys(name for values in found.values() for name in values)
    different = [name for name in names if len(set(of_ranks(name).values())) > 1]
    number = next(iter(steps.values())).number
    at = "before the first step" if number is None else f"in step {number}"
    yield "values", f"DIFFER across ranks first {at}: {different[0]}"
    shown = of_ranks(different[0])
    for value, ranks in _grouped_by(shown, lambda rank: shown[rank])[:_MOST]:
        yield "", f"  {_ranks(ranks)}: {value}"
    if len(different) > 1:
        yield "", f"  and {len(different) - 1} others there"


def _shared_steps(traces: list[RankTrace]) -> list[dict[int, Step]]:
    """By number: steps that at least two ranks were in, by rank."""
    numbers = Counter(number for trace in traces for number in trace.steps)
    return [
        {trace.rank: trace.steps[number] for trace in traces if number in trace.steps}
        for number in sorted(n for n, ranks in numbers.items() if ranks > 1)
    ]


def _merged(names: Iterable[str]) -> list[str]:
    """Names that differ in a layer's number only, as one with all of its numbers."""
    shapes = _grouped_by(sorted(names), lambda name: _LAYER.sub("*", name, count=1))
    return [
        members[0]
        if len(members) == 1
        else f"{shape} ({len(members)}: {_numbers(int(_LAYER.findall(m)[0]) for m in members)})"
        for shape, members in shapes
    ]


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {_numbers(listed)}"


def _numbers(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _grouped_by(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())
