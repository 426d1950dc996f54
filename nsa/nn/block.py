"""One decoder block: attention and a SwiGLU MLP, each behind a norm and added to the residual stream.

Legend: B batch, S tokens, C channels.
"""

from typing import Any

from torch import Tensor, nn

from nsa.nn.attention import NSAAttention
from nsa.nn.cache_step import CacheStep
from nsa.nn.dense import DenseAttention
from nsa.nn.loss import is_long
from nsa.nn.projection import compute_dtype, has_hooks, is_bare, is_plain, project
from nsa.nn.step import feed_forward_new
from nsa.ops.library import norm_mlp, refuse_tangents


class SwiGLU(nn.Module):
    """out(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        gate, up = project(x_BSC, [self.gate, self.up])
        y: Tensor = self.out(nn.functional.silu(gate) * up)
        return y


class DecoderBlock(nn.Module):
    """`saves_memory`, set where the block is recomputed in backward: a long pass then runs the MLP in chunks."""

    saves_memory = False

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module, norm_eps: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x_BSC: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor:
        settings: dict[str, Any] = {"max_seqlen": max_seqlen} if isinstance(self.attention, DenseAttention) else {}
        if cache is not None:
            settings["cache"] = cache
        in_chunks = self.saves_memory and is_long(x_BSC)
        attended_BSC = self._attend_new(x_BSC, cache) if cu_seqlens is None else None
        if attended_BSC is None:
            normed_BSC = self.attention_norm(x_BSC)
            if in_chunks:  # else autocast casts it for every projection by itself, and backward keeps all of them
                normed_BSC = normed_BSC.to(compute_dtype(normed_BSC))
            attended_BSC = x_BSC + self.attention(normed_BSC, cu_seqlens=cu_seqlens, **settings)
        y_BSC = self._feed_forward_new(attended_BSC, cache)
        if y_BSC is None:
            mlp = self._chunked_mlp if in_chunks else lambda x_BSC: self.mlp(self.mlp_norm(x_BSC))
            y_BSC = attended_BSC + mlp(attended_BSC)
        return y_BSC

    def _attend_new(self, x_BSC: Tensor, cache: CacheStep | None) -> Tensor | None:
        """x + attention(norm(x)) for a few new tokens in few launches, where calling the modules computes the same."""
        attention = self.attention
        if isinstance(cache, CacheStep) and (is_bare(attention, NSAAttention) or is_bare(attention, DenseAttention)):
            return attention.fused(x_BSC, cache, self.attention_norm)
        return None

    def _feed_forward_new(self, x_BSC: Tensor, cache: CacheStep | None) -> Tensor | None:
        """The same of the MLP."""
        if not isinstance(cache, CacheStep) or cache.is_fresh or not is_bare(self.mlp, SwiGLU):
            return None
        return feed_forward_new(self.mlp_norm, self.mlp, x_BSC, getattr(self.attention, "backend", None))

    def _chunked_mlp(self, x_BSC: Tensor) -> Tensor:
        """The norm and the MLP on some tokens at a time, where calling the modules would do nothing else."""
        norm, mlp = self.mlp_norm, self.mlp
        layers: Any = (mlp.gate, mlp.up, mlp.out) if type(mlp) is SwiGLU else ()
        is_ours = layers and type(norm) is nn.RMSNorm and norm.eps is not None and all(map(is_plain, layers))
        if not is_ours or has_hooks(mlp) or has_hooks(norm):
            return mlp(norm(x_BSC))  # type: ignore[no-any-return]
        weights = [layer.weight.to(compute_dtype(x_BSC)) for layer in layers]
        refuse_tangents("norm_mlp", x_BSC, norm.weight, *weights)
        return norm_mlp(x_BSC, norm.weight, *weights, norm.eps)  # type: ignore[no-any-return]
