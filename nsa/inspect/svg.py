"""Plots as SVG text: axes with ticks and units, curves that keep their spikes, heat maps. Colors are CSS classes of
the page, which has a light and a dark mode. Text from files is escaped."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

import numpy as np

from nsa.formatting import short
from nsa.inspect.run_files import Numbers

MAX_POINTS = 1000  # per curve
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 22, 32
STYLES = ("c1", "c2", "c3", "c4", "c1 dash", "c2 dash", "c3 dash", "c4 dash")  # distinguishable styles of curves
_LEVELS = 20  # shades of a heat map
_DEEP = 13  # from this shade on, the text of a cell has the background color
_CELL, _LABEL = 24, 42  # minimum width of a cell with a number, and of an axis label
_BANDS = 60  # vertical strips with tooltips
_LOG_FROM = 30  # ratio of maximum to median from which the axis is logarithmic


@dataclass(frozen=True)
class Curve:
    name: str
    x: Numbers
    y: Numbers
    style: str = "c1"  # CSS classes
    dots: bool = False  # draw a dot for each finite value, and nothing for others


@dataclass(frozen=True)
class Frame:
    """Size of a plot in SVG units, and the ranges of its axes."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    along: str = "step"  # label of the horizontal axis
    log_x: bool = False

    def across(self, value: float) -> float:
        return LEFT + _share(value, self.x, self.log_x) * (self.width - LEFT - RIGHT)

    def down(self, value: float) -> float:
        return self.height - BOTTOM - _share(value, self.y, self.log) * (self.height - TOP - BOTTOM)


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    """The position of a value on an axis: 0 at its lower end, 1 at its upper end."""
    low, high, at = (math.log10(v) if log else v for v in (*ends, value))
    return (at - low) / ((high - low) or 1.0)


@dataclass
class Plot:
    """A line plot; `marks` are steps with a text, drawn as arrows above the curves."""

    identity: str
    title: str
    about: str
    curves: list[Curve]
    unit: str = ""
    from_zero: bool = False
    marks: list[tuple[float, str]] = field(default_factory=list)
    may_be_log: bool = False
    along: str = "step"
    log_x: bool = False


def thin(x: Numbers, y: Numbers, most: int = MAX_POINTS) -> tuple[Numbers, Numbers]:
    """About `most` points: the minimum and maximum of every interval, the first and the last point."""
    if len(x) <= most:
        return x, y
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 2):
        is_finite = np.isfinite(y[part])
        finite, bad = part[is_finite], part[~is_finite]
        if len(finite):
            keep |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
        keep |= set(bad[:1].tolist())  # keeps gaps visible
    at = np.array(sorted(keep))
    return x[at], y[at]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within a range: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + n) * step, 12) for n in range(count)]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(powers) / 6))
    found = [10.0**power for power in powers if power % every == 0 and low <= 10.0**power <= high]
    return found if len(found) > 1 else [low, high]


def draw(plot: Plot, width: int, height: int) -> str:
    """The content of an <svg>. At least one curve must have a finite value."""
    curves = [_shown(curve) for curve in plot.curves]
    values = np.concatenate([c.y[np.isfinite(c.y)] for c in curves])
    xs = np.concatenate([c.x for c in curves])
    frame = _frame(plot, values, xs, width, height)
    parts = [_axes(frame, plot.unit), *(_curve(frame, curve) for curve in curves), _bands(frame, curves, plot.unit)]
    for step, text in plot.marks:
        if frame.x[0] <= step <= frame.x[1]:
            at = frame.across(step)
            parts.append(f'<path class="mark" d="M{at:.1f} {TOP + 2}l-5 -9h10z"><title>{escape(text)}</title></path>')
    return "".join(parts)


def _shown(curve: Curve) -> Curve:
    known = np.isfinite(curve.x) & (np.isfinite(curve.y) | (not curve.dots))
    x, y = thin(curve.x[known], curve.y[known])
    return replace(curve, x=x, y=y)


