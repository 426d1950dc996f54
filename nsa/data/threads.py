"""Daemon threads: one that waits for a server that does not answer must not delay the end of the process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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
        while not self._jobs.empty():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job  # results can be large, and the next job may be long in coming


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
