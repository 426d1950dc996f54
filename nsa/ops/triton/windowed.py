"""Attention over the last `window` tokens: the kernels of `flash.py`."""

import torch
from torch import Tensor

from nsa.ops.layout import cached_with, token_layout, window_start
from nsa.ops.triton.flash import IntervalAttention, KeyRange


class Windowed(IntervalAttention):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, *, q_offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v, key_range(q, window, cu_seqlens, q_offset))

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int,
        cu_seqlens: Tensor | None, *, q_offset: int = 0, sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self.attend_backward(do, q, k, v, o, lse, key_range(q, window, cu_seqlens, q_offset), sums)


windowed = Windowed("win")


def key_range(q: Tensor, window: int, cu_seqlens: Tensor | None, q_offset: int) -> KeyRange:
    """The keys seen by queries like q with `q_offset` tokens before them."""
    if cu_seqlens is None and not q_offset:
        return KeyRange(1, 1, window)
    tokens = q_offset + q.shape[1]

    def tables() -> KeyRange:
        layout = token_layout(tokens, cu_seqlens, q.device)
        doc_start = layout.doc_start[q_offset:]
        token = doc_start + layout.position[q_offset:]
        lo = torch.maximum(doc_start, window_start(token, window))
        return KeyRange(1, 1, window, lo.to(torch.int32), (token + 1).to(torch.int32))

    return cached_with(cu_seqlens, ("win", tokens, q_offset, window), tables)
