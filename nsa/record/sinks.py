"""Sinks of events other than the heartbeat: CSV files, TensorBoard, and an experiment tracker."""

import os
import re
import secrets
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from nsa import faults
from nsa.errors import LaunchError, reworded
from nsa.files import make_folder, open_regular, read_regular, regular, replace_file, write_whole
from nsa.record.events import Sink
from nsa.run_folder import GATES, SELECTION, TENSORBOARD_FOLDER, TRACKER_FILE, Event, Table

MAX_PENDING = 64 * 2**20  # bytes of rows kept in memory while the disk is full; later rows are lost
REOPEN_S = 60.0  # seconds until TensorBoard is tried again after a disk error
_TRAINING_SCALARS = ("loss", "lr", "grad_norm", "toks_per_s", "mem_gib", "val_loss", "val_bits_per_byte", "index_kl")
_GATE_SCALARS = GATES.columns[3:]
_SELECTION_SCALARS = [name for name in SELECTION.columns[2:] if not name.startswith("distance_")]


class TableSink(Sink):
    """A CSV file of one rank. It keeps the rows up to `done_steps` and removes later rows of an interrupted run.

    Rows that cannot be written stay in memory and are retried with the next row and before a checkpoint.
    """

    is_awaited = True

    def __init__(self, folder: Path, rank: int, table: Table, done_steps: int = 0):
        path = table.files.path(folder, rank)
        self.name, self.table = path.name, table
        self._pending = bytearray()
        self.last_step: int | None = None  # of the rows that are kept; None if there was no such table
        kept = 0
        with reworded(LaunchError, f"train.out_dir: {path} cannot be written"):
            if done_steps and path.exists():
                _add_columns(path, table.header.encode())
                kept, self.last_step = _kept(path, table.header.encode(), done_steps)
                if not kept and path.stat().st_size:  # other columns
                    path.rename(path.with_suffix(".old.csv"))
                    self.last_step = None
            self._file = open(path, "r+b" if kept else "wb", buffering=0, opener=regular)  # noqa: SIM115  (until close)
            if kept:
                self._file.truncate(kept)
                self._file.seek(kept)
            else:  # the header at once: viewers take a table without one for damaged
                self._pending += table.header.encode()
                with suppress(OSError):  # written with the first row
                    del self._pending[: self._file.write(self._pending) or 0]

    def wants(self, event: Event) -> bool:
        return bool(event["event"] == self.table.event)

    def write(self, event: Event) -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending += self.table.format(event).encode()
        self._write_pending()

    def flush(self) -> None:
        self._write_pending()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._write_pending()
        finally:
            self._file.close()

    def _write_pending(self) -> None:
        faults.point("rows.write")
        while self._pending:  # a nearly full disk may take only a part of a row
            del self._pending[: self._file.write(self._pending) or 0]


def _add_columns(path: Path, header: bytes) -> None:
    """Adds the columns that the table has gained since an earlier version wrote the file; later versions append columns
    at the end. Existing rows have empty cells there."""
    with open_regular(path) as file:
        old = file.readline().rstrip(b"\n")
        if not header.startswith(old + b","):
            return
        empty = b"," * header.count(b",", len(old)) + b"\n"
        rows = [line[:-1] + empty for line in file if line.endswith(b"\n")]
    replace_file(path, header + b"".join(rows))


def _kept(path: Path, header: bytes, done_steps: int) -> tuple[int, int]:
    """The bytes that hold the header and whole rows of steps up to `done_steps`, and the last of these steps."""
    last = 0
    with open_regular(path) as file:
        if file.readline() != header:
            return 0, 0
        length = len(header)
        for line in file:
            step = line.split(b",", 1)[0]
            if not line.endswith(b"\n") or not step.isdigit() or int(step) > done_steps:
                break
            length, last = length + len(line), int(step)
    return length, last


class TensorBoard(Sink):
    """TensorBoard curves under `tb/`. A resumed run shows the steps after its checkpoint once."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        make_folder(folder / TENSORBOARD_FOLDER)
        self._open = partial(SummaryWriter, str(folder / TENSORBOARD_FOLDER))
        self._writer: Any = self._open(purge_step=first_step + 1)
        self._newest_step = first_step
        self._failure, self._reopen_at = OSError(), 0.0

    def wants(self, event: Event) -> bool:
        return bool(scalars_of(event))

    def write(self, event: Event) -> None:
        if self._writer is None and time.monotonic() < self._reopen_at:  # every attempt creates a file
            raise self._failure
        try:
            self._writer = self._writer or self._open(purge_step=self._newest_step + 1)
            for name, value in scalars_of(event).items():
                self._writer.add_scalar(name, value, event["step"])
            self._newest_step = max(self._newest_step, event["step"])
        except OSError as error:  # the writer's thread has ended: every later call would raise this
            self._writer, self._failure, self._reopen_at = None, error, time.monotonic() + REOPEN_S
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker(Sink):
    """W&B or trackio: both have `init`, `log` and `finish`.

    The run folder keeps the id of the run, so that a resumed run continues the same curves. W&B resumes by id, trackio
    by name. `init` is called with the first curve: a server that hangs blocks the thread of this sink, not the run.
    """

    def __init__(self, package: str, folder: Path, config: dict[str, Any]):
        self.name = package
        self._newest_step = 0
        self._module: Any = import_module(package)
        run = _run_id(folder / TRACKER_FILE)
        self._options = {"project": "nsa", "config": config, "resume": "allow"}
        if package == "wandb":
            self._options |= {"name": folder.name, "id": run, "dir": str(folder)}
        else:
            self._options["name"] = f"{folder.name}-{run}"
        self._started = False

    def wants(self, event: Event) -> bool:
        return bool(scalars_of(event))

    def write(self, event: Event) -> None:
        if not self._started:
            self._module.init(**self._options)
            self._started = True
        # W&B drops values of steps before the last one, and samples may arrive a step late.
        self._newest_step = max(self._newest_step, event["step"])
        self._module.log(scalars_of(event), step=self._newest_step)

    def close(self) -> None:
        if self._started:
            self._module.finish()


def _run_id(path: Path) -> str:
    """The id in the file; a new id if there is none."""
    known = read_regular(path).decode(errors="replace").strip() if path.exists() else ""
    if not re.fullmatch(r"[0-9a-f]{8}", known):
        known = secrets.token_hex(4)
        write_whole(path, known + "\n")
    return known


def scalars_of(event: Event) -> dict[str, float]:
    """The values of an event that are shown as curves."""
    kind = event["event"]
    if kind == "step":
        return {f"train/{name}": event[name] for name in _TRAINING_SCALARS if event[name] is not None}
    names = {"gates": _GATE_SCALARS, "selection": _SELECTION_SCALARS}.get(kind, ())
    return {f"{kind}/{name}": event[name] for name in names if event[name] is not None}
