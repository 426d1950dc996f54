"""A curve and bars drawn with characters in a terminal."""

import math
from itertools import accumulate, pairwise

import numpy as np

from nsa.formatting import short
from nsa.inspect.run_files import Numbers

# Bits of a braille character, by row and column of its 4 x 2 dots.
_DOTS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))
_BRAILLE = 0x2800
_EIGHTHS = " ▁▂▃▄▅▆▇█"
LABEL = 8  # columns for the axis labels
# Replacements for a terminal with ASCII only; a braille character with any dot becomes "*".
TO_ASCII = str.maketrans("━─│█▓░▁▂▃▄▅▆▇…", "#-|#=...::-=+~") | dict.fromkeys(range(_BRAILLE + 1, _BRAILLE + 256), "*")


def curve(x: Numbers, y: Numbers, width: int, height: int) -> list[str]:
    """`height` lines of `width` columns, including the axis. Every dot column shows the range of its values, so that a
    spike of one step is visible. Values that are not finite are not drawn."""
    columns, rows = max(1, width - LABEL - 1), max(2, height - 1)
    finite = np.isfinite(y) & np.isfinite(x)
    x, y = x[finite], y[finite]
    if not len(y):
        return [" " * LABEL + "│ nothing to draw yet", *[""] * (height - 1)]
    low, high = float(y.min()), float(y.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    labels = {0: short(high), rows - 1: short(low), **({rows // 2: short((high + low) / 2)} if rows > 4 else {})}
    lines = _draw(x, (high - y) / (high - low), columns, rows)
    drawn = [f"{labels.get(at, ''):>{LABEL}}│{line}" for at, line in enumerate(lines)]
    first, last = f"step {x[0]:.0f}", f"{x[-1]:.0f}"
    axis = " " * (LABEL + 1) + first + " " * max(1, columns - len(first) - len(last)) + last
    return [*drawn, axis[: max(width, 1)]]


def _draw(x: Numbers, depth: Numbers, columns: int, rows: int) -> list[str]:
    """Lines of braille characters; `depth` is 0 at the top and 1 at the bottom. Distant points are connected."""
    across, down = 2 * columns, 4 * rows  # dots
    if 1 < len(x) < 2 * across:
        dense = np.linspace(x[0], x[-1], 4 * across)
        x, depth = np.concatenate([x, dense]), np.concatenate([depth, np.interp(dense, x, depth)])
    first, span = x.min(), np.ptp(x) or 1.0
    column = np.minimum(((x - first) / span * across).astype(int), across - 1)
    row = np.clip(np.round(depth * (down - 1)), 0, down - 1).astype(int)
    top, bottom = np.full(across, down), np.full(across, -1)
    np.minimum.at(top, column, row)
    np.maximum.at(bottom, column, row)
    at = np.arange(down)[:, None]
    dots = ((top <= at) & (at <= bottom)).reshape(rows, 4, columns, 2)
    signs = (dots * _DOTS[:, None]).sum(axis=(1, 3))
    return ["".join(chr(_BRAILLE + sign) if sign else " " for sign in line) for line in signs.tolist()]


def bars(values: tuple[float, ...]) -> str:
    """One character per value; the largest value is a full block."""
    most = max((v for v in values if math.isfinite(v)), default=0.0)
    heights = [max(1, round(8 * value / most)) if math.isfinite(value) and value > 0 else 0 for value in values]
    return "".join(_EIGHTHS[height] for height in heights)


def split_bar(shares: tuple[float, ...], width: int) -> list[int]:
    """The columns of each share in a bar of `width` columns; the ends of the shares are rounded."""
    shown = [share if math.isfinite(share) and share > 0 else 0.0 for share in shares]
    total = sum(shown)
    if total <= 0:
        return [0] * len(shares)
    ends = [round(width * end / total) for end in accumulate(shown)]
    return [end - start for start, end in pairwise([0, *ends])]
