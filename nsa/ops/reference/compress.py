"""Compression of blocks of tokens: their mean, or their contraction with a learned weight (the first layer of the MLP).

Unused slots at the end of a packed sequence are 0.
"""

from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import compressed_overlap, slot_layout
from nsa.ops.reference.masked_attention import accumulation_dtype
from nsa.ops.spec import NSASpec


def _block_tokens(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token indices of every block [N, cmp_block], and whether the slot is used [N]."""
    slot = slot_layout(tokens, spec, cu_seqlens, device)
    token = slot.first_token[:, None] + torch.arange(spec.cmp_block, device=device)
    return token.clamp(max=tokens - 1), slot.used


def _gather(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D] -> the tokens of every block [B,N,cmp_block,G,D], 0 in unused slots."""
    token, used = _block_tokens(x.shape[1], spec, cu_seqlens, x.device)
    blocks: Tensor = x[:, token]
    return blocks if cu_seqlens is None else blocks.masked_fill(~used[:, None, None, None], 0.0)


def _scatter(dblocks: Tensor, tokens: int, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """[B,N,cmp_block,G,D] -> the sum per token [B,S,G,D]: the transpose of `_gather`."""
    token, used = _block_tokens(tokens, spec, cu_seqlens, dblocks.device)
    dx = dblocks.new_zeros(dblocks.shape[0], tokens, *dblocks.shape[3:])
    if cu_seqlens is not None:
        dblocks = dblocks.masked_fill(~used[:, None, None, None], 0.0)
    return dx.index_add_(1, token.flatten(), dblocks.flatten(1, 2))


def mean_workspace(x: Tensor, spec: NSASpec, **_: Any) -> int:
    """Estimated bytes in addition to arguments and results: all blocks of x [B,S,G,D], in its dtype and in float32."""
    return x.numel() * compressed_overlap(spec) * (x.element_size() + 4)


def mean_backward_workspace(dy: Tensor, spec: NSASpec, **_: Any) -> int:
    return mean_workspace(dy, spec)


contract_workspace = mean_workspace


def contract_backward_workspace(x: Tensor, spec: NSASpec, **_: Any) -> int:
    return 2 * mean_workspace(x, spec)  # with the gradients of the blocks


def mean(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D] -> [B,N,G,D]."""
    return _gather(x, spec, cu_seqlens).to(accumulation_dtype(x.dtype)).mean(2).to(x.dtype)


def mean_backward(dy: Tensor, tokens: int, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """dy [B,N,G,D] -> the gradient of x [B,S,G,D], S = tokens."""
    share = dy.to(accumulation_dtype(dy.dtype)) / spec.cmp_block
    spread = share.unsqueeze(2).expand(-1, -1, spec.cmp_block, -1, -1)
    return _scatter(spread, tokens, spec, cu_seqlens).to(dy.dtype)


def contract(x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E], summed over a block's tokens and channels."""
    acc = accumulation_dtype(x.dtype)
    blocks = _gather(x, spec, cu_seqlens).to(acc).transpose(2, 3).flatten(3)  # [B, N, G, cmp_block*D]
    y: Tensor = blocks @ weight.to(acc).flatten(0, 1)
    return y.to(x.dtype)


def contract_backward(
    dy: Tensor, x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dy [B,N,G,E] -> the gradients of x [B,S,G,D] and weight [cmp_block,D,E]."""
    acc = accumulation_dtype(x.dtype)
    blocks = _gather(x, spec, cu_seqlens).to(acc).transpose(2, 3).flatten(3)
    dblocks: Tensor = dy.to(acc) @ weight.to(acc).flatten(0, 1).T
    dblocks = dblocks.unflatten(3, weight.shape[:2]).transpose(2, 3)  # [B, N, cmp_block, G, D]
    dx = _scatter(dblocks, x.shape[1], spec, cu_seqlens).to(x.dtype)
    dweight = blocks.flatten(0, 2).T @ dy.to(acc).flatten(0, 2)
    return dx, dweight.view(weight.shape).to(weight.dtype)
