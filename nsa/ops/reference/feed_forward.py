"""A norm and a gated MLP except their matrix products, forward and backward.

Legend: T tokens, C channels, M hidden width. `hidden` is the concatenation of the products of gate and up.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

ACTIVATIONS = ("swiglu", "swiglu_oai")
ALPHA, LIMIT = 1.702, 7.0  # of swiglu_oai, as in GPT-OSS and MiniMax-M3


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


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """swiglu: silu(gate) * up. swiglu_oai: (up + 1) * gate * sigmoid(ALPHA * gate), of a gate clamped to at most LIMIT
    and an up clamped to [-LIMIT, LIMIT]."""
    if activation == "swiglu":
        return silu(gate) * up
    gate = gate.clamp(max=LIMIT)
    gate = gate * torch.sigmoid(ALPHA * gate)
    return torch.addcmul(gate, gate, up.clamp(-LIMIT, LIMIT))


def activate(hidden_TM: Tensor, activation: str) -> Tensor:
    """`gated` of the halves of hidden."""
    gate, up = hidden_TM.chunk(2, dim=-1)
    return gated(gate, up, activation)


def activate_backward(dmixed_TM: Tensor, hidden_TM: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`activate(hidden)`, recomputed, and the gradient of hidden."""
    gate, up = hidden_TM.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        return _activate_oai_backward(dmixed_TM, hidden_TM)
    activated = silu(gate)
    dhidden = torch.cat([torch.ops.aten.silu_backward(dmixed_TM * up, gate), dmixed_TM * activated], dim=-1)
    return activated * up, dhidden


def _activate_oai_backward(dmixed_TM: Tensor, hidden_TM: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = hidden_TM.chunk(2, dim=-1)
    activated, shifted = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT).add_(1.0)
    slope = torch.sigmoid(ALPHA * activated)
    activated.mul_(slope)
    slope.addcmul_(activated, 1.0 - slope, value=ALPHA)
    dhidden = torch.empty_like(hidden_TM)
    dgate, dup = dhidden.chunk(2, dim=-1)
    torch.mul(dmixed_TM, shifted, out=dgate).mul_(slope).masked_fill_(gate > LIMIT, 0.0)
    del slope
    torch.mul(dmixed_TM, activated, out=dup).masked_fill_((up < -LIMIT) | (up > LIMIT), 0.0)
    return activated.mul_(shifted), dhidden


def _normed(x_TC: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TC = x_TC.to(torch.promote_types(x_TC.dtype, torch.float32))
    inverse = (x_TC.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x_TC * inverse, inverse
