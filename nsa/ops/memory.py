"""Selected blocks kept from a forward pass for its repetition, so that both read the very same blocks.

Whoever repeats a forward pass makes one SelectionMemory, runs the first pass under `record()` and every repetition
under `replay()`: the n-th selection of a repetition is the n-th of the first pass, and is not computed again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_active = threading.local()  # backward repeats forward on a thread of autograd's own


class SelectionMemory:
    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next: int | None = None  # place of the next replayed selection; None while recording

    @contextmanager
    def record(self) -> Iterator[None]:
        self._kept.clear()
        self._next = None
        with self._activated():
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        self._next = 0
        with self._activated():
            yield

    def select(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._next is None:
            self._kept.append(compute())
            return self._kept[-1]
        self._next += 1
        return self._kept[self._next - 1]

    @contextmanager
    def _activated(self) -> Iterator[None]:
        before = active()
        _active.memory = self
        try:
            yield
        finally:
            _active.memory = before


def active() -> SelectionMemory | None:
    """The memory of the pass that this thread is in."""
    memory: SelectionMemory | None = getattr(_active, "memory", None)
    return memory
