"""What could not be recorded: counted, with the last reason. Nothing that is only recorded ends a run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """One for everything that records a run, in whatever thread."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""
        self._lock = threading.RLock()  # a signal handler may print while this thread does

    def add(self, why: str, count: int = 1) -> None:
        with self._lock:
            self.count += count
            self.last = why

    @contextmanager
    def counted(self) -> Iterator[None]:
        """An error inside is counted and not raised."""
        try:
            yield
        except Exception as error:
            self.add(str(error) or type(error).__name__)
