"""A checkpoint's weights in one place: filled into a model, or written as safetensors."""

from pathlib import Path

import torch
from torch import Tensor, nn

from nsa.checkpoint.files import write_atomically
from nsa.checkpoint.layout import FOLDER, newest_verified
from nsa.checkpoint.load import MODEL, fill
from nsa.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify
from nsa.checkpoint.shards import saved_shapes
from nsa.checkpoint.weights import load_weights, spell_weights
from nsa.errors import CheckpointError
from nsa.record.schema import WEIGHTS_FILE


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a checkpoint, else the newest sound one of the run folder it is; verified."""
    if (path / MANIFEST_FILE).exists():
        verify(path)
        return path
    damaged: list[str] = []
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    found = newest_verified(root, lambda error: damaged.append(str(error)))
    if found is None:
        why = f": {damaged[0]}" if damaged else ""
        raise CheckpointError(f"{path}: holds no whole checkpoint{why}")
    return found


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's tensors, whole, whatever strategy saved them."""
    shapes = saved_shapes(checkpoint, read_manifest(checkpoint))
    names = [name for name in shapes if name.startswith(MODEL)]
    try:
        tensors = {name: torch.empty(shapes[name]) for name in names}
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint}: its weights do not fit into memory: {error}") from None
    fill(tensors, checkpoint)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def export_weights(checkpoint: Path, target: Path, step: int) -> int:
    """Writes the weights as safetensors; how many tensors there are."""
    weights = read_weights(checkpoint)
    write_atomically(target, spell_weights(weights, step=step))
    return len(weights)


def load_any_weights(model: nn.Module, path: Path) -> None:
    """Fills `model` from a safetensors file, a finished run, a checkpoint, or a run that has checkpoints only."""
    is_checkpoint = (path / MANIFEST_FILE).exists()
    if (
        path.is_dir()
        and (is_checkpoint or not (path / WEIGHTS_FILE).exists())
        and (is_checkpoint or (path / FOLDER).is_dir())
    ):
        tensors = {MODEL + name: p.detach() for name, p in model.named_parameters()}
        fill(tensors, find_checkpoint(path))
    else:
        load_weights(model, path)
