"""Trains a byte-level BPE vocabulary on documents and writes it as a tokenizer.json for `data.tokenizer`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nsa.data.tokenizers import END_OF_TEXT
from nsa.errors import ConfigError, DataError, reworded
from nsa.files import replace_file


def train_bpe(documents: Iterable[str], path: Path, *, vocab_size: int, max_bytes: int) -> tuple[int, int]:
    """Writes the vocabulary learned from the first `max_bytes` of text. Returns its size and the bytes read.

    The separator is the last id. Any text can be encoded: unknown text becomes single bytes.
    """
    if path.suffix != ".json":
        raise ConfigError(f"{path}: a tokenizer is written as a .json file; name one, for example tokenizer.json")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    read = 0

    def limited() -> Iterator[str]:
        nonlocal read
        for text in documents:
            read += len(text.encode("utf-8", "replace"))
            yield text
            if read >= max_bytes:
                return

    tokenizer.train_from_iterator(limited(), trainer)
    if not read:
        raise DataError("data: no text to learn a vocabulary from")
    tokenizer.add_special_tokens([END_OF_TEXT])
    with reworded(DataError, f"{path}: cannot be written", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, tokenizer.to_str(pretty=True).encode())
    return tokenizer.get_vocab_size(), read
