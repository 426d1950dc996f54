"""Sequences from units that are tokenised while they stream. Tokens are not stored, and the order is still exact.

The units of an epoch are shuffled by (seed, epoch) and dealt to lanes in turn. A lane is an independent stream: it
concatenates its units, with the documents of each shuffled by (seed, epoch, unit), and cuts them into sequences.
Sequence n of the run is the next sequence of lane n % lanes. So ranks that read different lanes read different units,
and neither the number of ranks nor the number of threads changes a token.

The position of a sequence follows from the lengths of the units before it in its lane. A length is known after its unit
was read, and a file of the run stores it, so that a resumed run finds its position at once. Without the file the run
reads these units again: slower, to the same position.
"""

import re
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nsa.data.corpus import Corpus, Tokenised, in_validation, join, tokenise_unit
from nsa.data.sequences import Borders, Row, Sequences, random_order
from nsa.data.sources.base import Skipped
from nsa.data.sources.dataset import HubDataset
from nsa.data.threads import DaemonPool, Progress, in_threads
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError, DataUnavailableError
from nsa.files import read_regular, regular

INDEX_PREFIX = "data_index_rank"
_LINE = re.compile(r"^(\d{1,20}) (\d{1,20}) ([0-9a-f]{8})\n", re.MULTILINE)  # unit, tokens, checksum
_UNIT_KEYS = 1 << 61  # separates the random keys of document orders inside a unit from the keys of unit orders
VALIDATION_UNITS = 512  # maximum number of units that are searched for validation documents


class LengthIndex:
    """The number of training tokens of every unit that any rank has read since the run first started; a line per unit.

    Damaged lines and files about other data are ignored, which costs only time.
    """

    def __init__(self, folder: Path | None, rank: int, fingerprint: str):
        self.lengths: dict[int, int] = {}
        self._path = folder / f"{INDEX_PREFIX}{rank}.txt" if folder else None
        self._head = f"lengths {fingerprint}\n"
        self._lock = threading.Lock()
        found = sorted(folder.glob(f"{INDEX_PREFIX}*.txt")) if folder else []
        self._has_begun = self._path in [path for path in found if self._read(path)]

    def _read(self, path: Path) -> bool:
        """Reads the lengths in a file. Returns whether the file is about the same data."""
        try:
            text = read_regular(path).decode("ascii", errors="replace")
        except OSError:
            return False
        if not text.startswith(self._head):
            return False
        for unit, length, check in _LINE.findall(text):
            if check == _check(unit, length):
                self.lengths[int(unit)] = int(length)
        return True

    def put(self, unit: int, length: int) -> None:
        with self._lock:
            if unit in self.lengths:
                return
            self.lengths[unit] = length
            if self._path is None:
                return
            try:
                with open(self._path, "a" if self._has_begun else "w", encoding="ascii", opener=regular) as file:
                    self._has_begun = True
                    head = "" if file.tell() else self._head  # the file may have been removed
                    file.write(f"{head}{unit} {length} {_check(str(unit), str(length))}\n")
            except OSError:
                self._path = None  # the run works without this cache

    def close(self) -> None:
        """Stops writing to the file; other threads may still read units."""
        with self._lock:
            self._path = None


def _check(unit: str, length: str) -> str:
    return format(zlib.crc32(f"{unit} {length}".encode()), "08x")


