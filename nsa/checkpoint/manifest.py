"""What a checkpoint folder must hold: name, size and SHA-256 of every file, in `manifest.json`.

The manifest is written last and has one valid spelling, so that a changed byte anywhere, in itself too, is found.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.checkpoint.files import sha256_of, write_flushed
from nsa.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
VERSION = 1
ALWAYS_THERE = (".metadata", "state.json")
_LARGEST = 64 * 2**20  # of a manifest that is read


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, sha256_of(path))


def write_manifest(folder: Path, files: dict[str, FileEntry]) -> None:
    write_flushed(folder / MANIFEST_FILE, _spell({name: vars(files[name]) for name in sorted(files)}))


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The manifest of a checkpoint. Only plain names of files in this very folder are taken."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path}: is too large to be a manifest")
        raw = path.read_bytes()
        files = json.loads(raw)["files"]
        entries = {name: FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {MANIFEST_FILE}; it is no whole checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    for name in entries:
        if name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name or not name.isprintable():
            raise CheckpointError(f"{path}: {name!r} is no name of a file in this folder")
    if raw != _spell(files):
        raise CheckpointError(f"{path}: was changed after it was written")
    return entries


def verify(folder: Path) -> dict[str, FileEntry]:
    """Reads every file and compares; returns the manifest, or raises with the first file that differs."""
    entries = read_manifest(folder)
    for name in ALWAYS_THERE:
        if name not in entries:
            raise CheckpointError(f"{folder / MANIFEST_FILE}: does not list {name}; it is no whole checkpoint")
    for name, entry in entries.items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path}: is missing")
            size = path.stat().st_size
            if size != entry.bytes:
                raise CheckpointError(f"{path}: has {size} bytes, the manifest says {entry.bytes}")
            if sha256_of(path) != entry.sha256:
                raise CheckpointError(f"{path}: its content differs from the manifest's SHA-256")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return entries


def _spell(files: Any) -> bytes:
    body = json.dumps(files, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"version": VERSION, "sha256": digest, "files": files}, indent=1, sort_keys=True).encode() + b"\n"