def _frame(plot: Plot, values: Numbers, xs: Numbers, width: int, height: int) -> Frame:
    low, high = float(values.min()), float(values.max())
    log = plot.may_be_log and low > 0 and high / float(np.median(values)) > _LOG_FROM
    if plot.from_zero and not log:
        low = min(0.0, low)
    if log:
        low, high = low / 1.2, high * 1.2
    else:
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (low if plot.from_zero and low == 0.0 else low - room), high + room
    first, last = float(xs.min()), float(xs.max())
    ends = (first, last if last > first else first + 1.0)
    return Frame(width, height, ends, (low, high), log, plot.along, plot.log_x)


def _axes(frame: Frame, unit: str) -> str:
    right, bottom = frame.width - RIGHT, frame.height - BOTTOM
    parts = []
    for value in log_ticks(*frame.y) if frame.log else ticks(*frame.y):
        y = frame.down(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>')
    steps = log_ticks(*frame.x) if frame.log_x else ticks(*frame.x, most=max(3, frame.width // 100))
    shown = [x for x in steps if x == int(x) or frame.along != "step"]
    parts.append(_step_axis(frame, ((frame.across(x), short(x)) for x in shown)))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    note = f"{unit}, logarithmic" if frame.log and unit else "logarithmic" if frame.log else unit
    parts.append(f'<text class="unit" x="4" y="12">{escape(note)}</text>')
    return "".join(parts)


def _step_axis(frame: Frame, marks: Iterable[tuple[float, str]]) -> str:
    """`marks` are horizontal positions and their labels."""
    bottom, parts = frame.height - BOTTOM, []
    for x, label in marks:
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 17}">{label}</text>')
    end = f'x="{frame.width - RIGHT}" y="{frame.height - 2}"'
    return "".join(parts) + f'<text class="unit" text-anchor="end" {end}>{escape(frame.along)}</text>'


def _curve(frame: Frame, curve: Curve) -> str:
    """A line; where a value is not finite it has a gap and a cross on the upper edge. Or dots."""
    points, crosses, spots, pen = [], [], [], "M"
    for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
        if math.isfinite(y) and not (frame.log and y <= 0):
            points.append(f"{pen}{frame.across(x):.1f} {frame.down(y):.1f}")
            spots.append(
                f'<circle class="{curve.style} dot" cx="{frame.across(x):.1f}" cy="{frame.down(y):.1f}" r="3"/>'
            )
            pen = "L"
        elif not curve.dots:
            crosses.append(f"M{frame.across(x) - 4:.1f} {TOP}l8 8m0 -8l-8 8")
            pen = "M"
    bad = f'<path class="bad" d="{"".join(crosses)}"><title>not finite</title></path>' if crosses else ""
    dots = "".join(spots[:: max(1, len(spots) // 150)]) if curve.dots else ""
    return f'<path class="{curve.style} line" d="{"".join(points)}"/>{bad}{dots}'


def _bands(frame: Frame, curves: Sequence[Curve], unit: str) -> str:
    """Invisible strips whose tooltips show the values there, without a script."""
    parts = []
    space = np.geomspace if frame.log_x else np.linspace
    for start, end in pairwise(space(*frame.x, _BANDS + 1).tolist()):
        ranges = [line for curve in curves if (line := _range_text(curve, start, end))]
        if ranges:
            x, wide = frame.across(start), frame.across(end) - frame.across(start)
            span = f"{start:.0f} to {end:.0f}" if frame.along == "step" else f"{short(start)} to {short(end)}"
            text = escape(f"{frame.along} {span}\n" + "\n".join(ranges) + (f"\n({unit})" if unit else ""))
            box = f'x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{frame.height - TOP - BOTTOM}"'
            parts.append(f'<rect class="band" {box}><title>{text}</title></rect>')
    return "".join(parts)


def _range_text(curve: Curve, start: float, end: float) -> str:
    part = curve.y[(curve.x >= start) & (curve.x <= end)]
    part = part[np.isfinite(part)]
    if not len(part):
        return ""
    low, high = short(float(part.min())), short(float(part.max()))
    return f"{curve.name}: {low}" if low == high else f"{curve.name}: {low} to {high}"


def heat_map(
    steps: Numbers,
    names: Sequence[str],
    values: Numbers,
    scale: tuple[float, float],
    width: int,
    style: str,
    along: str = "step",
    written: Callable[[float], str] | None = None,
) -> tuple[int, str]:
    """The height and the content of an <svg>. `values` [row, step] over the range `scale` are shown as depth of color,
    and as the text that `written` formats unless it is None."""
    rows, columns = values.shape
    low, high = scale
    height = TOP + BOTTOM + max(110, min(420, rows * 17))
    frame = Frame(width, height, (0.0, float(columns)), (0.0, 1.0), along=along)
    tall, wide = (height - TOP - BOTTOM) / rows, (width - LEFT - RIGHT) / columns
    shades = np.round(_LEVELS * np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0))
    levels: defaultdict[int, list[str]] = defaultdict(list)
    texts = []
    for row, column in np.argwhere(np.isfinite(values)).tolist():
        corner = f"M{frame.across(column):.1f} {TOP + row * tall:.1f}"
        levels[int(shades[row, column])].append(f"{corner}h{wide + 0.3:.1f}v{tall - 0.6:.1f}h-{wide + 0.3:.1f}z")
        if written and wide >= _CELL:
            deep = " deep" if shades[row, column] >= _DEEP else ""
            place = f'x="{frame.across(column + 0.5):.1f}" y="{TOP + (row + 0.5) * tall + 4:.1f}"'
            texts.append(
                f'<text class="cell{deep}" text-anchor="middle" {place}>{escape(written(values[row, column]))}</text>'
            )
    parts = [
        f'<path class="{style} heat" fill-opacity="{level / _LEVELS:.2f}" d="{"".join(cells)}"/>'
        for level, cells in sorted(levels.items())
    ]
    room = f'x="{LEFT}" y="{TOP}" width="{width - LEFT - RIGHT}" height="{frame.height - TOP - BOTTOM}"'
    plate = f'<rect class="plate" {room}/>'  # a map of zeros is visible by its border
    # All columns have the same width; ticks show steps at equal distances, from the newest backwards. Columns with
    # numbers are few, and each has a label if there is room.
    every = math.ceil(_LABEL / wide) if written else math.ceil((len(steps) - 1) / 4)
    ticked = range(len(steps) - 1, -1, -max(1, every))
    label = "{:,.0f}".format if written else short
    axis = _step_axis(frame, ((frame.across(at + 0.5), label(steps[at])) for at in ticked))
    return height, plate + "".join([*parts, *texts]) + _row_labels(frame, names, values, tall) + axis


def _row_labels(frame: Frame, names: Sequence[str], values: Numbers, tall: float) -> str:
    every, parts = max(1, math.ceil(13 / tall)), []
    for row, name in enumerate(names):
        y = TOP + row * tall
        if row % every == 0:
            label = name if len(name) <= 9 else name[:8] + "…"
            parts.append(
                f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + tall / 2 + 4:.1f}">{escape(label)}</text>'
            )
        known = values[row][np.isfinite(values[row])]
        range_ = f"{known.min():.3f} to {known.max():.3f}" if len(known) else "no value"
        range_ += f", last {known[-1]:.3f}" if len(known) and frame.along == "step" else ""
        box = f'x="{LEFT}" y="{y:.1f}" width="{frame.width - LEFT - RIGHT}" height="{tall:.1f}"'
        parts.append(f'<rect class="band" {box}><title>{escape(f"{name}: {range_}")}</title></rect>')
    return "".join(parts)
