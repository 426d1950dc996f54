"""Requests to stop: SIGTERM and SIGUSR1 (a scheduler), Ctrl-C (a person). The step is finished, then the run saves."""

import os
import signal
import sys
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """While active, signals only set a flag. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.terminate = False
        self.interrupt = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: signals stay with the caller
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.interrupt:
                print("interrupted twice: stopping at once; the last checkpoint is intact", file=sys.stderr, flush=True)
                os._exit(130)
            self.interrupt = True
        else:
            self.terminate = True
