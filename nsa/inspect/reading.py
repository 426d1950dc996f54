"""A run as its folder shows it: never from the process, so that a run on another machine reads alike.

`read_run` reads everything once. A view that refreshes keeps a `RunReader`: a refresh costs what was added since the
last one. Files that are missing or damaged are named in `RunView.problems`; only a folder that is no run at all is an
error. Statistics that several ranks wrote are merged.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import ConfigError, HangError
from nsa.inspect.run_files import Document, GrowingFile, HeartbeatFile, Numbers, Row, StepTable, lookup, number, whole
from nsa.inspect.run_samples import (
    Samples,
    merge_layer_gates,
    merge_layer_selection,
    merge_selection,
    total_fallbacks,
)
from nsa.inspect.timeline import Entry, describe_hang, timeline
from nsa.record.schema import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FALLBACKS,
    GATES,
    HEARTBEAT,
    LAYER_SELECTION,
    METRICS_FILE,
    SELECTION,
    TRAINING,
    Event,
    GateStats,
    SelectionStats,
)

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
    """The last reported state of a rank."""

    rank: int
    step: int
    seen_at: float
    mem_gib: float
    telemetry_failures: int


@dataclass(frozen=True)
class RunView:
    """A run at the time `now`. Numbers that nobody has written are NaN; `left_s` is None where it is unknown."""

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
    training: StepTable
    gate_samples: Samples[dict[str, GateStats]]  # by layer; the last is ALL_LAYERS
    selection_samples: Samples[SelectionStats]
    layer_selection: dict[str, SelectionStats]  # of the newest sample
    layer_selection_step: int
    fallbacks: dict[tuple[str, str], float]  # by branch and reason
    timeline: list[Entry]  # the newest first
    ranks: list[RankView]
    problems: dict[str, str]
    metrics: Row
    config: Row
    env: Row

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def gates(self) -> dict[str, GateStats]:
        """Of the newest sample."""
        return self.gate_samples.newest() or {}

    @property
    def selection(self) -> SelectionStats | None:
        return self.selection_samples.newest()

    def now_of(self, column: str) -> float:
        """The newest value of a column of training.csv."""
        values = self.training.last(column, 1)
        return float(values[0]) if len(values) else math.nan

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
        """The part of the last steps that was spent waiting for data."""
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
        self._training = StepTable(folder / TRAINING.file, TRAINING)  # of other ranks the heartbeats are enough
        self._gates = Samples(GATES, merge_layer_gates)
        self._selection = Samples(SELECTION, merge_selection)
        self._layer_selection = Samples(LAYER_SELECTION, merge_layer_selection)
        self._fallbacks = Samples(FALLBACKS, list[Row])
        self._heartbeats = {0: HeartbeatFile(HEARTBEAT.path(folder, 0))}
        self._metrics, self._config, self._env = (
            Document(folder / name) for name in (METRICS_FILE, CONFIG_FILE, ENVIRONMENT_FILE)
        )

    @property
    def _samples(self) -> tuple[Samples[Any], ...]:
        return self._gates, self._selection, self._layer_selection, self._fallbacks

    def refresh(self, now: float | None = None) -> RunView:
        for rank, path in self._find_heartbeats().items():
            self._heartbeats.setdefault(rank, HeartbeatFile(path))
        files: list[GrowingFile | Document] = [self._training, *self._heartbeats.values()]
        for file in [*files, self._metrics, self._config, self._env]:
            file.refresh()
        for samples in self._samples:
            samples.refresh(self.folder, self._world_size())
        return self._view(time.time() if now is None else now)

    def _find_heartbeats(self) -> dict[int, Path]:
        """Refuses a folder that is no run."""
        try:
            found = HEARTBEAT.find(self.folder)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be read: {error.strerror}; give the out_dir of a run") from None
        names = (TRAINING.file, METRICS_FILE, ENVIRONMENT_FILE)
        if not found and not any((self.folder / name).exists() for name in names):
            raise ConfigError(
                f"{self.folder}: is no folder of a run (no {', '.join(names)} or {HEARTBEAT.pattern}); "
                "give the out_dir of a run"
            )
        return found

    @property
    def _start(self) -> Event:
        """The newest start of the run, as rank 0 reported it."""
        return next((e for e in reversed(self._heartbeats[0].events) if e["event"] == "start"), {})

    def _world_size(self) -> int:
        env = self._env.content
        return whole(self._start.get("world_size"), whole(env.get("world_size"), len(self._heartbeats)))

    def _own_heartbeats(self) -> dict[int, HeartbeatFile]:
        """Without ranks that only an earlier run, with more of them, had."""
        attempts, size = self._heartbeats[0].attempts, self._world_size()
        began = attempts[0][0] if attempts else 0.0
        return {
            rank: heartbeat
            for rank, heartbeat in sorted(self._heartbeats.items())
            if rank < size or (heartbeat.newest and heartbeat.newest["time"] >= began)
        }

    def _view(self, now: float) -> RunView:
        heartbeats, start, size = self._own_heartbeats(), self._start, self._world_size()
        metrics, config, env = self._metrics.content, self._config.content, self._env.content
        status, step, steps = self._status(now), self._step(), self._steps()
        attempts = heartbeats[0].attempts
        is_running = status.kind == RUNNING
        return RunView(
            folder=self.folder,
            now=now,
            status=status,
            step=step,
            steps=steps,
            strategy=str(start.get("strategy") or env.get("strategy") or metrics.get("strategy") or "unknown"),
            world_size=size,
            attempts=len(attempts),
            started_at=attempts[0][0] if attempts else math.nan,
            elapsed_s=sum(last - first for first, last in attempts) + (status.age_s if is_running else 0.0),
            left_s=_left(self._training, heartbeats[0], steps - step) if is_running else None,
            training=self._training,
            gate_samples=self._gates,
            selection_samples=self._selection,
            layer_selection=self._layer_selection.newest() or {},
            layer_selection_step=self._layer_selection.last_step,
            fallbacks=total_fallbacks(self._fallbacks),
            timeline=timeline(heartbeats),
            ranks=[_rank_view(rank, file) for rank, file in heartbeats.items() if file.newest and rank < size],
            problems=self._problems(),
            metrics=metrics,
            config=config,
            env=env,
        )

    def _steps(self) -> int:
        return whole(self._start.get("steps"), whole(lookup(self._config.content, "train.steps"), self._step()))

    def _step(self) -> int:
        if len(self._training):
            return self._training.step
        reported = [file.newest["step"] for file in self._heartbeats.values() if file.newest]
        return max(reported, default=whole(self._metrics.content.get("steps"), 0))

    def _status(self, now: float) -> Status:
        files, metrics = self._heartbeats.values(), self._metrics.content
        newest = max((file.newest for file in files if file.newest), key=lambda e: e["time"], default={})
        booted_at = max((file.attempts[-1][0] for file in files if file.attempts), default=0.0)
        age = max(0.0, now - number(newest.get("time"), self._metrics.written_at))
        limit = self._limit()
        live = Status(RUNNING if age <= limit else SILENT, age, limit)
        ended = metrics.get("status")
        if ended in ("done", "failed", "preempted") and booted_at > self._metrics.written_at:
            # Started again, and the summary is still that of the last end; a run that is done stays done.
            return Status(FINISHED, age, limit, 0) if ended == "done" and live.kind == SILENT else live
        if ended == "done":
            return Status(FINISHED, age, limit, 0)
        if ended in ("failed", "preempted"):
            code, reason = whole(metrics.get("exit_code"), 1), str(metrics.get("reason", "not said"))
            return Status(FAILED if ended == "failed" else PREEMPTED, age, limit, code, reason)
        return _by_last_event(newest, live)

    def _limit(self) -> float:
        """How much silence is normal: as much as the run's own watchdog allows."""
        config = self._config.content
        first = number(lookup(config, "telemetry.watchdog_first_step_s"), DEFAULT_FIRST_STEP_S)
        took = self._training.last("step_s", RECENT)
        took = took[np.isfinite(took)]
        starting = self._heartbeats[0].newest.get("event") in ("boot", "first_batch", "start")
        if not len(took) or starting or self._validates_or_saves():
            return first
        floor = number(lookup(config, "telemetry.watchdog_floor_s"), DEFAULT_FLOOR_S)
        waits = self._training.last("save_wait_s", RECENT)
        longest = float(np.nanmax(waits)) if np.isfinite(waits).any() else 0.0
        return max(floor, 5.0 * float(np.median(took)) + longest)

    def _validates_or_saves(self) -> bool:
        """Whether that comes after the newest event: a step's event follows its validation and precedes its save."""
        config, step, steps = self._config.content, self._step(), self._steps()
        evals = whole(lookup(config, "train.eval_every"), 0)
        saves = whole(lookup(config, "checkpoint.every"), 0)
        validates = step + 1 >= steps or (evals > 0 and (step + 1) % evals == 0)
        return validates or any(every > 0 and step % every == 0 for every in (evals, saves))  # the best is saved too

    def _problems(self) -> dict[str, str]:
        files = (self._metrics, self._config, self._env, self._training)
        found = {file.path.name: file.problem for file in files}
        for samples in self._samples:
            found.update(samples.problems())
        found.update({file.path.name: file.problem for _, file in sorted(self._heartbeats.items())})
        return {name: problem for name, problem in found.items() if problem}


