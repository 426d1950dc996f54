"""Figures of the documentation: readable at the width of the site, on light and on dark pages.

An image does not see the theme of the page that shows it. The background is therefore transparent, and every colour
has enough contrast with white and with dark grey.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEUTRAL = "#808080"  # text, axes, and the dense model that others are compared with
COLOURS = ("#1f8fd5", "#d9730d", "#2f9e5b", "#c2519f", "#b08a00", "#7b74d9", "#0f9d9d", "#d6504c", "#8f6f55", "#6a8f1f")
WIDTH = 8.5  # inches, which the site shows at about their own size


@contextmanager
def figure(path: Path, rows: int, columns: int, salt: str) -> Iterator["Figure"]:
    """A figure with rows x columns panels, written to `path` at the end. The same results give the same bytes."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"text.color": NEUTRAL, "axes.labelcolor": NEUTRAL, "axes.edgecolor": NEUTRAL, "font.size": 12}
    style |= {"xtick.color": NEUTRAL, "ytick.color": NEUTRAL, "axes.facecolor": "none", "legend.frameon": False}
    style |= {"axes.titlesize": 12, "legend.fontsize": 11, "svg.hashsalt": salt, "svg.fonttype": "none"}
    with rc_context(style | {"axes.prop_cycle": cycler(color=COLOURS)}):
        drawn = Figure(figsize=(WIDTH, 4.2 * rows), layout="constrained")
        drawn.subplots(rows, columns, squeeze=False)
        yield drawn
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, metadata={"Date": None}, transparent=True)
