"""Attention over the visible compressed tokens. Legend and masking as in `masked_attention.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import first_compressed, num_slots, token_layout, visible_compressed
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
from nsa.ops.spec import NSASpec


def chunks(q: Tensor, num_keys: int, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int = 0) -> Iterator[Chunk]:
    """The compressed tokens that each chunk of queries sees. Block selection uses the same chunks."""
    tokens = q_offset + q.shape[1]
    position = token_layout(tokens, cu_seqlens, q.device).position
    first = first_compressed(tokens, spec, cu_seqlens, q.device)
    for rows in row_slices(q, num_keys):
        at = shifted(rows, q_offset)
        # Upper bound: compressed tokens visible to the chunk's last query; packed, all slots of the tokens up to it.
        stop = visible_compressed(at.stop - 1, spec) if cu_seqlens is None else num_slots(at.stop, spec, packed=True)
        last = first[at] + visible_compressed(position[at], spec)
        keys = slice(min(earliest(first, at.start), stop), stop)
        slot = torch.arange(keys.start, keys.stop, device=q.device)
        yield Chunk(rows, keys, (slot >= first[at][:, None]) & (slot < last[:, None]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, *, q_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """q [B,S,H,D], k [B,N,G,D], v [B,N,G,E] -> o [B,S,H,E], lse [B,S,H]."""
    return attend(q, k, v, chunks(q, k.shape[1], spec, cu_seqlens, q_offset))


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, *,
    q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return attend_backward(do, q, k, v, o, lse, chunks(q, k.shape[1], spec, cu_seqlens, q_offset))


def forward_workspace(q: Tensor, k: Tensor, **_: Any) -> int:
    return forward_bytes(scores_held(q, q.shape[1], k.shape[1]))


def backward_workspace(q: Tensor, k: Tensor, **_: Any) -> int:
    return backward_bytes(scores_held(q, q.shape[1], k.shape[1]))
