"""Chat templates, and conversations as tokens of which those of the assistant are marked as targets.

The template of a tokenizer.json is beside it, in chat_template.jinja or tokenizer_config.json, as transformers writes
it. A run folder and an export have a copy.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.config.schema import DataConfig
from nsa.data.sequences import COUNTED
from nsa.data.sources.chat import CLOSE, END, MARKS, OPEN, START, ChatSource, Renderer, check_conversation
from nsa.data.tokenizers import (
    BUILT_IN,
    END_OF_TEXT,
    JsonTokenizer,
    TokenArray,
    Tokenizer,
    library_errors,
    pieces,
    valid_text,
)
from nsa.errors import ArgumentError, DataError, reworded
from nsa.files import LARGEST_DOCUMENT, expand_home, read_regular

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
# Has no {% generation %}, which other programs may not know. Names of roles are ordinary text, so that every tokenizer
# can encode them.
BUILT_IN_TEMPLATE = r"""
{{- bos_token }}
{%- if tools %}
    {{- '<|tools|>\n' + tools | tojson + '\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls|>\n' + message.tool_calls | tojson }}
    {%- endif %}
    {{- eos_token if message.role == 'assistant' else '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}
"""

Spans = list[tuple[int, int]]
_LITERAL = re.compile(f"({OPEN}[^{MARKS}]*{CLOSE})")
_MARK = re.compile(f"([{MARKS}])")


def chat_template_of(data: DataConfig) -> str | None:
    """Returns the text of the template: `data.chat_template`, or else that of the tokenizer, or else the built-in one
    if conversations are among the data. Without conversations, a template that cannot be used is ignored."""
    if data.chat_template is not None:
        return _read(expand_home(data.chat_template), MAX_TEMPLATE_BYTES)
    path = expand_home(data.tokenizer)
    is_chat = "chat" in [part.source for part in (*data.mixture, *([] if data.mixture else [data]))]
    try:
        found = None if data.tokenizer in BUILT_IN else template_beside(path if path.is_dir() else path.parent)
    except DataError:
        if is_chat:
            raise
        return None
    return BUILT_IN_TEMPLATE if is_chat and found is None else found


def template_beside(folder: Path) -> str | None:
    """Returns the template in the folder of a tokenizer.json, as transformers writes it; None if there is none."""
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        return _read(folder / CHAT_TEMPLATE_FILE, MAX_TEMPLATE_BYTES)
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return None
    with reworded(DataError, f"{path}: cannot be read", caught=(ValueError, RecursionError)):
        content = json.loads(_read(path, LARGEST_DOCUMENT))
    template = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(template, list):  # several, with names
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default", "")
    if not isinstance(template, str | None) or template == "":
        raise DataError(f"{path}: has no chat_template with the name 'default'; set data.chat_template to a file")
    return template


def _read(path: Path, most: int) -> str:
    remedy = "set data.chat_template to a Jinja file"
    with reworded(DataError, f"{path}: cannot be read", remedy, (OSError, ValueError)):
        return read_regular(path.resolve(), most).decode("utf-8")  # the hub's cache consists of links


def special_texts(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the texts of the separator and of the token that ends an answer: `bos_token` and `eos_token`."""
    if not isinstance(tokenizer, JsonTokenizer):
        return END_OF_TEXT, END_OF_TEXT
    return tokenizer.separator_token, next(iter(tokenizer.end_tokens), tokenizer.separator_token)


class ChatTokenizer(Tokenizer):
    """Encodes conversations that its template renders. The tokens of the assistant carry the mark COUNTED.

    Texts of special tokens in the template are special tokens. A token counts if a part of its text is the assistant's.
    """

    def __init__(self, tokenizer: Tokenizer, template: str):
        self.inner = tokenizer
        self.name, self.separator, self.dtype = tokenizer.name, tokenizer.separator, np.dtype(np.uint32)
        bos, eos = special_texts(tokenizer)
        self._library: Any = None
        special = [bos]
        if isinstance(tokenizer, JsonTokenizer):
            import tokenizers

            with library_errors(f"{tokenizer.name}: cannot be used for conversations"):
                self._library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
                own = (bos, *tokenizer.end_tokens)  # some are ordinary tokens in the file
                self._library.add_special_tokens(
                    [tokenizers.AddedToken(t, special=True, normalized=False) for t in own]
                )
            added = self._library.get_added_tokens_decoder().values()
            special = [token.content for token in added if token.special]
        self.renderer = Renderer(template, {"bos_token": bos, "eos_token": eos}, special)

    def source(self, paths: Sequence[str]) -> ChatSource:
        return ChatSource(paths, self.renderer)

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encodes rendered conversations."""
        return [ids + np.uint32(COUNTED) * counted for ids, counted in map(self._encode, texts)]

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode([i % COUNTED for i in ids])

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Returns the tokens of a conversation up to the point where the assistant continues."""
        try:
            check_conversation({"messages": messages, "tools": tools})
            text = self.renderer.render({"messages": messages, "tools": tools}, prompt=True)
        except ValueError as error:
            raise ArgumentError("messages", str(error)) from None
        return [int(i) for i in self._encode(text)[0]]

    def close(self) -> None:
        """Ends the process of the template."""
        self.renderer.close()

    def _encode(self, marked: str) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Returns the tokens of a text with marks, and whether each is the assistant's."""
        found: list[tuple[TokenArray, NDArray[np.bool_]]] = []
        is_answer = False
        for number, part in enumerate(_LITERAL.split(valid_text(marked))):
            if number % 2:  # text of a message that equals a special token
                ids = self.inner.encode(part[1:-1])
                found.append((ids, np.full(len(ids), is_answer)))
                continue
            text, spans = "", list[tuple[int, int]]()
            for piece in _MARK.split(part):
                if piece in (START, END):
                    is_answer = piece == START
                elif piece not in (OPEN, CLOSE):
                    spans += [(len(text), len(text) + len(piece))] if is_answer else []
                    text += piece
            found += self._encode_plain(text, spans)
        ids, counted = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        counted[:1] = False  # nothing in the document predicts its first token
        return ids.astype(np.uint32), counted

    def _encode_plain(self, text: str, spans: Spans) -> list[tuple[TokenArray, NDArray[np.bool_]]]:
        if self._library is not None:
            return self._encode_with_library(text, spans)
        found = []
        for start, end in pairwise(sorted({0, len(text), *chain(*spans)})):
            for number, piece in enumerate(text[start:end].split(END_OF_TEXT)):
                ids = self.inner.encode(piece)
                ids = np.concatenate([[self.inner.separator], ids]).astype(ids.dtype) if number else ids
                found.append((ids, np.full(len(ids), any(first <= start < last for first, last in spans))))
        return found or [(self.inner.encode(""), np.zeros(0, dtype=bool))]

    def _encode_with_library(self, text: str, spans: Spans) -> list[tuple[TokenArray, NDArray[np.bool_]]]:
        """Encodes the text as a whole, as other programs do, and finds the assistant's tokens by their characters."""
        found, offset = [], 0
        for piece in pieces(text, self.inner.longest_piece):
            with library_errors(f"{self.name}: cannot encode a text"):
                [encoding] = self._library.encode_batch([piece], add_special_tokens=False)
            starts, ends = (np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + offset).T
            counted = np.zeros(len(starts), dtype=bool)
            for first, last in spans:
                counted |= (starts < last) & (ends > first)
            found.append((np.array(encoding.ids, dtype=self.inner.dtype), counted))
            offset += len(piece)
        return found
