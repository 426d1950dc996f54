"""The weights with which each query head combines the three branches.

Legend: B batch, S tokens, C channels, H query heads.
"""

from typing import Literal

from torch import Tensor, nn


class BranchGate(nn.Module):
    """A small MLP from the layer's input to gates [B, S, H, 3] in the order (cmp, sel, win).

    The last layer is initialized to zero, so all branches start with the same weight: 1/2 for sigmoid, 1/3 for softmax.
    """

    def __init__(self, dim: int, num_heads: int, kind: Literal["sigmoid", "softmax"]):
        super().__init__()
        self.num_heads = num_heads
        self.kind = kind
        self.hidden = nn.Linear(dim, max(32, dim // 8))
        self.out = nn.Linear(self.hidden.out_features, 3 * num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x_BSC: Tensor) -> Tensor:
        logits_BSH3 = self.out(nn.functional.silu(self.hidden(x_BSC))).unflatten(-1, (self.num_heads, 3))
        gates: Tensor = logits_BSH3.sigmoid() if self.kind == "sigmoid" else logits_BSH3.softmax(-1)
        return gates
