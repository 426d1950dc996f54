"""The file of one rank's trace: its name, and whole lines into it."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from nsa.record.schema import OLDER_TRACE, TRACE


def trace_path(folder: Path, rank: int) -> Path:
    return TRACE.path(folder, rank)


def older_path(folder: Path, rank: int) -> Path:
    """Where a file that grew too large goes."""
    return OLDER_TRACE.path(folder, rank)


class LineFile:
    """Whole lines into a file that may be full. The first is written when there is something to write."""

    def __init__(self, path: Path, older: Path):
        self._path, self._older = path, older
        self._descriptor: int | None = None
        self._is_torn = False  # what is in the file ends in the middle of a line
        self._lock = threading.Lock()  # buckets are done in a thread of their own
        self.is_closed = False

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self.is_closed:
                return
            if self._descriptor is None:
                self._descriptor = self._open()
            if self._is_torn:
                text = b"\n" + text
            written = os.write(self._descriptor, text)
            if written:
                self._is_torn = written < len(text)
            if written < len(text):
                raise OSError(f"{self._path}: only {written} of {len(text)} bytes could be written")

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(descriptor).st_size  # not 0: an earlier process wrote, and may have been killed at it
        self._is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        return descriptor

    def turn_over(self, largest: int) -> bool:
        """Begins a new file when this one is larger; the one before the last is forgotten."""
        with self._lock:
            if self._descriptor is None or os.fstat(self._descriptor).st_size <= largest:
                return False
            self._path.replace(self._older)
            self._close()
            return True

    def close(self) -> None:
        with self._lock:
            self._close()
            self.is_closed = True

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
