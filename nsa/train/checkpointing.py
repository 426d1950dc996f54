"""Saves checkpoints of a run and resumes from them.

A save runs in the background of training. All ranks learn of its end at the same step, through the step's all-reduce.
Every due checkpoint is written: if the previous save is still running, the run waits for it and reports the wait. A
failed save is an incident; it is retried after one minute, and again two minutes later. Three such failures end the
run. Checkpoints that come due in between are tried as well, and do not count if they fail.
"""

import random
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.checkpoint.format import (
    BEST,
    FOLDER,
    INDEX_FILE,
    LEGACY_INDEX_FILE,
    MODEL,
    STATE_FILE,
    STATE_VERSION,
    committed,
    optimizer_key,
    random_file,
    step_of,
    verify,
    write_atomically,
)
from nsa.checkpoint.restore import fill, read_random, read_state, saved_shapes
from nsa.checkpoint.save import Saver, Snapshot
from nsa.config import Config, differences
from nsa.config.schema import TrainConfig
from nsa.errors import CheckpointError, ConfigError, reworded
from nsa.parallel.collectives import gather_objects, lost_rank, on_first_rank
from nsa.parallel.world import World
from nsa.train.monitor import Monitor
from nsa.train.schedule import learning_rate
from nsa.train.state import Progress, RunState

RETRY_S = (60.0, 120.0)  # from a failed save to its retry; full storage may have room later
SETTLE_S = 60.0  # that a run that fails waits for a save in progress
# Settings that change the sequences of a validation. The fingerprint of the data covers the documents.
VALIDATED = ("train.seq_len", "train.eval_sequences", "data.packing", "data.isolate_documents")
LONGEST_PAUSE_S = 16.0  # between two attempts of a run that must save before it continues
# Pause before each tensor of a background save. Writing the 522 tensors of a 125M run holds the GIL for about half a
# second, which blocks the training thread: spread over 13 s that is at most a twentieth of each step.
PAUSE_S = 0.025


class Checkpointing:
    """The checkpoints of one run. All ranks call every method except `votes` together."""

    clock = staticmethod(time.monotonic)
    pause = staticmethod(time.sleep)

    def __init__(self, state: RunState, root: Path, monitor: Monitor, resumed: str | None):
        self.config, self.state, self.monitor = state.config.checkpoint, state, monitor
        self.saver = Saver(root, self.config.keep, state.world.save_group, resumed)
        self._saved_step = state.progress.step if resumed else -1  # the newest committed step
        self._writing_step = 0
        self._writing_best = False
        self._undeleted: str | None = None  # recorded as an incident
        self._failures = 0  # consecutive failures that count
        self._counts = True  # whether the current save counts if it fails
        self._retry_at = 0.0

    def votes(self) -> tuple[int, int]:
        """1 if this rank has written its part of the current save; 1 if a retry is due."""
        return int(self.saver.written), int(self._is_retry_due())

    def after_step(self, written: int, retry: int, *, is_best: bool) -> None:
        """Completes a save that all ranks have `written`, and starts one if it is due or a rank voted to `retry`."""
        failures = self._failures
        if written == self.state.world.size:
            self._complete()
        every, step = self.config.every, self.state.progress.step
        due = is_best or bool(every and step % every == 0)
        if due and self.saver.busy:
            self._wait_for_previous()
        retry = retry if self._failures == failures else 0  # the vote is older than the end of the save
        if (due or retry) and not self.saver.busy:
            self._counts = bool(retry) or not self._failures
            self._begin(PAUSE_S if self.config.background else 0.0, is_best=is_best)
            if not self.config.background:
                self._complete()

    def wait(self) -> None:
        """Waits for the current save, if any."""
        if self.saver.busy:
            self._complete()

    def save_now(self) -> None:
        """Returns when the current step is committed. If storage fails, it retries for as long as regular saves do."""
        self.wait()
        pause_s = 1.0
        while self._saved_step != self.state.progress.step:
            self.monitor.beat(self.state.progress.step, "save")
            # Clocks differ between ranks: rank 0 decides.
            self._counts = on_first_rank(self.state.world, lambda: not self._failures or self._is_retry_due())
            is_again = self._writing_step == self.state.progress.step
            self._begin(is_best=self._writing_best and is_again)
            self._complete()
            if self._saved_step != self.state.progress.step:
                self.pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.monitor.claim.check(self.state.world)  # the saved checkpoint is at its path

    def settle(self) -> None:
        """Gives the current save time to end when the run fails. Does nothing with several ranks: one that is gone
        would not take part."""
        if self.state.world.size == 1 and not self.monitor.claim.is_lost():
            self.saver.settle(SETTLE_S)

    def save_if_alone(self) -> None:
        """Tries once to save the completed steps when there is no data for the next one. Does nothing with several
        ranks: the others do not know."""
        step = self.state.progress.step
        if self.state.world.size > 1 or step == 0:
            return
        with self.monitor.extended_timeout(), suppress(CheckpointError):  # the run ends for another reason
            self.wait()
            if self._saved_step != step:
                self._counts = False
                self._begin()
                self._complete()

    def _is_retry_due(self) -> bool:
        return self._failures > 0 and self.clock() >= self._retry_at

    def _wait_for_previous(self) -> None:
        began, step = time.perf_counter(), self.state.progress.step
        before = self._writing_step
        self._complete()
        seconds = time.perf_counter() - began
        self.monitor.emit("save_wait", step, seconds=seconds, writing=before)
        self.monitor.log(f"step {step:04d} | waited {seconds:.1f} s for the save of step {before}; saving this one now")

    def _begin(self, pause_s: float = 0.0, *, is_best: bool = False) -> None:
        self.monitor.claim.check(self.state.world)
        self.monitor.stream.flush()  # rows before the checkpoint must be on disk
        self.saver.begin(snapshot(self.state, is_best=is_best), pause_s=pause_s)
        self._writing_step, self._writing_best = self.state.progress.step, is_best

    def _complete(self) -> None:
        failure = self.saver.finish()
        if failure is None:
            self._saved_step, self._failures = self._writing_step, 0
            if (undeleted := self.saver.undeleted) and undeleted != self._undeleted:
                message = f"cannot be deleted, so that the disk may fill: {undeleted}; delete it by hand"
                self.monitor.incident("not_deleted", message, self.state.progress.step)
            self._undeleted = undeleted
            return
        without_path = failure.replace(str(self.saver.root), FOLDER)  # which may contain the name of a network library
        lost = lost_rank(without_path, self.state.world.rank, self.state.world.size)
        if lost is not None:
            raise lost
        # The retry saves the weights of a later step, which may not be the best.
        unmarked = "; it had the best validation loss" if self._writing_best else ""
        message = f"step {self._writing_step} could not be saved: {failure}{unmarked}"
        self.monitor.incident("save_failed", message, self.state.progress.step)
        if not self._counts:
            return
        self._failures += 1
        if self._failures > len(RETRY_S):
            last = self.saver.last_good or "none of this process"
            what = f"saving failed {self._failures} times in a row: {failure}"
            raise CheckpointError(f"{what}; the last good checkpoint: {last}")
        self._retry_at = self.clock() + RETRY_S[self._failures - 1]


