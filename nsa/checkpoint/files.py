"""Files of a checkpoint: written whole or not at all, and hashed."""

import hashlib
from pathlib import Path

from nsa.errors import CheckpointError, reworded
from nsa.files import regular, replace_file


def write_atomically(path: Path, content: bytes) -> None:
    """As `nsa.files.replace_file`; raises CheckpointError."""
    with reworded(CheckpointError, f"{path}: cannot be written"):
        replace_file(path, content)


def sha256_of(path: Path) -> str:
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
