"""What kernels allocate for themselves while they run.

Tracing sees what an operator returns, not what its kernel holds meanwhile. The host code of our kernels runs on meta
tensors, as on an H200, and what it allocates is measured. The reference, whose loops take long, and cuDNN state their
workspace beside their code, the reference as an upper bound; the formula for PyTorch's own attention, an upper bound
too, is here. Where Triton cannot be imported, the reference would run, and its workspace counts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa.ops import dispatch, feed_forward, joint
from nsa.ops.spec import NSASpec

# cuBLAS on a Hopper keeps 32 MiB for each of the thread of forward, that of backward, and cuBLASLt. Over all recorded
# points 80 to 110 MiB are what no tensor explains. Older cards keep 8 MiB each.
BLAS_BYTES = 3 * (32 << 20)

# The operator in `dispatch`, and the function whose workspace it is; the mix needs none.
_NODES = {
    "nsa::mean_blocks": ("phi", "mean"),
    "nsa::mean_blocks_backward": ("phi", "mean_backward"),
    "nsa::contract_blocks": ("phi", "contract"),
    "nsa::contract_blocks_backward": ("phi", "contract_backward"),
    "nsa::select_blocks": ("select", "forward"),
    "nsa::compressed_attention": ("cmp", "forward"),
    "nsa::compressed_attention_backward": ("cmp", "backward"),
    "nsa::selected_attention": ("sel", "forward"),
    "nsa::selected_attention_backward": ("sel", "backward"),
    "nsa::window_attention": ("win", "forward"),
    "nsa::window_attention_backward": ("win", "backward"),
}
_DENSE_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


# The most bytes that a function holds at once, on top of these arguments and of what it returns.
Measure = Callable[[Callable[..., Any], Sequence[Any]], float]


def workspace_bytes(func: Any, args: Sequence[Any], measure: Measure) -> float:
    """Bytes that operator `func` holds on top of its arguments and results; 0 for one that needs none."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else None
    if name == _DENSE_BACKWARD:
        return _dense_backward(*args)
    if name == "nsa::norm_mlp":
        return float(feed_forward.forward_workspace(*args))
    if name == "nsa::norm_mlp_backward":
        return float(feed_forward.backward_workspace(*args))
    if name == "nsa::mix_attention_backward":
        return _mix_attention_backward(measure, *args)
    if name not in _NODES:
        return 0.0
    operator, function = _NODES[name]
    *given, backend = args
    offset = {} if operator == "phi" else {"q_offset": given.pop()}
    return _of_backend(measure, operator, function, backend, *given, **offset)


def _of_backend(
    measure: Measure, operator: str, function: str, backend: str | None, *args: Any, **offset: int
) -> float:
    *given, sizes, cu_seqlens = args
    reference = backend == "reference" or dispatch.triton_missing() is not None
    runs = dispatch.REFERENCE[operator] if reference else dispatch.kernels_for(operator)
    formula = getattr(runs, f"{function}_workspace", None)
    stated = None if formula is None else formula(*given, NSASpec(*sizes), cu_seqlens, **offset)
    if stated is not None:
        return float(stated)
    described = [_Strided.of(x) for x in (*given, NSASpec(*sizes), cu_seqlens)]
    return _measured(measure, operator, function, *described, **offset)


class _Strided(NamedTuple):
    """A tensor without its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Any) -> Any:
        return cls(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


@lru_cache
def _measured(measure: Measure, operator: str, function: str, *described: Any, **offset: int) -> float:
    """Of the kernels' host code; once for layers of the same shapes."""
    host_code = partial(getattr(dispatch.kernels_for(operator), function), **offset)
    with unset_fake_temporarily(), _nothing_launched():
        make = partial(torch.empty_strided, device="meta")
        arguments = [make(x.shape, x.stride, dtype=x.dtype) if isinstance(x, _Strided) else x for x in described]
        if described[-1] is not None:
            host_code(*arguments)  # what follows from borders is computed once for all layers: nobody's workspace
        return measure(host_code, arguments)


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Inside, kernels do nothing, compiled or interpreted ones."""
    from triton.runtime import KernelInterface

    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda *_: lambda *_, **__: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def _mix_attention_backward(measure: Measure, do: Tensor, q: Tensor, *args: Any) -> float:
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, *rest = args
    indices, sizes, cu_seqlens, *backends = rest
    branches = {
        "cmp": (k_cmp, v_cmp, o_cmp, lse_cmp),
        "sel": (k_sel, v_sel, indices, o_sel, lse_sel),
        "win": (k_win, v_win, o_win, lse_win),
    }
    workspaces = [
        (_of_backend(measure, name, "backward", backend, do, q, *tensors, sizes, cu_seqlens), *tensors[:2])
        for (name, tensors), backend in zip(branches.items(), backends[:3], strict=True)
    ]
    return joint.backward_workspace(q, do, workspaces)


def _dense_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> float:
    """dQ in float32, a number a row, and dK and dV for every query head before a group's are added. [B, H, S, D]."""
    per_group = q.shape[1] // k.shape[1]
    grouped = per_group * (k.numel() + v.numel()) * k.element_size() if per_group > 1 else 0
    return 4 * (q.numel() + q.numel() // q.shape[3]) + grouped