class UnitReader:
    """Tokenises the units of a source, prefetched by threads. With `threads` = 0 the calling thread reads on demand."""

    def __init__(self, source: HubDataset, tokenizer: Tokenizer, fraction: float, threads: int, index: LengthIndex):
        self.source, self.tokenizer, self.fraction = source, tokenizer, fraction
        self.units = source.units()
        self.threads, self.index = threads, index
        self.tokenised = Progress("row groups tokenised", total=0)
        self.skipped = Skipped()
        self._pool = DaemonPool(threads, "data")
        self._pending: dict[int, Future[Tokenised[TokenArray]]] = {}
        self._lock = threading.Lock()

    def prefetch(self, unit: int) -> None:
        """Starts reading a unit, if there are threads and the unit is not pending."""
        with self._lock:
            if self.threads and unit not in self._pending:
                self._pending[unit] = self._pool.submit(partial(self._read, unit))
                self._add_to_total()

    def read(self, unit: int) -> Tokenised[TokenArray]:
        """Returns all documents of a unit, for training and validation."""
        with self._lock:
            pending = self._pending.pop(unit, None)
            if pending is None:
                self._add_to_total()
            elif pending.done() and isinstance(pending.exception(), DataUnavailableError):
                pending = None  # the request may have failed long ago; the server may answer now
        return pending.result() if pending else self._read(unit)

    def discard(self, unit: int) -> None:
        """Forgets a unit that was requested and is not needed."""
        with self._lock:
            self._pending.pop(unit, None)

    def _add_to_total(self) -> None:
        self.tokenised.total = (self.tokenised.total or 0) + 1

    def _read(self, unit: int) -> Tokenised[TokenArray]:
        found = tokenise_unit(self.source, self.units[unit], self.tokenizer, self.tokenised)
        with self._lock:
            self.tokenised.done += 1
            self.skipped.update(found.skipped)
        length = int(found.lengths[~in_validation(found.keys, self.fraction)].sum())
        known = self.index.lengths.get(unit)
        if known is not None and known != length:
            raise DataError(
                f"{self.units[unit].path}, part {self.units[unit].part}: had {known} tokens when this run first read "
                f"it and has {length} now; the file changed, and the run cannot continue at its position"
            )
        self.index.put(unit, length)
        return found

    def close(self) -> None:
        self._pool.close()
        self.index.close()


class _Lane:
    """The token stream of one lane: where each visit of a unit starts, and the two units in use."""

    def __init__(
        self, number: int, lanes: int, seed: int, reader: UnitReader, order: Callable[[int], NDArray[np.int64]]
    ):
        self.number, self.lanes, self.seed, self.reader, self.order = number, lanes, seed, reader, order
        self.per_epoch = (len(reader.units) - number + lanes - 1) // lanes
        self.starts = [0]  # token at which the k-th visit starts; the last entry is the end of the known part
        self._requested = 0  # number of visits that were requested
        self._oldest = 0  # visits before it were read, or passed: a rank may skip units whose length is known
        self._visit = lru_cache(maxsize=2)(self._read_visit)

    def unit(self, visit: int) -> tuple[int, int]:
        """Returns the epoch and the unit of a visit."""
        epoch, place = divmod(visit, self.per_epoch)
        return epoch, int(self.order(epoch)[self.number + self.lanes * place])

    def visit_at(self, position: int) -> int:
        """Returns the visit that contains the token at `position`. Reads units whose length is not known yet."""
        while not self._is_known(position):
            self._visit(len(self.starts) - 1)
        return bisect_right(self.starts, position) - 1

    def _is_known(self, position: int) -> bool:
        """Extends `starts` as far as lengths are known. Returns whether that is beyond `position`."""
        while self.starts[-1] <= position:
            visit = len(self.starts) - 1
            length = self.reader.index.lengths.get(self.unit(visit)[1])
            if length is None:
                return False
            if visit >= self.per_epoch and self.starts[self.per_epoch] == 0:
                raise DataError(
                    f"data.source: {self.per_epoch} of the {len(self.reader.units)} parts of {self.reader.source.name} "
                    "contain no training document; use more text, or a smaller data.validation_fraction"
                )
            self.starts.append(self.starts[-1] + length)
        return True

    def prefetch(self, position: int, ahead: int) -> None:
        """Requests the unit of the token at `position`, if it is known, and the next `ahead` units."""
        self._is_known(position)
        visit = bisect_right(self.starts, position) - 1
        for requested in range(max(visit, self._requested), visit + ahead + 1):
            self.reader.prefetch(self.unit(requested)[1])
            self._requested = requested + 1

    def read(self, start: int, count: int) -> tuple[TokenArray, Borders]:
        tokens = np.empty(count, dtype=self.reader.tokenizer.dtype)
        borders: list[NDArray[np.int64]] = []
        filled = 0
        while filled < count:
            position = start + filled
            visit = self.visit_at(position)
            unit_tokens, unit_borders = self._visit(visit)
            for passed in range(self._oldest, min(visit, self._requested)):
                self.reader.discard(self.unit(passed)[1])
            self._oldest = max(self._oldest, visit)
            offset = position - self.starts[visit]
            part = min(count - filled, len(unit_tokens) - offset)
            tokens[filled : filled + part] = unit_tokens[offset : offset + part]
            first, last = np.searchsorted(unit_borders, (offset, offset + part))
            borders.append(unit_borders[first:last] - offset + filled)
            filled += part
        return tokens, np.concatenate(borders)

    def _read_visit(self, visit: int) -> tuple[TokenArray, NDArray[np.int64]]:
        """Returns the tokens of the unit's training documents in the order of this visit, and where each starts."""
        epoch, unit = self.unit(visit)
        found = self.reader.read(unit)
        [tokens] = found.pieces
        training = found.select(~in_validation(found.keys, self.reader.fraction))
        order = random_order(training.num_documents, self.seed, epoch + _UNIT_KEYS + (unit << 20))
        starts, lengths = training.starts[order], training.lengths[order]
        parts = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return np.concatenate([tokens[:0], *parts]), np.cumsum(lengths) - lengths


