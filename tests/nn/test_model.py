"""The decoder: sizes and counts."""

import math

import pytest
import torch

from nsa.config.architecture import Architecture, ModelConfig, MSAConfig, NSAConfig
from nsa.nn.attention.nsa import mean_keys_read
from nsa.nn.flops import flops_per_token
from nsa.nn.model import Decoder, build_model
from nsa.ops import NSASpec

TINY = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16)
NSA = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_init=1, num_local=1, window=5)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_returns_logits_and_every_weight_gets_a_gradient(attention, tied):
    model = build_model(
        Architecture(model=TINY.model_copy(update={"attention": attention, "tied_head": tied}), nsa=NSA), 256, seed=0
    )
    tokens = torch.randint(0, 256, (2, 40))
    logits = model(tokens)
    assert logits.shape == (2, 40, 256)
    # The loss of an untrained model is about that of guessing.
    targets = torch.randint(0, 256, (2, 40))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert abs(loss.item() - math.log(256)) < 0.5
    loss.backward()
    # The gate's first layer feeds a layer of zeros, so it has a gradient from the second step on only.
    assert [n for n, p in model.named_parameters() if not p.grad.any() and "gate.hidden" not in n] == []
    assert (model.head.weight is model.embedding.weight) == tied


def test_the_125m_configuration_has_the_expected_number_of_parameters():
    with torch.device("meta"):
        model = build_model(Architecture(model=ModelConfig(), nsa=NSAConfig()), 256, seed=0)
    per_layer = (
        768 * 768 * 2  # q, out
        + 3 * 2 * 768 * 128  # three pairs of keys and values
        + 768 * 96 + 96 + 96 * 36 + 36  # gate
        + 3 * 768 * 2048  # MLP
        + 2 * 768  # norms
    )  # fmt: skip
    assert model.num_parameters() == 12 * per_layer + 2 * 256 * 768 + 768


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = build_model(Architecture(model=TINY, nsa=NSA), 256, seed=3)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)), "building a model must not move the caller's random state"
    second = build_model(Architecture(model=TINY, nsa=NSA), 256, seed=3)
    other = build_model(Architecture(model=TINY, nsa=NSA), 256, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_made_without_memory_is_initialised_as_another(attention):
    config = TINY.model_copy(update={"attention": attention, "qk_norm": True, "n_layers": 4})
    fresh = build_model(Architecture(model=config, nsa=NSA.model_copy(update={"phi": "mean_mlp"})), 256, seed=0)
    with torch.device("meta"):
        model = Decoder(Architecture(model=config, nsa=NSA.model_copy(update={"phi": "mean_mlp"})), 256)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    model.reset_parameters()
    for (name, got), want in zip(model.named_parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(got.std(), want.std(), rtol=0.5, atol=0.0, msg=name)
        torch.testing.assert_close(got.mean(), want.mean(), rtol=0.0, atol=0.3, msg=name)


def test_mean_keys_read_match_a_count_by_hand():
    spec = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=2, num_init=1, num_local=1, window=3)
    tokens = 12
    cmp_keys = [sum(i * 2 + 3 <= t for i in range(tokens)) for t in range(tokens)]
    sel_keys = [t + 1 if t < 8 else 4 + t % 4 + 1 for t in range(tokens)]
    win_keys = [min(t + 1, 3) for t in range(tokens)]
    expected = (sum(cmp_keys) / 12, sum(sel_keys) / 12, sum(win_keys) / 12)
    assert mean_keys_read(spec, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["nsa", "msa"])
def test_attention_counts_three_times_and_scores_that_only_select_once(kind):
    config = Architecture(model=TINY.model_copy(update={"attention": kind}), nsa=NSAConfig(), msa=MSAConfig())
    model, tokens = build_model(config, 256, seed=0), 4096
    linear = 6 * (model.num_parameters() - model.embedding.weight.numel())
    seen = sum(max(0, (t - 31) // 16 + 1) for t in range(tokens))  # compressed tokens
    if kind == "nsa":
        read = seen + sum(t + 1 if t < 1024 else 960 + t % 64 + 1 for t in range(tokens))
        read += sum(min(t + 1, 512) for t in range(tokens))
        scores = 2 * 4 * 16 * seen
    else:
        read = sum(t + 1 if t < 2048 else 1920 + t % 128 + 1 for t in range(tokens))
        scores = 2 * 2 * 16 * sum(t + 1 for t in range(tokens))
    attention = 2 * (3 * (2 * 4 * (16 + 16)) * read + scores) / tokens
    assert flops_per_token(model, tokens).sparse == pytest.approx(linear + attention)


def test_frozen_weights_have_no_gradient_to_count():
    config = Architecture(model=TINY.model_copy(update={"attention": "msa"}), msa=MSAConfig())
    model, tokens = build_model(config, 256, seed=0), 4096
    whole, used = flops_per_token(model, tokens).sparse, model.num_parameters() - model.embedding.weight.numel()
    names = [name for name, _ in model.named_parameters() if "attention.index_" not in name]
    index = used - sum(model.get_parameter(name).numel() for name in names if not name.startswith("embedding"))
    attention = sum(block.attention.forward_flops(tokens) for block in model.blocks)
    for name in names:
        if ".mlp." in name:
            model.get_parameter(name).requires_grad_(False)
    mlp = sum(parameter.numel() for block in model.blocks for parameter in block.mlp.parameters())
    assert whole - flops_per_token(model, tokens).sparse == pytest.approx(2 * mlp)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    # The index alone: its gradient does not pass through the model.
    assert whole - flops_per_token(model, tokens).sparse == pytest.approx(2 * (used - index) + 2 * used + 2 * attention)


def test_sparse_attention_is_cheaper_on_long_sequences_and_not_on_short_ones():
    model = build_model(Architecture(model=TINY, nsa=NSAConfig()), 256, seed=0)
    short, long = (flops_per_token(model, n) for n in (512, 16_384))
    assert long.sparse < long.dense_equivalent / 3
    assert short.sparse > short.dense_equivalent
    linear = 6 * (model.num_parameters() - model.embedding.weight.numel())
    assert long.dense_equivalent == pytest.approx(linear + 3 * 2 * 4 * 32 * 2 * (16_384 + 1) / 2)
