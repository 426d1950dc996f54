"""Lets a caller observe gates, selected blocks and their attention in a forward pass, on their device.

The operators themselves call the observer, also inside compiled graphs. `observing` applies to its own thread, so a
recomputation on one of autograd's threads is not observed again. An observer must neither modify its arguments nor
synchronize the device. An observer that raises is removed and its failure counted; the operator continues.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Observer(Protocol):
    """Has a method for each event that it needs. Operators report, for one layer or for some of its queries and heads:

    selected(indices, spec, cu_seqlens, q_offset)             the blocks that queries read
    read(q, k, indices, block, cu_seqlens, q_offset)          attention over these blocks
    attended(q, k, lse, counted, cu_seqlens, q_offset)        the same, with an index loss
    mixed(gates)                                              the gates, [B, S, H, 3]

    indices are int32 [B, S, G, num_selected], padded with -1; q [B, S, H, D], k [B, q_offset + S, G, D]; lse [B, S, H]
    is the log-sum-exp over the blocks; counted [B, S] bool: the queries to measure, which see more than their blocks.
    """

    failures: int


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
    """Calls the method `event` of the current observer, if there is one and it has this method."""
    observer = _observer.get()
    if observer is not None:
        try:
            method = getattr(observer, event, None)
            if method is not None:
                method(*args)
        except Exception:
            observer.failures += 1
            _observer.set(None)
