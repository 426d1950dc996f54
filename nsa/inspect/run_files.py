"""The files of a run, read while they grow.

Each reader keeps its place: a later look costs what was added since. A file that was cut back or begun anew, as at a
resume, is noticed and read again from the start. What cannot be read is counted and said in `problem`; nothing here
raises. Torch is not needed: a view must open at once.
"""

import csv
import errno
import json
import math
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

Numbers = npt.NDArray[np.float64]
Row = dict[str, Any]  # text columns as text, all others as float

_FINGERPRINT = 256  # bytes before our place that must still be there
_ROUTINE = tuple(f'"event": "{kind}"'.encode() for kind in ("step", "gates", "selection", "fallbacks"))
_STEP = _ROUTINE[0]
_KIND_WITHIN = 160  # bytes of a heartbeat line in which its kind stands


class Tail:
    """Whole lines added to a file since the last look. A last line without its newline waits for the rest."""

    def __init__(self, path: Path):
        self.path = path
        self.problem = ""
        self.torn = False  # the last line is not whole
        self._place, self._before = 0, b""

    def read(self) -> tuple[list[bytes], bool]:
        """The new lines, and whether all earlier ones are void."""
        try:
            _refuse_what_never_ends(self.path)
            with self.path.open("rb") as file:
                anew = self._moved(file.fileno())
                if anew:
                    self._place, self._before = 0, b""
                file.seek(self._place)
                new = file.read()
        except FileNotFoundError:
            anew, self._place, self._before = self._place > 0, 0, b""
            self.problem, self.torn = "missing", False
            return [], anew
        except OSError as error:
            self.problem = f"cannot be read: {error.strerror}"
            return [], False
        self.problem = ""
        whole = new[: new.rfind(b"\n") + 1]
        self.torn = len(whole) < len(new)
        self._place += len(whole)
        self._before = (self._before + whole[-_FINGERPRINT:])[-_FINGERPRINT:]
        return whole.splitlines(), anew

    def _moved(self, file: int) -> bool:
        """A size alone does not tell: what was cut back may have grown past our place again."""
        if os.fstat(file).st_size < self._place:
            return True
        return os.pread(file, len(self._before), self._place - len(self._before)) != self._before


class NumberTable:
    """A CSV file of numbers, a row a step, as columns, the step first. Empty cells and columns it lacks are NaN."""

    def __init__(self, path: Path, columns: Sequence[str]):
        self.columns = {name: array("d") for name in columns}
        self.damaged = 0
        self._tail = Tail(path)
        self._header: list[str] = []
        self._places: list[int] = []
        self._arrays: dict[str, Numbers] = {}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def column(self, name: str) -> Numbers:
        """All values of a column so far."""
        known = self._arrays.get(name)
        if known is None or len(known) != len(self):
            known = self._arrays[name] = np.array(self.columns[name])
        return known

    def last(self, name: str, count: int) -> Numbers:
        return np.array(self.columns[name][-count:])

    @property
    def problem(self) -> str:
        if self._tail.problem or not self._header:
            return self._tail.problem or "holds no header"
        if not self._places:
            return "damaged: its first line is no header of this table"
        return f"{self.damaged} damaged rows left out" if self.damaged else ""

    @property
    def torn(self) -> bool:
        return self._tail.torn

    def refresh(self) -> None:
        lines, anew = self._tail.read()
        if anew:
            self._header, self._places, self.damaged, self._arrays = [], [], 0, {}
            for values in self.columns.values():
                del values[:]
        if lines and not self._header:
            self._begin(lines.pop(0))
        if self._places:
            for line in lines:
                self._add(line)

    def _begin(self, line: bytes) -> None:
        self._header = line.decode("utf-8", "replace").split(",")
        if "step" in self._header:
            self._places = [self._header.index(name) if name in self._header else -1 for name in self.columns]

    def _add(self, line: bytes) -> None:
        cells = line.split(b",")
        try:
            if len(cells) != len(self._header):
                raise ValueError
            values = [math.nan if at < 0 or not cells[at] else float(cells[at]) for at in self._places]
            self._make_room(values[0])
        except ValueError:
            self.damaged += 1
            return
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def _make_room(self, step: float) -> None:
        """Steps rise. Of two rows that do not, the one that breaks the order of all others is the damaged one."""
        steps = self.columns["step"]
        if not step >= 0 or math.isinf(step):
            raise ValueError
        if steps and steps[-1] >= step:
            if len(steps) > 1 and steps[-2] >= step:
                raise ValueError
            self.damaged += 1
            for column in self.columns.values():
                column.pop()
            self._arrays = {}


class SampleTable:
    """A CSV file with any number of rows a step, kept by step."""

    def __init__(self, path: Path, text: Sequence[str] = ()):
        self.rows: dict[int, list[Row]] = {}
        self.header: list[str] = []
        self.damaged = 0
        self._text = set(text)
        self._tail = Tail(path)

    @property
    def problem(self) -> str:
        if self._tail.problem or not self.header:
            return self._tail.problem or "holds no header"
        if "step" not in self.header:
            return "damaged: its first line is no header of this table"
        return f"{self.damaged} damaged rows left out" if self.damaged else ""

    def refresh(self) -> None:
        lines, anew = self._tail.read()
        if anew:
            self.rows, self.header, self.damaged = {}, [], 0
        for line in lines:
            try:
                cells = next(csv.reader([line.decode("utf-8", "replace")]), [])
                if not self.header:
                    self.header = cells or ["?"]
                elif "step" in self.header:
                    row = self._row(cells)
                    self.rows.setdefault(int(row["step"]), []).append(row)
            except (csv.Error, ValueError, OverflowError):
                self.damaged += 1

    def _row(self, cells: list[str]) -> Row:
        pairs = zip(self.header, cells, strict=True)
        return {name: cell if name in self._text else float(cell or "nan") for name, cell in pairs}


