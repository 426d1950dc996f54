"""phi: compresses every block of keys or values to one token, with weights shared by all key/value heads.

Legend: B batch, S tokens, N compressed tokens, G key/value heads, D head size.
"""

import torch
from torch import Tensor, nn

from nsa.ops import NSASpec, compress_contract, compress_mean


class MeanCompressor(nn.Module):
    """The mean of the block: no parameters."""

    def __init__(self, spec: NSASpec, backend: str | None = None):
        super().__init__()
        self.spec, self.backend = spec, backend

    def forward(self, x_BSGD: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return compress_mean(x_BSGD, self.spec, cu_seqlens=cu_seqlens, backend=self.backend)


class MLPCompressor(nn.Module):
    """The paper's MLP: add an embedding per position in the block, flatten the block, Linear, SiLU, Linear to D.

    The first Linear of (x + embedding) is computed as Linear(x) + Linear(embedding). The second term is the same for
    every block, so x is contracted without a copy.
    """

    def __init__(self, spec: NSASpec, head_dim: int, backend: str | None = None):
        super().__init__()
        self.spec, self.backend = spec, backend
        self.place = nn.Parameter(torch.zeros(spec.cmp_block, head_dim))
        self.weight = nn.Parameter(torch.empty(spec.cmp_block, head_dim, head_dim))
        self.bias = nn.Parameter(torch.zeros(head_dim))
        self.out = nn.Linear(head_dim, head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.place, std=0.02)
        nn.init.normal_(self.weight, std=(self.weight.shape[0] * self.weight.shape[1]) ** -0.5)
        nn.init.zeros_(self.bias)
        self.out.reset_parameters()

    def forward(self, x_BSGD: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        weight, place = self.weight.to(x_BSGD.dtype), self.place.to(x_BSGD.dtype)
        constant = place.flatten() @ weight.flatten(0, 1) + self.bias.to(x_BSGD.dtype)
        hidden = compress_contract(x_BSGD, weight, self.spec, cu_seqlens=cu_seqlens, backend=self.backend) + constant
        compressed: Tensor = self.out(nn.functional.silu(hidden))
        return compressed.to(x_BSGD.dtype)


class MeanMLPCompressor(MLPCompressor):
    """The mean of the block plus the MLP, whose last Linear starts at zero: training starts at the mean."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x_BSGD: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        mean = compress_mean(x_BSGD, self.spec, cu_seqlens=cu_seqlens, backend=self.backend)
        return mean + super().forward(x_BSGD, cu_seqlens)
