"""Compressed attention of whole runs of tokens as causal attention, with PyTorch's plain attention in cuDNN's place."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from nsa.ops import NSASpec
from nsa.ops.layout import num_compressed
from nsa.ops.reference import compressed as reference
from nsa.ops.triton import compressed as module
from nsa.ops.triton.compressed import FEWEST_TOKENS, compressed, cudnn_is_faster
from nsa.ops.triton.launch_table import H200, Card


def scores(q, k):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    masked = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(masked, -torch.inf)


def plain_forward(q, k, v):
    assert {x.stride(3) for x in (q, k, v)} == {1}, "as cuDNN wants it"
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o, scores(q, k).logsumexp(-1, keepdim=True)


def plain_backward(do, q, k, v, o, lse):
    torch.testing.assert_close(lse, scores(q, k).logsumexp(-1, keepdim=True))
    with torch.enable_grad():
        inputs = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
        again, _ = plain_forward(*inputs)
        torch.testing.assert_close(o, again)
        return torch.autograd.grad(again, inputs, do)


@pytest.mark.parametrize(
    ("tokens", "spec"),
    [
        (208, NSASpec()),  # one token behind the last run
        (207, NSASpec()),  # none
        (206, NSASpec()),  # fifteen
        (48, NSASpec()),
        (77, NSASpec(8, 4, 16, 4, 1, 1, 20)),
        (70, NSASpec(16, 16, 16, 4, 1, 1, 20)),
    ],
)
def test_causal_attention_over_runs_of_tokens_is_compressed_attention(tokens, spec, monkeypatch):
    monkeypatch.setattr(module, "causal_forward", plain_forward)
    monkeypatch.setattr(module, "causal_backward", plain_backward)
    generator = torch.Generator().manual_seed(0)

    def draw(length, heads, dim):
        return torch.randn(1, length, heads, dim, generator=generator)

    keys = num_compressed(tokens, spec)
    q, k, v, do = draw(tokens, 6, 16), draw(keys, 2, 16), draw(keys, 2, 32), draw(tokens, 6, 32)
    q, k, v, do = (x.mT.contiguous().mT for x in (q, k, v, do))  # callers may have them in any order
    exact = [x.double() for x in (q, k, v)]
    wanted = reference.forward(*exact, spec, None)
    got = compressed.forward_by_runs(q, k, v, spec)
    for x, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), want.double(), rtol=1e-4, atol=1e-5)
    wanted_grads = reference.backward(do.double(), *exact, *wanted, spec, None)
    for x, want in zip(compressed.backward_by_runs(do, q, k, v, *got, spec), wanted_grads, strict=True):
        assert x.is_contiguous()
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5)


def like(batch=1, tokens=1 << 20, dim=64, dtype=torch.bfloat16):
    return torch.empty(batch, tokens, 12, dim, dtype=dtype, device="meta")


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_cudnn_gets_long_single_sequences_in_16_bits_on_hopper(kernel):
    spec, q = NSASpec(), like()
    assert cudnn_is_faster(kernel, q, q, spec, H200)
    assert cudnn_is_faster(kernel, like(dim=128), like(dim=128), spec, H200)
    assert not cudnn_is_faster(kernel, q, q, spec, Card("sm80", 108))
    assert not cudnn_is_faster(kernel, q, like(dim=128), spec, H200)
    assert like(tokens=(1 << 21) // 3 * 2, dim=128).numel() <= 1 << 31 < like(tokens=1 << 21, dim=128).numel()
    assert cudnn_is_faster(kernel, *[like(tokens=(1 << 21) // 3 * 2, dim=128)] * 2, spec, H200)
    assert not cudnn_is_faster(kernel, *[like(tokens=1 << 21, dim=128)] * 2, spec, H200)
    for other in (like(batch=2), like(dtype=torch.float32), like(dim=32), like(tokens=FEWEST_TOKENS[kernel, 64] - 1)):
        assert not cudnn_is_faster(kernel, other, other, spec, H200)
    with torch.nn.attention.sdpa_kernel([SDPBackend.MATH]):
        assert not cudnn_is_faster(kernel, q, q, spec, H200)
    torch.use_deterministic_algorithms(True)
    try:
        assert not cudnn_is_faster(kernel, q, q, spec, H200)
    finally:
        torch.use_deterministic_algorithms(False)


def test_documents_stay_with_our_kernels():
    """cuDNN has a workspace where it would run."""
    q, k = like(), torch.empty(1, 65535, 2, 64, dtype=torch.bfloat16, device="meta")
    lse, borders = torch.empty(q.shape[:3], device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    forward = {"q": q, "k": k, "v": k, "spec": NSASpec()}
    backward = forward | {"do": q, "o": q, "lse": lse}
    assert compressed.forward_workspace(**forward, cu_seqlens=None) > q.nbytes
    assert compressed.backward_workspace(**backward, cu_seqlens=None) > 4 * q.nbytes
    for packed, offset in ((borders, 0), (None, 16)):
        assert compressed.forward_workspace(**forward, cu_seqlens=packed, q_offset=offset) is None
        assert compressed.backward_workspace(**backward, cu_seqlens=packed, q_offset=offset) is None
