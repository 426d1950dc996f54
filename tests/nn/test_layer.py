"""NSAAttention used directly, without the trainer."""

import cmath
import copy
import inspect
import math
from itertools import product

import numpy as np
import pytest
import torch

from nsa import ops
from nsa.errors import ArgumentError
from nsa.nn import NSAAttention, attention_layers
from nsa.nn.attention import DenseAttention, WindowAttention
from nsa.nn.rope import RopeScaling, rotary_tables, rotate
from nsa.ops import NSASpec
from tests.ops.cases import SMALL

CU_SEQLENS = [0, 6, 6, 21]


def build(**options):
    settings = {"dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 32, "spec": SMALL}
    layer = NSAAttention(**{**settings, **options})
    # The gate is initialized to zero; give it weights, so that every path has a gradient.
    torch.nn.init.normal_(layer.gate.out.weight, std=0.3)
    return layer


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("per_group", [1, 2, 4])
def test_the_whole_layer_passes_gradcheck(per_group, packed):
    layer = build(num_heads=per_group, num_kv_heads=1, head_dim_v=16, phi="mlp").double()
    x = torch.randn(1, 21, 24, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32) if packed else None
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), (x,), {"cu_seqlens": cu_seqlens}
        )

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("compress", ["before_rotation", "after_rotation"])
def test_packed_documents_equal_each_document_alone(phi, gate, shared_kv, compress):
    layer = build(phi=phi, gate=gate, shared_kv=shared_kv, compress=compress).double()
    x = torch.randn(1, 21, 24, dtype=torch.float64)
    packed = layer(x, cu_seqlens=torch.tensor(CU_SEQLENS, dtype=torch.int32))
    alone = torch.cat([layer(x[:, :6]), layer(x[:, 6:])], dim=1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_later_tokens_never_change_an_output(phi):
    layer = build(phi=phi)
    x = torch.randn(2, 30, 24)
    changed = x.clone()
    changed[:, 17:] = torch.randn(2, 13, 24)
    assert torch.equal(layer(x)[:, :17], layer(changed)[:, :17])
    assert not torch.equal(layer(x)[:, 17:], layer(changed)[:, 17:])


def test_mean_mlp_starts_as_the_mean_and_moves_away():
    layer, mean = build(phi="mean_mlp"), build(phi="mean")
    assert layer.state_dict().keys() == build(phi="mlp").state_dict().keys()
    mean.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(1, 21, 24)
    assert torch.equal(layer(x), mean(x))
    layer(x).square().sum().backward()
    for phi in (layer.phi_k, layer.phi_v):
        assert phi.out.weight.grad.any()
        torch.nn.init.normal_(phi.out.weight)
    assert not torch.allclose(layer(x), mean(x))


def test_keys_are_compressed_after_rotation_where_that_is_asked_for():
    layer = build(force_branch="cmp", compress="after_rotation")
    x = torch.randn(1, 21, 24)
    tables = rotary_tables(torch.arange(21), 16, layer.rope_base)
    q = rotate(layer.q(x).unflatten(-1, (4, 16)), tables)
    k = rotate(layer.k[0](x).unflatten(-1, (2, 16)), tables)
    v = layer.v[0](x).unflatten(-1, (2, 32))
    starts = range(0, 21 - SMALL.cmp_block + 1, SMALL.cmp_stride)
    k_cmp, v_cmp = (torch.stack([y[:, i : i + SMALL.cmp_block].mean(1) for i in starts], 1) for y in (k, v))
    o, _ = ops.compressed_attention(q, k_cmp, v_cmp, SMALL)
    torch.testing.assert_close(layer(x), layer.out(o.flatten(2)))
    assert not torch.allclose(layer(x), build_like(layer, compress="before_rotation")(x))


def build_like(layer, **options):
    other = build(force_branch=layer.force_branch, **options)
    other.load_state_dict(layer.state_dict())
    return other


def test_every_parameter_gets_a_gradient():
    layer = build(phi="mlp")
    layer(torch.randn(2, 30, 24)).square().sum().backward()
    without = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize(("gate", "weight"), [("sigmoid", 0.5), ("softmax", 1 / 3)])
def test_every_branch_starts_with_the_same_weight(gate, weight):
    layer = NSAAttention(24, 4, 2, 16, spec=SMALL, gate=gate)
    gates = layer.gate(torch.randn(1, 5, 24))
    assert gates.shape == (1, 5, 4, 3)
    torch.testing.assert_close(gates, torch.full_like(gates, weight))


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_a_forced_branch_is_the_output_and_trains_only_what_it_uses(branch, shared_kv):
    x = torch.randn(1, 30, 24)
    torch.manual_seed(1)
    full = build(phi="mlp", shared_kv=shared_kv)
    torch.manual_seed(1)
    forced = build(phi="mlp", shared_kv=shared_kv, force_branch=branch)
    with torch.no_grad():
        # A gate that is one for this branch and zero for the others gives the same output.
        full.gate.out.weight.zero_()
        full.gate.out.bias.copy_(torch.tensor([40.0 if b == branch else -1e4 for b in ("cmp", "sel", "win")] * 4))
    torch.testing.assert_close(forced(x), full(x))
    forced(x).square().sum().backward()
    for name, p in forced.named_parameters():
        assert p.requires_grad == (p.grad is not None), name
        if p.requires_grad:
            assert p.grad.any(), name
    assert not any(p.requires_grad for p in forced.gate.parameters())


def test_the_layer_has_no_state_between_calls():
    layer = build(phi="mlp")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    attributes = {k: repr(v) for k, v in vars(layer).items() if not k.startswith("_")}
    first = layer(torch.randn(1, 30, 24))
    layer(torch.randn(2, 9, 24))
    torch.manual_seed(0)
    layer_again = layer(torch.randn(1, 30, 24))
    torch.manual_seed(0)
    assert torch.equal(layer_again, layer(torch.randn(1, 30, 24)))
    assert first.shape == layer_again.shape
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert attributes == {k: repr(v) for k, v in vars(layer).items() if not k.startswith("_")}


def test_a_sequence_shorter_than_a_block_works():
    layer = build(phi="mlp")
    for tokens in (1, 2, 3, 4, 5):
        assert layer(torch.randn(2, tokens, 24)).isfinite().all()


def test_bf16_and_autocast_stay_close_to_fp32():
    # With every block selected: rounding may change which of two close blocks is read, and then much changes.
    layer = build(phi="mlp", spec=NSASpec(4, 2, 4, num_selected=16, window=5))
    x = torch.randn(1, 64, 24)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x)
    assert (mixed.float() - exact).norm() / exact.norm() < 0.05
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 0.05


