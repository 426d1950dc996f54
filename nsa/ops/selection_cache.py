"""Selected blocks kept from a forward pass for its recomputation, so that both read the same blocks.

Gradient checkpointing makes one SelectionCache per forward pass. It runs the pass under `record()` and every
recomputation under `replay()`: the n-th selection of a recomputation is the n-th of the forward pass, and is not
computed again. Both apply to their own thread, since autograd recomputes on threads of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor


class SelectionCache:
    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next: int | None = None  # place of the next replayed selection; None while recording

    def record(self) -> AbstractContextManager[None]:
        self._kept.clear()
        return self._activated(None)

    def replay(self) -> AbstractContextManager[None]:
        return self._activated(0)

    def select(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._next is None:
            self._kept.append(compute())
            return self._kept[-1]
        self._next += 1
        return self._kept[self._next - 1]

    @contextmanager
    def _activated(self, first: int | None) -> Iterator[None]:
        self._next = first
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)


_active: ContextVar[SelectionCache | None] = ContextVar("selection_cache", default=None)


def active() -> SelectionCache | None:
    """The cache of the pass that this thread runs."""
    return _active.get()
