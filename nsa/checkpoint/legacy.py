"""Reads checkpoints of version 0.1, whose tensors torch's distributed checkpoint wrote and indexed in a pickle.

The pickle is parsed into plain data by a small stack machine. The parser imports nothing, calls nothing and hashes
nothing that it finds in the file, so a hostile pickle can at most fail to be an index. Version 0.3 will not read this
format.
"""

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from nsa.checkpoint.format import LEGACY_INDEX_FILE, FileEntry
from nsa.checkpoint.index import Chunk, SavedTensor, check_index, to_metadata
from nsa.errors import CheckpointError
from nsa.files import LARGEST_DOCUMENT, read_regular

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class LegacyReader(FileSystemReader):
    """Loads the tensors of a verified checkpoint of version 0.1. Torch reads the shards with `weights_only=True`."""

    def __init__(self, folder: Path, files: dict[str, FileEntry]):
        super().__init__(folder)
        self._path, self._files = folder / LEGACY_INDEX_FILE, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return to_metadata(self.tensors)

    @cached_property
    def tensors(self) -> dict[str, SavedTensor]:
        try:
            tensors = dict(_tensors(_parse(read_regular(self._path, LARGEST_DOCUMENT))))
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from None
        except Exception as error:  # a damaged pickle can fail in any way
            raise CheckpointError(f"{self._path}: is not the index of a checkpoint: {error}") from None
        check_index(self._path, tensors, self._files)
        return tensors


@dataclass
class _Object:
    """An instance as the pickle describes it: the name of its class or function, its arguments and its fields."""

    name: str
    arguments: Any
    fields: Any = None

    def __getitem__(self, field: str) -> Any:
        assert isinstance(self.fields, _Pairs), f"{self.name} has no fields"
        return next((value for key, value in self.fields.pairs if type(key) is str and key == field), None)


@dataclass
class _Pairs:
    """A dictionary as a list of pairs: hashing a key from the file could take forever."""

    pairs: list[tuple[Any, Any]]


def _parse(content: bytes) -> Any:
    """Returns the object that the pickle describes, as strings, numbers, tuples, lists, `_Pairs` and `_Object`."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode.name])
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = len(stack) - _TUPLES[opcode.name]
                stack[start:] = [tuple(stack[start:])]
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                stack[-2].append(stack[-1])
                stack.pop()
            case "APPENDS":
                items = pop_to_mark()
                stack[-1].extend(items)
            case "EMPTY_DICT":
                stack.append(_Pairs([]))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1].pairs.append((key, value))
            case "SETITEMS":
                items = pop_to_mark()
                stack[-1].pairs.extend(zip(items[::2], items[1::2], strict=True))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(f"{module}.{name}" if type(module) is type(name) is str else None)
            case "REDUCE" | "NEWOBJ":
                arguments, name = stack.pop(), stack.pop()
                stack.append(_Object(name, arguments))
            case "BUILD":
                fields = stack.pop()
                stack[-1].fields = fields
            case other:
                raise CheckpointError(f"is not the index of a checkpoint: it contains the pickle opcode {other}")
    raise CheckpointError("is not the index of a checkpoint: it ends early")


def _tensors(metadata: Any) -> Iterator[tuple[str, SavedTensor]]:
    parts: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {}
    for key, place in metadata["storage_data"].pairs:
        if place["transform_descriptors"]:
            raise CheckpointError("asks for a transformation of its shards, which is not supported")
        file, start, length = place["relative_path"], place["offset"], place["length"]
        if type(file) is not str or type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise CheckpointError("a part of a tensor has no valid place in a file")
        parts[_text(key["fqn"]), _sizes(key["offset"])] = _StorageInfo(file, start, length)
    for name, entry in metadata["state_dict_metadata"].pairs:
        if not entry.name.endswith(".TensorStorageMetadata"):
            raise CheckpointError(f"entry {_text(name)!r} is not a tensor; such entries are refused")
        size, dtype = _sizes(entry["size"]), _dtype(entry["properties"].fields[0])
        boxes = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in entry["chunks"]]
        chunks = [Chunk(parts[_text(name), o].relative_path, o, s, parts[_text(name), o]) for o, s in boxes]
        yield _text(name), SavedTensor(dtype, size, chunks)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"the name of a tensor is of type {type(value).__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns the sizes of a pickled `torch.Size`."""
    (sizes,) = value.arguments
    if not all(type(size) is int for size in sizes):
        raise CheckpointError("the size of a tensor is not a tuple of integers")
    return tuple(sizes)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError("the type of a tensor is not a torch.dtype")
    return found