class Heartbeat:
    """The events of one rank since its run was begun anew: the file keeps those of the run before.

    Of the routine events, whose numbers are in the CSV files, only the newest and the first step are kept.
    """

    def __init__(self, path: Path):
        self.damaged = 0
        self._tail = Tail(path)
        self._begin()

    def _begin(self) -> None:
        self.events: list[Row] = []  # all that are not routine
        self.newest: Row = {}
        self.first_step: Row = {}  # of the newest start of the process
        self.last_step: Row = {}
        self.attempts: list[list[float]] = []  # first and last time of each start of the process

    @property
    def problem(self) -> str:
        return self._tail.problem or (f"{self.damaged} damaged lines left out" if self.damaged else "")

    def refresh(self) -> None:
        lines, anew = self._tail.read()
        if anew:
            self.damaged = 0
            self._begin()
        routine = step = b""
        for line in lines:
            kind = line[:_KIND_WITHIN]
            if any(mark in kind for mark in _ROUTINE):
                routine = line
                if _STEP in kind:
                    step = line
                    self.first_step = self.first_step or self._parse(line)
                continue
            self._see_routine(routine, step)
            routine = step = b""
            self._take(self._see(line))
        self._see_routine(routine, step)

    def _take(self, event: Row) -> None:
        """An event that is not routine."""
        if not event:
            return
        self.events.append({**event, "attempt": max(1, len(self.attempts))})
        if event["event"] == "boot":
            self.first_step = {}
        if event["event"] == "start" and event.get("fresh"):
            self._forget_earlier_attempts()

    def _forget_earlier_attempts(self) -> None:
        attempt = max(1, len(self.attempts))
        self.events = [{**event, "attempt": 1} for event in self.events if event["attempt"] == attempt]
        self.attempts = self.attempts[-1:]
        self.first_step = self.last_step = {}

    def _see(self, line: bytes) -> Row:
        """Takes a line as the newest one."""
        event = self._parse(line)
        if event:
            self.newest = event
            if event["event"] == "boot" or not self.attempts:
                self.attempts.append([event["time"], event["time"]])
            self.attempts[-1][1] = event["time"]
        return event

    def _see_routine(self, line: bytes, step: bytes) -> None:
        """The newest routine line, and the newest of a step."""
        event = self._see(line)
        self.last_step = (event if step is line else self._parse(step)) or self.last_step

    def _parse(self, line: bytes) -> Row:
        if not line.strip():
            return {}
        try:
            event = json.loads(line)
            event["time"], event["step"], event["event"] = float(event["time"]), int(event["step"]), str(event["event"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self.damaged += 1
            return {}
        return dict(event) if math.isfinite(event["time"]) else {}


class Document:
    """A small JSON or YAML file that is written whole: read again when it changed."""

    def __init__(self, path: Path):
        self.path = path
        self.content: Row = {}
        self.written_at = 0.0
        self.problem = ""
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> None:
        try:
            _refuse_what_never_ends(self.path)
            about = self.path.stat()
            seen = (about.st_ino, about.st_size, about.st_mtime_ns)
            if seen == self._seen:
                return
            text = self.path.read_text(encoding="utf-8")
            self._seen, self.written_at = seen, about.st_mtime
            content = json.loads(text) if self.path.suffix == ".json" else yaml.safe_load(text)
            self.content = content if isinstance(content, dict) else {}
            self.problem = "" if self.content else "damaged: holds no table of values"
        except FileNotFoundError:
            self.content, self.problem, self._seen = {}, "missing", None
        except OSError as error:
            self.content, self.problem = {}, f"cannot be read: {error.strerror}"
        except (ValueError, yaml.YAMLError, RecursionError):
            self.content, self.problem = {}, "damaged: cannot be parsed"


def _refuse_what_never_ends(path: Path) -> None:
    """A pipe, or a device behind a link, would be read for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def lookup(content: Any, path: str, otherwise: Any = None) -> Any:
    """`a.b` of nested tables; `otherwise` where it is not there."""
    for key in path.split("."):
        if not isinstance(content, dict) or key not in content:
            return otherwise
        content = content[key]
    return content


def number(value: Any, otherwise: float = math.nan) -> float:
    """A number from a file that anybody may have edited."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise


def whole(value: Any, otherwise: int) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else otherwise


def rank_files(folder: Path, stem: str, suffix: str) -> Iterator[tuple[int, Path]]:
    """`stem.suffix` of rank 0 and `stem_rank{r}.suffix` of the others, those that are there."""
    for path in sorted(folder.glob(f"{stem}*.{suffix}")):
        tail = path.name[len(stem) : -len(suffix) - 1]
        if not tail:
            yield 0, path
        elif tail.startswith("_rank") and tail[5:].isdigit():
            yield int(tail[5:]), path
