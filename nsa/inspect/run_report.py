"""Renders a run as one self-contained HTML file: no script, network or font. It can be opened from disk and printed,
and has a light and a dark mode.

Text from files is escaped, and a content security policy forbids scripts: text of a run cannot run code in a browser.
"""

import json
import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import yaml

from nsa import __version__, run_folder
from nsa.errors import LaunchError, printable, reworded
from nsa.files import write_whole
from nsa.formatting import DASH, clock, exact, listed, one_line, percent, seconds, short
from nsa.inspect.evaluation import evaluation_facts, evaluation_figures
from nsa.inspect.health import is_unhealthy, unhealthy
from nsa.inspect.reading import RunView
from nsa.inspect.report_plots import gate_figures, selection_figures, short_layer, speed_figures, training_figures
from nsa.inspect.report_style import STYLE
from nsa.inspect.run_files import lookup, number

MAX_ENTRIES = 500
MAX_TEXT = 4000  # characters of a prompt, and of its continuation
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(text: str, target: Path) -> None:
    """Replaces `target` atomically."""
    with reworded(LaunchError, f"{target}: cannot be written", "choose another path with --out"):
        write_whole(target, printable(text))  # a file name may not be valid UTF-8


def render(view: RunView) -> str:
    """The HTML page."""
    name = escape(one_line(view.name, 200))
    sections = (
        ("training", "Training", grid(training_figures(view))),
        ("speed", "Speed and memory", grid(speed_figures(view))),
        ("gates", "Gates", _gates(view)),
        ("selection", "Selection", _selection(view)),
        ("evaluation", "Evaluation", _evaluation(view.evaluation) if view.evaluation else ""),
        ("samples", "Samples", _samples(view) if view.samples.newest else ""),
        ("incidents", "What happened", _timeline(view)),
        ("environment", "Environment", _environment(view)),
        ("configuration", "Configuration", _configuration(view)),
    )
    shown = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{identity}">{title}</a>' for identity, title, _ in shown)
    parts = [_health(view), _tiles(view)]
    parts += [f'<section id="{at}"><h2>{title}</h2>{inside}</section>' for at, title, inside in shown]
    source = f"Written {clock(view.now)} by nsa {__version__} from {view.folder}"
    return page(f"{name} - nsa report", _header(view, name, links), "".join(parts), source)


def render_evaluation(found: dict[str, Any], name: str, now: float) -> str:
    """An HTML page with the results of `nsa eval` only."""
    title = escape(one_line(name, 200))
    header = f'<header><div class="title"><h1>{title}</h1></div><p class="facts">Evaluation</p></header>'
    source = f"Written {clock(now)} by nsa {__version__}"
    return page(f"{title} - nsa eval", header, f"<section>{_evaluation(found)}</section>", source)


