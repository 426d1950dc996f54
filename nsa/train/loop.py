"""The training loop, from a configuration to trained weights, in one process or many.

Only rank 0 prints and writes results; every rank computes and saves its shards.
"""

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from nsa import faults
from nsa.checkpoint.export import weights_metadata, write_weights
from nsa.checkpoint.format import committed
from nsa.config import Config
from nsa.data.loader import Batch
from nsa.data.tokenizers import tokenizer_for
from nsa.data.waiting import WaitStopped
from nsa.errors import ConfigError, DataError, Interrupted, LaunchError, OutOfMemoryError, Preempted, printable
from nsa.formatting import counted
from nsa.nn.attention import attention_layers
from nsa.nn.flops import FlopsPerToken, flops_per_token
from nsa.parallel.collectives import gather_objects, lost_rank, on_first_rank, sum_over_ranks
from nsa.parallel.float8 import describe_float8
from nsa.parallel.numerics import numerics
from nsa.parallel.strategy import effective, gather_weights
from nsa.parallel.world import World, pick_device, read_launch, start_world
from nsa.plain_yaml import flat
from nsa.record.environment import describe_environment
from nsa.record.memory_dump import is_out_of_memory, oom_report, remedies
from nsa.record.run_log import RunLog
from nsa.run_folder import CHECKPOINTS_FOLDER, ENVIRONMENT_FILE, METRICS_FILE, WEIGHTS_FILE, TrainingRow
from nsa.supervise.launch_guard import refuse_idle_gpus
from nsa.supervise.ranks import identify
from nsa.supervise.signals import StopRequest
from nsa.train import nonfinite
from nsa.train.checkpointing import Checkpointing, resume, seed_generators
from nsa.train.feed import Feed
from nsa.train.folder import (
    Claim,
    is_finished,
    record_end,
    refuse_foreign,
    refuse_own_weights,
    start_over,
    write_config,
    write_json,
)
from nsa.train.graphs import plan_graphs
from nsa.train.monitor import Monitor, finite
from nsa.train.schedule import learning_rate
from nsa.train.state import RunState, build_state, describe_batch, micro_batch_size, own_tokens
from nsa.train.step import StepResult, train_step, validate
from nsa.train.trained import load_teacher

PLACES = ("train.out_dir", "data.paths")  # may differ between machines: the folder and the data are compared instead


@dataclass(frozen=True)
class StartOptions:
    """The options of `train`."""

    fresh: bool = False
    accept_changes: bool = False
    synthetic_on_fail: bool = False


def train(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    synthetic_on_fail: bool = False,
    until_exit: bool = False,
) -> None:
    """Trains as configured into `folder`, resuming from its newest sound checkpoint.

    A finished run is reported and not changed. `fresh` starts over; `accept_changes` resumes although the configuration
    or the data differ from the checkpoint's; `synthetic_on_fail` trains on synthetic text if the source does not
    answer. `until_exit` keeps the signal handlers installed after the run, for a process that ends with it.
    """
    launch = read_launch(os.environ)
    if fresh and launch.max_restarts > 0:
        raise LaunchError("--fresh: would start over at every restart of torchrun; start without --max-restarts")
    refuse_idle_gpus(launch.size, pick_device(config.runtime.device, launch.local_rank), config.parallel, os.environ)
    faults.arm(os.environ.get("NSA_FAULTS", ""), launch.rank, launch.attempt)
    try:
        with (
            numerics(config.runtime),
            start_world(config.parallel, config.runtime.device) as world,
            ExitStack() as stack,
        ):
            options = StartOptions(fresh, accept_changes, synthetic_on_fail)
            _refuse_differences(flat(config.to_dict()) | asdict(options), world)
            claim = Claim(folder)
            on_first_rank(world, lambda: refuse_foreign(folder, fresh=fresh))
            on_first_rank(world, lambda: stack.enter_context(claim.hold()))
            done = on_first_rank(world, lambda: not fresh and is_finished(folder, config, accept_changes))
            if not done:
                claim.refuse_unshared(world, config.parallel.timeout_s)
            log, stop = RunLog(folder, world.rank), StopRequest(until_exit=until_exit)
            if not done:  # a finished run is not touched
                stack.enter_context(log)
            print(f"{world.banner()}\n", end="", flush=True)  # in one write: ranks share the terminal
            if not done:
                _run(config, claim, world, log, stop, options)
            elif world.is_first:
                steps = config.train.steps
                print(printable(f"{folder}: this run is done ({steps} steps); --fresh trains it again from the start"))
    except Exception as error:
        lost = lost_rank(error, launch.rank, launch.size)
        if lost is None:
            raise
        raise lost from error


