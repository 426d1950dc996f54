"""Attention over the visible compressed tokens; rows that see none give 0 and a log-sum-exp of -inf.

The functions of the reference twin, on the GPU. `params` and `dq_params`, `dkv_params` replace the checked-in
launch parameters, for tests and tuning.
"""

import torch
from torch import Tensor

from nsa.ops.layout import keep_with, token_layout, visible_compressed
from nsa.ops.spec import NSASpec
from nsa.ops.triton import common, flash
from nsa.ops.triton.common import Launch
from nsa.ops.triton.flash import Sight


def refusal(q: Tensor, v: Tensor, spec: NSASpec) -> str | None:
    """Why these kernels cannot run tensors like q and v; None when they can. Every spec runs."""
    return common.refusal(q, v)


def sight(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Sight:
    """Which compressed tokens each query sees."""
    if cu_seqlens is None:
        return Sight(spec.cmp_block, spec.cmp_stride, 0)
    return keep_with(cu_seqlens, ("cmp", q.shape[1], spec), lambda: _packed_sight(q.shape[1], spec, cu_seqlens))


def _packed_sight(tokens: int, spec: NSASpec, cu_seqlens: Tensor) -> Sight:
    layout = token_layout(tokens, spec, cu_seqlens, cu_seqlens.device)
    hi = layout.cmp_start + visible_compressed(layout.position, spec)
    return Sight(spec.cmp_block, spec.cmp_stride, 0, layout.cmp_start.to(torch.int32), hi.to(torch.int32))


def launch_params(kind: str, q: Tensor, v: Tensor) -> Launch:
    """The checked-in parameters of "forward", "dq" or "dkv" for tensors like q and v."""
    return common.launch_params(f"cmp_{kind}", common.arch_of(q), q.shape[3], v.shape[3], q.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, params: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """q [B,S,H,Dk], k [B,N,G,Dk], v [B,N,G,Dv] -> o [B,S,H,Dv], lse [B,S,H] float32, natural logarithm."""
    launch = params or launch_params("forward", q, v)
    o, lse, calls = flash.plan_forward(q, k, v, sight(q, spec, cu_seqlens), launch)
    common.run(calls)
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
    dq_params: Launch | None = None,
    dkv_params: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for the gradient `do` of `forward`'s output."""
    dq_launch = dq_params or launch_params("dq", q, v)
    dkv_launch = dkv_params or launch_params("dkv", q, v)
    seen = sight(q, spec, cu_seqlens)
    dq, dk, dv, calls = flash.plan_backward(do, q, k, v, o, lse, seen, dq_launch, dkv_launch)
    common.run(calls)
    return dq, dk, dv
