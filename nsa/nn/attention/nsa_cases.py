"""The operators of an NSA layer on random inputs, for a check of its kernels (`nsa.checks.kernels`)."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.nn.attention.layer import OperatorCase
from nsa.nn.compressor import MLPCompressor
from nsa.ops import (
    compress_contract,
    compress_mean,
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.mixing import mix_node

if TYPE_CHECKING:
    from nsa.nn.attention.nsa import NSAAttention

SHORT_BLOCKS, MORE_BLOCKS = 4, 4  # selection blocks of a short sequence, and of a long one beyond those a query reads


def operator_cases(
    layer: "NSAAttention", seq_len: int, dtype: torch.dtype, device: torch.device, *, packed: bool, is_short: bool
) -> list[OperatorCase]:
    spec = layer.spec
    # Two compressed tokens in each document at least: a query that sees only one has no gradient to compare.
    least = 3 * (spec.cmp_block + spec.cmp_stride)
    blocks = SHORT_BLOCKS if is_short else spec.num_selected + MORE_BLOCKS
    tokens = max(least, min(blocks * spec.sel_block, max(seq_len, spec.sel_block)))
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    q = random(1, tokens, layer.num_heads, layer.head_dim_k)
    k, v = (random(1, tokens, layer.num_kv_heads, size) for size in (layer.head_dim_k, layer.head_dim_v))
    weight = random(spec.cmp_block, layer.head_dim_k, layer.head_dim_k) / spec.cmp_block
    mixed = {name: random(1, tokens, layer.num_heads, layer.head_dim_v) for name in ("cmp", "sel", "win")}
    mixed["gates"] = random(1, tokens, layer.num_heads, 3).sigmoid()
    borders = torch.tensor([0, tokens // 3 + 1, tokens], dtype=torch.int32, device=device) if packed else None
    sizes: dict[str, Any] = {"spec": spec, "cu_seqlens": borders}
    with torch.no_grad():
        exact = {**sizes, "backend": "reference"}
        k_cmp, v_cmp = (compress_mean(x.double(), **exact).to(dtype) for x in (k, v))
        _, lse = compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), **exact)
        indices = select_blocks(q.double(), k_cmp.double(), lse, **exact)

    def select(q: Tensor, k: Tensor, *, backend: str | None) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return select_blocks(q, k, lse.to(wide), backend=backend, **sizes)

    # "mean_mlp" is the sum of both, and the mean is the part with a kernel of its own.
    contracts = type(layer.phi_k) is MLPCompressor
    phi = partial(compress_contract if contracts else compress_mean, **sizes)
    qkv = {"q": q, "k": k, "v": v}
    return [
        OperatorCase("select", {"q": q, "k": k_cmp}, select, (q, k_cmp), selects=True),
        OperatorCase("phi", {"x": k, "weight": weight} if contracts else {"x": k}, phi, (q, v)),
        OperatorCase("cmp", {"q": q, "k": k_cmp, "v": v_cmp}, partial(compressed_attention, **sizes), (q, v)),
        OperatorCase("sel", qkv, partial(selected_attention, indices=indices, **sizes), (q, v)),
        OperatorCase("win", qkv, partial(window_attention, **sizes), (q, v)),
        OperatorCase("mix", mixed, mix_node, (q, v)),
    ]
