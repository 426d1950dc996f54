"""Waiting for threads that read data: never in silence, and not against a request to stop."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from nsa.data.pool import DaemonPool
from nsa.data.sources.base import RemoteSource, Tally
from nsa.errors import DataUnavailableError

T = TypeVar("T")
POLL_S = 0.1  # how soon a request to stop is seen
GRACE_S = 2.0  # a shorter wait is not left: a step that lacks a moment is worth finishing


class WaitStopped(Exception):  # noqa: N818  (caught by the run, never seen by a user)
    """A wait was left because the process was asked to stop."""


class Activity:
    """What the sources of a run are at, for the thread that waits for them. Filled while they are being opened."""

    def __init__(self) -> None:
        self._tallies: list[tuple[str, Tally]] = []
        self._remote: list[RemoteSource] = []

    def count(self, source: str, tally: Tally) -> None:
        self._tallies.append((source, tally))

    def watch(self, source: RemoteSource) -> None:
        self._remote.append(source)
        self.count(source.name, source.listed)

    def arrived(self) -> int:
        """Grows while anything arrives."""
        return sum(tally.done for _, tally in self._tallies)

    def server(self) -> str | None:
        """The server that keeps a source waiting, in words; None when none does."""
        return next((what for source in self._remote if (what := source.waiting_for())), None)

    def waiting_for(self) -> str | None:
        """All that is known: "fineweb_edu: 5 of 32 row groups tokenised; FILE, row group 3: try 4, ..."."""
        begun = next((f"{source}: {tally}" for source, tally in self._tallies if tally.is_open), None)
        return "; ".join(filter(None, (begun, self.server()))) or None

    def give_up(self) -> None:
        """What is under way in other threads ends soon, with an error."""
        for source in self._remote:
            source.give_up()


@dataclass(frozen=True)
class Limit:
    """How long nothing may arrive, and the key of the configuration that says so."""

    seconds: float
    key: str


@dataclass(frozen=True)
class Waiter:
    """Every `stall_s` seconds of a wait `report` is told how long it has been, and that with `waiting_for` as a
    sentence. `arrived` grows while a source delivers. When `stopped` says so, the wait ends with `WaitStopped`."""

    stall_s: float
    report: Callable[[float, str], None]
    waiting_for: Callable[[], str | None]
    arrived: Callable[[], int] = lambda: 0
    stopped: Callable[[], bool] = lambda: False

    def wait(
        self, get: Callable[[float], T], what: str, *, limit: Limit | None = None, began: float | None = None
    ) -> T:
        """What `get(timeout)` gives as soon as it does not raise `queue.Empty`.

        A `DataUnavailableError` when nothing arrived for too long. `began` is when the wait began, if not now.
        """
        began = time.perf_counter() if began is None else began
        since, arrived, reported = began, self.arrived(), began
        while True:
            try:
                return get(min(POLL_S, self.stall_s))
            except queue.Empty:
                now = time.perf_counter()
            if self.arrived() != arrived:
                since, arrived = now, self.arrived()
            if limit is not None and now - since >= limit.seconds:
                raise DataUnavailableError(
                    f"{self._say(what, now - began)}; nothing arrived for {limit.seconds:g} s: check the source, or "
                    f"allow more time with {limit.key}"
                )
            if now - began >= GRACE_S and self.stopped():
                raise WaitStopped
            if now - reported >= self.stall_s:
                reported = now
                self.report(now - began, self._say(what, now - began))

    def run(self, function: Callable[[], T], what: str) -> T:
        """What the function returns or raises. A thread calls it: this one has to report, and may have to leave."""
        pool = DaemonPool(1, "data-wait")
        future = pool.submit(function)
        try:
            return self.wait(lambda timeout: _result(future, timeout), what)
        finally:
            pool.close()

    def _say(self, what: str, waited: float) -> str:
        known = self.waiting_for()
        return f"data: waiting for {what} since {waited:.1f} s" + (f"; {known}" if known else "")


def _result(future: Future[T], timeout: float) -> T:
    # Not result(timeout): the function itself may raise a TimeoutError.
    if not wait([future], timeout).done:
        raise queue.Empty
    return future.result()
