"""Tables and figures of the learning study, from its files of results."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill, wrap
from typing import Any, NamedTuple

from bench import figures
from bench.learning_rows import ROWS, compared_with, key_of, own_and_shared, read_results

RESULTS = Path("bench/results/learning-h200.jsonl")
RATES_RESULTS = Path("bench/results/learning-rates-h200.jsonl")
# The figures of the guide: their results, and what they show.
FIGURES = {
    Path("docs/img/learning-rates.svg"): (RATES_RESULTS, "rate"),
    Path("docs/img/learning-seeds.svg"): (Path("bench/results/learning-seeds-h200.jsonl"), "tokens,layer"),
    Path("docs/img/learning-32k.svg"): (Path("bench/results/learning-32k-h200.jsonl"), "position,seconds"),
}
PAGE = Path("docs/learning.md")
MARKS = re.compile(r"(<!-- bench\.learning show --by (\w+) --results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def show(results: Path, by: str | None) -> None:
    if by:
        print(tables_by(results, by))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("row", "changes", "tokenizer", "context", "tokens", "seed", "rate", "val loss", "against dense")
    found = [r for r in read_results(results) if r["val_loss"] is not None]
    losses = {(r["row"], compared_with(r)): r["val_loss"] for r in found}
    for r in found:
        row, tokenizer, seq_len, tokens, seed, lr, *_ = key_of(r)
        base = losses.get(("dense-muon" if row.endswith("-muon") else "dense", compared_with(r)))
        cells = (tokenizer, str(seq_len), f"{tokens / 1e6:.0f}M", str(seed), f"{lr:g}", f"{r['val_loss']:.4f}")
        table.add_row(row, escape(r["changes"]), *cells, f"{r['val_loss'] / base - 1:+.2%}" if base else "-")
    console = Console(width=140)
    console.print(table)
    for r in found:
        for measured in r.get("eval", {}).get("recall", []):
            shares = " ".join(f"{100 * share:5.1f}" for share in measured["by_depth"])
            console.print(
                f"{r['row']}, {measured['keys']}, {measured['length']:6,} tokens, exact in % by depth: {shares}"
            )
        for measured in r.get("eval", {}).get("tasks", []):
            shares = " ".join(
                f"{level}: {100 * share:.1f}"
                for level, share in zip(measured["levels"], measured["by_level"], strict=True)
            )
            about = f"{measured['task']}, {measured['length']:6,} tokens, exact in % by {measured['unit']}"
            console.print(f"{r['row']}, {about}: {shares}")


Points = list[tuple[float, float]]


def along_curve(r: dict[str, Any], per_step: float) -> Points:
    return [(round(step * per_step, 1), loss) for step, loss in r["curve"]]


def by_position(r: dict[str, Any]) -> Points:
    """At the length of training, by the fewest tokens of context in a bucket."""
    losses = {measured["length"]: measured["buckets"] for measured in r.get("eval", {}).get("loss", [])}
    return [(bucket["first"], bucket["loss"]) for bucket in losses.get(r["seq_len"], [])]


def by_layer(r: dict[str, Any]) -> Points:
    """Of the layers that select: a dense layer holds all of the mass."""
    masses = {measured["length"]: measured["layers"] for measured in r.get("eval", {}).get("selection", [])}
    layers = [layer for layer in masses.get(r["seq_len"], []) if layer["queries"]]
    return [(int(layer["layer"].split(".")[1]), layer["mass"]) for layer in layers]


# What a run can be shown by: the axes and its points. Runs that shared a GPU have no seconds.
BY: dict[str, tuple[str, str, Callable[[dict[str, Any]], Points]]] = {
    "rate": ("learning rate", "validation loss", lambda r: [(r["lr"], r["val_loss"])]),
    "seed": ("seed", "validation loss", lambda r: [(r["seed"], r["val_loss"])]),
    "tokens": (
        "million tokens",
        "validation loss",
        lambda r: along_curve(r, r["tokens"] / r["curve"][-1][0] / 1e6),
    ),
    "seconds": (
        "seconds in training steps",
        "validation loss",
        lambda r: along_curve(r, r["step_seconds"]) if r["runs_at_once"] == 1 and r.get("step_seconds") else [],
    ),
    "position": ("tokens of context", "loss", by_position),
    "layer": ("layer", "selected attention mass", by_layer),
}


def comparable(results: Path) -> list[dict[str, Any]]:
    """The last result of every run with a final loss on the corpus that most of them name, for each tokenizer."""
    found = [r for r in read_results(results) if r["val_loss"] is not None and r["curve"]]
    counts = Counter((key_of(r)[1], r.get("corpus", "unknown")) for r in found)
    chosen = dict(reversed([kind for kind, _ in counts.most_common() if kind[1] != "unknown"]))
    for (tokenizer, corpus), count in counts.items():
        is_left_out = chosen.get(tokenizer) != corpus
        print(f"{results}: {count} rows, {tokenizer}, corpus {corpus}{': left out' if is_left_out else ''}")
    kept = {key_of(r): r for r in found if "corpus" in r and r["corpus"] == chosen[key_of(r)[1]]}
    return sorted(kept.values(), key=lambda r: (list(ROWS).index(r["row"]), r["lr"], r["seed"]))


class Line(NamedTuple):
    """A line of a table or figure. `lr` or `seed` is None in one by rate or by seed."""

    row: str
    changes: str
    lr: float | None
    seed: int | None

    def __str__(self) -> str:
        rate = "" if self.lr is None else f"rate {self.lr:g}"
        return ", ".join(filter(None, (self.row, self.changes, rate, f"seed {self.seed}" if self.seed else "")))

    def kind(self) -> tuple[str, bool]:
        """The row without its optimizer, and whether that is Muon."""
        return self.row.removesuffix("-muon"), self.row.endswith("-muon")


Lines = dict[Line, dict[float, float]]


def lines_by(found: list[dict[str, Any]], by: str) -> dict[tuple[Any, ...], Lines]:
    """For each tokenizer, context, number of tokens, tasks of recall and further overrides: the lines of a table or
    panel, each with its points."""
    groups: dict[tuple[Any, ...], Lines] = {}
    for r in found:
        own, shared = own_and_shared(r)
        tasks = r.get("tasks", "pairs").removeprefix("pairs")
        line = Line(r["row"], own, None if by == "rate" else r["lr"], None if by == "seed" else r["seed"])
        if points := BY[by][2](r):
            groups.setdefault((*key_of(r)[1:4], f"{tasks} {shared}".strip()), {}).setdefault(line, {}).update(points)
    return dict(sorted(groups.items()))


def against_dense(line: Line, lines: Lines, by: str) -> str:
    """Compares the lowest losses over the rates with the same seed, or the means over the seeds that both lines have,
    with dense attention with the same optimizer, at the rate where it is best."""
    points, ratios = lines[line], list[float]()
    for other, dense in lines.items():
        shared = points.keys() & dense.keys()
        if other.kind() != ("dense", line.kind()[1]):
            continue
        if by == "rate" and other.seed == line.seed:
            ratios.append(min(points.values()) / min(dense.values()))
        elif by == "seed" and shared:
            ratios.append(fmean(points[x] for x in shared) / fmean(dense[x] for x in shared))
    return f"{max(ratios) - 1:+.1%}".replace("%", " %") if ratios else ""


def tables_by(results: Path, by: str) -> str:
    """Markdown, with a summary of each row by rate and by seed."""
    titles = {"rate": ["lowest"], "seed": ["mean", "lowest to highest"]}.get(by, [])
    text: list[str] = []
    for (tokenizer, seq_len, tokens, shared), lines in lines_by(comparable(results), by).items():
        columns = sorted({x for points in lines.values() for x in points})
        header = ["row", *(f"{x:g}" for x in columns), *titles, *(["against dense"] if titles else [])]
        about = [tokenizer, f"{seq_len:,} tokens of context", f"{tokens / 1e6:.0f} million tokens", shared]
        text += ["", f"{', '.join(filter(None, about))}, by {BY[by][0]}:", ""]
        text += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for line, points in lines.items():
            low, high = min(points.values()), max(points.values())
            summary = {"lowest": f"{low:.4f}", "mean": f"{fmean(points.values()):.4f}"}
            summary["lowest to highest"] = f"{low:.4f} to {high:.4f}" if len(points) > 1 else ""
            cells = [f"{points[x]:.4f}" if x in points else "" for x in columns] + [summary[title] for title in titles]
            cells += [against_dense(line, lines, by)] if titles else []
            text.append(f"| {' | '.join([str(line), *cells])} |")
    return "\n".join([*text, "", ""])


def write_page(page: Path) -> None:
    """Replaces the tables between the marks of a page. A mark names the command that shows them."""
    made = MARKS.sub(lambda found: found[1] + tables_by(Path(found[3]), found[2]) + found[4], page.read_text("utf-8"))
    page.write_text(made, encoding="utf-8")


def plot(results: Path, by: str, figure: Path) -> bool:
    """A panel for each way of showing, tokenizer, context and length of run. False if there is nothing to draw."""
    found = comparable(results)
    panels = [(way, *panel) for way in by.split(",") for panel in lines_by(found, way).items()]
    if not panels:
        return False
    columns = min(2, len(panels))
    with figures.figure(figure, -(-len(panels) // columns), columns, salt="learning") as drawn:
        for axes, (way, (tokenizer, seq_len, tokens, shared), lines) in zip(drawn.axes, panels, strict=False):
            others = cycle(figures.COLOURS[2:])
            colours = {"dense": figures.NEUTRAL, "nsa": figures.COLOURS[0], "msa": figures.COLOURS[1]}
            colours = defaultdict(partial(next, others), colours)
            markers = defaultdict(lambda: cycle("osD^vPX*"))  # the lines of a kind differ in these, but not its seeds
            styles: dict[Line, dict[str, str]] = {}
            has_one_rate = len({line.lr for line in lines}) == 1
            for line, points in lines.items():
                (kind, is_muon), name = line.kind(), line._replace(seed=None, lr=None if has_one_rate else line.lr)
                label = "" if name in styles else fill(str(name), 40)
                style = {"color": colours[kind], "ls": "--" if is_muon else "-"}
                style = styles.setdefault(name, style | {"marker": next(markers[kind, is_muon])})
                axes.plot(list(points), list(points.values()), ms=5, **style, label=label)
            if way in ("rate", "position"):
                axes.set_xscale("log", base=10 if way == "rate" else 2)
                ticks = sorted({x for points in lines.values() for x in points})[:: 1 if way == "rate" else 3]
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
                axes.minorticks_off()
            title = f"{tokenizer}, {seq_len:,} tokens of context\n{tokens / 1e6:.0f} million tokens"
            axes.set(title="\n".join([title, *wrap(shared, 40)]))
            axes.set(xlabel=BY[way][0], ylabel=BY[way][1])
            if len(styles) > 4:
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1) if columns == 1 else (0, -0.18))
            else:
                axes.legend()
        for axes in drawn.axes[len(panels) :]:
            axes.remove()
    print(f"{figure}: {figure.stat().st_size:,} bytes")
    return True
