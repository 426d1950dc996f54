"""One stream of events per rank records a run. Files and dashboards are sinks of the stream.

`nsa.run_folder` lists the kinds of events, docs/telemetry.md their fields. Background threads write: training puts an
event into a queue and continues. Sinks that are added together share a thread, so a sink that hangs delays only these.
A checkpoint waits for the files; the end of a run waits for every sink, ten seconds at most. An event that a sink
cannot write is counted and dropped. A sink that fails three times in a row with anything but a disk error is removed.
"""

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from nsa.files import regular
from nsa.record.failures import Failures, reporting_bugs
from nsa.run_folder import HEARTBEAT, Event, EventKind, format_event, make_event

MAX_QUEUED = 10_000  # events; a sink with a longer queue hangs, and events are dropped to bound memory
MAX_ERRORS = 3
TIMEOUT_S = 10.0


class Sink:
    """A destination of events. `is_awaited`: a checkpoint waits until the sink has written all emitted events."""

    name = ""
    is_awaited = False

    def wants(self, event: Event) -> bool:
        """Whether `write` handles this event: only then can the sink fail or recover."""
        return True

    def write(self, event: Event) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Forces written data to disk."""

    def close(self) -> None:
        """Releases resources."""


Task = Callable[[Sink], None]


class EventStream:
    def __init__(self, rank: int, sinks: Sequence[Sink] = (), failures: Failures | None = None):
        self.rank, self.failures = rank, failures or Failures()
        self.incidents = 0
        self.emitted: set[EventKind] = set()  # the kinds of events so far
        self._writers: list[Writer] = []
        self.add(*sinks)

    def add(self, *sinks: Sink) -> None:
        """Adds sinks that share a thread; they get all later events."""
        if sinks:
            self._writers.append(Writer(sinks, self.failures))

    def emit(self, event: EventKind, step: int, **values: Any) -> None:
        self.emitted.add(event)
        made = make_event(event, self.rank, step, **values)
        for writer in self._writers:
            writer.write(made)

    def incident(self, kind: str, message: str, step: int) -> None:
        """Emits an incident: an error that did not end the run."""
        self.incidents += 1
        self.emit("incident", step, kind=kind, message=message)

    def flush(self, timeout_s: float | None = None) -> None:
        """Forces all emitted events to disk, for the sinks that a checkpoint waits for."""
        for writer in late_writers([w for w in self._writers if w.is_awaited], lambda sink: sink.flush(), timeout_s):
            self.failures.add(f"{writer.current} does not answer")

    def close(self) -> None:
        """Writes queued events and closes the sinks. Emitting afterwards starts the threads again."""
        late = close_writers(self._writers, self.failures)
        self._writers = [writer for writer in self._writers if writer not in late]


class Writer:
    """Passes events to sinks, in order, in a background thread that starts with the first event."""

    def __init__(self, sinks: Sequence[Sink], failures: Failures, name: str = "telemetry"):
        self._name = name
        self.current = sinks[0].name  # the sink that the thread is writing
        self._sinks, self._failures = list(sinks), failures
        self._errors: dict[str, int] = {}  # consecutive errors of each sink
        self._tasks: queue.SimpleQueue[tuple[Task, Event | threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may print while this thread prints

    @property
    def is_awaited(self) -> bool:
        return any(sink.is_awaited for sink in self._sinks)

    @property
    def queued(self) -> int:
        return self._tasks.qsize()

    def write(self, event: Event) -> None:
        if self.queued >= MAX_QUEUED:
            self._failures.add(f"{self.current} does not answer: {MAX_QUEUED} events wait for it")
        else:
            self._put((lambda sink: sink.write(event), event))

    def submit(self, task: Task) -> threading.Event:
        """Queues a task. The returned event is set when the task and everything queued before it are done."""
        done = threading.Event()
        self._put((task, done))
        return done

    def end(self) -> None:
        """Ends the thread after everything queued so far; a thread that hangs ends with the process."""
        with self._lock:
            self._tasks.put(None)
            self._thread = None

    def _put(self, item: tuple[Task, Event | threading.Event]) -> None:
        with self._lock:
            self._tasks.put(item)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                with suppress(RuntimeError):  # no thread could be started; the next event tries again
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, subject = item
            for sink in list(self._sinks):
                if isinstance(subject, threading.Event) or sink.wants(subject):
                    self._try(sink, task)
            if isinstance(subject, threading.Event):
                subject.set()

    def _try(self, sink: Sink, task: Task) -> None:
        self.current = sink.name
        try:
            with reporting_bugs():
                task(sink)
            self._errors[sink.name] = 0
        except Exception as error:
            self._failures.add(f"{sink.name} cannot be written: {getattr(error, 'strerror', None) or error}")
            if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
                return  # a disk that is full now may have room later
            self._errors[sink.name] = self._errors.get(sink.name, 0) + 1
            if self._errors[sink.name] == MAX_ERRORS:
                self._sinks.remove(sink)
                with suppress(Exception):
                    sink.close()


def late_writers(writers: Sequence[Writer], task: Task, timeout_s: float | None = None) -> list[Writer]:
    """Submits a task to all writers at once; returns the writers that have not done it in time."""
    deadline = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    submitted = [(writer, writer.submit(task)) for writer in writers]
    return [writer for writer, done in submitted if not done.wait(max(0.0, deadline - time.monotonic()))]


def close_writers(writers: Sequence[Writer], failures: Failures) -> list[Writer]:
    """Writes queued events, closes the sinks and ends the threads; counts the events lost by writers that hang."""
    late = late_writers(writers, lambda sink: sink.close())
    for writer in late:
        failures.add(f"{writer.current} does not answer", max(1, writer.queued))
    for writer in writers:
        writer.end()
    return late


class FileSink(Sink):
    """A file to append to. It stays open, so that the lines of a run reach its folder even after a rename."""

    def __init__(self, path: Path):
        self.name, self._path = path.name, path
        self._file: FileIO | None = None

    @property
    def size(self) -> int | None:
        """The bytes in the file; None while it is not open."""
        return None if self._file is None else os.fstat(self._file.fileno()).st_size

    def append(self, text: bytes, *, on_new_line: bool = False) -> None:
        """Raises OSError and closes the file if the disk does not take the whole text; the next call opens it again."""
        try:
            if self._file is None:
                self._file = open(self._path, "a+b", buffering=0, opener=regular)  # noqa: SIM115  (until close)
            if on_new_line and self.size and os.pread(self._file.fileno(), 1, self.size - 1) != b"\n":
                text = b"\n" + text  # a full disk may have truncated the last line
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class HeartbeatSink(FileSink):
    """`heartbeat_rank{r}.jsonl`: one line per event. The tables have the numbers of single layers."""

    is_awaited = True

    def __init__(self, folder: Path, rank: int):
        super().__init__(HEARTBEAT.path(folder, rank))
        self._begins: int | None = None  # where the events of this process begin in the file

    def write(self, event: Event) -> None:
        if self._begins is None:
            self._begins = self._path.stat().st_size if self._path.exists() else 0
        self.append(format_event(event).encode(), on_new_line=True)

    def withdraw(self) -> None:
        """Removes the events of this process."""
        if self._file is not None and self._begins is not None:
            os.ftruncate(self._file.fileno(), self._begins)
