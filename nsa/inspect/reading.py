"""A run as its folder tells it: never from the process, so that a run on another machine reads alike.

`read_run` reads everything once. A `RunReader` is kept by a view that looks again and again: a look costs what was
added since the last one. Files that are missing or damaged are named in `RunView.problems`; only a folder that is no
run at all is an error. Statistics that several ranks wrote are merged here.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import ConfigError
from nsa.inspect.run_files import (
    Document,
    Heartbeat,
    Numbers,
    NumberTable,
    Row,
    lookup,
    number,
    whole,
)
from nsa.inspect.run_samples import (
    Fallbacks,
    LayerGates,
    Samples,
    Selection,
    merge_gates,
    merge_layer_selection,
    merge_selection,
)
from nsa.inspect.run_story import Happening, happenings
from nsa.record.schema import TRAINING

RECENT = 50  # steps that "now" means for numbers that jump from step to step
DEFAULT_FLOOR_S, DEFAULT_FIRST_STEP_S = 60.0, 600.0  # of silence, where the configuration cannot be read

RUNNING, SILENT, FINISHED, FAILED, PREEMPTED = "running", "silent", "finished", "failed", "preempted"


@dataclass(frozen=True)
class Status:
    """`kind` is one of the five above; `age_s` the time since the last event, and `limit_s` how much is normal."""

    kind: str
    age_s: float
    limit_s: float
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class RankView:
    """Where a rank stands, by its own last words."""

    rank: int
    step: int
    seen_at: float
    mem_gib: float
    data_wait_s: float
    telemetry_failures: int


@dataclass(frozen=True)
class RunView:
    """A run at the time `now`. Numbers that nobody has written are NaN; `left_s` is None where nothing can be said."""

    folder: Path
    now: float
    status: Status
    step: int
    steps: int
    strategy: str
    world_size: int
    attempts: int
    started_at: float
    elapsed_s: float
    left_s: float | None
    training: NumberTable
    gates: list[LayerGates]  # of the newest sample; the last one is of all layers
    gates_step: int
    selection: Selection | None
    layer_selection: dict[str, Selection]  # of the newest sample
    fallbacks: Fallbacks
    happenings: list[Happening]  # the newest first
    ranks: list[RankView]
    problems: dict[str, str]
    metrics: Row
    config: Row
    env: Row
    gate_samples: Samples
    selection_samples: Samples

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    def now_of(self, column: str) -> float:
        """The newest value of a column of training.csv."""
        values = self.training.columns[column]
        return values[-1] if values else math.nan

    def recent(self, column: str, how: Callable[[Numbers], Any] = np.median) -> float:
        """`how` of the finite values in the last steps."""
        values = self.training.last(column, RECENT)
        values = values[np.isfinite(values)]
        return float(how(values)) if len(values) else math.nan

    @property
    def loss(self) -> float:
        """Smoothed: the mean of the last steps, of fewer in a run that is short."""
        values = self.training.last("loss", smoothing(len(self.training)))
        values = values[np.isfinite(values)]
        return float(np.mean(values)) if len(values) else math.nan

    @property
    def data_share(self) -> float:
        """The part of the last steps that went by waiting for data."""
        spent = self.recent("step_s", np.sum)
        return self.recent("data_wait_s", np.sum) / spent if spent > 0 else math.nan

    @property
    def mem_gib(self) -> float:
        """Of the rank that needs most."""
        known = [rank.mem_gib for rank in self.ranks if math.isfinite(rank.mem_gib)]
        return max([*known, *([last] if math.isfinite(last := self.now_of("mem_gib")) else [])], default=math.nan)

    @property
    def validation(self) -> tuple[int, float, float] | None:
        """Step, loss and bits per byte of the newest validation."""
        at = np.flatnonzero(np.isfinite(self.training.column("val_loss")))
        if not len(at):
            return None
        step, loss, bits = (float(self.training.column(c)[at[-1]]) for c in ("step", "val_loss", "val_bits_per_byte"))
        return int(step), loss, bits

    @property
    def telemetry_failures(self) -> dict[int, int]:
        """Of every rank that has some: its last step's count, and that of whoever wrote the summary."""
        found = {rank.rank: rank.telemetry_failures for rank in self.ranks}
        writer = whole(self.metrics.get("rank"), 0)
        found[writer] = max(found.get(writer, 0), whole(self.metrics.get("telemetry_failures"), 0))
        return {rank: count for rank, count in sorted(found.items()) if count > 0}

    @property
    def on_gpu(self) -> bool:
        return bool(self.env.get("gpu")) and lookup(self.config, "runtime.device") != "cpu"


