"""The file of one rank's trace."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from nsa.files import regular
from nsa.record.schema import OLDER_TRACE, TRACE


class TraceFile:
    """Whole lines, each written at once, into a file that may be full.

    After `begin`, every file that this process opens begins with the event `start` with the values of the header.
    """

    def __init__(self, folder: Path, rank: int):
        self.is_closed = False
        self._header: dict[str, Any] = {}
        self._path, self._older = TRACE.path(folder, rank), OLDER_TRACE.path(folder, rank)
        self._descriptor: int | None = None
        self._is_torn = False  # what is in the file ends in the middle of a line
        self._lock = threading.Lock()  # buckets are done in a thread of their own

    def begin(self, header: dict[str, Any]) -> None:
        self._header = header
        with self._lock:
            self._open()

    def write(self, event: str, step: int | None, **values: Any) -> None:
        """Raises OSError, or ValueError for a value that is no JSON."""
        with self._lock:
            if self.is_closed:
                return
            if self._descriptor is None:
                self._open()
            self._write({"time": time.time(), "step": step, "event": event, **values})

    def rotate(self, largest: int) -> None:
        """Begins a new file if this one is larger. Of the older files one is kept."""
        with self._lock:
            if self._descriptor is not None and os.fstat(self._descriptor).st_size > largest:
                self._path.replace(self._older)
                self._close()
                self._header["continued"] = True

    def close(self) -> None:
        with self._lock:
            self._close()
            self.is_closed = True

    def _open(self) -> None:
        self._descriptor = regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._descriptor).st_size  # not 0: an earlier process wrote, and may have been killed at it
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        try:
            self._write({"time": time.time(), "step": None, "event": "start", **self._header})
        except OSError:
            self._close()
            raise

    def _write(self, line: dict[str, Any]) -> None:
        assert self._descriptor is not None
        text = b"\n" * self._is_torn + json.dumps(line, allow_nan=False).encode() + b"\n"
        written = os.write(self._descriptor, text)
        self._is_torn = written < len(text) if written else self._is_torn
        if written < len(text):
            raise OSError(f"{self._path}: only {written} of {len(text)} bytes could be written")

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
