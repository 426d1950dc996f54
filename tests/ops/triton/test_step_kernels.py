"""What surrounds attention in a step: the kernels against the modules, when they stand in for them, and their number.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.errors import ArgumentError
from nsa.nn import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.decode_step import _fits
from nsa.ops import dispatch
from nsa.ops.reference.feed_forward import ACTIVATIONS, gated
from nsa.ops.triton import step_kernels as kernels
from tests.nn.test_cache import VARIANTS, VOCABULARY, small
from tests.ops.triton.branch_cases import DEVICE
from tests.ops.triton.compiling import recording

# The interpreter has no bf16: those cases are part of `make test-gpu`.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
TYPES = [torch.float32, torch.float16] + ([BF16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions that launched a kernel."""
    found = []
    for name in ("product", "place"):
        original = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _n=name, _f=original, **k: found.append(_n) or _f(*a, **k))
    return found


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


def normed(x, norm):
    return nn.functional.rms_norm(x, x.shape[-1:], norm, EPS)


def product_inputs(tokens, channels, dtype):
    return 30 * draw(tokens, channels, dtype=dtype), (1 + draw(channels, seed=1) / 4).to(dtype)


@functools.cache
def normed_by_the_kernel(tokens, channels, dtype):
    x, norm = product_inputs(tokens, channels, dtype)
    return kernels.product(x, [torch.eye(channels, dtype=dtype, device=DEVICE)], norm=norm, eps=EPS)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 24), (1, 1100), (3, 130), (32, 40)])
@pytest.mark.parametrize(
    "sizes", [pytest.param((40,), marks=pytest.mark.long), (48, 16, 5), (16, 16, 16, 32, 16, 32, 16, 33)], ids=str
)
def test_products_of_one_input_side_by_side(poisoned, tokens, channels, sizes, dtype):
    x, norm = product_inputs(tokens, channels, dtype)
    weights = [draw(size, channels, dtype=dtype, seed=2 + i) for i, size in enumerate(sizes)]
    biases = [draw(size, dtype=dtype, seed=20 + i) if i % 3 != 1 else None for i, size in enumerate(sizes)]
    # What the norm rounds is what the modules' norm rounds, but where it lies between two numbers.
    read = normed_by_the_kernel(tokens, channels, dtype)
    assert_near(read, normed(x.double(), norm.double()), dtype)
    want = [
        read.double() @ w.double().T + (0 if b is None else b.double()) for w, b in zip(weights, biases, strict=True)
    ]
    want[-1] = nn.functional.silu(want[-1])
    got = kernels.product(x, weights, biases, norm=norm, eps=EPS, activation="silu")
    assert_near(got, torch.cat(want, dim=1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "channels", "width"), [(1, 24, 40), (1, 300, 7), (5, 136, 40)])
def test_the_products_of_an_mlp(poisoned, tokens, channels, width, dtype):
    x, gate, up = draw(tokens, channels, dtype=dtype), draw(width, channels, seed=1), draw(width, channels, seed=2)
    gate, up = (0.2 * gate).to(dtype), up.to(dtype)
    for activation in ACTIVATIONS:
        want = gated(x.double() @ gate.double().T, x.double() @ up.double().T, activation)
        assert_near(kernels.product(x, [gate, up], activation=activation), want, dtype)
    residual = 5 * draw(tokens, width, dtype=dtype, seed=3)
    assert_near(kernels.product(x, [up], residual=residual), residual.double() + x.double() @ up.double().T, dtype)


def test_refusal_names_unsupported_inputs():
    x = draw(1, 16)
    assert "float64" in kernels.refusal(x.double(), x.double())
    assert "float16" in kernels.refusal(x, x.half())
    assert "16384 channels" in kernels.refusal(x, torch.zeros(1, 16385))
    assert kernels.refusal(x, x) is None


def model_of(*overrides, dtype=torch.float32):
    return small("model.n_layers=1", *overrides).to(DEVICE, dtype)


def set_backend(model, backend):
    for block in model.blocks:
        block.attention.backend = backend


def kept(cache):
    """All that the cache holds, without what takes the rows that are padding."""
    for layer in cache.layers.values():
        for name, tensors in layer.parts().items():
            for tensor in tensors:
                is_ring = name in ("win", "tail", "window")
                yield tensor[:-1] if is_ring else tensor[1:]


