"""The interface of all sources of documents: a fixed list of units, and the documents of each unit.

A unit is a file, a range of a file's lines or a row group. Any thread or process can read it independently. Its
documents have a fixed order. A read error raises `DataError` with file and position. Skipped documents are counted by
reason, never dropped silently.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 32 << 20  # maximum of a line or a row: a longer one is probably not a document

Skipped = Counter[str]  # number of documents that a source skipped, by reason


@dataclass(frozen=True)
class Unit:
    """`part` numbers the units of one file; `start` and `stop` are bytes of a .jsonl range or rows of a row group.

    `size` is the approximate number of bytes of text, for progress and for dividing the work.
    """

    path: str
    part: int = 0
    start: int = 0
    stop: int = 0
    size: int = 0


def is_offline() -> bool:
    """Whether the user disabled network access. Reads the variables of huggingface_hub at the time of the call."""
    given = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "ON", "YES", "TRUE") for value in given)


def groups(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields groups of consecutive items with a total size of at most `limit`, or of one larger item."""
    group: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group


@dataclass(frozen=True)
class Entry:
    """A file of a repository."""

    name: str
    size: int
    content_id: str


class Source(Protocol):
    """Documents in units. Sources can be pickled, for worker processes."""

    name: str

    def units(self) -> Sequence[Unit]:
        """Returns all units, in an order that depends on names alone. Reads no document."""

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        """Yields the documents of a unit, without empty ones."""

    def fingerprint(self) -> str:
        """Returns a hash that changes when files are added, removed or changed, or another text field is read."""
