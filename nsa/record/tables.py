"""CSV files of a run: numbers in full precision, readable while the run goes on, cut back when it resumes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.errors import LaunchError


class Table:
    """Opened at a step, it keeps the rows up to that step and cuts what an interrupted run wrote after them.

    The first column is the step. A disk that is full later on does not stop the run: failures are counted.
    """

    def __init__(self, path: Path, columns: Sequence[str], done_steps: int = 0):
        self.columns = list(columns)
        self.failures = 0
        self.last_failure = ""
        header = ",".join(self.columns) + "\n"
        try:
            kept = _rows_until(path, header, done_steps)
            if done_steps and not kept and path.is_file():  # of a version with other columns: not thrown away
                path.rename(path.with_suffix(".old.csv"))
            self._file = path.open("r+b" if kept else "wb")
            if kept:
                self._file.truncate(kept)
                self._file.seek(kept)
            else:
                self._file.write(header.encode())
        except OSError as error:
            raise LaunchError(f"train.out_dir: {path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            self.failures += 1

    def write(self, values: Sequence[Any]) -> None:
        assert len(values) == len(self.columns)
        line = ",".join("" if v is None else _spell(v) for v in values) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:  # what could not be written stays in the buffer and is tried again with the next row
            self.failures += 1
            self.last_failure = str(error.strerror)

    def flush_to_disk(self) -> None:
        """Before a checkpoint is committed: its rows must not be younger than it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.failures += 1
            self.last_failure = str(error.strerror)


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '""').replace("\n", " ") + '"' if any(c in value for c in ',"\n') else value
    return repr(value)


def _rows_until(path: Path, header: str, done_steps: int) -> int:
    """How many bytes of the file hold the header and whole rows of steps up to `done_steps`."""
    if not done_steps or not path.exists():
        return 0
    length = 0
    with path.open("rb") as file:
        first = file.readline()
        if first != header.encode():
            return 0
        length = len(first)
        for line in file:
            step = line.split(b",", 1)[0]
            if not line.endswith(b"\n") or not step.isdigit() or int(step) > done_steps:
                break
            length += len(line)
    return length
