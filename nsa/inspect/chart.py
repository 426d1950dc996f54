"""A curve and bars drawn with characters, for terminals."""

import math
from itertools import accumulate, pairwise

import numpy as np

from nsa.inspect.run_files import Numbers
from nsa.record.numbers import short

# Bits of a braille character by row and column of its 4 x 2 dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN_EIGHTHS = " ..::-=+#"
LABEL = 8  # columns for the numbers of the axis


def curve(x: Numbers, y: Numbers, width: int, height: int, *, plain: bool = False) -> list[str]:
    """`height` lines of `width` columns, the axis included. Every dot column shows the range of its values, so that a
    spike of one step is seen. Nothing is drawn for values that are not finite."""
    columns, rows = max(1, width - LABEL - 1), max(2, height - 1)
    finite = np.isfinite(y) & np.isfinite(x)
    x, y = x[finite], y[finite]
    if not len(y):
        return [" " * LABEL + "│" * (not plain) + " nothing to draw yet", *[""] * (height - 1)]
    low, high = float(y.min()), float(y.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    across, down = (1, 1) if plain else (2, 4)
    cells = _ranges(x, y, columns * across, rows * down, low, high)
    lines = _draw(cells, columns, rows, across, down)
    bar = "|" if plain else "│"
    labels = {0: short(high), rows - 1: short(low), **({rows // 2: short((high + low) / 2)} if rows > 4 else {})}
    drawn = [f"{labels.get(at, ''):>{LABEL}}{bar}{line}" for at, line in enumerate(lines)]
    first, last = f"step {x[0]:.0f}", f"{x[-1]:.0f}"
    axis = " " * (LABEL + 1) + first + " " * max(1, columns - len(first) - len(last)) + last
    return [*drawn, axis[: max(width, 1)]]


def _ranges(x: Numbers, y: Numbers, columns: int, rows: int, low: float, high: float) -> list[tuple[int, int] | None]:
    """Highest and lowest dot row of each dot column; points that lie apart are joined."""
    if 1 < len(x) < 2 * columns:
        dense = np.linspace(x[0], x[-1], 4 * columns)
        x, y = np.concatenate([x, dense]), np.concatenate([y, np.interp(dense, x, y)])
    first, last = float(x.min()), float(x.max())
    span = (last - first) or 1.0
    column = np.minimum(((x - first) / span * columns).astype(int), columns - 1)
    row = np.clip(np.round((high - y) / (high - low) * (rows - 1)), 0, rows - 1).astype(int)
    top, bottom = np.full(columns, rows), np.full(columns, -1)
    np.minimum.at(top, column, row)
    np.maximum.at(bottom, column, row)
    return [(int(t), int(b)) if b >= 0 else None for t, b in zip(top, bottom, strict=True)]


def _draw(cells: list[tuple[int, int] | None], columns: int, rows: int, across: int, down: int) -> list[str]:
    """Characters of `across` x `down` dots: braille, or one asterisk for each dot."""
    bits = [[0] * columns for _ in range(rows)]
    for at, cell in enumerate(cells):
        for dot in range(cell[0], cell[1] + 1) if cell else ():
            bits[dot // down][at // across] |= _DOTS[dot % down][at % across]
    return ["".join((chr(_BRAILLE + b) if down > 1 else "*") if b else " " for b in line) for line in bits]


def bars(values: list[float], *, plain: bool = False) -> str:
    """One character a value, the largest full."""
    signs = _PLAIN_EIGHTHS if plain else _EIGHTHS
    most = max((v for v in values if math.isfinite(v)), default=0.0)
    heights = [max(1, round(8 * value / most)) if math.isfinite(value) and value > 0 else 0 for value in values]
    return "".join(signs[height] for height in heights)


def split_bar(shares: tuple[float, ...], width: int) -> list[int]:
    """Columns of each share of a bar, `width` in all: where each ends is rounded."""
    shown = [share if math.isfinite(share) and share > 0 else 0.0 for share in shares]
    total = sum(shown)
    if total <= 0:
        return [0] * len(shares)
    ends = [round(width * end / total) for end in accumulate(shown)]
    return [end - start for start, end in pairwise([0, *ends])]
