"""Reading a checkpoint that was verified before. Nothing in it is executed.

Torch's distributed checkpoint reshards tensors between world sizes and strategies, but pickles its metadata. Here that
is read through an allow-list of the types it consists of, entries that are no tensors are refused, and no shard outside
the manifest is opened.
"""

import logging
import pickle
import warnings
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from nsa.checkpoint.format import METADATA_FILE, MODEL, STATE_FILE, STATE_VERSION, random_file, read_manifest
from nsa.errors import CheckpointError, reworded
from nsa.files import LARGEST_DOCUMENT, open_regular
from nsa.record.schema import read_json

_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",  # so that the error can name the entry
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
_PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)  # the state of a TensorProperties
# Sets hash what they hold, a byte array takes as much memory as it claims, the others call what they name.
_REFUSED = (
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.DICT, pickle.BYTEARRAY8, pickle.NEXT_BUFFER),
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX),
)


def read_state(checkpoint: Path) -> dict[str, Any]:
    state = _read_json(checkpoint / STATE_FILE)
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE}: has version {state.get('version')!r}, this program reads {STATE_VERSION}; "
            "load the checkpoint with the version of nsa that wrote it"
        )
    return state


def read_step(checkpoint: Path) -> int:
    """The step that was saved, whatever its folder is called."""
    damage = (KeyError, TypeError, ValueError, OverflowError)
    with reworded(CheckpointError, f"{checkpoint / STATE_FILE}: has no step", caught=damage):
        step = int(read_state(checkpoint)["progress"]["step"])
        if not 0 <= step < 2**63:
            raise ValueError(f"it is {step}")
    return step


