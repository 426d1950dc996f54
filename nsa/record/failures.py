"""Counts records that could not be written. Such a failure never ends a run.

A programming error in a recorder is also counted, so that training continues, and its traceback is printed once. In
tests such an error fails the test (`recorder_bugs` in tests/conftest.py).
"""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# A full disk, a missing package or a lost connection raise other errors.
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
_printed: set[tuple[str, int]] = set()


def report_bug(error: Exception) -> None:
    """Prints the traceback of a programming error, once per line that raises."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    if (place.filename, place.lineno or 0) not in _printed:
        _printed.add((place.filename, place.lineno or 0))
        with suppress(Exception):  # the console itself may be broken
            traceback.print_exception(error)


@contextmanager
def reporting_bugs() -> Iterator[None]:
    """Reports a programming error inside, and raises it again."""
    try:
        yield
    except _BUGS as error:
        report_bug(error)
        raise


class Failures:
    """The count and the last reason, for all recorders of a run and all threads."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""
        self._lock = threading.RLock()  # a signal handler may print while this thread prints

    def add(self, why: str, count: int = 1) -> None:
        with self._lock:
            self.count += count
            self.last = why

    @contextmanager
    def counted(self) -> Iterator[None]:
        """An error inside is counted and not raised."""
        try:
            with reporting_bugs():
                yield
        except Exception as error:
            self.add(str(error) or type(error).__name__)
