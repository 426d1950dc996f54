"""Where events go beside the heartbeat: CSV files, TensorBoard, and a tracker that is installed."""

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from nsa.telemetry.attention_stats import DISTANCE_BINS, GateStats
from nsa.telemetry.events import Event, Sink
from nsa.telemetry.tables import Table
from nsa.telemetry.training_csv import COLUMNS, open_training_csv

GATE_COLUMNS = ("step", "layer", *(f.name for f in fields(GateStats)))
SELECTION_COLUMNS = (
    "step",
    "rows",
    "mean_distinct",
    "max_distinct",
    "share_at_max",
    "share_forced",
    "agreement",
    *(f"distance_{name}" for name in DISTANCE_BINS),
)
FALLBACK_COLUMNS = ("step", "branch", "reason", "count")
_SCALARS = ("loss", "lr", "grad_norm", "toks_per_s", "mem_gib", "val_loss", "val_bits_per_byte")


def csv_sinks(folder: Path, rank: int, done_steps: int) -> list[Sink]:
    """The CSV files of a rank. Rank 0 has the plain names."""
    tail = f"_rank{rank}" if rank else ""
    return [
        TableSink("training.csv", open_training_csv(folder, done_steps, f"training{tail}.csv"), "step", _training_rows),
        TableSink(
            "gate_stats.csv", Table(folder / f"gate_stats{tail}.csv", GATE_COLUMNS, done_steps), "gates", _gate_rows
        ),
        TableSink(
            "k_stats.csv",
            Table(folder / f"k_stats{tail}.csv", SELECTION_COLUMNS, done_steps),
            "selection",
            _selection_rows,
        ),
        TableSink(
            "fallback_counters.csv",
            Table(folder / f"fallback_counters{tail}.csv", FALLBACK_COLUMNS, done_steps),
            "fallbacks",
            _fallback_rows,
        ),
    ]


class TableSink:
    """Rows of a CSV file from one kind of event."""

    def __init__(self, name: str, table: Table, event: str, rows: Callable[[Event], list[list[Any]]]):
        self.name, self.table, self.event, self.rows = name, table, event, rows

    def write(self, event: Event) -> None:
        if event["event"] == self.event:
            for row in self.rows(event):
                self.table.write(row)
            self._raise_failures()

    def flush(self) -> None:
        self.table.flush_to_disk()
        self._raise_failures()

    def close(self) -> None:
        self.table.close()
        self._raise_failures()

    def _raise_failures(self) -> None:
        """A table keeps what it could not write for its next row; the stream counts that it was late."""
        if self.table.failures:
            self.table.failures = 0
            raise OSError(0, self.table.last_failure)


def _training_rows(event: Event) -> list[list[Any]]:
    return [[event[name] for name in COLUMNS]]


def _gate_rows(event: Event) -> list[list[Any]]:
    layers = [*event["layers"], {**event, "layer": "all"}]
    return [[event["step"], *(layer[name] for name in GATE_COLUMNS[1:])] for layer in layers]


def _selection_rows(event: Event) -> list[list[Any]]:
    return [[*(event[name] for name in SELECTION_COLUMNS[:7]), *event["distances"]]]


def _fallback_rows(event: Event) -> list[list[Any]]:
    return [[event["step"], branch, reason, count] for branch, reason, count in event["counts"]]


class TensorBoard:
    """Curves under `tb/`; of a resumed run the steps after its checkpoint are shown once."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tb"), purge_step=first_step + 1)

    def write(self, event: Event) -> None:
        for name, value in scalars_of(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """W&B or trackio, whichever the configuration names: both take `init`, `log` and `finish`."""

    def __init__(self, package: str, folder: Path, config: dict[str, Any]):
        self.name = package
        self._module: Any = import_module(package)
        self._module.init(project="nsa", name=folder.name, config=config, **_where(package, folder))

    def write(self, event: Event) -> None:
        scalars = scalars_of(event)
        if scalars:
            self._module.log(scalars, step=event["step"])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._module.finish()


def _where(package: str, folder: Path) -> dict[str, Any]:
    return {"dir": str(folder)} if package == "wandb" else {}


def scalars_of(event: Event) -> dict[str, float]:
    """What of an event is a curve."""
    kind = event["event"]
    if kind == "step":
        return {f"train/{name}": event[name] for name in _SCALARS if event[name] is not None}
    if kind == "gates":
        return {f"gates/{name}": event[name] for name in GATE_COLUMNS[3:]}
    if kind == "selection":
        return {f"selection/{name}": event[name] for name in SELECTION_COLUMNS[2:7]}
    return {}
