"""Tokenised documents, and their split into training and validation by a hash of their text.

The split of a document depends on this hash alone: equal documents are always in the same split, so the splits never
overlap, and adding documents moves none. The exception is a source whose documents are all above the threshold.
"""

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nsa.data.sources.base import Skipped, Source, Unit, groups
from nsa.data.threads import Progress
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError, reworded

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]
KEY_BITS = 48  # bits of a document's key that decide its split
BATCH = 64  # documents in one call of the tokenizer
BATCH_CHARS = 1 << 18  # characters in one call, or one longer document. At most 1 MiB of UTF-8, the smallest shard


class TokenFile:
    """Tokens in a file that are read on demand. A memory-mapped file that is truncated would end the process with
    SIGBUS."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], remedy: str):
        self.path, self.dtype, self._remedy = path, dtype.newbyteorder("<"), remedy
        with reworded(DataError, f"{path}: cannot be read", remedy):
            self._file = path.open("rb", buffering=0)
        self._stamp = self._state()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, place: int, out: TokenArray) -> None:
        """Fills `out` with the tokens from `place` on."""
        raise NotImplementedError

    def _fill(self, out: NDArray[np.integer], offset: int) -> bool:
        """Reads `out` at this byte. Returns False if the file is too short or changed since `_stamp`."""
        into: Any = out.view(np.uint8)  # numpy declares arrays as buffers only from Python 3.12 on
        done, size = 0, -1
        try:
            while done < len(into) and size:  # a network file system may return less than it is asked for
                size = os.preadv(self._file.fileno(), [into[done:]], offset + done)
                done += size
            return done == len(into) and self._state() == self._stamp
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}; {self._remedy}") from None

    def _state(self) -> tuple[int, ...]:
        """Returns a value that changes with every write to the file."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns


Piece = TypeVar("Piece", bound=TokenArray | TokenFile, covariant=True)


class Corpus:
    """The documents of one split. Document d has `lengths[d]` tokens and starts at token `starts[d]` of the
    concatenated `pieces`."""

    def __init__(self, pieces: Sequence[TokenArray | TokenFile], starts: Counts, lengths: Counts):
        self.pieces, self.starts, self.lengths = pieces, starts, lengths
        self.num_documents, self.num_tokens = len(lengths), int(lengths.sum())
        self.dtype = pieces[0].dtype
        self._ends = list(accumulate(map(len, pieces)))

    def read(self, document: int, offset: int, out: TokenArray) -> None:
        """Fills `out` with the tokens of a document, starting at `offset`."""
        place = int(self.starts[document]) + offset
        number = bisect_right(self._ends, place)
        place -= self._ends[number - 1] if number else 0
        piece = self.pieces[number]
        if isinstance(piece, np.ndarray):
            out[:] = piece[place : place + len(out)]
        else:
            piece.read(place, out)


