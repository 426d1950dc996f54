"""Training sequences by their number in the run. Each is a pure function of (seed, number).

`Concat` reads an endless stream: each epoch contains every document of a corpus once, shuffled by (seed, epoch). The
stream is cut into sequences of S inputs and S targets, shifted by one token. They are shuffled by (seed, epoch) too, so
that a batch mixes documents. The remainder of an epoch, fewer than S tokens, is read in the order of another epoch or
not at all. A separator precedes every document, so the last target of a document is the separator and every target
counts.

`BestFit` keeps documents whole if they fit: each goes into the fullest sequence that has room, longer ones are cut at S
tokens, and the rest of a sequence is padding that the loss ignores.

`MaskedSequences` ignores all targets except those that the corpus marks.

`Mixture` assigns every number to one of several sources, exactly in proportion to their weights.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from nsa.data.corpus import Corpus
from nsa.data.tokenizers import TokenArray

Borders = NDArray[np.int64]
IGNORED = -100  # a target that the loss ignores: the default of cross-entropy
COUNTED = 1 << 31  # added to the tokens of a masked corpus that count as targets; ids are smaller
_SEQUENCE_KEYS = 1 << 63  # separates the random keys of sequence orders from those of document orders
_MIXTURE_KEYS = 1 << 62
_PERIOD = 1000  # sequences after which every source of a mixture has exactly its share


def random_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """Returns uniform 64-bit numbers that depend on the key alone, on every machine and version."""
    return np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(count)


def random_order(count: int, *key: int) -> NDArray[np.int64]:
    """Returns a permutation that depends on the key alone."""
    return np.argsort(random_bits(count, *key), kind="stable")


def make_phrases(seed: int, count: int) -> list[bytes]:
    """Returns sentences of synthetic words, each followed by a full stop and a space."""
    syllables = ["ka", "lo", "mi", "ne", "ru", "sa", "te", "vo", "zi", "pa", "du", "he"]
    bits = random_bits(count * 24, seed, 0).astype(np.int64) & 0x7FFF_FFFF
    phrases = []
    for row in bits.reshape(count, 24).tolist():
        words = [
            "".join(syllables[s % len(syllables)] for s in row[4 * w + 1 : 4 * w + 2 + row[4 * w] % 3])
            for w in range(3 + row[12] % 3)
        ]
        phrases.append((" ".join(words) + ". ").encode())
    return phrases


@dataclass(frozen=True)
class Row:
    """One sequence: inputs and targets [S], and the positions where documents start, always including 0."""

    inputs: NDArray[np.integer]
    targets: NDArray[np.integer]
    starts: Borders


class Sequences:
    """Base class of all kinds of sequences. By default every target counts and `prefetch` does nothing."""

    seq_len: int
    name: str  # name of the source

    @property
    def count(self) -> int | None:
        """Number of sequences in one epoch; None if they are endless."""
        return None

    def row(self, number: int) -> Row:
        raise NotImplementedError

    def num_targets(self, numbers: range) -> int:
        """Returns the number of targets that count in these sequences."""
        return len(numbers) * self.seq_len

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Announces the sequences that are read next, so that slow reads can start."""

    def shares(self, number: int) -> dict[str, int]:
        """Returns how many of the first `number` sequences come from each source."""
        return {self.name: number}

    def _row_of(self, tokens: TokenArray, borders: Borders) -> Row:
        """Builds a row from S + 1 tokens and the positions where documents start."""
        inside = borders[(borders > 0) & (borders < self.seq_len)]
        return Row(tokens[:-1], tokens[1:], np.concatenate([[0], inside]))


class SyntheticSequences(Sequences):
    """Documents generated on the fly, one per sequence: phrases of synthetic words with unequal probabilities, which a
    model can learn.

    One of twenty consecutive documents is for validation, so the splits share phrases but no document. Tokens are
    bytes, modulo the size of a vocabulary that is too small for letters.
    """

    PHRASES = 512
    VALIDATION_EVERY = 20
    name = "synthetic"

    def __init__(self, seq_len: int, seed: int, separator: int, vocab_size: int = 256, *, validation: bool = False):
        self.seq_len, self.seed, self.separator, self.validation = seq_len, seed, separator, validation
        self._ids = min(255, vocab_size)  # letters are below
        self._phrases = make_phrases(seed, self.PHRASES)

    def row(self, number: int) -> Row:
        per_cycle = self.VALIDATION_EVERY - 1
        document = number * self.VALIDATION_EVERY
        if not self.validation:
            document = number // per_cycle * self.VALIDATION_EVERY + number % per_cycle + 1
        needed = self.seq_len // 8 + 2  # the shortest phrase, three words of one syllable, has 10 bytes
        uniform = random_bits(needed, self.seed, document + 1).astype(np.float64) / 2**64
        chosen = (uniform**2 * self.PHRASES).astype(np.int64)
        text = b"".join([self._phrases[i] for i in chosen.tolist()])
        tokens = np.full(self.seq_len + 1, self.separator, dtype=np.min_scalar_type(max(255, self.separator)))
        tokens[1:-1] = np.frombuffer(text, dtype=np.uint8)[: self.seq_len - 1] % self._ids
        return self._row_of(tokens, np.array([0, self.seq_len]))


