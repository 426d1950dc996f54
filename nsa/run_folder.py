"""The contract of a run folder: the files that a run writes, their columns, and functions that format and parse rows
and events. Recorders, watchdog, viewers and checks take every name from here. Imports neither torch nor numpy.
docs/telemetry.md explains each file and column, and the fields of each event.
"""

import csv
import io
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from nsa.errors import CheckpointError, reworded
from nsa.files import open_regular, read_regular, regular
from nsa.formatting import plain

# ---------------------------------------------------------------------------------------------------------- files

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "env.json"
METRICS_FILE = "metrics.json"
DTYPES_FILE = "dtypes_report.txt"
OPTIMIZER_STATE_FILE = "opt_state_mb.txt"
WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"  # written by `nsa generate`; see record/samples.py
EVALUATION_FILE = "eval.json"  # written by `nsa eval`
EVALUATION_PAGE = "eval.html"
HARNESS_FILE = "lm_eval.json"  # written by `nsa eval --lm-eval`
TRACKER_FILE = "tracker_id.txt"
LOCK_FILE = ".lock"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tb"
NONFINITE_FOLDER = "nonfinite"
FOLDERS = (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER, NONFINITE_FOLDER, "wandb", ".wandb")  # W&B uses one of these two


@dataclass(frozen=True)
class RankFiles:
    """One file per rank: `{stem}_rank{r}{suffix}`. `plain_first`: the name of rank 0 is `{stem}{suffix}`."""

    stem: str
    suffix: str
    plain_first: bool = False

    def name(self, rank: int) -> str:
        return f"{self.stem}{'' if self.plain_first and rank == 0 else f'_rank{rank}'}{self.suffix}"

    def path(self, folder: Path, rank: int) -> Path:
        return folder / self.name(rank)

    @property
    def pattern(self) -> str:
        """A glob pattern that matches the file of every rank."""
        return f"{self.stem}{'*' if self.plain_first else '_rank*'}{self.suffix}"

    def find(self, folder: Path) -> dict[int, Path]:
        """Returns the files that exist, by rank. A stem may contain a `*`; the last match of a rank by name counts."""
        rank = r"(?:_rank(\d+))?" if self.plain_first else r"_rank(\d+)"
        form = re.compile(re.escape(self.stem).replace(r"\*", ".*") + rank + re.escape(self.suffix))
        matches = ((form.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
        return dict(sorted((int(match[1] or 0), path) for match, path in matches if match))


HEARTBEAT = RankFiles("heartbeat", ".jsonl")
RUN_LOG = RankFiles("run", ".log", plain_first=True)
TRACE = RankFiles("trace", ".jsonl")
OLDER_TRACE = RankFiles("trace", ".older.jsonl")
OUT_OF_MEMORY = RankFiles("oom", ".json")
NCCL_TRACE = RankFiles("nccl_trace", ".json")
PROFILE_TRACE = RankFiles("profile", ".json")
PROFILE_TABLE = RankFiles("profile", ".txt")
MEMORY_PATTERN = "mem_*"


def memory_files(label: str, suffix: Literal[".txt", ".json"]) -> RankFiles:
    """The files of a memory dump; `label` is boot or step{N}."""
    return RankFiles(f"mem_{label}", suffix, plain_first=True)


def stack_dumps(stamp: str = "*") -> RankFiles:
    """The files of the stack dumps with a time stamp, by default with any."""
    return RankFiles(f"stackdump_{stamp}", ".txt")


# A new run in the same folder (--fresh) removes these files. It appends to, replaces or restarts all others.
REMOVED_BY_FRESH = (
    *(CHECKPOINTS_FOLDER, NONFINITE_FOLDER, WEIGHTS_FILE, TRACKER_FILE),
    *(SAMPLES_FILE, EVALUATION_FILE, EVALUATION_PAGE, HARNESS_FILE),
    *(OUT_OF_MEMORY.pattern, MEMORY_PATTERN),
)
# Every run replaces these files.
REPLACED = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, DTYPES_FILE, OPTIMIZER_STATE_FILE)


def reading_run(path: Path) -> AbstractContextManager[None]:
    """Wraps the first access to a run that the user named, so that all commands report a missing one alike."""
    return reworded(CheckpointError, f"{path}: cannot be read", "give the out_dir of a run")


def run_of(weights: Path) -> Path | None:
    """Returns the run folder that contains a checkpoint or a weights file; None if it is not in a run folder."""
    weights = weights.absolute()
    folder = weights.parent.parent if weights.is_dir() else weights.parent
    return folder if (folder / CONFIG_FILE).is_file() else None


# ------------------------------------------------------------------------------------------------------ documents

RunStatus = Literal["running", "done", "failed", "preempted"]  # `status` in metrics.json


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises OSError, or ValueError if the file is damaged."""
    try:
        content = json.loads(read_regular(path).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


# --------------------------------------------------------------------------------------------------------- events

EventKind = Literal[
    "boot", "first_batch", "start", "step", "gates", "selection", "fallbacks", "data_stall", "save_wait",
    "attention", "incident", "hang", "preempted", "end",
]  # fmt: skip
Event = dict[str, Any]
EVENT_VERSION = 1
_PIECE, _LONGEST_BOOT = 2**20, 2**12  # bytes
COMMON_FIELDS = ("v", "time", "rank", "step", "event", "clock")  # clock: monotonic seconds, for durations
ROUTINE_EVENTS: tuple[EventKind, ...] = ("step", "gates", "selection", "fallbacks")  # the tables have their numbers


@dataclass(frozen=True)
class TrainingRow:
    """One optimizer step. The validation columns are empty in steps without a validation."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    toks_per_s: float
    step_s: float
    data_wait_s: float
    mem_gib: float | None  # None if it could not be read
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    save_wait_s: float = 0.0  # how long training waited for a checkpoint before this step
    skipped: int = 0  # 1: the optimizer skipped the step because of a NaN or an infinity
    index_kl: float | None = None  # mean loss of the index of MSA layers in nats; None without such layers


# Columns that depend on the machine: they differ between two runs with equal results.
MACHINE_COLUMNS = ("toks_per_s", "step_s", "data_wait_s", "mem_gib", "save_wait_s")
BRANCHES = ("cmp", "sel", "win")
ALL_LAYERS = "all"
DISTANCE_BINS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-511", "512-1023", "1024+")
DISTANCE_COLUMNS = tuple(f"distance_{name}" for name in DISTANCE_BINS)


@dataclass(frozen=True)
class GateStats:
    """Statistics of the gates of one layer or of all layers, over `rows` gate vectors, each divided by its sum."""

    rows: int
    mean_entropy: float
    min_entropy: float
    largest_share: float
    collapsed: float
    share_cmp: float
    share_sel: float
    share_win: float

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares in the order of BRANCHES."""
        return self.share_cmp, self.share_sel, self.share_win

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Builds the statistics from a row of gate_stats.csv."""
        return cls(int(row["rows"]), *(row[f.name] for f in fields(cls)[1:]))


@dataclass(frozen=True)
class SelectionStats:
    """Statistics of the selected blocks of one layer or of all layers. A row is one token and one key/value head.

    `mass` is the share of the attention weights over all visible tokens that the selected blocks hold, in a sample of
    queries that do not read all blocks; None if no layer measures it.
    """

    rows: int
    mean_distinct: float
    max_distinct: int
    share_at_max: float
    share_forced: float
    agreement: float
    distances: tuple[float, ...]  # the share of blocks in each of DISTANCE_BINS
    mass: float | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Builds the statistics from a row of k_stats.csv or k_stats_layers.csv."""
        own = {f.name: row[f.name] for f in fields(cls) if f.name != "distances"}
        own |= {name: int(own[name]) for name in ("rows", "max_distinct")}
        own["mass"] = None if math.isnan(own["mass"]) else own["mass"]
        return cls(**own, distances=tuple(row[name] for name in DISTANCE_COLUMNS))


_TRAINING = tuple(f.name for f in fields(TrainingRow))
_GATES = tuple(f.name for f in fields(GateStats))
_SELECTION = tuple(f.name for f in fields(SelectionStats))


def make_event(event: EventKind, rank: int, step: int, **values: Any) -> Event:
    common = (EVENT_VERSION, time.time(), rank, step, event, round(time.monotonic(), 3))
    return {**dict(zip(COMMON_FIELDS, common, strict=True)), **values}


def format_event(event: Event) -> str:
    """Formats a line of a heartbeat file. NaN and infinity, which JSON does not have, become strings."""
    return json.dumps({key: plain(value) for key, value in event.items() if key != "layers"}) + "\n"


def parse_event(line: str | bytes) -> Event:
    """Parses an event with a finite time, a step and a kind. Raises ValueError for any other line."""
    try:
        event = json.loads(line)
        event["time"], event["step"], event["event"] = float(event["time"]), int(event["step"]), str(event["event"])
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an event: {error}") from None
    if not math.isfinite(event["time"]):
        raise ValueError("not an event: its time is not finite")
    return dict(event)


def parse_events(lines: Iterable[str | bytes]) -> list[Event]:
    """Parses the events in `lines`; omits damaged lines."""
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(parse_event(line))
    return found


def read_events(folder: Path, rank: int = 0) -> list[Event]:
    """Reads all events of a rank, oldest first. Raises OSError."""
    with open_regular(HEARTBEAT.path(folder, rank)) as file:
        return parse_events(file)


def newest_boot(folder: Path, rank: int) -> Event:
    """The newest event `boot` of a rank, empty if there is none. The heartbeat of a long run is large, and is searched
    from its end."""
    with suppress(OSError), open_regular(HEARTBEAT.path(folder, rank)) as file:
        for start in range(file.seek(0, os.SEEK_END) - _PIECE, -_PIECE, -_PIECE):
            file.seek(max(0, start))
            piece = file.read(_PIECE + _LONGEST_BOOT)
            if b'"boot"' in piece:
                for event in parse_events(line for line in reversed(piece.splitlines()) if b'"boot"' in line):
                    return event
    return {}


# --------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """A CSV file for one kind of event. An event adds one row; in a table with the column `layer` it adds a row per
    layer, and with `whole` one more for all layers."""

    stem: str
    event: EventKind
    columns: tuple[str, ...]
    text: tuple[str, ...] = ()  # columns that contain text; all others contain numbers
    whole: bool = True

    @property
    def files(self) -> RankFiles:
        return RankFiles(self.stem, ".csv", plain_first=True)

    @property
    def file(self) -> str:
        """The name of rank 0's file."""
        return self.files.name(0)

    @property
    def header(self) -> str:
        return format_row(self.columns)

    def format(self, event: Event) -> str:
        """Formats the lines that an event adds."""
        lines = []
        for row in self._rows(event):
            cells = {**row, **dict(zip(DISTANCE_COLUMNS, row.get("distances", ()), strict=False))}
            lines.append(format_row([event["step"], *(cells[name] for name in self.columns[1:])]))
        return "".join(lines)

    def _rows(self, event: Event) -> list[dict[str, Any]]:
        if self.event == "fallbacks":
            return [dict(zip(self.columns[1:], count, strict=True)) for count in event["counts"]]
        if "layer" not in self.text:
            return [event]
        return [*event["layers"], {**event, "layer": ALL_LAYERS}] if self.whole else event["layers"]


TRAINING = Table("training", "step", _TRAINING)
GATES = Table("gate_stats", "gates", ("step", "layer", *_GATES), text=("layer",))
# A new column becomes the last one: a resumed run adds it to the file of an earlier version.
SELECTION = Table("k_stats", "selection", ("step", *_SELECTION[:-2], *DISTANCE_COLUMNS, "mass"))
LAYER_SELECTION = Table(
    "k_stats_layers", "selection", ("step", "layer", *SELECTION.columns[1:]), text=("layer",), whole=False
)
FALLBACKS = Table("fallback_counters", "fallbacks", ("step", "branch", "reason", "count"), text=("branch", "reason"))
TABLES = (TRAINING, GATES, SELECTION, LAYER_SELECTION, FALLBACKS)


def format_row(values: Iterable[Any]) -> str:
    """Formats a line of a table: numbers in full precision, an empty cell for None, quotes where a text needs them."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(v.replace("\n", " ") if isinstance(v, str) else v for v in values)
    return line.getvalue()


def read_rows(folder: Path, table: Table) -> list[dict[str, str]]:
    """Reads rank 0's rows as strings. Raises OSError. A row of the wrong length has None as a key or value."""
    with open(table.files.path(folder, 0), encoding="utf-8", newline="", opener=regular) as file:
        return list(csv.DictReader(file))
