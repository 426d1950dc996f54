"""`training.csv`: one row a step, numbers in full precision, readable while the run goes on."""

from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

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


# What differs between two runs that did the same: they depend on the machine, not on the numbers.
MACHINE_COLUMNS = ("toks_per_s", "step_s", "data_wait_s", "mem_gib")


class TrainingCSV:
    def __init__(self, folder: Path):
        try:
            self._file = (folder / FILE_NAME).open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise LaunchError(f"train.out_dir: {folder / FILE_NAME} cannot be written: {error.strerror}") from None
        self._file.write(",".join(f.name for f in fields(TrainingRow)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: TrainingRow) -> None:
        values = (getattr(row, f.name) for f in fields(row))
        self._file.write(",".join("" if v is None else repr(v) for v in values) + "\n")
        self._file.flush()
