"""What happens to a run, as one stream of events per rank; files and dashboards are its sinks.

Every event has v (version of this schema), time, rank, step and event; docs/telemetry.md lists the kinds and their
fields. Threads of their own write: training hands an event over and goes on. Sinks that are added together share a
thread, so that one that hangs holds up no others. Before a checkpoint the files are waited for, at the end every sink,
ten seconds at most. What a sink cannot write is counted and dropped; a sink that fails by anything but the disk three
times in a row is let go.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from nsa.record.numbers import plain

SCHEMA_VERSION = 1
MOST_WAITING = 10_000  # events; beyond that a sink hangs, and events are dropped rather than memory filled
MOST_ERRORS = 3
PATIENCE_S = 10.0

Event = dict[str, Any]


class Sink(Protocol):
    name: str
    is_awaited: bool  # before a checkpoint, until everything that was emitted is there

    def write(self, event: Event) -> None: ...

    def flush(self) -> None:
        """To the disk itself."""
        ...

    def close(self) -> None: ...


Task = Callable[[Sink], None]


class EventStream:
    def __init__(self, rank: int, sinks: Sequence[Sink] = ()):
        self.rank = rank
        self.dropped = 0
        self.incidents = 0
        self.last_failure = ""
        self._writers: list[_Writer] = []
        self._lock = threading.Lock()
        self.add(*sinks)

    def add(self, *sinks: Sink) -> None:
        """Sinks that share a thread; they see events from now on."""
        if sinks:
            self._writers.append(_Writer(sinks, self._failed))

    def emit(self, event: str, step: int, **values: Any) -> None:
        line = {"v": SCHEMA_VERSION, "time": time.time(), "rank": self.rank, "step": step, "event": event, **values}
        for writer in self._writers:
            writer.write(line)

    def incident(self, kind: str, message: str, step: int) -> None:
        """Something that should not happen and did not end the run."""
        self.incidents += 1
        self.emit("incident", step, kind=kind, message=message)

    def flush(self, timeout_s: float = PATIENCE_S) -> None:
        """Everything emitted so far to the disk itself, in the files that a checkpoint waits for."""
        for writer in _late([w for w in self._writers if w.is_awaited], lambda sink: sink.flush(), timeout_s):
            self._failed(f"{writer.at} does not answer")

    def close(self) -> None:
        """Writes what is left and closes the sinks. Emitting afterwards starts anew, for the last words of a run."""
        late = _late(self._writers, lambda sink: sink.close(), PATIENCE_S)
        for writer in late:
            self._failed(f"{writer.at} does not answer", max(1, writer.waiting))
        for writer in self._writers:
            writer.end()
        self._writers = [writer for writer in self._writers if writer not in late]

    def _failed(self, why: str, count: int = 1) -> None:
        with self._lock:
            self.dropped += count
            self.last_failure = why


class _Writer:
    """Sinks and the thread that hands them events, in order. It runs when there is something to do."""

    def __init__(self, sinks: Sequence[Sink], failed: Callable[[str], None]):
        self.at = sinks[0].name  # who is written to
        self._sinks, self._failed = list(sinks), failed
        self._errors: dict[str, int] = {}  # of each sink, in a row
        self._tasks: queue.SimpleQueue[tuple[Task, threading.Event | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_awaited(self) -> bool:
        return any(sink.is_awaited for sink in self._sinks)

    @property
    def waiting(self) -> int:
        return self._tasks.qsize()

    def write(self, event: Event) -> None:
        if self.waiting >= MOST_WAITING:
            self._failed(f"{self.at} does not answer: {MOST_WAITING} events wait for it")
        else:
            self._put((lambda sink: sink.write(event), None))

    def ask(self, task: Task) -> threading.Event:
        """The answer is set when everything before it, and the task, is done."""
        done = threading.Event()
        self._put((task, done))
        return done

    def end(self) -> None:
        """The thread ends when it comes to this; one that hangs ends with the process."""
        with self._lock:
            self._tasks.put(None)
            self._thread = None

    def _put(self, item: tuple[Task, threading.Event | None]) -> None:
        with self._lock:
            self._tasks.put(item)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
                with suppress(RuntimeError):  # no thread to be had now; the next event tries again
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, done = item
            for sink in list(self._sinks):
                self._try(sink, task)
            if done is not None:
                done.set()

    def _try(self, sink: Sink, task: Task) -> None:
        self.at = sink.name
        try:
            task(sink)
            self._errors[sink.name] = 0
        except Exception as error:
            self._failed(f"{sink.name} cannot be written: {getattr(error, 'strerror', None) or error}")
            if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
                return  # a disk that is full now may have room later
            self._errors[sink.name] = self._errors.get(sink.name, 0) + 1
            if self._errors[sink.name] == MOST_ERRORS:
                self._sinks.remove(sink)
                with suppress(Exception):
                    sink.close()


def _late(writers: Sequence[_Writer], task: Task, timeout_s: float) -> list[_Writer]:
    """Has them do a task, all at once, each in its own thread; those that have not done it in time."""
    deadline = time.monotonic() + timeout_s
    asked = [(writer, writer.ask(task)) for writer in writers]
    return [writer for writer, done in asked if not done.wait(max(0.0, deadline - time.monotonic()))]


class Heartbeat:
    """`heartbeat_rank{r}.jsonl`: every event, a line each; what single layers did is in the CSV files."""

    name = "heartbeat"
    is_awaited = True

    def __init__(self, folder: Path, rank: int):
        self._path = folder / f"heartbeat_rank{rank}.jsonl"

    def write(self, event: Event) -> None:
        line = {key: plain(value) for key, value in event.items() if key != "layers"}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
