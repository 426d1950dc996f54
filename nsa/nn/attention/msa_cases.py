"""The operators of an MSA layer on random inputs, for a check of its kernels (`nsa.checks.kernels`)."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.nn.attention.layer import OperatorCase
from nsa.nn.attention.nsa_cases import MORE_BLOCKS, SHORT_BLOCKS
from nsa.ops import index_blocks, selected_attention
from nsa.ops.block_attention import selected_node
from nsa.ops.block_index import index_loss_node
from nsa.ops.branches import window_node

if TYPE_CHECKING:
    from nsa.nn.attention.msa import MSAAttention


def operator_cases(
    layer: "MSAAttention", seq_len: int, dtype: torch.dtype, device: torch.device, *, packed: bool, is_short: bool
) -> list[OperatorCase]:
    spec, groups = layer.spec, layer.num_kv_heads
    blocks = SHORT_BLOCKS if is_short else spec.num_selected + MORE_BLOCKS
    tokens = min(blocks * spec.block, max(seq_len, spec.block))
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=draw).to(device, dtype)

    q, k = random(layer.num_heads, layer.head_dim_k), random(groups, layer.head_dim_k)
    v, index_q, index_k = random(groups, layer.head_dim_v), random(groups, layer.index_dim), random(layer.index_dim)
    borders = torch.tensor([0, tokens // 3 + 1, tokens], dtype=torch.int32, device=device) if packed else None
    sizes: dict[str, Any] = {"spec": spec, "cu_seqlens": borders}
    counted = torch.ones(1, tokens, dtype=torch.bool, device=device)  # also queries that do not choose
    indices = index_blocks(index_q.double(), index_k.double(), backend="reference", **sizes)
    _, lse = selected_node(q.double(), k.double(), v.double(), indices, spec.block, borders, 0, "reference")

    def index_loss(index_q: Tensor, index_k: Tensor, *, backend: str | None) -> Tensor:
        own = index_q.dtype
        fixed = (q.to(own), k.to(own), lse.to(torch.float64 if own == torch.float64 else torch.float32))
        settings = (indices, counted, spec.block, borders, 0, torch.is_grad_enabled(), backend)
        kl: Tensor = index_loss_node(index_q, index_k, *fixed, *settings)[0]
        return kl

    # Dense attention, while the index warms up.
    win = partial(window_node, window=tokens, cu_seqlens=borders, q_offset=0)
    qkv, of_index = {"q": q, "k": k, "v": v}, {"index_q": index_q, "index_k": index_k}
    return [
        OperatorCase("index", of_index, partial(index_blocks, **sizes), (index_q, index_q), selects=True),
        OperatorCase("index_loss", of_index, index_loss, (q, index_q)),
        OperatorCase("sel", qkv, partial(selected_attention, indices=indices, **sizes), (q, v)),
        OperatorCase("win", qkv, win, (q, v)),
    ]
