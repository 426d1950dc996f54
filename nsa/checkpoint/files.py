"""Writing that survives a crash: a file or a folder appears whole, on disk, or not at all."""

import hashlib
import os
from pathlib import Path

from nsa.errors import CheckpointError
from nsa.files import regular


def write_flushed(path: Path, content: bytes) -> None:
    """Writes in place and waits until it is on disk."""
    with open(path, "wb", opener=regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside the place, flushes to disk, renames: a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_flushed(aside, content)
        aside.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def flush_folder(folder: Path) -> None:
    """Waits until the folder's names are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
