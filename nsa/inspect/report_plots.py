"""The figures of a report, each with a stable id, a title and a description for screen readers."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from nsa.formatting import short
from nsa.inspect.reading import RunView, smoothing
from nsa.inspect.run_files import Numbers
from nsa.inspect.svg import Curve, Plot, draw, heat_map
from nsa.run_folder import ALL_LAYERS, BRANCHES, DISTANCE_BINS, LAYER_SELECTION, TRAINING

WIDTH, HEIGHT = 400, 230
WIDE, WIDE_HEIGHT = 1180, 340
MAX_COLUMNS = 100  # per heat map
MAX_MARKS = 40
MAX_ENTROPY = float(np.log(3.0))
MIN_RANGE = 0.02  # of an entropy scale, in nats


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


def missing(view: RunView, file: str, identity: str, title: str) -> str:
    why = f"{file} {view.problems.get(file, 'holds no such values yet')}"
    return (
        f'<figure class="card" id="{identity}"><figcaption><h3>{escape(title)}</h3></figcaption>'
        f'<p class="missing" role="note">Nothing to show: {escape(why)}</p></figure>'
    )


def lines(plot: Plot) -> str:
    """A line plot, with a legend if it has several curves; empty if no curve has a finite value."""
    named = [(c.name, c.style) for c in plot.curves if (np.isfinite(c.x) & np.isfinite(c.y)).any()]
    if not named:
        return ""
    sizes = {"": (WIDTH, HEIGHT)}
    if plot.identity == "plot-loss":
        sizes = {"narrow": (WIDTH, HEIGHT), "wide": (WIDE, WIDE_HEIGHT)}
    drawings = [(style, *size, draw(plot, *size)) for style, size in sizes.items()]
    items = "".join(f'<li><i class="key {style}"></i>{escape(name)}</li>' for name, style in named)
    legend = f'<ul class="legend">{items}</ul>' if len(named) > 1 else ""
    return figure(plot.identity, plot.title, plot.about, drawings, legend)


def _of_training(view: RunView, *plots: Plot) -> list[str]:
    return [lines(plot) or missing(view, TRAINING.file, plot.identity, plot.title) for plot in plots]


def training_figures(view: RunView) -> list[str]:
    column = view.training.column
    x = column("step")
    losses = [
        Curve("loss of a step", x, column("loss"), "c1 faint"),
        Curve("smoothed", x, smoothed(view, "loss")),
        Curve("validation", x, column("val_loss"), "c2", dots=True),
    ]
    bad = [(float(e.step), f"step {e.step}: {e.kind}") for e in view.timeline if e.is_bad]
    bits = Curve("validation", x, column("val_bits_per_byte"), "c2", dots=True)
    index = Plot("plot-index-kl", "Index loss", "KL divergence of the index of MSA layers from their attention.",
                 [Curve("index", x, column("index_kl"), "c4")], "nats", from_zero=True, may_be_log=True)  # fmt: skip
    figures = _of_training(
        view,
        Plot("plot-loss", "Loss", _loss_text(view), losses, "nats per token", marks=bad[:MAX_MARKS], may_be_log=True),
        Plot("plot-lr", "Learning rate", "As set by the schedule.", [Curve("lr", x, column("lr"))], from_zero=True),
        Plot("plot-grad-norm", "Gradient norm", "Before clipping. Spikes are kept.",
             [Curve("norm", x, column("grad_norm"), "c3")], from_zero=True, may_be_log=True),
        Plot("plot-bits", "Validation, bits per byte", "Comparable between tokenizers.", [bits], "bits per byte"),
    )  # fmt: skip
    return [*figures, lines(index)]  # empty in a run without MSA layers


def speed_figures(view: RunView) -> list[str]:
    column = view.training.column
    x = column("step")
    speeds = [
        Curve("of a step", x, column("toks_per_s"), "c1 faint"),
        Curve("smoothed", x, smoothed(view, "toks_per_s")),
    ]
    times = [
        Curve("step", x, column("step_s"), "c1"),
        Curve("waiting for data", x, column("data_wait_s"), "c2"),
        Curve("waiting for a save", x, column("save_wait_s"), "c3"),
    ]
    median = short(view.recent("toks_per_s"))
    return _of_training(
        view,
        Plot("plot-throughput", "Throughput", f"Tokens a second over all ranks; median of the last steps {median}.",
             speeds, "tokens/s", from_zero=True),
        Plot("plot-step-time", "Time of a step", "Seconds, and how many of them were spent waiting.",
             times, "s", from_zero=True),
        Plot("plot-memory", "Memory", "Rank 0: peak of its GPU, or resident size of the process on a CPU.",
             [Curve("memory", x, column("mem_gib"), "c3")], "GiB", from_zero=True),
    )  # fmt: skip


def smoothed(view: RunView, column: str) -> Numbers:
    return smooth(view.training.column(column), smoothing(len(view.training)))


def smooth(values: Numbers, window: int) -> Numbers:
    """Mean of the finite values in a centred window, which does not lag behind a falling loss. The window is narrow at
    the start, where a loss falls fastest, and one-sided at the end."""
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(values))
    reach = np.minimum(window // 2, at // 2)
    start, end = at - reach, np.minimum(at + reach + 1, len(values))
    number = counts[end] - counts[start]
    return np.where(number > 0, (sums[end] - sums[start]) / np.maximum(1, number), np.nan)


def _loss_text(view: RunView) -> str:
    losses = view.training.column("loss")
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return "No finite loss."
    bad = len(view.training) - len(losses)
    text = f"From {losses[0]:.4f} to {view.loss:.4f} (mean of the last steps) in {len(view.training)} steps."
    if view.validation:
        text += f" Validation {view.validation[1]:.4f} at step {view.validation[0]}."
    return text + (f" Not finite in {bad} steps (crosses)." if bad else "")


_SHARES = "Rows are layers, the first at the top. Stronger colour: a larger share of the weight."
# Column, suffix of the id, title, description, style, and the function that merges neighbouring samples.
_GATE_FIGURES: tuple[tuple[str, str, str, str, str, Callable[..., Numbers]], ...] = (
    *((f"share_{b}", f"gates-{b}", f"share of {b}", _SHARES, f"c{n}", np.nanmean) for n, b in enumerate(BRANCHES, 1)),
    ("mean_entropy", "entropy", "entropy",
     "Mean over rows, in nats; three equal shares have 1.10, a single branch has 0. Faint: the lowest here.",
     "c4", np.nanmin),
    ("min_entropy", "lowest-entropy", "lowest entropy",
     "Lowest entropy of any row, in nats; 0 is a row that uses a single branch. Faint: the lowest here.",
     "c4", np.nanmin),
    ("collapsed", "collapsed", "collapsed rows",
     "Share of rows in which one branch has more than 95 % of the weight.", "c5", np.nanmax),
)  # fmt: skip


def gate_figures(view: RunView) -> list[str]:
    """Needs at least one sample."""
    samples = view.gate_samples.by_step()
    layers = [layer for layer in view.gates if layer != ALL_LAYERS] or [ALL_LAYERS]
    labels = [short_layer(layer) for layer in layers]
    grids = {name: _by_layer(samples, layers, name) for name, *_ in _GATE_FIGURES}
    largest = max(_largest(grids[f"share_{branch}"]) for branch in BRANCHES)
    shares = (0.0, float(np.ceil(largest * 10) / 10) or 1.0)
    scales = {"collapsed": (0.0, 1.0)}
    scales |= {name: _range(grids[name]) for name in ("mean_entropy", "min_entropy")}
    return [
        _heat(f"plot-{end}", f"Gates: {title}", about, list(samples), labels, grids[name], scales.get(name, shares),
              style, how)
        for name, end, title, about, style, how in _GATE_FIGURES
    ]  # fmt: skip


def _by_layer(samples: Mapping[int, Mapping[str, Any]], layers: Sequence[str], column: str) -> Numbers:
    """[layer, step]; NaN where a sample lacks the layer or its value."""
    values = [[getattr(found.get(layer), column, None) for found in samples.values()] for layer in layers]
    return np.array(values, dtype=np.float64)


def _largest(values: Numbers) -> float:
    """The largest finite value; at least 0."""
    return float(values[np.isfinite(values)].max(initial=0.0))


def _range(values: Numbers) -> tuple[float, float]:
    """From the lowest to the highest value, since entropies are close to each other. At least MIN_RANGE wide, so that
    rounding does not look like a change."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, MAX_ENTROPY
    low = max(0.0, min(float(known.min()), float(known.max()) - MIN_RANGE))
    return low, max(float(known.max()), low + MIN_RANGE)