def read_random(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """The random state of that rank; None where fewer ranks saved."""
    name = random_file(rank)
    return _read_json(checkpoint / name) if name in read_manifest(checkpoint) else None


def saved_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Name and shape of every saved tensor."""
    entries: Mapping[str, Any] = _Reader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in entries.items()}


def fill(tensors: dict[str, Tensor], checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fills every tensor in place, the model's among them, whatever world saved them.

    A missing tensor, another shape, or a tensor of the model that is left over is an error before any is changed.
    """
    saved = {n: shape for n, shape in saved_shapes(checkpoint).items() if n in tensors or n.startswith(MODEL)}
    refuse_misfit(checkpoint, saved, {name: tensor.shape for name, tensor in tensors.items()})
    silence_torch()
    try:
        load(dict(tensors), storage_reader=_Reader(checkpoint), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = "; ".join(dict.fromkeys(_cause(failure[0]) for failure in error.failures.values()))
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {causes}") from None


def refuse_misfit(
    path: Path, saved: Mapping[str, torch.Size], own: Mapping[str, torch.Size], optional: Collection[str] = ()
) -> None:
    """Raises a CheckpointError where the tensors saved in `path` are not the model's own, by name or by shape."""
    missing = sorted(set(own) - set(saved) - set(optional))
    unknown = sorted(set(saved) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"{path}: does not fit this model: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}; "
            "is the configuration the one it was saved with?"
        )
    kind = "checkpoint" if path.is_dir() else "file"
    for name, shape in saved.items():
        if shape != own[name]:
            raise CheckpointError(f"{path}: {name} is {list(shape)} in the {kind} and {list(own[name])} in the model")


def _cause(error: BaseException) -> str:
    """Without torch's advice to load with weights_only=False, which would run the code in the file."""
    if isinstance(error, pickle.UnpicklingError):
        return "a shard holds something else than a tensor (weights-only loading refuses it)"
    return str(error) or type(error).__name__


def silence_torch() -> None:
    """Drops torch's remarks about running without a process group. The filter stays: restoring the old filters from
    the thread that saves could undo what another thread did meanwhile."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def _read_json(path: Path) -> dict[str, Any]:
    with reworded(CheckpointError, f"{path}: cannot be read", caught=(OSError, ValueError)):
        return read_json(path)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder
        self._files = read_manifest(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / METADATA_FILE
        if METADATA_FILE not in self._files:
            raise CheckpointError(f"{path}: is not in the manifest")
        try:
            with open_regular(path, LARGEST_DOCUMENT) as file:
                metadata = _Unpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        tables = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
        if not isinstance(metadata, Metadata) or not all(isinstance(table, dict) for table in tables):
            raise CheckpointError(f"{path}: holds no checkpoint metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                which = repr(name) if isinstance(name, str | int) else f"of type {type(name).__name__}"
                raise CheckpointError(f"{path}: entry {which} is no tensor; such entries are refused")
            if not _is_whole(entry):
                raise CheckpointError(f"{path}: the parts of {name!r} are not the whole tensor")
        for info in metadata.storage_data.values():
            shard = getattr(info, "relative_path", None)
            if not isinstance(shard, str) or shard not in self._files:
                raise CheckpointError(f"{path}: points to a file that is not in the manifest")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{path}: asks for a transformation of its shards, which is not supported")
        metadata.storage_meta = StorageMeta()
        return metadata


class _Unpickler(pickle._Unpickler):
    """Builds the listed types and nothing else; anything that could run code is an error.

    This is the unpickler in Python: the one in C sets attributes of whatever it found, even of a class. Nothing nested
    is hashed, compared or printed here: sixty tuples that hold the one before twice would take for ever.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name in _TYPES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"refused: it asks for {module}.{name}, which no checkpoint of ours needs")

    def load_build(self) -> None:
        built, state = self.stack[-2:]  # type: ignore[attr-defined]
        if isinstance(built, type) or not is_dataclass(built):
            raise CheckpointError("refused: it changes something that was there before")
        sound = isinstance(state, tuple) and tuple(map(type, state)) == _PROPERTIES
        if isinstance(built, TensorProperties) and not sound:
            raise CheckpointError("refused: the properties of a tensor are none")
        super().load_build()  # type: ignore[misc]

    def load_call(self) -> None:
        """REDUCE and NEWOBJ: what is called gets nothing, one number, one text or the sizes of a tensor."""
        function, given = self.stack[-2:]  # type: ignore[attr-defined]
        if function is _memory_format:
            return
        inner = given[0] if isinstance(given, tuple) and len(given) == 1 else given
        if not (type(inner) in (int, str) or (isinstance(inner, tuple) and all(type(size) is int for size in inner))):
            raise CheckpointError("refused: it calls something with more than a number, a text or sizes")

    def load_reduce(self) -> None:
        self.load_call()
        super().load_reduce()  # type: ignore[misc]

    def load_newobj(self) -> None:
        self.load_call()
        super().load_newobj()  # type: ignore[misc]

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    def refuse(self) -> None:
        raise CheckpointError("refused: it builds something that no checkpoint of ours needs")

    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        **dict.fromkeys((code[0] for code in _REFUSED), refuse),
    }


def _check_keys(keys: list[Any]) -> None:
    """Texts, numbers, and where in a tensor a part begins: all are hashed at once."""
    for key in keys:
        index = vars(key) if isinstance(key, MetadataIndex) else {}
        is_index = type(index.get("fqn")) is str and isinstance(index.get("offset"), torch.Size | None)
        if type(key) not in (str, int) and not is_index:
            raise CheckpointError(f"refused: a key of its tables is of type {type(key).__name__}")


def _memory_format(*given: Any) -> _MEM_FORMAT_ENCODING:
    """Stands for `getattr`, through which Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""
    if len(given) != 2 or given[0] is not _MEM_FORMAT_ENCODING or type(given[1]) is not str:
        raise CheckpointError("refused: it asks for builtins.getattr of something that is no memory format")
    return _MEM_FORMAT_ENCODING[given[1]]


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """Whether every part lies within the tensor and the parts have as many numbers: nothing would fill the rest."""
    try:
        size, inside = entry.size, True
        for chunk in entry.chunks:
            edges = zip(size, chunk.offsets, chunk.sizes, strict=True)
            inside &= all(offset >= 0 and length >= 0 and offset + length <= edge for edge, offset, length in edges)
        return isinstance(size, torch.Size) and inside and sum(c.sizes.numel() for c in entry.chunks) == size.numel()
    except (AttributeError, TypeError, ValueError):
        return False
