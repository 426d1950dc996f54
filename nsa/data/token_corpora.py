"""Tokenised corpora of other programs, as the same documents that prepared shards have: a separator precedes every
document, and a separator at its end is left out.

Opening a corpus reads all of its tokens once: every id is compared with the vocabulary, and every document is hashed.
The hash of its tokens decides the split of a document. For the tokenizer `bytes` it equals the hash of the text.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from nsa.data.corpus import Counts, Keys, Tokenised
from nsa.data.sources.base import Skipped, groups
from nsa.data.sources.token_files import TokenIndex, read_indexes
from nsa.data.threads import Progress, in_threads
from nsa.data.token_shards import allow_open_files
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError, reworded

REMEDY = "fix it or remove it from data.paths"
BLOCK_TOKENS = 1 << 22  # tokens that a thread reads at once
Scanned = tuple[bytes, Counts, Counts]  # of each document: 8 bytes of its hash, tokens without separators, last token


class CorpusTokens:
    """The documents of one file, read on demand. A file that changes after it was opened raises an error; a
    memory-mapped file that is truncated would end the process with SIGBUS."""

    def __init__(self, index: TokenIndex, tokenizer: Tokenizer):
        self.path, self.dtype = index.path, tokenizer.dtype.newbyteorder("<")
        self._index, self._tokenizer = index, tokenizer
        self._sizes = np.diff(index.ends, prepend=0)
        with reworded(DataError, f"{self.path}: cannot be read", REMEDY):
            self._file = self.path.open("rb", buffering=0)
        self._descriptor = self._file.fileno()
        self._stamp = self._state()
        self.lengths = self._places = self._starts = np.empty(0, np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1] + self.lengths[-1]) if len(self.lengths) else 0

    def blocks(self) -> list[range]:
        """Returns ranges of documents of `BLOCK_TOKENS` tokens in total, or of one longer document."""
        found = groups(range(len(self._sizes)), self._sizes.tolist().__getitem__, BLOCK_TOKENS)
        return [range(block[0], block[-1] + 1) for block in found]

    def scan(self, documents: range) -> Scanned:
        """Checks and hashes the tokens of documents."""
        part = slice(documents.start, documents.stop)
        sizes, ends = self._sizes[part], self._index.ends[part]
        first, stop = int(ends[0] - sizes[0]), int(ends[-1])
        lasts = np.full(len(documents), -1)
        if stop - first > BLOCK_TOKENS:
            return self._scan_long(first, stop)
        tokens = self._read(first, stop - first)
        lasts[sizes > 0] = tokens[(ends - first - 1)[sizes > 0]]
        lengths = sizes - (lasts == self._tokenizer.separator)
        content = tokens.view(np.uint8).data
        starts = (ends - first - sizes) * tokens.itemsize
        spans = zip(starts.tolist(), (starts + lengths * tokens.itemsize).tolist(), strict=True)
        return b"".join(_key(hashlib.sha256(content[a:b])) for a, b in spans), lengths, lasts

    def _scan_long(self, first: int, stop: int) -> Scanned:
        last = int(self._read(stop - 1, 1)[0])
        length = stop - first - (last == self._tokenizer.separator)
        digest = hashlib.sha256()
        for place in range(first, first + length, BLOCK_TOKENS):
            digest.update(self._read(place, min(BLOCK_TOKENS, first + length - place)).data)
        return _key(digest), np.array([length]), np.array([last])

    def finish(self, scanned: Sequence[Scanned]) -> tuple[Keys, int]:
        """Takes the results of all blocks. Returns the hashes of the documents, and the number of empty ones, which are
        left out."""
        if not scanned:
            return np.empty(0, np.uint64), 0
        keys = np.frombuffer(b"".join(keys for keys, _, _ in scanned), ">u8").astype(np.uint64)
        lengths = np.concatenate([lengths for _, lengths, _ in scanned])
        has_text = lengths > 0
        self._check_ends(np.concatenate([lasts for _, _, lasts in scanned])[has_text])
        self._places = (self._index.ends - self._sizes)[has_text]
        self.lengths = lengths[has_text] + 1
        self._starts = np.cumsum(self.lengths) - self.lengths
        return keys[has_text], int((~has_text).sum())

    def read(self, place: int, out: TokenArray) -> None:
        """Fills `out` with the tokens of one document from `place` on."""
        document = int(np.searchsorted(self._starts, place, side="right")) - 1
        offset = place - int(self._starts[document])
        if offset == 0:
            out[0] = self._tokenizer.separator
            out, offset = out[1:], 1
        out[:] = self._read(int(self._places[document]) + offset - 1, len(out))

    def _read(self, place: int, count: int) -> TokenArray:
        """Reads and checks tokens of the file."""
        found = np.empty(count, self._index.dtype)
        if not count:
            return found.astype(self.dtype)
        into = found.view(np.uint8)
        offset, done = place * found.itemsize, 0
        try:
            while done < len(into):
                buffers: list[Any] = [into[done:]]  # numpy declares arrays as buffers only from Python 3.12 on
                size = os.preadv(self._descriptor, buffers, offset + done)
                done += size
                if not size or self._state() != self._stamp:
                    raise DataError(f"{self.path}: changed after it was opened; start again when it is complete")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}; {REMEDY}") from None
        vocab_size = self._tokenizer.vocab_size
        if np.maximum.reduce(found) >= vocab_size or np.minimum.reduce(found) < 0:
            is_wrong = (found < 0) | (found >= vocab_size)
            raise self._not_in_vocabulary(place + int(np.argmax(is_wrong)), int(found[is_wrong][0]))
        return found.astype(self.dtype, copy=False)

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _not_in_vocabulary(self, place: int, token: int) -> DataError:
        document = int(np.searchsorted(self._index.ends, place, side="right"))
        at = place - int(self._index.ends[document] - self._sizes[document])
        return DataError(
            f"{self.path}, document {document}, token {at}: {token} is not in the vocabulary of "
            f"{self._tokenizer.name!r} ({self._tokenizer.vocab_size:,} tokens); {self._remedy()}"
        )

    def _check_ends(self, lasts: Counts) -> None:
        """Refuses a file whose documents all end with one special token that the run does not know as an end."""
        if not len(lasts) or (lasts != lasts[0]).any():
            return
        last = int(lasts[0])
        if last not in self._tokenizer.ends and not self._tokenizer.byte_lengths[last]:
            raise DataError(
                f"data.separator: all documents of {self.path} end with the special token {last}, the separator of "
                f"{self._tokenizer.name!r} is {self._tokenizer.separator}; set data.separator to the token that ends "
                f"them, or {self._remedy()}"
            )

    def _remedy(self) -> str:
        named = f", {self._index.made_with!r}" if self._index.made_with else ""
        return f"set data.tokenizer to the tokenizer of the corpus{named}"


def open_corpora(
    kind: str, paths: Sequence[str], tokenizer: Tokenizer, threads: int = 1, progress: Progress | None = None
) -> tuple[Tokenised[CorpusTokens], str]:
    """Opens and reads all files of a corpus. Returns their documents and fingerprint."""
    indexes = read_indexes(kind, paths)
    allow_open_files(len(indexes), f"files of data.source={kind}", "merge them")
    files = [CorpusTokens(index, tokenizer) for index in indexes]
    blocks = [(file, block) for file in files for block in file.blocks()]
    scanned = in_threads(lambda block: block[0].scan(block[1]), blocks, threads, progress)
    found: dict[CorpusTokens, list[Scanned]] = {file: [] for file in files}
    for (file, _), result in zip(blocks, scanned, strict=True):
        found[file].append(result)
    finished = [file.finish(results) for file, results in found.items()]
    keys = np.concatenate([keys for keys, _ in finished])
    lengths = np.concatenate([file.lengths for file in files])
    skipped = Skipped({"empty": empty} if (empty := sum(empty for _, empty in finished)) else {})
    digest = hashlib.sha256(keys.astype("<u8").tobytes() + lengths.astype("<i8").tobytes())
    return Tokenised(files, lengths, keys, skipped=skipped), digest.hexdigest()


def _key(digest: "hashlib._Hash") -> bytes:
    return digest.digest()[:8]
