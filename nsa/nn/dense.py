"""Ordinary causal attention, over the whole past or over a window: the layers that NSA is compared and mixed with.

Legend: B batch, S tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.layer_cache import LayerCache, decode_backend, write
from nsa.nn.projection import check_input, project_heads, reset_parts
from nsa.nn.rope import RopeScaling, rotary_tables, rotate
from nsa.nn.step import attend, attend_new
from nsa.ops.decode import paged_attention
from nsa.ops.operators import Backend, backend_of, check_borders, positions, window_attention
from nsa.ops.spec import NSASpec


class DenseAttention(nn.Module):
    """Causal softmax attention on [B, S, dim] through PyTorch's fused kernels.

    dim            width of input and output
    num_heads      query heads, a multiple of num_kv_heads
    num_kv_heads   key/value heads; each is shared by num_heads / num_kv_heads query heads
    head_dim_k     size of a query and key head
    head_dim_v     size of a value head
    rope_base      base of the rotary frequencies, as for NSAAttention
    window         tokens that a query reads, its own included; None reads the whole past
    rope_scaling   `RopeScaling` of the rotary frequencies, or None
    qk_norm        RMSNorm on the queries and keys of every head, before rotary positions
    qkv_bias       the projections of queries, keys and values have a bias
    norm_eps       epsilon of these norms
    backend        as for NSAAttention; of interest where the window operator runs
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        rope_base: float = 10_000.0,
        *,
        window: int | None = None,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: Backend = None,
    ):
        super().__init__()
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_v
        self.rope_base, self.rotary = rope_base, (head_dim_k, rope_base, rope_scaling)
        self.window, self.backend = window, backend
        self.q = nn.Linear(dim, num_heads * head_dim_k, bias=qkv_bias)
        self.k = nn.Linear(dim, num_kv_heads * head_dim_k, bias=qkv_bias)
        self.v = nn.Linear(dim, num_kv_heads * head_dim_v, bias=qkv_bias)
        self.q_norm = nn.RMSNorm(head_dim_k, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim_k, eps=norm_eps) if qk_norm else nn.Identity()
        self.out = nn.Linear(num_heads * head_dim_v, dim, bias=False)

    def reset_parameters(self) -> None:
        """As for NSAAttention."""
        reset_parts(self)

    def build_cache(self, cache: KVCache) -> LayerCache:
        """What this layer keeps in a `KVCache`."""
        heads = (self.num_kv_heads, self.head_dim_k, self.head_dim_v)
        if self.window is None:
            return LayerCache(dense=cache.pool(cache.page_size, *heads))
        return LayerCache(window=cache.pool(self.window, *heads, is_ring=True))

    def forward(
        self,
        x_BSC: Tensor,
        *,
        cache: KVCache | CacheStep | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x_BSC [batch, tokens, dim] -> the same shape, `cache` and `cu_seqlens`, as for `NSAAttention.forward`.
        `max_seqlen` bounds the length of a packed document; without it, kernels assume the whole row. A NaN spreads as
        there, but with neither `window` nor `cu_seqlens`, PyTorch's kernels carry it to earlier tokens on a CPU too."""
        check_input(x_BSC, self.dim, self.q)
        check_borders(cu_seqlens, x_BSC)
        return self.whole(x_BSC, cu_seqlens, max_seqlen) if cache is None else attend(self, x_BSC, cache, cu_seqlens)

    def whole(
        self,
        x_BSC: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        step: CacheStep | None = None,
    ) -> Tensor:
        """Whole sequences, which also fill an empty cache."""
        tokens = x_BSC.shape[1]
        position_S, _ = positions(tokens, NSASpec(), cu_seqlens, x_BSC.device)
        q_BSHK, keys, values = self.projections(x_BSC, rotary_tables(position_S, *self.rotary))
        (k_BSGK,), (v_BSGV,) = keys, values
        if step is not None:
            write(step, step.layer(self).writes(keys, values))
        if self.window is None and cu_seqlens is None:
            o_BSHV = _fused(q_BSHK, k_BSGK, v_BSGV)
        elif self.window is None and cu_seqlens is not None and _runs_varlen(q_BSHK, v_BSGV):
            o_BSHV = _varlen(q_BSHK, k_BSGK, v_BSGV, cu_seqlens, max_seqlen or tokens)
        else:  # a window as long as the row is causal attention, in memory that grows linearly on every device
            spec = NSASpec(window=self.window or tokens)
            backend = backend_of("win", self.backend)
            o_BSHV = window_attention(q_BSHK, k_BSGK, v_BSGV, spec, cu_seqlens=cu_seqlens, backend=backend)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def projections(self, x_BSC: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Queries and keys, rotated as `rotary_tables` says, and values."""
        q_BSHK, keys, values = project_heads(self, x_BSC)
        return rotate(q_BSHK, tables), [rotate(k, tables) for k in keys], values

    def fused(self, x_BSC: Tensor, step: CacheStep, norm: nn.Module | None = None) -> Tensor | None:
        """As for NSAAttention."""
        return attend_new(self, x_BSC, step, norm) if type(self) is DenseAttention else None

    def attend_cached(self, q_BSHK: Tensor, gates: None, step: CacheStep) -> Tensor:
        """Queries over what the cache holds."""
        view, backend = step.layer(self).pool().view(step), decode_backend(self.backend)
        return paged_attention(q_BSHK, view, step.positions, window=self.window, backend=backend)

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        sizes += f", head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, rope_base={self.rope_base:g}"
        return f"{sizes}, window={self.window}"


def _fused(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGV))
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)


def _runs_varlen(q: Tensor, v: Tensor) -> bool:
    """PyTorch's variable-length kernels: a CUDA GPU from sm_80 on, 16-bit types, heads of one size."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] == v.shape[3]
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _varlen(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Causal, with fewer key/value heads than query heads: how to say so changed between torch 2.11 and 2.12.
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    o = varlen_attn(q_BSHK[0], k_BSGK[0], v_BSGV[0], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    assert isinstance(o, Tensor)
    return o[None]
