"""Reads documents from open files: plain text, JSON lines (also compressed) and parquet.

Memory stays bounded whatever a file contains or claims. A read error raises `DataError` with file and position. Skipped
documents are counted by reason. The functions keep no state between calls, so any number of threads may use them.
"""

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from nsa.data.sources.base import MAX_DOCUMENT_BYTES, Skipped, Unit
from nsa.errors import DataError, reworded

MAX_TEXT_BYTES = 1 << 30  # maximum of a .txt file, which is one document
MAX_CHUNK_BYTES = 2 << 30  # maximum of one row group, which is processed as a whole
BLOCK_BYTES = 1 << 20  # bytes of one read
# Real text compresses three- to tenfold. A file must exceed both limits, so that a short repetitive file passes.
BOMB_BYTES = 256 << 20
BOMB_RATIO = 200
# One long text in a dictionary can represent thousands of rows, so each row may unpack to the size of its whole row
# group. A batch has few enough rows to fit into memory then, and enough rows for speed.
BATCH_BYTES = 128 << 20
BATCH_ROWS = (4, 1024)
DICTIONARY_ROWS = 1 << 20  # rows of a batch that stays dictionary-encoded

GET_AGAIN = "get the file again or remove it from data.paths"
NAME_FIELD = "set data.text_field to the one that contains the text"
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())
CODECS = {".gz": "gzip", ".zst": "zstd"}
EMPTY, NO_TEXT, NOT_UTF8, TOO_LONG = "empty", "no text", "not UTF-8", f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"


def file_errors(path: Path) -> AbstractContextManager[None]:
    """Converts an OSError to a `DataError` with the reason."""
    return reworded(DataError, f"{path}: cannot be read", "fix it or remove it from data.paths")


