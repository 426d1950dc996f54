"""Tokenised corpora of other programs, as the same documents that prepared shards have: a separator precedes every
document, and a separator at its end is left out.

Opening a corpus reads all of its tokens once: every id is compared with the vocabulary, and every document is hashed.
The hash of its tokens decides the split of a document. For the tokenizer `bytes` it equals the hash of the text.
The run folder keeps the hashes, so that a resumed run reads the tokens again only if a file changed.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from nsa.data.corpus import Counts, Keys, TokenFile, Tokenised
from nsa.data.sources.base import Skipped, groups
from nsa.data.sources.token_files import TokenIndex, read_indexes
from nsa.data.threads import Progress, in_threads
from nsa.data.token_shards import allow_open_files
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError
from nsa.files import LARGEST_LOG, read_regular, replace_file

REMEDY = "fix it or remove it from data.paths"
BLOCK_TOKENS = 1 << 22  # tokens that a thread reads at once
Scanned = tuple[bytes, Counts, Counts]  # of each document: 8 bytes of its hash, tokens without separators, last token


class CorpusTokens(TokenFile):
    """The documents of one file. A file that changes after it was opened raises an error."""

    def __init__(self, index: TokenIndex, tokenizer: Tokenizer):
        super().__init__(index.path, tokenizer.dtype, REMEDY)
        self._index, self._tokenizer = index, tokenizer
        self.sizes = np.diff(index.ends, prepend=0)
        self.lengths = self._places = self._starts = np.empty(0, np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1] + self.lengths[-1]) if len(self.lengths) else 0

    def blocks(self) -> list[range]:
        """Returns ranges of documents of `BLOCK_TOKENS` tokens in total, or of one longer document."""
        found = groups(range(len(self.sizes)), self.sizes.tolist().__getitem__, BLOCK_TOKENS)
        return [range(block[0], block[-1] + 1) for block in found]

    def scan(self, documents: range) -> Scanned:
        """Checks and hashes the tokens of documents."""
        part = slice(documents.start, documents.stop)
        sizes, ends = self.sizes[part], self._index.ends[part]
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

    def set_documents(self, keys: Keys, lengths: Counts) -> Keys:
        """Takes the results of all scans. Leaves out empty documents, and returns the hashes of the others."""
        has_text = lengths > 0
        self._places = (self._index.ends - self.sizes)[has_text]
        self.lengths = lengths[has_text] + 1
        self._starts = np.cumsum(self.lengths) - self.lengths
        return keys[has_text]

    def read(self, place: int, out: TokenArray) -> None:
        """`out` ends in the document that contains `place`."""
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
        if not self._fill(found, place * found.itemsize):
            raise DataError(f"{self.path}: changed after it was opened; start again when it is complete")
        vocab_size = self._tokenizer.vocab_size
        if np.maximum.reduce(found) >= vocab_size or np.minimum.reduce(found) < 0:
            is_wrong = (found < 0) | (found >= vocab_size)
            raise self._not_in_vocabulary(place + int(np.argmax(is_wrong)), int(found[is_wrong][0]))
        return found.astype(self.dtype, copy=False)

    def identify(self, digest: "hashlib._Hash") -> None:
        """Adds to the digest what must not change while the results of a scan are used."""
        digest.update(f"{self._stamp} {self._index.dtype} {len(self.sizes)}\n".encode() + self._index.ends.tobytes())

    def _state(self) -> tuple[int, ...]:
        return super()._state()[:2]  # other permissions or links of a corpus are not a change

    def _not_in_vocabulary(self, place: int, token: int) -> DataError:
        document = int(np.searchsorted(self._index.ends, place, side="right"))
        at = place - int(self._index.ends[document] - self.sizes[document])
        return DataError(
            f"{self.path}, document {document}, token {at}: {token} is not in the vocabulary of "
            f"{self._tokenizer.name!r} ({self._tokenizer.vocab_size:,} tokens); {self._set_tokenizer()}"
        )

    def check_ends(self, lasts: Counts) -> None:
        """Refuses a file whose documents all end with one special token that the run does not know as an end. The last
        token of an empty document is -1."""
        lasts = lasts[lasts >= 0]
        if not len(lasts) or (lasts != lasts[0]).any():
            return
        last = int(lasts[0])
        if last not in self._tokenizer.ends and not self._tokenizer.byte_lengths[last]:
            raise DataError(
                f"data.separator: all documents of {self.path} end with the special token {last}, the separator of "
                f"{self._tokenizer.name!r} is {self._tokenizer.separator}; set data.separator to the token that ends "
                f"them, or {self._set_tokenizer()}"
            )

    def _set_tokenizer(self) -> str:
        named = f", {self._index.made_with!r}" if self._index.made_with else ""
        return f"set data.tokenizer to the tokenizer of the corpus{named}"


def open_corpora(
    kind: str,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    threads: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
    *,
    may_write: bool = True,
) -> tuple[Tokenised[CorpusTokens], str]:
    """Opens all files of a corpus. Returns their documents and fingerprint. Reads all tokens, unless `cache` has the
    results for these files; otherwise writes the results there."""
    indexes = read_indexes(kind, paths)
    allow_open_files(len(indexes), f"files of data.source={kind}", "merge them")
    files = [CorpusTokens(index, tokenizer) for index in indexes]
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for file in files:
        file.identify(digest)
    bounds = np.cumsum([len(index.ends) for index in indexes])
    sizes = np.concatenate([file.sizes for file in files])
    found = _load(cache, digest.digest(), sizes) if cache else None
    if found is None:
        found = _scan(files, bounds[:-1], threads, progress)
        if cache and may_write:
            _store(cache, digest.digest(), found)
    of_files = zip(files, *(np.split(row, bounds[:-1]) for row in (found[0], found[1].view(np.int64))), strict=True)
    keys = np.concatenate([file.set_documents(keys, lengths) for file, keys, lengths in of_files])
    lengths = np.concatenate([file.lengths for file in files])
    skipped = Skipped({"empty": empty} if (empty := len(sizes) - len(lengths)) else {})
    fingerprint = hashlib.sha256(keys.astype("<u8").tobytes() + lengths.astype("<i8").tobytes()).hexdigest()
    return Tokenised(files, lengths, keys, skipped=skipped), fingerprint


def _scan(files: Sequence[CorpusTokens], bounds: Counts, threads: int, progress: Progress | None) -> Keys:
    """Returns the hashes, and the numbers of tokens without separators, of the documents of all files."""
    blocks = [(file, block) for file in files for block in file.blocks()]
    scanned = list(in_threads(lambda block: block[0].scan(block[1]), blocks, threads, progress))
    empty = np.empty(0, np.int64)
    keys = np.frombuffer(b"".join(keys for keys, _, _ in scanned), ">u8").astype(np.uint64)
    lengths = np.concatenate([empty, *(lengths for _, lengths, _ in scanned)])
    lasts = np.concatenate([empty, *(lasts for _, _, lasts in scanned)])
    for file, part in zip(files, np.split(lasts, bounds), strict=True):
        file.check_ends(part)
    return np.stack([keys, lengths.view(np.uint64)])


def _load(cache: Path, identity: bytes, sizes: Counts) -> Keys | None:
    """Returns the results of an earlier scan. Ignores a file that is damaged or about other files, which costs time."""
    try:
        content = read_regular(cache, LARGEST_LOG)
    except OSError:
        return None
    head, table = content[:64], content[64:]
    if head != identity + hashlib.sha256(table).digest() or len(table) != 16 * len(sizes):
        return None
    found = np.frombuffer(table, "<u8").reshape(2, len(sizes))
    without = sizes.view(np.uint64) - found[1]  # the run folder may come from anywhere
    return None if (without > 1).any() else found


def _store(cache: Path, identity: bytes, found: Keys) -> None:
    table = found.astype("<u8").tobytes()
    with suppress(OSError):  # a run works without this file
        replace_file(cache, identity + hashlib.sha256(table).digest() + table)


def _key(digest: "hashlib._Hash") -> bytes:
    return digest.digest()[:8]
