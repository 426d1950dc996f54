"""Tokenizers with a learned vocabulary: GPT-2's through tiktoken, any tokenizer.json through tokenizers.

The two files of GPT-2 are checked against their hashes wherever they come from. Nothing in a file is executed.
"""

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.data.tokenizers import TokenArray, pieces, valid_text
from nsa.errors import ConfigError, DataError, DataUnavailableError

_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES: dict[str, tuple[str, str]] = {  # name: where it is, and its sha256
    "vocab.bpe": (_GPT2_URL + "vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    "encoder.json": (_GPT2_URL + "encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
}
DOWNLOAD_TIMEOUT_S = 60.0  # for one file of about 1 MB

_END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (_END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
_MAX_ID = 1 << 24  # sixty times the largest vocabulary in use: a table over all ids stays small
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _SubwordTokenizer:
    """What the two kinds share: long texts are encoded in pieces, and every id has a length in bytes."""

    name: str
    fingerprint: str
    vocab_size: int
    separator: int
    dtype: np.dtype[np.unsignedinteger]
    byte_lengths: NDArray[np.int64]
    longest_piece: int

    def encode(self, text: str) -> TokenArray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        cut = [pieces(valid_text(text), self.longest_piece) for text in texts]
        encoded = self._encode_pieces([piece for parts in cut for piece in parts])
        return [np.concatenate(list(itertools.islice(encoded, len(parts)))) for parts in cut]

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        raise NotImplementedError


class GPT2Tokenizer(_SubwordTokenizer):
    """GPT-2's byte-level BPE. `ranks` maps the bytes of each token to its id; the separator is the id after them."""

    name = "gpt2"
    # tiktoken gives up with a stack overflow at a million spaces in a row, and takes longer than linear on long words.
    longest_piece = 1 << 15

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        self.separator = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.dtype = np.min_scalar_type(self.separator)
        tokens = sorted(ranks, key=ranks.__getitem__)
        self.byte_lengths = np.array([*map(len, tokens), 0], dtype=np.int64)
        # The pattern is not part of it: tiktoken rewrites it for speed, with the same matches.
        digest = hashlib.sha256(f"gpt2, pieces of {self.longest_piece}, separator {self.separator}".encode())
        for token in tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        self.fingerprint = digest.hexdigest()
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={_END_OF_TEXT: self.separator}
        )

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        # A call per piece, since tiktoken's batches are calls from threads of its own. Arrays instead of lists:
        # a list of Python integers is made under the interpreter's lock, which other threads wait for.
        for text in texts:
            yield self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self.separator])


class JsonTokenizer(_SubwordTokenizer):
    """A tokenizer.json, given as its text. Truncation, padding and dropout that it may ask for are switched off."""

    # The library is linear in the length; the limit bounds its memory, of about 100 bytes per token.
    longest_piece = 1 << 18

    def __init__(self, name: str, text: str, separator: str | None = None) -> None:
        import tokenizers

        # Its own pool has as many threads as the machine has cores, in every process of a run. Callers bring their
        # threads themselves, so the pool stays off unless the user asks for it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name, self._text = name, text
        spec = _parse(name, text)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except BaseException as error:
            # The library panics at some broken files; a panic is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{name}: not a valid tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._separator_token = _choose_separator(name, vocabulary, separator)
        self.separator = vocabulary[self._separator_token]
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_ID:
            raise DataError(f"{name}: has the token id {self.vocab_size - 1}; at most {_MAX_ID - 1} can be used")
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        rules = [spec.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
        identity = json.dumps([rules, self.longest_piece, self._separator_token, self.separator], sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._learn_tokens(spec, vocabulary)

    def __reduce__(self) -> tuple[type["JsonTokenizer"], tuple[str, str, str]]:
        # The library's own pickle forgets encode_special_tokens.
        return type(self), (self.name, self._text, self._separator_token)

    def _learn_tokens(self, spec: dict[str, Any], vocabulary: dict[str, int]) -> None:
        """Sets the length of every token, and how text is spelled that would be a special token."""
        model = spec["model"]
        unknown = vocabulary.get(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} - {unknown} | {self.separator}
        byte_length = _length_rule(spec)
        self.byte_lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in vocabulary.items():
            self.byte_lengths[i] = len(added[i].content.encode()) if i in added else byte_length(token)
        self.byte_lengths[[*special, *([] if unknown is None else [unknown])]] = 0
        self._is_special = np.zeros(self.vocab_size, dtype=bool)
        self._is_special[list(special)] = True
        names = {i: token for token, i in vocabulary.items() if i in special}
        spelled = {i: [vocabulary.get(letter, unknown) for letter in token] for i, token in names.items()}
        self._spelling = {i: [j for j in ids if j is not None and j not in special] for i, ids in spelled.items()}

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        start = 0
        while start < len(texts):
            stop, size = start, 0
            while stop < len(texts) and (stop == start or size + len(texts[stop]) <= self.longest_piece):
                size += len(texts[stop])
                stop += 1
            try:
                # Unlike `encode`, this one lets other threads run, and works out no offsets.
                batch = self._tokenizer.encode_batch_fast(texts[start:stop], add_special_tokens=False)
            except Exception as error:
                raise DataError(f"{self.name}: cannot encode a text: {error}") from error
            for encoding in batch:
                yield self._ordinary(np.array(encoding.ids, dtype=self.dtype))
            start = stop

    def _ordinary(self, ids: TokenArray) -> TokenArray:
        """Spells out special tokens, which some models (Unigram, WordLevel) find in text like any other token."""
        if not self._is_special[ids].any():
            return ids
        return np.array([j for i in ids.tolist() for j in self._spelling.get(i, (i,))], dtype=self.dtype)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if not self._is_special[i]])


