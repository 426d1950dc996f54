"""Waits for threads that read data, with reports and a timeout, and stops waiting when the run is asked to stop."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nsa.data.threads import Progress, run_in_thread
from nsa.errors import DataUnavailableError

if TYPE_CHECKING:  # imports pyarrow, which is slow
    from nsa.data.sources.dataset import HubDataset

T = TypeVar("T")
POLL_S = 0.1  # time until a request to stop is noticed
GRACE_S = 2.0  # a shorter wait is not interrupted: the step can finish


class WaitStopped(Exception):  # noqa: N818  (the run catches it; users never see it)
    """A wait ended because the process was asked to stop."""


class Activity:
    """The progress of all sources of a run, for the thread that waits for them. Sources register when they open."""

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
        """Returns a number that grows whenever data arrives."""
        answered = sum(source.answered() for source in self._remote)
        return answered + sum(progress.done + progress.steps for _, progress in self._progress)

    def server(self) -> str | None:
        """Describes the slow request to a server; None if there is none."""
        return next((what for source in self._remote if (what := source.waiting_for())), None)

    def waiting_for(self) -> str | None:
        """Describes all waits: "fineweb_edu: 5 of 32 row groups tokenised; FILE, row group 3: no answer ..."."""
        current = next((f"{source}: {progress}" for source, progress in self._progress if progress.is_open), None)
        return "; ".join(filter(None, (current, self.server()))) or None


@dataclass(frozen=True)
class Waiter:
    """Calls `report` every `stall_s` seconds of a wait, with the seconds so far and a message from `activity`.

    When `stopped` returns True, an interruptible wait raises `WaitStopped`.
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
        server_only: bool = False,
    ) -> T:
        """Waits for a future and returns its result.

        Raises `DataUnavailableError` if no data arrived for `timeout_s`, which the key `setting` configures. A wait may
        take longer as long as data arrives, for example with a slow tokenizer or while a run finds its position again.
        With `server_only` it may also take longer as long as every server answers.
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
            if now - last_arrival >= timeout_s and (not server_only or self.activity.server()):
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

    def run(
        self, function: Callable[[], T], what: str, timeout_s: float, setting: str, *, interruptible: bool = True
    ) -> T:
        """Calls the function in another thread, waits and returns its result, so that this thread can report progress
        and be interrupted. The timeout applies to servers: tokenising may take any time.
        """
        future = run_in_thread(function, "data-wait")
        return self.wait(
            future, what, timeout_s=timeout_s, setting=setting, interruptible=interruptible, server_only=True
        )

    def _message(self, what: str, waited: float) -> str:
        known = self.activity.waiting_for()
        return f"data: waited {waited:.1f} s for {what}" + (f"; {known}" if known else "")
