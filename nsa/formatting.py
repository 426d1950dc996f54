"""Formats numbers and untrusted text for display."""

import math
import time
from collections.abc import Sequence
from typing import Any

from nsa.errors import printable

DASH = "-"


def plain(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by strings."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def short(value: float) -> str:
    """Formats with three significant digits and the suffix k, M, G or T."""
    if not math.isfinite(value):
        return DASH if math.isnan(value) else str(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def counted(count: int, one: str, many: str = "") -> str:
    """Formats a count with its noun: 1 rank, 2 ranks, 1,024 passes. `many` is the plural if adding an s is wrong."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(items: Sequence[object], most: int) -> str:
    """Formats the first `most` items: 3, 5, 8 and 2 more."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def exact(value: float, spec: str = ".4f") -> str:
    return format(value, spec) if math.isfinite(value) else (DASH if math.isnan(value) else str(value))


def percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else DASH


def seconds(value: float) -> str:
    """Formats a duration with at most two units: 4.2 s, 3 min 5 s, 2 h 10 min, 6 d 4 h."""
    if not math.isfinite(value):
        return DASH
    if value < 60:
        return f"{value * 1000:.0f} ms" if 0 < value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{whole} s"


def clock(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Formats a Unix time as local time."""
    try:
        return time.strftime(form, time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return DASH


def one_line(text: str, most: int = 2000) -> str:
    """Removes line breaks and escapes control characters: text from a file must not control the terminal."""
    text = "".join(c if c.isprintable() else " " for c in printable(text[: most + 1]))
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
