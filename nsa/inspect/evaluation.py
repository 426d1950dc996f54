"""The figures of an evaluation (`nsa eval`): loss by position, and recall by depth and length."""

from html import escape
from typing import Any

import numpy as np

from nsa.formatting import one_line, short
from nsa.inspect.report_plots import WIDTH, figure, lines
from nsa.inspect.run_files import number, whole
from nsa.inspect.svg import STYLES, Curve, Plot, heat_map

MAX_CELLS = 400  # per heat map
_WRONG_SHAPE = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def evaluation_figures(found: dict[str, Any]) -> list[str]:
    """`found` is the content of eval.json. Raises ValueError if it is not an evaluation."""
    try:
        kinds = dict.fromkeys(str(row["keys"]) for row in found["recall"])
        return [_loss(found), *(_recall(found, keys) for keys in kinds)]
    except _WRONG_SHAPE as error:
        raise ValueError(f"is not an evaluation: {type(error).__name__}") from None


def evaluation_facts(found: dict[str, Any]) -> str:
    """HTML that names the weights and the number of questions."""
    samples = f"{whole(found.get('samples'), 0):,} questions at every depth and length"
    return f'<p class="about">{escape(one_line(str(found.get("weights")), 300))} · {samples}</p>'


def _loss(found: dict[str, Any]) -> str:
    curves = []
    for row, style in zip(found["loss"], STYLES, strict=False):
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
    shares = np.array([[number(share) for share in row["by_depth"]] for row in rows]).T  # [depth, length]
    depths, lengths = shares.shape
    if not 0 < depths * lengths <= MAX_CELLS:
        raise ValueError
    names = [f"{100 * depth // depths}-{100 * (depth + 1) // depths}" for depth in range(depths)]
    at = np.array([number(row["length"]) for row in rows])
    height, inside = heat_map(at, names, 100 * shares, (0.0, 100.0), WIDTH, "c1", "tokens", "{:.0f}".format)
    title = f"Recall, {one_line(keys, 20)} key{'' if keys == 'one' else 's'}"
    about = "Exact answers in %, by the depth of the key (rows, in % of the prompt) and the length of the prompt."
    scale = f'<span class="scale" aria-hidden="true">0<i class="ramp c1"></i>{short(100.0)}</span>'
    return figure(f"plot-recall-{escape(one_line(keys, 20))}", title, about, [("", WIDTH, height, inside)], scale)
