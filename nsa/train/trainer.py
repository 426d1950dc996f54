"""A run from its configuration to trained weights, on one process or many."""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from nsa import faults
from nsa.checkpoint import layout
from nsa.checkpoint.files import write_atomically
from nsa.checkpoint.save import Saver
from nsa.checkpoint.weights import spell_weights
from nsa.config import Config
from nsa.data.build import tokenizer_for
from nsa.data.loader import Batch
from nsa.data.waiting import WaitStopped
from nsa.errors import CheckpointError, Interrupted, LaunchError, NumericsError, OutOfMemoryError, Preempted
from nsa.nn.flops import flops_per_token
from nsa.parallel.collectives import lost_rank, on_first_rank
from nsa.parallel.ddp import effective
from nsa.parallel.launch import World, read_place, start_world
from nsa.parallel.numerics import numerics
from nsa.parallel.strategy import gather_weights, host_mesh
from nsa.record.environment import describe_environment
from nsa.record.memory import is_out_of_memory, memory_gib, oom_report, remedies
from nsa.record.run_log import RunLog
from nsa.record.schema import ENVIRONMENT_FILE, WEIGHTS_FILE, TrainingRow
from nsa.train import nonfinite
from nsa.train.feed import Feed
from nsa.train.folder import (
    changed_keys,
    claim_folder,
    finished_metrics,
    record_end,
    refuse_other_config,
    start_over,
    write_config,
    write_json,
    write_metrics,
)
from nsa.train.monitor import Monitor
from nsa.train.resume import check_same_config, restore, seed_generators
from nsa.train.saving import Saving
from nsa.train.schedule import learning_rate
from nsa.train.signals import StopRequest
from nsa.train.state import RunState, build_state, micro_batch_size
from nsa.train.step import StepResult, Validation, train_step, validate


def train(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    synthetic_on_fail: bool = False,
) -> None:
    """Trains as configured into `folder`, going on from its newest sound checkpoint.

    A run that is done already says so and is left as it is. `fresh` starts over; `accept_changes` goes on although
    the configuration or the data are others than the checkpoint's; `synthetic_on_fail` trains on invented text where
    the source does not answer.
    """
    place = read_place(os.environ)
    if fresh and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise LaunchError("--fresh: would start over at every restart of torchrun; start without --max-restarts")
    faults.arm(os.environ.get("NSA_FAULTS", ""), place.rank, place.attempt)
    try:
        with (
            numerics(config.runtime),
            start_world(config.parallel, config.runtime.device) as world,
            ExitStack() as held,
        ):
            on_first_rank(world, lambda: held.enter_context(claim_folder(folder)))
            done = on_first_rank(world, lambda: None if fresh else _finished(config, folder, accept_changes))
            if done is None:  # else nothing of the finished run is touched
                held.enter_context(RunLog(folder, world.rank))
            print(world.banner(), flush=True)
            if done is not None:
                if world.is_first:
                    print(f"{folder}: this run is done ({done} steps); --fresh trains it again from the start")
                return
            _run(
                Run(
                    config,
                    folder,
                    world,
                    fresh=fresh,
                    accept_changes=accept_changes,
                    synthetic_on_fail=synthetic_on_fail,
                )
            )
    except Exception as error:
        lost = lost_rank(error, place.rank, place.size)
        if lost is None:
            raise
        raise lost from error


def _run(run: "Run") -> None:
    """The whole run, and if it does not come to its end, why."""
    try:
        with StopRequest() as stop, run.monitor.watchdog:
            run.start(stop)
            run.loop(stop)
            run.end()
    except BaseException as error:
        exhausted = run.out_of_memory(error)  # while the traceback keeps what was allocated
        run.monitor.close()
        reason = exhausted or lost_rank(error, run.world.rank, run.world.size) or error
        record_end(run.folder, reason, run.step if run.announced else None, run.monitor.describe())
        if exhausted is not None:
            raise exhausted from error
        raise


def _finished(config: Config, folder: Path, accept_changes: bool) -> int | None:
    """Steps of the finished run that lies here, where there is nothing left to do."""
    metrics = finished_metrics(folder)
    if metrics is None or (accept_changes and changed_keys(folder, config)):
        return None
    refuse_other_config(folder, config)
    return int(metrics["steps"]) if metrics["steps"] == config.train.steps else None