@contextmanager
def open_file(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """Opens a regular file for reading. Raises `DataError` if it is missing or not regular, or if a read fails."""
    with file_errors(path):
        # Opening a pipe would block until there is a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("not a regular file")
        with path.open("rb", buffering=buffering) as file:
            yield file


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Hashes names, sizes and modification times. Reading the contents could take too long."""
    digest = sha256()
    for path in sorted(paths, key=lambda p: p.parts):
        with file_errors(path):
            status = path.stat()
        digest.update(os.fsencode(path) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


class Unpacked(io.RawIOBase):
    """The decompressed contents of a gzip or zstd file: all of its members or frames in order.

    Raises `DataError` if the file is truncated, damaged, followed by other data, or expands more than text does.
    """

    def __init__(self, name: str, file: BinaryIO, codec: str):
        self._name, self._file, self._codec = name, file, codec
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        broken = f"{self._name}: its {self._codec} data is broken after {self._size} bytes of contents"
        with reworded(DataError, broken, GET_AGAIN, (pa.ArrowException, OSError)):
            block: bytes = self._stream.read(len(buffer))
        packed = self._file.tell()
        if not packed:
            raise DataError(f"{self._name}: is empty, a {self._codec} file never is; {GET_AGAIN}")
        self._size += len(block)
        _check_expansion(self._name, packed, self._size)
        buffer[: len(block)] = block
        return len(block)


def _check_expansion(place: str, packed: int, unpacked: int) -> None:
    if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * packed:
        raise DataError(
            f"{place}: expands more than {BOMB_RATIO}-fold ({packed} bytes give {unpacked} or more), which text does "
            "not; remove it from data.paths"
        )


def text_document(name: str, file: BinaryIO, skipped: Skipped) -> Iterator[str]:
    """Yields the whole file as one document, without a byte order mark."""
    data = bytearray()
    while block := file.read(BLOCK_BYTES):
        data += block
        if len(data) > MAX_TEXT_BYTES:
            raise text_too_long(name)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error.start) from None
    if is_text(text, skipped):
        yield text


def lines(file: BinaryIO, start: int = 0, stop: int = sys.maxsize) -> Iterator[tuple[int, bytes | None]]:
    """Yields offset and bytes of every line that starts in [start, stop); None instead of the bytes of a line longer
    than MAX_DOCUMENT_BYTES."""
    offset = max(start - 1, 0)
    if start:  # the line that contains `start` belongs to the previous range
        file.seek(offset)
        offset += _skip_line(file, stop - offset)
    while offset < stop and (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
        contents = line.removesuffix(b"\n")
        offset += len(line)
        if len(contents) <= MAX_DOCUMENT_BYTES:
            yield offset - len(line), contents
        else:
            yield offset - len(line), None
            offset += _skip_line(file, stop - offset)


def _skip_line(file: BinaryIO, limit: int) -> int:
    """Reads up to the start of the next line, or until `limit` bytes are read. Returns the number of bytes read."""
    size = 0
    while size < limit and (piece := file.readline(BLOCK_BYTES)):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def jsonl_documents(
    name: str,
    file: BinaryIO,
    text_of: Callable[[Any], str | None],
    skipped: Skipped,
    start: int = 0,
    stop: int = sys.maxsize,
) -> Iterator[str]:
    """Yields the texts of the lines that start in [start, stop). Errors name the line, or in a range the byte.

    `text_of` returns the text of the parsed line. It raises ValueError with problem and remedy."""
    for number, (offset, line) in enumerate(lines(file, start, stop), start=1):
        if line is None:
            skipped[TOO_LONG] += 1
            continue
        try:
            record = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(name, offset + error.start, "" if start else f" (line {number})") from None
        if not offset:
            record = record.removeprefix("\ufeff")
        if not record or record.isspace():
            continue
        try:
            text = text_of(_parsed(record))
        except ValueError as error:
            raise DataError(f"{name}, {f'byte {offset}' if start else f'line {number}'}: {error}") from None
        if is_text(text, skipped):
            yield text


def parquet_units(name: str, file: BinaryIO, text_field: str) -> list[Unit]:
    """Returns a unit per row group, from the footer alone.

    `part` is the row group, `start` and `stop` count rows, `size` is the unpacked size of all columns, nearly all of
    which is text. An `NSAError` from reading `file` is passed on, also in `parquet_documents`.
    """
    with _open_parquet(name, file) as parquet:
        _check_column(name, parquet, text_field)
        units, first = [], 0
        for row_group in range(parquet.num_row_groups):
            rows, size = _footer_sizes(name, file, parquet, row_group)
            units.append(Unit(name, row_group, first, first + rows, size))
            first += rows
    return units


def parquet_documents(name: str, file: BinaryIO, row_group: int, text_field: str, skipped: Skipped) -> Iterator[str]:
    """Yields the documents of a row group in order. Reads only the text column, in bounded batches."""
    packed = file.seek(0, os.SEEK_END)
    with _open_parquet(name, file, row_group) as parquet:
        # A dictionary column stays encoded until it is decoded, but every batch contains the whole dictionary.
        is_encoded = pa.types.is_dictionary(_check_column(name, parquet, text_field))
        if not 0 <= row_group < parquet.num_row_groups:
            raise pa.ArrowInvalid(f"it has {parquet.num_row_groups} row groups")
        rows, size = _footer_sizes(name, file, parquet, row_group)
        few = max(BATCH_ROWS[0], min(BATCH_BYTES // max(size, 1), BATCH_ROWS[1]))
        rows_read = unpacked = 0
        batch_rows = DICTIONARY_ROWS if is_encoded else few
        for batch in parquet.iter_batches(batch_rows, [row_group], [text_field], use_threads=False):
            texts = batch.column(0)
            rows_read += len(texts)
            for first in range(0, len(texts), few):
                part = texts.slice(first, few)
                part = part.dictionary_decode() if is_encoded else part
                unpacked += part.nbytes
                _check_expansion(f"{name}, row group {row_group}", packed, unpacked)
                if unpacked > MAX_CHUNK_BYTES:  # the footer may be wrong
                    raise _chunk_too_long(name, row_group, unpacked)
                yield from (text for text in _to_strings(part, skipped) if is_text(text, skipped))
        if rows_read != rows:
            raise pa.ArrowInvalid(f"{rows_read} rows instead of {rows}")


def text_too_long(name: str) -> DataError:
    return DataError(
        f"{name}: more than {MAX_TEXT_BYTES >> 20} MiB, too long for one document; split it, or make it a .jsonl with "
        "a document per line"
    )


def _parsed(record: str) -> Any:
    try:
        return json.loads(record)
    except (ValueError, RecursionError) as error:  # ValueError: also a number with thousands of digits
        raise ValueError(f"not valid JSON: {error}; fix the line or remove the file from data.paths") from None


def text_in(values: Any, text_field: str) -> str | None:
    """Returns the text in a field of a JSON object. Raises ValueError with problem and remedy."""
    if not isinstance(values, dict):
        kind = type(values).__name__
        remedy = f'write each line as {{"{text_field}": ...}}'
        raise ValueError(f"no field {text_field!r}: the line is a {kind}, not an object; {remedy}")
    if text_field not in values:
        raise ValueError(f"no field {text_field!r}; it has {_listed(values)}; {NAME_FIELD}")
    text = values[text_field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"field {text_field!r} must be a text, got {type(text).__name__}; {NAME_FIELD}")
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates


def _listed(names: Iterable[str]) -> str:
    return shorten(", ".join(names), 300, placeholder=" ...") or "none"


def is_text(text: str | None, skipped: Skipped) -> TypeGuard[str]:
    """Whether the text is a document. Counts it as skipped if not."""
    if text is None:
        skipped[NO_TEXT] += 1
    elif not text or text.isspace():
        skipped[EMPTY] += 1
    else:
        return True
    return False


def _not_utf8(name: str, byte: int, line: str = "") -> DataError:
    return DataError(f"{name}: byte {byte} is not valid UTF-8{line}; convert the file or remove it from data.paths")


@contextmanager
def _open_parquet(name: str, file: BinaryIO, row_group: int | None = None) -> Iterator[Any]:
    try:
        # Pre-buffering would also fetch the other columns of a remote file. Checksums are compared if there are any.
        with pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True) as parquet:
            yield parquet
    # The errors of arrow for damaged files: its own, which derive from ValueError and others, OSError for a truncated
    # file, MemoryError for an impossible size, UnicodeDecodeError for the name of a column.
    except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError) as error:
        place = "" if row_group is None else f", row group {row_group}"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name}{place}: cannot be read as parquet: {reason}; {GET_AGAIN}") from None


def _check_column(name: str, parquet: Any, text_field: str) -> Any:
    """Returns the type of the text column. Raises `DataError` unless there is exactly one and it contains text."""
    schema = parquet.schema_arrow
    remedy = NAME_FIELD
    if text_field not in schema.names:
        if (outer := text_field.split(".")[0]) in schema.names:
            remedy = f"a field inside {outer!r} cannot be read, only a column of text can"
        raise DataError(f"{name}: no column {text_field!r}; it has {_listed(schema.names)}; {remedy}")
    kind = schema.field(schema.names.index(text_field)).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if values not in TEXT_TYPES:
        texts = _listed(field.name for field in schema if field.type in TEXT_TYPES)
        raise DataError(
            f"{name}: column {text_field!r} must be a text, its type is {kind}; {remedy}; columns of text: {texts}"
        )
    # A nested field can have the same name with a dot in it, and would be read too.
    columns = sum(parquet.schema.column(i).path == text_field for i in range(len(parquet.schema)))
    if columns != 1:
        raise DataError(f"{name}: {columns} columns are named {text_field!r}; rename all but one")
    return kind


def _footer_sizes(name: str, file: BinaryIO, parquet: Any, row_group: int) -> tuple[int, int]:
    """Returns the rows and unpacked bytes of a row group according to the footer."""
    # Not of the text column alone: for some damaged footers pyarrow ends the process when asked for a column's size.
    group = parquet.metadata.row_group(row_group)
    rows, size = group.num_rows, group.total_byte_size
    if rows < 0 or size < 0:
        raise pa.ArrowInvalid(f"row group {row_group} has {rows} rows and {size} bytes in the footer")
    if size > MAX_CHUNK_BYTES:
        raise _chunk_too_long(name, row_group, size)
    _check_expansion(f"{name}, row group {row_group}", file.seek(0, os.SEEK_END), size)
    return rows, size


def _chunk_too_long(name: str, row_group: int, size: int) -> DataError:
    return DataError(
        f"{name}, row group {row_group}: unpacks to {size} bytes or more, over the limit of {MAX_CHUNK_BYTES}; write "
        "the file again with smaller row groups"
    )


def _to_strings(texts: Any, skipped: Skipped) -> Iterator[str | None]:
    """Yields the rows of an arrow array, None for missing values; skips rows that are too long or not UTF-8."""
    if texts.nbytes <= MAX_DOCUMENT_BYTES:  # no row can be too long
        with suppress(UnicodeDecodeError):
            yield from texts.to_pylist()
            return
    for text in texts:
        if text.is_valid and text.as_buffer().size > MAX_DOCUMENT_BYTES:
            skipped[TOO_LONG] += 1
            continue
        try:
            yield text.as_py()
        except UnicodeDecodeError:
            skipped[NOT_UTF8] += 1
