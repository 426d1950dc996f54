"""What the operators see in a forward pass, for whoever watches: gates and selected blocks, on their device.

The operators themselves hand over what they have, also inside compiled graphs. An observer must not change what it
gets, nor wait for the device; one that fails is let go and counted, the operator goes on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from nsa.ops.spec import NSASpec


class Observer(Protocol):
    failures: int

    def selected(self, indices: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> None:
        """The blocks of one layer: [B, S, G, num_selected] int32, padded with -1."""
        ...

    def mixed(self, gates: Tensor) -> None:
        """The gates of one layer: [B, S, H, 3]."""
        ...


_observer: Observer | None = None


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Hands everything that operators do inside to `observer`. None observes nothing."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def saw_selection(indices: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> None:
    if _observer is not None:
        try:
            _observer.selected(indices, spec, cu_seqlens)
        except Exception:
            _let_go(_observer)


def saw_gates(gates: Tensor) -> None:
    if _observer is not None:
        try:
            _observer.mixed(gates)
        except Exception:
            _let_go(_observer)


def _let_go(observer: Observer) -> None:
    global _observer
    observer.failures += 1
    _observer = None
