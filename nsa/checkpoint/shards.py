"""Tensors through torch's distributed checkpoint, which reshards them between world sizes and strategies.

Torch pickles its metadata. Here it is read through an allow-list of the types it consists of, entries that are no
tensors are refused, and no shard outside the checkpoint's manifest is opened.
"""

import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nsa import faults
from nsa.errors import CheckpointError

METADATA_FILE = ".metadata"
_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",  # to say that it is refused
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


def shard_names(folder: Path, rank: int) -> Iterable[str]:
    """The files that this rank wrote."""
    return [path.name for path in folder.glob(f"__{rank}_*")]


def save_tensors(
    tensors: dict[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup | None,
    *,
    pause: Callable[[], object] = lambda: None,
) -> None:
    """Every rank writes its part of `tensors`; a tensor that all have is written once.

    `pause` is called before each tensor: what is Python in writing one stops the thread that trains, and is better
    spread over many steps than put into one.
    """
    _hush()
    planner = _Planner(pause)
    save(tensors, storage_writer=_Writer(folder), planner=planner, process_group=group, no_dist=group is None)


def load_tensors(
    tensors: dict[str, Tensor], folder: Path, files: Iterable[str], group: dist.ProcessGroup | None
) -> None:
    """Fills `tensors` in place, whatever the world that saved them looked like."""
    _hush()
    try:
        load(dict(tensors), storage_reader=_Reader(folder, files), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = "; ".join(dict.fromkeys(str(cause[0]) or type(cause[0]).__name__ for cause in error.failures.values()))
        raise CheckpointError(f"{folder}: cannot be loaded: {causes}") from None


def _hush() -> None:
    """Keeps torch's remarks about running without a process group from the user. The filter stays: putting the old
    ones back, from a thread of its own, could undo what another thread did meanwhile."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def saved_shapes(folder: Path, files: Iterable[str]) -> dict[str, torch.Size]:
    """Name and shape of every saved tensor."""
    metadata = _Reader(folder, files).read_metadata()
    return {name: entry.size for name, entry in _tensor_entries(metadata, folder).items()}


class _Planner(DefaultSavePlanner):
    def __init__(self, pause: Callable[[], object]):
        super().__init__()
        self._pause = pause

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._pause()
        return super().resolve_data(write_item)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path):
        # Everything is in host memory already: no copying ahead, which would open a CUDA context in this thread.
        super().__init__(folder, sync_files=True, overwrite=True, per_thread_copy_ahead=0)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        faults.point("save.shard")
        written = super().write_data(*args, **kwargs)
        faults.point("save.shard_written")
        return written

    def finish(self, *args: Any, **kwargs: Any) -> None:
        faults.point("save.metadata")
        super().finish(*args, **kwargs)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path, which is no business of the checkpoint


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, files: Iterable[str]):
        super().__init__(folder)
        self._folder = folder
        self._files = set(files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / METADATA_FILE
        if METADATA_FILE not in self._files:
            raise CheckpointError(f"{path}: is not in the manifest")
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # whatever a damaged pickle does to the machine that reads it
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{path}: holds no checkpoint metadata")
        _tensor_entries(metadata, self._folder)
        for info in metadata.storage_data.values():
            shard = getattr(info, "relative_path", None)
            if not isinstance(shard, str) or shard not in self._files:
                raise CheckpointError(f"{path}: points to a file that is not in the manifest")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{path}: asks for a transformation of its shards, which is not done here")
        metadata.storage_meta = StorageMeta()
        return metadata


class _Unpickler(pickle._Unpickler):
    """Builds the listed types and nothing else; anything that could run code is an error.

    The one in Python, because the one in C sets attributes of whatever it found, of a class too.
    """

    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if name in _TYPES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"refused: it asks for {module}.{name}, which no checkpoint of ours needs")

    def load_build(self) -> None:
        built = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(built, type) or not is_dataclass(built):
            raise CheckpointError("refused: it changes something that was there before")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def _tensor_entries(metadata: Metadata, folder: Path) -> Mapping[str, TensorStorageMetadata]:
    entries = metadata.state_dict_metadata
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder / METADATA_FILE}: holds no checkpoint metadata")
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder / METADATA_FILE}: entry {name!r} is no tensor; such entries are refused")
        if not _is_whole(entry):
            raise CheckpointError(f"{folder / METADATA_FILE}: the parts of {name!r} are not the whole tensor")
    return entries  # type: ignore[return-value]


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """Whether every part lies within the tensor, and they have as many numbers. Nothing would fill the rest."""
    try:
        size, inside = entry.size, True
        for chunk in entry.chunks:
            edges = zip(size, chunk.offsets, chunk.sizes, strict=True)
            inside &= all(offset >= 0 and length >= 0 and offset + length <= edge for edge, offset, length in edges)
        return isinstance(size, torch.Size) and inside and sum(c.sizes.numel() for c in entry.chunks) == size.numel()
    except (AttributeError, TypeError, ValueError):
        return False