class Run:
    """One run in one process. Rank 0 alone talks and writes; every rank computes, agrees and saves its shards."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        world: World,
        *,
        fresh: bool,
        accept_changes: bool,
        synthetic_on_fail: bool = False,
    ):
        self.config, self.folder, self.world = config, folder, world
        self.fresh, self.accept_changes, self.synthetic_on_fail = fresh, accept_changes, synthetic_on_fail
        self.started = time.perf_counter()
        self.state: RunState | None = None
        self.monitor = Monitor(config, folder, world)
        self.announced = False  # in metrics.json, as running

    @property
    def step(self) -> int:
        return self.state.progress.step if self.state else 0

    def start(self, stop: StopRequest) -> None:
        """Builds everything, takes up the newest checkpoint, opens the files."""
        config, folder, world = self.config, self.folder, self.world
        self.micro_batch = micro_batch_size(config, world.size)
        self.monitor.emit("boot", 0, pid=os.getpid(), host=socket.gethostname())
        self.state = state = build_state(config, tokenizer_for(config.data), world, self.monitor.tracer.traced_hook)
        seed_generators(config.train.seed, world.rank)
        self.monitor.beat(0, "restore")
        taken_up = None if self.fresh else self._take_up()
        self.monitor.beat(self.step, "data")
        self.feed = Feed(config, state, folder, self.micro_batch, self.monitor, stop)
        self.feed.open(synthetic_on_fail=self.synthetic_on_fail, accept_changes=self.accept_changes)
        root = folder / layout.FOLDER
        if self.fresh and world.is_first:
            start_over(folder)
        self.monitor.open(state)
        self.monitor.dump_memory(state, "boot")
        self._first_step = self.step + 1
        saver = Saver(
            root,
            config.checkpoint.keep,
            rank=world.rank,
            size=world.size,
            group=world.cpu_group,
            mesh=host_mesh(world),
        )
        saver.last_good = taken_up
        self.saving = Saving(config, state, saver, self.monitor.flush, self._incident, self.step if taken_up else -1)
        if world.is_first:
            write_metrics(folder, {"status": "running", "steps": self.step})  # first: what lies here is not done
            faults.point("start.running")
            write_config(folder, config)
            environment = describe_environment(config.to_dict(), world.size, world.strategy)
            write_json(folder / ENVIRONMENT_FILE, {**environment, "precision": state.precision})
            for line in self._describe(taken_up):
                self.monitor.say(line)
        self.announced = True
        self.monitor.emit(
            "start",
            self.step,
            strategy=world.strategy,
            world_size=world.size,
            backend=world.backend,
            steps=config.train.steps,
            fresh=self.fresh,
            from_checkpoint=taken_up,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def loop(self, stop: StopRequest) -> None:
        assert self.state is not None
        config, progress = self.config, self.state.progress
        save_wait_s = 0.0
        with self.monitor.console:
            while progress.step < config.train.steps:
                clock = StepClock()
                self.monitor.profiler.before(progress.step + 1)
                faults.point("step.begin")
                lr = learning_rate(progress.step, config.train)
                targets = self.feed.num_targets()
                self.monitor.tracer.step_begin(progress.step + 1)
                try:
                    result = train_step(
                        self.state,
                        self._micro_batches(clock),
                        targets,
                        lr,
                        votes=lambda: self._votes(stop),
                        observer=self.monitor.observer(progress.step + 1),
                    )
                except WaitStopped:  # its batch does not come: the step counts as not begun
                    self._save_and_stop(Preempted if stop.terminate else Interrupted)
                self.monitor.tracer.step_end(progress.step + 1, result.loss)
                if not result.moved:
                    self._handle_non_finite(result)
                progress.step += 1
                progress.tokens += config.train.batch_size * config.train.seq_len
                progress.sequences += config.train.batch_size
                progress.loss = result.loss
                row = make_row(self.state, result, lr, clock, targets, save_wait_s)
                validation, is_best = self._maybe_validate()
                if validation is not None:
                    row = replace(row, val_loss=validation.loss, val_bits_per_byte=validation.bits_per_byte)
                self.monitor.step_done(row)
                self._maybe_dump()
                began = time.perf_counter()
                self.monitor.beat(progress.step, "save")
                with self.monitor.patient():
                    self.saving.after_step(result.votes[2], is_best=is_best)
                save_wait_s = time.perf_counter() - began
                self._stop_if_asked(result.votes)

    def end(self) -> None:
        """The last checkpoint, the weights in one file, the summary. No rank is done before all of it is there."""
        assert self.state is not None
        self.monitor.beat(self.step, "end")
        with self.monitor.patient():
            self.saving.now()
        self.monitor.beat(self.step, "end")
        weights = gather_weights(self.state.parameters, self.world)
        self.feed.close()
        self.monitor.last_samples()
        self.monitor.emit("end", self.step)
        self.monitor.close()
        on_first_rank(self.world, lambda: self._write_results(weights))

    def _write_results(self, weights: dict[str, Tensor]) -> None:
        assert self.state is not None
        progress = self.state.progress
        faults.point("end.weights")
        write_atomically(self.folder / WEIGHTS_FILE, spell_weights(weights, step=progress.step))
        faults.point("end.metrics")
        write_metrics(
            self.folder,
            {
                "status": "done",
                "exit_code": 0,
                "steps": progress.step,
                "tokens": progress.tokens,
                "loss": progress.loss if math.isfinite(progress.loss or 0.0) else None,
                "val_loss": progress.val_loss,
                "val_bits_per_byte": progress.val_bits_per_byte,
                "best_val_loss": progress.best_val_loss,
                "skipped_steps": progress.skipped,
                "data": self.feed.describe(),
                **self.monitor.describe(),
                "strategy": self.world.strategy,
                "world_size": self.world.size,
                "seconds": time.perf_counter() - self.started,
            },
        )

    def _take_up(self) -> str | None:
        """Goes on from the newest sound checkpoint; its name, or None at the start of a run."""
        root = self.folder / layout.FOLDER
        name, damage, changes = on_first_rank(self.world, lambda: self._choose_checkpoint(root))
        for message in damage:
            self._incident("damaged_checkpoint", message)
        if name is None:
            return None
        assert self.state is not None
        restore(self.state, root / name)
        for line in changes:
            self.monitor.say(f"changed {line}")
        return name

    def _choose_checkpoint(self, root: Path) -> tuple[str | None, list[str], list[str]]:
        damage: list[str] = []
        chosen = layout.newest_verified(root, lambda error: damage.append(str(error)))
        if chosen is None:
            if damage:
                raise CheckpointError(f"no checkpoint in {root} is whole: {damage[0]}; --fresh starts over")
            return None, [], []
        return chosen.name, damage, check_same_config(chosen, self.config, accept=self.accept_changes)

    def _micro_batches(self, clock: "StepClock") -> Iterator[Batch]:
        """This rank's sequences of the step in pieces that fit at once."""
        for _ in range(self.feed.passes):
            began = time.perf_counter()
            self.monitor.beat(self.step + 1, "data")
            batch = self.feed.next()
            self.monitor.beat(self.step + 1, "step")
            clock.data_wait_s += time.perf_counter() - began
            yield batch.to(self.world.device)

    def _handle_non_finite(self, result: StepResult) -> None:
        """The weights have not moved. Overflow under fp16 halves its scale; anything else is dumped, then the run
        stops or leaves the step out."""
        assert self.state is not None
        scale, progress = self.state.scale, self.state.progress
        if scale.enabled and scale.value > scale.SMALLEST:
            scale.overflowed()  # this is how the scale is found: nothing to report
            return
        batches = [batch.to(self.world.device) for batch in self.feed.again()]
        try:
            kept = f"the step is in {nonfinite.dump(self.folder, self.config, self.state, batches, result)}"
        except (OSError, CheckpointError) as error:
            kept = f"the step could not be written down: {error}"
        what = f"step {progress.step + 1}: the loss is {result.loss} and the gradient norm {result.grad_norm}"
        self._incident("non_finite", f"{what}; {kept}")
        progress.skipped += 1
        stops = self.config.train.non_finite == "stop"
        if stops or progress.skipped > self.config.train.max_skips:
            self.saving.settle()  # all ranks are here: what is being saved is not thrown away
        if stops:
            raise NumericsError(f"{what}; the weights were not changed by it; {kept}")
        if progress.skipped > self.config.train.max_skips:
            raise NumericsError(f"{what}; {progress.skipped} steps were left out, train.max_skips allows no more")

    def _maybe_dump(self) -> None:
        assert self.state is not None
        every = self.config.telemetry.mem_dump_every
        if self.step == 1 or (every and self.step % every == 0):
            self.monitor.dump_memory(self.state, f"step{self.step}")
        if self.step == self._first_step:
            self.monitor.audit(self.state)

    def _maybe_validate(self) -> tuple[Validation | None, bool]:
        """Every `eval_every` steps and after the last, where there is a validation split; and whether it was best."""
        assert self.state is not None
        every, progress = self.config.train.eval_every, self.state.progress
        due = progress.step == self.config.train.steps or (every and progress.step % every == 0)
        if not due or self.feed.validation is None:
            return None, False
        with self.monitor.patient():  # the first one compiles, and collects its documents where data is streamed
            validation = validate(
                self.state,
                self.feed.ready_validation(),
                self.config.train.eval_sequences,
                self.micro_batch,
                progressed=lambda: self.monitor.beat(progress.step, "validate"),
            )
        progress.val_loss, progress.val_bits_per_byte = validation.loss, validation.bits_per_byte
        best = math.inf if progress.best_val_loss is None else progress.best_val_loss
        is_best = validation.loss < best  # never a NaN, which nothing would be better than
        if is_best:
            progress.best_val_loss = validation.loss
        return validation, is_best

    def _votes(self, stop: StopRequest) -> tuple[int, int, int]:
        """What this rank has to say at the end of a step."""
        return int(stop.terminate), int(stop.interrupt), self.saving.vote()

    def _stop_if_asked(self, votes: tuple[int, ...]) -> None:
        """All ranks saw the same sums: if one of them got a signal, all save and stop here."""
        terminate, interrupt, _ = votes
        if not (terminate or interrupt) or self.step == self.config.train.steps:
            return
        self._save_and_stop(Preempted if terminate else Interrupted)

    def _save_and_stop(self, kind: type[Preempted]) -> NoReturn:
        """Of several ranks, all are here."""
        with self.monitor.patient():
            self.saving.now()
        self.monitor.emit("preempted", self.step)
        stopped = f"asked to stop: step {self.step} is saved in {self.folder}; the same command goes on from there"
        raise kind(stopped) from None

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError | None:
        """What an error that is about memory comes down to, with the largest owners and what to try."""
        if not is_out_of_memory(error):
            return None
        world, state = self.world, self.state
        advice = remedies(self.config, self.micro_batch if state else 1, world.size, world.strategy)
        tensors = state.tensors if state else lambda: iter(())
        return OutOfMemoryError(oom_report(self.folder, world.rank, world.device, error, tensors, advice))

    def _incident(self, kind: str, message: str) -> None:
        self.monitor.incident(kind, message, self.step)

    def _describe(self, taken_up: str | None) -> Iterator[str]:
        config, state = self.config, self.state
        assert state is not None
        flops = flops_per_token(state.model, config.model, config.nsa, config.train.seq_len)
        yield f"data    {self.feed.summary}"
        yield f"first   batch after {self.feed.first_batch_s:.2f} s"
        yield (
            f"model   {state.model.num_parameters():,} parameters, {config.model.n_layers} layers, "
            f"{config.model.attention} attention, {state.precision} on {state.device}"
        )
        if config.runtime.precision not in ("auto", state.precision):
            yield f"note    this CPU has no bf16 instructions: bf16 is computed in {state.precision}"
        costs = f"{flops.sparse:.3g} FLOPs per token with NSA, " if config.model.attention == "nsa" else ""
        yield (
            f"cost    {costs}{flops.dense_equivalent:.3g} FLOPs per token with dense attention "
            f"at {config.train.seq_len} tokens (estimates, forward and backward)"
        )
        yield (
            f"batch   {config.train.batch_size} sequences a step: {self.world.size} ranks x {self.feed.passes} passes "
            f"x {self.micro_batch}"
        )
        if config.parallel.ddp.safe_mode:
            used = effective(config.parallel.ddp)
            yield (
                f"safe    safe_mode: reference kernels; under ddp find_unused={used.find_unused}, "
                f"bucket_mb={used.bucket_mb}, bucket_view={used.bucket_view}, "
                f"broadcast_buffers={used.broadcast_buffers}"
            )
        if config.nsa.force_branch:
            yield f"branch  {config.nsa.force_branch} alone"
        yield f"folder  {self.folder}"
        if taken_up:
            yield f"resume  {taken_up}: step {self.step} of {config.train.steps} is done"


@dataclass
class StepClock:
    """When a step began, and how much of it went by waiting for data."""

    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()


def make_row(
    state: RunState, result: StepResult, lr: float, clock: StepClock, targets: int, save_wait_s: float
) -> TrainingRow:
    elapsed = time.perf_counter() - clock.began
    return TrainingRow(
        step=state.progress.step,
        tokens=state.progress.tokens,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        toks_per_s=targets / elapsed,
        step_s=elapsed,
        data_wait_s=clock.data_wait_s,
        mem_gib=memory_gib(state.device),
        save_wait_s=save_wait_s,
        skipped=int(not result.moved),
    )
