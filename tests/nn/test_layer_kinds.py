"""Dense and window layers, patterns of layers, and norms on queries and keys."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from nsa.config.load import parse_config
from nsa.errors import ConfigError
from nsa.nn.attention import DenseAttention, NSAAttention, WindowAttention, attention_layers
from nsa.nn.flops import flops_per_token
from nsa.nn.model import Decoder, build_model
from nsa.ops import NSASpec

BORDERS = (0, 7, 7, 40, 64)  # one document is empty


def small(*overrides: str) -> tuple[Decoder, object]:
    sizes = "model.dim=32 model.n_layers=5 model.n_heads=2 model.n_kv_heads=1 model.head_dim_k=16 model.head_dim_v=16"
    config = parse_config({}, "test", [*sizes.split(), *overrides])
    return build_model(config, 64, seed=0), config


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("window", [None, 5], ids=["dense", "window"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_documents_equal_each_document_alone(window, qk_norm):
    kind = DenseAttention if window is None else partial(WindowAttention, window=window)
    layer = kind(24, 4, 2, 16, 32, qk_norm=qk_norm).double()
    x = torch.randn(1, BORDERS[-1], 24, dtype=torch.float64, requires_grad=True)
    packed = layer(x, cu_seqlens=torch.tensor(BORDERS, dtype=torch.int32), max_seqlen=33)
    alone = torch.cat([layer(x[:, a:b]) for a, b in pairwise(BORDERS) if b > a], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-12)
    for got, want in zip(gradients(layer, x, packed), gradients(layer, x, alone), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "overrides",
    [
        *(["model.attention=nsa"], ["nsa.compress=after_rotation"], ["model.attention=dense"]),
        *(["model.attention=window"], ["model.attention=msa", "msa.block=16", "msa.num_selected=2"]),
    ],
    ids=str,
)
def test_positions_act_on_the_first_rotary_dim_channels_alone(overrides):
    """Queries that are zero there do not see the rotary base."""
    tokens = torch.randint(0, 64, (1, 40))
    for rotary_dim, is_seen in ((6, False), (8, True)):
        logits = []
        for base in (10.0, 1e6):
            model, _ = small(*overrides, f"model.rotary_dim={rotary_dim}", f"model.rope_base={base}")
            for block in model.blocks:
                for query in (block.attention.q, getattr(block.attention, "index_q", block.attention.q)):
                    query.weight.data.unflatten(0, (-1, 16))[:, :6] = 0.0
            logits.append(model(tokens))
        assert torch.equal(*logits) != is_seen


def test_packed_dense_attention_needs_no_memory_of_the_length_squared():
    tokens = 4096
    layer = DenseAttention(16, 1, 1, 16, 16)
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))
            return result

    with Largest(), torch.no_grad():
        layer(torch.randn(1, tokens, 16), cu_seqlens=torch.tensor([0, 1000, tokens], dtype=torch.int32))
    assert sizes
    assert max(sizes) < tokens * tokens // 4


def test_a_window_layer_is_the_window_branch_with_only_its_own_parameters():
    spec = NSASpec(window=9)
    window = WindowAttention(24, 4, 2, 16, 16, window=spec.window)
    whole = NSAAttention(24, 4, 2, 16, spec=spec, force_branch="win")
    whole.load_state_dict(
        {"q.weight": window.q.weight, "k.2.weight": window.k.weight, "v.2.weight": window.v.weight}
        | {"out.weight": window.out.weight},
        strict=False,
    )
    x = torch.randn(2, 40, 24)
    torch.testing.assert_close(window(x), whole(x))
    assert set(dict(window.named_parameters())) == {"q.weight", "k.weight", "v.weight", "out.weight"}


def test_a_pattern_is_repeated_over_the_layers():
    model, config = small("model.layer_pattern=[dense,nsa,window]")
    names = {DenseAttention: "dense", NSAAttention: "nsa", WindowAttention: "window"}
    kinds = [names[type(layer)] for _, layer in attention_layers(model)]
    assert kinds == ["dense", "nsa", "window", "dense", "nsa"] == config.model.layer_kinds()
    assert next(attention_layers(model))[0] == "blocks.0.attention"


def test_flops_of_a_pattern_are_the_sum_of_its_layers():
    def attention(*overrides):
        model, _ = small("train.seq_len=4096", *overrides)
        found = flops_per_token(model, 4096)
        return found.sparse - 6 * (model.num_parameters() - model.embedding.weight.numel())

    kinds = {kind: attention(f"model.layer_pattern=[{kind}]") / 5 for kind in ("nsa", "dense", "window")}
    assert kinds["window"] < kinds["nsa"] < kinds["dense"]
    mixed = attention("model.layer_pattern=[dense,nsa,window]")
    assert mixed == pytest.approx(2 * kinds["dense"] + 2 * kinds["nsa"] + kinds["window"])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("[]", "model.layer_pattern"), ("[nsa,sparse]", "model.layer_pattern"), ("nsa", "model.layer_pattern")],
)
def test_an_invalid_pattern_is_refused(value, wanted):
    with pytest.raises(ConfigError, match=wanted):
        small(f"model.layer_pattern={value}")


@pytest.mark.parametrize("kind", ["nsa", "dense", "window"])
def test_norms_make_queries_and_keys_independent_of_their_scale(kind):
    model, _ = small("model.qk_norm=true", f"model.layer_pattern=[{kind}]")
    tokens = torch.arange(40)[None] % 64
    before = model(tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.q.weight" in name or ".attention.k." in name:
                parameter.mul_(3.0)
    torch.testing.assert_close(model(tokens), before, rtol=1e-3, atol=1e-4)
    names = [name for name, _ in model.named_parameters() if "_norm" in name and ".attention." in name]
    assert len(names) == 5 * (4 if kind == "nsa" else 2)
