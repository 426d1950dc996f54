"""Token shards: documents tokenised once. Their files may change at any time: see `ShardTokens`.

FOLDER/tokenizer.json        a copy of the tokenizer, if it is a file, so that the folder is self-contained
FOLDER/manifest.json         format, tokenizer, totals, and counts, sizes and SHA-256 of every shard; written last
FOLDER/shard-00000.tokens    concatenated tokens, little-endian, each document after a separator
FOLDER/shard-00000.docs      two rows of 64-bit numbers: the token count of each document, and the hash of its text
FOLDER/shard-00000.json      manifest entries of this shard and of those written with it; removed at the end

A folder without a manifest is not finished. The hash decides the split of a document, so the same shards work with any
data.validation_fraction.
"""

import hashlib
import json
import os
import resource
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from nsa import faults
from nsa.data.corpus import Counts, Keys, TokenFile, Tokenised, join
from nsa.data.sources.base import Skipped
from nsa.data.tokenizers import TOKENIZER_FILE, JsonTokenizer, TokenArray, Tokenizer
from nsa.errors import DataError, reworded
from nsa.files import expand_home, open_replacement, replace_file

MANIFEST = "manifest.json"
FORMAT = "nsa-shards"
VERSION = 1
OTHER_FILES = 64  # files other than shards that a process may have open
AGAIN = "prepare the data again with --fresh"


