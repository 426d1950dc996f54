"""One pass of every kernel, small, for a memory checker; on a CUDA GPU:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.ops.triton.memcheck

Without the caching allocator every tensor has its own bounds. A case's name as argument runs that case alone.
"""

import sys

import torch

from nsa.config import load_config
from nsa.nn import KVCache
from nsa.nn.model import build_model
from nsa.ops import (
    MSASpec,
    NSASpec,
    PagedKV,
    RingKV,
    compress_contract,
    compress_mean,
    long_mlp,
    msa_decode,
    nsa_attention,
    nsa_decode,
    paged_attention,
    select_blocks,
    selected_attention,
)

SMALL = NSASpec(8, 4, 16, 4, 1, 1, 24)
# name: tokens, heads, groups, Dk, Dv, dtype, spec, borders
CASES = {
    "h6": (777, 12, 2, 64, 64, torch.bfloat16, NSASpec(), None),
    "h16-packed": (777, 16, 1, 128, 128, torch.bfloat16, NSASpec(), [0, 5, 5, 300, 777]),
    "wide-keys-packed": (333, 12, 2, 192, 128, torch.float16, SMALL, [0, 100, 333]),
    "h1-fp32": (130, 4, 4, 32, 48, torch.float32, SMALL, None),
    "invalid-borders": (333, 4, 2, 64, 64, torch.bfloat16, SMALL, [9, -5, 10**6, 40, 7]),
}


def attention(tokens, heads, groups, dk, dv, dtype, spec, borders):
    generator = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()

    q, gates = normal(1, tokens, heads, dk), normal(1, tokens, heads, 3)
    keys, values = ([normal(1, tokens, groups, d) for _ in range(3)] for d in (dk, dv))
    weights = normal(spec.cmp_block, dv, 24)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda") if borders else None
    k_cmp, v_cmp = (compress_mean(x[0], spec, cu_seqlens=cu_seqlens, backend="triton") for x in (keys, values))
    o = nsa_attention(
        q, k_cmp, v_cmp, keys[1], values[1], keys[2], values[2], gates, spec, cu_seqlens=cu_seqlens, backend="triton"
    )
    contracted = compress_contract(values[0], weights, spec, cu_seqlens=cu_seqlens, backend="triton")
    torch.autograd.grad(o.float().sum() + contracted.float().sum(), [q, *keys, *values, gates, weights])


def invalid_indices():
    q, k, v = (torch.randn(1, 500, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (12, 2, 2))
    wild = torch.randint(-(2**31), 2**31 - 1, (1, 500, 2, 16), device="cuda", dtype=torch.int32)
    o = selected_attention(q, k, v, wild, NSASpec(), backend="triton")
    torch.autograd.grad(o.float().sum(), (q, k, v))
    k_cmp = compress_mean(k, NSASpec(), backend="triton")
    select_blocks(q, k_cmp, torch.full(q.shape[:3], float("nan"), device="cuda"), NSASpec(), backend="triton")


def decode():
    """Steps of one and several tokens; tables and positions valid, then invalid."""
    spec, page, pages = NSASpec(num_selected=4), 64, 12

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    table = torch.randperm(2 * pages, device="cuda").view(2, pages).int()
    slots = torch.tensor([1, 0], device="cuda", dtype=torch.int32)
    for new in (1, 3):
        q, gates = normal(2, new, 12, 64), normal(2, new, 12, 3)
        cmp, sel = ([normal(2 * pages, length, 2, 64) for _ in "kv"] for length in (page // spec.cmp_stride, page))
        ring = [normal(2, spec.window + new - 1, 2, 64) for _ in "kv"]
        index_q, index_keys = normal(2, new, 2, 32), normal(2 * pages, page, 1, 32)
        last = torch.tensor([[pages * page - new], [33]], device="cuda", dtype=torch.int32)
        positions = last + torch.arange(new, device="cuda", dtype=torch.int32)
        for wild, at in ((0, -1), *((wild, positions + abs(wild)) for wild in (0, 1 << 30, -(1 << 30)))):
            found = [x + wild for x in (table, slots)]
            at = at + torch.zeros_like(positions)  # -1 is padding
            nsa_decode(
                q, gates, PagedKV(*cmp, found[0]), PagedKV(*sel, found[0]), RingKV(*ring, found[1]), at, spec,
                backend="triton",
            )  # fmt: skip
            msa_decode(q, index_q, PagedKV(*sel, found[0]), index_keys, at, MSASpec(64, 4), backend="triton")
            paged_attention(q, PagedKV(*sel, found[0]), at, backend="triton")
            paged_attention(q, RingKV(*ring, found[1]), at, window=spec.window, backend="triton")


def mlp():
    """More tokens than a chunk has, and widths that are no power of two."""
    x, norm, dy = (torch.randn(shape, device="cuda") for shape in ((1, long_mlp.CHUNK + 5, 48), (48,), (48,)))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((72, 48), (72, 48), (48, 72))]
    for activation in ("swiglu", "swiglu_oai"):
        long_mlp.forward(x, norm, *weights, 1e-5, activation)
        long_mlp.backward(dy.expand_as(x), x, norm, *weights, 1e-5, activation)


@torch.inference_mode()
def step():
    """Generation for one, few and many sequences, in layers of every kind."""
    sizes = "model.n_layers=4 model.layer_pattern=[nsa,dense,window,msa] model.dim=200 model.mlp_dim=328"
    config = load_config("m7c_125m", [*sizes.split(), "model.qk_norm=true", "model.rotary_dim=24"])
    model = build_model(config, 512, 0).cuda().eval().bfloat16()
    for rows in (1, 3, 20):
        tokens = torch.randint(0, 512, (rows, 80), device="cuda")
        cache = KVCache(model, sequences=rows, max_length=80)
        for piece in tokens.split([77, 1, 1, 1], dim=1):
            model(piece, cache=cache)


if __name__ == "__main__":
    alone = {"invalid-indices": invalid_indices, "decode": decode, "mlp": mlp, "step": step}
    for name in sys.argv[1:] or [*CASES, *alone]:
        alone[name]() if name in alone else attention(*CASES[name])
        torch.cuda.synchronize()
        print(f"{name}: ran", flush=True)
