"""Copies the output of a rank to the console and to `run.log`. Rank r above 0 writes `run_rank{r}.log`.

Console and file are sinks (events.py) with a thread each: a pipe that nobody reads, a closed terminal or a full disk
neither ends the run nor blocks it. Text that cannot be written is counted.
"""

import errno
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Self, TextIO, cast

from nsa.errors import printable
from nsa.record.events import FileSink, Sink, Writer, close_writers, late_writers
from nsa.record.failures import Failures
from nsa.run_folder import RUN_LOG, Event

FLUSH_S = 2.0  # longest wait of an explicit flush
OUT, ERR = "standard output", "standard error"
CONSOLE_THREAD = "console"  # the end of a process must not wait for it


class RunLog:
    """A context that copies the output of Python code into the file. The output of C code is not copied.

    `screen` writes to the console only, for example a progress bar.
    """

    def __init__(self, folder: Path, rank: int):
        self.failures = Failures()
        self._redirected = ExitStack()
        self._console = Writer([_Stream(OUT, sys.stdout), _Stream(ERR, sys.stderr)], self.failures, CONSOLE_THREAD)
        self._file = Writer([_LogFile(RUN_LOG.path(folder, rank))], self.failures)
        self._writers = [self._console, self._file]
        self.screen = self._background(OUT, sys.stdout)

    def __enter__(self) -> Self:
        self.write(printable(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n"))
        shown = redirect_stdout(self.screen), redirect_stderr(self._background(ERR, sys.stderr))
        for redirection in (*shown, self.copied()):
            self._redirected.enter_context(redirection)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._redirected.close()
        if error is not None:  # its traceback is printed after this file is closed
            self.write(printable(f"ended by {type(error).__name__}: {error}\n"))
        close_writers(self._writers, self.failures)

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Inside, text printed to the current stdout and stderr is also written to the file."""
        both = [_Redirected(s, [self.write, s.write], [s.flush, self.flush]) for s in (sys.stdout, sys.stderr)]
        with redirect_stdout(both[0]), redirect_stderr(both[1]):
            yield

    def _background(self, name: str, stream: TextIO) -> TextIO:
        """A console stream that a background thread writes and flushes."""
        return cast(TextIO, _Redirected(stream, [lambda text: self._console.write({"stream": name, "text": text})], []))

    def write(self, text: str) -> None:
        """Writes to the file only."""
        self._file.write({"text": text})

    def flush(self) -> None:
        """Waits at most FLUSH_S seconds until everything printed so far is written."""
        late_writers(self._writers, lambda sink: sink.flush(), FLUSH_S)


class _LogFile(FileSink):
    def write(self, event: Event) -> None:
        self.append(event["text"].encode(errors="replace"))


class _Stream(Sink):
    """A stream of the console. Closing the sink does not close the stream."""

    def __init__(self, name: str, stream: TextIO):
        self.name, self._stream = name, stream

    def wants(self, event: Event) -> bool:
        return bool(event["stream"] == self.name)

    def write(self, event: Event) -> None:
        try:
            self._stream.write(event["text"])
            self._stream.flush()
        except ValueError:  # counts as a programming error
            if not self._stream.closed:
                raise
            raise BrokenPipeError(errno.EPIPE, "the stream is closed") from None


class _Redirected:
    """A stream whose `write` and `flush` are replaced; other attributes are those of the stream."""

    def __init__(self, stream: TextIO, writes: Sequence[Callable[[str], Any]], flushes: Sequence[Callable[[], None]]):
        self._stream, self._writes, self._flushes = stream, writes, flushes

    def write(self, text: str) -> int:
        for write in self._writes:
            write(text)
        return len(text)

    def flush(self) -> None:
        for flush in self._flushes:
            flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
