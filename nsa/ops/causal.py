"""Causal attention over all that a query sees, by PyTorch's fused kernels where they run.

q [B,S,H,Dk], k [B,N,G,Dk], v [B,N,G,Dv] -> [B,S,H,Dv].
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.ops.branches import window_attention
from nsa.ops.spec import NSASpec


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Documents as for `nsa.ops`; `max_seqlen` bounds their length, without it kernels assume the whole row. `backend`
    is that of the window operator, where it runs. A NaN spreads as there, but with neither `cu_seqlens` nor `q_offset`,
    PyTorch's kernels carry it to earlier tokens on a CPU too."""
    if cu_seqlens is None and not q_offset:
        return _fused(q, k, v)
    if cu_seqlens is not None and not q_offset and _runs_varlen(q, v):
        return _varlen(q, k, v, cu_seqlens, max_seqlen or q.shape[1])
    # A window as long as the row is causal attention, in memory that grows linearly on every device.
    spec = NSASpec(window=max(1, k.shape[1]))
    return window_attention(q, k, v, spec, cu_seqlens=cu_seqlens, q_offset=q_offset, backend=backend)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)


def _runs_varlen(q: Tensor, v: Tensor) -> bool:
    """PyTorch's variable-length kernels: a CUDA GPU from sm_80 on, 16-bit types, heads of one size."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] == v.shape[3]
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Causal, with fewer key/value heads than query heads: how to say so changed between torch 2.11 and 2.12.
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    o = varlen_attn(q[0], k[0], v[0], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    assert isinstance(o, Tensor)
    return o[None]
