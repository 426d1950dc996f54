"""Sources of local files: the user's text, JSON lines and parquet files, or Python's standard library."""

import io
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, cast

from nsa.data.sources import readers
from nsa.data.sources.base import Skipped, Unit
from nsa.errors import DataError
from nsa.files import expand_home

RANGE_BYTES = 16 << 20  # bytes of a .jsonl file in one unit
UNPACKED_RATIO = 3  # approximate ratio of text to its compressed file
KINDS = (".txt", ".jsonl")  # plain or compressed
SUFFIXES = (*KINDS, *(kind + packed for kind in KINDS for packed in readers.CODECS), ".parquet")
# For messages: " or ".join(SUFFIXES) would hide the two most common suffixes.
READABLE = ".txt or .jsonl file, plain or as .gz or .zst, and no .parquet file"
# Folders of the standard library with installed packages, or with tests, whose files are deliberately unusual.
PYTHON_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class TextSource:
    """One document per .txt file, .jsonl line or .parquet row.

    Units are files, row groups of a .parquet file, or ranges of `range_bytes` of an uncompressed .jsonl file, with the
    lines that start in them.
    """

    name = "text"

    def __init__(self, paths: Sequence[str], text_field: str = "text", *, range_bytes: int = RANGE_BYTES):
        self.paths = list(paths)
        self.text_field = text_field
        self.range_bytes = range_bytes

    def units(self) -> Sequence[Unit]:
        return [unit for path in expand_paths(self.paths) for unit in self._units_of(path)]

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        path = Path(unit.path)
        kind, codec = kind_and_codec(path)
        with readers.open_file(path, readers.BLOCK_BYTES if kind == ".jsonl" else -1) as file:
            if kind == ".parquet":
                yield from readers.parquet_documents(unit.path, file, unit.part, self.text_field, skipped)
                return
            size = os.fstat(file.fileno()).st_size
            if size < unit.stop:
                raise DataError(
                    f"{path}: has {size} bytes and had at least {unit.stop} before; files must not change during a run"
                )
            if codec:
                file = cast(BinaryIO, io.BufferedReader(readers.Unpacked(unit.path, file, codec), readers.BLOCK_BYTES))
            if kind == ".txt":
                yield from readers.text_document(unit.path, file, skipped)
            elif codec:
                yield from readers.jsonl_documents(unit.path, file, self._text_of, skipped)
            else:
                yield from readers.jsonl_documents(unit.path, file, self._text_of, skipped, unit.start, unit.stop)

    def fingerprint(self) -> str:
        found = readers.files_fingerprint(expand_paths(self.paths))
        return found if self.text_field == "text" else f"{found} {self.text_field}"

    def _text_of(self, record: Any) -> str | None:
        """Returns the document in a parsed line of a .jsonl file; None if it has none."""
        return readers.text_in(record, self.text_field)

    def _units_of(self, path: Path) -> list[Unit]:
        kind, codec = kind_and_codec(path)
        name = str(path)
        if kind == ".parquet":
            with readers.open_file(path) as file:
                return readers.parquet_units(name, file, self.text_field)
        with readers.file_errors(path):
            size = path.stat().st_size
        if codec:
            return [Unit(name, stop=size, size=UNPACKED_RATIO * size)]
        if kind == ".txt":
            if size > readers.MAX_TEXT_BYTES:
                raise readers.text_too_long(name)
            return [Unit(name, stop=size, size=size)]
        starts = range(0, size, self.range_bytes)
        stops = [*starts[1:], size]
        return [Unit(name, i, a, b, b - a) for i, (a, b) in enumerate(zip(starts, stops, strict=False))]


class PythonSource:
    """One document per .py file below `root`, by default the standard library, which exists on every machine."""

    name = "python"

    def __init__(self, root: Path | None = None):
        self.root = root or Path(sysconfig.get_paths()["stdlib"])

    def units(self) -> Sequence[Unit]:
        return [Unit(str(path), stop=size, size=size) for path in self._paths() for size in [path.stat().st_size]]

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        # The user did not choose these files one by one, so a broken file is skipped instead of refused.
        try:
            text = Path(unit.path).read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            skipped["cannot be read" if isinstance(error, OSError) else readers.NOT_UTF8] += 1
            return
        if readers.is_text(text, skipped):
            yield text

    def fingerprint(self) -> str:
        return readers.files_fingerprint(self._paths())

    def _paths(self) -> list[Path]:
        found = []
        for here, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name not in PYTHON_SKIPPED]
            found += [Path(here, name) for name in names if name.endswith(".py")]
        return sorted(path for path in found if path.is_file())


