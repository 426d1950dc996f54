"""Tokenised documents in memory, split into training and validation by what they contain.

A document's side depends on a hash of its text alone: equal documents are always on one side, so the two
never overlap, and adding documents moves none.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Documents back to back, each behind a separator: document d is tokens[starts[d]:starts[d+1]]."""

    tokens: TokenArray
    starts: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1


def build_corpora(
    documents: Iterable[str], tokenizer: Tokenizer, validation_fraction: float
) -> tuple[Corpus, Corpus | None]:
    """(training, validation); validation is None for a fraction of 0."""
    sides: dict[bool, list[TokenArray]] = {False: [], True: []}
    lowest: tuple[float, int] = (2.0, -1)
    separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
    distinct: set[float] = set()
    for text in documents:
        rank = _rank(text)
        side = sides[rank < validation_fraction]
        side.append(np.concatenate([separator, tokenizer.encode(text)]))
        distinct.add(rank)
        if rank >= validation_fraction:
            lowest = min(lowest, (rank, len(side) - 1))
    if not sides[False] and not sides[True]:
        raise DataError("data.source: the corpus is empty, no document has any text; give data.paths with text in them")
    if validation_fraction and len(distinct) < 2:
        raise DataError(
            "data.validation_fraction: a split needs at least 2 different documents and the corpus has 1; "
            "give more files, or set data.validation_fraction=0 to train without validation"
        )
    if validation_fraction and not sides[True]:
        # Too few documents for the fraction: the one nearest to the border goes over, with its equals.
        moved = sides[False][lowest[1]]
        sides[True] = [d for d in sides[False] if np.array_equal(d, moved)]
        sides[False] = [d for d in sides[False] if not np.array_equal(d, moved)]
    if not sides[False]:
        raise DataError("data.validation_fraction: every document fell into validation; choose a smaller fraction")
    return _join(sides[False]), _join(sides[True]) if validation_fraction else None


def _rank(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _join(documents: list[TokenArray]) -> Corpus:
    lengths = np.array([0, *map(len, documents)], dtype=np.int64)
    return Corpus(np.concatenate(documents), np.cumsum(lengths))
