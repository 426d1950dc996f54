"""Attention over the tokens of the blocks each query selected, at positions up to its own. Legend and masking as in
`masked_attention.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import block_of, num_blocks, token_layout
from nsa.ops.reference.masked_attention import (
    Chunk,
    attend,
    attend_backward,
    backward_bytes,
    earliest,
    forward_bytes,
    row_slices,
    scores_held,
    shifted,
)


def most_rows(q: Tensor) -> int:
    """A chunk reads no keys after its last query: with four chunks, 5/8 of all scores are computed."""
    return max(64, q.shape[1] // 4)


def chunks(
    q: Tensor, num_keys: int, indices: Tensor, block: int, cu_seqlens: Tensor | None, q_offset: int = 0
) -> Iterator[Chunk]:
    layout = token_layout(num_keys, cu_seqlens, q.device)
    blocks = num_blocks(num_keys, block)
    for rows in row_slices(q, num_keys, most_rows(q)):
        at = shifted(rows, q_offset)
        keys = slice(earliest(layout.doc_start, at.start), at.stop)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        row = torch.arange(at.start, at.stop, device=q.device)[:, None]
        readable = (key >= layout.doc_start[at][:, None]) & (key <= row)
        # One extra column takes padding (-1) and indices out of range, and is never read.
        chosen = indices[:, rows].to(torch.int64)
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= blocks), blocks)
        table = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
        table.scatter_(3, chosen, True)
        picked = table.index_select(3, block_of(layout.position[keys], block))  # [B, R, G, K]
        yield Chunk(rows, keys, (picked.transpose(1, 2) & readable).unsqueeze(2))


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, cu_seqlens: Tensor | None, *, q_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """q [B,S,H,D], k [B,S,G,D], v [B,S,G,E], indices [B,S,G,n] -> o [B,S,H,E], lse [B,S,H]."""
    return attend(q, k, v, chunks(q, k.shape[1], indices, block, cu_seqlens, q_offset))


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, o: Tensor, lse: Tensor, block: int,
    cu_seqlens: Tensor | None, *, q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return attend_backward(do, q, k, v, o, lse, chunks(q, k.shape[1], indices, block, cu_seqlens, q_offset))


def forward_workspace(q: Tensor, k: Tensor, **_: Any) -> int:
    return forward_bytes(scores_held(q, most_rows(q), k.shape[1]))


def backward_workspace(q: Tensor, k: Tensor, **_: Any) -> int:
    return backward_bytes(scores_held(q, most_rows(q), k.shape[1]))