def read_run(folder: Path, now: float | None = None) -> RunView:
    """Everything the folder shows."""
    return RunReader(folder).refresh(now)


def _by_last_event(newest: Event, live: Status) -> Status:
    """The status of a run whose summary does not say that it ended."""
    kind = newest.get("event")
    if kind == "hang":
        return Status(FAILED, live.age_s, live.limit_s, HangError.exit_code, describe_hang(newest))
    if kind == "preempted":
        return Status(PREEMPTED, live.age_s, live.limit_s, None, "asked to stop")
    if kind == "end" and live.kind == SILENT:
        return Status(FINISHED, live.age_s, live.limit_s)
    return live


def _left(training: StepTable, heartbeat: HeartbeatFile, steps: int) -> float | None:
    """From the median of the last steps, and the mean of what lies between steps: validation and saving."""
    took = training.last("step_s", RECENT)
    took = took[np.isfinite(took)]
    if not len(took):
        return None
    return max(0, steps) * (float(np.median(took)) + _between_steps_s(training, heartbeat))


def _between_steps_s(training: StepTable, heartbeat: HeartbeatFile) -> float:
    """Seconds a step since the process started, beyond what the steps themselves took."""
    first, last = heartbeat.first_step, heartbeat.last_step
    if not first or not last or last["step"] <= first["step"]:
        return 0.0
    step, took = training.column("step"), training.column("step_s")
    inside = (step > first["step"]) & (step <= last["step"])
    between = last["time"] - first["time"] - float(np.nansum(took[inside]))
    return max(0.0, float(between)) / int(last["step"] - first["step"])


def _rank_view(rank: int, heartbeat: HeartbeatFile) -> RankView:
    newest, last = heartbeat.newest, heartbeat.last_step
    failures = whole(last.get("telemetry_failures"), 0)
    return RankView(rank, newest["step"], newest["time"], number(last.get("mem_gib")), failures)