@torch.no_grad()
def check_steps(model, steps, starts=(62, 7, 33), slack=6, tolerance=2e-5):
    """Logits and cache after steps of so many tokens a row, by the kernels and by the reference."""
    tokens = torch.randint(0, VOCABULARY, (len(starts), max(starts)), device=DEVICE)
    caches = [KVCache(model, sequences=len(starts), max_length=100, slack=slack) for _ in range(2)]
    set_backend(model, "reference")
    for cache in caches:
        rows = [cache.add() for _ in starts]
        model(tokens, cache=cache.append(list(starts), rows))
    for counts in steps:
        tokens = torch.randint(0, VOCABULARY, (len(starts), max(counts)), device=DEVICE)
        results = []
        for cache, backend in zip(caches, (None, "reference"), strict=True):
            set_backend(model, backend)
            results.append(model(tokens, cache=cache.append(list(counts))))
        for row, count in enumerate(counts):
            got, want = (result[row, :count].double() for result in results)
            assert (got - want).norm() <= tolerance * want.norm()
        for got, want in zip(*map(kept, caches), strict=True):
            assert torch.equal(got != 0, want != 0)
            assert (got - want).norm() <= tolerance * want.norm()


# Rows that bring nothing, a page's end (64), several tokens, rings that wrap around (14 and 30 tokens).
STEPS = [(1, 0, 1), (5, 2, 6)]
FEW_STEPS = [(1, 0), (3, 6)]
ONE_STEP = [(3, 1)]


def test_steps_of_all_kinds_of_layers(calls):
    overrides = [VARIANTS["pattern"][0], "model.n_layers=4", "model.rotary_dim=6"]  # not a power of two
    check_steps(small(*overrides).to(DEVICE, torch.float32), STEPS)
    assert calls.count("place") == 4 * len(STEPS)
    assert calls.count("product") == 4 * 4 * len(STEPS)


QUICK = ("part of a head", "mlp", "shared mlp", "mean_mlp", "msa", "msa, narrow index")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
        for name in VARIANTS
        if name not in ("pattern", "cmp", "sel", "win")
    ],
)
def test_steps_of_variants(calls, variant):
    overrides = [x for x in VARIANTS[variant] if "layer" not in x]
    model = model_of(*overrides)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    check_steps(model, ONE_STEP, starts=(62, 29))
    assert calls.count("place") == len(ONE_STEP)


def test_steps_in_float16(calls):
    check_steps(model_of(dtype=torch.float16), FEW_STEPS, starts=(62, 29), tolerance=5e-3)
    assert calls.count("place") == len(FEW_STEPS)


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1.0


class Quantized(torch.Tensor):
    """A weight that is more than its numbers."""


def adapt(parent, name):
    old = getattr(parent, name)
    new = Adapted(old.in_features, old.out_features, bias=False, device=DEVICE)
    new.weight = old.weight
    setattr(parent, name, new)


def hook(module):
    module.register_forward_hook(lambda *_: None)


def patch(module):
    module.forward = module.forward


