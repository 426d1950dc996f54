"""A model's weights as one safetensors file: nothing in it can run code, and it appears whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from nsa.checkpoint.files import write_atomically
from nsa.errors import CheckpointError
from nsa.record.schema import WEIGHTS_FILE


def spell_weights(tensors: Mapping[str, torch.Tensor], **metadata: str | int | float) -> bytes:
    """The file's bytes. A tensor that several names share is stored under the first."""
    stored: dict[int, str] = {}
    for name, tensor in tensors.items():
        stored.setdefault(id(tensor), name)
    whole = {name: tensors[name].detach().cpu().contiguous() for name in stored.values()}
    return bytes(save(whole, metadata={"nsa": json.dumps(metadata)}))


def save_weights(model: nn.Module, path: Path, **metadata: str | int | float) -> None:
    """Every parameter once: of tied ones the first name is stored, `load_weights` restores the tie."""
    write_atomically(path, spell_weights(model.state_dict(keep_vars=True), **metadata))


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
