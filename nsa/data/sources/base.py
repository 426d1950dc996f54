"""What every source of documents offers: a fixed list of units, and the documents of each.

A unit is read at once and by itself, by any thread or process: a file, a range of a file's lines, a row group. Its
documents come in a fixed order. What cannot be read raises a `DataError` with file and position. Documents that are
skipped are counted by reason, never dropped silently.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 32 << 20  # of a line or a row: anything longer is no document, and would not fit into memory twice

Skipped = Counter[str]  # how many documents a source skipped, by reason


@dataclass(frozen=True)
class Unit:
    """`part` numbers the units of one file; `start` and `stop` are bytes of a .jsonl range, rows of a row group.

    `size` is about how many bytes of text it holds: for progress, and for shares of equal work.
    """

    path: str
    part: int = 0
    start: int = 0
    stop: int = 0
    size: int = 0


def is_offline() -> bool:
    """Whether the user wants no network, as huggingface_hub reads the variables, but at the time of the call."""
    given = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "ON", "YES", "TRUE") for value in given)


def groups(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items of at most `limit` together, or one that is larger."""
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
    """A file by its name in the repository."""

    name: str
    size: int
    content_id: str


class Source(Protocol):
    """Documents in units. Can be pickled: worker processes get a copy."""

    name: str

    def units(self) -> Sequence[Unit]:
        """Every unit, in an order that depends on names alone. Reads no document."""
        ...

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        """The documents of a unit, none of them empty."""
        ...

    def fingerprint(self) -> str:
        """Changes when files are added, removed or changed, and with the field that is read of them."""
        ...
