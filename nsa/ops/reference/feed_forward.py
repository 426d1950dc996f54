"""A norm and a SwiGLU MLP except their matrix products, forward and backward.

Legend: T tokens, C channels, M hidden width. `hidden` is the concatenation of the products of gate and up.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def normalize(x_TC: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm, computed at least in float32."""
    normed, _ = _normed(x_TC, eps)
    return (normed * norm.to(normed.dtype)).to(dtype)


def normalize_backward(dread_TC: Tensor, x_TC: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of norm, at least in float32."""
    normed, inverse = _normed(x_TC, eps)
    dread_TC = dread_TC.to(normed.dtype)
    dnormed = dread_TC * norm.to(normed.dtype)
    dx = inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x_TC.dtype), (dread_TC * normed).sum(0)


def activate(hidden_TM: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = hidden_TM.chunk(2, dim=-1)
    return silu(gate) * up


def activate_backward(dmixed_TM: Tensor, hidden_TM: Tensor) -> tuple[Tensor, Tensor]:
    """`activate(hidden)`, recomputed, and the gradient of hidden."""
    gate, up = hidden_TM.chunk(2, dim=-1)
    activated = silu(gate)
    dhidden = torch.cat([torch.ops.aten.silu_backward(dmixed_TM * up, gate), dmixed_TM * activated], dim=-1)
    return activated * up, dhidden


def _normed(x_TC: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TC = x_TC.to(torch.promote_types(x_TC.dtype, torch.float32))
    inverse = (x_TC.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x_TC * inverse, inverse
