"""Who computes an operator: the best backend that can run it, and why the others cannot.

`backend=None` takes the best that can run; each time a faster one had to be passed over it is counted under
(operator, reason). A backend asked for by name either runs or raises with the reason.
"""

import threading
from collections import Counter
from types import ModuleType

from torch import Tensor

from nsa.errors import ArgumentError, BackendError
from nsa.ops.reference import compressed, selected, selection, window

BACKENDS = ("triton", "reference")
_REFERENCE: dict[str, ModuleType] = {"cmp": compressed, "select": selection, "sel": selected, "win": window}

_passed_over: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


def counters() -> dict[tuple[str, str], int]:
    """How often a fast kernel was wanted and not used, by (operator, reason), since the process started."""
    with _lock:
        return dict(_passed_over)


def choose(operator: str, backend: str | None, q: Tensor, *, count: bool) -> ModuleType:
    """The module that computes `operator` ("cmp", "select", "sel" or "win") for queries like q."""
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError("backend", f"must be None or one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend != "reference":
        reason = triton_refusal(operator, q)
        if backend == "triton":
            raise BackendError(f"backend 'triton' cannot run operator {operator!r} here: {reason}")
        if count:
            with _lock:
                _passed_over[operator, reason] += 1
    return _REFERENCE[operator]


def triton_refusal(operator: str, q: Tensor) -> str:
    """Why Triton cannot compute `operator` for queries like q."""
    return "this version of nsa has no Triton kernels"