CHANGES = {
    "adapted query": (lambda b: adapt(b.attention, "q"), ["product", "product"]),
    "hook of the layer": (lambda b: hook(b.attention), ["product", "place", "product", "product", "product"]),
    "hook of a value": (lambda b: hook(b.attention.v[1]), ["product", "product"]),
    "hook of the norm": (lambda b: hook(b.attention_norm), ["product", "place", "product", "product", "product"]),
    "hook of the gate": (lambda b: hook(b.attention.gate), ["product", "product"]),
    "forced branch": (lambda b: setattr(b.attention, "force_branch", "sel"), ["product", "product"]),
    "patched MLP": (lambda b: patch(b.mlp), ["product", "place", "product"]),
    "adapted MLP": (lambda b: adapt(b.mlp, "up"), ["product", "place", "product"]),
    "hook of the MLP's norm": (lambda b: hook(b.mlp_norm), ["product", "place", "product"]),
    "quantized": (
        lambda b: setattr(b.mlp.out, "weight", nn.Parameter(b.mlp.out.weight.detach().as_subclass(Quantized))),
        ["product", "place", "product"],
    ),
    "nothing": (lambda b: None, ["product", "place", "product", "product", "product"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_do_more_than_the_kernels_are_called(calls, change):
    """A hook of the layer or its norm leaves the layer itself to the kernels, called as a module."""
    model = model_of()
    alter, wanted = CHANGES[change]
    alter(model.blocks[0])
    check_steps(model, [(1, 1)], starts=(20, 9))
    assert calls == wanted


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_weights_are_left_to_their_module():
    linear = nn.Linear(8, 8, bias=False)
    assert _fits(linear, torch.zeros(1, 8))
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse_csr(), requires_grad=False)
    assert not _fits(linear, torch.zeros(1, 8))


def test_hooks_of_all_modules_are_called(calls):
    """A profiler's, or one that changes what linear layers give."""
    model = model_of()
    change = nn.modules.module.register_module_forward_hook(
        lambda module, _, y: 1.5 * y if isinstance(module, nn.Linear) else None
    )
    try:
        check_steps(model, [(1, 1)], starts=(20, 9))
    finally:
        change.remove()
    assert not calls


@torch.no_grad()
def test_a_block_refuses_packed_documents_beside_a_cache():
    model = model_of()
    cache = KVCache(model, sequences=1, max_length=20)
    model(torch.zeros(1, 5, dtype=torch.int64, device=DEVICE), cache=cache)
    borders = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        model.blocks[0](draw(1, 2, 32), borders, cache=cache.append(2))


@torch.no_grad()
def test_where_the_kernels_do_not_run(calls):
    model = model_of()
    cache = KVCache(model, sequences=1, max_length=100, slack=40)
    tokens = torch.randint(0, VOCABULARY, (1, 60), device=DEVICE)
    model(tokens[:, :4], cache=cache)  # a prompt
    model(tokens[:, :33], cache=cache)  # more than 32 tokens
    with torch.autocast(DEVICE, torch.float16):  # of weights in float32
        narrow = KVCache(model, sequences=1, max_length=100)
        model(tokens[:, :4], cache=narrow)
        model(tokens[:, :1], cache=narrow)
    assert not calls
    with torch.enable_grad():
        x = model.embedding(tokens[:, :1]).requires_grad_()
        y = model.blocks[0](x, cache=cache.append(1))
    assert y.requires_grad
    assert calls.count("place") == 1, "an attention layer over a cache has no gradient, and the block around it has one"
    model.double()
    double = KVCache(model, sequences=1, max_length=100)
    model(tokens[:, :10], cache=double)
    model(tokens[:, :1], cache=double)
    assert calls.count("place") == 1


@torch.no_grad()
def test_rows_that_are_not_contiguous():
    """As a layer alone is called with the last tokens of a batch."""
    layer = model_of().blocks[0].attention
    x = draw(2, 9, 32)
    results = []
    for last in (x[:, -1:], x[:, -1:].contiguous()):
        cache = KVCache(layer, sequences=2, max_length=20)
        layer(x, cache=cache)
        results.append(layer(last, cache=cache))
    assert torch.equal(*results)


class Launches(TorchDispatchMode):
    """Counts operators that would run a kernel on a GPU: all but views and fresh memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        is_view = any(returned.alias_info and not returned.alias_info.is_write for returned in function._schema.returns)
        if not is_view and "empty" not in name and not name.startswith("nsa::") and name != "aten::detach":
            self.count += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def launches_of(layers, kind):
    """Of a step that completes no compressed block."""
    model = small(f"model.n_layers={layers}", f"model.attention={kind}").to(DEVICE, torch.float32)
    cache = KVCache(model, sequences=2, max_length=100)
    slots = torch.tensor([cache.add(), cache.add()], dtype=torch.int32, device=DEVICE)
    cache.append(40)
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    with (
        recording(90) as recorded,
        Launches() as counted,
        mock.patch.object(dispatch, "_interpreting", return_value=True),
    ):
        step = CacheStep(cache, slots, torch.ones_like(slots), 1, cache.width, is_fresh=False, completes=False)
        model.hidden(tokens, cache=step)
    return len(recorded) + counted.count


@pytest.mark.parametrize(("kind", "most"), [("nsa", 8), ("msa", 8), ("dense", 7)])
def test_a_step_launches_few_kernels(kind, most):
    one, three = (launches_of(layers, kind) for layers in (1, 3))
    assert (three - one) / 2 <= most
    assert one - most <= 30, "what all layers share"
