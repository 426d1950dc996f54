"""Causal attention over all previous tokens: the baseline of sparse attention, and a layer of mixed models.

Legend: B batch, S tokens, n new tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from nsa.nn.attention.gathered import WINDOW, Gathered, GatheredCall, attend_gathered, plan
from nsa.nn.attention.layer import Attention, Exchange
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.layer_cache import LayerCache, decode_backend, write
from nsa.nn.projection import project_heads
from nsa.nn.rope import RopeScaling, Tables, rotary_tables, rotate
from nsa.ops.causal import causal_attention
from nsa.ops.decoding import paged_attention
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.positions import token_positions

if TYPE_CHECKING:
    from nsa.config.architecture import Architecture


class DenseAttention(Attention, has_fused_step=True):
    """Causal softmax attention on [B, S, dim] through PyTorch's fused kernels.

    dim            width of input and output
    num_heads      query heads, a multiple of num_kv_heads
    num_kv_heads   key/value heads; each is shared by num_heads / num_kv_heads query heads
    head_dim_k     size of a query and key head
    head_dim_v     size of a value head; None makes it head_dim_k
    rotary_dim     number of rotated channels of a query and key head; None: all, as in NSAAttention
    rope_base      base of the rotary frequencies, as in NSAAttention
    rope_scaling   `nsa.nn.rope.RopeScaling` of the rotary frequencies, or None
    qk_norm        RMSNorm on the queries and keys of every head, before rotary positions
    qkv_bias       the projections of queries, keys and values have a bias
    norm_eps       epsilon of these norms
    backend        as in NSAAttention, for the window operator
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int | None = None,
        *,
        rotary_dim: int | None = None,
        rope_base: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: Backend = None,
    ):
        rotary: dict[str, Any] = {"rotary_dim": rotary_dim, "rope_base": rope_base, "rope_scaling": rope_scaling}
        super().__init__(dim, num_heads, num_kv_heads, head_dim_k, head_dim_v, **rotary, backend=backend)
        self.q = nn.Linear(dim, num_heads * self.head_dim_k, bias=qkv_bias)
        self.k = nn.Linear(dim, num_kv_heads * self.head_dim_k, bias=qkv_bias)
        self.v = nn.Linear(dim, num_kv_heads * self.head_dim_v, bias=qkv_bias)
        self.q_norm = nn.RMSNorm(self.head_dim_k, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim_k, eps=norm_eps) if qk_norm else nn.Identity()
        self.out = nn.Linear(num_heads * self.head_dim_v, dim, bias=False)

    @classmethod
    def from_config(cls, config: Architecture, backend: Backend = None) -> Self:
        return cls(**cls.settings(config, backend))

    def attend_whole(
        self, x_BSC: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, step: CacheStep | None = None
    ) -> Tensor:
        position_S = token_positions(x_BSC.shape[1], cu_seqlens, x_BSC.device)
        q_BSHK, keys, values = self.projections(x_BSC, rotary_tables(position_S, *self.rotary))
        if step is not None:
            write(step, step.layer(self).writes(keys, values))
        o_BSHV = self.attend(q_BSHK, keys[0], values[0], cu_seqlens, max_seqlen)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def attend(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Tensor:
        """Attention of whole sequences, or of the last tokens of the keys' sequences: [B, S, H, V]."""
        settings: dict[str, Any] = {"max_seqlen": max_seqlen, "backend": backend_of("win", self.backend)}
        earlier = k_BSGK.shape[1] - q_BSHK.shape[1]
        return causal_attention(q_BSHK, k_BSGK, v_BSGV, cu_seqlens=cu_seqlens, q_offset=earlier, **settings)

    def projections(self, x_BSC: Tensor, tables: Tables) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Queries and keys, rotated by `tables` from `rotary_tables`, and values."""
        q_BSHK, keys, values = project_heads(self, x_BSC)
        return rotate(q_BSHK, tables), [rotate(k, tables) for k in keys], values

    def build_cache(self, cache: KVCache) -> LayerCache:
        return LayerCache(dense=cache.pool(cache.page_size, self.num_kv_heads, self.head_dim_k, self.head_dim_v))

    def read_tokens(self, x_BnC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        q_BnHK, keys, values = self.projections(x_BnC, tables)
        return [q_BnHK], keys, values

    def attend_cached(self, queries: Sequence[Tensor], step: CacheStep) -> Tensor:
        view, backend = step.layer(self).pool().view(step), decode_backend(self.backend)
        return paged_attention(queries[0], view, step.positions, backend=backend)

    def attend_chunk(self, queries: Sequence[Tensor], cached: Sequence[Tensor], step: CacheStep) -> Tensor:
        return self.attend(queries[0], cached[0], cached[1], None, None)

    def attend_context(self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
        here = plan(x_BSC, cu_seqlens, context)
        window = {"window": context.size * x_BSC.shape[1]}
        call = GatheredCall(WINDOW, window, context, here, backend_of("win", self.backend))
        q_BSHK, (k_BSGK,), (v_BSGV,) = self.projections(x_BSC, rotary_tables(here.position, *self.rotary))
        o_BSHV, _ = attend_gathered(Gathered(k_BSGK, v_BSGV, call), q_BSHK, k_BSGK, v_BSGV)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def forward_flops(self, seq_len: int) -> float:
        return self.dense_flops(seq_len)

    def saved_operators(self) -> list[Any]:
        """The operators that PyTorch may choose; the last one for packed documents on a GPU."""
        import torch.nn.attention.varlen  # the import takes a second

        names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
        fused = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names]
        return [*fused, torch.ops.nsa.window_attention.default, torch.ops.torch_attn._varlen_attn.default]
