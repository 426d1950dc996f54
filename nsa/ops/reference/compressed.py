"""Attention over the visible compressed tokens; rows that see none give 0 and a log-sum-exp of -inf."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.ops.layout import token_layout, visible_compressed
from nsa.ops.reference import attention
from nsa.ops.reference.attention import Chunk, earliest, row_slices
from nsa.ops.spec import NSASpec


def visible_chunks(q: Tensor, num_keys: int, spec: NSASpec, cu_seqlens: Tensor | None) -> Iterator[Chunk]:
    """Which compressed tokens each chunk of queries sees. Shared with block selection."""
    layout = token_layout(q.shape[1], spec, cu_seqlens, q.device)
    for rows in row_slices(q, num_keys):
        # Upper bound: visible tokens of the chunk's last query; packed, every document starts no later than here.
        stop = visible_compressed(rows.stop - 1, spec) if cu_seqlens is None else rows.stop // spec.cmp_stride
        first = layout.cmp_start[rows]
        last = first + visible_compressed(layout.position[rows], spec)
        keys = slice(min(earliest(layout.cmp_start, rows.start), stop), stop)
        slot = torch.arange(keys.start, keys.stop, device=q.device)
        yield Chunk(rows, keys, (slot >= first[:, None]) & (slot < last[:, None]))


def forward(q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return attention.forward(q, k, v, visible_chunks(q, k.shape[1], spec, cu_seqlens))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = visible_chunks(q, k.shape[1], spec, cu_seqlens)
    return attention.backward(do, q, k, v, o, lse, chunks)
