"""Long passes: loss and MLP in chunks of tokens are those of a short pass, in memory that does not grow with S."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from nsa.checks.memory_trace import LiveBytes
from nsa.config.architecture import Architecture, ModelConfig, NSAConfig
from nsa.errors import ArgumentError, DerivativeError
from nsa.nn import loss as losses
from nsa.nn.block import SwiGLU
from nsa.nn.loss import divergence_loss, next_token_loss
from nsa.nn.model import build_model
from nsa.ops import long_mlp
from nsa.parallel.transform import recompute

MODEL = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16, mlp_dim=48)
NSA = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_init=1, num_local=1, window=5)
VOCABULARY = 50


@pytest.fixture
def in_chunks(monkeypatch):
    """From now on, every pass is a long one: 7 tokens at a time for the loss, 16 for the MLP."""

    def start():
        monkeypatch.setattr(losses, "LONG_PASS", 1)
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 7 * VOCABULARY)
        monkeypatch.setattr(losses, "FEWEST_AT_ONCE", 1)
        monkeypatch.setattr(long_mlp, "CHUNK", 16)

    return start


def a_batch(seed=0, rows=2, length=51):
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[:, 5:20] = -100
    return tokens[:, :-1], targets


def run(granularity="block", *, taught=False, autocast=None, compiled=False, **changes):
    """Loss and gradients of one pass."""
    model = build_model(Architecture(model=MODEL.model_copy(update=changes), nsa=NSA), VOCABULARY, seed=0)
    recompute(model, granularity, compiled=compiled)
    for block in model.blocks if compiled else ():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    tokens, targets = a_batch()
    loss_of = partial(next_token_loss, targets_BS=targets)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        if taught:
            teacher = build_model(Architecture(model=MODEL, nsa=NSA), VOCABULARY, seed=1)
            with torch.no_grad():
                hidden = teacher.hidden(tokens)
            loss_of = partial(divergence_loss, taught_BSC=hidden, teacher=teacher.head, counted_BS=targets >= 0)
        value = model(tokens, loss=loss_of)
    (value * 0.01).backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_near(got, want, tolerance):
    """Losses, and gradients by the norm of their difference."""
    assert float(got[0]) == pytest.approx(float(want[0]), rel=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        assert (grad - want[1][name]).norm() <= tolerance * want[1][name].norm(), name


CASES = [("none", False, False), ("none", True, True), ("block", False, True), ("block", True, False)]
CASES += [("selective", True, True), ("branch", False, False)]


@pytest.mark.parametrize(
    ("granularity", "tied", "taught"),
    [
        pytest.param(*case, marks=[] if case in CASES else pytest.mark.long)
        for case in product(("none", "selective", "block", "branch"), (False, True), (False, True))
    ],
)
def test_a_long_pass_has_the_loss_and_gradients_of_a_short_one(in_chunks, granularity, tied, taught):
    want = run(granularity, taught=taught, tied_head=tied)
    in_chunks()
    assert_near(run(granularity, taught=taught, tied_head=tied), want, 2e-6)


def test_a_long_pass_under_autocast_is_as_exact_as_a_short_one(in_chunks):
    exact, short = run(), run(autocast=torch.bfloat16)
    in_chunks()
    long = run(autocast=torch.bfloat16)
    assert_near(long, short, 0.02)
    for name, grad in exact[1].items():
        error, other = ((x[1][name] - grad).norm() for x in (long, short))
        assert error <= 1.3 * other + 1e-6, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_long_pass_of_a_validation_has_the_same_loss(in_chunks, mode):
    model = build_model(Architecture(model=MODEL, nsa=NSA), VOCABULARY, seed=0)
    recompute(model, "block")
    tokens, targets = a_batch()
    want = model(tokens, loss=partial(next_token_loss, targets_BS=targets))
    in_chunks()
    with mode():
        value = model(tokens, loss=partial(next_token_loss, targets_BS=targets))
    assert float(value) == pytest.approx(float(want.detach()), rel=2e-6)


def test_a_long_pass_is_deterministic_where_that_is_asked_for(in_chunks):
    in_chunks()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grad, second[1][name]) for name, grad in first[1].items())


@pytest.mark.parametrize(
    ("granularity", "autocast"),
    [
        *(("selective", None), ("block", torch.bfloat16)),
        pytest.param("selective", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("block", None, marks=pytest.mark.long),
    ],
)
def test_a_long_pass_runs_in_compiled_blocks_without_a_break(in_chunks, autocast, granularity):
    in_chunks()
    want = run("selective", autocast=autocast)  # which rounds as compiled blocks do
    assert_near(run(granularity, autocast=autocast, compiled=True), want, 2e-6)


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """Bytes on top of the input and its gradient: those of a chunk, forward and backward, at any length."""
    monkeypatch.setattr(losses, "LONG_PASS", 1)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 64 * 512)
    monkeypatch.setattr(losses, "FEWEST_AT_ONCE", 64)
    head = nn.Linear(16, 512, bias=False)
    held = []
    for tokens in (512, 2048):
        hidden, targets = torch.randn(1, tokens, 16, requires_grad=True), torch.zeros(1, tokens, dtype=torch.int64)
        head.weight.grad = None
        live = LiveBytes([hidden, targets, head.weight])
        with live:
            next_token_loss(hidden, head, targets).backward()
        held.append(live.phases["start"].total - hidden.nbytes)
    assert held[0] == held[1] < 4 * 64 * 512 * 4 + 3 * head.weight.nbytes


def test_a_frequent_token_of_a_long_pass_does_not_overflow_in_fp16(monkeypatch):
    """The loss scale cannot prevent it: the gradients of a chunk are computed before they are scaled."""
    monkeypatch.setattr(losses, "LONG_PASS", 1)
    head = nn.Linear(4, 8, bias=False)
    hidden, targets = 64.0 + torch.randn(1, 2048, 4), torch.zeros(1, 2048, dtype=torch.int64)
    gradients = []
    for enabled in (False, True):
        head.weight = nn.Parameter(torch.zeros(8, 4))
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            loss = next_token_loss(hidden, head, targets)
        (loss / 2048).backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=0.0)


def test_hidden_activations_of_the_mlp_exist_for_one_chunk_at_a_time(monkeypatch):
    """The formulas of the workspaces, which do not depend on the length, against what is allocated."""
    monkeypatch.setattr(long_mlp, "CHUNK", 128)
    weights = [torch.randn(shape) for shape in ((32,), (512, 32), (512, 32), (32, 512))]
    for tokens, activation in product((256, 1024), ("swiglu", "swiglu_oai")):
        x, settings = torch.randn(2, tokens // 2, 32), (1e-5, activation)
        for function, given in (("forward", (x, *weights, *settings)), ("backward", (x, x, *weights, *settings))):
            live = LiveBytes([x, *weights])
            with live:
                results = getattr(long_mlp, function)(*given)
            results = results if isinstance(results, tuple) else (results,)
            allocated = live.phases["start"].total - sum(result.nbytes for result in results)
            formula = getattr(long_mlp, f"{function}_workspace")(*given)
            assert 0.95 * allocated <= formula <= 1.1 * allocated, (function, tokens)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_gradients_of_the_chunked_mlp_equal_those_of_autograd(in_chunks, activation):
    in_chunks()
    block = build_model(Architecture(model=MODEL, nsa=NSA), VOCABULARY, seed=0).blocks[0].double()
    block.mlp = SwiGLU(MODEL.dim, 48, activation).double()
    nn.init.normal_(block.mlp_norm.weight)
    for linear in (block.mlp.gate, block.mlp.up):
        nn.init.normal_(linear.weight)  # some gates and ups lie above 7, some below -7
    x = torch.randn(2, 21, MODEL.dim, dtype=torch.float64, requires_grad=True)
    inputs, dy = [x, block.mlp_norm.weight, *block.mlp.parameters()], torch.randn_like(x)
    n = block.mlp_norm(x)
    gate, up = block.mlp.gate(n), block.mlp.up(n)
    if activation == "swiglu":
        mixed = gate * gate.sigmoid() * up
    else:
        gate, up = torch.where(gate > 7, 7, gate), torch.where(up.abs() > 7, 7 * up.sign(), up)
        mixed = (up + 1) * gate * (1.702 * gate).sigmoid()
    want = block.mlp.out(mixed)
    for got in (block.mlp(n), block._chunked_mlp(x)):
        torch.testing.assert_close(got, want)
        grads = zip(
            torch.autograd.grad(got, inputs, dy, retain_graph=True),
            torch.autograd.grad(want, inputs, dy, retain_graph=True),
            strict=True,
        )
        for found, wanted in grads:
            torch.testing.assert_close(found, wanted)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ArgumentError, match="activation: must be one of swiglu, swiglu_oai, got 'gelu'"):
        SwiGLU(8, 16, "gelu")


def test_a_short_pass_is_left_as_it_was(monkeypatch):
    """Nothing here is chunked below the limit, and a block that keeps its activations never is."""

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(losses._ChunkedLoss, "apply", refuse)
    monkeypatch.setattr("nsa.nn.block.norm_mlp", refuse)
    run()
    monkeypatch.setattr(losses, "LONG_PASS", 103)
    run()
    monkeypatch.setattr(losses, "LONG_PASS", 102)  # 2 x 51
    with pytest.raises(AssertionError):
        run()
    monkeypatch.setattr(losses._ChunkedLoss, "apply", lambda *_: torch.zeros((), requires_grad=True))
    run("none")


def test_modified_layers_are_called(in_chunks):
    """Adapters, hooks and modules of the user's own see every token, in one call."""
    in_chunks()
    model = build_model(Architecture(model=MODEL, nsa=NSA), VOCABULARY, seed=0)
    recompute(model, "block")
    seen = []

    class Other(SwiGLU):
        def forward(self, x_BSC):
            seen.append(tuple(x_BSC.shape[:2]))
            return super().forward(x_BSC)

    model.blocks[1].mlp.__class__ = Other
    for module in (model.head, model.blocks[0].mlp.up):
        module.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
    tokens, targets = a_batch()
    with torch.no_grad():
        model(tokens, loss=partial(next_token_loss, targets_BS=targets))
    assert seen == [(2, 51)] * 3


def test_a_long_pass_has_no_second_derivative(in_chunks):
    in_chunks()
    hidden, head = torch.randn(1, 20, 8, requires_grad=True), nn.Linear(8, VOCABULARY, bias=False)
    loss = next_token_loss(hidden, head, torch.randint(0, VOCABULARY, (1, 20)))
    (gradient,) = torch.autograd.grad(loss * loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_mlp_of_a_long_pass_has_no_forward_mode():
    block, x = (
        build_model(Architecture(model=MODEL, nsa=NSA), VOCABULARY, seed=0).blocks[0],
        torch.randn(1, 20, MODEL.dim),
    )
    with pytest.raises(DerivativeError, match="nsa::norm_mlp"):
        torch.func.jvp(block._chunked_mlp, (x,), (x,))
