"""An endless stream of tokens whose every part is a pure function of (seed, position).

A stream is cut into sequences by whoever reads it. Position x of the packed stream lies in epoch x // length;
each epoch holds every document once, in an order drawn from (seed, epoch).
"""

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.data.corpus import Corpus
from nsa.data.tokenizers import TokenArray

Borders = NDArray[np.int64]


class TokenStream(Protocol):
    """`read(start, count)` gives those tokens and the places among them where a document begins."""

    @property
    def length(self) -> int | None: ...  # tokens in one epoch; None where the stream never repeats

    def read(self, start: int, count: int) -> tuple[TokenArray, Borders]: ...


def random_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """Uniform 64-bit numbers that depend on the key alone, on every machine and version."""
    return np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(count)


def random_order(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation that depends on the key alone."""
    return np.argsort(random_bits(count, *key), kind="stable")


class PackedStream:
    """The documents of a corpus, one after the other, in a new order every epoch."""

    def __init__(self, corpus: Corpus, seed: int):
        self.corpus = corpus
        self.seed = seed
        self.length: int = corpus.num_tokens
        self._epoch_order = lru_cache(maxsize=2)(self._compute_epoch_order)

    def read(self, start: int, count: int) -> tuple[TokenArray, Borders]:
        tokens = np.empty(count, dtype=self.corpus.dtype)
        borders: list[int] = []
        filled = 0
        epoch, place = divmod(start, self.length)
        order, starts = self._epoch_order(epoch)
        which = int(np.searchsorted(starts, place, side="right")) - 1
        while filled < count:
            if which == len(order):
                epoch, which, place = epoch + 1, 0, 0
                order, starts = self._epoch_order(epoch)
            first, stop = int(starts[which]), int(starts[which + 1])
            if first == place:
                borders.append(filled)
            part = min(count - filled, stop - place)
            self.corpus.read(int(order[which]), place - first, tokens[filled : filled + part])
            filled += part
            place += part
            which += 1
        return tokens, np.array(borders, dtype=np.int64)

    def _compute_epoch_order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Documents in the epoch's order, and where each starts in the epoch."""
        order = random_order(self.corpus.num_documents, self.seed, epoch)
        lengths = self.corpus.lengths[order]
        return order, np.concatenate([[0], np.cumsum(lengths)])


class SyntheticStream:
    """Documents made on the fly: phrases of invented words, drawn unevenly, so that a model has much to learn.

    Every document is `document_length` tokens long. Of twenty consecutive documents one is for validation,
    so the two sides share the phrases and never a document. Tokens are bytes, which every vocabulary has room for.
    """

    PHRASES = 512
    VALIDATION_EVERY = 20
    length = None

    def __init__(self, seed: int, document_length: int, separator: int, *, validation: bool = False):
        self.seed = seed
        self.document_length = document_length
        self.separator = separator
        self.validation = validation
        self._phrases = _invent_phrases(seed, self.PHRASES)
        self._document = lru_cache(maxsize=4)(self._make_document)

    def read(self, start: int, count: int) -> tuple[TokenArray, Borders]:
        first, last = start // self.document_length, (start + count - 1) // self.document_length
        joined = np.concatenate([self._document(i) for i in range(first, last + 1)])
        skip = start - first * self.document_length
        begins = np.arange(first, last + 1) * self.document_length - start
        return joined[skip : skip + count], begins[begins >= 0]

    def _make_document(self, index: int) -> TokenArray:
        per_cycle = self.VALIDATION_EVERY - 1
        number = index * self.VALIDATION_EVERY
        if not self.validation:
            number = index // per_cycle * self.VALIDATION_EVERY + index % per_cycle + 1
        needed = self.document_length // 8 + 2  # the shortest phrase, three words of one syllable, has 10 bytes
        uniform = random_bits(needed, self.seed, number + 1).astype(np.float64) / 2**64
        chosen = (uniform**2 * self.PHRASES).astype(np.int64)
        text = b"".join([self._phrases[i] for i in chosen.tolist()])
        document = np.empty(self.document_length, dtype=np.min_scalar_type(max(255, self.separator)))
        document[0] = self.separator
        document[1:] = np.frombuffer(text, dtype=np.uint8)[: self.document_length - 1]
        return document


def _invent_phrases(seed: int, count: int) -> list[bytes]:
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
