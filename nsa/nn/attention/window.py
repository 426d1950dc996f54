"""Causal attention over the last tokens, whose cache has a fixed size.

Legend: B batch, S tokens, n new tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from nsa.errors import whole_number
from nsa.nn.attention.dense import DenseAttention
from nsa.nn.attention.gathered import WINDOW, GatheredCall, attend_halos, plan, with_halos
from nsa.nn.attention.layer import Exchange
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.layer_cache import LayerCache, decode_backend
from nsa.nn.rope import rotary_tables
from nsa.ops.branches import window_attention
from nsa.ops.decoding import paged_attention
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.config.architecture import Architecture


class WindowAttention(DenseAttention, has_fused_step=True):
    """`DenseAttention` in which a query reads the last `window` tokens, including its own."""

    def __init__(self, *sizes: int, window: int, **settings: Any):
        super().__init__(*sizes, **settings)
        self.window = whole_number("window", window)

    @classmethod
    def from_config(cls, config: Architecture, backend: Backend = None) -> Self:
        return cls(window=config.nsa.window, **cls.settings(config, backend))

    def attend(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Tensor:
        spec, backend = NSASpec(window=self.window), backend_of("win", self.backend)
        earlier = k_BSGK.shape[1] - q_BSHK.shape[1]
        return window_attention(q_BSHK, k_BSGK, v_BSGV, spec, cu_seqlens=cu_seqlens, q_offset=earlier, backend=backend)

    def build_cache(self, cache: KVCache) -> LayerCache:
        heads = (self.num_kv_heads, self.head_dim_k, self.head_dim_v)
        return LayerCache(window=cache.pool(self.window, *heads, is_ring=True))

    def attend_cached(self, queries: Sequence[Tensor], step: CacheStep) -> Tensor:
        view, backend = step.layer(self).pool().view(step), decode_backend(self.backend)
        return paged_attention(queries[0], view, step.positions, window=self.window, backend=backend)

    def attend_context(self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
        here = plan(x_BSC, cu_seqlens, context)
        call = GatheredCall(WINDOW, {"window": self.window}, context, here, backend_of("win", self.backend))
        q_BSHK, (k_BSGK,), (v_BSGV,) = self.projections(x_BSC, rotary_tables(here.position, *self.rotary))
        o_BSHV = attend_halos(q_BSHK, with_halos(k_BSGK, v_BSGV, self.window - 1, context), call)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def forward_flops(self, seq_len: int) -> float:
        full = min(self.window, seq_len)  # queries up to this one read all tokens before them
        return self.flops_per_key * (full * (full + 1) / 2 + (seq_len - full) * full) / seq_len

    def saved_operators(self) -> list[Any]:
        return [torch.ops.nsa.window_attention.default]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"
