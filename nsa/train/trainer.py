"""A run from its configuration to trained weights."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsa.checkpoint.weights import WEIGHTS_FILE, save_weights
from nsa.config import Config
from nsa.data.loader import Batch, Data, build_data
from nsa.data.tokenizers import load_tokenizer
from nsa.errors import ConfigError, LaunchError
from nsa.nn.flops import flops_per_token
from nsa.telemetry.console import RunConsole, step_line
from nsa.telemetry.memory import memory_gib
from nsa.telemetry.training_csv import TrainingCSV, TrainingRow
from nsa.train.folder import claim_folder, finished_metrics, refuse_other_config, write_config, write_metrics
from nsa.train.schedule import learning_rate
from nsa.train.state import RunState, build_state
from nsa.train.step import StepResult, Validation, train_step, validate


def train(config: Config, folder: Path, *, fresh: bool = False) -> None:
    """Trains as configured into `folder`. A run that is done already says so and is left as it is."""
    _refuse_unavailable(config)
    with claim_folder(folder):
        done = None if fresh else finished_metrics(folder)
        if done:
            refuse_other_config(folder, config)
            print(f"{folder}: this run is done ({done['steps']} steps); --fresh trains it again from the start")
            return
        run(config, folder)


def run(config: Config, folder: Path) -> None:
    started = time.perf_counter()
    tokenizer = load_tokenizer(config.data.tokenizer)
    data = build_data(config.data, config.train, tokenizer)
    state = build_state(config, tokenizer)
    write_config(folder, config)
    write_metrics(folder, {"status": "running", "steps": 0})
    with RunConsole(config.train.steps) as console, TrainingCSV(folder) as csv:
        for line in describe(config, state, data, folder):
            console.say(line)
        validation = None
        while state.step < config.train.steps:
            lr = learning_rate(state.step, config.train)
            clock = StepClock()
            batches = micro_batches(config, data, state, clock)
            targets = config.train.batch_size * config.train.seq_len
            result = train_step(state, batches, targets, lr)
            state.step += 1
            state.tokens += targets
            row = make_row(state, result, lr, clock)
            validation = maybe_validate(config, state, data)
            report(config, console, csv, row, validation)
        save_weights(state.model, folder / WEIGHTS_FILE, step=state.step)
        write_metrics(folder, summary(state, row, validation, time.perf_counter() - started))


def micro_batches(config: Config, data: Data, state: RunState, clock: "StepClock") -> Iterator[Batch]:
    """The step's sequences in pieces that fit at once; where they lie depends on the step alone."""
    size = micro_batch_size(config)
    first = state.step * config.train.batch_size
    for offset in range(0, config.train.batch_size, size):
        began = time.perf_counter()
        batch = data.train.batch(first + offset, size)
        clock.data_wait_s += time.perf_counter() - began
        yield batch.to(state.device)


def micro_batch_size(config: Config) -> int:
    size = config.train.micro_batch
    return config.train.batch_size if size == "auto" else size


@dataclass
class StepClock:
    """When a step began, and how much of it went by waiting for data."""

    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()


def make_row(state: RunState, result: StepResult, lr: float, clock: StepClock) -> TrainingRow:
    elapsed = time.perf_counter() - clock.began
    step_tokens = state.tokens // state.step
    return TrainingRow(
        step=state.step,
        tokens=state.tokens,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        toks_per_s=step_tokens / elapsed,
        step_s=elapsed,
        data_wait_s=clock.data_wait_s,
        mem_gib=memory_gib(state.device),
    )


def maybe_validate(config: Config, state: RunState, data: Data) -> Validation | None:
    """Every `eval_every` steps and after the last, where there is a validation split."""
    every = config.train.eval_every
    due = state.step == config.train.steps or (every and state.step % every == 0)
    if not due or data.validation is None:
        return None
    return validate(state, data.validation, config.train.eval_sequences, micro_batch_size(config))


def report(
    config: Config, console: RunConsole, csv: TrainingCSV, row: TrainingRow, validation: Validation | None
) -> None:
    if validation is not None:
        row = TrainingRow(**{**vars(row), "val_loss": validation.loss, "val_bits_per_byte": validation.bits_per_byte})
    csv.write(row)
    console.advance(row.step, row.loss)
    if row.step % config.train.log_every == 0 or row.step in (1, config.train.steps):
        console.say(step_line(row.step, row.loss, row.lr, row.toks_per_s, row.grad_norm))
    if validation is not None:
        console.say(
            f"step {row.step:04d} | validation loss {validation.loss:.4f} nats"
            f" | {validation.bits_per_byte:.4f} bits per byte"
        )


def describe(config: Config, state: RunState, data: Data, folder: Path) -> Iterator[str]:
    flops = flops_per_token(state.model, config.model, config.nsa, config.train.seq_len)
    yield f"data    {data.summary}"
    yield (
        f"model   {state.model.num_parameters():,} parameters, {config.model.n_layers} layers, "
        f"{config.model.attention} attention, {state.precision} on {state.device}"
    )
    costs = f"{flops.sparse:.3g} FLOPs per token with NSA, " if config.model.attention == "nsa" else ""
    yield (
        f"cost    {costs}{flops.dense_equivalent:.3g} FLOPs per token with dense attention "
        f"at {config.train.seq_len} tokens (estimates, forward and backward)"
    )
    yield f"folder  {folder}"


def summary(
    state: RunState, row: TrainingRow, validation: Validation | None, seconds: float
) -> dict[str, str | int | float | None]:
    return {
        "status": "done",
        "steps": state.step,
        "tokens": state.tokens,
        "loss": row.loss,
        "val_loss": validation.loss if validation else None,
        "val_bits_per_byte": validation.bits_per_byte if validation else None,
        "seconds": seconds,
    }


def _refuse_unavailable(config: Config) -> None:
    """What the schema knows and this version cannot run yet is an error before anything starts."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise LaunchError(f"WORLD_SIZE={world_size}: this version trains in one process; start it without torchrun")
    if config.parallel.strategy not in ("auto", "single"):
        raise ConfigError(
            f"parallel.strategy: {config.parallel.strategy!r} is not available in this version; use auto or single"
        )
    if config.train.profile_steps is not None:
        raise ConfigError("train.profile_steps: profiling is not available in this version; leave it unset")