class _DamagedError(CheckpointError):
    """A file of a checkpoint differs from what was saved. All ranks raise it together."""


def resume(state: RunState, folder: Path, monitor: Monitor, *, accept_changes: bool) -> str | None:
    """Restores the newest sound checkpoint of the run; returns its name, or None if the run has no checkpoint.

    Every rank hashes the files that it reads, all ranks at the same time: a large checkpoint takes rank 0 alone longer
    than the others can wait in a collective.
    """
    root, world, damage = folder / FOLDER, state.world, list[str]()
    for name in on_first_rank(world, lambda: [checkpoint.name for checkpoint in committed(root)]):
        checkpoint = root / name
        try:
            _verify(checkpoint, {INDEX_FILE, LEGACY_INDEX_FILE, STATE_FILE, random_file(world.rank)}, world)
            changes = on_first_rank(world, partial(_check_changes, checkpoint, state.config, accept_changes))
            restore(state, checkpoint)
        except _DamagedError as error:
            damage.append(str(error))
            continue
        on_first_rank(world, partial(_mark_best, checkpoint))
        if any(line.partition(":")[0] in VALIDATED for line in changes):
            state.progress.best_val_loss = None  # of other sequences
        for message in damage:
            monitor.incident("damaged_checkpoint", message, state.progress.step)
        for line in changes:
            monitor.log(f"changed {line}")
        return str(name)
    if damage:
        raise CheckpointError(f"no checkpoint in {root} is whole: {damage[0]}; --fresh starts over")
    return None


def _verify(checkpoint: Path, names: set[str], world: World) -> None:
    """Every rank verifies the files in its own `names`. All ranks raise the first damage that any of them found."""
    problem = ""
    try:
        verify(checkpoint, names)
    except CheckpointError as error:
        problem = str(error)
    if found := next(filter(None, gather_objects(problem, world)), ""):
        raise _DamagedError(found)


