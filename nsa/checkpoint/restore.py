"""Loads a checkpoint whose files the caller has verified. Loading executes no code from a checkpoint: tensors are in
safetensors files, everything else is JSON, and only files in the manifest are opened. Torch's distributed checkpoint
reshards the tensors between world sizes and strategies.
"""

import logging
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from nsa.checkpoint.format import INDEX_FILE, MODEL, STATE_FILE, STATE_VERSION, random_file, read_manifest
from nsa.checkpoint.legacy import LegacyReader
from nsa.checkpoint.storage import ShardReader
from nsa.errors import CheckpointError, reworded
from nsa.formatting import listed
from nsa.run_folder import read_json


def read_state(checkpoint: Path) -> dict[str, Any]:
    state = _read_json(checkpoint / STATE_FILE)
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE}: has version {state.get('version')!r}, this program reads {STATE_VERSION}; "
            "load the checkpoint with the version of nsa that wrote it"
        )
    return state


def read_step(checkpoint: Path) -> int:
    """Returns the saved step, whatever the name of the folder."""
    damage = (KeyError, TypeError, ValueError, OverflowError)
    with reworded(CheckpointError, f"{checkpoint / STATE_FILE}: has no step", caught=damage):
        step = int(read_state(checkpoint)["progress"]["step"])
        if not 0 <= step < 2**63:
            raise ValueError(f"it is {step}")
    return step


def read_random(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """Returns the random state of a rank; None if fewer ranks saved the checkpoint."""
    name = random_file(rank)
    return _read_json(checkpoint / name) if name in read_manifest(checkpoint) else None


def saved_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Returns the shape of every saved tensor by name."""
    return {name: torch.Size(tensor.shape) for name, tensor in _reader(checkpoint).tensors.items()}


def fill(
    tensors: dict[str, Tensor],
    checkpoint: Path,
    group: dist.ProcessGroup | None = None,
    check_files: Callable[[set[str]], object] = lambda names: None,
) -> None:
    """Loads the tensors, which include all of the model's, in place. Any world size may have saved them.

    Raises CheckpointError before any tensor changes if a tensor is missing, has a different shape, or a saved tensor of
    the model is not in `tensors`. Calls `check_files` with the names of the files that this rank is about to read.
    """
    reader = _reader(checkpoint)
    saved = {n: torch.Size(t.shape) for n, t in reader.tensors.items() if n in tensors or n.startswith(MODEL)}
    check_shapes(checkpoint, saved, {name: tensor.shape for name, tensor in tensors.items()})
    check_files(_planned_files(tensors, reader))
    _load(tensors, checkpoint, reader, group)


def _planned_files(tensors: dict[str, Tensor], reader: ShardReader | LegacyReader) -> set[str]:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), reader.read_metadata())
    files = {(name, chunk.offset): chunk.file for name, tensor in reader.tensors.items() for chunk in tensor.chunks}
    places = (item.storage_index for item in planner.create_local_plan().items)
    return {files[place.fqn, tuple(place.offset or ())] for place in places}


def check_loadable(checkpoint: Path) -> None:
    """Reads everything that a resume reads, one tensor at a time, without a model. Raises CheckpointError."""
    read_step(checkpoint)
    reader = _reader(checkpoint)
    for name in read_manifest(checkpoint):
        if name.startswith("random_"):
            _read_json(checkpoint / name)
    for name, tensor in reader.tensors.items():
        _load({name: torch.empty(tensor.shape, dtype=tensor.dtype)}, checkpoint, reader, None)


def read_back(checkpoint: Path, shard: str) -> None:
    """Reads the index and one shard, and loads the smallest tensor as a resume does. Raises CheckpointError."""
    reader = ShardReader(checkpoint, read_manifest(checkpoint))
    reader.read_shard(shard)
    name, tensor = min(reader.tensors.items(), key=lambda entry: math.prod(entry[1].shape))
    _load({name: torch.empty(tensor.shape, dtype=tensor.dtype)}, checkpoint, reader, None)


def _reader(checkpoint: Path) -> ShardReader | LegacyReader:
    files = read_manifest(checkpoint)
    return (ShardReader if INDEX_FILE in files else LegacyReader)(checkpoint, files)


def _load(
    tensors: dict[str, Tensor], checkpoint: Path, reader: ShardReader | LegacyReader, group: dist.ProcessGroup | None
) -> None:
    silence_torch()
    try:
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = "; ".join(dict.fromkeys(_cause(failure[0]) for failure in error.failures.values()))
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {causes}") from None


def check_shapes(path: Path, saved: Mapping[str, torch.Size], own: Mapping[str, torch.Size]) -> None:
    """Raises CheckpointError if names or shapes of the tensors saved in `path` differ from the model's."""
    missing = sorted(set(own) - set(saved))
    unknown = sorted(set(saved) - set(own))
    if missing or unknown:
        lists = [
            f"it {verb} {listed(names, 3)}" for verb, names in (("lacks", missing), ("also has", unknown)) if names
        ]
        remedy = "the model needs the configuration and the tokenizer with which this was saved"
        raise CheckpointError(f"{path}: does not fit this model: {' and '.join(lists)}; {remedy}")
    kind = "checkpoint" if path.is_dir() else "file"
    for name, shape in saved.items():
        if shape != own[name]:
            raise CheckpointError(f"{path}: {name} is {list(shape)} in the {kind} and {list(own[name])} in the model")


def _cause(error: BaseException) -> str:
    """Describes the error without torch's advice to set weights_only=False, which would run code from the file."""
    if isinstance(error, pickle.UnpicklingError):
        return "a shard contains an object that is not a tensor (weights-only loading refuses it)"
    return str(error) or type(error).__name__


def silence_torch() -> None:
    """Suppresses torch's warnings about a missing process group. The filter stays: restoring the old filters from the
    saving thread could undo a change of another thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def _read_json(path: Path) -> dict[str, Any]:
    with reworded(CheckpointError, f"{path}: cannot be read", caught=(OSError, ValueError)):
        return read_json(path)
