"""Text to token ids and back. The byte tokenizer needs no download and is the default."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.errors import ConfigError

TokenArray = NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    vocab_size: int
    separator: int  # stands before every document
    dtype: np.dtype[np.unsignedinteger]
    byte_lengths: NDArray[np.int64]  # UTF-8 bytes that each id stands for; 0 for the separator

    def encode(self, text: str) -> TokenArray: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte. 0xFF never occurs in UTF-8, so it is free to separate documents."""

    vocab_size = 256
    separator = 0xFF
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint8)

    def __init__(self) -> None:
        self.byte_lengths = np.ones(self.vocab_size, dtype=np.int64)
        self.byte_lengths[self.separator] = 0

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != self.separator).decode("utf-8", errors="replace")


def load_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    raise ConfigError(
        f"data.tokenizer: {name!r} is not available in this version; use 'bytes', which needs no download"
    )
