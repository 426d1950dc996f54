"""Threads that read data, and waiting for them: with reports, a timeout, and an end when the run is asked to stop.

They are daemon threads: one that waits for a server that does not answer must not delay the end of the process.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from nsa.data.sources.base import Progress
from nsa.errors import DataUnavailableError

if TYPE_CHECKING:  # needs pyarrow, which takes a while to import
    from nsa.data.sources.dataset import HubDataset

T = TypeVar("T")
U = TypeVar("U")
POLL_S = 0.1  # how soon a request to stop is seen
GRACE_S = 2.0  # a shorter wait is not interrupted: a step that lacks a moment is worth finishing


class WaitStopped(Exception):  # noqa: N818  (caught by the run, never seen by a user)
    """A wait ended because the process was asked to stop."""


class Activity:
    """What the sources of a run are doing, for the thread that waits for them. Filled while they are being opened."""

    def __init__(self) -> None:
        self._progress: list[tuple[str, Progress]] = []
        self._remote: list[HubDataset] = []

    def add(self, source: str, progress: Progress) -> Progress:
        self._progress.append((source, progress))
        return progress

    def watch(self, source: "HubDataset") -> None:
        self._remote.append(source)
        self.add(source.name, source.listed)

    def arrived(self) -> int:
        """Grows while anything arrives."""
        return sum(progress.done for _, progress in self._progress)

    def server(self) -> str | None:
        """The request that a server has not answered yet; None when there is none."""
        return next((what for source in self._remote if (what := source.waiting_for())), None)

    def waiting_for(self) -> str | None:
        """All that is known: "fineweb_edu: 5 of 32 row groups tokenised; FILE, row group 3: try 4, ..."."""
        current = next((f"{source}: {progress}" for source, progress in self._progress if progress.is_open), None)
        return "; ".join(filter(None, (current, self.server()))) or None

    def cancel(self) -> None:
        """Requests of other threads end soon, with an error."""
        for source in self._remote:
            source.cancel()


@dataclass(frozen=True)
class Waiter:
    """Every `stall_s` seconds of a wait `report` gets its seconds so far, and a message with what `activity` knows.

    When `stopped` returns True, an interruptible wait ends with `WaitStopped`.
    """

    activity: Activity
    stall_s: float
    report: Callable[[float, str], None]
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    pause: Callable[["Future[Any]", float], object] = lambda future, seconds: wait([future], seconds)

    def wait(
        self,
        future: "Future[T]",
        what: str,
        *,
        timeout_s: float = math.inf,
        setting: str = "",
        interruptible: bool = True,
    ) -> T:
        """The result of a future.

        Raises `DataUnavailableError` when nothing arrived for `timeout_s`, which the key `setting` configures. A wait
        may take longer as long as something arrives: a slow tokenizer, or a run that has to find its position again.
        """
        start = last_arrival = last_report = self.clock()
        arrived = self.activity.arrived()
        while not future.done():
            self.pause(future, min(POLL_S, self.stall_s))
            if future.done():
                break
            now = self.clock()
            if self.activity.arrived() != arrived:
                last_arrival, arrived = now, self.activity.arrived()
            if now - last_arrival >= timeout_s:
                raise DataUnavailableError(
                    f"{self._message(what, now - start)}; nothing arrived for {timeout_s:g} s: check the source, or "
                    f"allow more time with {setting}"
                )
            if interruptible and now - start >= GRACE_S and self.stopped():
                raise WaitStopped
            if now - last_report >= self.stall_s:
                last_report = now
                self.report(now - start, self._message(what, now - start))
        return future.result()

    def run(self, function: Callable[[], T], what: str, *, interruptible: bool = True) -> T:
        """What the function returns or raises. A thread calls it, so that this one can report and be interrupted."""
        return self.wait(run_in_thread(function, "data-wait"), what, interruptible=interruptible)

    def _message(self, what: str, waited: float) -> str:
        known = self.activity.waiting_for()
        return f"data: waiting for {what} since {waited:.1f} s" + (f"; {known}" if known else "")


class DaemonPool:
    """`submit` as in concurrent.futures, whose own pools are joined when the interpreter ends."""

    def __init__(self, threads: int, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, function))
        return future

    def close(self) -> None:
        """Cancels what is queued. The threads end when their current job is done."""
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job  # results can be large, and the next job may be long in coming


def in_threads(
    function: Callable[[U], T], items: Sequence[U], threads: int, progress: Progress | None = None
) -> Generator[T, None, None]:
    """What the function makes of every item, in order. Threads, one at least, are a few items ahead."""
    threads, progress = max(1, threads), progress or Progress("items")
    pool = DaemonPool(threads, "data-open")
    progress.done, progress.total = 0, len(items)
    remaining = iter(items)
    pending: deque[Future[T]] = deque()
    try:
        while progress.done < len(items):
            for item in islice(remaining, 4 * threads - len(pending)):
                pending.append(pool.submit(partial(function, item)))
            yield pending.popleft().result()
            progress.done += 1
    finally:
        pool.close()


def run_in_thread(function: Callable[[], T], name: str) -> "Future[T]":
    """The result of a function that a thread of its own runs."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, function), name=name, daemon=True).start()
    return future


def _run(future: "Future[T]", function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # belongs to whoever asks for the result
        future.set_exception(error)