def _refuse_differences(settings: dict[str, Any], world: World) -> None:
    """Refuses ranks with different settings: copies of the model would drift apart without an error."""
    first, *others = gather_objects(settings, world)
    for rank, other in enumerate(others, start=1):
        found = [
            f"{key} ({first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank})"
            for key in {**first, **other}
            if key not in PLACES and first.get(key, ...) != other.get(key, ...)
        ]
        if found:
            raise ConfigError(
                f"ranks have different settings: {', '.join(found)}; start all machines with the same command, file "
                "and NSA_* variables"
            )


def _run(config: Config, claim: Claim, world: World, log: RunLog, stop: StopRequest, options: StartOptions) -> None:
    """The whole run; if it fails or is stopped, the reason is recorded."""
    started, folder = time.perf_counter(), claim.folder
    monitor = Monitor(config, claim, world, log)
    state: RunState | None = None
    session: Session | None = None
    micro_batch = 1
    try:
        with stop, monitor.watchdog:
            micro_batch = micro_batch_size(config, world.data_size)
            monitor.emit("boot", 0, **identify(os.getpid()))
            is_new = on_first_rank(world, lambda: options.fresh or not committed(folder / CHECKPOINTS_FOLDER))
            on_first_rank(world, lambda: refuse_own_weights(folder, config.train, is_new=is_new))
            state = build_state(config, tokenizer_for(config.data), world, monitor.tracer, initialize=is_new)
            state.teacher = load_teacher(state)
            state.graphs = plan_graphs(config, world, micro_batch)
            session = Session(state, micro_batch, monitor, stop, options)
            with monitor.console:
                while session.step < config.train.steps:
                    step(session)
            session.finish(started)
    except BaseException as error:
        # First, while the traceback keeps the tensors alive.
        exhausted = _out_of_memory(error, config, folder, world, state, micro_batch)
        reason = exhausted or lost_rank(error, world.rank, world.size) or error
        if session is None:
            monitor.withdraw_start(reason)
        elif isinstance(error, Exception):
            session.checkpointing.settle()
        monitor.close()
        record_end(claim, reason, session.step if session else None, monitor.describe())
        if session is not None:
            session.feed.close()  # its threads would outlive the run
        monitor.write_profile()  # last: it takes long, and the run may be killed meanwhile
        if exhausted is not None:
            raise exhausted from error
        raise