def test_the_layer_compiles_without_a_graph_break():
    layer = build(phi="mlp")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 21, 24, requires_grad=True)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    for options in ({}, {"cu_seqlens": cu_seqlens}):
        (expected,) = torch.autograd.grad(layer(x, **options).square().sum(), x)
        (got,) = torch.autograd.grad(compiled(x, **options).square().sum(), x)
        torch.testing.assert_close(got, expected)


def test_a_compiled_layer_reads_rotary_tables_instead_of_computing_them_for_every_head():
    graphs = []
    compiled = torch.compile(build(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    compiled(torch.randn(1, 21, 24))
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert targets.count(torch.ops.nsa.cos_sin.default) == 2  # for tokens and for compressed tokens
    assert not {"cos", "sin", torch.cos, torch.sin} & set(targets)


def test_layers_are_found_by_type_whatever_wraps_them():
    inner = build()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"a": torch.nn.Sequential(inner)}))
    assert [(name, layer is inner) for name, layer in attention_layers(model)] == [("1.a.0", True)]


def test_channels_are_rotated_in_pairs_of_halves():
    x = torch.zeros(1, 3, 1, 4)
    x[..., 0] = 1.0  # the first pair is channels 0 and 2, with frequency 1
    rotated = rotate(x, rotary_tables(torch.arange(3), 4, 10_000.0))
    position = torch.arange(3.0)
    torch.testing.assert_close(rotated[0, :, 0, 0], position.cos())
    torch.testing.assert_close(rotated[0, :, 0, 2], position.sin())
    assert not rotated[..., [1, 3]].any()


@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
def test_only_the_first_rotary_dim_channels_are_rotated(rotary_dim):
    x, half = torch.randn(2, 5, 3, 16, dtype=torch.float64), rotary_dim // 2
    want = x.clone()
    for position, pair in product(range(5), range(half)):
        turn = cmath.exp(1j * position * 100.0 ** (-2 * pair / rotary_dim))
        turned = torch.complex(x[:, position, :, pair], x[:, position, :, pair + half]) * turn
        want[:, position, :, pair], want[:, position, :, pair + half] = turned.real, turned.imag
    rotated = rotate(x, rotary_tables(torch.arange(5), rotary_dim, 100.0))
    torch.testing.assert_close(rotated, want, rtol=1e-6, atol=1e-6)  # tables are float32
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])


