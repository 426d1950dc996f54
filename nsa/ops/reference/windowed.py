"""Attention over the last `window` tokens of the query's document, including its own. Legend and masking as in
`masked_attention.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import token_layout, window_start
from nsa.ops.reference.masked_attention import (
    Chunk,
    attend,
    attend_backward,
    backward_bytes,
    forward_bytes,
    row_slices,
    scores_held,
    shifted,
)


def _most_rows(window: int) -> int:
    """A chunk reads rows + window keys: with `window` rows, each row uses half of them."""
    return max(64, window)


def chunks(q: Tensor, num_keys: int, window: int, cu_seqlens: Tensor | None, q_offset: int = 0) -> Iterator[Chunk]:
    layout = token_layout(num_keys, cu_seqlens, q.device)
    most = _most_rows(window)
    for rows in row_slices(q, min(most + window, num_keys), most):
        at = shifted(rows, q_offset)
        keys = slice(max(0, window_start(at.start, window)), at.stop)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        row = torch.arange(at.start, at.stop, device=q.device)[:, None]
        near = (key >= window_start(row, window)) & (key <= row)
        yield Chunk(rows, keys, near & (key >= layout.doc_start[at][:, None]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, *, q_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """q [B,S,H,D], k [B,S,G,D], v [B,S,G,E] -> o [B,S,H,E], lse [B,S,H]."""
    return attend(q, k, v, chunks(q, k.shape[1], window, cu_seqlens, q_offset))


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, cu_seqlens: Tensor | None, *,
    q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return attend_backward(do, q, k, v, o, lse, chunks(q, k.shape[1], window, cu_seqlens, q_offset))


def _scores(q: Tensor, k: Tensor, window: int) -> int:
    most = _most_rows(window)
    return scores_held(q, min(q.shape[1], most), min(k.shape[1], most + window))


def forward_workspace(q: Tensor, k: Tensor, window: int, **_: Any) -> int:
    return forward_bytes(_scores(q, k, window))


def backward_workspace(q: Tensor, k: Tensor, window: int, **_: Any) -> int:
    return backward_bytes(_scores(q, k, window))
