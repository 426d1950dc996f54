"""Files that a reader sees whole or not at all. Needs no torch."""

import os
from contextlib import suppress
from pathlib import Path

from nsa.files import regular


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file and renames it: a reader sees the old file or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=regular) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
