"""Training sequences by their number in the run: each a pure function of (seed, number).

`Cut` cuts a stream into sequences of S inputs and, one further, S targets; they come in an order drawn from
(seed, epoch), so that a batch mixes documents. What is left at an epoch's end, fewer than S tokens, is read in another
epoch's order or not at all. A separator stands before every document, so the last target of a document is "it ends
here" and every target counts.

`BestFit` keeps documents whole where they fit: each goes into the fullest sequence that has room, longer ones are cut
at S tokens, and what stays free is padding that no loss sees.

`Mixture` gives every number to one of several sources, in exactly the shares of their weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.data.corpus import Corpus
from nsa.data.stream import Borders, TokenStream, random_order

IGNORED = -100  # a target that does not count: cross-entropy's own mark
_SEQUENCE_KEYS = 1 << 63  # sets the keys of sequence orders apart from those of document orders
_MIXTURE_KEYS = 1 << 62
_PERIOD = 1000  # sequences after which a mixture has given every source exactly its share


@dataclass(frozen=True)
class Row:
    """One sequence: inputs and targets [S], and where in it documents begin, the first place always among them."""

    inputs: NDArray[np.integer]
    targets: NDArray[np.integer]
    starts: Borders


class Sequences(Protocol):
    @property
    def count(self) -> int | None: ...  # sequences in one epoch; None where they never end

    def row(self, number: int) -> Row: ...

    def num_targets(self, numbers: range) -> int:
        """Targets that count in these sequences."""
        ...

    def expect(self, numbers: Iterable[int]) -> None:
        """These are read next: whatever takes long may begin."""
        ...

    def shares(self, number: int) -> dict[str, int]:
        """Of the first `number` sequences, how many each source gave."""
        ...


class Cut:
    def __init__(self, stream: TokenStream, seq_len: int, seed: int, name: str = ""):
        self.stream, self.seq_len, self.seed, self.name = stream, seq_len, seed, name
        self._epoch_order = lru_cache(maxsize=2)(self._compute_epoch_order)

    @property
    def count(self) -> int | None:
        return None if self.stream.length is None else self.stream.length // self.seq_len

    def first_token(self, number: int) -> int:
        """Where in the stream a sequence starts."""
        if self.stream.length is None or self.count is None:
            return number * self.seq_len
        epoch, place = divmod(number, self.count)
        return epoch * self.stream.length + int(self._epoch_order(epoch)[place]) * self.seq_len

    def _compute_epoch_order(self, epoch: int) -> NDArray[np.int64]:
        assert self.count is not None
        return random_order(self.count, self.seed, epoch + _SEQUENCE_KEYS)

    def row(self, number: int) -> Row:
        tokens, borders = self.stream.read(self.first_token(number), self.seq_len + 1)
        return Row(tokens[:-1], tokens[1:], begin_with_zero(borders, self.seq_len))

    def num_targets(self, numbers: range) -> int:
        return len(numbers) * self.seq_len

    def expect(self, numbers: Iterable[int]) -> None:
        pass

    def shares(self, number: int) -> dict[str, int]:
        return {self.name: number}


def begin_with_zero(borders: Borders, seq_len: int) -> Borders:
    inside = borders[(borders > 0) & (borders < seq_len)]
    return np.concatenate([[0], inside])


@dataclass(frozen=True)
class _Plan:
    """Pieces of documents by sequence: sequence r has the pieces first[r] to first[r + 1]."""

    first: NDArray[np.int64]
    document: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]


class BestFit:
    def __init__(self, corpus: Corpus, seq_len: int, seed: int, separator: int, name: str = ""):
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.separator, self.name = separator, name
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    @cached_property
    def count(self) -> int:
        return len(self._plan(0).first) - 1  # the same in every epoch: it depends on the lengths alone

    @property
    def waste(self) -> float:
        """The share of places that hold padding."""
        return 1.0 - self.corpus.num_tokens / (self.count * self.seq_len)

    def row(self, number: int) -> Row:
        epoch, place = divmod(number, self.count)
        plan = self._plan(epoch)
        inputs = np.full(self.seq_len, self.separator, dtype=self.corpus.dtype)
        targets = np.full(self.seq_len, IGNORED, dtype=np.int64)
        starts, filled = [], 0
        for piece in range(int(plan.first[place]), int(plan.first[place + 1])):
            document, offset, length = int(plan.document[piece]), int(plan.offset[piece]), int(plan.length[piece])
            starts.append(filled)
            end = filled + length
            self.corpus.read(document, offset, inputs[filled:end])
            targets[filled : end - 1] = inputs[filled + 1 : end]
            targets[end - 1] = self._after(document, offset + length)
            filled = end
        if filled < self.seq_len:
            starts.append(filled)
        return Row(inputs, targets, np.array(starts, dtype=np.int64))

    def _after(self, document: int, offset: int) -> int:
        """The token behind a piece: the document's next, or the separator where it ends."""
        if offset == self.corpus.lengths[document]:
            return self.separator
        following = np.empty(1, dtype=self.corpus.dtype)
        self.corpus.read(document, offset, following)
        return int(following[0])

    def num_targets(self, numbers: range) -> int:
        total = 0
        for number in numbers:
            epoch, place = divmod(number, self.count)
            plan = self._plan(epoch)
            total += int(plan.length[plan.first[place] : plan.first[place + 1]].sum())
        return total

    def expect(self, numbers: Iterable[int]) -> None:
        pass

    def shares(self, number: int) -> dict[str, int]:
        return {self.name: number}

    def _make_plan(self, epoch: int) -> _Plan:
        order = random_order(self.corpus.num_documents, self.seed, epoch)
        lengths = self.corpus.lengths[order]
        # Whole sequences of long documents first, then the rest of every document.
        whole = lengths // self.seq_len
        document = np.repeat(order, whole)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
        rest = lengths % self.seq_len
        open_documents, rest_lengths = order[rest > 0], rest[rest > 0]
        row_of, num_rows = fit(rest_lengths, self.seq_len)
        documents = np.concatenate([document, open_documents])
        offsets = np.concatenate([nth * self.seq_len, whole[rest > 0] * self.seq_len])
        piece_lengths = np.concatenate([np.full(len(document), self.seq_len), rest_lengths])
        rows = np.concatenate([np.arange(len(document)), len(document) + row_of])
        # Sequences in random order; the pieces of one stay together.
        total = len(document) + num_rows
        place = np.empty(total, dtype=np.int64)
        place[random_order(total, self.seed, epoch + _SEQUENCE_KEYS)] = np.arange(total)
        by_place = np.argsort(place[rows], kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(place[rows], minlength=total))])
        return _Plan(first, documents[by_place], offsets[by_place], piece_lengths[by_place])


def fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], int]:
    """Best fit, longest first: a bin for every item, none over `room`, and how many bins there are.

    `free` has a bit for every amount of room that some bin still has, so the fullest bin with enough of it is
    one shift away.
    """
    bins: list[list[int]] = [[] for _ in range(room + 1)]
    free = 0
    chosen = np.empty(len(lengths), dtype=np.int64)
    used = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        enough = free >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            number = bins[left].pop()
            if not bins[left]:
                free &= ~(1 << left)
        else:
            left, number = room, used
            used += 1
        chosen[item] = number
        left -= length
        if left:
            bins[left].append(number)
            free |= 1 << left
    return chosen, used


class Mixture:
    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float], seed: int):
        self.parts, self.seed = parts, seed
        self._per_period = _exact_shares(weights, _PERIOD)
        self._period = lru_cache(maxsize=8)(self._make_period)

    @property
    def count(self) -> int | None:
        counts = [part.count for part in self.parts]
        return None if None in counts else sum(c for c in counts if c is not None)

    def place(self, number: int) -> tuple[int, int]:
        """The source of a sequence, and its number within that source."""
        period, slot = divmod(number, _PERIOD)
        source, nth = self._period(period)
        which = int(source[slot])
        return which, period * self._per_period[which] + int(nth[slot])

    def _make_period(self, period: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source = np.repeat(np.arange(len(self.parts)), self._per_period)
        source = source[random_order(_PERIOD, self.seed, period + _MIXTURE_KEYS)]
        nth = np.empty(_PERIOD, dtype=np.int64)
        for which, amount in enumerate(self._per_period):
            nth[source == which] = np.arange(amount)
        return source, nth

    def row(self, number: int) -> Row:
        which, inner = self.place(number)
        return self.parts[which].row(inner)

    def num_targets(self, numbers: range) -> int:
        places = (self.place(number) for number in numbers)
        return sum(self.parts[which].num_targets(range(inner, inner + 1)) for which, inner in places)

    def expect(self, numbers: Iterable[int]) -> None:
        wanted: dict[int, list[int]] = {}
        for which, inner in map(self.place, numbers):
            wanted.setdefault(which, []).append(inner)
        for which, inner_numbers in wanted.items():
            self.parts[which].expect(inner_numbers)

    def shares(self, number: int) -> dict[str, int]:
        period, slot = divmod(number, _PERIOD)
        source, _ = self._period(period)
        found: dict[str, int] = {}
        for which, part in enumerate(self.parts):
            inner = period * self._per_period[which] + int((source[:slot] == which).sum())
            for name, amount in part.shares(inner).items():
                found[name] = found.get(name, 0) + amount
        return found


def _exact_shares(weights: Sequence[float], period: int) -> list[int]:
    """Whole numbers that add up to `period`, as near to the weights as can be, none of them 0."""
    exact = np.array(weights) / sum(weights) * period
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    while shares.sum() != period:
        step = 1 if shares.sum() < period else -1
        gap = (exact - shares) * step
        gap[(shares + step) < 1] = -np.inf
        shares[int(np.argmax(gap))] += step
    return [int(share) for share in shares]
