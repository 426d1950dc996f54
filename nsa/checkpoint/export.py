"""A model's weights in one place: loaded into a model from wherever they lie, or written as one safetensors file."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from nsa.checkpoint.files import write_atomically
from nsa.checkpoint.format import FOLDER, MANIFEST_FILE, MODEL, newest_verified, verify
from nsa.checkpoint.load import fill, saved_shapes
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
    shapes = saved_shapes(checkpoint)
    try:
        tensors = {name: torch.empty(shapes[name]) for name in shapes if name.startswith(MODEL)}
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint}: its weights do not fit into memory: {error}") from None
    fill(tensors, checkpoint)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def export_weights(checkpoint: Path, target: Path, step: int) -> int:
    """Writes the weights as safetensors; how many tensors there are."""
    weights = read_weights(checkpoint)
    write_atomically(target, serialize_weights(weights, step=step))
    return len(weights)


def serialize_weights(tensors: Mapping[str, Tensor], **metadata: str | int | float) -> bytes:
    """The bytes of a safetensors file. A tensor that several names share is stored under the first."""
    stored: dict[int, str] = {}
    for name, tensor in tensors.items():
        stored.setdefault(id(tensor), name)
    whole = {name: tensors[name].detach().cpu().contiguous() for name in stored.values()}
    return bytes(save(whole, metadata={"nsa": json.dumps(metadata)}))


def load_any_weights(model: nn.Module, path: Path) -> None:
    """Fills `model` from a safetensors file, a finished run, a checkpoint, or a run that has checkpoints only."""
    is_checkpoint = (path / MANIFEST_FILE).exists()
    if is_checkpoint or ((path / FOLDER).is_dir() and not (path / WEIGHTS_FILE).exists()):
        fill({MODEL + name: p.detach() for name, p in model.named_parameters()}, find_checkpoint(path))
    else:
        load_weights(model, path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills the model from `path`, a file or a run folder. A name or a shape that does not fit is an error."""
    if path.is_dir():
        path = path / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; has the run finished?") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is no whole safetensors file: {error}") from None
    own = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name, tensor in own.items():
        first_names.setdefault(id(tensor), name)  # of tied parameters only the first is stored
    missing = sorted(set(first_names.values()) - set(tensors))
    unknown = sorted(set(tensors) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"{path}: does not fit this model: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}; "
            "is the configuration the one it was saved with?"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {list(tensor.shape)} in the file and {list(own[name].shape)} in the model"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
