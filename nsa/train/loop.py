"""A run from its configuration to trained weights, on one process or many."""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from nsa import faults
from nsa.config import Config
from nsa.data.loader import Batch
from nsa.data.tokenizers import tokenizer_for
from nsa.data.waiting import WaitStopped
from nsa.errors import CheckpointError, Interrupted, LaunchError, NumericsError, OutOfMemoryError, Preempted, printable
from nsa.parallel.collectives import lost_rank, on_first_rank
from nsa.parallel.launch import World, read_launch, start_world
from nsa.parallel.numerics import numerics
from nsa.record.memory_dump import is_out_of_memory, oom_report, remedies
from nsa.record.run_log import RunLog
from nsa.record.schema import TrainingRow
from nsa.train import nonfinite
from nsa.train.folder import claim_folder, is_finished, record_end
from nsa.train.graphs import plan_graphs
from nsa.train.monitor import Monitor
from nsa.train.schedule import learning_rate
from nsa.train.session import Session, StartOptions
from nsa.train.signals import StopRequest
from nsa.train.state import RunState, build_state, micro_batch_size, own_tokens
from nsa.train.step import StepResult, Validation, train_step, validate
from nsa.train.trained import load_teacher


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

    A run that is done already is reported and left as it is. `fresh` starts over; `accept_changes` resumes although
    the configuration or the data differ from the checkpoint's; `synthetic_on_fail` trains on synthetic text where
    the source does not answer. `until_exit`: the process ends with the run, and signals stay caught until then.
    """
    launch = read_launch(os.environ)
    if fresh and launch.max_restarts > 0:
        raise LaunchError("--fresh: would start over at every restart of torchrun; start without --max-restarts")
    faults.arm(os.environ.get("NSA_FAULTS", ""), launch.rank, launch.attempt)
    try:
        with (
            numerics(config.runtime),
            start_world(config.parallel, config.runtime.device) as world,
            ExitStack() as held,
        ):
            on_first_rank(world, lambda: held.enter_context(claim_folder(folder)))
            done = on_first_rank(world, lambda: not fresh and is_finished(folder, config, accept_changes))
            log, stop = RunLog(folder, world.rank), StopRequest(until_exit=until_exit)
            if not done:  # else nothing of the finished run is touched
                held.enter_context(log)
            print(world.banner(), flush=True)
            if not done:
                _run(config, folder, world, log, stop, StartOptions(fresh, accept_changes, synthetic_on_fail))
            elif world.is_first:
                steps = config.train.steps
                print(printable(f"{folder}: this run is done ({steps} steps); --fresh trains it again from the start"))
    except Exception as error:
        lost = lost_rank(error, launch.rank, launch.size)
        if lost is None:
            raise
        raise lost from error


def _run(config: Config, folder: Path, world: World, log: RunLog, stop: StopRequest, options: StartOptions) -> None:
    """The whole run; where it does not reach its end, the reason is recorded."""
    started = time.perf_counter()
    monitor = Monitor(config, folder, world, log)
    state: RunState | None = None
    session: Session | None = None
    micro_batch = 1
    try:
        with stop, monitor.watchdog:
            micro_batch = micro_batch_size(config, world.data_size)
            monitor.emit("boot", 0, pid=os.getpid(), host=socket.gethostname())
            state = build_state(config, tokenizer_for(config.data), world, monitor.tracer.traced_hook)
            state.teacher = load_teacher(config, state)
            state.graphs = plan_graphs(config, world, micro_batch)
            session = Session(config, folder, state, micro_batch, monitor, stop, options)
            with monitor.console:
                save_wait_s = 0.0
                while session.step < config.train.steps:
                    save_wait_s = step(session, save_wait_s)
            session.finish(started)
    except BaseException as error:
        # First, while the traceback keeps what was allocated.
        exhausted = _out_of_memory(error, config, folder, world, state, micro_batch)
        monitor.close()
        reason = exhausted or lost_rank(error, world.rank, world.size) or error
        record_end(folder, reason, session.step if session else None, monitor.describe())
        if exhausted is not None:
            raise exhausted from error
        raise


def step(session: Session, save_wait_s: float) -> float:
    """One optimizer step with its validation, its row and its save; how long the save held up training, in seconds.

    `save_wait_s` is that of the step before, for the row.
    """
    config, state, monitor, feed = session.config, session.state, session.monitor, session.feed
    progress, clock = state.progress, StepClock()
    monitor.profile(progress.step + 1)
    faults.point("step.begin")
    lr = learning_rate(progress.step, config.train)
    targets = feed.num_targets()
    monitor.tracer.step_begin(progress.step + 1)
    graphs_off = state.graphs.reason
    try:
        result = train_step(
            state,
            _micro_batches(session, clock),
            targets,
            lr,
            votes=lambda: (int(session.stop.terminate), int(session.stop.interrupt), *session.checkpointing.votes()),
            observer=monitor.observer(progress.step + 1),
        )
    except WaitStopped:  # its batch does not come: the step counts as not begun
        _save_and_stop(session, Preempted if session.stop.terminate else Interrupted)
    monitor.tracer.step_end(progress.step + 1, result.loss)
    if state.graphs.reason != graphs_off:
        monitor.log(f"graphs  off from step {progress.step + 1} on: {state.graphs.reason}")
    if not result.moved:
        _handle_non_finite(session, result)
    progress.step += 1
    progress.tokens += config.train.batch_size * config.train.seq_len
    progress.sequences += config.train.batch_size
    progress.loss = result.loss
    row = _row(session, result, lr, clock, targets, save_wait_s)
    validation, is_best = _validate_if_due(session)
    if validation is not None:
        row = replace(row, val_loss=validation.loss, val_bits_per_byte=validation.bits_per_byte)
    monitor.step_done(row)
    _dump_if_due(session)
    terminate, interrupt, written, retry = result.votes
    began = time.perf_counter()
    monitor.beat(progress.step, "save")
    with monitor.extended_timeout():
        session.checkpointing.after_step(written, retry, is_best=is_best)
    save_wait_s = time.perf_counter() - began
    # All ranks saw the same sums: if one of them got a signal, all save and stop here.
    if (terminate or interrupt) and progress.step < config.train.steps:
        _save_and_stop(session, Preempted if terminate else Interrupted)
    return save_wait_s


@dataclass
class StepClock:
    """When a step began, and how much of it was spent waiting for data."""

    began: float = field(default_factory=time.perf_counter)
    data_wait_s: float = 0.0


def _micro_batches(session: Session, clock: StepClock) -> Iterator[Batch]:
    """This rank's sequences of the step in pieces that fit at once."""
    for _ in range(session.feed.passes):
        began = time.perf_counter()
        session.monitor.beat(session.step + 1, "data")
        batch = session.feed.next()
        session.monitor.beat(session.step + 1, "step")
        clock.data_wait_s += time.perf_counter() - began
        yield own_tokens(batch, session.state.world).to(session.state.device)


