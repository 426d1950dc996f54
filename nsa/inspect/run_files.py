"""The files of a run, read while they grow.

Each reader remembers its offset: a refresh costs what was added since the last one. A file that was truncated or
rewritten, as when a run resumes, is noticed and read again from the start. What cannot be read is counted and named in
`problem`; nothing here raises. Samples of several ranks are merged as if one had seen all rows. Torch and pyarrow are
not needed: a view must open at once.
"""

import csv
import math
import os
import re
from array import array
from collections import defaultdict, deque
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

_CHUNK = 64 * 2**20  # bytes that are read at once; every line is shorter
# Beyond float32, in which training computes, and small enough that sums and products of two stay finite.
LARGEST = 1e100
MISSING = "missing"
SAMPLES_SHOWN = 8
_COUNTS = ("rows", "max_distinct", "count")  # columns of samples
_FINGERPRINT = 256  # bytes before the offset that must still be there
_ROUTINE = re.compile(
    rb'\{"v": \d+, "time": (\d+(?:\.\d+)?), "rank": \d+, "step": (\d+), "event": "(%s)"(?:, "clock": (\d+\.\d+))?.*\}'
    % "|".join(run_folder.ROUTINE_EVENTS).encode()
)


class GrowingFile:
    """Gives every whole line that was added to `add`. A last line without its newline waits for the rest."""

    unit = "lines"

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        self._unreadable = ""
        self._offset, self._before = 0, b""
        self.clear()

    def clear(self) -> None:
        """Forgets all lines."""
        raise NotImplementedError

    def add(self, line: bytes) -> None:
        """Raises ValueError where the line is damaged."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        return self._unreadable or (f"{self.damaged} damaged {self.unit} left out" if self.damaged else "")

    def refresh(self) -> None:
        while lines := self._new_lines():
            for line in lines:
                try:
                    self.add(line)
                except (ValueError, OverflowError, csv.Error):
                    self.damaged += 1

    def _new_lines(self) -> list[bytes]:
        try:
            with open_regular(self.path) as file:
                if self._was_rewritten(file.fileno()):
                    self._restart()
                file.seek(self._offset)
                new = file.read(_CHUNK)
        except FileNotFoundError:
            self._restart()
            self._unreadable = MISSING
            return []
        except OSError as error:
            self._unreadable = f"cannot be read: {error.strerror}"
            return []
        self._unreadable = ""
        whole = new if len(new) == _CHUNK and b"\n" not in new else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole[-_FINGERPRINT:])[-_FINGERPRINT:]
        return whole.splitlines()

    def _was_rewritten(self, file: int) -> bool:
        """The size alone does not tell: a truncated file may have grown past the offset again."""
        if os.fstat(file).st_size < self._offset:
            return True
        return os.pread(file, len(self._before), self._offset - len(self._before)) != self._before

    def _restart(self) -> None:
        self._offset, self._before, self.damaged = 0, b"", 0
        self.clear()


class SamplesFile(GrowingFile):
    """The newest texts that the run wrote, the last one last. Most runs have none."""

    def clear(self) -> None:
        self.newest = deque[Sample](maxlen=SAMPLES_SHOWN)

    def add(self, line: bytes) -> None:
        self.newest.append(Sample.of(line))

    @property
    def problem(self) -> str:
        return "" if self._unreadable == MISSING else super().problem


class TableFile(GrowingFile):
    """A CSV file. Its columns may be in another order, fewer or more: an empty or missing cell is NaN."""

    unit = "rows"

    def __init__(self, path: Path, table: Table):
        self.table = table
        self._numbers = [name for name in table.columns if name not in table.text]
        super().__init__(path)

    def clear(self) -> None:
        self._header: list[str] = []

    def take(self, row: Row) -> None:
        """One row. Raises ValueError where it cannot be."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        if not self._unreadable and not self._header:
            return "holds no header"
        if not self._unreadable and "step" not in self._header:
            return "damaged: its first line is no header of this table"
        return super().problem

    def add(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        cells = next(csv.reader([text]), []) if '"' in text else text.split(",")
        if not self._header:
            self._header = cells
        elif "step" in self._header:
            found = dict(zip(self._header, cells, strict=True))
            row: Row = {name: bounded(float(found.get(name) or "nan")) for name in self._numbers}
            if not 0 <= row["step"] < math.inf:
                raise ValueError
            self.take(row | {name: found.get(name, "") for name in self.table.text})


class StepTable(TableFile):
    """A row per step, kept as numbers. Steps rise: of two rows that do not, the one that breaks the order of all
    others is the damaged one."""

    def clear(self) -> None:
        super().clear()
        self._width, self._values = len(self.table.columns), array("d")  # row by row

    def take(self, row: Row) -> None:
        if self.step >= row["step"]:
            if len(self) > 1 and self._values[-2 * self._width] >= row["step"]:
                raise ValueError
            self.damaged += 1
            del self._values[-self._width :]
        self._values.extend(row.values())

    def __len__(self) -> int:
        return len(self._values) // self._width

    @property
    def step(self) -> int:
        """The newest; -1 where there is none."""
        return int(self._values[-self._width]) if self._values else -1

    def column(self, name: str) -> Numbers:
        """All values of a column so far."""
        return np.array(self._values[self.table.columns.index(name) :: self._width])


class SampleTable(TableFile):
    """Any number of rows per step, kept by step. A row whose counts are none is damaged: with it, its step would have
    no sample, and be the newest."""

    def clear(self) -> None:
        super().clear()
        self.rows: dict[int, list[Row]] = {}

    def take(self, row: Row) -> None:
        if not all(0 <= row[name] < math.inf for name in _COUNTS if name in row):
            raise ValueError
        self.rows.setdefault(int(row["step"]), []).append(row)


class RankTables:
    """One table of all ranks; `files` is by rank."""

    def __init__(self, table: Table):
        self.table, self.files = table, dict[int, SampleTable]()

    def refresh(self, folder: Path, world_size: int) -> None:
        """Files of ranks that the run no longer has, or does not write, may be of an earlier run: they are ignored."""
        paths = {0: self.table.files.path(folder, 0), **self.table.files.find(folder)}
        ranks = [rank for rank in paths if rank == 0 or rank < world_size]
        self.files = {rank: self.files.get(rank) or SampleTable(paths[rank], self.table) for rank in ranks}
        for file in self.files.values():
            file.refresh()


class Samples(RankTables, Generic[Stats]):
    """Statistics of one kind. A step is merged on request."""

    def __init__(self, table: Table, kind: type[Stats]):
        super().__init__(table)
        self._kind: type[Stats] = kind

    @property
    def last_step(self) -> int:
        return max((max(file.rows) for file in self.files.values() if file.rows), default=0)

    def by_step(self) -> dict[int, dict[str, Stats]]:
        steps = sorted(set().union(*(file.rows for file in self.files.values())))
        return {step: found for step in steps if (found := self.at(step))}

    def at(self, step: int) -> dict[str, Stats]:
        """By layer, or ALL_LAYERS in a table without layers. Empty where the columns are not those of this table."""
        parts: dict[str, list[Stats]] = {}
        try:
            for row in (row for file in self.files.values() for row in file.rows.get(step, ())):
                parts.setdefault(row.get("layer", ALL_LAYERS), []).append(self._kind.of(row))
            return {layer: self._kind.merge(part) for layer, part in parts.items()}
        except (KeyError, ValueError, OverflowError, ZeroDivisionError):
            return {}


def total_fallbacks(tables: RankTables, started_at: int) -> dict[tuple[str, str], float]:
    """How often a fast kernel was wanted and not used, by branch and reason, over all ranks: the newest counts of
    each, which are those since the newest start, after step `started_at`."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for file in tables.files.values():
        newest = max(file.rows, default=0)
        for row in file.rows[newest] if newest > started_at else ():
            counts[row["branch"], row["reason"]] += row["count"]
    return dict(sorted(counts.items()))


class HeartbeatFile(GrowingFile):
    """The events of one rank since the last start with --fresh: the file keeps those of the run before.

    Of the routine events, whose numbers are in the tables, only the newest is parsed.
    """

    def clear(self) -> None:
        self.events: list[Event] = []  # all that are not routine
        self.newest: Event = {}
        self.first_step: Event = {}  # of the newest start of the process
        self._last_step = b""
        self.attempts: list[float] = []  # when the process was started
        self.seconds: list[float] = []  # that passed in each

    @property
    def last_step(self) -> Event:
        return next(iter(run_folder.parse_events([self._last_step])), {})

    def add(self, line: bytes) -> None:
        routine = _ROUTINE.fullmatch(line)
        if routine:
            event: Event = {"time": float(routine[1]), "step": int(routine[2]), "event": routine[3].decode()}
            event["clock"] = routine[4]
            if event["event"] == "step":
                self.first_step, self._last_step = self.first_step or event, line
        elif not line.strip():
            return
        else:
            event = run_folder.parse_event(line)
        if event["event"] == "boot" or not self.attempts:
            self.attempts.append(event["time"])
            self.seconds.append(0.0)
            self._began = event
            self.first_step = event if event["event"] == "step" else {}
        by_clock, by_time = (number(event.get(key)) - number(self._began.get(key)) for key in ("clock", "time"))
        passed = by_time if math.isnan(by_clock) else by_clock  # the time of day may jump; an old file has nothing else
        self.seconds[-1] = max(self.seconds[-1], passed)
        self.newest = event
        if not routine:
            self.events.append({**event, "attempt": len(self.attempts)})
        if event["event"] == "start" and event.get("fresh"):
            self._drop_earlier_attempts()

    def _drop_earlier_attempts(self) -> None:
        attempt = len(self.attempts)
        self.events = [{**event, "attempt": 1} for event in self.events if event["attempt"] == attempt]
        self.attempts, self.seconds = self.attempts[-1:], self.seconds[-1:]
        self.first_step, self._last_step = {}, b""


def read_document(path: Path) -> tuple[Row, str]:
    """The content of a small JSON or YAML file that is written whole, and what is wrong with it."""
    try:
        is_json = path.suffix == ".json"
        content = run_folder.read_json(path) if is_json else parse_yaml(read_regular(path).decode(), LARGEST_SAVED)
    except FileNotFoundError:
        return {}, MISSING
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except (ValueError, yaml.YAMLError, RecursionError):
        return {}, "damaged: cannot be parsed"
    return (content, "") if content and isinstance(content, dict) else ({}, "damaged: holds no table of values")


def lookup(content: Any, path: str) -> Any:
    """`a.b` of nested tables; None where it is not there."""
    for key in path.split("."):
        if not isinstance(content, dict) or key not in content:
            return None
        content = content[key]
    return content


def number(value: Any, otherwise: float = math.nan) -> float:
    """A number from a file that anybody may have edited."""
    try:
        return bounded(float(value))
    except (TypeError, ValueError, OverflowError):
        return otherwise


def bounded(value: float) -> float:
    """The number, or infinity where computing with it could overflow."""
    return value if abs(value) <= LARGEST else value * math.inf


def whole(value: Any, otherwise: int) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else otherwise
