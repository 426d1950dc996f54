"""What every source of documents offers: a fixed list of units, and the documents of each.

A unit is read at once and by itself, by any thread or process: a file, a range of a file's lines, a row group. Its
documents come in a fixed order. What cannot be read is a `DataError` with file and place; documents that are left
out are counted with the reason, never dropped unseen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MAX_DOCUMENT_BYTES = 32 << 20  # of a line or a row: anything longer is no document, and would not fit into memory twice


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


@dataclass
class Skipped:
    """How many documents a source left out, by reason."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, count: int = 1) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def merge(self, other: "Skipped") -> None:
        for reason, count in other.reasons.items():
            self.add(reason, count)


@dataclass
class Tally:
    """How far something that takes long has come: `done` of `of`, which is None while files are being listed."""

    what: str  # "row groups tokenised"
    done: int = 0
    of: int | None = None

    @property
    def is_open(self) -> bool:
        return self.of is None or self.done < self.of

    def expect(self, count: int) -> None:
        """So many more are to be done, or fewer when it is negative."""
        self.of = (self.of or 0) + count

    def __str__(self) -> str:
        return "files are being listed" if self.of is None else f"{self.done:,} of {self.of:,} {self.what}"


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
        """Another one when files were added, taken away or changed."""
        ...


class RemoteSource(Source, Protocol):
    """A source that may not answer. `listed` tells how far `units` has come."""

    listed: Tally

    @property
    def commit(self) -> str | None:
        """The state of the repository that is read; None where there is none."""
        ...

    def waiting_for(self) -> str | None:
        """What is waited for and since when; None when nothing is slow."""
        ...

    def be_patient(self, deadline_s: float) -> None:
        """How long an operation may go without any success, from now on."""
        ...

    def give_up(self) -> None:
        """What is under way in other threads ends soon, with an error."""
        ...
