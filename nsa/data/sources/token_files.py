"""Reads the indexes of tokenised corpora that other programs wrote: Megatron-LM and NeMo (.bin and .idx), datatrove
(.ds and .ds.index). All numbers are little-endian.

An index is untrusted input: every count, size and offset is compared with the sizes of the files before it is used, so
a file that was cut or that belongs to another index raises `DataError`.
"""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.data.sources.readers import file_errors, open_file
from nsa.data.sources.text import expand_paths
from nsa.errors import DataError, reworded
from nsa.files import expand_home

# By their codes in a Megatron index. Codes 6 and 7 are floating-point numbers.
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MMAP_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, entries of the document index
_LEGACY_HEAD = struct.Struct("<8sQQQQQQ")  # magic, version, dtype, token bytes, sequences, dimensions, documents
_MMAP_MAGIC, _LEGACY_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_LARGEST_METADATA = 1 << 16
AGAIN = "copy or write both files again"


@dataclass(frozen=True)
class TokenIndex:
    """The documents of a file of tokens: document d has the tokens from `ends[d - 1]` (0 for the first) to `ends[d]`.

    `made_with` is the name of the tokenizer, if the corpus names one.
    """

    path: Path  # of the tokens
    dtype: np.dtype[np.integer]
    ends: NDArray[np.int64]
    made_with: str = ""


def read_indexes(kind: str, paths: Sequence[str]) -> list[TokenIndex]:
    """Reads the indexes of all files in `data.paths`: files, folders or globs. Megatron's own notation for a pair, its
    path without .bin and .idx, works too."""
    suffix, read = FORMATS[kind]
    if kind == "megatron":
        paths = [_index_of(entry) for entry in paths]
    return [read(path) for path in expand_paths(paths, (suffix,), f"{suffix} file")]


def _index_of(entry: str) -> str:
    index = f"{entry.removesuffix('.bin')}.idx"
    with file_errors(Path(entry)):
        return index if expand_home(index).is_file() else entry


def read_megatron(path: Path) -> TokenIndex:
    with open_file(path) as file, reworded(DataError, f"{path}: is damaged", AGAIN, (ValueError, struct.error)):
        head = file.read(_LEGACY_HEAD.size)
        if head.startswith(_MMAP_MAGIC):
            _, version, code, count, num_bounds = _MMAP_HEAD.unpack(head[: _MMAP_HEAD.size])
            start, columns = _MMAP_HEAD.size, [("<i4", count), ("<i8", count), ("<i8", num_bounds)]
        elif head.startswith(_LEGACY_MAGIC):
            _, version, code, itemsize, count, num_sizes, num_bounds = _LEGACY_HEAD.unpack(head)
            start = _LEGACY_HEAD.size
            columns = [("<i8", count + 1), ("<i8", count + 1), ("<i8", num_sizes), ("<i8", num_bounds)]
        else:
            raise DataError(f"{path}: is not an index of Megatron-LM: it starts with {head[:9]!r}; name other files")
        if version != 1:
            raise DataError(f"{path}: has format version {version}, this program reads 1; write it with another tool")
        if code not in _DTYPES:
            raise DataError(f"{path}: has dtype code {code}, and integers have {', '.join(map(str, _DTYPES))}; {AGAIN}")
        dtype: np.dtype[np.integer] = np.dtype(_DTYPES[code])
        needed = start + sum(np.dtype(kind).itemsize * length for kind, length in columns)
        _check_size(path, needed, os.fstat(file.fileno()).st_size, f"{count} sequences")
        file.seek(start)
        found = [np.fromfile(file, kind, length) for kind, length in columns]
        if len(found[-1]) != num_bounds:
            raise ValueError("it became shorter")
    *sequences, bounds = found
    if head.startswith(_LEGACY_MAGIC):
        dimensions, offsets, sizes = sequences
        if itemsize != dtype.itemsize or num_sizes != count or (dimensions != np.arange(count + 1)).any():
            raise DataError(f"{path}: its sequences are not rows of tokens of {dtype.itemsize} bytes; {AGAIN}")
    else:
        sizes = sequences[0].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        is_next = sequences[1] == offsets[:-1] * dtype.itemsize
        _check_each(path, "sequence", is_next, "does not start where the last one ends")
    tokens = path.with_suffix(".bin")
    is_sized = (offsets[1:] >= offsets[:-1]) & (np.diff(offsets) == sizes)
    _check_each(path, "sequence", is_sized, "has another size than its place")
    _check_tokens(tokens, path, int(offsets[-1]) * dtype.itemsize)
    if offsets[0] or not num_bounds or bounds[0] or bounds[-1] != count:
        raise DataError(f"{path}: its documents do not contain all of its {count} sequences; {AGAIN}")
    _check_each(path, "document", bounds[1:] >= bounds[:-1], "ends before it starts")
    return TokenIndex(tokens, dtype, offsets[bounds[1:]])


def read_datatrove(path: Path) -> TokenIndex:
    """`path` is the .ds file. Its tokens have 2 or 4 bytes, as the number of tokens in the index tells."""
    index, loss, about = (path.with_name(f"{path.name}.{kind}") for kind in ("index", "loss", "metadata"))
    if loss.exists():
        raise DataError(f"{path}: has a loss mask, {loss.name}, which is not read; remove it to train on every token")
    with open_file(index) as file:
        content = file.read()
    if len(content) % 8:
        raise DataError(f"{index}: has {len(content)} bytes, which is not a multiple of 8; {AGAIN}")
    ends = np.frombuffer(content, "<u8")
    _check_each(index, "document", ends[1:] >= ends[:-1], "ends before it starts", first=1)
    count = int(ends[-1]) if len(ends) else 0
    name, itemsize = _read_metadata(about, count) if about.exists() else ("", None)
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    if itemsize is None:
        itemsize = 4 if size == 4 * count else 2
    _check_tokens(path, index, count * itemsize)
    return TokenIndex(path, np.dtype(f"<u{itemsize}"), ends.astype(np.int64), name)


def _read_metadata(path: Path, count: int) -> tuple[str, int | None]:
    """Returns the name of the tokenizer and the bytes of a token, which older versions do not write."""
    with open_file(path) as file:
        lines = file.read(_LARGEST_METADATA).decode("utf-8", errors="replace").split("\n")
    name, _, itemsize = lines[0].rpartition("|")
    if itemsize not in ("2", "4"):
        name, itemsize = lines[0], ""
    if len(lines) < 2 or lines[1] != str(count):
        raise DataError(f"{path}: says {''.join(lines[1:2])!r} tokens, the index says {count}; {AGAIN}")
    return name, int(itemsize) if itemsize else None


FORMATS: dict[str, tuple[str, Callable[[Path], TokenIndex]]] = {
    "megatron": (".idx", read_megatron),
    "datatrove": (".ds", read_datatrove),
}


def _check_each(path: Path, what: str, is_right: NDArray[Any], otherwise: str, first: int = 0) -> None:
    if not is_right.all():
        raise DataError(f"{path}: {what} {first + int(np.argmin(is_right))} {otherwise}; {AGAIN}")


def _check_tokens(path: Path, index: Path, wanted: int) -> None:
    with open_file(path) as file:
        _check_size(path, wanted, os.fstat(file.fileno()).st_size, index.name)


def _check_size(path: Path, wanted: int, found: int, because: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} bytes and should have {wanted} ({because}); {AGAIN}")
