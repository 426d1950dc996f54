"""Draws a run in a terminal: one frame that fits its width and height, readable without colours.

If space is short, the frame drops older incidents first, then layers with healthy gates, then lines of the curve.
Control characters in text from files are escaped.
"""

import math
from collections.abc import Iterable
from textwrap import wrap

from rich.text import Text

from nsa.formatting import DASH, clock, exact, one_line, percent, seconds, short
from nsa.inspect.chart import TO_ASCII, bars, curve, split_bar
from nsa.inspect.health import MAX_COLLAPSED, is_unhealthy, unhealthy
from nsa.inspect.reading import FINISHED, PREEMPTED, RUNNING, RunView
from nsa.run_folder import ALL_LAYERS, BRANCHES, DISTANCE_BINS, GateStats

_STATUS_STYLE = {RUNNING: "bold green", FINISHED: "bold cyan", PREEMPTED: "yellow"}  # others are bold red
_BRANCH_STYLE = ("cyan", "magenta", "yellow")
_BRANCH_SIGNS = "█▓░"
_SHORTEST_CURVE, _TALLEST_CURVE = 4, 14
_WIDEST = 160
_MAX_WARNINGS = 5


def frame(view: RunView, width: int = 80, height: int = 24, *, plain: bool = False) -> Text:
    """At most `height` lines of at most `width` columns. `plain` draws with ASCII only."""
    width, height = max(20, min(width, _WIDEST)), max(4, height)
    head, numbers = _header(view, width), _numbers(view, width)
    lines = [*head, *_warnings(view, width, height - len(head) - len(numbers)), *numbers]
    selection = _selection(view, width)
    incidents = _incidents(view)
    gates = _gates(view, width)
    room = height - len(lines) - len(selection)
    below = min(2, len(incidents))
    most_gates = max(min(5, room - _SHORTEST_CURVE - below), (room - below) // 2)
    shown_gates = gates[: max(0, most_gates)]
    room -= len(shown_gates)
    tall = min(_TALLEST_CURVE, room - min(len(incidents), max(2, room // 4)))
    if tall >= _SHORTEST_CURVE:
        lines += _loss(view, width, tall)
        room -= tall
    if shown_gates and len(shown_gates) < len(gates):
        more = len(gates) - len(shown_gates) + 1
        shown_gates[-1] = Text(f"         ... {more} more lines; nsa report shows all layers", "dim")
    lines += [*shown_gates, *selection, *incidents[: max(0, room)]]
    return _fit(lines[:height], width, plain)


def _fit(lines: list[Text], width: int, plain: bool) -> Text:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        if plain:
            line.plain = line.plain.translate(TO_ASCII).encode("ascii", "replace").decode()
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _header(view: RunView, width: int) -> list[Text]:
    status = view.status
    first = Text.assemble(
        (one_line(view.name, 60), "bold"),
        "  ",
        (status.text, _STATUS_STYLE.get(status.kind, "bold red")),
        f"  {one_line(view.strategy, 20)} x {view.world_size}",
        f", attempt {view.attempts}" if view.attempts > 1 else "",
    )
    left = "" if view.left_s is None else f", {seconds(view.left_s)} left"
    progress = f"{view.step} of {view.steps} ({view.percent})" if view.steps > 0 else f"{DASH} of {DASH}"
    tail = f" step {progress}  elapsed {seconds(view.elapsed_s)}{left}"
    bar = max(0, min(40, width - len(tail) - 2))
    full = round(view.done * bar)
    second = Text.assemble(("━" * full, "green"), ("─" * (bar - full), "dim"), tail if bar else tail.lstrip())
    return [first, second]


def _warnings(view: RunView, width: int, height: int) -> list[Text]:
    """At most `height` lines, wrapped so that the whole reason of a failure is visible."""
    found = [f"! {one_line(line)}" for line in unhealthy(view)]
    if len(found) > _MAX_WARNINGS:
        found[_MAX_WARNINGS - 1 :] = [f"! and {len(found) - _MAX_WARNINGS + 1} more"]
    lines = [Text(part, "bold red") for line in found for part in wrap(line, width, subsequent_indent="  ")]
    if view.problems:
        named = "; ".join(f"{name}: {problem}" for name, problem in view.problems.items())
        lines.append(Text(f"? {one_line(named)}", "yellow"))
    if len(lines) > height:
        lines[max(0, height - 1) :] = [Text("  ... see run.log or nsa report for the rest", "bold red")][:height]
    return lines


def _numbers(view: RunView, width: int) -> list[Text]:
    validation = view.validation
    val = "-" if validation is None else f"{exact(validation[1])} at step {validation[0]}"
    bits = [] if validation is None else [("bits/byte", exact(validation[2], ".3f"))]
    index_kl = view.latest("index_kl")
    index = [("index_kl", exact(index_kl))] if math.isfinite(index_kl) else []
    pairs = [
        [("loss", exact(view.loss)), *index, ("validation", val), *bits, ("lr", exact(view.latest("lr"), ".2e")),
         ("grad", exact(view.latest("grad_norm"), ".3g"))],
        [("tokens/s", short(view.recent("toks_per_s"))), ("step", seconds(view.recent("step_s"))),
         ("data wait", percent(view.data_share)), ("save waits", seconds(view.save_wait_s)),
         ("memory", f"{exact(view.mem_gib, '.2f')} GiB")],
    ]  # fmt: skip
    return [line for some in pairs for line in _pairs(some, width)]


def _pairs(pairs: Iterable[tuple[str, str]], width: int) -> list[Text]:
    """Lines of names and values; a pair that does not fit begins a new line."""
    lines: list[Text] = []
    for name, value in pairs:
        part = Text.assemble((f"{name} ", "dim"), (value, "" if lines else "bold"))
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1].append("  ").append_text(part)
        else:
            lines.append(part)
    return lines


def _loss(view: RunView, width: int, height: int) -> list[Text]:
    drawn = curve(view.training.column("step"), view.training.column("loss"), width, height)
    return [Text(line, "green" if at < len(drawn) - 1 else "dim") for at, line in enumerate(drawn)]


def _gates(view: RunView, width: int) -> list[Text]:
    """A heading, the mean of all layers, then each layer, unhealthy layers first."""
    if not view.gates:
        return []
    # A stable sort keeps the order of the layers.
    layers = sorted(view.gates.items(), key=lambda item: (item[0] != ALL_LAYERS, not is_unhealthy(item[1])))
    bar = max(8, min(30, width - 58))
    heading = (f"gates at step {view.gate_samples.last_step}: ", "dim")
    legend = zip(_BRANCH_SIGNS, BRANCHES, _BRANCH_STYLE, strict=True)
    first = Text.assemble(heading, *((f"{sign} {name} ", style) for sign, name, style in legend))
    return [first, *(_gate_line(layer, gates, bar) for layer, gates in layers)]


def _gate_line(layer: str, gates: GateStats, bar: int) -> Text:
    name = one_line(layer, 60)
    line = Text(f"{name if len(name) <= 18 else name[:17] + '…':<18} ", "bold red" if is_unhealthy(gates) else "")
    for columns, sign, style in zip(split_bar(gates.shares, bar), _BRANCH_SIGNS, _BRANCH_STYLE, strict=True):
        line.append(sign * columns, style)
    cmp, sel, win = (exact(share * 100, "3.0f") for share in gates.shares)
    line.append(f" {cmp}/{sel}/{win} %  H {exact(gates.mean_entropy, '.2f')}")
    if gates.collapsed > 0:
        line.append(f"  collapsed {gates.collapsed:.0%}", "red" if gates.collapsed > MAX_COLLAPSED else "")
    return line


def _selection(view: RunView, width: int) -> list[Text]:
    found = view.selection
    if found is None:
        return []
    numbers = [
        ("selection", f"{short(found.mean_distinct)} blocks (most {found.max_distinct:.0f})"),
        ("forced", percent(found.share_forced)),
        ("agreement", percent(found.agreement)),
        *([] if found.mass is None else [("mass", percent(found.mass))]),
    ]
    used = [at for at, share in enumerate(found.distances) if share > 0]
    shares = found.distances[: max(used, default=0) + 1]
    shown = ((name, f"{bar}{share:.0%}") for name, bar, share in zip(DISTANCE_BINS, bars(shares), shares, strict=False))
    return [*_pairs(numbers, width), *_pairs([("distance", "in blocks"), *shown], width)]


def _incidents(view: RunView) -> list[Text]:
    lines = []
    for entry in view.timeline:
        ranks = "" if view.world_size < 2 else f" rank {','.join(map(str, entry.ranks[:4]))}"
        when = clock(entry.time, "%m-%d %H:%M:%S")
        text = one_line(f"{entry.kind}: {entry.message}")
        lines.append(Text(f"{when} step {entry.step}{ranks} {text}", "red" if entry.is_bad else "dim"))
    return lines
