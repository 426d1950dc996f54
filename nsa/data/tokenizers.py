"""Converts text to token ids and back: bytes, GPT-2's vocabulary, or any tokenizer.json.

Every tokenizer gives the same ids on every machine and in every process, can be pickled, and is thread-safe. Text is
never encoded as the separator or another special token. No code in a file is executed. tiktoken and tokenizers are
imported on demand, because importing them is slow.
"""

import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.config.schema import DataConfig
from nsa.data.sources.base import groups, is_offline
from nsa.data.threads import run_in_thread
from nsa.errors import ConfigError, DataError, DataUnavailableError, reworded

TokenArray = NDArray[np.unsignedinteger]

GPT2_FILE = "vocab.bpe"  # the merges, whose order defines the ids
GPT2_URL = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{GPT2_FILE}"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
BUILT_IN = ("bytes", "gpt2")  # any other name is the path of a tokenizer.json
TOKENIZER_FILE = "tokenizer.json"
DOWNLOAD_TIMEOUT_S = 60.0  # of one file of about 1 MB

END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
_MAX_ID = 1 << 24  # sixty times the largest vocabulary in use; tables over all ids stay small
_RULES = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # keys of a tokenizer.json that define encoding
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LAST_BREAKS = (re.compile(r"(?s).* (?=\S)"), re.compile(r"(?s).*\n(?=\S)"))


