"""Converts this project's tokenizers to `PreTrainedTokenizerFast`, which encodes text to the same ids.

The separator precedes every document in training, so the tokenizer adds it before every text (unless
`add_special_tokens=False`), and generation ends with it, or with a token of `data.end_tokens`.
"""

import itertools
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nsa.data.chat import special_texts
from nsa.data.tokenizers import END_OF_TEXT, GPT2Tokenizer, JsonTokenizer, Tokenizer, byte_letters, library_errors


def fast_tokenizer(tokenizer: Tokenizer, max_length: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    with library_errors(f"{tokenizer.name}: transformers cannot use this tokenizer.json"):
        if isinstance(tokenizer, JsonTokenizer):
            backend = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        else:
            backend = _byte_level(tokenizer)
        separator, end = special_texts(tokenizer)
        backend.encode_special_tokens = chat_template is None
        backend.post_processor = processors.TemplateProcessing(
            single="SEPARATOR $A",  # its text could have a meaning in a template
            pair="SEPARATOR $A SEPARATOR $B",
            special_tokens=[{"id": "SEPARATOR", "ids": [tokenizer.separator], "tokens": [separator]}],
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=separator,
            eos_token=end,
            pad_token=separator,
            # Text never becomes a special token, unless a chat template writes special tokens as text.
            split_special_tokens=chat_template is None,
            chat_template=chat_template,
            model_max_length=max_length,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )


def _byte_level(tokenizer: Tokenizer) -> Any:
    """Returns byte-level BPE with GPT-2's merges, or without merges for bytes."""
    single = {bytes([i]): i for i in range(256) if i != tokenizer.separator}
    ranks = tokenizer.ranks if isinstance(tokenizer, GPT2Tokenizer) else single
    letters = byte_letters()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    made = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [(text[left], text[right]) for left, right in (_halves(token, ranks) for token in made)]
    backend = tokenizers.Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Returns the two parts of a token that its own merge joins: BPE with all earlier merges leaves these parts."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
