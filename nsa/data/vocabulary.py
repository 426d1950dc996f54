"""Trains a byte-level BPE vocabulary on documents, as a tokenizer.json that `data.tokenizer` takes."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nsa.errors import ConfigError, DataError

SEPARATOR = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the separator


def train_bpe(documents: Iterable[str], path: Path, *, vocab_size: int, max_bytes: int) -> tuple[int, int]:
    """Writes the vocabulary learned from the first `max_bytes` of text; returns its size and the bytes read.

    The separator is the last id. Any text can be encoded: what was not learned becomes single bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"--vocab-size: must be at least {SMALLEST_VOCABULARY} (all bytes and the separator)")
    if path.suffix != ".json":
        raise ConfigError(f"{path}: a tokenizer is written as a .json file; name one, for example tokenizer.json")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    limited = _Limited(documents, max_bytes)
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # training counts words on all cores
    try:
        tokenizer.train_from_iterator(limited, trainer)
    finally:  # reading with the tokenizer brings its own threads
        del os.environ["TOKENIZERS_PARALLELISM"]
        os.environ |= {} if before is None else {"TOKENIZERS_PARALLELISM": before}
    if not limited.read:
        raise DataError("data: no text to learn a vocabulary from")
    tokenizer.add_special_tokens([SEPARATOR])
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; choose another place") from None
    return tokenizer.get_vocab_size(), limited.read


class _Limited:
    """The first documents, up to `max_bytes` of UTF-8."""

    def __init__(self, documents: Iterable[str], max_bytes: int):
        self._documents, self._max_bytes = documents, max_bytes
        self.read = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._documents:
            self.read += len(text.encode("utf-8", "replace"))
            yield text
            if self.read >= self._max_bytes:
                return
