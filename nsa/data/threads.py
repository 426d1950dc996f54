"""Daemon threads that read data, and their progress. A thread that waits for a server must not delay the end of the
process, so threads are daemons."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass
class Progress:
    """Progress of a long operation: `done` of `total`, which is None while files are being listed.

    `steps` counts parts of items, to show that an item that takes long is not stuck."""

    what: str  # "row groups tokenised"
    done: int = 0
    total: int | None = None
    steps: int = 0

    @property
    def is_open(self) -> bool:
        return self.total is None or self.done < self.total

    def __str__(self) -> str:
        return "files are being listed" if self.total is None else f"{self.done:,} of {self.total:,} {self.what}"


class DaemonPool:
    """A thread pool with daemon threads. The pools of concurrent.futures are joined when the interpreter ends."""

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
        """Cancels all queued jobs. The threads end when their current job is done."""
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job  # frees the result, which can be large, before waiting for the next job


def in_threads(
    function: Callable[[U], T], items: Sequence[U], threads: int, progress: Progress | None = None
) -> Generator[T, None, None]:
    """Yields the result of the function for every item, in order. At least one thread works a few items ahead."""
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
    """Runs a function in a new thread and returns its future."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, function), name=name, daemon=True).start()
    return future


def _run(future: "Future[T]", function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # the caller of result() gets it
        future.set_exception(error)
