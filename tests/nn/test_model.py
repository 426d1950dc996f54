"""The decoder: sizes, counts, sampling."""

import math

import pytest
import torch

from nsa.config.schema import ModelConfig, NSAConfig
from nsa.errors import ArgumentError
from nsa.nn.flops import flops_per_token, mean_keys_read
from nsa.nn.model import build_model
from nsa.nn.sampling import pick, sample_tokens
from nsa.ops import NSASpec

TINY = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16)
NSA = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_init=1, num_local=1, window=5)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_returns_logits_and_every_weight_gets_a_gradient(attention, tied):
    model = build_model(TINY.model_copy(update={"attention": attention, "tied_head": tied}), NSA, 256, seed=0)
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
    model = build_model(ModelConfig(), NSAConfig(), 256, seed=0)
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
    first = build_model(TINY, NSA, 256, seed=3)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)), "building a model must not move the caller's random state"
    second = build_model(TINY, NSA, 256, seed=3)
    other = build_model(TINY, NSA, 256, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_mean_keys_read_match_a_count_by_hand():
    spec = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=2, num_init=1, num_local=1, window=3)
    tokens = 12
    cmp_keys = [sum(i * 2 + 3 <= t for i in range(tokens)) for t in range(tokens)]
    sel_keys = [t + 1 if t < 8 else 4 + t % 4 + 1 for t in range(tokens)]
    win_keys = [min(t + 1, 3) for t in range(tokens)]
    expected = (sum(cmp_keys) / 12, sum(sel_keys) / 12, sum(win_keys) / 12, 6.5)
    assert mean_keys_read(spec, tokens) == pytest.approx(expected)


def test_sparse_attention_is_cheaper_on_long_sequences_and_not_on_short_ones():
    model = build_model(TINY, NSAConfig(), 256, seed=0)
    short, long = (flops_per_token(model, TINY, NSAConfig(), n) for n in (512, 16_384))
    assert long.sparse < long.dense_equivalent / 3
    assert short.sparse > short.dense_equivalent
    linear = 6 * (model.num_parameters() - model.embedding.weight.numel())
    assert long.dense_equivalent == pytest.approx(linear + 3 * 2 * 4 * 32 * 2 * (16_384 + 1) / 2)


def test_sampling_repeats_with_its_seed_and_stops_at_the_separator():
    model = build_model(TINY, NSA, 256, seed=0)
    draw = lambda seed: list(sample_tokens(model, [255], max_tokens=20, seed=seed))  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    first = draw(1)
    assert list(sample_tokens(model, [255], max_tokens=20, seed=1, stop=first[3])) == first[: first.index(first[3])]
    with pytest.raises(ArgumentError, match="prompt"):
        next(sample_tokens(model, [], max_tokens=1))


def test_temperature_top_k_and_top_p_cut_the_distribution():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()

    def seen(**options):
        generator = torch.Generator().manual_seed(0)
        settings = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **options}
        return {pick(logits, generator=generator, **settings) for _ in range(300)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {1, 2}
    assert seen(top_p=0.6) == {1, 2}
    assert seen(top_p=0.01) == {1}
    assert seen(temperature=0.0) == {1}
    for tiny in (0.01, 1e-29, 1e-40, 1e-300):
        assert seen(temperature=tiny) == {1}
    for bad in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            seen(**bad)
