"""What happens to a run, as one stream of events per rank; files and dashboards are its sinks.

Every event has v (version of this schema), time, rank, step and event; docs/telemetry.md lists the kinds and their
fields. A thread of its own writes: training hands an event over and goes on, and waits for it only before a checkpoint,
ten seconds at most. What a sink cannot write is counted and dropped; a sink that fails by anything but the disk three
times in a row is let go.
"""

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

SCHEMA_VERSION = 1
MOST_WAITING = 100_000  # events; beyond that a sink hangs, and events are dropped rather than memory filled
MOST_ERRORS = 3

Event = dict[str, Any]


class Sink(Protocol):
    name: str

    def write(self, event: Event) -> None: ...

    def flush(self) -> None:
        """To the disk itself."""
        ...

    def close(self) -> None: ...


class EventStream:
    def __init__(self, rank: int, sinks: Sequence[Sink] = ()):
        self.rank = rank
        self.dropped = 0
        self.incidents = 0
        self.last_failure = ""
        self._sinks: list[Sink] = list(sinks)
        self._errors: dict[str, int] = {}
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, *sinks: Sink) -> None:
        """Sinks that can be opened only later; they see events from now on."""
        self.drain()
        self._sinks += sinks

    def emit(self, event: str, step: int, **values: Any) -> None:
        line = {"v": SCHEMA_VERSION, "time": time.time(), "rank": self.rank, "step": step, "event": event, **values}
        if self._queue.qsize() > MOST_WAITING:
            self.dropped += 1
            return
        self._queue.put(line)
        self._start()

    def incident(self, kind: str, message: str, step: int) -> None:
        """Something that should not happen and did not end the run."""
        self.incidents += 1
        self.emit("incident", step, kind=kind, message=message)

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything that was emitted is written, a sink that hangs excepted."""
        if self._thread is None or not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def flush(self) -> None:
        """Everything emitted so far to the disk itself."""
        if self.drain():
            for sink in list(self._sinks):
                self._try(sink, sink.flush)

    def close(self) -> None:
        """Writes what is left and closes the sinks. Emitting afterwards starts anew, for the last words of a run."""
        self.drain()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10.0)
            self._thread = None
        for sink in self._sinks:
            self._try(sink, sink.close)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for sink in list(self._sinks):
                if self._try(sink, partial(sink.write, item)):
                    self._errors[sink.name] = 0

    def _try(self, sink: Sink, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except Exception as error:
            self._failed(sink, error)
            if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
                return False  # a disk that is full now may have room later
            self._errors[sink.name] = self._errors.get(sink.name, 0) + 1
            if self._errors[sink.name] >= MOST_ERRORS and sink in self._sinks:
                self._sinks.remove(sink)
                with suppress(Exception):
                    sink.close()
            return False

    def _failed(self, sink: Sink, error: Exception) -> None:
        self.dropped += 1
        self.last_failure = f"{sink.name} cannot be written: {getattr(error, 'strerror', None) or error}"


class Heartbeat:
    """`heartbeat_rank{r}.jsonl`: every event, a line each; what single layers did is in the CSV files."""

    name = "heartbeat"

    def __init__(self, folder: Path, rank: int):
        self._path = folder / f"heartbeat_rank{rank}.jsonl"

    def write(self, event: Event) -> None:
        line = {key: _plain(value) for key, value in event.items() if key != "layers"}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
