"""Finds the weights of a run, loads them into a model, and writes them as one safetensors file."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.checkpoint.format import (
    BEST,
    FOLDER,
    LATEST,
    MANIFEST_FILE,
    MODEL,
    committed,
    newest_verified,
    read_pointer,
    step_of,
    verify,
    write_atomically,
)
from nsa.checkpoint.restore import check_shapes, fill, read_state, read_step, saved_shapes
from nsa.checkpoint.storage import byte_view, open_safetensors, write_safetensors
from nsa.config.architecture import Architecture
from nsa.errors import CheckpointError, reworded
from nsa.files import flush_folder, open_replacement
from nsa.nn.attention import Attention, attention_layers
from nsa.nn.attention.layer import DENSE_PARAMETERS
from nsa.run_folder import WEIGHTS_FILE, reading_run


def resolve_pointer(path: Path) -> Path:
    """Returns the checkpoint that a pointer file, `latest` or `best`, names, and any other path unchanged. The path
    must exist."""
    with reading_run(path):
        path.stat()
    name = read_pointer(path.parent, path.name) if path.name in (LATEST, BEST) else None
    return path if name is None else path.parent / name


def find_checkpoint(path: Path) -> Path:
    """Returns the verified checkpoint `path`, or the newest undamaged checkpoint of the run folder `path`.

    Warns about every newer checkpoint that is damaged.
    """
    path = resolve_pointer(path)
    if (path / MANIFEST_FILE).exists():
        verify(path)
        return path
    found, damaged = newest_verified(path / FOLDER if (path / FOLDER).is_dir() else path)
    if found is None:
        why = f": {damaged[0]}" if damaged else ""
        raise CheckpointError(f"{path}: contains no complete checkpoint{why}")
    for message in damaged:
        warnings.warn(f"{message}; using {found.name} instead", stacklevel=2)
    return found


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the full tensors of the model, whichever strategy saved them."""
    shapes = saved_shapes(checkpoint)
    with reworded(CheckpointError, f"{checkpoint}: its weights do not fit into memory", caught=RuntimeError):
        tensors = {name: torch.empty(shapes[name]) for name in shapes if name.startswith(MODEL)}
    fill(tensors, checkpoint)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def export_weights(source: Path, target: Path) -> int:
    """Writes the weights of a path that `find_weights` returned as one safetensors file. Returns the tensor count."""
    if source.is_file():
        count = len(read_tensors(source))
        write_atomically(target, source.read_bytes())
        return count
    weights = read_weights(source)
    try:
        metadata = weights_metadata(read_step(source), read_state(source)["config"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: its saved configuration cannot be read: no {error}") from None
    write_weights(target, weights, **metadata)
    return len(weights)


def weights_metadata(step: int, config: Any) -> dict[str, Any]:
    """Returns the metadata of a weights file: the step, and the part of the configuration (plain data) that rebuilds
    model and tokenizer. Other keys are left out, so that equal weights give equal files."""
    data = {key: config["data"][key] for key in ("tokenizer", "separator")}
    if end_tokens := config["data"].get("end_tokens"):
        data["end_tokens"] = end_tokens
    sections = {name: config[name] for name in Architecture.model_fields if name in config}
    return {"step": step, "config": {**sections, "data": data}}


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads the `weights_metadata` of a safetensors file; empty if another program wrote the file."""
    with open_safetensors(path) as file:
        return _metadata_of(file)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file. Checks the SHA-256 if `write_weights` wrote the file."""
    with open_safetensors(path) as file:
        metadata, tensors = _metadata_of(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "sha256" in metadata and metadata.pop("sha256") != _checksum(tensors, metadata):
        raise CheckpointError(f"{path}: its content differs from its SHA-256; the file is damaged")
    return tensors


def _metadata_of(file: Any) -> dict[str, Any]:
    content = json.loads((file.metadata() or {}).get("nsa", "{}"))
    return content if isinstance(content, dict) else {}


def _checksum(tensors: Mapping[str, Tensor], metadata: dict[str, Any]) -> str:
    """Returns the SHA-256 of the tensors, with their names, dtypes and shapes, and of the metadata."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(byte_view(tensor))
    return digest.hexdigest()


def write_weights(path: Path, tensors: Mapping[str, Tensor], **metadata: Any) -> None:
    """Writes a safetensors file with a checksum, tensor by tensor, and replaces `path` with it. A tensor with several
    names is stored under the first. Raises CheckpointError."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    stored = {name: tensors[name].detach() for name in sorted(first.values())}
    metadata["sha256"] = _checksum(stored, metadata)
    entries = [(name, t.dtype, tuple(t.shape), partial(Tensor.detach, t)) for name, t in stored.items()]
    with reworded(CheckpointError, f"{path}: cannot be written"):
        with open_replacement(path) as file:
            write_safetensors(file, entries, {"nsa": json.dumps(metadata, sort_keys=True)})
        flush_folder(path.parent)


def find_weights(path: Path) -> Path:
    """Returns the safetensors file or verified checkpoint for `path`: `path` itself, the weights file of a finished
    run, or the newest undamaged checkpoint of a run that has not finished or was resumed since."""
    path = resolve_pointer(path)
    is_checkpoint, weights = (path / MANIFEST_FILE).exists(), path / WEIGHTS_FILE
    if is_checkpoint or ((path / FOLDER).is_dir() and not weights.exists()):
        return find_checkpoint(path)
    if weights.is_symlink():
        raise CheckpointError(f"{weights}: it is a symbolic link, which is not followed inside a run folder")
    if not path.is_dir():
        return path
    checkpoints = committed(path / FOLDER)
    step = read_metadata(weights).get("step") if checkpoints else None
    if isinstance(step, int) and step_of(checkpoints[0]) > step:
        newest, damaged = newest_verified(path / FOLDER)
        for message in damaged:
            warnings.warn(message, stacklevel=2)
        if newest and step_of(newest) > step:
            return newest
    return weights


def load_weights(model: nn.Module, path: Path, *, converts: bool = False) -> None:
    """Loads a path that `find_weights` returned into `model`. A different name or shape is an error. With `converts`,
    attention layers of any kind may start from dense ones."""
    dense = _saved_as_dense(model, path) if converts else {}
    if path.is_dir() and not dense:
        fill({MODEL + name: p.detach() for name, p in model.named_parameters()}, path)
        return
    tensors = read_weights(path) if path.is_dir() else read_tensors(path)
    own = dict(model.named_parameters())  # tied parameters are stored once, under the first name
    start_from_dense(tensors, dense)
    saved, wanted = ({name: tensor.shape for name, tensor in some.items()} for some in (tensors, own))
    check_shapes(path, saved, wanted)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def start_from_dense(tensors: dict[str, Tensor], layers: Mapping[str, Attention]) -> None:
    """Replaces the parameters of dense layers in `tensors` by those of `layers`, by name: copies, and those that the
    layers initialise for a start from dense ones."""
    for prefix, layer in layers.items():
        layer.start_from_dense()
        own, new = dict(layer.named_parameters()), layer.new_parameters()
        kept = {name: tensors.pop(f"{prefix}.{name}") for name in DENSE_PARAMETERS if f"{prefix}.{name}" in tensors}
        tensors |= {f"{prefix}.{to}": kept[name].clone() for name in kept for to in layer.dense_targets(name)}
        tensors |= {f"{prefix}.{name}": own[name].detach() for name in new}


def _saved_as_dense(model: nn.Module, path: Path) -> dict[str, Attention]:
    """Returns the attention layers of other kinds for which `path` has dense ones, by name.
    A layer with any other parameter in `path` is not dense: it may have lost some."""
    if path.is_dir():
        names = [name.removeprefix(MODEL) for name in saved_shapes(path) if name.startswith(MODEL)]
    else:
        with open_safetensors(path) as file:
            names = list(file.keys())
    found = {}
    for name, layer in attention_layers(model):
        saved = {other.removeprefix(f"{name}.") for other in names if other.startswith(f"{name}.")}
        own = {name for name, _ in layer.named_parameters()}
        if saved and saved <= DENSE_PARAMETERS and not own <= DENSE_PARAMETERS:
            found[name] = layer
    return found