def test_compressed_keys_are_rotated_to_the_start_of_their_block():
    layer = build(num_heads=1, num_kv_heads=1, head_dim_v=16)
    x = torch.randn(1, 12, 24)
    k = layer.k[0](x).unflatten(-1, (1, 16))
    plain = torch.stack([k[:, i * 2 : i * 2 + 4].mean(1) for i in range(5)], dim=1)
    by_hand = rotate(plain, rotary_tables(torch.arange(5) * 2, 16, 10_000.0))
    tables = rotary_tables(torch.arange(5) * SMALL.cmp_stride, 16, 10_000.0)
    torch.testing.assert_close(rotate(layer.phi_k(k), tables), by_hand)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_heads": 3}, "num_kv_heads"),
        ({"head_dim_k": 20}, "head_dim_k"),
        ({"head_dim_v": 512}, "head_dim_v"),
        ({"head_dim_v": 0}, "head_dim_v"),
        ({"head_dim_k": 16.0}, "head_dim_k"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 18}, "rotary_dim"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": 8.0}, "rotary_dim"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": "1e4"}, "rope_base"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
        ({"rope_scaling": RopeScaling(0.0)}, "rope_scaling"),
        ({"rope_scaling": RopeScaling(8.0, 8192, high_freq_factor=1.0)}, "rope_scaling"),
        ({"backend": "Triton"}, "backend"),
        ({"backend": {"sel": "Triton"}}, "backend"),
        ({"backend": 3}, "backend"),
        ({"dim": 0}, "dim"),
        ({"dim": 64.0}, "dim"),
        ({"num_heads": "4"}, "num_heads"),
        ({"num_kv_heads": None}, "num_kv_heads"),
        ({"spec": {"window": 512}}, "spec"),
        ({"phi": "max"}, "phi"),
        ({"compress": "never"}, "compress"),
        ({"gate": "relu"}, "gate"),
        ({"force_branch": "all"}, "force_branch"),
    ],
)
def test_a_bad_option_is_named(options, argument):
    with pytest.raises(ArgumentError) as error:
        build(**options)
    assert error.value.argument == argument


def test_a_backend_that_no_operator_uses_is_checked_too():
    with pytest.raises(ArgumentError, match="backend: must be None or one of"):
        DenseAttention(24, 4, 2, 16, backend="Triton")


@pytest.mark.parametrize("window", [0, 2.5])
def test_a_bad_window_is_refused_when_the_layer_is_made(window):
    with pytest.raises(ArgumentError, match="window: must be"):
        WindowAttention(24, 4, 2, 16, window=window)


def test_integers_of_numpy_are_sizes():
    layer = NSAAttention(*map(np.int64, (64, 4, 2, 16)))
    assert {type(size) for size in (layer.dim, layer.num_heads, layer.num_kv_heads, layer.head_dim_v)} == {int}


@pytest.mark.parametrize("options", [{"phi": "mlp", "qk_norm": True, "qkv_bias": True}, {"phi": "mean_mlp"}])
def test_a_layer_made_without_memory_is_initialised_as_another(options):
    torch.manual_seed(0)
    fresh = NSAAttention(64, 4, 2, 16, **options)
    with torch.device("meta"):
        layer = NSAAttention(64, 4, 2, 16, **options)
    layer.to_empty(device="cpu")
    for reset in (layer.reset_parameters, lambda: layer.apply(lambda part: getattr(part, "reset_parameters", int)())):
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, math.nan)
        reset()
        for (name, got), want in zip(layer.named_parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(got.std(), want.std(), rtol=0.5, atol=0.0, msg=name)
            torch.testing.assert_close(got.mean(), want.mean(), rtol=0.0, atol=0.3, msg=name)


def test_the_default_spec_is_that_of_the_paper():
    assert NSAAttention(64, 4, 2, 16).spec == NSASpec()


def test_a_printed_layer_shows_its_heads_and_its_spec():
    shown = repr(build(rope_base=500_000.0, shared_kv=True, force_branch="sel")).splitlines()[1]
    for part in ("dim=24", "num_heads=4", "num_kv_heads=2", "head_dim_k=16", "head_dim_v=32", "rope_base=500000"):
        assert f"{part}, " in shown
    assert f"shared_kv=True, force_branch='sel', spec={SMALL}" in shown
    assert "head_dim_v=32, rotary_dim=8, rope_base" in repr(build(rotary_dim=8))
    dense = repr(WindowAttention(24, 4, 2, 16, 32, window=9)).splitlines()[1]
    assert "num_heads=4, num_kv_heads=2, head_dim_k=16, head_dim_v=32, rope_base=10000, window=9" in dense


@pytest.mark.parametrize("layer", [NSAAttention, DenseAttention])
def test_every_option_of_a_layer_is_documented(layer):
    described = [line.split()[0] for line in layer.__doc__.splitlines() if line.strip()]
    assert [name for name in inspect.signature(layer).parameters if name not in described] == []
    for word in ("[batch, tokens, dim]", "cu_seqlens"):
        assert word in layer.forward.__doc__


@pytest.mark.parametrize("name", [name for name in ops.__all__ if name not in ("NSASpec", "checked_values")])
def test_every_tensor_that_an_operator_takes_is_documented_with_its_shape(name):
    operator = getattr(ops, name)
    described = inspect.getdoc(operator) + ops.__doc__
    tensors = [p.name for p in inspect.signature(operator).parameters.values() if p.annotation is torch.Tensor]
    where = "keys [B,S,G,Dk] and values [B,S,G,Dv] of selection and window"
    rest = ("k_sel", "v_sel", "k_win", "v_win") if where in " ".join(described.split()) else ()
    assert [t for t in tensors if t not in rest and f"{t} [" not in described and f"{t} int32 [" not in described] == []
    assert {"spec", "cu_seqlens", "backend"} <= set(described.split())