@dataclass(frozen=True)
class Tokenised(Generic[Piece]):
    """Concatenated documents, each after a separator: their tokens, lengths and hashes (`keys`).

    No document crosses the border between two pieces."""

    pieces: Sequence[Piece]
    lengths: Counts
    keys: Keys
    text_bytes: int = 0
    skipped: Skipped = field(default_factory=Skipped)

    def select(self, chosen: NDArray[np.bool_]) -> Corpus:
        starts = np.cumsum(self.lengths) - self.lengths
        return Corpus(self.pieces, starts[chosen], self.lengths[chosen])

    def only(self, chosen: NDArray[np.bool_]) -> "Tokenised[TokenArray]":
        """Copies the chosen documents, so that the others are freed."""
        corpus = self.select(chosen)
        tokens = np.empty(corpus.num_tokens, corpus.dtype)
        for document, end in enumerate(np.cumsum(corpus.lengths).tolist()):
            corpus.read(document, 0, tokens[end - int(corpus.lengths[document]) : end])
        return Tokenised([tokens], corpus.lengths, self.keys[chosen])

    def split(self, fraction: float, *, is_only: bool = True) -> tuple[Corpus, Corpus]:
        """Returns the training and the validation corpus, which is empty for a fraction of 0. If no document is below
        the threshold, the closest document and its duplicates are for validation. In a mixture that is an error:
        another source may train on them."""
        keys = self.keys
        if len(keys) == 0:
            raise DataError("data.source: the corpus is empty; give data.paths that contain text")
        mask = in_validation(keys, fraction)
        if fraction and (mask.all() or not mask.any()):
            if len(np.unique(keys)) < 2:
                raise DataError(
                    "data.validation_fraction: a split needs at least 2 different documents and the corpus has 1; "
                    "give more files, or set data.validation_fraction=0 to train without validation"
                )
            if mask.all():
                raise DataError("data.validation_fraction: every document is for validation; choose a smaller one")
            if not is_only:
                raise DataError(
                    f"data.validation_fraction: none of the {len(keys):,} documents falls into validation, and other "
                    "sources of the mixture may train on them; choose a larger fraction, or 0 for no validation"
                )
            mask = keys == keys.min()
        return self.select(~mask), self.select(mask)


def key_of(text: str) -> int:
    """Returns 64 bits of the SHA-256 of the text."""
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def tokenise(
    documents: Iterable[str], tokenizer: Tokenizer, skipped: Skipped | None = None, progress: Progress | None = None
) -> Tokenised[TokenArray]:
    """Each batch of documents is a step of `progress`."""
    parts: list[TokenArray] = []
    lengths: list[int] = []
    keys: list[int] = []
    text_bytes = 0
    for texts in groups(documents, lambda text: len(text) + BATCH_CHARS // BATCH, BATCH_CHARS):
        for text, tokens in zip(texts, tokenizer.encode_documents(texts), strict=True):
            parts.append(tokens)
            lengths.append(len(tokens))
            keys.append(key_of(text))
            text_bytes += len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))
        if progress is not None:
            progress.steps += 1
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=tokenizer.dtype)
    counts, hashes = np.array(lengths, dtype=np.int64), np.array(keys, dtype=np.uint64)
    return Tokenised([tokens], counts, hashes, text_bytes, Skipped() if skipped is None else skipped)


def tokenise_unit(
    source: Source, unit: Unit, tokenizer: Tokenizer, progress: Progress | None = None
) -> Tokenised[TokenArray]:
    skipped = Skipped()
    return tokenise(source.documents(unit, skipped), tokenizer, skipped, progress)


def in_validation(keys: Keys, fraction: float) -> NDArray[np.bool_]:
    """Whether each document is for validation, which depends on its key alone."""
    return (keys >> np.uint64(64 - KEY_BITS)) < np.uint64(math.ceil(fraction * 2**KEY_BITS))


def join(
    parts: Iterable[Tokenised[TokenArray]], tokenizer: Tokenizer, limit_bytes: int | None = None
) -> Tokenised[TokenArray]:
    """Concatenates all parts. More than `limit_bytes` of tokens are an error: they need shards."""
    found = [tokenise([], tokenizer)]  # `parts` may be empty
    size = 0
    for part in parts:
        found.append(part)
        size += sum(tokens.nbytes for tokens in part.pieces)
        if limit_bytes is not None and size > limit_bytes:
            raise DataError(
                f"data.paths: more than {limit_bytes / 2**30:.0f} GiB of tokens do not fit into memory; write them to "
                "shards with `nsa data prepare FOLDER` and the same data.* keys, then train with data.source=prepared "
                "data.paths=[FOLDER], or give fewer conversations"
            )
    return Tokenised(
        [np.concatenate([tokens for p in found for tokens in p.pieces])],  # finding a token in one piece is faster
        np.concatenate([p.lengths for p in found]),
        np.concatenate([p.keys for p in found]),
        sum(p.text_bytes for p in found),
        sum((p.skipped for p in found), Skipped()),
    )
