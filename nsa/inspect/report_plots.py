"""The figures of a report, each with a stable id, a title and words for those who cannot see it."""

import warnings
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from nsa.inspect.reading import RunView, smoothing
from nsa.inspect.run_files import Numbers
from nsa.inspect.svg import Curve, Plot, draw, heat_height, heat_map
from nsa.inspect.timeline import BAD
from nsa.record.numbers import short
from nsa.record.schema import ALL_LAYERS, BRANCHES, DISTANCE_BINS, GATES, SELECTION, TRAINING, SelectionStats

WIDTH, HEIGHT = 400, 230
WIDE, WIDE_HEIGHT = 1180, 340
MOST_COLUMNS = 100  # of a heat map
MOST_MARKS = 40
MAX_ENTROPY = float(np.log(3.0))


def figure(
    identity: str, title: str, about: str, drawings: Sequence[tuple[str, int, int, str]], legend: str = ""
) -> str:
    """`drawings` are (class, width, height, SVG): the page shows the one that fits its width."""
    svgs = []
    for at, (style, width, height, inside) in enumerate(drawings):
        name = f"{identity}-{at}"
        svgs.append(
            f'<svg class="{style}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}-t {name}-d">'
            f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(about)}</desc>{inside}</svg>'
        )
    wide = " full" if len(drawings) > 1 else ""
    return (
        f'<figure class="card{wide}" id="{identity}"><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>'
        f'{"".join(svgs)}<p class="about">{escape(about)}</p></figure>'
    )


def missing(identity: str, title: str, why: str) -> str:
    return (
        f'<figure class="card" id="{identity}"><figcaption><h3>{escape(title)}</h3></figcaption>'
        f'<p class="missing" role="note">Nothing to show: {escape(why)}</p></figure>'
    )


def _lines(view: RunView, identity: str, title: str, about: str, plot: Plot, file: str = TRAINING.file) -> str:
    inside = draw(plot, WIDTH, HEIGHT)
    if not inside:
        return missing(identity, title, _why(view, file))
    drawings = [("", WIDTH, HEIGHT, inside)]
    if identity == "plot-loss":
        drawings = [("narrow", WIDTH, HEIGHT, inside), ("wide", WIDE, WIDE_HEIGHT, draw(plot, WIDE, WIDE_HEIGHT))]
    legend = _legend([(c.name, c.style) for c in plot.curves if np.isfinite(c.y).any()])
    return figure(identity, title, about, drawings, legend)


