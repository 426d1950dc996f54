"""One decoder block: attention and a gated MLP, each applied after a norm and added to the residual stream.

Legend: B batch, S tokens, C channels.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.attention import Attention
from nsa.nn.cache_step import CacheStep
from nsa.nn.decode_step import fused_attention, fused_feed_forward
from nsa.nn.loss import is_long
from nsa.nn.projection import compute_dtype, has_hooks, is_bare, is_plain
from nsa.ops.library import refuse_tangents
from nsa.ops.long_mlp import norm_mlp
from nsa.ops.reference.feed_forward import ACTIVATIONS, gated


class SwiGLU(nn.Module):
    """out(silu(gate(x)) * up(x)); with the activation "swiglu_oai", out((up + 1) * gate * sigmoid(1.702 * gate)), where
    gate(x) is clamped to at most 7 and up(x) to [-7, 7]."""

    def __init__(self, dim: int, hidden: int, activation: str = "swiglu"):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ArgumentError("activation", f"must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        # One copy for both products: autocast would make and keep two. The gradients of both are added in its dtype.
        x_BSC = x_BSC.to(compute_dtype(x_BSC))
        # Two products: from a joined one, torch.compile would write the gradients of gate and up more slowly.
        y: Tensor = self.out(gated(self.gate(x_BSC), self.up(x_BSC), self.activation))
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


def call(recompute: Callable[..., Any] | None, module: nn.Module, x_BSC: Tensor, **settings: Any) -> Any:
    return module(x_BSC, **settings) if recompute is None else recompute(module, x_BSC, **settings)


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    recompute          None keeps all activations for backward. Otherwise `recompute(function, *args, **options)` calls
                       the function, and again in backward. A long pass then runs the MLP in chunks
    recomputes_parts   recompute attention and MLP separately instead of the whole block
    call_attention     calls the attention layer; torch.compile of divided sequences replaces it
    """

    recompute: Callable[..., Any] | None = None
    recomputes_parts = False
    call_attention: Callable[..., Any] = staticmethod(call)

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module, norm_eps: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp

    def projections(self) -> Iterator[tuple[str, nn.Linear]]:
        """The linear layers of attention and MLP, with their names; not those inside gates and compressors."""
        for branch in ("attention", "mlp"):
            for name, part in getattr(self, branch).named_children():
                if isinstance(part, nn.Linear | nn.ModuleList):
                    for path, linear in part.named_modules(prefix=f"{branch}.{name}"):
                        if isinstance(linear, nn.Linear):
                            yield path, linear

    def forward(
        self,
        x_BSC: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: CacheStep | None = None,
        counted: Tensor | None = None,
    ) -> Any:
        """The output [B, S, C]. With `counted`, for attention that has an index loss, also the sum of this loss and the
        number of its queries."""
        if self.recompute is None or self.recomputes_parts:
            return self.compute(x_BSC, cu_seqlens, max_seqlen, cache, counted)
        return self.recompute(self.compute, x_BSC, cu_seqlens, max_seqlen, cache, counted)

    def compute(
        self,
        x_BSC: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        cache: CacheStep | None,
        counted: Tensor | None,
    ) -> Any:
        settings: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if cache is not None:
            settings["cache"] = cache
        if counted is not None:
            settings["counted"] = counted
        index_loss: list[Tensor] = []
        in_chunks = self.recompute is not None and is_long(x_BSC)
        attended_BSC = self._fused_attention(x_BSC, cache) if cu_seqlens is None else None
        if attended_BSC is None:
            normed_BSC = self.attention_norm(x_BSC)
            if in_chunks:  # else autocast casts it for every projection, and backward keeps all casts
                normed_BSC = normed_BSC.to(compute_dtype(normed_BSC))
            attention_BSC = self.call_attention(self._recomputed_part(), self.attention, normed_BSC, **settings)
            if counted is not None:
                attention_BSC, *index_loss = attention_BSC
            attended_BSC = x_BSC + attention_BSC
        y_BSC = self._fused_feed_forward(attended_BSC, cache)
        if y_BSC is None:
            if in_chunks:
                y_BSC = attended_BSC + self._chunked_mlp(attended_BSC)
            else:
                y_BSC = attended_BSC + call(self._recomputed_part(), self.mlp, self.mlp_norm(attended_BSC))
        return y_BSC if counted is None else (y_BSC, *index_loss)

    def _recomputed_part(self) -> Callable[..., Any] | None:
        """The function that recomputes attention and MLP separately, or None."""
        return self.recompute if self.recomputes_parts else None

    def _fused_attention(self, x_BSC: Tensor, cache: CacheStep | None) -> Tensor | None:
        """x + attention(norm(x)) for a few new tokens in few launches; None if the modules must be called."""
        attention = self.attention
        if isinstance(cache, CacheStep) and isinstance(attention, Attention) and is_bare(attention, type(attention)):
            return fused_attention(attention, x_BSC, cache, self.attention_norm)
        return None

    def _fused_feed_forward(self, x_BSC: Tensor, cache: CacheStep | None) -> Tensor | None:
        """x + mlp(norm(x)), under the same conditions."""
        if not isinstance(cache, CacheStep) or cache.is_fresh or not is_bare(self.mlp, SwiGLU):
            return None
        return fused_feed_forward(self.mlp_norm, self.mlp, x_BSC, getattr(self.attention, "backend", None))

    def _chunked_mlp(self, x_BSC: Tensor) -> Tensor:
        """Norm and MLP on chunks of tokens, if the modules are unmodified."""
        norm, mlp = self.mlp_norm, self.mlp
        layers: Any = (mlp.gate, mlp.up, mlp.out) if type(mlp) is SwiGLU else ()
        is_ours = type(norm) is nn.RMSNorm and norm.eps is not None and all(map(is_plain, layers))
        if type(mlp) is not SwiGLU or not is_ours or has_hooks(mlp) or has_hooks(norm):
            y_BSC: Tensor = call(self._recomputed_part(), mlp, norm(x_BSC))
            return y_BSC
        weights = [layer.weight.to(compute_dtype(x_BSC)) for layer in layers]
        refuse_tangents("norm_mlp", x_BSC, norm.weight, *weights)
        return norm_mlp(x_BSC, norm.weight, *weights, norm.eps, mlp.activation)  # type: ignore[no-any-return]