class Session:
    """A run that is ready for its next step: resumed or new, with open data and files."""

    def __init__(self, state: RunState, micro_batch: int, monitor: Monitor, stop: StopRequest, options: StartOptions):
        config = self.config = state.config
        folder = self.folder = monitor.folder
        self.state, self.micro_batch = state, micro_batch
        self.monitor, self.stop = monitor, stop
        seed_generators(config.train.seed, state.world.rank)
        monitor.beat(0, "restore")
        resumed = None
        if not options.fresh:
            resumed = resume(state, folder, monitor, accept_changes=options.accept_changes)
        monitor.beat(self.step, "data")
        self.feed = Feed(state, micro_batch, monitor, stop)
        self.feed.open(synthetic_on_fail=options.synthetic_on_fail, accept_changes=options.accept_changes)
        monitor.beat(self.step, "start")
        monitor.claim.check(state.world)  # the source may have taken long to open
        if options.fresh:
            on_first_rank(state.world, lambda: start_over(folder))
        monitor.open(state)
        monitor.dump_memory(state, "boot")
        self.first_step = self.step + 1
        self.data_wait_s = 0.0  # in the current step
        self.save_wait_s = 0.0  # how long training waited for the save after the previous step
        self.checkpointing = Checkpointing(state, folder / CHECKPOINTS_FOLDER, monitor, resumed)
        if state.world.is_first:
            self._write_start(resumed)
        monitor.emit(
            "start",
            self.step,
            strategy=state.world.strategy,
            world_size=state.world.size,
            backend=state.world.backend,
            steps=config.train.steps,
            fresh=options.fresh,
            from_checkpoint=resumed,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.state.progress.step

    def finish(self, started: float) -> None:
        """Writes the last checkpoint, the weights in one file, and the summary. Ranks return when all are written."""
        self.monitor.beat(self.step, "end")
        with self.monitor.extended_timeout():
            self.checkpointing.save_now()
            self.monitor.beat(self.step, "end")
            weights = gather_weights(self.state.parameters, self.state.world)
            self.feed.close()
            self.monitor.last_samples()
            self.monitor.emit("end", self.step)
            self.monitor.write_profile()
            self.monitor.close()
            self.monitor.beat(self.step, "end")
            self.monitor.claim.check(self.state.world)
            on_first_rank(self.state.world, lambda: self._write_results(weights, time.perf_counter() - started))

    def _write_start(self, resumed: str | None) -> None:
        # First, so that the folder does not look like a finished run.
        write_json(self.folder / METRICS_FILE, {"status": "running", "steps": self.step})
        faults.point("start.running")
        write_config(self.folder, self.config, self.state.tokenizer)
        environment = describe_environment(self.config.to_dict(), self.state.world.size, self.state.world.strategy)
        config = self.config
        flops = flops_per_token(self.state.model, config.train.seq_len)
        graphs = str(self.state.graphs)
        known = {"precision": self.state.precision, "flops_per_token": flops.sparse, "cuda_graphs": graphs}
        known["parameters"] = self.state.model.num_parameters()
        write_json(self.folder / ENVIRONMENT_FILE, environment | known)
        for line in self._describe(resumed, flops):
            self.monitor.log(line)

    def _write_results(self, weights: dict[str, Tensor], seconds: float) -> None:
        progress = self.state.progress
        faults.point("end.weights")
        metadata = weights_metadata(progress.step, self.config.to_dict())
        write_weights(self.folder / WEIGHTS_FILE, weights, **metadata)
        faults.point("end.metrics")
        results = {
            "status": "done",
            "exit_code": 0,
            "steps": progress.step,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "val_loss": progress.val_loss,
            "val_bits_per_byte": progress.val_bits_per_byte,
            "best_val_loss": progress.best_val_loss,
            "skipped_steps": progress.skipped,
            "data": self.feed.describe(),
            "cuda_graphs": str(self.state.graphs),
            **self.monitor.describe(),
            "strategy": self.state.world.strategy,
            "world_size": self.state.world.size,
            "seconds": seconds,
        }
        write_json(self.folder / METRICS_FILE, finite(results))

    def _describe(self, resumed: str | None, flops: FlopsPerToken) -> Iterator[str]:
        config, state = self.config, self.state
        kinds = config.model.layer_kinds()
        counts = [f"{count} {kind}" for kind, count in Counter(kinds).items()]
        layers = kinds[0] if len(counts) == 1 else " + ".join(counts)  # nsa, or 9 nsa + 3 dense
        yield f"data    {self.feed.data.summary}"
        yield f"first   batch after {self.feed.first_batch_s:.2f} s"
        yield (
            f"model   {state.model.num_parameters():,} parameters, {counted(config.model.n_layers, 'layer')}, "
            f"{layers} attention, {state.precision} on {state.device}"
        )
        if state.device.type == "cuda":
            yield f"graphs  {state.graphs}"
        if config.runtime.precision not in ("auto", state.precision):
            yield f"note    this CPU has no bf16 instructions: bf16 is computed in {state.precision}"
        if config.runtime.float8 != "none":
            yield f"float8  {config.runtime.float8}: {describe_float8(state.model)}"
        dense = f", {flops.dense_equivalent:.2e} with dense attention" if set(kinds) != {"dense"} else ""
        at = f"forward and backward at {config.train.seq_len:,} tokens"
        yield f"cost    {flops.sparse:.2e} FLOPs per token{dense} (estimated, {at})"
        sequences = counted(config.train.batch_size, "sequence")
        yield f"batch   {sequences} a step: {describe_batch(config, state.world.data_size)}"
        if state.world.context is not None:
            yield "context the ranks of a group share every sequence"
        if config.parallel.ddp.safe_mode:
            used = effective(config.parallel.ddp)
            yield (
                f"safe    safe_mode: reference kernels; under ddp find_unused={used.find_unused}, "
                f"bucket_mb={used.bucket_mb}, bucket_view={used.bucket_view}, "
                f"broadcast_buffers={used.broadcast_buffers}"
            )
        if config.train.freeze:
            learning = sum(p.numel() for p in state.trainable)
            yield f"frozen  all but {learning:,} parameters (train.freeze)"
            if config.train.init_from is None:
                yield "warning: the frozen weights are random: set train.init_from to the run that they come from"
        if config.train.teacher:
            yield f"teacher {config.train.teacher}: the training loss is the KL divergence from it"
        yield from dict.fromkeys(note for _, layer in attention_layers(state.model) for note in layer.notes())
        yield f"folder  {self.folder}"
        if resumed:
            yield f"resume  {resumed}: step {self.step} of {config.train.steps} is done"


def step(session: Session) -> None:
    """One optimizer step with its validation, its row and its save."""
    config, state, monitor, feed = session.config, session.state, session.monitor, session.feed
    progress = state.progress
    session.data_wait_s = 0.0
    monitor.profile(progress.step + 1)
    faults.point("step.begin")
    lr = learning_rate(progress.step, config.train)
    targets = feed.num_targets()
    monitor.tracer.step_begin(progress.step + 1)
    is_changed = _start_layers(session)
    graphs_off = state.graphs.reason
    try:
        if _validates_after(session, progress.step + 1):  # first: a stream may have too few documents
            with monitor.extended_timeout():
                feed.ready_validation()
        began = time.perf_counter()
        with monitor.extended_timeout() if is_changed else nullcontext():  # a layer that changes compiles again
            result = train_step(
                state,
                _micro_batches(session),
                targets,
                lr,
                votes=lambda: (
                    *(int(session.stop.terminate), int(session.stop.interrupt)),
                    *session.checkpointing.votes(),
                ),
                observer=monitor.observer(progress.step + 1),
            )
    except WaitStopped:  # no batch arrived: the step counts as not started
        _save_and_stop(session, Preempted if session.stop.terminate else Interrupted)
    except DataError:
        session.checkpointing.save_if_alone()
        raise
    terminate, interrupt, written, retry = result.votes
    monitor.tracer.step_end(progress.step + 1, result.loss)
    if state.graphs.reason != graphs_off:
        monitor.log(f"graphs  off from step {progress.step + 1} on: {state.graphs.reason}")
    if not result.updated:
        nonfinite.handle(session, result)
    progress.step += 1
    progress.tokens += config.train.batch_size * config.train.seq_len
    progress.sequences += config.train.batch_size
    progress.loss = result.loss
    row = _row(session, result, lr, targets, time.perf_counter() - began)
    try:
        row, is_best = _validate_if_due(session, row)
    except DataError:
        if state.world.size == 1:  # the other ranks are in the validation, and would not take part
            monitor.step_done(row)
            session.checkpointing.save_if_alone()
        raise
    if row.val_loss is not None:  # the validation may have taken longer than the step
        terminate, interrupt = _asked_to_stop(session)
    monitor.step_done(row)
    _dump_if_due(session)
    began = time.perf_counter()
    monitor.beat(progress.step, "save")
    with monitor.extended_timeout():
        session.checkpointing.after_step(written, retry, is_best=is_best)
    session.save_wait_s = time.perf_counter() - began
    # All ranks have the same sums: if one of them got a signal, all save and stop here.
    if (terminate or interrupt) and progress.step < config.train.steps:
        _save_and_stop(session, Preempted if terminate else Interrupted)


def _start_layers(session: Session) -> bool:
    """Tells the attention layers the step. Records and returns whether one of them computes something else from now
    on."""
    step = session.step + 1
    lines = dict.fromkeys(filter(None, (x.start_step(step) for _, x in attention_layers(session.state.model))))
    for line in lines:
        session.state.graphs.drop()
        session.monitor.emit("attention", step, message=line)
        session.monitor.log(f"step {step:04d} | {line}")
    return bool(lines)


def _micro_batches(session: Session) -> Iterator[Batch]:
    """This rank's micro-batches of the step."""
    for _ in range(session.feed.passes):
        began = time.perf_counter()
        session.monitor.beat(session.step + 1, "data")
        batch = session.feed.next()
        session.monitor.beat(session.step + 1, "step")
        session.data_wait_s += time.perf_counter() - began
        yield own_tokens(batch, session.state.world).to(session.state.device)


def _row(session: Session, result: StepResult, lr: float, targets: int, elapsed: float) -> TrainingRow:
    return TrainingRow(
        step=session.step,
        tokens=session.state.progress.tokens,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        toks_per_s=targets / elapsed,
        step_s=elapsed,
        data_wait_s=session.data_wait_s,
        mem_gib=session.monitor.memory_gib(),
        save_wait_s=session.save_wait_s,
        skipped=int(not result.updated),
        index_kl=result.index_kl,
    )


def _validates_after(session: Session, step: int) -> bool:
    every, last = session.config.train.eval_every, session.config.train.steps
    return session.feed.data.validation is not None and bool(step == last or (every and step % every == 0))


def _validate_if_due(session: Session, row: TrainingRow) -> tuple[TrainingRow, bool]:
    """Validates every `eval_every` steps and after the last, if there is a validation split. Returns the row with the
    result, and whether it is the best so far."""
    progress, monitor, sequences = session.state.progress, session.monitor, session.config.train.eval_sequences
    if not _validates_after(session, progress.step):
        return row, False
    beat = partial(monitor.beat, progress.step, "validate")
    with monitor.extended_timeout():  # the first validation compiles
        loader = session.feed.ready_validation()
        validation = validate(session.state, loader, sequences, session.micro_batch, beat)
    progress.val_loss, progress.val_bits_per_byte = validation.loss, validation.bits_per_byte
    best = math.inf if progress.best_val_loss is None else progress.best_val_loss
    # Never a NaN, which no later loss would improve on, and never while the loss is not that of the saved model.
    is_best = validation.loss < best and not any(x.is_warming_up for _, x in attention_layers(session.state.model))
    if is_best:
        progress.best_val_loss = validation.loss
    return replace(row, val_loss=validation.loss, val_bits_per_byte=validation.bits_per_byte), is_best


def _asked_to_stop(session: Session) -> tuple[bool, bool]:
    """Whether any rank was asked to terminate, and to interrupt. All ranks call it together."""
    stop, world = session.stop, session.state.world
    votes = torch.tensor([float(stop.terminate), float(stop.interrupt)], device=world.device)
    terminate, interrupt = sum_over_ranks(votes, world).tolist()
    return terminate > 0, interrupt > 0


def _dump_if_due(session: Session) -> None:
    every = session.config.telemetry.mem_dump_every
    if session.step == 1 or (every and session.step % every == 0):
        session.monitor.claim.check(session.state.world)
        session.monitor.dump_memory(session.state, f"step{session.step}")
    if session.step == session.first_step:
        session.monitor.audit(session.state)


def _save_and_stop(session: Session, kind: type[Preempted]) -> NoReturn:
    """All ranks call this together."""
    with session.monitor.extended_timeout():
        session.checkpointing.save_now()
    session.stop.is_saved = True
    session.monitor.emit("preempted", session.step)
    session.monitor.drop_profile()
    raise kind(
        f"asked to stop: step {session.step} is saved in {session.folder}; the same command resumes from there"
    ) from None


def _out_of_memory(
    error: BaseException, config: Config, folder: Path, world: World, state: RunState | None, micro_batch: int
) -> OutOfMemoryError | None:
    """An OutOfMemoryError with the largest owners and settings to try; None if `error` is not about memory."""
    if not is_out_of_memory(error):
        return None
    advice = remedies(config, micro_batch, world.size, world.strategy)
    tensors = state.tensors if state else lambda: iter(())
    return OutOfMemoryError(oom_report(folder, world.rank, world.device, error, tensors, advice))