def expand_paths(paths: Sequence[str], suffixes: tuple[str, ...] = SUFFIXES, readable: str = READABLE) -> list[Path]:
    """Returns every regular file in `data.paths` that has one of the suffixes, each once, in order."""
    found: dict[Path, None] = {}
    for entry in paths:
        path = expand_home(entry)
        with readers.file_errors(path):
            found.update(dict.fromkeys(_named_by(entry, path, suffixes, readable)))
    return list(found)


def _named_by(entry: str, path: Path, suffixes: tuple[str, ...], readable: str) -> list[Path]:
    found: Iterable[Path]
    if path.is_dir():
        found, otherwise = files_below(path), f"the folder {entry} contains no {readable}; name another"
    elif path.is_file():
        found, otherwise = [path], f"{entry} ends in none of {', '.join(suffixes)}; convert it or rename it"
    elif has_magic(entry):
        found, otherwise = _matching(path), f"{entry} matches no {readable}; check the pattern"
    elif path.exists():
        found, otherwise = [], f"{entry} is neither a regular file nor a folder; write it to a file first"
    else:
        raise no_such_path(entry)
    chosen = [path for path in found if path.name.lower().endswith(suffixes) and path.is_file()]
    if not chosen:
        raise DataError(f"data.paths: {otherwise}")
    return sorted(chosen, key=lambda path: path.parts)


def no_such_path(entry: str) -> DataError:
    return DataError(f"data.paths: no such file or folder: {entry}; relative paths start at {Path.cwd()}")


def kind_and_codec(path: Path) -> tuple[str, str | None]:
    """Returns the kind, .txt, .jsonl or .parquet, and the compression, if any."""
    suffixes = path.name.lower().split(".")[-2:]
    codec = readers.CODECS.get("." + suffixes[-1])
    return "." + (suffixes[0] if codec else suffixes[-1]), codec


def files_below(folder: Path) -> Iterator[Path]:
    """Yields every file below a folder. Follows links to folders, but enters each folder once: links may form cycles.

    Follows links after the rest of the tree, so that a file is listed under its real name if it has one.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"data.paths: the folder {error.filename} cannot be searched: {error.strerror}; fix it or name others"
        ) from None

    waiting, entered = [folder], set()
    for top in waiting:
        for here, folders, names in os.walk(top, onerror=refuse):
            real = os.path.realpath(here)
            if real in entered:
                folders.clear()
                continue
            entered.add(real)
            waiting += [link for name in sorted(folders) if (link := Path(here, name)).is_symlink()]
            yield from (Path(here, name) for name in names)


def _matching(pattern: Path) -> Iterator[Path]:
    """Yields the files that a glob matches. glob() itself would follow cycles of links at a **."""
    parts = pattern.parts
    if "**" not in parts:
        yield from map(Path, glob(str(pattern)))  # noqa: PTH207
        return
    first = parts.index("**")
    for base in sorted(glob(str(Path(*parts[:first])))):  # noqa: PTH207
        for path in files_below(Path(base)):
            if matches(path.relative_to(base).parts, parts[first:]):
                yield path


def matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a glob, both in parts; `**` matches any number of folders. Tracks all possible matches."""
    shown = [not name.startswith(".") for name in names]  # hidden names need a dot in the pattern, as in glob()
    reached = {0}  # numbers of names that the patterns so far can match
    for pattern in patterns:
        following: set[int] = set()
        for at in reached:
            if pattern == "**":
                while at not in following:
                    following.add(at)
                    at += at < len(names) and shown[at]
            elif at < len(names) and (shown[at] or pattern.startswith(".")) and fnmatchcase(names[at], pattern):
                following.add(at + 1)
        reached = following
    return len(names) in reached
