"""The operators of an NSA layer on random inputs, for a check of its kernels (`nsa.checks.kernels`)."""

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
    documents: dict[str, Any] = {"cu_seqlens": borders}
    with torch.no_grad():
        exact: dict[str, Any] = {**documents, "backend": "reference"}
        k_cmp, v_cmp = (compress_mean(x.double(), spec, **exact).to(dtype) for x in (k, v))
        _, lse = compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), spec, **exact)
        indices = select_blocks(q.double(), k_cmp.double(), lse, spec, **exact)

    def phi(t: dict[str, Tensor], by: str | None) -> Tensor:
        if "weight" in t:
            return compress_contract(t["x"], t["weight"], spec, backend=by, **documents)
        return compress_mean(t["x"], spec, backend=by, **documents)

    def cmp(t: dict[str, Tensor], by: str | None) -> Tensor:
        return compressed_attention(t["q"], t["k"], t["v"], spec, backend=by, **documents)[0]

    def select(t: dict[str, Tensor], by: str | None) -> Tensor:
        wide = torch.float64 if t["q"].dtype == torch.float64 else torch.float32
        return select_blocks(t["q"], t["k"], lse.to(wide), spec, backend=by, **documents)

    def sel(t: dict[str, Tensor], by: str | None) -> Tensor:
        return selected_attention(t["q"], t["k"], t["v"], indices, spec, backend=by, **documents)

    def win(t: dict[str, Tensor], by: str | None) -> Tensor:
        return window_attention(t["q"], t["k"], t["v"], spec, backend=by, **documents)

    def mix(t: dict[str, Tensor], by: str | None) -> Tensor:
        y: Tensor = mix_node(t["cmp"], t["sel"], t["win"], t["gates"], by)
        return y

    # "mean_mlp" is the sum of both, and the mean is the part with a kernel of its own.
    compressed = {"x": k, "weight": weight} if type(layer.phi_k) is MLPCompressor else {"x": k}
    qkv = {"q": q, "k": k, "v": v}
    return [
        OperatorCase("select", {"q": q, "k": k_cmp}, select, (q, k_cmp), selects=True),
        OperatorCase("phi", compressed, phi, (q, v)),
        OperatorCase("cmp", {"q": q, "k": k_cmp, "v": v_cmp}, cmp, (q, v)),
        OperatorCase("sel", qkv, sel, (q, v)),
        OperatorCase("win", qkv, win, (q, v)),
        OperatorCase("mix", mixed, mix, (q, v)),
    ]
