"""Reads a run from its folder, never from its process: a run on another machine is read in the same way.

`read_run` reads the whole folder, which takes half a second for 50,000 steps. `RunView.problems` names missing and
damaged files; only a folder without any file of a run is an error. Statistics of several ranks are merged.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa import run_folder
from nsa.errors import CheckpointError, HangError
from nsa.formatting import seconds
from nsa.inspect.run_files import (
    MISSING,
    HeartbeatFile,
    Numbers,
    Samples,
    SamplesFile,
    StepTable,
    lookup,
    number,
    rank_tables,
    read_document,
    seconds_between,
    total_fallbacks,
    whole,
)
from nsa.inspect.timeline import describe_hang, timeline
from nsa.run_folder import GateStats, SelectionStats

RECENT = 50  # steps over which noisy numbers are averaged
DEFAULT_FLOOR_S, DEFAULT_FIRST_STEP_S = 60.0, 600.0  # limits of silence if the configuration cannot be read

RUNNING, SILENT, FINISHED, FAILED, PREEMPTED = "running", "silent", "finished", "failed", "preempted"


@dataclass(frozen=True)
class Status:
    """`kind` is one of the five above; `age_s` is the time since the last event; `limit_s` is how long is normal."""

    kind: str
    age_s: float
    limit_s: float
    exit_code: int | None = None
    reason: str = ""

    @property
    def text(self) -> str:
        about = {
            RUNNING: f"running, last event {seconds(self.age_s)} ago",
            SILENT: f"SILENT for {seconds(self.age_s)}",
            FAILED: f"FAILED, exit code {self.exit_code}",
        }
        return about.get(self.kind, self.kind)


class RunView:
    """A run at the time `now`. Numbers that the run has not written are NaN."""

    def __init__(self, folder: Path, now: float):
        self.folder, self.now = folder, now
        self._heartbeats = {rank: HeartbeatFile(path) for rank, path in _find_heartbeats(folder).items()}
        self.training = StepTable(folder / run_folder.TRAINING.file, run_folder.TRAINING)  # written by rank 0
        self.samples = SamplesFile(folder / run_folder.SAMPLES_FILE)
        names = (run_folder.METRICS_FILE, run_folder.CONFIG_FILE, run_folder.ENVIRONMENT_FILE)
        self._documents = {name: read_document(folder / name) for name in names}
        self.metrics, self.config, self.env = (content for content, _ in self._documents.values())
        self.evaluation, problem = read_document(folder / run_folder.EVALUATION_FILE)
        if problem != MISSING:  # most runs have no evaluation
            self._documents[run_folder.EVALUATION_FILE] = self.evaluation, problem
        writers = 1 if lookup(self.config, "telemetry.per_rank") is False else self.world_size
        self.gate_samples = Samples(run_folder.GATES, GateStats, folder, writers)
        self.selection_samples = Samples(run_folder.SELECTION, SelectionStats, folder, writers)
        self.layer_selection_samples = Samples(run_folder.LAYER_SELECTION, SelectionStats, folder, writers)
        fallbacks = rank_tables(run_folder.FALLBACKS, folder, writers)
        samples = (self.gate_samples, self.selection_samples, self.layer_selection_samples)
        self._tables = [file for each in (*(s.files for s in samples), fallbacks) for file in each.values()]
        self.selection = self.selection_samples.at(self.selection_samples.last_step).get(run_folder.ALL_LAYERS)
        self.gates = self.gate_samples.at(self.gate_samples.last_step)  # by layer; the last key is ALL_LAYERS
        self.layer_selection = self.layer_selection_samples.at(self.layer_selection_samples.last_step)
        self.fallbacks = total_fallbacks(fallbacks, whole(self._start.get("step"), 0))  # by branch and reason
        own = self._own_heartbeats()
        self.ranks = {rank: file for rank, file in own.items() if file.newest and rank < self.world_size}
        self.timeline = timeline(own)  # the newest first
        self.status = self._status()

    def _own_heartbeats(self) -> dict[int, HeartbeatFile]:
        """The heartbeats without those of ranks that only an earlier, larger run had."""
        began, size = 0.0 if math.isnan(self.started_at) else self.started_at, self.world_size
        return {
            rank: file
            for rank, file in self._heartbeats.items()
            if rank < size or (file.newest and file.newest["time"] >= began)
        }

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def problems(self) -> dict[str, str]:
        """Descriptions of missing and damaged files, by file name."""
        files = [self.training, self.samples, *self._tables, *self._heartbeats.values()]
        found = {name: problem for name, (_, problem) in self._documents.items()}
        found |= {file.path.name: file.problem for file in files}
        return {name: problem for name, problem in found.items() if problem}

    @property
    def _start(self) -> run_folder.Event:
        """The newest start of the run, as rank 0 reported it."""
        return next((e for e in reversed(self._heartbeats[0].events) if e["event"] == "start"), {})

    @property
    def world_size(self) -> int:
        return whole(self._start.get("world_size"), whole(self.env.get("world_size"), len(self._heartbeats)))

    @property
    def strategy(self) -> str:
        known = [part.get("strategy") for part in (self._start, self.env, self.metrics)]
        return str(next(filter(None, known), "unknown"))

    @property
    def step(self) -> int:
        if len(self.training):
            return self.training.step
        reported = [file.done_steps for file in self._heartbeats.values() if file.newest]
        return max(reported, default=whole(self.metrics.get("steps"), 0))

    @property
    def steps(self) -> int:
        return whole(self._start.get("steps"), whole(lookup(self.config, "train.steps"), self.step))

    @property
    def done(self) -> float:
        """The fraction of steps that are done."""
        return min(1.0, self.step / self.steps) if self.steps > 0 else 0.0

    @property
    def percent(self) -> str:
        """`done` as text; 100 % only if all steps are done."""
        return f"{100 * min(self.step, self.steps) // self.steps if self.steps > 0 else 0}%"

    @property
    def attempts(self) -> int:
        """How often the process was started."""
        return len(self._heartbeats[0].attempts)

    @property
    def started_at(self) -> float:
        return next(iter(self._heartbeats[0].attempts), math.nan)

    @property
    def elapsed_s(self) -> float:
        running = self.status.age_s if self.status.kind == RUNNING else 0.0
        return sum(self._heartbeats[0].seconds) + running

    @property
    def left_s(self) -> float | None:
        """Estimated from the median of the last steps and the mean time between steps (validation and saving). None if
        unknown."""
        took = self.recent("step_s")
        if self.status.kind != RUNNING or math.isnan(took):
            return None
        return max(0, self.steps - self.step) * (took + self._between_steps_s())

    def _between_steps_s(self) -> float:
        """Mean time between two steps since the process started."""
        first, last = self._heartbeats[0].first_step, self._heartbeats[0].last_step
        if not first or not last or last["step"] <= first["step"]:
            return 0.0
        step, took = self.training.column("step"), self.training.column("step_s")
        inside = (step > first["step"]) & (step <= last["step"])
        between = seconds_between(first, last) - float(np.nansum(took[inside]))
        return max(0.0, between) / int(last["step"] - first["step"])

    def latest(self, column: str) -> float:
        """The newest value of a column of training.csv."""
        return float(self.training.column(column)[-1]) if len(self.training) else math.nan

    def recent(self, column: str, how: Callable[[Numbers], Any] = np.median, steps: int = RECENT) -> float:
        """Reduces the finite values of the last steps by `how`."""
        values = self.training.column(column)[-steps:]
        values = values[np.isfinite(values)]
        return float(how(values)) if len(values) else math.nan

    @property
    def loss(self) -> float:
        """The mean loss of the last `smoothing` steps."""
        return self.recent("loss", np.mean, smoothing(len(self.training)))

    @property
    def data_share(self) -> float:
        """The fraction of the last steps that was spent waiting for data."""
        spent = self.recent("step_s", np.sum)
        return self.recent("data_wait_s", np.sum) / spent if spent > 0 else math.nan

    @property
    def mem_gib(self) -> float:
        """The memory of the rank that uses the most."""
        known = [*(number(file.last_step.get("mem_gib")) for file in self.ranks.values()), self.latest("mem_gib")]
        return max((value for value in known if math.isfinite(value)), default=math.nan)

    @property
    def save_wait_s(self) -> float:
        """The total time that steps waited for checkpoints."""
        waits = self.training.column("save_wait_s")
        return float(waits[np.isfinite(waits)].sum())

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
        """The failures of each rank that has any, from its last step or, if larger, from the summary."""
        found = {rank: whole(file.last_step.get("telemetry_failures"), 0) for rank, file in self.ranks.items()}
        writer = whole(self.metrics.get("rank"), 0)
        found[writer] = max(found.get(writer, 0), whole(self.metrics.get("telemetry_failures"), 0))
        return {rank: count for rank, count in sorted(found.items()) if count > 0}

    @property
    def on_gpu(self) -> bool:
        return bool(self.env.get("gpu")) and lookup(self.config, "runtime.device") != "cpu"

    def _status(self) -> Status:
        files, metrics = [file for file in self._heartbeats.values() if file.newest], self.metrics
        written_at = _written_at(self.folder / run_folder.METRICS_FILE)
        newest = max((file.newest for file in files), key=lambda e: e["time"], default={})
        booted_at = max((file.attempts[-1] for file in files), default=0.0)
        age = self.now - number(newest.get("time"), written_at)
        if age < 0.0:  # the clock of the run's host is ahead; that of the file system may not be
            age = max(0.0, self.now - max((_written_at(file.path) for file in files), default=self.now))
        limit = self._limit()
        live = Status(RUNNING if age <= limit else SILENT, age, limit)
        ended = metrics.get("status")
        # A start replaces the summary of the attempt before. Only until then the times count: clocks of hosts differ.
        has_started = any(e["event"] == "start" and e["attempt"] == self.attempts for e in self._heartbeats[0].events)
        is_restarted = not has_started and booted_at > written_at  # the summary is of an earlier attempt
        if ended == "done" and (live.kind == SILENT or not is_restarted):
            return Status(FINISHED, age, limit, 0)
        if ended in ("failed", "preempted") and not is_restarted:
            code, reason = whole(metrics.get("exit_code"), 1), str(metrics.get("reason", "not recorded"))
            return Status(FAILED if ended == "failed" else PREEMPTED, age, limit, code, reason)
        last = newest.get("event")  # the run wrote no summary when it ended
        if last == "hang":
            return Status(FAILED, age, limit, HangError.exit_code, describe_hang(newest))
        if last == "preempted":
            return Status(PREEMPTED, age, limit, None, "asked to stop")
        return live

    def _limit(self) -> float:
        """How many seconds of silence are normal: as many as the watchdog of the run allows."""
        first = number(lookup(self.config, "telemetry.watchdog_first_step_s"), DEFAULT_FIRST_STEP_S)
        took = self.recent("step_s")
        starting = self._heartbeats[0].newest.get("event") in ("boot", "first_batch", "start", "attention")
        if math.isnan(took) or starting or self._validates_or_saves():
            return first
        floor = number(lookup(self.config, "telemetry.watchdog_floor_s"), DEFAULT_FLOOR_S)
        longest = self.recent("save_wait_s", np.max)
        return max(floor, 5.0 * took + (0.0 if math.isnan(longest) else longest))

    def _validates_or_saves(self) -> bool:
        """Whether a validation or a save follows the newest event. The event of a step comes after its validation, and
        before its save and its profile."""
        step, profiled = self.step, lookup(self.config, "train.profile_steps")
        evals = whole(lookup(self.config, "train.eval_every"), 0)
        saves = whole(lookup(self.config, "checkpoint.every"), 0)
        validates = step + 1 >= self.steps or (evals > 0 and (step + 1) % evals == 0)
        writes = any(every > 0 and step % every == 0 for every in (evals, saves))  # the best is also saved
        return validates or writes or (isinstance(profiled, list) and step in profiled[-1:])


def smoothing(rows: int) -> int:
    """The number of steps over which the loss is averaged, in a run with this many rows."""
    return min(RECENT, max(5, rows // 20))


def read_run(folder: Path, now: float | None = None) -> RunView:
    return RunView(folder, time.time() if now is None else now)


def _written_at(path: Path) -> float:
    """When the file was last written, by the clock of the file system; 0 if there is no such file."""
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _find_heartbeats(folder: Path) -> dict[int, Path]:
    """The path of rank 0's heartbeat, which may be missing, and the existing ones of other ranks. Raises
    CheckpointError if the folder has no file of a run."""
    with run_folder.reading_run(folder):
        found = run_folder.HEARTBEAT.find(folder)
    names = (run_folder.TRAINING.file, run_folder.METRICS_FILE, run_folder.ENVIRONMENT_FILE)
    if not found and not any((folder / name).exists() for name in names):
        raise CheckpointError(f"{folder}: not the folder of a run, it has no {names[0]}; give the out_dir of a run")
    return {0: run_folder.HEARTBEAT.path(folder, 0), **found}