def _legend(names: list[tuple[str, str]]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(f'<li><i class="key {style}"></i>{escape(name)}</li>' for name, style in names)
    return f'<ul class="legend">{items}</ul>'


def _why(view: RunView, file: str) -> str:
    return f"{file} {view.problems[file]}" if file in view.problems else f"{file} holds no such values yet"


def training_figures(view: RunView) -> list[str]:
    column = view.training.column
    x = column("step")

    def simple(identity: str, title: str, about: str, plot: Plot) -> str:
        return _lines(view, identity, title, about, plot)

    marks = [(float(h.step), f"step {h.step}: {h.kind}") for h in view.timeline if h.weight == BAD][:MOST_MARKS]
    loss, val = column("loss"), column("val_loss")
    at = np.isfinite(val)
    curves = [
        Curve("loss of a step", x, loss, "c1 faint"),
        Curve("smoothed", x, smooth(loss, smoothing(len(loss))), "c1"),
        Curve("validation", x[at], val[at], "c2", dots=True),
    ]
    return [
        simple("plot-loss", "Loss", _loss_words(view), Plot(curves, "nats per token", marks=marks, may_be_log=True)),
        simple("plot-lr", "Learning rate", "As the schedule set it.", Plot([Curve("lr", x, column("lr"))], "", True)),
        simple(
            "plot-grad-norm",
            "Gradient norm",
            "Before clipping. Spikes are kept.",
            Plot([Curve("norm", x, column("grad_norm"), "c3")], "", from_zero=True, may_be_log=True),
        ),
        simple(
            "plot-bits",
            "Validation, bits per byte",
            "Comparable between tokenizers.",
            Plot([Curve("validation", x[at], column("val_bits_per_byte")[at], "c2", dots=True)], "bits per byte"),
        ),
    ]


def speed_figures(view: RunView) -> list[str]:
    column = view.training.column
    x = column("step")
    times = [
        Curve("step", x, column("step_s"), "c1"),
        Curve("waiting for data", x, column("data_wait_s"), "c2"),
        Curve("waiting for a save", x, column("save_wait_s"), "c3"),
    ]
    rate = column("toks_per_s")
    even = smooth(rate, smoothing(len(rate)))
    speeds = [Curve("of a step", x, rate, "c1 faint"), Curve("smoothed", x, even, "c1")]
    return [
        _lines(
            view,
            "plot-throughput",
            "Throughput",
            f"Tokens a second over all ranks; median of the last steps {short(view.recent('toks_per_s'))}.",
            Plot(speeds, "tokens/s", from_zero=True),
        ),
        _lines(
            view,
            "plot-step-time",
            "Time of a step",
            "Seconds, and how much of them went by waiting.",
            Plot(times, "s", from_zero=True, may_be_log=False),
        ),
        _lines(
            view,
            "plot-memory",
            "Memory",
            "Of rank 0: of its GPU, or of the process where there is none.",
            Plot([Curve("memory", x, column("mem_gib"), "c3")], "GiB", from_zero=True),
        ),
    ]


def smooth(values: Numbers, window: int) -> Numbers:
    """Mean of the finite values in the `window` up to each."""
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    number = counts[end] - counts[start]
    return np.where(number > 0, (sums[end] - sums[start]) / np.maximum(1, number), np.nan)


def _loss_words(view: RunView) -> str:
    losses = view.training.column("loss")
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return "No finite loss."
    bad = len(view.training) - len(losses)
    words = f"From {losses[0]:.4f} to {view.loss:.4f} (mean of the last steps) in {len(view.training)} steps."
    if view.validation:
        words += f" Validation {view.validation[1]:.4f} at step {view.validation[0]}."
    return words + (f" Not finite in {bad} steps (crosses)." if bad else "")


def gate_figures(view: RunView) -> list[str]:
    names = [("plot-gates-" + b, f"Gates: share of {b}") for b in BRANCHES]
    names += [("plot-entropy", "Gates: entropy"), ("plot-lowest-entropy", "Gates: lowest entropy")]
    names += [("plot-collapsed", "Gates: collapsed rows")]
    samples = [(step, found) for step in view.gate_samples.steps if (found := view.gate_samples.at(step))]
    if not samples:
        return [missing(identity, title, _why(view, GATES.file)) for identity, title in names]
    layers = [layer for layer in samples[-1][1] if layer != ALL_LAYERS] or [ALL_LAYERS]
    labels = [short_layer(layer) for layer in layers]
    steps = np.array([float(step) for step, _ in samples])

    def grid(name: str) -> Numbers:
        found = [{layer: getattr(gates, name) for layer, gates in sample.items()} for _, sample in samples]
        return np.array([[column.get(layer, np.nan) for column in found] for layer in layers])

    shares = [grid(f"share_{branch}") for branch in BRANCHES]
    top = float(np.ceil(max(np.nanmax(part, initial=0.0) for part in shares) * 10) / 10) or 1.0
    told = "Rows are layers from the first above to the last below. Stronger colour: a larger part of the weight."
    drawn = [_heat(names[at], told, steps, labels, shares[at], top, f"h{at + 1}") for at in range(3)]
    lowest, entropy, collapsed = grid("min_entropy"), grid("mean_entropy"), grid("collapsed")
    told = "Mean over rows, in nats; three equal shares have 1.10. Faint: one branch has nearly all the weight."
    drawn.append(_heat(names[3], told, steps, labels, entropy, MAX_ENTROPY, "h4", np.nanmin))
    told = "Of the row that mixes least, in nats. Faint: there is a row that reads one branch alone."
    drawn.append(_heat(names[4], told, steps, labels, lowest, MAX_ENTROPY, "h4", np.nanmin))
    told = "Part of the rows in which one branch has more than 95 % of the weight."
    drawn.append(_heat(names[5], told, steps, labels, collapsed, 1.0, "h5", np.nanmax))
    return drawn


def _heat(
    name: tuple[str, str],
    about: str,
    steps: Numbers,
    rows: Sequence[str],
    values: Numbers,
    top: float,
    style: str,
    how: Callable[..., Numbers] = np.nanmean,
) -> str:
    steps, values = _squeeze(steps, values, how)
    inside = heat_map(steps, rows, values, top, WIDTH, style)
    scale = f'<span class="scale" aria-hidden="true">0<i class="ramp {style}"></i>{short(top)}</span>'
    return figure(*name, about, [("", WIDTH, heat_height(len(rows)), inside)], scale)


def short_layer(layer: str) -> str:
    """`blocks.3.attention` is layer 3."""
    digits = [part for part in layer.split(".") if part.isdigit()]
    return f"layer {digits[0]}" if len(digits) == 1 else layer


def selection_figures(view: RunView) -> list[str]:
    titles = {
        "plot-distance": "Selection: distance",
        "plot-agreement": "Selection: agreement",
        "plot-distinct": "Selection: blocks a row",
    }
    by_step = {step: s for step in view.selection_samples.steps if (s := view.selection_samples.at(step))}
    found = list(by_step.values())
    if not found:
        return [missing(identity, title, _why(view, SELECTION.file)) for identity, title in titles.items()]
    steps = np.array([float(step) for step in by_step])
    used = [at for at in range(len(DISTANCE_BINS)) if any(s.distances[at] > 0 for s in found)] or [0]
    bins = [DISTANCE_BINS[at] for at in used]
    values = np.array([[s.distances[at] for s in found] for at in used])
    top = float(np.ceil(np.nanmax(values, initial=0.1) * 10) / 10)
    told = "Rows are distances in blocks from the query's own block; stronger colour: a larger part of all blocks read."
    plots = [_heat(("plot-distance", titles["plot-distance"]), told, steps, bins, values, top, "h2")]

    def curve(name: str, value: Callable[[SelectionStats], float], style: str) -> Curve:
        return Curve(name, steps, np.array([value(s) for s in found]), style)

    agreement = [
        curve("agreement", lambda s: s.agreement * 100, "c1"),
        curve("forced", lambda s: s.share_forced * 100, "c2"),
        curve("rows at the maximum", lambda s: s.share_at_max * 100, "c3"),
    ]
    told = "Agreement: part of a row's blocks that the row before reads too. Forced: read whatever the scores are."
    plots.append(
        _lines(view, "plot-agreement", titles["plot-agreement"], told, Plot(agreement, "%", True), SELECTION.file)
    )
    distinct = [curve("mean", lambda s: s.mean_distinct, "c1"), curve("most", lambda s: s.max_distinct, "c2")]
    told = "Distinct blocks that a token and key/value head reads."
    plots.append(
        _lines(view, "plot-distinct", titles["plot-distinct"], told, Plot(distinct, "blocks", True), SELECTION.file)
    )
    return plots


def _squeeze(steps: Numbers, values: Numbers, how: Callable[..., Numbers]) -> tuple[Numbers, Numbers]:
    """Neighbouring samples as one column where there are too many; `how` keeps what must not be overlooked."""
    if len(steps) <= MOST_COLUMNS:
        return steps, values
    starts = np.linspace(0, len(steps), MOST_COLUMNS + 1).astype(int)
    parts = [values[:, a:b] for a, b in pairwise(starts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a layer without a value in a stretch stays NaN
        return steps[starts[1:] - 1], np.stack([how(part, axis=1) for part in parts], axis=1)
