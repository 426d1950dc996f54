"""TensorBoard scalars of a run under `tb/`. Like every sink it can fail without the run noticing."""

from pathlib import Path
from typing import Any

from nsa.telemetry.training_csv import TrainingRow

_SCALARS = ("loss", "lr", "grad_norm", "toks_per_s", "mem_gib", "val_loss", "val_bits_per_byte")


class TensorBoard:
    def __init__(self, folder: Path, *, wanted: bool, first_step: int = 0):
        self.failures = 0
        self._writer: Any = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(folder / "tb"), purge_step=first_step + 1)
            except Exception:  # not installed, or nowhere to write
                self.failures += 1

    def write(self, row: TrainingRow) -> None:
        if self._writer is None:
            return
        try:
            for name in _SCALARS:
                value = getattr(row, name)
                if value is not None:
                    self._writer.add_scalar(f"train/{name}", value, row.step)
        except Exception:
            self.failures += 1
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception:
                self.failures += 1
