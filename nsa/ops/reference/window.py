"""Attention over the last `window` tokens of the query's document, the query's own included."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.ops.layout import token_layout
from nsa.ops.reference import attention
from nsa.ops.reference.attention import Chunk, row_slices
from nsa.ops.spec import NSASpec


def _chunks(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Iterator[Chunk]:
    layout = token_layout(q.shape[1], spec, cu_seqlens, q.device)
    # A chunk reads rows + window keys: as many rows as the window keeps half of them in use.
    for rows in row_slices(q, min(2 * spec.window, q.shape[1]), most=max(64, spec.window)):
        keys = slice(max(0, rows.start - spec.window + 1), rows.stop)
        key = torch.arange(keys.start, keys.stop, device=q.device)
        row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        near = (key > row - spec.window) & (key <= row)
        yield Chunk(rows, keys, near & (key >= layout.doc_start[rows][:, None]))


def forward(q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return attention.forward(q, k, v, _chunks(q, spec, cu_seqlens))


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
    return attention.backward(do, q, k, v, o, lse, _chunks(q, spec, cu_seqlens))
