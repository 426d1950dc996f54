"""Who computes an operator: the best backend that can run it, and why the others cannot.

`backend=None` takes the best that can run; each time a faster one had to be passed over it is counted under
(operator, reason) and said once. A backend asked for by name either runs or raises with the reason.
"""

import threading
import warnings
from collections import Counter
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from nsa.errors import ArgumentError, BackendError
from nsa.ops.reference import compress, compressed, mix, selected, selection, window
from nsa.ops.spec import NSASpec

BACKENDS = ("triton", "reference")
# phi compresses, select picks blocks, mix weighs the branches; cmp, sel and win are the branches themselves.
_REFERENCE: dict[str, ModuleType] = {
    "phi": compress,
    "cmp": compressed,
    "select": selection,
    "sel": selected,
    "win": window,
    "mix": mix,
}
OPERATORS = tuple(_REFERENCE)

_passed_over: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """A fast kernel exists and could not be used on the GPU."""


def counters() -> dict[tuple[str, str], int]:
    """How often a fast kernel was wanted and not used, by (operator, reason), since the process started."""
    with _lock:
        return dict(_passed_over)


def choose(operator: str, backend: str | None, q: Tensor, v: Tensor, spec: NSASpec, *, count: bool) -> ModuleType:
    """The module that computes one of OPERATORS for queries like q and values like v."""
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError("backend", f"must be None or one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "reference":
        return _REFERENCE[operator]
    module = None
    reason = _triton_missing() or _device_refusal(q)
    if reason is None:
        module = triton_module(operator)
        reason = module.refusal(q, v, spec)
    if reason is None:
        assert module is not None
        return module
    if backend == "triton":
        raise BackendError(f"backend 'triton' cannot run operator {operator!r} here: {reason}")
    if count:
        _count(operator, reason, on_gpu=q.is_cuda)
    return _REFERENCE[operator]


def _count(operator: str, reason: str, *, on_gpu: bool) -> None:
    with _lock:
        first = (operator, reason) not in _passed_over
        _passed_over[operator, reason] += 1
    if first and on_gpu:  # on a CPU the reference is what one expects
        warnings.warn(f"nsa: operator {operator!r} runs on the slow reference: {reason}", FallbackWarning, stacklevel=2)


@cache
def _triton_missing() -> str | None:
    try:
        import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return None


def _device_refusal(q: Tensor) -> str | None:
    if q.is_cuda:
        return None if _capability(q.device) >= (8, 0) else "the GPU is older than sm_80 (A100)"
    if q.device.type == "cpu" and _interpreting():
        return None
    return f"the tensors are on {q.device.type} (Triton needs CUDA, or TRITON_INTERPRET=1 set before it is imported)"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _interpreting() -> bool:
    """Whether this process's kernels are interpreted: decided when they are imported."""
    return type(import_module("nsa.ops.triton.mix")._mix_kernel).__name__ == "InterpretedFunction"


@cache
def triton_module(operator: str) -> ModuleType:
    """The Triton twin of an operator's reference module, whether or not it can run here."""
    return import_module(_REFERENCE[operator].__name__.replace(".reference.", ".triton."))
