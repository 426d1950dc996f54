"""Token shards: documents tokenised once, read by mapping the files.

FOLDER/manifest.json         format, tokenizer, totals, and of every shard its counts, sizes and SHA-256; written last
FOLDER/shard-00000.tokens    tokens back to back, little-endian, each document behind a separator
FOLDER/shard-00000.docs      two rows of 64-bit numbers: how many tokens each document has, and what its text hashes to
FOLDER/shard-00000.json      this shard's entry of the manifest, from when it was done until all are

A folder without a manifest is not finished. The hash decides a document's side of the split, so any
data.validation_fraction works with the same shards.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nsa import faults
from nsa.data.corpus import Counts, Keys, Tokenised
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError

MANIFEST = "manifest.json"
FORMAT = "nsa-shards"
VERSION = 1


@dataclass(frozen=True)
class ShardEntry:
    """What one shard holds. `plan` names the preparation it belongs to."""

    number: int
    plan: str
    documents: int
    tokens: int
    text_bytes: int
    tokens_sha256: str
    docs_sha256: str
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return stem_of(self.number)


@dataclass(frozen=True)
class Shards:
    """Opened folders, their documents back to back."""

    pieces: Sequence[TokenArray]
    lengths: Counts
    keys: Keys
    fingerprint: str


def stem_of(number: int) -> str:
    return f"shard-{number:05d}"


def tokens_path(folder: Path, number: int) -> Path:
    return folder / f"{stem_of(number)}.tokens"


def docs_path(folder: Path, number: int) -> Path:
    return folder / f"{stem_of(number)}.docs"


def entry_path(folder: Path, number: int) -> Path:
    return folder / f"{stem_of(number)}.json"


def write_shard(folder: Path, number: int, plan: str, parts: Iterable[Tokenised], tokenizer: Tokenizer) -> ShardEntry:
    """Writes a shard beside its place, then renames it; its entry comes last, and says that it is whole."""
    dtype = tokenizer.dtype.newbyteorder("<")
    lengths: list[Counts] = []
    keys: list[Keys] = []
    skipped: dict[str, int] = {}
    text_bytes = 0
    digest = hashlib.sha256()
    aside = tokens_path(folder, number).with_suffix(".tokens.part")
    with aside.open("wb") as file:
        for part in parts:
            content = np.ascontiguousarray(part.tokens.astype(dtype, copy=False)).data
            digest.update(content)
            file.write(content)
            lengths.append(part.lengths)
            keys.append(part.keys)
            text_bytes += part.text_bytes
            for reason, count in part.skipped.reasons.items():
                skipped[reason] = skipped.get(reason, 0) + count
        _flush(file)
    faults.point("prepare.tokens")
    documents = np.stack([_join(lengths, np.int64).view(np.uint64), _join(keys, np.uint64)]).astype("<u8")
    _write_flushed(docs_path(folder, number).with_suffix(".docs.part"), documents.tobytes())
    entry = ShardEntry(
        number,
        plan,
        documents.shape[1],
        int(documents[0].sum()),
        text_bytes,
        digest.hexdigest(),
        hashlib.sha256(documents.tobytes()).hexdigest(),
        skipped,
    )
    faults.point("prepare.docs")
    aside.rename(tokens_path(folder, number))
    docs_path(folder, number).with_suffix(".docs.part").rename(docs_path(folder, number))
    faults.point("prepare.renamed")
    write_json(entry_path(folder, number), asdict(entry))
    faults.point("prepare.entry")
    return entry


def _join(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def read_entry(folder: Path, number: int, plan: str, itemsize: int) -> ShardEntry | None:
    """The entry of a shard that is done and has its size; None where it is to be made."""
    try:
        entry = _entry(json.loads(entry_path(folder, number).read_text(encoding="utf-8")))
        sizes = tokens_path(folder, number).stat().st_size, docs_path(folder, number).stat().st_size
    except (OSError, ValueError, DataError):
        return None
    whole = sizes == (entry.tokens * itemsize, entry.documents * 16)
    return entry if whole and entry.plan == plan and entry.number == number else None


def write_manifest(folder: Path, plan: str, about: str, tokenizer: Tokenizer, entries: Sequence[ShardEntry]) -> None:
    skipped: dict[str, int] = {}
    for entry in entries:
        for reason, count in entry.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    faults.point("prepare.manifest")
    write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "version": VERSION,
            "plan": plan,
            "source": about,
            "tokenizer": {
                "name": tokenizer.name,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "separator": tokenizer.separator,
                "dtype": tokenizer.dtype.name,
            },
            "documents": sum(e.documents for e in entries),
            "tokens": sum(e.tokens for e in entries),
            "text_bytes": sum(e.text_bytes for e in entries),
            "skipped": skipped,
            "shards": [asdict(e) for e in entries],
        },
    )
    for entry in entries:
        entry_path(folder, entry.number).unlink(missing_ok=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"data.paths: {folder} holds no finished shards (no {MANIFEST}); "
            f"`nsa data prepare {folder} ...` makes them, and goes on where it was stopped"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}; prepare the data again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: is no manifest of token shards; give a folder that `nsa data prepare` wrote")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{path}: has format version {manifest.get('version')!r}, this program reads {VERSION}; prepare again"
        )
    try:
        for name, kind in (
            ("name", str),
            ("fingerprint", str),
            ("vocab_size", int),
            ("separator", int),
            ("dtype", str),
        ):
            if not isinstance(manifest["tokenizer"][name], kind):
                raise ValueError(f"tokenizer.{name} is {manifest['tokenizer'][name]!r}")
        if manifest["tokenizer"]["dtype"] not in ("uint8", "uint16", "uint32"):
            raise ValueError(f"tokenizer.dtype is {manifest['tokenizer']['dtype']!r}")
        manifest["shards"] = [_entry(shard) for shard in manifest["shards"]]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"{path}: is damaged: {error}; prepare the data again") from None
    return manifest


def _entry(content: Any) -> ShardEntry:
    try:
        entry = ShardEntry(**content)
    except TypeError as error:
        raise DataError(f"a shard's entry is damaged: {error}") from None
    for name in ("number", "documents", "tokens", "text_bytes"):
        if type(getattr(entry, name)) is not int or getattr(entry, name) < 0:
            raise DataError(f"a shard's entry is damaged: {name} is {getattr(entry, name)!r}")
    return entry


def open_shards(folders: Sequence[Path], tokenizer: Tokenizer) -> Shards:
    """Maps every shard. Sizes and counts are checked; `verify` reads every byte."""
    pieces: list[TokenArray] = []
    lengths: list[Counts] = []
    keys: list[Keys] = []
    digest = hashlib.sha256()
    for folder in folders:
        manifest = read_manifest(folder)
        _check_tokenizer(folder, manifest["tokenizer"], tokenizer)
        for entry in manifest["shards"]:
            shard_lengths, shard_keys = read_documents(folder, entry)
            if entry.tokens:
                pieces.append(map_tokens(folder, entry, tokenizer.dtype))
            lengths.append(shard_lengths)
            keys.append(shard_keys)
            digest.update(f"{entry.tokens_sha256} {entry.docs_sha256}\n".encode())
    return Shards(pieces, _join(lengths, np.int64), _join(keys, np.uint64), digest.hexdigest())


def _check_tokenizer(folder: Path, made_with: dict[str, Any], tokenizer: Tokenizer) -> None:
    if made_with["fingerprint"] != tokenizer.fingerprint:
        raise DataError(
            f"data.tokenizer: {folder} was prepared with {made_with['name']!r} ({made_with['vocab_size']:,} tokens), "
            f"the run has {tokenizer.name!r} ({tokenizer.vocab_size:,}); set data.tokenizer to it, or prepare again"
        )


def map_tokens(folder: Path, entry: ShardEntry, dtype: np.dtype[np.unsignedinteger]) -> TokenArray:
    path = tokens_path(folder, entry.number)
    _check_size(path, entry.tokens * dtype.itemsize)
    return np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r")


def read_documents(folder: Path, entry: ShardEntry) -> tuple[Counts, Keys]:
    path = docs_path(folder, entry.number)
    _check_size(path, entry.documents * 16)
    try:
        table = np.fromfile(path, dtype="<u8").reshape(2, entry.documents)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; prepare the data again") from None
    lengths = table[0].view(np.int64)
    if (lengths < 1).any() or int(lengths.sum()) != entry.tokens:
        raise DataError(f"{path}: its documents do not add up to the shard's {entry.tokens} tokens; prepare again")
    return lengths, table[1]


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; prepare the data again") from None
    if found != size:
        raise DataError(f"{path}: has {found} bytes, the manifest says {size}; prepare the data again")


def verify(folder: Path) -> dict[str, Any]:
    """Reads every byte of a prepared folder; its manifest, or a DataError that names the first damaged file."""
    manifest = read_manifest(folder)
    made_with = manifest["tokenizer"]
    dtype = np.dtype(made_with["dtype"])
    for entry in manifest["shards"]:
        lengths, _ = read_documents(folder, entry)
        for path, wanted in (
            (tokens_path(folder, entry.number), entry.tokens_sha256),
            (docs_path(folder, entry.number), entry.docs_sha256),
        ):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != wanted:
                raise DataError(f"{path}: is damaged: its SHA-256 is {found}, the manifest says {wanted}")
        if entry.tokens:
            tokens = map_tokens(folder, entry, dtype)
            if int(tokens.max()) >= made_with["vocab_size"]:
                raise DataError(f"{tokens_path(folder, entry.number)}: holds a token beyond the vocabulary")
            if (tokens[np.cumsum(lengths) - lengths] != made_with["separator"]).any():
                raise DataError(f"{tokens_path(folder, entry.number)}: a document does not begin with the separator")
    return manifest


def write_json(path: Path, content: Any) -> None:
    """Beside its place, flushed, then renamed."""
    aside = path.with_name(path.name + ".part")
    _write_flushed(aside, json.dumps(content, indent=1).encode() + b"\n")
    aside.rename(path)


def _write_flushed(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _flush(file)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
