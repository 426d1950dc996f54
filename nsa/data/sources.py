"""Where documents come from: the running Python's standard library, or the user's files.

A source yields documents in a fixed order. What cannot be read is a `DataError` with file and place; documents
without text are counted, never dropped unseen.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from nsa.errors import DataError

TEXT_SUFFIXES = (".txt", ".jsonl")
# Folders of the standard library that hold installed packages, or tests full of deliberate oddities.
PYTHON_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Skipped:
    """How many documents a source left out, by reason."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def python_documents(skipped: Skipped, root: Path | None = None) -> Iterator[str]:
    """The standard library's .py files in the order of their paths: real text on every machine."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = (p for p in root.rglob("*.py") if not PYTHON_SKIPPED & set(p.relative_to(root).parts))
    for path in sorted(paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.add("not UTF-8")
            continue
        except OSError:
            skipped.add("cannot be read")
            continue
        if text.strip():
            yield text
        else:
            skipped.add("empty")


def text_documents(paths: list[str], text_field: str, skipped: Skipped) -> Iterator[str]:
    """A document per .txt file and per .jsonl line, over files, folders (searched through) and globs."""
    for path in expand_paths(paths):
        documents = _jsonl_texts(path, text_field) if path.suffix == ".jsonl" else [_read_utf8(path)]
        for text in documents:
            if text.strip():
                yield text
            else:
                skipped.add("empty")


def expand_paths(paths: list[str]) -> list[Path]:
    """Every file that `data.paths` names, each once, in order."""
    found: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
            if not inside:
                raise DataError(
                    f"data.paths: the folder {entry} holds no {' or '.join(TEXT_SUFFIXES)} file; name another"
                )
        elif path.is_file():
            if path.suffix not in TEXT_SUFFIXES:
                raise DataError(
                    f"data.paths: {entry} is neither {' nor '.join(TEXT_SUFFIXES)}; convert it or rename it"
                )
            inside = [path]
        elif has_magic(entry):
            inside = sorted(
                Path(p)
                for p in glob(str(path), recursive=True)  # noqa: PTH207
                if Path(p).suffix in TEXT_SUFFIXES
            )
            if not inside:
                raise DataError(f"data.paths: no {' or '.join(TEXT_SUFFIXES)} file matches {entry}; check the pattern")
        else:
            raise DataError(f"data.paths: no such file or folder: {entry}; relative paths start at {Path.cwd()}")
        found.update(dict.fromkeys(inside))
    return list(found)


def _read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not valid UTF-8; convert the file or take it out of data.paths"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; fix it or take it out of data.paths") from None


def _jsonl_texts(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise DataError(
                f"{path}, line {number}: not valid JSON: {error}; fix the line or take the file out of data.paths"
            ) from None
        if not isinstance(record, dict) or text_field not in record:
            raise DataError(
                f"{path}, line {number}: no field {text_field!r}; set data.text_field to the one that holds the text"
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(
                f"{path}, line {number}: field {text_field!r} must be a text, got {type(text).__name__}; "
                "set data.text_field to the one that holds the text"
            )
        # A lone surrogate survives JSON but is no text.
        yield text.encode("utf-8", errors="replace").decode("utf-8")