def load_json(name: str, file: Path, separator: str | None) -> JsonTokenizer:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    return JsonTokenizer(name, text, separator)


def _parse(name: str, text: str) -> dict[str, Any]:
    """The file as a dictionary, without what would shorten, lengthen or randomise a text's ids."""
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not a valid tokenizer.json: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise DataError(f"{name}: not a valid tokenizer.json: it has no 'model'")
    if "dropout" in spec["model"]:
        spec["model"]["dropout"] = None
    return {**spec, "truncation": None, "padding": None, "post_processor": None}


def _choose_separator(name: str, vocabulary: dict[str, int], separator: str | None) -> str:
    if separator is not None:
        if separator not in vocabulary:
            raise ConfigError(f"data.separator: {separator!r} is no token of {name}")
        return separator
    for token in _SEPARATORS:
        if token in vocabulary:
            return token
    raise ConfigError(
        f"data.separator: {name} has none of {', '.join(_SEPARATORS)}; set data.separator to the token that stands "
        "before every document"
    )


def _length_rule(spec: dict[str, Any]) -> Callable[[str], int]:
    """How many bytes of text a token of the model stands for, by how the file says it was made from text."""
    model = spec["model"]
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    before = str([spec.get("normalizer"), spec.get("pre_tokenizer")])
    one_per_character, spaces = "'ByteLevel'" in before, "'▁'" in before

    def byte_length(token: str) -> int:
        token = token.removeprefix(prefix).removesuffix(suffix)
        if one_per_character:
            return len(token)
        if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token):
            return 1
        return len((token.replace("▁", " ") if spaces else token).encode())

    return byte_length


def load_gpt2(path: str | None) -> GPT2Tokenizer:
    """From the folder `path`, or from the cache and the network when it is None."""
    data = {}
    for file in GPT2_FILES:
        data[file] = _cached(file) if path is None else _from_folder(path, file)
    try:
        return GPT2Tokenizer(_gpt2_ranks(data["vocab.bpe"].decode(), json.loads(data["encoder.json"])))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.tokenizer: vocab.bpe and encoder.json do not fit together: {error!r}") from error


def _gpt2_ranks(merges: str, encoder: dict[str, int]) -> dict[bytes, int]:
    """The id of each token by its bytes. Both files write a byte as a character that can be seen."""
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in visible]
    bytes_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    # Ids are ranks: tiktoken merges the pair with the lowest id first, so they must follow the order of the merges.
    lines = merges.split("\n")[1:]  # the first one is a version
    expected = [*bytes_of, *("".join(line.split(" ")) for line in lines if line)]
    if [encoder[token] for token in expected] != list(range(len(expected))):
        raise ValueError("the ids of encoder.json are not in the order of vocab.bpe")
    if set(encoder) - set(expected) - {_END_OF_TEXT}:
        raise ValueError("encoder.json has tokens that vocab.bpe lacks")
    return {bytes(bytes_of[character] for character in token): i for i, token in enumerate(expected)}


def _from_folder(folder: str, file: str) -> bytes:
    try:
        data = Path(folder, file).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # the latter at ~ of nobody
        raise DataError(f"data.tokenizer_path: {folder} must be a folder with {file}: {error}") from error
    _check(str(Path(folder, file)), data, file)
    return data


def _check(where: str, data: bytes, file: str) -> None:
    expected, found = GPT2_FILES[file][1], hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DataError(f"{where}: is not {file} of gpt2: expected the sha256 {expected}, found {found}")


def _cached(file: str) -> bytes:
    """From the cache, else downloaded into it. Folder and names are tiktoken's, so that its downloads count too."""
    url, expected = GPT2_FILES[file]
    chosen = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if chosen == "":  # as in tiktoken, an empty name switches the cache off
        return _download(file, "")
    folder = Path(tempfile.gettempdir(), "data-gym-cache") if chosen is None else Path(chosen)
    entry = folder / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
    try:
        data = entry.read_bytes()
        if hashlib.sha256(data).hexdigest() == expected:
            return data
    except OSError:
        pass  # not there, or not ours to read
    data = _download(file, f"; {folder} does not have it either")
    aside = entry.with_name(f"{entry.name}.{uuid.uuid4()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(entry)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        if chosen is not None:  # the default folder may be another user's, which is no reason to stop
            raise DataError(f"cannot write into the cache folder {folder}: {error.strerror}") from error
    return data


def _download(file: str, elsewhere: str) -> bytes:
    url = GPT2_FILES[file][0]
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise OSError("HF_HUB_OFFLINE is set")
        deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
        data = bytearray()
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:  # noqa: S310  (a constant above)
            while part := response.read1(1 << 16):  # at most one wait, so that the deadline holds
                data += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not finished after {DOWNLOAD_TIMEOUT_S:g} s")
            length = response.headers.get("Content-Length")
        if length is not None and len(data) != int(length):
            raise OSError(f"the answer ended after {len(data)} of {length} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:
        urls = " and ".join(where for where, _ in GPT2_FILES.values())
        raise DataUnavailableError(
            f"data.tokenizer: cannot download {file} of gpt2 from {url}: {error}{elsewhere}. Download {urls} on a "
            "machine that can, put both into one folder and set data.tokenizer_path=FOLDER, or use data.tokenizer=bytes"
        ) from error
    _check(url, bytes(data), file)
    return bytes(data)