class ShardEntry(BaseModel):
    """The manifest entry of one shard. `plan` names the preparation that wrote it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    number: NonNegativeInt
    plan: str
    documents: NonNegativeInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    tokens_sha256: str
    docs_sha256: str
    skipped: dict[str, int] = {}


_ENTRIES = TypeAdapter(Annotated[list[ShardEntry], Field(min_length=1)])


class TokenizerEntry(BaseModel):
    """The tokenizer that a folder was prepared with."""

    model_config = ConfigDict(strict=True)

    name: str
    fingerprint: str
    vocab_size: int
    separator: int
    dtype: Literal["uint8", "uint16", "uint32"]


class PartEntry(BaseModel):
    """Part `number` of `of` of a preparation of `tasks` groups of units: the groups `number - 1`, `number - 1 + of` and
    so on."""

    model_config = ConfigDict(strict=True, frozen=True)

    number: PositiveInt
    of: PositiveInt
    tasks: PositiveInt

    @property
    def groups(self) -> range:
        return range(self.number - 1, self.tasks, self.of)


class Manifest(BaseModel):
    """The contents of manifest.json. Only a part of a preparation may have no shards."""

    model_config = ConfigDict(strict=True)

    format: str = FORMAT
    version: int = VERSION
    plan: str
    source: str
    tokenizer: TokenizerEntry
    documents: int
    tokens: int
    text_bytes: int
    skipped: dict[str, int]
    shards: list[ShardEntry]
    part: PartEntry | None = None

    @model_validator(mode="after")
    def _check_shards(self) -> Self:
        if not self.shards and self.part is None:
            raise ValueError("a finished preparation has at least one shard")
        return self


def shard_path(folder: Path, number: int, kind: Literal["tokens", "docs", "json"]) -> Path:
    return folder / f"shard-{number:05d}.{kind}"


def write_shard(
    folder: Path, number: int, plan: str, parts: Iterable[Tokenised[TokenArray]], tokenizer: Tokenizer
) -> ShardEntry:
    """Writes the files of a shard, each atomically. Returns the manifest entry, for `write_entries`."""
    dtype = tokenizer.dtype.newbyteorder("<")
    digest = hashlib.sha256()
    tokens_path, docs_path = (shard_path(folder, number, kind) for kind in ("tokens", "docs"))

    def without_tokens(part: Tokenised[TokenArray]) -> Tokenised[TokenArray]:
        for tokens in part.pieces:
            content = np.ascontiguousarray(tokens.astype(dtype, copy=False)).data
            digest.update(content)
            file.write(content)
        return replace(part, pieces=[])

    with open_replacement(tokens_path) as file:
        shard = join(map(without_tokens, parts), tokenizer)
        file.flush()
        os.fsync(file.fileno())
        faults.point("prepare.tokens")
        documents = np.stack([shard.lengths.view(np.uint64), shard.keys]).astype("<u8")
        replace_file(docs_path, documents.tobytes())
        faults.point("prepare.docs")
    faults.point("prepare.renamed")
    return ShardEntry(
        number=number,
        plan=plan,
        documents=documents.shape[1],
        tokens=int(documents[0].sum()),
        text_bytes=shard.text_bytes,
        tokens_sha256=digest.hexdigest(),
        docs_sha256=hashlib.sha256(documents.tobytes()).hexdigest(),
        skipped=dict(shard.skipped),
    )


def write_entries(folder: Path, entries: Sequence[ShardEntry]) -> None:
    """Marks shards that were written together as complete."""
    _write_json(shard_path(folder, entries[0].number, "json"), [entry.model_dump() for entry in entries])
    faults.point("prepare.entry")


def read_entries(folder: Path) -> list[list[ShardEntry]]:
    """Reads the entries that `write_entries` wrote in an unfinished preparation. Omits damaged files, so that their
    shards are written again."""
    found = []
    for path in folder.glob("shard-*.json"):
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(path.read_bytes())
            found.append(_ENTRIES.validate_python(content if isinstance(content, list) else [content]))  # older form
    return found


def sizes_of(entry: ShardEntry, itemsize: int) -> dict[str, int]:
    """Returns the names and sizes of the files of a shard."""
    tokens, docs = (shard_path(Path(), entry.number, kind).name for kind in ("tokens", "docs"))
    return {tokens: entry.tokens * itemsize, docs: entry.documents * 16}


def has_sizes(folder: Path, entry: ShardEntry, itemsize: int) -> bool:
    """Whether the files of a shard exist and have the sizes in its entry."""
    paths = {folder / name: size for name, size in sizes_of(entry, itemsize).items()}
    return all(path.exists() and path.stat().st_size == size for path, size in paths.items())


def make_manifest(
    plan: str, source: str, tokenizer: TokenizerEntry, entries: Sequence[ShardEntry], part: PartEntry | None = None
) -> Manifest:
    content: dict[str, Any] = {"plan": plan, "source": source, "tokenizer": tokenizer, "part": part}
    totals = {name: sum(getattr(entry, name) for entry in entries) for name in ("documents", "tokens", "text_bytes")}
    skipped = sum((Skipped(entry.skipped) for entry in entries), Skipped())
    return Manifest(skipped=dict(skipped), shards=list(entries), **content, **totals)


def write_manifest(
    folder: Path,
    plan: str,
    source: str,
    tokenizer: Tokenizer,
    entries: Sequence[ShardEntry],
    part: PartEntry | None = None,
) -> None:
    made_with: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "separator")
    }
    made_with["dtype"] = tokenizer.dtype.name
    file = tokenizer.text.encode() if isinstance(tokenizer, JsonTokenizer) else None
    store_manifest(folder, make_manifest(plan, source, TokenizerEntry(**made_with), entries, part), file)


def store_manifest(folder: Path, manifest: Manifest, tokenizer_file: bytes | None) -> None:
    if tokenizer_file is not None:
        replace_file(folder / TOKENIZER_FILE, tokenizer_file)
    faults.point("prepare.manifest")
    _write_json(folder / MANIFEST, manifest.model_dump(exclude_none=True))
    for entry in manifest.shards:
        shard_path(folder, entry.number, "json").unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.exists():
            raise DataError(f"data.paths: no such folder: {folder}; relative paths start at {Path.cwd()}") from None
        remedy = f"`nsa data prepare {folder} ...` writes them, and resumes where it was stopped"
        if any(folder.glob(f"part-*/{MANIFEST}")):
            remedy = f"`nsa data merge {folder}` joins its parts"
        raise DataError(f"data.paths: {folder} contains no finished shards (no {MANIFEST}); {remedy}") from None
    except NotADirectoryError:
        hint = "give a folder that `nsa data prepare` wrote, or the file to data.source=text"
        raise DataError(f"data.paths: {folder} is a file; {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {AGAIN}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: is not a manifest of token shards; give a folder that `nsa data prepare` wrote")
    if content.get("version") != VERSION:
        raise DataError(f"{path}: has format version {content.get('version')!r}, this program reads {VERSION}; {AGAIN}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: is damaged: {field}: {first['msg']}; {AGAIN}") from None


class ShardTokens(TokenFile):
    """The tokens of one shard. Every id is compared with the vocabulary. A file that changed after `check` is checked
    again before its tokens are used."""

    def __init__(self, folder: Path, entry: ShardEntry, dtype: np.dtype[np.unsignedinteger], vocab_size: int):
        super().__init__(shard_path(folder, entry.number, "tokens"), dtype, AGAIN)
        self._length, self._sha256, self._vocab_size = entry.tokens, entry.tokens_sha256, vocab_size
        check_size(self.path, self._length * self.dtype.itemsize, self._stamp[0])
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def read(self, place: int, out: TokenArray) -> None:
        while not self._fill(out, place * self.dtype.itemsize):
            self.check()
        if np.maximum.reduce(out) >= self._vocab_size:
            raise DataError(f"{self.path}: contains token {out.max()}, the vocabulary has {self._vocab_size}; {AGAIN}")

    def check(self) -> None:
        """Compares size and SHA-256 of the file with the manifest. Raises DataError."""
        with self._lock, reworded(DataError, f"{self.path}: cannot be read", AGAIN):
            stamp = self._state()
            check_size(self.path, self._length * self.dtype.itemsize, stamp[0])
            self._file.seek(0)
            _check_hash(self.path, hashlib.file_digest(self._file, "sha256").hexdigest(), self._sha256)
            self._stamp = stamp


def open_shards(folders: Sequence[str | Path], tokenizer: Tokenizer) -> tuple[Tokenised[ShardTokens], str]:
    """Opens all shards. Returns their documents and fingerprint. Checks sizes and counts; the caller may `check` the
    tokens, and `verify` checks everything."""
    pieces: list[ShardTokens] = []
    lengths: list[Counts] = [np.empty(0, np.int64)]  # a part of a preparation may have no shards
    keys: list[Keys] = [np.empty(0, np.uint64)]
    digest = hashlib.sha256()
    for given in folders:
        folder = expand_home(str(given))
        manifest = read_manifest(folder)
        made_with = manifest.tokenizer
        if made_with.fingerprint != tokenizer.fingerprint:
            if made_with.vocab_size == tokenizer.vocab_size and made_with.separator != tokenizer.separator:
                raise DataError(
                    f"data.separator: {folder} was prepared with token {made_with.separator}, the run has "
                    f"{tokenizer.separator}; set data.separator as in the preparation, or prepare again"
                )
            raise DataError(
                f"data.tokenizer: {folder} was prepared with {made_with.name!r} ({made_with.vocab_size:,} tokens), the "
                f"run has {tokenizer.name!r} ({tokenizer.vocab_size:,}); set data.tokenizer to it, or prepare again"
            )
        remedy = "prepare them with a larger --shard-mb"
        allow_open_files(len(manifest.shards), f"shards in {folder}", remedy)
        for entry in manifest.shards:
            shard_lengths, shard_keys = read_documents(folder, entry)
            pieces.append(ShardTokens(folder, entry, tokenizer.dtype, tokenizer.vocab_size))
            lengths.append(shard_lengths)
            keys.append(shard_keys)
            digest.update(f"{entry.tokens_sha256} {entry.docs_sha256}\n".encode())
    return Tokenised(pieces, np.concatenate(lengths), np.concatenate(keys)), digest.hexdigest()


def allow_open_files(count: int, what: str, remedy: str) -> None:
    """Raises the limit of open files of the process as far as the system allows: every piece of a corpus needs a file
    descriptor. Raises DataError if `count` more pieces are too many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened = OTHER_FILES + sum(1 for _ in Path("/dev/fd").iterdir())
    if 0 <= most < count + opened:
        raise DataError(
            f"data.paths: {count:,} {what}, and this process may open {most:,} files, of which it needs {opened} for "
            f"others; {remedy}, or have the hard limit of `ulimit -n` raised"
        )


