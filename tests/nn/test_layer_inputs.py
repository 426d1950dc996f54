"""What a layer says of an input it cannot take, and the inputs it must still take."""

from copy import deepcopy

import pytest
import torch

from nsa.errors import ArgumentError
from nsa.nn import MSAAttention, NSAAttention
from nsa.nn.attention import DenseAttention, WindowAttention
from nsa.ops import MSASpec
from tests.ops.cases import SMALL

LAYERS = {
    "nsa": lambda: NSAAttention(24, 4, 2, 16, 32, SMALL),
    "msa": lambda: MSAAttention(24, 4, 2, 16, 32, MSASpec(16, 2)),
    "dense": lambda: DenseAttention(24, 4, 2, 16, 32),
    "window": lambda: WindowAttention(24, 4, 2, 16, 32, window=5),
}
X = torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[0], r"x: must be \[batch, tokens, dim=24\], got \[9, 24\]"),
        (X[None], r"x: must be \[batch, tokens, dim=24\], got \[1, 1, 9, 24\]"),
        (X[..., :20], r"x: must be \[batch, tokens, dim=24\], got \[1, 9, 20\]"),
        (X.long(), r"x: must be a float tensor, got torch\.int64"),
        (X.double(), r"x: .* torch\.float32, got torch\.float64; .*autocast"),
        (X.bfloat16(), r"x: .* torch\.float32, got torch\.bfloat16; .*autocast"),
        (X.tolist(), "x: must be a tensor, got list"),
    ],
    ids=["two dimensions", "four dimensions", "width", "integers", "float64", "bfloat16", "list"],
)
def test_a_wrong_input_is_named(layer, x, message):
    with pytest.raises(ArgumentError, match=message) as error:
        layer(x)
    assert error.value.argument == "x"


@pytest.mark.parametrize("kind", [DenseAttention, NSAAttention, MSAAttention])
def test_another_type_is_named_where_projections_have_a_bias(kind):
    with pytest.raises(ArgumentError, match=r"x: .* torch\.float32, got torch\.float64; .*autocast"):
        kind(24, 4, 2, 16, qkv_bias=True)(X.double())


def test_another_device_is_named(layer):
    with pytest.raises(ArgumentError, match=r"x: must be on the device .*, cpu, got meta"):
        layer(X.to("meta"))
    with pytest.raises(ArgumentError, match=r"x: must be on the device .*, meta, got cpu; .*to_empty"):
        layer.to("meta")(X)


def test_float64_is_named_under_autocast_too(layer):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=r"x: .* got torch\.float64"):
        layer(X.double())


@pytest.mark.parametrize("borders", [[0, 4, 9], (0, 9)])
def test_borders_that_are_not_a_tensor_are_refused_by_name(layer, borders):
    with pytest.raises(ArgumentError, match=r"cu_seqlens: must be an int32 tensor .*, got (list|tuple)"):
        layer(X, cu_seqlens=borders)


@pytest.mark.parametrize(("borders", "longest"), [(None, 9), ([0, 4, 9], 5)])
def test_a_bound_below_the_longest_document_is_refused(layer, borders, longest):
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    assert layer(X, cu_seqlens=cu_seqlens, max_seqlen=longest).shape == X.shape
    with pytest.raises(ArgumentError, match=f"max_seqlen: must be at least {longest}, .*got {longest - 1}"):
        layer(X, cu_seqlens=cu_seqlens, max_seqlen=longest - 1)
    with pytest.raises(ArgumentError, match="max_seqlen: must be a whole number"):
        layer(X, cu_seqlens=cu_seqlens, max_seqlen=9.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_takes_either_type(layer, dtype):
    check_autocast(layer, layer, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (kind, dtype) == ("dense", torch.bfloat16) else pytest.mark.long)
        for kind in LAYERS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_autocast_of_a_compiled_layer_takes_either_type(kind, dtype):
    layer = LAYERS[kind]()
    check_autocast(torch.compile(layer, backend="aot_eager", fullgraph=True), layer, dtype)


def check_autocast(run, layer, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        y = run(X.to(dtype))
    torch.testing.assert_close(y.float(), layer(X), rtol=0.1, atol=0.01)


def test_meta_tensors_and_layers_of_another_type_pass(layer):
    assert deepcopy(layer).to("meta")(X.to("meta")).shape == X.shape
    assert layer.bfloat16()(X.bfloat16()).dtype == torch.bfloat16


def test_a_projection_that_casts_by_itself_decides_which_types_it_takes(layer):
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
    assert layer(X.bfloat16()).isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", [*LAYERS.values(), lambda: NSAAttention(24, 4, 2, 16, 32, SMALL, phi="mean_mlp")])
def test_a_token_that_is_not_finite_changes_no_other_document(make, value):
    layer, borders = make(), torch.tensor([0, 9, 20, 33], dtype=torch.int32)
    x = torch.randn(1, 33, 24)
    changed = x.index_fill(1, torch.tensor([13]), value)
    (got, grad), (wanted, wanted_grad) = (_output_and_gradient(layer, x, borders) for x in (changed, x))
    for document in (slice(0, 9), slice(20, 33)):
        assert torch.equal(got[:, document], wanted[:, document])
        assert torch.equal(grad[:, document], wanted_grad[:, document])
    assert torch.equal(got[:, 9:13], wanted[:, 9:13])
    assert got[:, 13].isnan().all()


def _output_and_gradient(layer, x, borders):
    x = x.clone().requires_grad_()
    y = layer(x, cu_seqlens=borders)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]
