"""The figures of an evaluation (`nsa eval`): loss by position; recall, tasks and selection by length."""

from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from nsa.formatting import one_line, short
from nsa.inspect.report_plots import WIDTH, figure, lines, short_layer
from nsa.inspect.run_files import number, whole
from nsa.inspect.svg import STYLES, Curve, Plot, heat_map

MAX_CELLS = 2000  # per heat map
_QUERIES = "by layer (rows) and length, for queries that see more blocks than they read."
SELECTION = (
    ("mass", "Selection: attention mass", f"Share of full attention in the selected blocks in %, {_QUERIES}"),
    ("heaviest", "Selection: heaviest blocks", f"Share of the heaviest blocks that are selected in %, {_QUERIES}"),
)
_WRONG_SHAPE = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def evaluation_figures(found: dict[str, Any]) -> list[str]:
    """`found` is the content of eval.json. Raises ValueError if it is not an evaluation."""
    try:
        kinds = dict.fromkeys(str(row["keys"]) for row in found["recall"])
        tasks = dict.fromkeys(str(row["task"]) for row in found.get("tasks", []))
        selection = SELECTION if found.get("selection") else ()
        return [
            _loss(found),
            *(_recall(found, keys) for keys in kinds),
            *(_task(found, task) for task in tasks),
            *(_selection(found["selection"], *texts) for texts in selection),
        ]
    except _WRONG_SHAPE as error:
        raise ValueError(f"is not an evaluation: {type(error).__name__}") from None


def evaluation_facts(found: dict[str, Any]) -> str:
    """HTML that names the weights, the data of the loss, the overrides and the number of questions."""
    samples = f"{whole(found.get('samples'), 0):,} questions for every depth or level and length"
    facts = [one_line(str(found[key]), 300) for key in ("weights", "data", "overrides") if found.get(key)]
    return f'<p class="about">{escape(" · ".join([*facts, samples]))}</p>'


def _loss(found: dict[str, Any]) -> str:
    curves = []
    for row, style in zip(found["loss"], cycle(STYLES), strict=False):
        ends = [(number(bucket["first"]), number(bucket["last"])) for bucket in row["buckets"]]
        losses = np.array([number(bucket["loss"]) for bucket in row["buckets"]])
        middles = np.sqrt([max(1.0, first * last) for first, last in ends])
        curves.append(Curve(f"{whole(row['length'], 0):,} tokens", middles, losses, style, dots=True))
    about = (
        "Validation loss of tokens by the number of tokens before them, for sequences of each length. "
        f"The run trained with {whole(found.get('trained_length'), 0):,} tokens."
    )
    plot = Plot("plot-position", "Loss by position", about, curves, "nats per token", along="context", log_x=True)
    drawn = lines(plot)
    if not drawn:
        raise ValueError
    return drawn


def _recall(found: dict[str, Any], keys: str) -> str:
    rows = [row for row in found["recall"] if row["keys"] == keys]
    depths = len(rows[0]["by_depth"])
    names = [f"{100 * depth // depths}-{100 * (depth + 1) // depths}" for depth in range(depths)]
    title = f"Recall, {one_line(keys, 20)} key{'' if keys == 'one' else 's'}"
    about = "Exact answers in %, by the depth of the key (rows, in % of the prompt) and the length of the prompt."
    return _shares(f"recall-{keys}", title, about, names, rows, [row["by_depth"] for row in rows])


def _task(found: dict[str, Any], task: str) -> str:
    rows = [row for row in found["tasks"] if row["task"] == task]
    unit = one_line(str(rows[0]["unit"]), 20)
    names = [f"{unit}: {whole(level, 0)}" for level in rows[0]["levels"]]
    about = f"Exact answers in %, by the number of {unit} (rows) and the length of the prompt."
    title = one_line(task, 20).capitalize()
    return _shares(f"task-{task}", title, about, names, rows, [row["by_level"] for row in rows])


def _selection(rows: list[dict[str, Any]], column: str, title: str, about: str) -> str:
    names = [short_layer(str(layer["layer"])) for layer in rows[0]["layers"]]
    columns = [[layer[column] for layer in row["layers"]] for row in rows]
    return _shares(f"selection-{column}", title, about, names, rows, columns)


def _shares(
    identity: str, title: str, about: str, names: list[str], rows: list[dict[str, Any]], columns: list[Any]
) -> str:
    """A heat map of shares in %: `columns` has those of each of `rows`, which are lengths."""
    shares = np.array([[number(share) for share in column] for column in columns]).T  # [name, length]
    if not 0 < shares.size <= MAX_CELLS or len(names) != len(shares):
        raise ValueError
    at = np.array([number(row["length"]) for row in rows])
    height, inside = heat_map(at, names, 100 * shares, (0.0, 100.0), WIDTH, "c1", "tokens", "{:.0f}".format)
    scale = f'<span class="scale" aria-hidden="true">0<i class="ramp c1"></i>{short(100.0)}</span>'
    return figure(f"plot-{escape(one_line(identity, 30))}", title, about, [("", WIDTH, height, inside)], scale)
