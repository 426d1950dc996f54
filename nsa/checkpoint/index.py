"""The index of a checkpoint, a JSON file: which shard contains which part of which tensor.

An index is untrusted. `read_index` raises unless all its files are in the manifest and its parts cover their tensors.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nsa.checkpoint.format import FileEntry
from nsa.errors import CheckpointError
from nsa.files import LARGEST_DOCUMENT, read_regular

INDEX_VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor and the file that contains it. `place` is the reader's position in the file."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Any = None


@dataclass(frozen=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


def serialize_index(tensors: Mapping[str, SavedTensor]) -> bytes:
    entries = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "chunks": [{"file": c.file, "offset": c.offset, "shape": c.shape} for c in tensor.chunks],
        }
        for name, tensor in sorted(tensors.items())
    }
    return json.dumps({"version": INDEX_VERSION, "tensors": entries}, indent=1).encode() + b"\n"


def read_index(path: Path, files: Mapping[str, FileEntry]) -> dict[str, SavedTensor]:
    """Reads the index in `path` and checks it against the `files` of the manifest. Raises CheckpointError."""
    try:
        content = json.loads(read_regular(path, LARGEST_DOCUMENT))
        version, entries = content["version"], content["tensors"]
        if version == INDEX_VERSION:
            tensors = {name: _tensor(entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not the index of a checkpoint: {error!r}") from None
    if version != INDEX_VERSION:
        raise CheckpointError(f"{path}: has version {version!r}, this program reads version {INDEX_VERSION}")
    check_index(path, tensors, files)
    return tensors


def _tensor(entry: Any) -> SavedTensor:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not the name of a torch.dtype")
    chunks = [Chunk(str(c["file"]), _sizes(c["offset"]), _sizes(c["shape"])) for c in entry["chunks"]]
    return SavedTensor(dtype, _sizes(entry["shape"]), chunks)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int for size in value):
        raise ValueError("a size is not a list of integers")
    return tuple(value)


def check_index(path: Path, tensors: Mapping[str, SavedTensor], files: Mapping[str, FileEntry]) -> None:
    """Raises CheckpointError if the index names a file that is not in the manifest, places more bytes into a file than
    it has, or the parts of a tensor do not form the whole tensor."""
    claimed: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if not _is_whole(tensor):
            raise CheckpointError(f"{path}: the parts of {name!r} are not the whole tensor")
        for chunk in tensor.chunks:
            if chunk.file not in files:
                raise CheckpointError(f"{path}: names a file that is not in the manifest")
            claimed[chunk.file] += math.prod(chunk.shape) * tensor.dtype.itemsize
    for file, size in claimed.items():
        if size > files[file].bytes:
            raise CheckpointError(f"{path}: places {size:,} bytes into {file}, which has {files[file].bytes:,}")


def _is_whole(tensor: SavedTensor) -> bool:
    """Whether all parts lie within the tensor, start at different offsets, and add up to the size of the tensor."""
    for chunk in tensor.chunks:
        if not len(tensor.shape) == len(chunk.offset) == len(chunk.shape):
            return False
        edges = zip(tensor.shape, chunk.offset, chunk.shape, strict=True)
        if not all(offset >= 0 and length >= 0 and offset + length <= edge for edge, offset, length in edges):
            return False
    is_distinct = len({chunk.offset for chunk in tensor.chunks}) == len(tensor.chunks)
    return is_distinct and sum(math.prod(chunk.shape) for chunk in tensor.chunks) == math.prod(tensor.shape)


def to_metadata(tensors: Mapping[str, SavedTensor]) -> Metadata:
    """Converts the index to the metadata of torch's planner. `storage_data` has each chunk's place, or the chunk."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, tensor in tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), boxes)
        for chunk in tensor.chunks:
            places[MetadataIndex(name, chunk.offset)] = chunk.place or chunk
    return Metadata(entries, storage_data=places)