def page(title: str, header: str, inside: str, source: str, more_style: str = "") -> str:
    """A complete HTML page. `source` is plain text for the footer; the other arguments are HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}{more_style}</style></head><body>'
        f"{header}<main>{inside}</main><footer>{escape(source)}</footer></body></html>\n"
    )


def grid(figures: Iterable[str]) -> str:
    return f'<div class="plots">{"".join(figures)}</div>'


def _header(view: RunView, name: str, links: str) -> str:
    gpus = view.env.get("gpu")
    where = str(gpus[0]) if isinstance(gpus, list) and gpus else "CPU"
    facts = [f"{view.strategy} x {view.world_size}", where]
    facts += [f"{view.attempts} starts"] if view.attempts > 1 else []
    facts += [f"began {clock(view.started_at, '%Y-%m-%d %H:%M')}"] if math.isfinite(view.started_at) else []
    return (
        f'<header><div class="title"><h1>{name}</h1>'
        f'<span class="status {view.status.kind}">{escape(view.status.text)}</span></div>'
        f'<p class="facts">{escape(" · ".join(one_line(fact, 80) for fact in facts))}</p>'
        f'<div class="progress" role="img" aria-label="step {view.step} of {view.steps}">'
        f'<i style="width:{view.done:.2%}"></i></div>'
        f'<p class="facts">step {view.step:,} of {view.steps:,} ({view.percent})</p><nav>{links}</nav></header>'
    )


def _health(view: RunView) -> str:
    found = unhealthy(view)
    problems = [f"{name}: {problem}" for name, problem in view.problems.items()]
    if not found and not problems:
        return '<div class="health ok" id="health"><p>Nothing unhealthy was found.</p></div>'
    bad = "".join(f'<li class="bad">{escape(one_line(line))}</li>' for line in found)
    files = "".join(f'<li class="file">{escape(one_line(line))}</li>' for line in problems)
    return f'<div class="health" id="health"><ul>{bad}{files}</ul></div>'


def _tiles(view: RunView) -> str:
    step, loss, bits = view.validation or (0, math.nan, math.nan)
    validated = f"at step {step:,}, {exact(bits, '.3f')} bits per byte" if view.validation else "none was run"
    best = number(view.metrics.get("best_val_loss"))
    bad = sum(entry.is_bad for entry in view.timeline)
    tiles = [
        ("Loss", exact(view.loss), "nats per token, mean of the last steps"),
        ("Validation", exact(loss), validated),
        ("Best validation", exact(best), "nats per token") if math.isfinite(best) else None,
        ("Tokens", short(view.latest("tokens")), "trained on"),
        ("Throughput", short(view.recent("toks_per_s")), "tokens/s, median of the last steps"),
        ("Step", seconds(view.recent("step_s")), "median of the last steps"),
        ("Waiting for data", percent(view.data_share), "of the last steps"),
        ("Waiting for saves", seconds(view.save_wait_s), "in all"),
        ("Memory", f"{exact(view.mem_gib, '.2f')} GiB", "the rank that uses the most"),
        ("Elapsed", seconds(view.elapsed_s), f"in {view.attempts} starts" if view.attempts > 1 else "since the start"),
        ("Left", seconds(view.left_s), "at the speed of the last steps") if view.left_s is not None else None,
        ("Incidents", str(bad), "see the timeline"),
    ]
    cells = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="note">{escape(note)}</dd></div>'
        for name, value, note in filter(None, tiles)
    )
    return f'<dl class="tiles" id="numbers">{cells}</dl>'


def _gates(view: RunView) -> str:
    """Empty for a run without gates."""
    if not view.gates:
        return _problem(view, run_folder.GATES.file)
    return _gate_table(view) + grid(gate_figures(view))


def _gate_table(view: RunView) -> str:
    head = "<tr><th>layer</th><th>cmp / sel / win</th><th>entropy</th><th>lowest</th><th>collapsed</th></tr>"
    rows = "".join(_gate_row(layer, gates) for layer, gates in view.gates.items())
    keys = "".join(f'<li><i class="key c{at}"></i>{branch}</li>' for at, branch in enumerate(run_folder.BRANCHES, 1))
    step = view.gate_samples.last_step
    return (
        f'<div class="card" id="gates-now"><h3>At step {step:,}</h3><ul class="legend">{keys}</ul>'
        f'<div class="scroll"><table>{head}{rows}</table></div></div>'
    )


def _gate_row(layer: str, gates: run_folder.GateStats) -> str:
    parts = "".join(
        f'<i class="c{at}" style="width:{max(0.0, share):.2%}"></i>'
        for at, share in enumerate(gates.shares, 1)
        if math.isfinite(share)
    )
    shares = " / ".join(percent(share) for share in gates.shares)
    return (
        f"<tr{' class=unhealthy' if is_unhealthy(gates) else ''}>{_layer_cell(layer)}"
        f'<td><span class="split">{parts}</span><span class="num">{shares}</span></td>'
        f'<td class="num">{exact(gates.mean_entropy, ".3f")}</td><td class="num">{exact(gates.min_entropy, ".3f")}</td>'
        f'<td class="num">{percent(gates.collapsed)}</td></tr>'
    )


def _layer_cell(layer: str) -> str:
    name = one_line(layer, 80)
    return f'<td class="num" title="{escape(name)}">{escape(short_layer(name))}</td>'


def _selection(view: RunView) -> str:
    """Empty for a run whose layers select no blocks."""
    if view.selection is None:
        return _problem(view, run_folder.SELECTION.file)
    return grid(selection_figures(view)) + _layer_selection(view)


def _layer_selection(view: RunView) -> str:
    """A collapsed table with one row per layer."""
    if not view.layer_selection:
        return ""
    top = max(max(found.distances) for found in view.layer_selection.values())
    rows = "".join(_selection_row(layer, found, top) for layer, found in view.layer_selection.items())
    distance = f"distance, {run_folder.DISTANCE_BINS[0]} to {run_folder.DISTANCE_BINS[-1]} blocks"
    heads = ("layer", "blocks a row", "most", "rows at most", "forced", "agreement", "mass", distance)
    head = "".join(f"<th>{escape(title)}</th>" for title in heads)
    summary = f"Layer by layer at step {view.layer_selection_samples.last_step:,}"
    return (
        f'<details class="card" id="selection-layers"><summary>{summary}</summary>'
        f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div></details>'
    )


def _selection_row(layer: str, found: run_folder.SelectionStats, top: float) -> str:
    cells = "".join(
        f'<i title="{escape(name)} blocks away: {percent(share)}" style="opacity:{share / (top or 1.0):.2f}"></i>'
        for name, share in zip(run_folder.DISTANCE_BINS, found.distances, strict=True)
        if math.isfinite(share)
    )
    numbers = (
        exact(found.mean_distinct, ".2f"),
        exact(found.max_distinct, ".0f"),
        *(percent(share) for share in (found.share_at_max, found.share_forced, found.agreement)),
        DASH if found.mass is None else percent(found.mass),
    )
    return (
        f"<tr>{_layer_cell(layer)}{''.join(f'<td class=num>{n}</td>' for n in numbers)}"
        f'<td><span class="strip">{cells}</span></td></tr>'
    )


def _evaluation(found: dict[str, Any]) -> str:
    try:
        return grid(evaluation_figures(found)) + evaluation_facts(found)
    except ValueError as error:
        return f'<p class="missing">{run_folder.EVALUATION_FILE} {escape(str(error))}</p>'


def _samples(view: RunView) -> str:
    """Prompts and their continuations, the newest first."""
    cards = []
    for sample in reversed(view.samples.newest):
        settings = [f"{name} {value}" for name, value in sample.settings.items() if value is not None]
        about = one_line(" · ".join([clock(sample.time), sample.weights, *settings]), 200)
        text, more = sample.text[:MAX_TEXT], len(sample.text) - MAX_TEXT
        note = f'<p class="about">{more:,} more characters are in {run_folder.SAMPLES_FILE}.</p>' if more > 0 else ""
        prompt = f"<b>{escape(printable(sample.prompt[-MAX_TEXT:]))}</b>" if sample.prompt else ""
        text = f"<pre>{prompt}{escape(printable(text))}</pre>"
        cards.append(f'<div class="card sample"><p class="about">{escape(about)}</p>{text}{note}</div>')
    return grid(cards)


def _timeline(view: RunView) -> str:
    if not view.timeline:
        return '<p class="missing">Nothing is recorded.</p>'
    shown = view.timeline[:MAX_ENTRIES]
    rows = "".join(
        f'<tr class="{"bad" if entry.is_bad else "note"}"><td class="num">{clock(entry.time)}</td>'
        f'<td class="num">{entry.step:,}</td><td>{escape(_ranks(entry.ranks, view.world_size))}</td>'
        f"<td>{escape(one_line(entry.kind, 60))}</td><td>{escape(one_line(entry.message))}</td></tr>"
        for entry in shown
    )
    more = len(view.timeline) - len(shown)
    note = f'<p class="about">{more} older events are in {run_folder.HEARTBEAT.pattern}.</p>' if more else ""
    head = "<tr><th>time</th><th>step</th><th>ranks</th><th>event</th><th>message</th></tr>"
    return f'<div class="card scroll"><table class="story">{head}{rows}</table>{note}</div>'


def _ranks(ranks: tuple[int, ...], size: int) -> str:
    if len(ranks) == size:
        return "all" if size > 1 else "0"
    return listed(ranks, 6)


def _environment(view: RunView) -> str:
    env = {key: value for key, value in view.env.items() if key != "config"}
    if isinstance(command := env.get("command"), list):
        env["command"] = " ".join(map(str, command))
    if any(view.fallbacks.values()):
        env["fallbacks"] = {f"{branch}: {reason}": short(n) for (branch, reason), n in view.fallbacks.items()}
    if lookup(view.metrics, "data"):
        env["data"] = view.metrics["data"]
    if not env:
        return _problem(view, run_folder.ENVIRONMENT_FILE)
    rows = "".join(f"<tr><th>{escape(str(key))}</th><td>{shown_value(value)}</td></tr>" for key, value in env.items())
    return f'<div class="card scroll"><table class="facts-table">{rows}</table></div>'


def _problem(view: RunView, file: str) -> str:
    """Why a file cannot be shown; empty if it is sound."""
    found = view.problems.get(file)
    return f'<p class="missing">{file}: {escape(found)}</p>' if found else ""


def shown_value(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(k))} {shown_value(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return "<br>".join(shown_value(v) for v in value) or "none"
    return escape("none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str))


def _configuration(view: RunView) -> str:
    if not view.config:
        return _problem(view, run_folder.CONFIG_FILE)
    text = yaml.safe_dump(view.config, sort_keys=False, allow_unicode=True)
    return f'<details class="card"><summary>{run_folder.CONFIG_FILE}</summary><pre>{escape(text)}</pre></details>'