class Tokenizer:
    """Base class of all tokenizers. Encodes long texts in pieces."""

    name: str  # as configured: bytes, gpt2, or the path
    fingerprint: str  # sha256 of the encoding rules and the separator; independent of file paths
    vocab_size: int
    separator: int  # precedes every document
    ends: tuple[int, ...]  # ids that end generation: data.end_tokens, and the separator
    dtype: np.dtype[np.unsignedinteger]  # the smallest dtype that can represent every id
    byte_lengths: NDArray[np.int64]  # UTF-8 bytes of the text of each id; 0 for the separator and special tokens
    longest_piece: int

    def encode(self, text: str) -> TokenArray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encodes each text. Uses only the calling thread, mostly without the interpreter lock."""
        cut = [pieces(valid_text(text), self.longest_piece) for text in texts]
        encoded = self._encode_pieces([piece for parts in cut for piece in parts])
        return [np.concatenate(list(itertools.islice(encoded, len(parts)))) for parts in cut]

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encodes each text as a document, which begins with the separator."""
        separator = np.array([self.separator], dtype=self.dtype)
        return [np.concatenate([separator, tokens]) for tokens in self.encode_many(texts)]

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        """Omits separators and special tokens; bytes that are not valid UTF-8 become U+FFFD."""
        raise NotImplementedError

    def encodes_like(self, other: "Tokenizer") -> bool:
        return self.fingerprint == other.fingerprint


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte. 0xFF never occurs in UTF-8, so it is free to separate documents."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"one token per UTF-8 byte, separator 255").hexdigest()
    vocab_size = 256
    separator = 0xFF
    ends: tuple[int, ...] = (separator,)
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint8)

    def __init__(self) -> None:
        self.byte_lengths = np.ones(self.vocab_size, dtype=np.int64)
        self.byte_lengths[self.separator] = 0

    def encode_many(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(valid_text(text).encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < self.separator).decode("utf-8", errors="replace")


def tokenizer_for(data: DataConfig) -> Tokenizer:
    return load_tokenizer(data.tokenizer, data.tokenizer_path, data.separator, data.end_tokens)


def load_tokenizer(
    name: str, path: str | None = None, separator: str | None = None, end_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Loads the tokenizer of `data.tokenizer`, `data.tokenizer_path`, `data.separator` and `data.end_tokens`.

    `path` is the folder of GPT-2's file, which is downloaded if `path` is None. `separator` and `end_tokens` are tokens
    of a tokenizer.json; bytes and gpt2 have a fixed separator, which alone ends generation.
    """
    if path is not None and name != "gpt2":
        raise ConfigError(f"data.tokenizer_path: belongs to data.tokenizer=gpt2, not to {name!r}; leave it unset")
    for key, given in (("separator", separator), ("end_tokens", end_tokens)):
        if given and name in BUILT_IN:
            raise ConfigError(f"data.{key}: {name} has a fixed separator; leave it unset")
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        merges = _download() if path is None else _from_folder(path)
        return GPT2Tokenizer(_gpt2_ranks(merges.decode()))
    file = json_file(name)
    with reworded(DataError, f"{file}: cannot be read", caught=(OSError, UnicodeDecodeError)):
        text = file.read_text(encoding="utf-8")
    return JsonTokenizer(name, text, separator, end_tokens)


def valid_text(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def pieces(text: str, limit: int) -> list[str]:
    """Splits the text into pieces of at most `limit` characters, which depend on the text alone.

    A piece ends before the last space that a word follows: the patterns of GPT-2, GPT-4 and Llama 3 begin a new match
    there anyway, so the tokens stay the same. Text without spaces is split before a line break, and text without either
    at the limit, where a token may be split in two. Tokenizers that add a space before every text also add one before
    every piece.
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


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE. `ranks` maps the bytes of each token to its id; the separator is the next id."""

    name = "gpt2"
    # tiktoken overflows the stack at a million consecutive spaces, and is slower than linear on long words.
    longest_piece = 1 << 15

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        self.ranks = ranks
        self.separator = len(ranks)
        self.ends = (self.separator,)
        self.vocab_size = len(ranks) + 1
        self.dtype = np.min_scalar_type(self.separator)
        tokens = sorted(ranks, key=ranks.__getitem__)
        self.byte_lengths = np.array([*map(len, tokens), 0], dtype=np.int64)
        # The fingerprint leaves out the pattern: tiktoken rewrites it for speed, with the same matches.
        digest = hashlib.sha256(f"gpt2, pieces of {self.longest_piece}, separator {self.separator}".encode())
        for token in tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        self.fingerprint = digest.hexdigest()
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.separator}
        )

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        # One call per piece, since tiktoken's batch call starts threads. Arrays instead of lists: creating a list of
        # Python integers needs the interpreter lock, which other threads wait for.
        for text in texts:
            yield self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self.separator])


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, given as its text. Ignores truncation, padding and dropout in the file."""

    # The library is linear in the length; the limit bounds its memory of about 100 bytes per token.
    longest_piece = 1 << 18

    def __init__(self, name: str, text: str, separator: str | None = None, end_tokens: Sequence[str] = ()) -> None:
        import tokenizers

        # The library's pool has as many threads as the machine has cores, in every process of a run. Callers already
        # use threads, so the pool stays off unless the user enables it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name, self.text = name, text
        spec = _parse(name, text)
        with library_errors(f"{name}: not a valid tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.separator_token = _choose_separator(name, vocabulary, separator)
        self.separator = vocabulary[self.separator_token]
        self.end_tokens = [token for token in end_tokens if token != self.separator_token]
        if unknown := [token for token in self.end_tokens if token not in vocabulary]:
            raise ConfigError(f"data.end_tokens: {unknown[0]!r} is not a token of {name}")
        self.ends = (*map(vocabulary.__getitem__, self.end_tokens), self.separator)
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_ID:
            raise DataError(f"{name}: has the token id {self.vocab_size - 1}; at most {_MAX_ID - 1} can be used")
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        rules = [spec.get(key) for key in _RULES]
        identity = json.dumps([rules, self.longest_piece, self.separator_token, self.separator], sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._learn_tokens(spec, vocabulary)

    def __reduce__(self) -> tuple[type["JsonTokenizer"], tuple[str, str, str, list[str]]]:
        # The library's own pickle loses encode_special_tokens.
        return type(self), (self.name, self.text, self.separator_token, self.end_tokens)

    def encodes_like(self, other: Tokenizer) -> bool:
        """Compares the encoding rules, since library versions and transformers write the same rules differently."""
        return isinstance(other, JsonTokenizer) and self._rules() == other._rules()

    def to_str(self) -> str:
        """Returns the library's tokenizer.json, without truncation, padding, dropout and post-processing."""
        return self._tokenizer.to_str()

    def _rules(self) -> list[Any]:
        """Returns the encoding rules as the library serializes them. Text is never encoded as a special token, so the
        flags that say how to find special tokens in text do not count, nor whether the separator is listed."""
        spec = json.loads(self.to_str())
        listed = {token["id"]: token for token in spec["added_tokens"]}
        listed.setdefault(self.separator, {"id": self.separator, "content": self.separator_token, "special": True})
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spec["added_tokens"] = [token | flags if token["special"] else token for _, token in sorted(listed.items())]
        return [self.separator, *(spec[key] for key in _RULES)]

    def _learn_tokens(self, spec: dict[str, Any], vocabulary: dict[str, int]) -> None:
        """Sets the length of every token, and the ordinary tokens that replace each special token found in text."""
        # Uses values from the library where it has them: it ignores, and does not check, keys that its model lacks.
        model = self._tokenizer.model
        has_id = type(model).__name__ == "Unigram"
        unknown = spec["model"].get("unk_id") if has_id else vocabulary.get(model.unk_token)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} - {unknown} | {self.separator}
        byte_length = _length_rule(spec, model)
        self.byte_lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in vocabulary.items():
            self.byte_lengths[i] = len(added[i].content.encode()) if i in added else byte_length(token)
        self.byte_lengths[[*special, *([] if unknown is None else [unknown])]] = 0
        self._is_special = np.zeros(self.vocab_size, dtype=bool)
        self._is_special[list(special)] = True
        names = {i: token for token, i in vocabulary.items() if i in special}
        letters = {i: [vocabulary.get(letter, unknown) for letter in token] for i, token in names.items()}
        self._letters = {i: [j for j in ids if j is not None and j not in special] for i, ids in letters.items()}

    def _encode_pieces(self, texts: list[str]) -> Iterator[TokenArray]:
        for group in groups(texts, len, self.longest_piece):
            with library_errors(f"{self.name}: cannot encode a text"):
                # Unlike `encode`, this releases the interpreter lock and computes no offsets.
                batch = self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
            for encoding in batch:
                yield self._ordinary(np.array(encoding.ids, dtype=self.dtype))

    def _ordinary(self, ids: TokenArray) -> TokenArray:
        """Replaces special tokens, which some models (Unigram, WordLevel) find in text, by ordinary tokens."""
        if not self._is_special[ids].any():
            return ids
        return np.array([j for i in ids.tolist() for j in self._letters.get(i, (i,))], dtype=self.dtype)

    def decode(self, ids: list[int]) -> str:
        with library_errors(f"{self.name}: cannot decode the ids of a text"):
            return self._tokenizer.decode([i for i in ids if i < self.vocab_size and not self._is_special[i]])


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raises `DataError` in place of any error of the library. Some broken files make the library panic, and a panic is
    not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error}") from None


def _parse(name: str, text: str) -> dict[str, Any]:
    """Parses the file without truncation, padding, post-processing and dropout."""
    with reworded(DataError, f"{name}: not a valid tokenizer.json", caught=(ValueError, RecursionError)):
        spec = json.loads(text)
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise DataError(f"{name}: not a valid tokenizer.json: it has no 'model'")
    if "dropout" in spec["model"]:
        spec["model"]["dropout"] = None
    return {**spec, "truncation": None, "padding": None, "post_processor": None}


def _choose_separator(name: str, vocabulary: dict[str, int], separator: str | None) -> str:
    for token in _SEPARATORS if separator is None else (separator,):
        if token in vocabulary:
            return token
    if separator is not None:
        raise ConfigError(f"data.separator: {separator!r} is not a token of {name}")
    raise ConfigError(
        f"data.separator: {name} has none of {', '.join(_SEPARATORS)}; set data.separator to the token that precedes "
        "every document"
    )


def _length_rule(spec: dict[str, Any], model: Any) -> Callable[[str], int]:
    """Returns a function that computes how many bytes of text a token of the model represents."""
    prefix, suffix = (getattr(model, key, None) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    before = str([spec.get("normalizer"), spec.get("pre_tokenizer")])
    one_per_character, spaces = "'ByteLevel'" in before, "'▁'" in before

    def byte_length(token: str) -> int:
        token = token.removeprefix(prefix).removesuffix(suffix)
        if one_per_character:
            return len(token)
        if spec["model"].get("byte_fallback") and _BYTE_TOKEN.fullmatch(token):
            return 1
        return len((token.replace("▁", " ") if spaces else token).encode())

    return byte_length


def json_file(name: str) -> Path:
    """Finds the file of a tokenizer. Raises ConfigError if `name` is not a path, DataError if the file is missing."""
    with suppress(OSError, RuntimeError):  # not a valid path: too long, or ~ of an unknown user
        file = Path(name).expanduser()
        if file.is_dir():
            file /= TOKENIZER_FILE
        if file.is_file():
            return file
        if file.name.endswith(".json"):
            raise DataError(f"data.tokenizer: there is no file {file}")
    raise ConfigError(
        f"data.tokenizer: {name!r} is neither a tokenizer nor a file; use 'bytes', which needs no download, 'gpt2', "
        "or the path of a tokenizer.json or of its folder (nothing is fetched from the Hugging Face hub by name)"
    )


def _gpt2_ranks(merges: str) -> dict[bytes, int]:
    """Returns the id of each token by its bytes: single bytes first, then the result of each merge, since tiktoken
    merges the pair with the lowest id first."""
    bytes_of = dict(sorted((letter, byte) for byte, letter in enumerate(byte_letters())))
    lines = merges.split("\n")[1:]  # the first line is a version
    tokens = [*bytes_of, *("".join(line.split(" ")) for line in lines if line)]
    return {bytes(bytes_of[character] for character in token): i for i, token in enumerate(tokens)}


def byte_letters() -> list[str]:
    """Returns the character that represents each byte in byte-level BPE: itself if printable, else one from 256 on."""
    others = itertools.count(256)
    return [chr(byte) if chr(byte).isprintable() and byte != ord(" ") else chr(next(others)) for byte in range(256)]


def _from_folder(folder: str) -> bytes:
    wanted = f"data.tokenizer_path: {folder} must be a folder with {GPT2_FILE}"
    with reworded(DataError, wanted, caught=(OSError, RuntimeError)):  # RuntimeError: ~ of an unknown user
        return _checked(str(Path(folder, GPT2_FILE)), Path(folder, GPT2_FILE).expanduser().read_bytes())


def _checked(where: str, data: bytes) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != GPT2_SHA256:
        raise DataError(f"{where}: is not {GPT2_FILE} of gpt2: expected the sha256 {GPT2_SHA256}, found {found}")
    return data


def _download() -> bytes:
    """Reads the file from tiktoken's cache or downloads it there; tiktoken chooses the folder and checks the hash.

    tiktoken's download has no timeout, so it runs in a thread that is abandoned after the timeout.
    """
    from tiktoken.load import read_file_cached

    default = str(Path(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    entry = Path(folder, hashlib.sha1(GPT2_URL.encode(), usedforsecurity=False).hexdigest())
    if is_offline() and not (folder and entry.is_file()):
        raise _no_download(f"HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set and {folder or 'the cache'} lacks it")
    download = run_in_thread(lambda: read_file_cached(GPT2_URL, GPT2_SHA256), "data-download")
    if not wait([download], DOWNLOAD_TIMEOUT_S).done:
        raise _no_download(f"not finished after {DOWNLOAD_TIMEOUT_S:g} s")
    try:
        data: bytes = download.result()
    except ValueError as error:  # wrong hash
        raise DataError(f"data.tokenizer: {GPT2_FILE} of gpt2: {error}") from None
    except OSError as error:
        if error.filename is not None:  # an error of the disk, not of the network
            raise DataError(f"cannot use the cache folder {folder}: {error}") from error
        raise _no_download(str(error)) from error
    return _checked(GPT2_URL, data)  # tiktoken does not check the hash if its cache is disabled


def _no_download(reason: str) -> DataUnavailableError:
    return DataUnavailableError(
        f"data.tokenizer: cannot download {GPT2_FILE} of gpt2: {reason}. Download {GPT2_URL} on a machine that can, "
        "put it into a folder and set data.tokenizer_path=FOLDER, or use data.tokenizer=bytes"
    )
