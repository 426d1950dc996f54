"""Threads that never keep a process alive: one that waits for a dead server must not delay its end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """`submit` as in concurrent.futures, whose own pools are waited for when the interpreter ends."""

    def __init__(self, threads: int, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, lambda: function(*arguments)))
        return future

    def close(self) -> None:
        """Ends the threads when what they do now is done; what waits is not begun."""
        while not self._jobs.empty():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # belongs to whoever asks for the result
                future.set_exception(error)
            del future, call, job  # results can be large, and the next job may be long in coming
