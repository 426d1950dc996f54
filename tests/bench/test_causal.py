"""The candidate of `bench.tune` that computes compressed attention as causal attention computes the same."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.causal import CausalCompressed
from nsa.ops import NSASpec
from nsa.ops.layout import num_compressed
from nsa.ops.reference import attention as reference


@pytest.mark.parametrize(("batch", "tokens", "spec"), [(1, 200, NSASpec()), (2, 77, NSASpec(8, 4, 16, 4, 1, 1, 20))])
def test_causal_attention_over_runs_of_tokens_is_compressed_attention(batch, tokens, spec):
    generator = torch.Generator().manual_seed(0)

    def draw(length, heads):
        return torch.randn(batch, length, heads, 16, generator=generator, dtype=torch.float64)

    keys = num_compressed(tokens, spec)
    q, k, v, do = draw(tokens, 6), draw(keys, 2), draw(keys, 2), draw(tokens, 6)
    o, lse = reference.compressed.forward(q, k, v, spec, None)
    causal = CausalCompressed(q, k, v, spec, SDPBackend.MATH)
    torch.testing.assert_close(causal.forward(), o)
    wanted = reference.compressed.backward(do, q, k, v, o, lse, spec, None)
    for got, want in zip(causal.backward(do), wanted, strict=True):
        torch.testing.assert_close(got, want)