class StreamedSequences(Sequences):
    def __init__(self, reader: UnitReader, seq_len: int, seed: int, lanes: int):
        self.reader, self.seq_len, self.lanes, self.name = reader, seq_len, lanes, reader.source.name
        units = len(reader.units)
        order = lru_cache(maxsize=4)(lambda epoch: random_order(units, seed, epoch))
        self._lanes = [_Lane(number, lanes, seed, reader, order) for number in range(lanes)]

    def row(self, number: int) -> Row:
        nth, lane = divmod(number, self.lanes)
        return self._row_of(*self._lanes[lane].read(nth * self.seq_len, self.seq_len + 1))

    def prefetch(self, numbers: Iterable[int]) -> None:
        wanted = [(self._lanes[n % self.lanes], n // self.lanes * self.seq_len) for n in numbers]
        for ahead in (0, 1):  # current units first, then the next ones: the first batch waits for its own units only
            for lane, position in wanted:
                lane.prefetch(position, ahead)


def choose_lanes(batch_size: int, units: int, most: int = 32) -> int:
    """Returns the largest number of lanes that divides the sequences of a step, so that ranks keep their lanes."""
    return max(n for n in range(1, min(most, units, batch_size) + 1) if batch_size % n == 0)


def collect_validation(reader: UnitReader, tokens: int) -> Corpus:
    """Returns validation documents with at least `tokens` tokens, or all that exist, from units in a fixed order."""
    found: list[Tokenised[TokenArray]] = []
    total = 0
    order = random_order(len(reader.units), 0, 0)[:VALIDATION_UNITS].tolist()
    with closing(in_threads(reader.read, order, reader.threads)) as parts:
        for part in parts:
            found.append(part.only(in_validation(part.keys, reader.fraction)))
            total += int(found[-1].lengths.sum())
            if total >= tokens:
                break
    everything = join(found, reader.tokenizer)
    corpus = everything.select(np.ones(len(everything.keys), dtype=bool))
    if not corpus.num_documents:
        raise DataError(
            f"data.validation_fraction: no validation document in {len(found):,} row groups; "
            "choose a larger fraction, or 0 for no validation"
        )
    return corpus
