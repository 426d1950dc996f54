"""Requests to stop: SIGTERM and SIGUSR1 (a scheduler), SIGHUP (a terminal that closes), Ctrl-C (a person). The run
finishes its step and saves."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopRequest:
    """A context in which signals only set a flag. A second Ctrl-C ends the process at once, unless the run `is_saved`.

    `until_exit` keeps the handlers installed, so that a signal after the run does not change the exit code.
    """

    def __init__(self, *, until_exit: bool = False) -> None:
        self.terminate = False
        self.interrupt = False
        self.is_saved = False  # everything is saved, and the run is about to end
        self._until_exit = until_exit
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the caller handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        if not self._until_exit:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.interrupt and not self.is_saved:
                with suppress(OSError):
                    os.write(2, b"interrupted twice: stopping at once; the last checkpoint is intact\n")
                os._exit(130)
            self.interrupt = True
        else:
            self.terminate = True
