"""A model's weights in one place: loaded into a model from wherever they lie, or written as one safetensors file."""

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
    pointed,
    step_of,
    verify,
    write_atomically,
)
from nsa.checkpoint.restore import fill, read_state, read_step, refuse_misfit, saved_shapes
from nsa.checkpoint.storage import byte_view, open_safetensors, write_safetensors
from nsa.config.schema import Architecture
from nsa.errors import CheckpointError, reworded
from nsa.files import flush_folder, open_replacement
from nsa.run_folder import WEIGHTS_FILE, reading_run


def resolve_pointer(path: Path) -> Path:
    """The checkpoint that a pointer file, `latest` or `best`, names; any other path as it is. It must exist."""
    with reading_run(path):
        path.stat()
    name = pointed(path.parent, path.name) if path.name in (LATEST, BEST) else None
    return path if name is None else path.parent / name


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a checkpoint, else the newest sound one of the run folder it is; verified.

    Every damaged one that is newer gives a warning.
    """
    path = resolve_pointer(path)
    if (path / MANIFEST_FILE).exists():
        verify(path)
        return path
    found, damaged = newest_verified(path / FOLDER if (path / FOLDER).is_dir() else path)
    if found is None:
        why = f": {damaged[0]}" if damaged else ""
        raise CheckpointError(f"{path}: holds no whole checkpoint{why}")
    for message in damaged:
        warnings.warn(f"{message}; using {found.name} instead", stacklevel=2)
    return found


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's tensors, whole, whatever strategy saved them."""
    shapes = saved_shapes(checkpoint)
    with reworded(CheckpointError, f"{checkpoint}: its weights do not fit into memory", caught=RuntimeError):
        tensors = {name: torch.empty(shapes[name]) for name in shapes if name.startswith(MODEL)}
    fill(tensors, checkpoint)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def export_weights(source: Path, target: Path) -> int:
    """Writes the weights of a path that `find_weights` returned as one safetensors file; how many tensors there are."""
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
    """What a file of weights says of itself: its step, and the part of the configuration (plain data) that rebuilds
    model and tokenizer. The rest stays with the run, so that equal weights are equal files."""
    data = {key: config["data"][key] for key in ("tokenizer", "separator")}
    if end_tokens := config["data"].get("end_tokens"):
        data["end_tokens"] = end_tokens
    sections = {name: config[name] for name in Architecture.model_fields if name in config}
    return {"step": step, "config": {**sections, "data": data}}


def read_metadata(path: Path) -> dict[str, Any]:
    """What `weights_metadata` made of a safetensors file; empty where another program wrote it."""
    with open_safetensors(path) as file:
        return _about(file)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. A file of `write_weights` is compared with its checksum."""
    with open_safetensors(path) as file:
        about, tensors = _about(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "sha256" in about and about.pop("sha256") != _checksum(tensors, about):
        raise CheckpointError(f"{path}: its content differs from the SHA-256 in it; the file is damaged")
    return tensors


def _about(file: Any) -> dict[str, Any]:
    content = json.loads((file.metadata() or {}).get("nsa", "{}"))
    return content if isinstance(content, dict) else {}


def _checksum(tensors: Mapping[str, Tensor], about: dict[str, Any]) -> str:
    """SHA-256 of the tensors with their names, types and shapes, and of the metadata."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(byte_view(tensor))
    return found.hexdigest()


def write_weights(path: Path, tensors: Mapping[str, Tensor], **metadata: Any) -> None:
    """Writes a safetensors file with a checksum, one tensor after another, and replaces `path` with it. A tensor that
    several names share is stored under the first. Raises CheckpointError."""
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
    """The safetensors file or the verified checkpoint that `path` names: itself, the weights of a finished run, or the
    newest sound checkpoint of one that has not finished, or was resumed since."""
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
        newest, _ = newest_verified(path / FOLDER)
        if newest and step_of(newest) > step:
            return newest
    return weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills `model` from a path that `find_weights` returned. A name or a shape that does not fit is an error."""
    if path.is_dir():
        fill({MODEL + name: p.detach() for name, p in model.named_parameters()}, path)
        return
    tensors, own = read_tensors(path), dict(model.named_parameters(remove_duplicate=False))
    tied = own.keys() - dict(model.named_parameters()).keys()  # of tied parameters only the first is stored
    saved, wanted = ({name: tensor.shape for name, tensor in some.items()} for some in (tensors, own))
    refuse_misfit(path, saved, wanted, optional=tied)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
