"""Text to token ids and back: bytes, GPT-2's vocabulary, or any tokenizer.json.

Every tokenizer gives the same ids on every machine and in every process, can be pickled, and can be called from
several threads at once. Text never becomes the separator or another special token, whatever it contains.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.errors import ConfigError, DataError

TokenArray = NDArray[np.unsignedinteger]

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LAST_BREAKS = (re.compile(r"(?s).* (?=\S)"), re.compile(r"(?s).*\n(?=\S)"))


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    name: str  # as configured: bytes, gpt2, or the path
    fingerprint: str  # sha256 of what decides text -> ids, and of the separator; the same wherever the files lie
    vocab_size: int
    separator: int  # stands before every document
    dtype: np.dtype[np.unsignedinteger]  # the smallest one that holds every id
    byte_lengths: NDArray[np.int64]  # UTF-8 bytes that each id stands for; 0 for the separator and special tokens

    def encode(self, text: str) -> TokenArray: ...

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        """Equals `encode` of each. Works on the calling thread alone, mostly without the interpreter's lock."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Leaves separators and special tokens out; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte. 0xFF never occurs in UTF-8, so it is free to separate documents."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"one token per UTF-8 byte, separator 255").hexdigest()
    vocab_size = 256
    separator = 0xFF
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint8)

    def __init__(self) -> None:
        self.byte_lengths = np.ones(self.vocab_size, dtype=np.int64)
        self.byte_lengths[self.separator] = 0

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(valid_text(text).encode("utf-8"), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != self.separator).decode("utf-8", errors="replace")


def load_tokenizer(name: str, *, path: str | None = None, separator: str | None = None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`, with `data.tokenizer_path` and `data.separator`.

    `path` is the folder of GPT-2's two files, which are downloaded when it is unset. `separator` is a token of a
    tokenizer.json; bytes and gpt2 have their own.
    """
    if path is not None and name != "gpt2":
        raise ConfigError(f"data.tokenizer_path: belongs to data.tokenizer=gpt2, not to {name!r}; leave it unset")
    if separator is not None and name in ("bytes", "gpt2"):
        raise ConfigError(f"data.separator: {name} has its own separator; leave it unset")
    if name == "bytes":
        return ByteTokenizer()
    # Only here, because the libraries behind it take a while to import.
    from nsa.data import bpe

    return bpe.load_gpt2(path) if name == "gpt2" else bpe.load_json(name, _json_file(name), separator)


def valid_text(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def pieces(text: str, limit: int) -> list[str]:
    """The text in pieces of at most `limit` characters, which depend on the text alone.

    A cut is before the last space that has a word right behind it: there the patterns of GPT-2, GPT-4 and Llama 3
    begin a new match anyway, so the tokens stay the same. Text without spaces is cut before a line break, and text
    without either in the middle, where a token may be cut in two. Tokenizers that put a space before every text do
    so before a piece too.
    """
    found, start = [], 0
    while len(text) - start > limit:
        end = _cut(text, start, start + limit)
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def _cut(text: str, start: int, end: int) -> int:
    for last in _LAST_BREAKS:
        if found := last.match(text, start + 1, end + 1):
            return found.end() - 1
    return end


def _json_file(name: str) -> Path:
    try:
        file = Path(name).expanduser()
        if file.is_dir():
            file /= "tokenizer.json"
        elif not (name.endswith(".json") or file.is_file()):
            raise _unknown(name)
        if file.is_file():
            return file
    except (OSError, RuntimeError):  # no name a file can have: too long, or ~ of nobody
        raise _unknown(name) from None
    raise DataError(f"data.tokenizer: there is no file {file}")


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"data.tokenizer: {name!r} is neither a tokenizer nor a file; use 'bytes', which needs no download, 'gpt2', "
        "or the path of a tokenizer.json or of its folder (nothing is fetched from the Hugging Face hub by name)"
    )
