"""Attention over the tokens of the blocks each query selected, at positions up to its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.ops.layout import num_blocks, token_layout
from nsa.ops.reference import attention
from nsa.ops.reference.attention import Chunk, earliest, row_slices
from nsa.ops.spec import NSASpec


def _chunks(q: Tensor, indices: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Iterator[Chunk]:
    layout = token_layout(q.shape[1], spec, cu_seqlens, q.device)
    blocks = num_blocks(q.shape[1], spec)
    for rows in row_slices(q, q.shape[1]):
        keys = slice(earliest(layout.doc_start, rows.start), rows.stop)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        readable = (key >= layout.doc_start[rows][:, None]) & (key <= row)
        # One extra column takes the padding (-1), and whatever lies outside, and is never looked up.
        chosen = indices[:, rows].to(torch.int64)
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= blocks), blocks)
        table = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
        table.scatter_(3, chosen, True)
        picked = table[..., layout.position[keys] // spec.sel_block]  # [B, R, G, K]
        yield Chunk(rows, keys, (picked.transpose(1, 2) & readable).unsqueeze(2))


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: NSASpec, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return attention.forward(q, k, v, _chunks(q, indices, spec, cu_seqlens))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return attention.backward(do, q, k, v, o, lse, _chunks(q, indices, spec, cu_seqlens))
