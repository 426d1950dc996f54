"""Chooses the backend of an operator: the fastest that can run it.

Each time `backend=None` has to skip a faster backend, this is counted under (operator, reason) and reported once. A
backend requested by name either runs or raises with the reason.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nsa.errors import ArgumentError, BackendError
from nsa.ops.reference import compress, compressed, decode, feed_forward, mix, msa_index, selected, selection, windowed

BACKENDS = ("triton", "reference")
# phi compresses, select picks blocks, mix weighs the branches; cmp, sel and win are the branches themselves. index and
# index_loss choose blocks in MSA and train the choice.
OPERATORS = ("phi", "cmp", "select", "sel", "win", "mix", "index", "index_loss")
# One name for all operators, or a name by operator; other operators use the fastest backend.
Backend = str | Mapping[str, str] | None
# What computes each: its reference, and its kernels under nsa.ops.triton, imported on first use. decode is attention of
# a few new tokens over a cache: all of the above but phi, in one; msa_decode is that of MSA. mlp is what surrounds the
# products of a long MLP, step what surrounds decode: its reference are the modules of nsa.nn.
_COMPUTED: dict[str, tuple[Any, str]] = {
    "phi": (compress, "compress"),
    "cmp": (compressed, "compressed.compressed"),
    "select": (selection, "selection"),
    "sel": (selected, "selected"),
    "win": (windowed, "windowed.windowed"),
    "mix": (mix, "mix"),
    "decode": (decode, "decode"),
    "msa_decode": (decode, "msa_decode"),
    "index": (msa_index, "msa_selection"),
    "index_loss": (msa_index, "msa_loss"),
    "mlp": (feed_forward, "feed_forward"),
    "step": (None, "step_kernels"),
}
REFERENCE = {operator: reference for operator, (reference, _) in _COMPUTED.items()}

_fallbacks: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """A fast kernel exists and could not be used on the GPU."""


def counters() -> dict[tuple[str, str], int]:
    """How often a fast kernel was requested and not used, by (operator, reason), since the process started."""
    with _lock:
        return dict(_fallbacks)


def backend_of(operator: str, backend: Backend) -> str | None:
    """The backend requested for one of OPERATORS."""
    if backend is None or isinstance(backend, str):
        return backend
    if not isinstance(backend, Mapping):
        raise ArgumentError("backend", f"must be a name, a mapping from operators to names, or None; got {backend!r}")
    unknown = sorted(set(backend) - set(OPERATORS))
    if unknown:
        raise ArgumentError("backend", f"names the operator {unknown[0]!r}; there are {', '.join(OPERATORS)}")
    return backend.get(operator)


def check_backend(backend: Backend) -> None:
    for operator in OPERATORS:
        _check_name(backend_of(operator, backend))


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError("backend", f"must be None or one of {', '.join(BACKENDS)}; got {backend!r}")


def choose(operator: str, backend: str | None, q: Tensor, v: Tensor, *, count: bool, **sizes: int) -> Any:
    """The module that computes an operator for queries like q and values like v: REFERENCE[operator] or its kernels.
    `sizes` are arguments of the kernels' `refusal`. `count`: count a fallback."""
    _check_name(backend)
    if backend == "reference":
        return REFERENCE[operator]
    reason = triton_missing() or _device_refusal(q) or kernels_for(operator).refusal(q, v, **sizes)
    if reason is None:
        return kernels_for(operator)
    if backend == "triton":
        raise BackendError(f"backend 'triton' cannot run operator {operator!r} here: {reason}")
    if count:
        _count_fallback(operator, reason, on_gpu=q.is_cuda)
    return REFERENCE[operator]


def backend_name(operator: str, backend: str | None, q: Tensor, v: Tensor) -> str:
    """The one of BACKENDS that computes an operator for such tensors."""
    chosen = choose(operator, backend, q, v, count=False)
    return "reference" if chosen is REFERENCE[operator] else "triton"


@cache
def kernels_for(operator: str) -> Any:
    """The Triton kernels of an operator, whether or not they can run here."""
    module, _, branch = _COMPUTED[operator][1].partition(".")
    kernels = import_module(f"nsa.ops.triton.{module}")
    return getattr(kernels, branch) if branch else kernels


def _count_fallback(operator: str, reason: str, *, on_gpu: bool) -> None:
    with _lock:
        first = (operator, reason) not in _fallbacks
        _fallbacks[operator, reason] += 1
    if first and on_gpu:  # on a CPU the reference is expected
        warnings.warn(f"nsa: operator {operator!r} runs on the slow reference: {reason}", FallbackWarning, stacklevel=2)


@cache
def triton_missing() -> str | None:
    """Why no kernel can run in this process; None if Triton can be imported."""
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
    """Whether this process interprets its kernels, as set when they are imported."""
    return type(kernels_for("mix")._mix_kernel).__name__ == "InterpretedFunction"
