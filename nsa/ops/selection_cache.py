"""Keeps the selected blocks of a forward pass for its recomputation, so that both read the same blocks.

Gradient checkpointing creates one SelectionCache per forward pass. It runs the pass under `record()` and every
recomputation under `replay()`: the n-th selection of a recomputation is the n-th of the forward pass, and is not
recomputed. Both contexts apply to their own thread, since autograd recomputes on its own threads.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor


class SelectionCache:
    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next: int | None = None  # index of the next replayed selection; None while recording

    def record(self) -> AbstractContextManager[None]:
        return _Activation(self, None)

    def replay(self) -> AbstractContextManager[None]:
        """May be entered more than once: backward may run twice over one forward pass."""
        return _Activation(self, 0)

    def select(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._next is None:
            self._kept.append(compute())
            return self._kept[-1]
        self._next += 1
        return self._kept[self._next - 1]


def select(compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` gives, or in a recomputation what it gave in the forward pass."""
    # A compiler sees the operator itself: selective checkpointing keeps its output.
    cache = None if torch.compiler.is_compiling() else active.get()
    return compute() if cache is None else cache.select(compute)


class _Activation(AbstractContextManager[None]):
    def __init__(self, cache: SelectionCache, first: int | None):
        self._cache, self._first = cache, first

    def __enter__(self) -> None:
        self._cache._next = self._first
        self._token = active.set(self._cache)

    def __exit__(self, *_: object) -> None:
        active.reset(self._token)


# The active cache of each thread.
active: ContextVar[SelectionCache | None] = ContextVar("selection_cache", default=None)
