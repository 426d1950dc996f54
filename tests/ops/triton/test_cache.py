"""A layer that decodes with a cache on the kernels, against the reference over the whole sequence."""

import pytest
import torch

from nsa.nn import KVCache, NSAAttention
from nsa.nn.attention import DenseAttention, WindowAttention
from tests.nn.test_cache import SPEC, in_chunks, randomize_gates

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of tests/generate/test_gpu.py do this")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("nsa", {}), ("nsa", {"shared_kv": True, "phi": "mlp"}), ("dense", {}), ("window", {"window": SPEC.window})],
    ids=["nsa", "shared mlp", "dense", "window"],
)
def test_prompt_and_steps_equal_the_whole_sequence(kind, options, monkeypatch):
    monkeypatch.setattr("nsa.nn.cache_step.FEW_TOKENS", 4)
    if kind == "nsa":
        layer = NSAAttention(24, 4, 2, 16, 32, SPEC, **options)
    else:
        layer = (WindowAttention if options else DenseAttention)(24, 4, 2, 16, 32, **options)
    randomize_gates(layer)
    x = torch.randn(1, 48, 24)
    with torch.no_grad():
        layer.backend = "reference"
        want = layer(x)
        cache = KVCache(layer, sequences=1, max_length=80, slack=6)
        before = in_chunks(layer, x[:, :38], cache, [31, 4, 3])
        layer.backend = "triton"
        got = in_chunks(layer, x[:, 38:], cache, [1, 3, 5, 1])
    assert (torch.cat([before, got], dim=1) - want).norm() <= 1e-5 * want.norm()
