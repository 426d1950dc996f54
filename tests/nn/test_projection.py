"""Linear layers with the same input: one product, unless one of them is more than a plain linear layer."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.nn import NSAAttention
from nsa.nn.projection import FEW_TOKENS, project

SIZES = (48, 16, 32)


class Adapted(nn.Linear):
    """As adapters do it: a layer that replaces another and adds something to its output."""

    def forward(self, x):
        return super().forward(x) + 1.0


def layers(kind=nn.Linear):
    torch.manual_seed(0)
    return nn.ModuleList(
        [nn.Linear(24, SIZES[0], bias=False), kind(24, SIZES[1], bias=False), nn.Linear(24, 32, False)]
    )


def with_hook(module):
    module.calls = []
    module.register_forward_hook(lambda *_: module.calls.append(1))
    return module


@pytest.fixture
def products(monkeypatch):
    """One entry per matrix product that ran."""
    calls = []
    original = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: calls.append(1) or original(*args))
    return calls


def test_plain_layers_are_one_product_with_the_same_results_and_gradients(products):
    together, apart = layers().double(), layers().double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    got = project(x, list(together))
    assert len(products) == 1
    want = [layer(x) for layer in apart]
    assert [y.shape[-1] for y in got] == list(SIZES)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    sum(y.square().sum() for y in got).backward()
    sum(y.square().sum() for y in want).backward()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_weights_of_a_few_tokens_without_a_gradient_are_not_joined(products):
    chosen, x = layers(), torch.randn(2, FEW_TOKENS, 24)
    with torch.no_grad():
        few, many = project(x[:, : FEW_TOKENS // 2], list(chosen)), project(x, list(chosen))
    assert len(products) == 3 + 1
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b[:, : FEW_TOKENS // 2])


def test_a_layer_that_was_replaced_is_called(products):
    chosen = layers(Adapted)
    x = torch.randn(2, 5, 24)
    got = project(x, list(chosen))
    assert len(products) == 3
    assert torch.equal(got[1], chosen[1](x))


def test_a_layer_with_a_hook_is_called():
    chosen = layers()
    project(torch.randn(1, 3, 24), [with_hook(layer) for layer in chosen])
    assert [layer.calls for layer in chosen] == [[1], [1], [1]]


def test_a_layer_whose_forward_was_patched_is_called():
    """As tools that move layers between devices do."""
    chosen = layers()
    original = chosen[2].forward
    chosen[2].forward = lambda x: original(x) + 1.0
    x = torch.randn(1, 3, 24)
    assert torch.equal(project(x, list(chosen))[2], original(x) + 1.0)


def test_a_layer_with_a_tensor_subclass_as_weight_is_called():
    """As quantization does it: a weight that knows how it is multiplied, and nothing else."""

    class Quantized(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.cat:
                raise NotImplementedError
            return super().__torch_function__(function, types, args, kwargs)

    chosen = layers()
    chosen[1].weight = nn.Parameter(chosen[1].weight.detach().as_subclass(Quantized))
    x = torch.randn(1, 3, 24)
    for got, layer in zip(project(x, list(chosen)), chosen, strict=True):
        assert torch.equal(got, layer(x))


def test_weights_that_are_only_traced_are_one_product(products):
    with FakeTensorMode():
        assert [y.shape[-1] for y in project(torch.empty(2, 5, 24), list(layers()))] == list(SIZES)
    assert len(products) == 1


def test_biases_are_not_lost():
    with_bias = nn.ModuleList([nn.Linear(24, 8), nn.Linear(24, 8)])
    x = torch.randn(1, 3, 24)
    for got, layer in zip(project(x, list(with_bias)), with_bias, strict=True):
        assert torch.equal(got, layer(x))


def test_an_adapter_inside_the_attention_layer_changes_the_output():
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 16).double()
    x = torch.randn(1, 80, 32, dtype=torch.float64)
    before = layer(x)
    adapted = Adapted(32, 32, bias=False).double()
    adapted.weight = layer.v[1].weight
    layer.v[1] = adapted
    assert (layer(x) - before).abs().max() > 1e-3
