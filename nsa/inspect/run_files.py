"""Readers of the files of a run. Each reader reads its file once, when it is constructed, up to the last whole line.

A run may be writing the files: a last line without its newline is skipped. Lines that cannot be parsed are counted and
reported by `problem`; no reader raises. Samples of several ranks are merged as if one rank had seen all rows. This
module imports neither torch nor pyarrow, so that a view opens quickly.
"""

import csv
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from nsa import run_folder
from nsa.files import open_regular, read_regular
from nsa.plain_yaml import LARGEST_SAVED, parse_yaml
from nsa.record.samples import Sample
from nsa.run_folder import ALL_LAYERS, Event, GateStats, SelectionStats, Table

Numbers = npt.NDArray[np.float64]
Row = dict[str, Any]  # text columns as text, all others as float
Stats = TypeVar("Stats", GateStats, SelectionStats)

LONGEST_LINE = 16 * 2**20  # bytes; a longer line counts as several damaged ones
# Above the largest float32, in which training computes, and small enough that sums and products of two stay finite.
LARGEST = 1e100
MISSING = "missing"
SAMPLES_SHOWN = 8
_COUNTS = ("rows", "max_distinct", "count")  # columns that hold counts
_MERGED_BY: dict[str, Callable[[list[Any]], Any]]
_MERGED_BY = {"rows": sum, "max_distinct": max, "largest_share": max, "min_entropy": min}
_OF_BLOCKS = ("share_forced", "agreement", "distances")
_ROUTINE = re.compile(
    rb'\{"v": \d+, "time": [\d.]+, "rank": \d+, "step": \d+, "event": "(%s)".*\}'
    % "|".join(run_folder.ROUTINE_EVENTS).encode()
)


class LogFile:
    """Passes every whole line to `add`, which raises ValueError for a damaged line."""

    unit = "lines"

    def __init__(self, path: Path):
        self.path, self.damaged, self._unreadable = path, 0, ""
        try:
            with open_regular(path) as file:
                while (line := file.readline(LONGEST_LINE)).endswith(b"\n") or len(line) == LONGEST_LINE:
                    try:
                        self.add(line.removesuffix(b"\n"))
                    except (ValueError, OverflowError, csv.Error):
                        self.damaged += 1
        except FileNotFoundError:
            self._unreadable = MISSING
        except OSError as error:
            self._unreadable = f"cannot be read: {error.strerror}"

    def add(self, line: bytes) -> None:
        raise NotImplementedError

    @property
    def problem(self) -> str:
        return self._unreadable or (f"{self.damaged} damaged {self.unit} left out" if self.damaged else "")


class SamplesFile(LogFile):
    """The newest texts that the run generated, in order. Most runs have none."""

    def __init__(self, path: Path):
        self.newest = deque[Sample](maxlen=SAMPLES_SHOWN)
        super().__init__(path)

    def add(self, line: bytes) -> None:
        self.newest.append(Sample.of(line))

    @property
    def problem(self) -> str:
        return "" if self._unreadable == MISSING else super().problem


