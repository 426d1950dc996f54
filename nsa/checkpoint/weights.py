"""A model's weights as one safetensors file: nothing in it can run code, and it appears whole or not at all."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from nsa.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside the place, flushes to disk, renames: a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def save_weights(model: nn.Module, path: Path, **metadata: str | int | float) -> None:
    """Every parameter once: of tied ones the first name is stored, `load_weights` restores the tie."""
    tensors: dict[str, torch.Tensor] = {}
    stored: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in stored:
            stored.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous()
    write_atomically(path, save(tensors, metadata={"nsa": json.dumps(metadata)}))


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
    ties = {name: _first_name(own, tensor) for name, tensor in own.items()}
    missing = sorted(set(ties.values()) - set(tensors))
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


def _first_name(named: dict[str, torch.Tensor], tensor: torch.Tensor) -> str:
    return next(name for name, other in named.items() if other is tensor)
