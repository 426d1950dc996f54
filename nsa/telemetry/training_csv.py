"""`training.csv`: one row a step, numbers in full precision, readable while the run goes on."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from nsa.errors import LaunchError

FILE_NAME = "training.csv"


@dataclass(frozen=True)
class TrainingRow:
    """One optimizer step. The validation columns are empty where no validation was run."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    toks_per_s: float
    step_s: float
    data_wait_s: float
    mem_gib: float
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    save_wait_s: float = 0.0  # how long training stood still for a checkpoint before this step
    skipped: int = 0  # 1: the optimizer did not move, because something was not finite


# What differs between two runs that did the same: they depend on the machine, not on the numbers.
MACHINE_COLUMNS = ("toks_per_s", "step_s", "data_wait_s", "mem_gib", "save_wait_s")


class TrainingCSV:
    """Opened at a step, it keeps the rows up to that step and cuts what an interrupted run wrote after them.

    A disk that is full later on does not stop the run: failures are counted.
    """

    def __init__(self, folder: Path, done_steps: int = 0):
        self.failures = 0
        self.last_failure = ""
        header = ",".join(f.name for f in fields(TrainingRow)) + "\n"
        path = folder / FILE_NAME
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

    def write(self, row: TrainingRow) -> None:
        values = (getattr(row, f.name) for f in fields(row))
        line = ",".join("" if v is None else repr(v) for v in values) + "\n"
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
