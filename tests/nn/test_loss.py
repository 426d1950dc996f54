"""Losses that torch.compile runs: those of a pass without it, with fewer copies of the logits."""

from functools import partial

import pytest
import torch
from torch import nn

from nsa.nn import loss as losses
from nsa.nn.loss import divergence_loss, next_token_loss

TOKENS, WIDTH, VOCABULARY = 96, 16, 512


def run(compiled, taught, dtype=torch.bfloat16):
    """The loss, the gradients, and the bytes that autograd keeps for backward."""
    torch.manual_seed(0)
    head, teacher = nn.Linear(WIDTH, VOCABULARY, bias=False), nn.Linear(8, VOCABULARY, bias=False)
    hidden, targets = torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (2, 48))
    targets[:, 5:20] = -100
    loss_of = partial(next_token_loss, targets_BS=targets)
    if taught:
        taught_by = {"taught_BSC": torch.randn(2, TOKENS // 2, 8), "teacher": teacher, "counted_BS": targets >= 0}
        loss_of = partial(divergence_loss, **taught_by)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss_of(hidden, head, compiled=compiled)
    (0.01 * value).backward()
    return value.detach(), hidden.grad, head.weight.grad, sum(kept.values())


@pytest.fixture
def without_kernels(monkeypatch):
    """Compilation without C++ kernels, which take a compiler seconds; the same tensors are kept for backward."""
    backend = partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True)
    monkeypatch.setattr(losses, "_compiled", backend)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_compiled_loss_has_the_value_and_the_gradients_of_another(monkeypatch, without_kernels, in_chunks, taught):
    want = run(False, taught, torch.float32)
    if in_chunks:
        monkeypatch.setattr(losses, "LONG_PASS", 1)
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 1)
        monkeypatch.setattr(losses, "FEWEST_AT_ONCE", 20)
    for found, wanted in zip(run(True, taught, torch.float32)[:3], want[:3], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_compiled_loss_keeps_the_logits_in_the_dtype_of_the_products(without_kernels):
    compiled, plain = run(True, taught=False), run(False, taught=False)
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-5, atol=0.0)
    logits = TOKENS * VOCABULARY
    assert plain[-1] - compiled[-1] >= 1.9 * logits, "2 bytes for each, where float32 takes 4"
