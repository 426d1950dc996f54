"""`run.log`: everything a rank prints. Rank r above 0 writes `run_rank{r}.log`."""

import sys
import time
from pathlib import Path
from typing import Any, Self, TextIO, cast

from nsa.errors import printable
from nsa.files import regular
from nsa.record.schema import RUN_LOG


class RunLog:
    """As a context, copies stdout and stderr of Python into the file. The output of C code is not seen. A file that
    cannot be written does not stop the run."""

    def __init__(self, folder: Path, rank: int):
        self.path = RUN_LOG.path(folder, rank)
        self.failures = 0
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = open(self.path, "a", encoding="utf-8", errors="replace", buffering=1, opener=regular)
            self._file.write(printable(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n"))
        except OSError:
            self.failures += 1
        self._before = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (cast(TextIO, _Both(stream, self)) for stream in self._before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        sys.stdout, sys.stderr = self._before
        if error is not None:  # its traceback is printed after this file is closed
            self.write(printable(f"ended by {type(error).__name__}: {error}\n"))
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                self.failures += 1

    def write(self, text: str) -> None:
        if self._file is not None:
            try:
                self._file.write(text)
            except (OSError, ValueError):
                self.failures += 1


class _Both:
    """A stream whose text the log gets as well; in everything else it is the stream."""

    def __init__(self, stream: TextIO, log: RunLog):
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