def _heat(
    identity: str,
    title: str,
    about: str,
    steps: Sequence[int],
    rows: Sequence[str],
    values: Numbers,
    scale: tuple[float, float],
    style: str,
    how: Callable[..., Numbers] = np.nanmean,
) -> str:
    at, squeezed = _squeeze(np.array(steps, dtype=float), values, how)
    height, inside = heat_map(at, rows, squeezed, scale, WIDTH, style)
    low, high = map(short, scale)
    key = f'<span class="scale" aria-hidden="true">{low}<i class="ramp {style}"></i>{high}</span>'
    return figure(identity, title, about, [("", WIDTH, height, inside)], key)


def short_layer(layer: str) -> str:
    """`blocks.3.attention` is layer 3."""
    digits = [part for part in layer.split(".") if part.isdigit()]
    return f"layer {digits[0]}" if len(digits) == 1 else layer


def selection_figures(view: RunView) -> list[str]:
    """Needs at least one sample."""
    samples = {step: found[ALL_LAYERS] for step, found in view.selection_samples.by_step().items()}
    shares = np.array([found.distances for found in samples.values()]).T  # [bin, step]
    used = np.flatnonzero((shares > 0).any(1)).tolist() or [0]
    top = float(np.ceil(max(0.1, _largest(shares[used])) * 10) / 10)
    steps = np.array(list(samples), dtype=float)

    def curve(name: str, column: str, style: str, times: float = 1.0) -> Curve:
        return Curve(name, steps, np.array([float(getattr(s, column)) for s in samples.values()]) * times, style)

    parts = [
        curve("agreement", "agreement", "c1", 100),
        curve("forced", "share_forced", "c2", 100),
        curve("rows at the maximum", "share_at_max", "c3", 100),
    ]
    blocks = [curve("mean", "mean_distinct", "c1"), curve("most", "max_distinct", "c2")]
    distance = _heat(
        "plot-distance", "Selection: distance",
        "Rows are distances in blocks from the query's own block; stronger colour: a larger share of all blocks read.",
        list(samples), [DISTANCE_BINS[at] for at in used], shares[used], (0.0, top), "c2",
    )  # fmt: skip
    mass = _mass_figure(view) if any(found.mass is not None for found in samples.values()) else ""
    return [distance, mass, *map(lines, (
        Plot("plot-agreement", "Selection: agreement",
             "Agreement: share of a row's blocks that the previous row also reads. Forced: read regardless of scores.",
             parts, "%", from_zero=True),
        Plot("plot-distinct", "Selection: blocks a row", "Distinct blocks that a token and key/value head reads.",
             blocks, "blocks", from_zero=True),
    ))]  # fmt: skip