def read_documents(folder: Path, entry: ShardEntry) -> tuple[Counts, Keys]:
    path = shard_path(folder, entry.number, "docs")
    with reworded(DataError, f"{path}: cannot be read", AGAIN, (OSError, ValueError)):
        check_size(path, entry.documents * 16, path.stat().st_size)
        table = np.fromfile(path, dtype="<u8").reshape(2, entry.documents)
    _check_hash(path, hashlib.sha256(table.tobytes()).hexdigest(), entry.docs_sha256)
    lengths = table[0].view(np.int64)
    if (lengths < 1).any() or int(lengths.sum()) != entry.tokens:
        raise DataError(f"{path}: its documents do not add up to the shard's {entry.tokens} tokens; {AGAIN}")
    return lengths, table[1]


def _check_hash(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: is damaged: its SHA-256 is {found}, the manifest says {wanted}; {AGAIN}")


def check_size(path: Path, wanted: int, found: int) -> None:
    if found != wanted:
        raise DataError(f"{path}: has {found} bytes, the manifest says {wanted}; {AGAIN}")


def verify(folder: Path) -> Manifest:
    """Reads every byte of a prepared folder. Returns the manifest, or raises DataError for the first damaged file."""
    manifest = read_manifest(folder)
    made_with = manifest.tokenizer
    for entry in manifest.shards:
        lengths, _ = read_documents(folder, entry)
        shard = ShardTokens(folder, entry, np.dtype(made_with.dtype), made_with.vocab_size)
        shard.check()
        if not len(shard):
            continue
        tokens = np.memmap(shard.path, shard.dtype, "r")
        if tokens.max() >= made_with.vocab_size:
            raise DataError(f"{shard.path}: contains a token that is not in the vocabulary; {AGAIN}")
        if (tokens[np.cumsum(lengths) - lengths] != made_with.separator).any():
            raise DataError(f"{shard.path}: a document does not begin with the separator; {AGAIN}")
    return manifest


def _write_json(path: Path, content: Any) -> None:
    replace_file(path, json.dumps(content, indent=1).encode() + b"\n")
