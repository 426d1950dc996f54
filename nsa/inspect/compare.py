"""Compares several runs in one HTML file: tables of their numbers and of configuration keys that differ, and plots of
the loss against steps, tokens and time. Like a report it needs no script, network or font."""

import math
import re
from collections.abc import Sequence
from html import escape

import numpy as np

from nsa import __version__
from nsa.errors import ConfigError
from nsa.formatting import DASH, clock, exact, one_line, percent, seconds, short
from nsa.inspect.reading import RunView
from nsa.inspect.report_plots import lines, smoothed
from nsa.inspect.run_files import Numbers, lookup, number
from nsa.inspect.run_report import grid, page, shown_value
from nsa.inspect.svg import STYLES, Curve, Plot
from nsa.plain_yaml import flat

COMPARISON_FILE = "comparison.html"  # in the current folder: it belongs to no run
_OWN = ("train.out_dir",)  # keys that differ between any two runs
# Dense FLOP/s in 16 bits, as NVIDIA states them. The first key that ends a word of the GPU's name applies.
_PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}


def render_comparison(views: Sequence[RunView]) -> str:
    """The HTML page."""
    if len(views) > len(STYLES):
        raise ConfigError(f"{len(views)} runs: at most {len(STYLES)} are distinguishable in one plot; give fewer")
    names = _names(views)
    title = escape(" · ".join(names))
    header = f'<header><div class="title"><h1>{len(views)} runs</h1></div><p class="facts">{title}</p></header>'
    sections = (
        f'<section id="numbers"><h2>Numbers</h2>{_table(views, names)}</section>'
        f'<section id="curves"><h2>Curves</h2>{grid(_figures(views, names))}</section>'
        f'<section id="configuration"><h2>Configuration</h2>{_differences(views, names)}</section>'
    )
    source = f"Written {clock(views[0].now)} by nsa {__version__} from {', '.join(str(v.folder) for v in views)}"
    return page(f"{title} - nsa report", header, sections, source)


def utilisation(view: RunView) -> float:
    """Model FLOPs utilisation: the model's FLOP/s as a fraction of the peak of its GPUs in 16 bits. NaN on a CPU, in 32
    bits, on a GPU whose peak is not known, and for a run that did not record its FLOPs per token."""
    gpus = view.env.get("gpu")
    if not view.on_gpu or not isinstance(gpus, list) or view.env.get("precision") not in ("bf16", "fp16"):
        return math.nan
    peak = next((peak for part, peak in _PEAK.items() if re.search(rf"{part}\b", str(gpus[0]))), math.nan)
    # Tokens without a target are computed too, which toks_per_s does not count.
    tokens = number(lookup(view.config, "train.batch_size")) * number(lookup(view.config, "train.seq_len"))
    rate = tokens / view.recent("step_s")
    return rate * number(view.env.get("flops_per_token")) / (peak * max(1, view.world_size))


def _names(views: Sequence[RunView]) -> list[str]:
    """The names of the folders, or their paths if names are not unique."""
    names = [view.name for view in views]
    return [
        one_line(str(view.folder) if names.count(name) > 1 else name, 80)
        for view, name in zip(views, names, strict=True)
    ]


def _table(views: Sequence[RunView], names: Sequence[str]) -> str:
    heads = ("run", "status", "parameters", "steps", "tokens", "loss", "validation", "bits/byte", "tokens/s", "MFU",
             "GiB", "time")  # fmt: skip
    rows = []
    for view, name, style in zip(views, names, STYLES, strict=False):
        _, loss, bits = view.validation or (0, math.nan, math.nan)
        cells = (
            view.status.kind,
            short(number(view.env.get("parameters"))),
            f"{view.step:,} of {view.steps:,}",
            short(view.latest("tokens")),
            *(exact(view.loss), exact(loss), exact(bits, ".3f")),
            short(view.recent("toks_per_s")),
            percent(utilisation(view)),
            exact(view.mem_gib, ".2f"),
            seconds(view.elapsed_s),
        )
        rest = "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        rows.append(f'<tr><td><i class="key {style}"></i>{escape(name)}</td>{rest}</tr>')
    head = "".join(f"<th>{title}</th>" for title in heads)
    about = (
        "Loss: mean of the last steps, in nats per token. Tokens/s: median of the last steps. MFU: model FLOPs "
        "utilisation, where GPU, precision and cost of a token are known. Bits per byte compare between tokenizers."
    )
    return f'<div class="card scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div><p class="about">{about}</p>'


def _differences(views: Sequence[RunView], names: Sequence[str]) -> str:
    """A table of the configuration keys that differ, and their values."""
    settings = [flat(view.config) for view in views]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = []
    for key in (key for key in keys if key not in _OWN):
        values = [shown_value(found[key]) if key in found else DASH for found in settings]
        if len({value for value, found in zip(values, settings, strict=True) if found}) > 1:
            rows.append(f"<tr><th>{escape(key)}</th>{''.join(f'<td>{value}</td>' for value in values)}</tr>")
    unknown = [name for name, found in zip(names, settings, strict=True) if not found]
    note = f'<p class="missing">No configuration of {escape(", ".join(unknown))} is known.</p>' if unknown else ""
    if not rows:
        return note or '<p class="missing">All runs have the same configuration.</p>'
    runs = zip(names, STYLES, strict=False)
    head = "".join(f'<th><i class="key {style}"></i>{escape(name)}</th>' for name, style in runs)
    about = "Keys whose values differ; all others are the same. A dash: the run's version does not have the key."
    table = f'<table class="facts-table"><tr><th>key</th>{head}</tr>{"".join(rows)}</table>'
    return f'<div class="card scroll">{table}</div><p class="about">{about}</p>{note}'


def _figures(views: Sequence[RunView], names: Sequence[str]) -> list[str]:
    longest = max((float(_training_time(view)[-1]) for view in views if len(view.training)), default=0.0)
    unit, size = next((u, s) for u, s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 2 * s or s == 1.0)
    time = f"time in steps, {unit}"

    def curves(x: str, y: str, *, dots: bool = False) -> list[Curve]:
        runs = zip(views, names, STYLES, strict=False)
        return [Curve(name, values(view, x), values(view, y), style, dots) for view, name, style in runs]

    def values(view: RunView, column: str) -> Numbers:
        if column == time:
            return _training_time(view) / size
        return smoothed(view, column) if column in ("loss", "toks_per_s") else view.training.column(column)

    axes = (("plot-loss", "steps", "step"), ("plot-loss-tokens", "tokens", "tokens"), ("plot-loss-time", "time", time))
    plots = [
        *(Plot(identity, f"Loss against {what}", "Smoothed.", curves(along, "loss"), "nats per token",
               may_be_log=True, along=along) for identity, what, along in axes),
        Plot("plot-bits", "Validation against tokens", "Of held-out documents.",
             curves("tokens", "val_bits_per_byte", dots=True), "bits per byte", along="tokens"),
        Plot("plot-index-kl", "Index loss", "Of MSA layers.", curves("step", "index_kl"), "nats", from_zero=True),
        Plot("plot-throughput", "Throughput", "Smoothed, over all ranks.", curves("step", "toks_per_s"), "tokens/s",
             from_zero=True),
    ]  # fmt: skip
    return [*filter(None, map(lines, plots))] or ['<p class="missing">No run has a step yet.</p>']


def _training_time(view: RunView) -> Numbers:
    """Cumulative seconds spent in steps, without validation and starts."""
    return np.cumsum(np.nan_to_num(view.training.column("step_s"), posinf=0.0, neginf=0.0))
