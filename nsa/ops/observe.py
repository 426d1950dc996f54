"""Lets a caller observe gates, selected blocks and their attention in a forward pass, on their device.

The operators themselves call the observer, also inside compiled graphs. `observing` applies to its own thread, so a
recomputation on one of autograd's threads is not observed again. An observer must neither modify its arguments nor
synchronize the device. An observer that raises is removed and its failure counted; the operator continues.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from nsa.ops.spec import SelectionSpec


class Observer(Protocol):
    failures: int

    def selected(self, indices: Tensor, spec: SelectionSpec, cu_seqlens: Tensor | None, q_offset: int) -> None:
        """The blocks of one layer, or of some of its queries: [B, S, G, num_selected] int32, padded with -1."""
        ...

    def mixed(self, gates: Tensor) -> None:
        """The gates of one layer: [B, S, H, 3]."""
        ...

    def attended(
        self, q: Tensor, k: Tensor, lse: Tensor, counted: Tensor, cu_seqlens: Tensor | None, q_offset: int
    ) -> None:
        """The attention of one layer, or of some of its queries and heads, over selected blocks: q [B, S, H, D],
        k [B, q_offset + S, G, D] and the log-sum-exp lse [B, S, H]; counted [B, S] bool: the queries to measure, which
        see more than their blocks."""
        ...


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Calls `observer`, unless it is None, for every operator that runs inside."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def notify(event: str, *args: Any) -> None:
    """Calls method `event` of the current observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        try:
            getattr(observer, event)(*args)
        except Exception:
            observer.failures += 1
            _observer.set(None)