def _mass_figure(view: RunView) -> str:
    """A heat map of the layers that measure the mass of their blocks."""
    samples = view.layer_selection_samples.by_step()
    layers = list(dict.fromkeys(name for found in samples.values() for name, s in found.items() if s.mass is not None))
    if not layers:
        return missing(view, LAYER_SELECTION.file, "plot-mass", "Selection: attention mass")
    values = _by_layer(samples, layers, "mass")
    return _heat(
        "plot-mass", "Selection: attention mass",
        "Rows are layers. Share of the attention over all visible tokens that the selected blocks hold, in a sample of "
        "queries. Faint: the lowest here.",
        list(samples), [short_layer(layer) for layer in layers], values, _range(values), "c5", np.nanmin,
    )  # fmt: skip


def _squeeze(steps: Numbers, values: Numbers, how: Callable[..., Numbers]) -> tuple[Numbers, Numbers]:
    """Merges neighbouring samples by `how` into at most MAX_COLUMNS columns."""
    if len(steps) <= MAX_COLUMNS:
        return steps, values
    starts = np.linspace(0, len(steps), MAX_COLUMNS + 1).astype(int)
    parts = [values[:, a:b] for a, b in pairwise(starts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value stays NaN
        return steps[starts[1:] - 1], np.stack([how(part, axis=1) for part in parts], axis=1)
