"""Reading a checkpoint back. It must have been verified; nothing in it is executed."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nsa.checkpoint.manifest import read_manifest
from nsa.checkpoint.save import STATE_FILE, random_file
from nsa.checkpoint.shards import load_tensors, saved_shapes
from nsa.errors import CheckpointError

STATE_VERSION = 1
MODEL = "model/"  # what a tensor of the model is called by


def read_state(checkpoint: Path) -> dict[str, Any]:
    state = _read_json(checkpoint / STATE_FILE)
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE}: version {state.get('version')!r} is not the {STATE_VERSION} that can be read"
        )
    return state


def read_step(checkpoint: Path) -> int:
    """The step that was saved, whatever its folder is called."""
    try:
        return int(read_state(checkpoint)["progress"]["step"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE}: says no step: {error}") from None


def read_random(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """The random state of that rank; None where fewer ranks saved."""
    if random_file(rank) not in read_manifest(checkpoint):
        return None
    return _read_json(checkpoint / random_file(rank))


def saved_names(checkpoint: Path) -> set[str]:
    return set(saved_shapes(checkpoint, read_manifest(checkpoint)))


def fill(tensors: dict[str, Tensor], checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fills every tensor in place, the model's among them.

    One that is missing or has another shape, or a model's that is left over, is an error before any is touched.
    """
    files = read_manifest(checkpoint)
    saved = saved_shapes(checkpoint, files)
    missing = sorted(set(tensors) - set(saved))
    unknown = sorted(name for name in set(saved) - set(tensors) if name.startswith(MODEL))
    if missing or unknown:
        raise CheckpointError(
            f"{checkpoint}: does not fit this model: missing {missing[:3] or 'nothing'}, unknown "
            f"{unknown[:3] or 'nothing'}; is the configuration the one it was saved with?"
        )
    for name, tensor in tensors.items():
        if tensor.shape != saved[name]:
            raise CheckpointError(
                f"{checkpoint}: {name} is {list(saved[name])} in the checkpoint and {list(tensor.shape)} in the model"
            )
    load_tensors(tensors, checkpoint, files, group)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold an object")
    return value
