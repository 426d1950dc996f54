"""A layer that decodes with a cache on the kernels, against the reference over the whole sequence."""

import pytest
import torch

from nsa.nn import KVCache
from tests.nn.test_cache import in_chunks, layer_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of tests/generate/test_gpu.py do this")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nsa", {}),
        pytest.param("nsa", {"shared_kv": True, "phi": "mlp"}, marks=pytest.mark.long),
        ("msa", {}),
        ("dense", {}),
        ("window", {}),
    ],
    ids=["nsa", "shared mlp", "msa", "dense", "window"],
)
def test_prompt_and_steps_equal_the_whole_sequence(kind, options, monkeypatch):
    monkeypatch.setattr("nsa.nn.cache_step.FEW_TOKENS", 4)
    layer = layer_of(kind, **options).float()
    x = torch.randn(1, 80, 24)
    with torch.no_grad():
        layer.backend = "reference"
        want = layer(x)
        cache = KVCache(layer, sequences=1, max_length=80, slack=6)
        before = in_chunks(layer, x[:, :70], cache, [63, 4, 3])
        layer.backend = "triton"
        got = in_chunks(layer, x[:, 70:], cache, [1, 3, 5, 1])
    assert (torch.cat([before, got], dim=1) - want).norm() <= 1e-5 * want.norm()
