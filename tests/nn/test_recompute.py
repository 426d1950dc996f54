"""Gradient checkpointing changes memory, never a number."""

from collections import Counter

import pytest
import torch

import nsa.ops.dispatch as dispatch
from nsa.config.architecture import Architecture, ModelConfig, MSAConfig, NSAConfig
from nsa.nn import attention_layers
from nsa.nn.model import build_model
from nsa.ops.reference import selection
from nsa.parallel.transform import recompute

MODEL = ModelConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16)
NSA = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_init=1, num_local=1, window=5, phi="mlp")


def gradients(granularity, cu_seqlens=None, model=MODEL):
    model = build_model(Architecture(model=model, nsa=NSA), 256, seed=0)
    names = [name for name, _ in model.named_parameters()]
    recompute(model, granularity)
    assert [name for name, _ in model.named_parameters()] == names, "wrapping must not rename parameters"
    tokens = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, cu_seqlens).logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("granularity", ["selective", "block", "branch"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_bit_identical(granularity, packed):
    cu_seqlens = torch.tensor([0, 11, 60], dtype=torch.int32) if packed else None
    plain_loss, plain = gradients("none", cu_seqlens)
    loss, recomputed = gradients(granularity, cu_seqlens)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("granularity", ["selective", "block", "branch"])
def test_backward_reads_the_blocks_that_forward_chose(granularity, monkeypatch):
    """The selection, which would differ the second time, runs once."""
    calls = []
    original = selection.forward

    def counted(*args, **options):
        calls.append(1)
        indices = original(*args, **options)
        return indices if len(calls) <= MODEL.n_layers else torch.full_like(indices, -1)

    monkeypatch.setattr(dispatch.REFERENCE["select"], "forward", counted)
    gradients(granularity)
    assert len(calls) == MODEL.n_layers


def test_selective_runs_no_attention_operator_twice(monkeypatch):
    calls = Counter()

    def counted(operator, original):
        def forward(*args, **options):
            calls[operator] += 1
            return original(*args, **options)

        return forward

    for operator in ("cmp", "select", "sel", "win", "mix"):
        module = dispatch.REFERENCE[operator]
        monkeypatch.setattr(module, "forward", counted(operator, module.forward))
    gradients("selective")
    once = dict.fromkeys(("cmp", "select", "sel", "win"), MODEL.n_layers)
    assert calls == once | {"mix": 2 * MODEL.n_layers}, "the mixture is cheap: its output is not kept"


@pytest.mark.parametrize(
    ("is_dense", "wanted"), [(True, ("win", "index_loss")), (False, ("index", "sel", "index_loss"))]
)
def test_selective_runs_no_operator_of_msa_twice_in_the_warmup_and_after_it(monkeypatch, is_dense, wanted):
    calls = Counter()

    def counted(operator, original):
        def run(*args, **options):
            calls[operator] += 1
            return original(*args, **options)

        return run

    for operator, function in {"win": "forward", "sel": "forward", "index": "choose", "index_loss": "loss"}.items():
        module = dispatch.REFERENCE[operator]
        monkeypatch.setattr(module, function, counted(operator, getattr(module, function)))
    msa = MSAConfig(block=16, num_selected=2)
    config = Architecture(model=MODEL.model_copy(update={"attention": "msa"}), msa=msa)
    model = build_model(config, 256, seed=0)
    for _, layer in attention_layers(model):
        layer.is_dense = is_dense
    recompute(model, "selective")
    tokens = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    has_target = torch.ones_like(tokens, dtype=torch.bool)
    model(tokens, loss=lambda hidden, head: head(hidden).logsumexp(-1).sum(), counted=has_target)[:2].sum().backward()
    assert calls == dict.fromkeys(wanted, MODEL.n_layers)


@pytest.mark.parametrize("granularity", ["selective", "block"])
def test_gradients_with_dense_attention_are_bit_identical(granularity):
    dense = MODEL.model_copy(update={"attention": "dense"})
    loss, recomputed = gradients(granularity, model=dense)
    plain_loss, plain = gradients("none", model=dense)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_layers_are_still_found_under_the_wrapper():
    model = build_model(Architecture(model=MODEL, nsa=NSA), 256, seed=0)
    recompute(model, "block")
    assert len(list(attention_layers(model))) == 3


@pytest.mark.parametrize("granularity", ["block", "branch"])
def test_backward_can_run_twice_over_one_forward_pass(granularity):
    model = build_model(Architecture(model=MODEL, nsa=NSA), 256, seed=0)
    recompute(model, granularity)
    tokens = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    loss = model(tokens).logsumexp(-1).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_with_the_checkpointing_of_compiled_blocks_are_bit_identical():
    """Compiled blocks use selective checkpointing; here without a compiler."""
    model = build_model(Architecture(model=MODEL, nsa=NSA), 256, seed=0)
    recompute(model, "block", compiled=True)
    tokens = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    loss = model(tokens).logsumexp(-1).sum()
    loss.backward()
    wanted_loss, wanted = gradients("block")
    assert torch.equal(loss.detach(), wanted_loss)
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), wanted, strict=True))