class Concat(Sequences):
    """An epoch has `length` tokens; position x of the stream is in epoch x // length."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, name: str = ""):
        self.corpus, self.seq_len, self.seed, self.name = corpus, seq_len, seed, name
        self.length = corpus.num_tokens
        self._documents_of = lru_cache(maxsize=2)(self._order_documents)
        self._sequences_of = lru_cache(maxsize=2)(lambda epoch: random_order(self.count, seed, epoch + _SEQUENCE_KEYS))

    @property
    def count(self) -> int:
        return self.length // self.seq_len

    def row(self, number: int) -> Row:
        return self._row_of(*self.read(self.first_token(number), self.seq_len + 1))

    def first_token(self, number: int) -> int:
        """Returns the position in the stream where a sequence starts."""
        epoch, place = divmod(number, self.count)
        return epoch * self.length + int(self._sequences_of(epoch)[place]) * self.seq_len

    def read(self, start: int, count: int) -> tuple[TokenArray, Borders]:
        """Returns `count` tokens of the stream from `start` on, and the positions among them where documents start."""
        tokens = np.empty(count, dtype=self.corpus.dtype)
        borders: list[int] = []
        filled = 0
        epoch, place = divmod(start, self.length)
        order, starts = self._documents_of(epoch)
        which = int(np.searchsorted(starts, place, side="right")) - 1
        while filled < count:
            if which == len(order):
                epoch, which, place = epoch + 1, 0, 0
                order, starts = self._documents_of(epoch)
            first, stop = int(starts[which]), int(starts[which + 1])
            if first == place:
                borders.append(filled)
            part = min(count - filled, stop - place)
            self.corpus.read(int(order[which]), place - first, tokens[filled : filled + part])
            filled += part
            place += part
            which += 1
        return tokens, np.array(borders, dtype=np.int64)

    def _order_documents(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the documents in the order of the epoch, and where each starts in the epoch."""
        order = random_order(self.corpus.num_documents, self.seed, epoch)
        return order, np.concatenate([[0], np.cumsum(self.corpus.lengths[order])])