class TableFile(LogFile):
    """A CSV file. Columns may be reordered, missing or added: an empty or missing cell is NaN."""

    unit = "rows"

    def __init__(self, path: Path, table: Table):
        self.table = table
        self._header: list[str] = []
        super().__init__(path)

    def take(self, numbers: list[float], texts: list[str]) -> None:
        """Stores one row: its numbers and its texts, each in the order of the table's columns."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        if not self._unreadable and not self._header:
            return "has no header"
        if not self._unreadable and "step" not in self._header:
            return "damaged: the first line is not the header of this table"
        return super().problem

    def add(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        cells = next(csv.reader([text]), []) if '"' in text else text.split(",")
        if not self._header:
            self._header = cells
            places = {name: at for at, name in enumerate(cells)}
            found = [(name in self.table.text, places.get(name, -1)) for name in self.table.columns]
            self._texts, self._numbers = ([at for is_text, at in found if is_text is kind] for kind in (True, False))
        elif "step" in self._header:
            if len(cells) != len(self._header):
                raise ValueError
            cells.append("")  # at index -1, the cell of a missing column
            numbers = [float(cells[at] or "nan") for at in self._numbers]
            if not 0 <= numbers[0] <= LARGEST:  # the step
                raise ValueError
            self.take(numbers, [cells[at] for at in self._texts])


class StepTable(TableFile):
    """One row of numbers per step. Steps must increase: of two rows out of order, the one that also breaks the order of
    its other neighbour is damaged."""

    def __init__(self, path: Path, table: Table):
        self._rows: list[list[float]] = []
        super().__init__(path, table)
        self._values: Numbers = np.array(self._rows, dtype=np.float64).reshape(-1, len(table.columns))
        self._values[np.abs(self._values) > LARGEST] *= math.inf
        del self._rows

    def take(self, numbers: list[float], texts: list[str]) -> None:
        if self._rows and self._rows[-1][0] >= numbers[0]:
            if len(self._rows) > 1 and self._rows[-2][0] >= numbers[0]:
                raise ValueError
            self.damaged += 1
            self._rows.pop()
        self._rows.append(numbers)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def step(self) -> int:
        """The last step; -1 if there are no rows."""
        return int(self._values[-1, 0]) if len(self) else -1

    def column(self, name: str) -> Numbers:
        return self._values[:, self.table.columns.index(name)].copy()


class SampleTable(TableFile):
    """Any number of rows per step, stored by step. A row without a finite count is damaged: otherwise its step could be
    the newest and have no sample."""

    def __init__(self, path: Path, table: Table):
        self.steps: dict[int, list[tuple[list[float], list[str]]]] = {}
        self._names = [name for name in table.columns if name not in table.text]
        self._counts = [self._names.index(name) for name in _COUNTS if name in self._names]
        super().__init__(path, table)

    def take(self, numbers: list[float], texts: list[str]) -> None:
        if not all(0 <= numbers[at] <= LARGEST for at in self._counts):
            raise ValueError
        self.steps.setdefault(int(numbers[0]), []).append((numbers, texts))

    def rows(self, step: int) -> Iterator[Row]:
        for numbers, texts in self.steps.get(step, ()):
            yield dict(zip((*self._names, *self.table.text), (*map(bounded, numbers), *texts), strict=True))


def rank_tables(table: Table, folder: Path, world_size: int) -> dict[int, SampleTable]:
    """The same table of all ranks, without those that the run does not have: an earlier run may have written them."""
    paths = {0: table.files.path(folder, 0), **table.files.find(folder)}
    return {rank: SampleTable(path, table) for rank, path in paths.items() if rank == 0 or rank < world_size}


class Samples(Generic[Stats]):
    """Statistics of one kind. `at` merges the ranks of a step on request."""

    def __init__(self, table: Table, kind: type[Stats], folder: Path, world_size: int):
        self.files = rank_tables(table, folder, world_size)
        self._kind: type[Stats] = kind
        self.steps = sorted(set().union(*(file.steps for file in self.files.values())))

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    def by_step(self) -> dict[int, dict[str, Stats]]:
        return {step: self.at(step) for step in self.steps}

    def at(self, step: int) -> dict[str, Stats]:
        """Statistics by layer, or by ALL_LAYERS in a table without layers."""
        parts: defaultdict[str, list[Stats]] = defaultdict(list)
        for row in (row for file in self.files.values() for row in file.rows(step)):
            parts[row.get("layer", ALL_LAYERS)].append(self._kind.of(row))
        return {layer: merged(part) for layer, part in parts.items()}


def merged(parts: Sequence[Stats]) -> Stats:
    """The statistics of several ranks as if one rank had seen all rows. Shares of blocks are weighted by blocks, all
    others by rows. The files lack the number of blocks that an agreement refers to, and of the rows of a mass."""
    if len(parts) == 1:
        return parts[0]  # without the rounding of a product
    found: dict[str, Any] = {}
    for name in vars(parts[0]):
        known = [part for part in parts if getattr(part, name) is not None]
        values = [getattr(part, name) for part in known]
        if name in _MERGED_BY:
            found[name] = _MERGED_BY[name](values)
            continue
        weights = [part.rows * (getattr(part, "mean_distinct", 1.0) if name in _OF_BLOCKS else 1.0) for part in known]
        means: Any = np.average(values, 0, weights if any(weights) else None).tolist() if values else None
        found[name] = tuple(means) if name == "distances" else means
    return type(parts[0])(**found)


def total_fallbacks(tables: Mapping[int, SampleTable], started_at: int) -> dict[tuple[str, str], float]:
    """How often a fast kernel was requested and not used, by branch and reason, summed over ranks. Counters restart
    with the process: only rows after step `started_at` of the newest start count."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for file in tables.values():
        newest = max(file.steps, default=0)
        for row in file.rows(newest) if newest > started_at else ():
            counts[row["branch"], row["reason"]] += row["count"]
    return dict(sorted(counts.items()))


