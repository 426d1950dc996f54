"""A step of whole models on a GPU: the kernels around attention against the modules, in a CUDA graph, and their number.

Kernels by themselves are in test_step_kernels.py, which runs on a GPU too.
"""

import pytest
import torch
from torch import nn

from nsa.config import load_config
from nsa.generate.batch import DecodeGraphs
from nsa.generate.sampling import Sampling
from nsa.nn import KVCache
from nsa.nn.model import build_model
from nsa.ops.reference.feed_forward import ACTIVATIONS, gated
from nsa.ops.triton import step_kernels as kernels
from tests.nn.test_cache import randomize_gates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LAYERS = 3
SIZES = [f"model.n_layers={LAYERS}"]


def model_of(name, *overrides, dtype=torch.bfloat16):
    config = load_config(name, [*SIZES, *overrides])
    model = build_model(config, 512, 0).cuda().eval()
    randomize_gates(model)
    return model.to(dtype)


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def logits_after(graphs, tokens_B):
    graphs.feed(tokens_B)
    graphs.run(list(range(len(tokens_B))), torch.rand(len(tokens_B), 1, dtype=torch.float64))
    return graphs.logits_BV.clone()


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32])
@pytest.mark.parametrize(("channels", "hidden"), [(768, 2048), (2048, 8192), (1000, 2664)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 4e-3), (torch.float16, 6e-4), (torch.float32, 2e-6)])
def test_products_of_real_sizes_agree_with_float64(tokens, channels, hidden, dtype, most):
    def normal(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    x, norm, weights = normal(tokens, channels), normal(channels), [normal(n, channels) for n in (channels, 128, 96)]
    read = nn.functional.rms_norm(x, (channels,), norm, 1e-5).double()
    got = kernels.product(x, weights, norm=norm, eps=1e-5)
    # Inputs that the norm rounds otherwise than the module's add half of a last digit to the error.
    assert relative(got, read @ torch.cat(weights).double().T) <= 2 * most
    gate, up, out = 0.05 * normal(hidden, channels), normal(hidden, channels), normal(channels, hidden)
    for activation in ACTIVATIONS:
        mixed = kernels.product(x, [gate, up], activation=activation)
        assert relative(mixed, gated(x.double() @ gate.double().T, x.double() @ up.double().T, activation)) <= most
    assert relative(kernels.product(mixed, [out], residual=x), x.double() + mixed.double() @ out.double().T) <= most


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("m7c_125m", []),
        ("m7c_125m", ["model.layer_pattern=[nsa,msa,window]", "model.rotary_dim=24", "model.activation=swiglu_oai"]),
        ("llama_1b", ["model.qk_norm=true", "model.rotary_dim=32"]),
    ],
    ids=["125m", "pattern", "1b"],
)
@torch.no_grad()
def test_graphs_of_steps_agree_with_the_modules(rows, name, overrides):
    """So short that all blocks are read: which of them random weights choose is up to rounding."""
    model, prompt, steps = model_of(name, *overrides), 500, 40
    tokens = torch.randint(0, 512, (rows, prompt + steps), device="cuda")
    want = model(tokens)[:, prompt:].float()
    cache = KVCache(model, sequences=rows, max_length=prompt + steps)
    model(tokens[:, :prompt], cache=cache)
    graphs = DecodeGraphs(model, cache, cache.sequences, Sampling())
    got = torch.stack([logits_after(graphs, t) for t in tokens[:, prompt:].unbind(1)], dim=1).float()
    again = KVCache(model, sequences=rows, max_length=prompt + steps)
    model(tokens[:, :prompt], cache=again)
    for block in model.blocks:  # a hook, and the modules are called
        for module in block.modules():
            module.register_forward_hook(lambda *_: None)
    called = torch.cat([model(t, cache=again) for t in tokens[:, prompt:].split(1, dim=1)], dim=1).float()
    assert relative(got, called) <= 1.5e-2
    assert relative(got, want) <= 1.2 * relative(called, want) + 1e-3


@torch.no_grad()
def test_a_step_launches_few_kernels():
    counts = []
    for layers in (1, LAYERS):
        model = model_of("m7c_125m", f"model.n_layers={layers}")
        cache = KVCache(model, sequences=1, max_length=4096)
        cache.add()
        cache.append(3_000)
        graphs = DecodeGraphs(model, cache, [0], Sampling(temperature=0.0))
        number = torch.zeros(1, 1, dtype=torch.float64)
        graphs.run([0], number)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            graphs.run([0], number)
            torch.cuda.synchronize()
        events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len(events))
    assert (counts[1] - counts[0]) / (LAYERS - 1) <= 8
    assert counts[0] <= 45
