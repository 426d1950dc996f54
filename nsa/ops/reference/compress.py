"""Blocks of tokens summarised: their mean, or their contraction with a learned weight (the mlp's first layer).

Slots that a packed sequence leaves over at the end are 0.
"""

import torch
from torch import Tensor

from nsa.ops.layout import num_slots, slot_layout
from nsa.ops.reference.attention import accumulation_dtype
from nsa.ops.spec import NSASpec


def gather_blocks(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D] -> the tokens of every block [B,N,G,D,cmp_block]."""
    batch, tokens, groups, dim = x.shape
    slots = num_slots(tokens, spec, packed=cu_seqlens is not None)
    if slots == 0 or tokens < spec.cmp_block:
        return x.new_zeros(batch, slots, groups, dim, spec.cmp_block)
    if cu_seqlens is None:
        return x.unfold(1, spec.cmp_block, spec.cmp_stride)
    slot = slot_layout(tokens, spec, cu_seqlens, x.device)
    token = slot.first_token[:, None] + torch.arange(spec.cmp_block, device=x.device)
    blocks = x[:, token].movedim(2, 4)
    return blocks * slot.used[:, None, None, None].to(x.dtype)


def mean(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D] -> [B,N,G,D]."""
    blocks = gather_blocks(x, spec, cu_seqlens)
    return blocks.to(accumulation_dtype(x.dtype)).mean(-1).to(x.dtype)


def contract(x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E], summed over a block's tokens and channels."""
    blocks = gather_blocks(x, spec, cu_seqlens).transpose(3, 4)
    return blocks.flatten(3) @ weight.flatten(0, 1)