class HeartbeatFile(LogFile):
    """The events of one rank since the last start with --fresh, which keeps the file of the run before.

    For speed, of the routine events it parses only the first and the last step of the newest start and the last event
    before each non-routine one; the tables have their numbers.
    """

    def __init__(self, path: Path):
        self.events: list[Event] = []  # all non-routine events
        self.newest: Event = {}
        self.done_steps = 0
        self.first_step: Event = {}  # of the newest start of the process
        self.attempts: list[float] = []  # start times of the process
        self.seconds: list[float] = []  # duration of each attempt
        self._routine = self._last_step = b""  # the newest routine event, not counted yet, and the newest step
        super().__init__(path)
        self._count_routine()

    @property
    def last_step(self) -> Event:
        return next(iter(run_folder.parse_events([self._last_step])), {})

    def add(self, line: bytes) -> None:
        if routine := _ROUTINE.fullmatch(line):
            self._routine = line
            if not self.attempts:
                self._count_routine()
            if routine[1] == b"step":
                self._last_step = line
                self.first_step = self.first_step or self.last_step
        elif line.strip():
            event = run_folder.parse_event(line)
            self._count_routine()
            self._count(event)
            self.events.append({**event, "attempt": len(self.attempts)})
            if event["event"] == "start" and event.get("fresh"):
                self._drop_earlier_attempts()

    def _count_routine(self) -> None:
        for event in run_folder.parse_events([self._routine]):
            self._count(event)
        self._routine = b""

    def _count(self, event: Event) -> None:
        """Makes the event the newest one and updates the duration of the attempt."""
        if event["event"] == "boot" or not self.attempts:
            self.attempts.append(event["time"])
            self.seconds.append(0.0)
            self._began, self.first_step = event, {}
        self.seconds[-1] = max(self.seconds[-1], seconds_between(self._began, event))
        self.newest = event
        if event["event"] not in ("hang", "attention"):  # they name the step that has begun
            self.done_steps = event["step"]

    def _drop_earlier_attempts(self) -> None:
        attempt = len(self.attempts)
        self.events = [{**event, "attempt": 1} for event in self.events if event["attempt"] == attempt]
        self.attempts, self.seconds = self.attempts[-1:], self.seconds[-1:]
        self.first_step, self._last_step = {}, b""


def seconds_between(first: Event, last: Event) -> float:
    """By the monotonic clock of the process: the time of day may jump, and goes on while a machine is suspended."""
    by_clock, by_time = (number(last.get(key)) - number(first.get(key)) for key in ("clock", "time"))
    return by_time if math.isnan(by_clock) else by_clock  # files of 0.1 have no clock


def read_document(path: Path) -> tuple[Row, str]:
    """The content of a small JSON or YAML file, and a description of the problem if it cannot be read."""
    try:
        is_json = path.suffix == ".json"
        content = run_folder.read_json(path) if is_json else parse_yaml(read_regular(path).decode(), LARGEST_SAVED)
    except FileNotFoundError:
        return {}, MISSING
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except (ValueError, yaml.YAMLError, RecursionError):
        return {}, "damaged: cannot be parsed"
    return (content, "") if content and isinstance(content, dict) else ({}, "damaged: not a table of values")


def lookup(content: Any, path: str) -> Any:
    """The value at the dotted path `a.b` in nested dicts; None if there is none."""
    for key in path.split("."):
        if not isinstance(content, dict) or key not in content:
            return None
        content = content[key]
    return content


def number(value: Any, otherwise: float = math.nan) -> float:
    """Converts a value from a file that may be damaged or edited."""
    try:
        return bounded(float(value))
    except (TypeError, ValueError, OverflowError):
        return otherwise


def bounded(value: float) -> float:
    """The number, or infinity if computing with it could overflow."""
    return value if abs(value) <= LARGEST else value * math.inf


def whole(value: Any, otherwise: int) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else otherwise
