"""Ordinary causal attention with the same projections: the twin that NSA is compared with.

Legend: B batch, S tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa.nn.rope import rotary_tables, rotate
from nsa.ops.operators import check_borders, positions
from nsa.ops.spec import NSASpec


class DenseAttention(nn.Module):
    """Causal softmax attention through PyTorch's fused kernels."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim_k: int, head_dim_v: int, rope_base: float):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_v
        self.rope_base = rope_base
        self.q = nn.Linear(dim, num_heads * head_dim_k, bias=False)
        self.k = nn.Linear(dim, num_kv_heads * head_dim_k, bias=False)
        self.v = nn.Linear(dim, num_kv_heads * head_dim_v, bias=False)
        self.out = nn.Linear(num_heads * head_dim_v, dim, bias=False)

    def forward(self, x_BSC: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        check_borders(cu_seqlens, x_BSC)
        tokens = x_BSC.shape[1]
        position_S, _ = positions(tokens, NSASpec(), cu_seqlens, x_BSC.device)
        tables = rotary_tables(position_S, self.head_dim_k, self.rope_base)
        q_BSHK = rotate(self.q(x_BSC).unflatten(-1, (self.num_heads, self.head_dim_k)), tables)
        k_BSGK = rotate(self.k(x_BSC).unflatten(-1, (self.num_kv_heads, self.head_dim_k)), tables)
        v_BSGV = self.v(x_BSC).unflatten(-1, (self.num_kv_heads, self.head_dim_v))
        mask = None
        if cu_seqlens is not None:
            index = torch.arange(tokens, device=x_BSC.device)
            mask = (index >= (index - position_S)[:, None]) & (index <= index[:, None])
        o_BHSV = scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            k_BSGK.transpose(1, 2),
            v_BSGV.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        out_BSC: Tensor = self.out(o_BHSV.transpose(1, 2).flatten(2))
        return out_BSC
