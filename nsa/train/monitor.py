"""The output of a run: console lines, events and their sinks, statistics of sparse attention.

No method waits for the device or, after the first step, for another rank. A file that cannot be opened at the start
ends the run, because its folder is not usable. Later failures are counted and do not end the run; `nsa.record.failures`
also prints the traceback of a programming error.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.config import Config
from nsa.errors import CheckpointError, ConfigError, DataError, HangError, LaunchError, SpecError
from nsa.nn.attention import attention_layers
from nsa.ops import dispatch
from nsa.ops.observe import Observer
from nsa.parallel.collectives import gather_objects
from nsa.parallel.world import World
from nsa.record.attention_stats import KINDS, AttentionObserver, Sample
from nsa.record.console import RunConsole, step_line
from nsa.record.dtypes import optimizer_line, write_dtypes_report, write_optimizer_state
from nsa.record.events import EventStream, HeartbeatSink
from nsa.record.memory_dump import dump_memory, memory_gib
from nsa.record.profile import StepProfiler
from nsa.record.run_log import RunLog
from nsa.record.sinks import TableSink, TensorBoard, Tracker
from nsa.record.tracer import Tracer
from nsa.run_folder import TABLES, TRAINING, EventKind, GateStats, SelectionStats, TrainingRow
from nsa.supervise.watchdog import Watchdog
from nsa.train.folder import Claim, record_end
from nsa.train.state import RunState


class Monitor:
    def __init__(self, config: Config, claim: Claim, world: World, printed: RunLog):
        folder = claim.folder
        self.config, self.claim, self.folder, self.world, self._printed = config, claim, folder, world, printed
        self._failures = printed.failures
        self._heartbeat = HeartbeatSink(folder, world.rank)
        self.stream = EventStream(world.rank, [self._heartbeat], self._failures)
        self.console = RunConsole(config.train.steps, printed, silent=not world.is_first)
        self.profiler = StepProfiler(folder, world.rank, config.train.profile_steps, world.device)
        wanted = config.telemetry
        times = {"floor_s": wanted.watchdog_floor_s, "first_step_s": wanted.watchdog_first_step_s}
        counted = self._failures.counted
        self.watchdog = Watchdog(folder, world.rank, world.size, **times, on_hang=self._on_hang, counted=counted)
        traced = {"grads": wanted.trace_grads, "modules": wanted.trace_modules, "buckets": wanted.trace_buckets}
        self.tracer = Tracer(folder, world.rank, **traced, failures=self._failures)
        self._tables: list[TableSink] = []
        self._observer: AttentionObserver | None = None
        self._last: dict[str, Any] = {}  # the newest sample and index_kl, for the summary
        self._failure_reported = False
        self._steps_done: int | None = None  # None until the run is resumed
        self._fallbacks_before = Counter(dispatch.counters())  # counted in this process before the run

    def open(self, state: RunState) -> None:
        """Opens the files of the run, truncated to the step it resumes from."""
        done, wanted = state.progress.step, self.config.telemetry
        self._steps_done = done
        if self.world.is_first or wanted.per_rank:
            self._tables = [TableSink(self.folder, self.world.rank, table, done) for table in TABLES]
            self.stream.add(*self._tables)
        for table in self._tables:
            if table.table is TRAINING and table.last_step is not None and table.last_step < done:  # has every step
                rows = f"the rows of steps {table.last_step + 1} to {done}"
                message = f"{table.name} lacks {rows}: they were not written before the run stopped"
                self.incident("missing_rows", f"{message}; other tables may lack rows too", done)
        if self.world.is_first and wanted.tensorboard:
            with self._failures.counted():  # the folder cannot be written
                self.stream.add(TensorBoard(self.folder, done))
        if self.world.is_first and wanted.tracker != "none":
            with self._failures.counted():  # the package is not installed
                self.stream.add(Tracker(wanted.tracker, self.folder, self.config.to_dict()))
        named = list(attention_layers(state.model))
        layers = {kind: [name for name, layer in named if kind in layer.statistics] for kind in KINDS}
        # Measured with the index loss.
        layers["mass"] = [name for name, layer in named if "mass" in layer.statistics and layer.has_index_loss]
        if any(layers.values()) and wanted.attention:
            context, device = self.world.context, self.world.device
            stack = None if context is None else lambda x: context.gather(x.to(device)[None]).wait()
            self._observer = AttentionObserver(layers, stack)

    def observer(self, step: int) -> Observer | None:
        """The observer of this step's forward pass, or None if the step is not sampled."""
        return self._observer if self._is_sampled(step) else None

    def profile(self, step: int) -> None:
        """Call before a step: starts the profiler if the step is in train.profile_steps."""
        with self._failures.counted():
            self.profiler.before(step)

    def drop_profile(self) -> None:
        """Call when the run is asked to stop: it may be killed before a profile is written."""
        with self._failures.counted():
            self.profiler.drop()

    def memory_gib(self) -> float | None:
        with self._failures.counted():
            return memory_gib(self.world.device)
        return None

    def beat(self, step: int, phase: str) -> None:
        """Reports progress, which restarts the watchdog's timeout."""
        self.watchdog.beat(step, phase)

    def extended_timeout(self) -> AbstractContextManager[None]:
        """Inside, the watchdog allows as much time as for the first step: for compilation and large writes."""
        return self.watchdog.allow(self.config.telemetry.watchdog_first_step_s)

    def _on_hang(self, report: dict[str, Any], message: str) -> None:
        """Called in the watchdog's thread; the process ends when it returns."""
        remedy = "the same command resumes from the last checkpoint"
        if "step" not in self.stream.emitted:  # it would meet the same limit
            remedy = "if this start is only slow, raise telemetry.watchdog_first_step_s"
        reason = HangError(f"{message}; {remedy}")
        self.stream.emit("hang", **report)
        record_end(self.claim, reason, self._steps_done, self.describe())
        self.stream.flush(3.0)

    def dump_memory(self, state: RunState, label: str) -> None:
        with self._failures.counted():
            dump_memory(self.folder, label, self.world.device, self.world.rank, state.tensors)

    def audit(self, state: RunState) -> None:
        """Writes the dtype and optimizer reports after the first step, when gradients and moments exist. All ranks
        call it together."""
        line = ""
        with self._failures.counted():
            line = optimizer_line(state.optimizer, self.world.rank)
        lines = gather_objects(line, self.world)
        if self.world.is_first:
            with self._failures.counted():
                write_optimizer_state(self.folder, lines)
            with self._failures.counted():
                buffers = dict(state.model.named_buffers())
                write_dtypes_report(self.folder, state.parameters, buffers, state.optimizer)

    def log(self, line: str) -> None:
        with self._failures.counted():
            self.console.log(line)

    def emit(self, event: EventKind, step: int, **values: Any) -> None:
        self.stream.emit(event, step, **values)

    def incident(self, kind: str, message: str, step: int) -> None:
        self.stream.incident(kind, message, step)
        self.log(f"incident {kind}: {message}")

    def step_done(self, row: TrainingRow) -> None:
        """Records a step, with its validation."""
        self._steps_done = row.step
        with self._failures.counted():  # first: it gathers over context-parallel ranks, so no rank may skip it
            if self._observer is not None and self._is_sampled(row.step):
                self._observer.finish(row.step)
        with self._failures.counted():
            self.watchdog.step_done(row.step_s)
            self.stream.emit("step", **asdict(row), telemetry_failures=self.failures)
            if row.index_kl is not None:
                self._last |= finite({"index_kl": row.index_kl})
            self._take_samples(row.step)
        if self.failures and not self._failure_reported:
            self._failure_reported = True
            why = self._failures.last or "a file or a sink could not be written"
            self.incident("telemetry", why, row.step)
        with self._failures.counted():
            self._show(row)

    def _show(self, row: TrainingRow) -> None:
        self.console.advance(row.step, row.loss)
        if row.step % self.config.train.log_every == 0 or row.step in (1, self.config.train.steps):
            self.log(step_line(row))
        if row.val_loss is not None:
            self.log(
                f"step {row.step:04d} | validation loss {row.val_loss:.4f} nats"
                f" | {row.val_bits_per_byte:.4f} bits per byte"
            )
        with self.extended_timeout():  # a profile of 100,000 operators takes a minute to write
            self._log_profile(self.profiler.after(row.step))

    def _log_profile(self, trace: Path | None) -> None:
        if trace is not None:
            self.log(f"profile in {trace}, its ten costliest operators in {trace.with_suffix('.txt').name}")

    def _is_sampled(self, step: int) -> bool:
        return step == 1 or step % self.config.telemetry.every == 0

    def _take_samples(self, step: int) -> None:
        if self._is_sampled(step):
            new = Counter(dispatch.counters()) - self._fallbacks_before
            counts = sorted((branch, reason, count) for (branch, reason), count in new.items())
            self.stream.emit("fallbacks", step, counts=counts)
        for sample in self._observer.ready() if self._observer else ():
            self._emit_sample(sample)

    def last_samples(self) -> None:
        """Waits for the last samples, at the end of a run."""
        with self._failures.counted():
            for sample in self._observer.ready(wait=True) if self._observer else ():
                self._emit_sample(sample)

    def _emit_sample(self, sample: Sample) -> None:
        if self.world.context is not None and self.world.context.rank > 0:
            return  # all ranks of a context-parallel group have the same statistics
        self._emit_stats("gates", sample.step, sample.gates)
        self._emit_stats("selection", sample.step, sample.selection)

    def _emit_stats(self, event: EventKind, step: int, stats: Mapping[str, GateStats | SelectionStats]) -> None:
        if stats:
            *layers, (_, whole) = stats.items()
            self._last[event] = finite(asdict(whole))
            self.stream.emit(event, step, layers=[{"layer": n, **asdict(s)} for n, s in layers], **asdict(whole))

    @property
    def failures(self) -> int:
        """The number of records that could not be written."""
        return self._failures.count + (self._observer.failures if self._observer else 0)

    def describe(self) -> dict[str, Any]:
        """Telemetry of this rank for the summary of the run. The heartbeats have that of the other ranks."""
        return {
            "rank": self.world.rank,
            "incidents": self.stream.incidents,
            "telemetry_failures": self.failures,
            **self._last,
        }

    def withdraw_start(self, reason: BaseException) -> None:
        """Removes the start from the heartbeat if the run was refused because of its input: it is not an attempt."""
        is_refused = isinstance(reason, (ConfigError, SpecError, DataError, CheckpointError, LaunchError))
        if is_refused and self.stream.emitted <= {"boot", "first_batch"}:
            with self._failures.counted():
                self.stream.flush()
                self._heartbeat.withdraw()

    def write_profile(self) -> None:
        """Writes the profile of a run that ends before the last step to profile, unless its folder is lost."""
        with self._failures.counted():
            if self.claim.is_lost():
                self.profiler.drop()
            self._log_profile(self.profiler.close())

    def close(self) -> None:
        self.tracer.close()
        self.stream.close()
        self._printed.flush()


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values for JSON, which has no NaN: values that are not finite become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