def smoothing(rows: int) -> int:
    """Steps whose mean is the smoothed loss of a run that has this many."""
    return min(RECENT, max(5, rows // 20))


class RunReader:
    """Reads one folder again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._training = NumberTable(folder / TRAINING.file, TRAINING.columns)  # other ranks speak by their heartbeats
        self._gates = Samples("gate_stats", merge_gates, text=("layer",))
        self._selection = Samples("k_stats", merge_selection)
        self._fallbacks = Samples("fallback_counters", lambda ranks: ranks, text=("branch", "reason"))
        self._layer_selection = Samples("k_stats_layers", merge_layer_selection, text=("layer",))
        self._samples = (self._gates, self._selection, self._layer_selection, self._fallbacks)
        self._beats: dict[int, Heartbeat] = {0: Heartbeat(folder / "heartbeat_rank0.jsonl")}
        self._documents = {name: Document(folder / name) for name in ("metrics.json", "config.yaml", "env.json")}

    def refresh(self, now: float | None = None) -> RunView:
        self._refuse_what_is_no_run()
        for path in self.folder.glob("heartbeat_rank*.jsonl"):
            digits = path.stem.removeprefix("heartbeat_rank")
            if digits.isdigit():
                self._beats.setdefault(int(digits), Heartbeat(path))
        parts: list[NumberTable | Heartbeat | Document] = [self._training, *self._beats.values()]
        for part in [*parts, *self._documents.values()]:
            part.refresh()
        for samples in self._samples:
            samples.refresh(self.folder, self._world_size())
        return self._view(time.time() if now is None else now)

    def _refuse_what_is_no_run(self) -> None:
        try:
            names = {path.name for path in self.folder.iterdir()}
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be read: {error.strerror}; give the out_dir of a run") from None
        known = {"training.csv", "metrics.json", "env.json"} & names
        if not known and not any(name.startswith("heartbeat_rank") for name in names):
            raise ConfigError(
                f"{self.folder}: is no folder of a run (no training.csv, metrics.json, env.json or "
                "heartbeat_rank*.jsonl); give the out_dir of a run"
            )

    @property
    def _start(self) -> Row:
        """The newest start of the run, as rank 0 told it."""
        return next((e for e in reversed(self._beats[0].events) if e["event"] == "start"), {})

    def _world_size(self) -> int:
        env = self._documents["env.json"].content
        return whole(self._start.get("world_size"), whole(env.get("world_size"), len(self._beats)))

    def _own_beats(self) -> dict[int, Heartbeat]:
        """Without ranks that only a run before, with more of them, had."""
        began = self._beats[0].attempts[0][0] if self._beats[0].attempts else 0.0
        size = self._world_size()
        return {
            rank: beat
            for rank, beat in sorted(self._beats.items())
            if rank < size or (beat.newest and beat.newest["time"] >= began)
        }

    def _view(self, now: float) -> RunView:
        beats, start, size = self._own_beats(), self._start, self._world_size()
        metrics, config, env = (self._documents[n].content for n in ("metrics.json", "config.yaml", "env.json"))
        training = self._training
        status = self._status(now)
        step = self._step()
        steps = self._steps()
        attempts = beats[0].attempts
        elapsed = sum(last - first for first, last in attempts)
        if status.kind == RUNNING:
            elapsed += status.age_s
        return RunView(
            self.folder,
            now,
            status,
            step,
            steps,
            str(start.get("strategy") or env.get("strategy") or metrics.get("strategy") or "unknown"),
            size,
            len(attempts),
            attempts[0][0] if attempts else math.nan,
            elapsed,
            _left(training, beats[0], steps - step) if status.kind == RUNNING else None,
            training,
            self._gates.newest() or [],
            self._gates.last_step,
            self._selection.newest(),
            self._layer_selection.newest() or {},
            Fallbacks.of(self._fallbacks),
            happenings(beats),
            [_rank_view(rank, beat) for rank, beat in beats.items() if beat.newest and rank < size],
            self._problems(),
            metrics,
            config,
            env,
            self._gates,
            self._selection,
        )

    def _steps(self) -> int:
        config = self._documents["config.yaml"].content
        return whole(self._start.get("steps"), whole(lookup(config, "train.steps"), self._step()))

    def _step(self) -> int:
        steps = self._training.columns["step"]
        if steps:
            return int(steps[-1])
        told = [beat.newest["step"] for beat in self._beats.values() if beat.newest]
        return max(told, default=whole(self._documents["metrics.json"].content.get("steps"), 0))

    def _status(self, now: float) -> Status:
        metrics = self._documents["metrics.json"]
        newest = max((b.newest for b in self._beats.values() if b.newest), key=lambda e: e["time"], default={})
        booted_at = max((b.attempts[-1][0] for b in self._beats.values() if b.attempts), default=0.0)
        last = number(newest.get("time"), metrics.written_at)
        age, limit = max(0.0, now - last), self._limit()
        live = Status(RUNNING if age <= limit else SILENT, age, limit)
        said = metrics.content.get("status")
        if said in ("done", "failed", "preempted") and booted_at > metrics.written_at:
            # Started again, and how it ended the last time is still written there; a run that is done stays done.
            return Status(FINISHED, age, limit, 0) if said == "done" and live.kind == SILENT else live
        if said == "done":
            return Status(FINISHED, age, limit, 0)
        if said in ("failed", "preempted"):
            code, reason = whole(metrics.content.get("exit_code"), 1), str(metrics.content.get("reason", "not said"))
            return Status(FAILED if said == "failed" else PREEMPTED, age, limit, code, reason)
        return _by_last_event(newest, live)

    def _limit(self) -> float:
        """How much silence is normal: what the run's own watchdog allows."""
        config = self._documents["config.yaml"].content
        first = number(lookup(config, "telemetry.watchdog_first_step_s"), DEFAULT_FIRST_STEP_S)
        took = self._training.last("step_s", RECENT)
        took = took[np.isfinite(took)]
        starting = self._beats[0].newest.get("event") in ("boot", "first_batch", "start")
        if not len(took) or starting or self._validates_or_saves():
            return first
        floor = number(lookup(config, "telemetry.watchdog_floor_s"), DEFAULT_FLOOR_S)
        waits = self._training.last("save_wait_s", RECENT)
        longest = float(np.nanmax(waits)) if np.isfinite(waits).any() else 0.0
        return max(floor, 5.0 * float(np.median(took)) + longest)

    def _validates_or_saves(self) -> bool:
        """Whether that comes after the newest event: a step's event follows its validation and precedes its save."""
        config, step, steps = self._documents["config.yaml"].content, self._step(), self._steps()
        evals = whole(lookup(config, "train.eval_every"), 0)
        saves = whole(lookup(config, "checkpoint.every"), 0)
        validates = step + 1 >= steps or (evals > 0 and (step + 1) % evals == 0)
        return validates or any(every > 0 and step % every == 0 for every in (evals, saves))  # the best is saved too

    def _problems(self) -> dict[str, str]:
        found = {name: document.problem for name, document in self._documents.items()}
        found["training.csv"] = self._training.problem
        for samples in self._samples:
            found.update(samples.problems())
        for rank, beat in sorted(self._beats.items()):
            found[f"heartbeat_rank{rank}.jsonl"] = beat.problem
        return {name: problem for name, problem in found.items() if problem}


def read_run(folder: Path, now: float | None = None) -> RunView:
    """Everything the folder tells."""
    return RunReader(folder).refresh(now)


def _by_last_event(newest: Row, live: Status) -> Status:
    """How the run stands where no summary says that it ended."""
    kind = newest.get("event")
    if kind == "hang":
        return Status(FAILED, live.age_s, live.limit_s, 6, "no progress; see stackdump_*")
    if kind == "preempted":
        return Status(PREEMPTED, live.age_s, live.limit_s, None, "asked to stop")
    if kind == "end" and live.kind == SILENT:
        return Status(FINISHED, live.age_s, live.limit_s)
    return live


def _left(training: NumberTable, beat: Heartbeat, steps: int) -> float | None:
    """From the median of the last steps, and the mean of what lies between steps: validation and saving."""
    took = training.last("step_s", RECENT)
    took = took[np.isfinite(took)]
    if not len(took):
        return None
    return max(0, steps) * (float(np.median(took)) + _between_steps_s(training, beat))


def _between_steps_s(training: NumberTable, beat: Heartbeat) -> float:
    """Seconds a step since the process started, beyond what the steps themselves took."""
    first, last = beat.first_step, beat.last_step
    if not first or not last or last["step"] <= first["step"]:
        return 0.0
    step, took = training.column("step"), training.column("step_s")
    inside = (step > first["step"]) & (step <= last["step"])
    between = last["time"] - first["time"] - float(np.nansum(took[inside]))
    return max(0.0, float(between)) / int(last["step"] - first["step"])


def _rank_view(rank: int, beat: Heartbeat) -> RankView:
    last = beat.last_step
    return RankView(
        rank,
        beat.newest["step"],
        beat.newest["time"],
        number(last.get("mem_gib")),
        number(last.get("data_wait_s")),
        whole(last.get("telemetry_failures"), 0),
    )
