"""Where events go beside the heartbeat: CSV files, TensorBoard, and a tracker that is installed."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from nsa.record.attention_stats import DISTANCE_BINS, GateStats
from nsa.record.events import Event, Sink
from nsa.record.tables import Table
from nsa.record.training_csv import COLUMNS

GATE_COLUMNS = ("step", "layer", *(f.name for f in fields(GateStats)))
_SELECTION_VALUES = ("rows", "mean_distinct", "max_distinct", "share_at_max", "share_forced", "agreement")
_DISTANCES = tuple(f"distance_{name}" for name in DISTANCE_BINS)
SELECTION_COLUMNS = ("step", *_SELECTION_VALUES, *_DISTANCES)
LAYER_SELECTION_COLUMNS = ("step", "layer", *_SELECTION_VALUES, *_DISTANCES)
FALLBACK_COLUMNS = ("step", "branch", "reason", "count")
Rows = Callable[[Event], list[list[Any]]]
_SCALARS = ("loss", "lr", "grad_norm", "toks_per_s", "mem_gib", "val_loss", "val_bits_per_byte")


def csv_sinks(folder: Path, rank: int, done_steps: int) -> list[Sink]:
    """The CSV files of a rank. Rank 0 has the plain names."""

    def table(stem: str, columns: Sequence[str], event: str, rows: Rows) -> "TableSink":
        name = f"{stem}_rank{rank}.csv" if rank else f"{stem}.csv"
        return TableSink(name, Table(folder / name, columns, done_steps), event, rows)

    return [
        table("training", COLUMNS, "step", _training_rows),
        table("gate_stats", GATE_COLUMNS, "gates", _gate_rows),
        table("k_stats", SELECTION_COLUMNS, "selection", _selection_rows),
        table("k_stats_layers", LAYER_SELECTION_COLUMNS, "selection", _layer_selection_rows),
        table("fallback_counters", FALLBACK_COLUMNS, "fallbacks", _fallback_rows),
    ]


class TableSink:
    """Rows of a CSV file from one kind of event."""

    is_awaited = True

    def __init__(self, name: str, table: Table, event: str, rows: Rows):
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
    return [[event["step"], *_selection_values(event)]]


def _layer_selection_rows(event: Event) -> list[list[Any]]:
    return [[event["step"], layer["layer"], *_selection_values(layer)] for layer in event["layers"]]


def _selection_values(stats: dict[str, Any]) -> list[Any]:
    return [*(stats[name] for name in _SELECTION_VALUES), *stats["distances"]]


def _fallback_rows(event: Event) -> list[list[Any]]:
    return [[event["step"], branch, reason, count] for branch, reason, count in event["counts"]]


class TensorBoard:
    """Curves under `tb/`; of a resumed run the steps after its checkpoint are shown once."""

    name = "tensorboard"
    is_awaited = False

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
    """W&B or trackio, whichever the configuration names: both take `init`, `log` and `finish`.

    Nothing of it happens before the first event: a server that does not answer holds up the thread of this sink, not
    the start of the run.
    """

    is_awaited = False

    def __init__(self, package: str, folder: Path, config: dict[str, Any]):
        self.name = package
        self._newest_step = 0
        self._module: Any = import_module(package)
        self._begin = {"project": "nsa", "name": folder.name, "config": config, **_where(package, folder)}
        self._began = False

    def write(self, event: Event) -> None:
        if not self._began:
            self._module.init(**self._begin)
            self._began = True
        scalars = scalars_of(event)
        if scalars:
            # W&B leaves out what is of an earlier step than the last, and samples may come a step late.
            self._newest_step = max(self._newest_step, event["step"])
            self._module.log(scalars, step=self._newest_step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._began:
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
        return {f"selection/{name}": event[name] for name in _SELECTION_VALUES if name != "rows"}
    return {}