def _check_changes(checkpoint: Path, config: Config, accept_changes: bool) -> list[str]:
    """The configuration changes since the checkpoint. Raises ConfigError if they prevent resuming."""
    saved = read_state(checkpoint)
    changes = differences(saved.get("config"), config)
    root = checkpoint.parent
    if any(line.startswith("train.optimizer:") for line in changes):
        raise ConfigError(
            f"train.optimizer: {checkpoint} holds the state of another optimizer; --fresh starts over, or "
            f"train.init_from={root.parent} starts a run in another folder from its weights"
        )
    if changes and not accept_changes:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"{checkpoint}: was saved with another configuration:\n{lines}\n"
            "--accept-changes resumes with the new values, --fresh starts over, train.out_dir chooses another folder"
        )
    return changes + _changed_rate(saved, step_of(checkpoint), config.train)


def _mark_best(checkpoint: Path) -> None:
    """Restores the mark `best`: the run may have been killed between the commit of the checkpoint and its mark."""
    if read_state(checkpoint).get("is_best") is True:
        write_atomically(checkpoint.parent / BEST, checkpoint.name.encode() + b"\n")


def _changed_rate(saved: dict[str, Any], step: int, now: TrainConfig) -> list[str]:
    """Describes the saved and the current learning rate of the next step, if the schedule changed."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):  # another version with other keys, or damage
        known = {key: value for key, value in saved["config"]["train"].items() if key in TrainConfig.model_fields}
        then = TrainConfig.model_validate(known)
        old, new = learning_rate(step, then), learning_rate(step, now)
        if old != new:
            return [f"learning rate of step {step + 1}: {old:.2e} then, {new:.2e} now"]
    return []


def snapshot(state: RunState, *, is_best: bool) -> Snapshot:
    tensors: dict[str, Tensor] = {}
    for name, parameter in state.parameters.items():
        tensors[MODEL + name] = parameter
        for key, value in state.optimizer.state.get(parameter, {}).items():
            tensors[optimizer_key(name, key)] = value
    saved = {
        "version": STATE_VERSION,
        "progress": asdict(state.progress),
        "loss_scale": asdict(state.scale),
        "strategy": state.world.strategy,
        "world_size": state.world.size,
        "config": state.config.to_dict(),
        "data": state.data,
        "is_best": is_best,
    }
    return Snapshot(state.progress.step, tensors, saved, read_generators(state.device), is_best)


def restore(state: RunState, checkpoint: Path) -> None:
    """Restores weights, optimizer, progress and random state from `checkpoint`."""
    saved = read_state(checkpoint)
    names = saved_shapes(checkpoint)
    tensors: dict[str, Tensor] = {MODEL + name: p.detach() for name, p in state.parameters.items()}
    for name, parameter in state.parameters.items():
        prefix = optimizer_key(name)
        for moment in sorted(n for n in names if n.startswith(prefix)):
            key = moment.removeprefix(prefix)
            # The step counter is a float32 number; everything else is shaped and sharded like the parameter.
            value = torch.zeros((), device=state.device) if key == "step" else torch.zeros_like(parameter.detach())
            tensors[moment] = state.optimizer.state[parameter][key] = value
    fill(tensors, checkpoint, state.world.cpu_group, lambda names: _verify(checkpoint, names, state.world))
    damage = (KeyError, TypeError, ValueError, OverflowError)
    with reworded(CheckpointError, f"{checkpoint}: its state cannot be read", caught=damage):
        state.progress = _read_progress(saved["progress"])
        if state.progress.step != step_of(checkpoint):
            raise ValueError(f"progress.step is {state.progress.step}")
        scale = saved["loss_scale"]
        factor, clean_steps = float(scale["value"]), int(scale["clean_steps"])
        if state.scale.enabled and scale.get("enabled", factor != 1.0):  # older checkpoints lack it
            state.scale.value, state.scale.clean_steps = factor, clean_steps
        state.data = None if saved.get("data") is None else str(saved["data"])
    generators = read_random(checkpoint, state.world.rank)
    if generators is not None:
        write_generators(generators, state.device)


def _read_progress(saved: dict[str, Any]) -> Progress:
    progress = Progress(**saved)
    for name, value in asdict(progress).items():
        if isinstance(getattr(Progress, name), int):
            sound = type(value) is int and 0 <= value < 2**63
        else:
            sound = value is None or isinstance(value, (int, float))
        if not sound:
            raise ValueError(f"progress.{name} is {value!r}")
    return progress


def seed_generators(seed: int, rank: int) -> None:
    """Seeds every random generator from the run's seed, with a different stream on each rank."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4)
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)
    random.seed(int(words[2]))
    np.random.seed(int(words[3]))  # the global generator, in case user code draws from it


def read_generators(device: torch.device) -> dict[str, Any]:
    """The state of every random generator, as JSON."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    damage = (KeyError, TypeError, ValueError, OverflowError, RuntimeError)
    with reworded(CheckpointError, "the saved random state cannot be read", caught=damage):
        torch.set_rng_state(_from_hex(state["torch"]))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        inner = state["numpy"]["state"]
        np.random.set_state({**state["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}})
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
