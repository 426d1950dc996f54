"""What a run saves of itself, and how it takes up again where a checkpoint left it."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.checkpoint.load import MODEL, STATE_VERSION, fill, read_random, read_state, saved_names
from nsa.checkpoint.save import Snapshot
from nsa.config import Config, differences
from nsa.errors import CheckpointError, ConfigError
from nsa.train.state import Progress, RunState

_OPTIMIZER = "optimizer/"


def snapshot(state: RunState, config: Config, *, is_best: bool = False) -> Snapshot:
    tensors: dict[str, Tensor] = {}
    for name, parameter in state.parameters.items():
        tensors[MODEL + name] = parameter
        for key, value in state.optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}/{key}"] = value
    saved = {
        "version": STATE_VERSION,
        "progress": asdict(state.progress),
        "loss_scale": {"value": state.scale.value, "clean_steps": state.scale.clean_steps},
        "strategy": state.world.strategy,
        "world_size": state.world.size,
        "config": config.to_dict(),
        "data": state.data,
    }
    return Snapshot(state.progress.step, tensors, saved, read_generators(state.device), is_best)


def restore(state: RunState, checkpoint: Path) -> None:
    """Weights, optimizer, progress and random state as they were when `checkpoint` was saved."""
    saved = read_state(checkpoint)
    names = saved_names(checkpoint)
    tensors: dict[str, Tensor] = {MODEL + name: p.detach() for name, p in state.parameters.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in state.parameters.items():
        prefix = f"{_OPTIMIZER}{name}/"
        keys = sorted(n.removeprefix(prefix) for n in names if n.startswith(prefix))
        moments[name] = {
            # The step counter is a float32 number; everything else is shaped and sharded like the parameter.
            key: torch.zeros((), device=state.device) if key == "step" else torch.zeros_like(parameter.detach())
            for key in keys
        }
        tensors |= {prefix + key: value for key, value in moments[name].items()}
    fill(tensors, checkpoint, state.world.cpu_group)
    for name, parameter in state.parameters.items():
        if moments[name]:
            state.optimizer.state[parameter] = moments[name]
    try:
        state.progress = _read_progress(saved["progress"])
        state.scale.value = float(saved["loss_scale"]["value"])
        state.scale.clean_steps = int(saved["loss_scale"]["clean_steps"])
        state.data = None if saved.get("data") is None else str(saved["data"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint}: its state cannot be read: {error}") from None
    generators = read_random(checkpoint, state.world.rank)
    if generators is not None:
        write_generators(generators, state.device)


def _read_progress(saved: dict[str, Any]) -> Progress:
    progress = Progress(**saved)
    for name, value in asdict(progress).items():
        is_count = isinstance(getattr(Progress, name), int)
        sound = type(value) is int and value >= 0 if is_count else value is None or isinstance(value, (int, float))
        if not sound:
            raise ValueError(f"progress.{name} is {value!r}")
    return progress


def check_same_config(checkpoint: Path, config: Config, *, accept: bool) -> list[str]:
    """Every key that differs from what the checkpoint was saved with, as a line each; an error unless accepted."""
    changes = differences(read_state(checkpoint).get("config"), config)
    if changes and not accept:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"{checkpoint}: was saved with another configuration:\n{lines}\n"
            "--accept-changes goes on with the new values, --fresh starts over, train.out_dir chooses another folder"
        )
    return changes


def seed_generators(seed: int, rank: int) -> None:
    """Every generator from the run's seed, another stream on each rank."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4)
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)
    random.seed(int(words[2]))
    np.random.seed(int(words[3]))  # the global one, in case somebody draws from it


def read_generators(device: torch.device) -> dict[str, Any]:
    """The state of every generator that somebody may draw from, as JSON."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _to_hex(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
    }
    if device.type == "cuda":
        state["cuda"] = _to_hex(torch.cuda.get_rng_state(device))
    return state


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    try:
        torch.set_rng_state(_from_hex(state["torch"]))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        inner = state["numpy"]["state"]
        np.random.set_state({**state["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}})
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the saved random state cannot be read: {error}") from None


def _to_hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