def _row(
    session: Session, result: StepResult, lr: float, clock: StepClock, targets: int, save_wait_s: float
) -> TrainingRow:
    elapsed = time.perf_counter() - clock.began
    return TrainingRow(
        step=session.step,
        tokens=session.state.progress.tokens,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        toks_per_s=targets / elapsed,
        step_s=elapsed,
        data_wait_s=clock.data_wait_s,
        mem_gib=session.monitor.memory_gib(),
        save_wait_s=save_wait_s,
        skipped=int(not result.moved),
    )


def _handle_non_finite(session: Session, result: StepResult) -> None:
    """The weights have not moved. Overflow under fp16 halves its scale; anything else is dumped, then the run stops
    or skips the step."""
    config, state = session.config, session.state
    scale, progress = state.scale, state.progress
    if scale.enabled and scale.value > scale.SMALLEST:
        scale.overflowed()  # this is how the scale is found: nothing to report
        return
    batches = [batch.to(state.device) for batch in session.feed.again()]
    try:
        kept = f"the step is in {nonfinite.dump(session.folder, config, state, batches, result)}"
    except (OSError, CheckpointError) as error:
        kept = f"the step could not be written: {error}"
    what = f"step {progress.step + 1}: the loss is {result.loss} and the gradient norm {result.grad_norm}"
    session.monitor.incident("non_finite", f"{what}; {kept}", progress.step)
    progress.skipped += 1
    problem = ""
    if config.train.non_finite == "stop":
        problem = f"the weights were not changed by it; {kept}"
    elif progress.skipped > config.train.max_skips:
        problem = f"{progress.skipped} steps were skipped, train.max_skips allows no more"
    if problem:
        session.checkpointing.settle()  # all ranks are here: a save that is under way is not lost
        raise NumericsError(f"{what}; {problem}")


def _validate_if_due(session: Session) -> tuple[Validation | None, bool]:
    """Every `eval_every` steps and after the last, where there is a validation split; and whether it was best."""
    train_config, progress, monitor = session.config.train, session.state.progress, session.monitor
    every = train_config.eval_every
    due = progress.step == train_config.steps or (every and progress.step % every == 0)
    if not due or session.feed.data.validation is None:
        return None, False
    with monitor.extended_timeout():  # the first one compiles, and collects its documents where data is streamed
        validation = validate(
            session.state,
            session.feed.ready_validation(),
            train_config.eval_sequences,
            session.micro_batch,
            progressed=lambda: monitor.beat(progress.step, "validate"),
        )
    progress.val_loss, progress.val_bits_per_byte = validation.loss, validation.bits_per_byte
    best = math.inf if progress.best_val_loss is None else progress.best_val_loss
    is_best = validation.loss < best  # never a NaN, which nothing would be better than
    if is_best:
        progress.best_val_loss = validation.loss
    return validation, is_best


def _dump_if_due(session: Session) -> None:
    every = session.config.telemetry.mem_dump_every
    if session.step == 1 or (every and session.step % every == 0):
        session.monitor.dump_memory(session.state, f"step{session.step}")
    if session.step == session.first_step:
        session.monitor.audit(session.state)


def _save_and_stop(session: Session, kind: type[Preempted]) -> NoReturn:
    """All ranks call this together."""
    with session.monitor.extended_timeout():
        session.checkpointing.save_now()
    session.stop.is_saved = True
    session.monitor.emit("preempted", session.step)
    raise kind(
        f"asked to stop: step {session.step} is saved in {session.folder}; the same command resumes from there"
    ) from None


def _out_of_memory(
    error: BaseException, config: Config, folder: Path, world: World, state: RunState | None, micro_batch: int
) -> OutOfMemoryError | None:
    """What an error about memory comes down to, with the largest owners and what to try; None for any other error."""
    if not is_out_of_memory(error):
        return None
    advice = remedies(config, micro_batch, world.size, world.strategy)
    tensors = state.tensors if state else lambda: iter(())
    return OutOfMemoryError(oom_report(folder, world.rank, world.device, error, tensors, advice))