class BestFit(Sequences):
    def __init__(self, corpus: Corpus, seq_len: int, seed: int, separator: int, name: str = ""):
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.separator, self.name = separator, name
        self._cached_plan, self._lock = lru_cache(maxsize=2)(self._make_plan), Lock()

    @cached_property
    def count(self) -> int:
        return len(self._plan(0)[0]) - 1  # the same in every epoch: it depends on the lengths alone

    @property
    def waste(self) -> float:
        """The share of positions that contain padding."""
        return 1.0 - self.corpus.num_tokens / (self.count * self.seq_len)

    def row(self, number: int) -> Row:
        tokens = np.full(self.seq_len + 1, self.separator, dtype=self.corpus.dtype)
        targets = np.full(self.seq_len, IGNORED, dtype=np.int64)
        starts, filled = [], 0
        for document, offset, length in self._pieces(number).tolist():
            starts.append(filled)
            end = filled + length
            # Reads the token after the piece too, if the document continues; otherwise that token is a separator.
            rest = int(self.corpus.lengths[document]) - offset
            self.corpus.read(document, offset, tokens[filled : min(filled + rest, end + 1)])
            targets[filled:end] = tokens[filled + 1 : end + 1]
            filled = end
        if filled < self.seq_len:
            starts.append(filled)
        return Row(tokens[:-1], targets, np.array(starts, dtype=np.int64))

    def num_targets(self, numbers: range) -> int:
        return sum(int(self._pieces(number)[:, 2].sum()) for number in numbers)

    def _pieces(self, number: int) -> NDArray[np.int64]:
        """Returns the pieces of a sequence [pieces, 3]: a document, the offset in it, and the number of tokens."""
        epoch, place = divmod(number, self.count)
        first, pieces = self._plan(epoch)
        return pieces[first[place] : first[place + 1]]

    def _plan(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._lock:  # computed once, though several threads ask
            return self._cached_plan(epoch)

    def _make_plan(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of the first piece of each sequence, with the total at the end, and all pieces."""
        order = random_order(self.corpus.num_documents, self.seed, epoch)
        lengths = self.corpus.lengths[order]
        # Full sequences of long documents first, then the remainder of every document.
        whole = lengths // self.seq_len
        document = np.repeat(order, whole)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
        rest = lengths % self.seq_len
        open_documents, rest_lengths = order[rest > 0], rest[rest > 0]
        row_of, num_rows = fit(rest_lengths, self.seq_len)
        pieces = np.concatenate(
            [
                np.stack([document, nth * self.seq_len, np.full(len(document), self.seq_len)], axis=1),
                np.stack([open_documents, whole[rest > 0] * self.seq_len, rest_lengths], axis=1),
            ]
        )
        rows = np.concatenate([np.arange(len(document)), len(document) + row_of])
        # Sequences in random order; the pieces of one stay together.
        total = len(document) + num_rows
        place = np.empty(total, dtype=np.int64)
        place[random_order(total, self.seed, epoch + _SEQUENCE_KEYS)] = np.arange(total)
        by_place = np.argsort(place[rows], kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(place[rows], minlength=total))])
        return first, pieces[by_place]


def fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing bin packing: returns the bin of every item, with bins of size `room`, and the number of bins.

    Items of one length are placed together: a bin that takes one of them is then the fullest that has room for another.
    `free` lists, in order, the amounts of room that some bin still has.
    """
    bins: dict[int, list[int]] = {}
    free: list[int] = []

    def keep(left: int, numbers: list[int]) -> None:
        if left and numbers:
            if left not in bins:
                insort(free, left)
            bins.setdefault(left, []).extend(numbers)

    chosen = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    used = 0
    for items in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if len(order) else []:
        length = int(lengths[items[0]])
        while len(items):
            place = bisect_left(free, length)
            left = free[place] if place < len(free) else room
            each = left // length
            wanted = -(-len(items) // each)
            if place < len(free):
                numbers = bins[left][: -wanted - 1 : -1]
                del bins[left][-wanted:]
                if not bins[left]:
                    del bins[left], free[place]
            else:
                numbers = list(range(used, used + wanted))
                used += wanted
            placed, items = items[: len(numbers) * each], items[len(numbers) * each :]
            chosen[placed] = np.repeat(numbers, each)[: len(placed)]
            full, rest = divmod(len(placed), each)
            keep(left - each * length, numbers[:full])
            keep(left - rest * length, numbers[full:])
    return chosen, used


class MaskedSequences(Sequences):
    """Sequences of a corpus whose tokens carry the mark COUNTED where they count as targets."""

    def __init__(self, marked: Concat | BestFit):
        self.marked, self.seq_len, self.name = marked, marked.seq_len, marked.name

    @property
    def count(self) -> int:
        return self.marked.count

    def row(self, number: int) -> Row:
        row = self.marked.row(number)
        targets = row.targets.astype(np.int64)
        return Row(row.inputs & (COUNTED - 1), np.where(targets >= COUNTED, targets - COUNTED, IGNORED), row.starts)

    def num_targets(self, numbers: range) -> int:
        return sum(int((self.marked.row(number).targets >= COUNTED).sum()) for number in numbers)


class Mixture(Sequences):
    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float], seed: int):
        self.parts, self.seed = parts, seed
        self._per_period = _exact_shares(weights, _PERIOD)
        self._period = lru_cache(maxsize=8)(self._make_period)

    @property
    def count(self) -> int | None:
        counts = [part.count for part in self.parts]
        return None if None in counts else sum(c for c in counts if c is not None)

    def place(self, number: int) -> tuple[int, int]:
        """Returns the source of a sequence, and its number within that source."""
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

    def prefetch(self, numbers: Iterable[int]) -> None:
        wanted: dict[int, list[int]] = {}
        for which, inner in map(self.place, numbers):
            wanted.setdefault(which, []).append(inner)
        for which, inner_numbers in wanted.items():
            self.parts[which].prefetch(inner_numbers)

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
    """Returns positive integers that add up to `period`, as close to the weights as possible."""
    exact = np.array(weights) / sum(weights) * period
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    while shares.sum() != period:
        step = 1 if shares.sum() < period else -1
        gap = (exact - shares) * step
        gap[(shares + step) < 1] = -np.inf
        shares[int(np.argmax(gap))] += step
    return [int(share) for share in shares]
