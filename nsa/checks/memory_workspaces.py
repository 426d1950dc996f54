"""What kernels allocate for themselves while they run, as formulas of their arguments' shapes.

Tracing sees what an operator returns, not what its kernel holds meanwhile. Every backend of nsa.ops states its own
workspace beside its code: the kernels for an H200, the reference as an upper bound. Here they are looked up; the
formula for PyTorch's own attention, an upper bound too, is here. Where Triton cannot be imported, the reference
would run, and its workspace counts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.ops import dispatch, feed_forward, joint
from nsa.ops.spec import NSASpec

# cuBLAS on a Hopper keeps 32 MiB for each of the thread of forward, that of backward, and cuBLASLt. Over all recorded
# points 80 to 110 MiB are what no tensor explains. Older cards keep 8 MiB each.
BLAS_BYTES = 3 * (32 << 20)


def workspace_bytes(func: Any, args: Sequence[Any]) -> float:
    """Bytes that operator `func` holds on top of its arguments and results; 0 for one that needs none."""
    formula = _FORMULAS.get(func.name()) if isinstance(func, torch._ops.OpOverload) else None
    return float(formula(*args)) if formula else 0.0


def _of_backend(operator: str, function: str, *args: Any) -> float:
    """What the backend of a node with these arguments states for `function`."""
    *given, backend = args
    offset = 0 if operator == "phi" else given.pop()
    *tensors, sizes, cu_seqlens = given
    reference = backend == "reference" or dispatch.triton_missing() is not None
    runs = dispatch.REFERENCE[operator] if reference else dispatch.kernels_for(operator)
    formula = getattr(runs, f"{function}_workspace", None)
    more = {"q_offset": offset} if operator == "select" else {}  # its scores are as wide as the sequence
    return 0.0 if formula is None else float(formula(*tensors, NSASpec(*sizes), cu_seqlens, **more))


def _mix_attention_backward(do: Tensor, q: Tensor, *args: Any) -> float:
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, *rest = args
    indices, sizes, cu_seqlens, by_cmp, by_sel, by_win, _ = rest
    settings = sizes, cu_seqlens, 0
    cmp = _of_backend("cmp", "backward", do, q, k_cmp, v_cmp, o_cmp, lse_cmp, *settings, by_cmp)
    sel = _of_backend("sel", "backward", do, q, k_sel, v_sel, indices, o_sel, lse_sel, *settings, by_sel)
    win = _of_backend("win", "backward", do, q, k_win, v_win, o_win, lse_win, *settings, by_win)
    return joint.backward_workspace(do, q, k_cmp, v_cmp, cmp, sel, win)


def _dense_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> float:
    """dQ in float32, a number a row, and dK and dV for every query head before a group's are added. [B, H, S, D]."""
    per_group = q.shape[1] // k.shape[1]
    grouped = per_group * (k.numel() + v.numel()) * k.element_size() if per_group > 1 else 0
    return 4 * (q.numel() + q.numel() // q.shape[3]) + grouped


# By the name of the operator in PyTorch; one that is not here, such as the mix, needs none.
_FORMULAS: Mapping[str, Callable[..., float]] = {
    "nsa::mean_blocks": partial(_of_backend, "phi", "mean"),
    "nsa::mean_blocks_backward": partial(_of_backend, "phi", "mean_backward"),
    "nsa::contract_blocks": partial(_of_backend, "phi", "contract"),
    "nsa::contract_blocks_backward": partial(_of_backend, "phi", "contract_backward"),
    "nsa::select_blocks": partial(_of_backend, "select", "forward"),
    "nsa::compressed_attention": partial(_of_backend, "cmp", "forward"),
    "nsa::compressed_attention_backward": partial(_of_backend, "cmp", "backward"),
    "nsa::selected_attention": partial(_of_backend, "sel", "forward"),
    "nsa::selected_attention_backward": partial(_of_backend, "sel", "backward"),
    "nsa::window_attention": partial(_of_backend, "win", "forward"),
    "nsa::window_attention_backward": partial(_of_backend, "win", "backward"),
    "nsa::mix_attention_backward": _mix_attention_backward,
    "nsa::norm_mlp": feed_forward.forward_workspace,
    "nsa::norm_mlp_backward": feed_forward.backward_workspace,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _dense_backward,
}
