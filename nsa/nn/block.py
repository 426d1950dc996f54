"""One decoder block: attention and a SwiGLU MLP, each behind a norm and added to the residual stream.

Legend: B batch, S tokens, C channels.
"""

from typing import Any

from torch import Tensor, nn

from nsa.nn.cache import CacheStep
from nsa.nn.dense import DenseAttention
from nsa.nn.projection import project


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
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), cu_seqlens=cu_seqlens, **settings)
        y_BSC: Tensor = x_BSC + self.mlp(self.mlp_norm(x_BSC))
        return y_BSC
