"""The on-disk format of checkpoints: file names, the manifest, and the checkpoints in a run folder.

checkpoints/step_00000500/   a committed checkpoint
    shard_rank{r}.safetensors  tensors that each rank wrote
    index.json               which shard contains which part of which tensor
    state.json               progress, loss scale, configuration, fingerprint of the data
    random_rank{r}.json      random state of each rank
    manifest.json            size and SHA-256 of every other file, written last
checkpoints/latest, best     name of the newest checkpoint, and of the one with the lowest validation loss
checkpoints/.writing-*       folders being written or deleted; the next save removes them

The manifest has exactly one valid serialization, so that a changed byte in any file, including the manifest, is
detected. nsa/checkpoint/legacy.py describes the tensor files of version 1.
"""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.errors import CheckpointError, reworded
from nsa.files import read_regular, regular, replace_file, write_flushed
from nsa.run_folder import CHECKPOINTS_FOLDER

FOLDER = CHECKPOINTS_FOLDER
LATEST, BEST = "latest", "best"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.json"
LEGACY_INDEX_FILE = ".metadata"  # in version 1
STATE_FILE = "state.json"
WRITING = ".writing-"
MODEL, OPTIMIZER = "model/", "optimizer/"  # prefixes of the names of tensors
MANIFEST_VERSION = 2
STATE_VERSION = 1
_STEP = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    found = _STEP.fullmatch(checkpoint.name)
    assert found is not None
    return int(found[1])


def random_file(rank: int) -> str:
    return f"random_rank{rank}.json"


def shard_file(rank: int) -> str:
    return f"shard_rank{rank}.safetensors"


def optimizer_key(parameter: str, key: str = "") -> str:
    return f"{OPTIMIZER}{parameter}/{key}"


def write_atomically(path: Path, content: bytes) -> None:
    """Calls `nsa.files.replace_file`, but raises CheckpointError."""
    with reworded(CheckpointError, f"{path}: cannot be written"):
        replace_file(path, content)


def committed(root: Path) -> list[Path]:
    """Returns every committed checkpoint, newest first. Raises CheckpointError if the folder cannot be read."""
    with reworded(CheckpointError, f"{root}: cannot be read"):
        named = [path for path in (root.iterdir() if root.is_dir() else ()) if _STEP.fullmatch(path.name)]
        found = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=step_of, reverse=True)


def newest_verified(root: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest undamaged checkpoint, and the problems of all newer checkpoints."""
    damage: list[str] = []
    for checkpoint in committed(root):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            damage.append(str(error))
        else:
            return checkpoint, damage
    return None, damage


def read_pointer(root: Path, pointer: str) -> str | None:
    """Returns the checkpoint name in the file `latest` or `best`; None if there is no valid name."""
    try:
        name = read_regular(root / pointer).decode(errors="replace").strip()
    except OSError:
        return None
    return name if _STEP.fullmatch(name) else None


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    with open(path, "rb", opener=regular) as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(folder: Path, files: dict[str, FileEntry]) -> None:
    write_flushed(folder / MANIFEST_FILE, _serialize_manifest({name: vars(files[name]) for name in sorted(files)}))


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Reads the manifest of a checkpoint. Accepts only names of files directly in this folder."""
    path = folder / MANIFEST_FILE
    try:
        raw = read_regular(path)
        content = json.loads(raw)
        version, files = content["version"], content["files"]
        entries = {name: FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {MANIFEST_FILE}; the checkpoint is incomplete") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if version not in (1, MANIFEST_VERSION):
        raise CheckpointError(f"{path}: has version {version!r}, this program reads versions 1 and {MANIFEST_VERSION}")
    for name in entries:
        if name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name or not name.isprintable():
            raise CheckpointError(f"{path}: {name!r} does not name a file in this folder")
    if raw != _serialize_manifest(files, version):
        raise CheckpointError(f"{path}: was changed after it was written")
    for name in (LEGACY_INDEX_FILE if version == 1 else INDEX_FILE, STATE_FILE):
        if name not in entries:
            raise CheckpointError(f"{path}: does not list {name}; the checkpoint is incomplete")
    return entries


def verify(folder: Path, names: Collection[str] | None = None) -> dict[str, FileEntry]:
    """Compares the files with these names, by default all, with the manifest by size and SHA-256. Returns the manifest.
    Raises CheckpointError with the first file that differs."""
    entries = read_manifest(folder)
    for name, entry in entries.items():
        if names is not None and name not in names:
            continue
        path = folder / name
        with reworded(CheckpointError, f"{path}: cannot be read"):
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path}: is missing")
            size = path.stat().st_size
            if size != entry.bytes:
                raise CheckpointError(f"{path}: has {size} bytes, the manifest says {entry.bytes}")
            if entry_of(path) != entry:
                raise CheckpointError(f"{path}: its content differs from the manifest's SHA-256")
    return entries


def _serialize_manifest(files: Any, version: int = MANIFEST_VERSION) -> bytes:
    body = json.dumps(files, sort_keys=True, separators=(",", ":"))
    content = {"version": version, "sha256": hashlib.sha256(body.encode()).hexdigest(), "files": files}
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"
