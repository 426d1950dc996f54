"""What surrounds the products of a norm and an MLP, on Triton, against float64 arithmetic.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

import math

import pytest
import torch

from nsa.ops import long_mlp as whole
from nsa.ops.dispatch import backend_name
from nsa.ops.reference import feed_forward as reference
from nsa.ops.triton import feed_forward

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRET = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter has no bf16: those cases are part of `make test-gpu`.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
TYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [BF16])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
EPS = 1e-5


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_near(got, want, dtype, tolerance=1.0):
    assert got.dtype == dtype
    assert (got.double() - want).norm() <= tolerance * TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 16), (37, 48), (9, 1025)])
def test_the_norm(tokens, channels, dtype):
    x, norm, dread = draw(tokens, channels), 1 + draw(channels, seed=1) / 4, draw(tokens, channels, dtype=dtype, seed=2)
    got = feed_forward.normalize(x, norm, EPS, dtype)
    assert_near(got, reference.normalize(x.double(), norm.double(), EPS, torch.float64), dtype)
    want = reference.normalize_backward(dread.double(), x.double(), norm.double(), EPS)
    for grad, exact in zip(feed_forward.normalize_backward(dread, x, norm, EPS), want, strict=True):
        assert_near(grad, exact, torch.float32)


def test_the_norm_of_rows_that_are_not_contiguous():
    x, norm, dread = draw(20, 64)[::2, :32], draw(64, seed=1)[::2], draw(10, 64, seed=2)[:, ::2]
    dense = [t.contiguous() for t in (dread, x, norm)]
    got = [feed_forward.normalize(x, norm, EPS, torch.float32), *feed_forward.normalize_backward(dread, x, norm, EPS)]
    want = [feed_forward.normalize(*dense[1:], EPS, torch.float32), *feed_forward.normalize_backward(*dense, EPS)]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (11, 48), (3, 2100)])
def test_the_activation(tokens, width, activation, dtype):
    hidden, dmixed = 5 * draw(tokens, 2 * width, dtype=dtype), draw(tokens, width, dtype=dtype, seed=1)
    want = reference.activate_backward(dmixed.double(), hidden.double(), activation)
    assert_near(feed_forward.activate(hidden, activation), want[0], dtype)
    for got, exact in zip(feed_forward.activate_backward(dmixed, hidden, activation), want, strict=True):
        assert_near(got, exact, dtype)


def test_a_nan_is_not_clamped():
    hidden = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], device=DEVICE)
    assert feed_forward.activate(hidden, "swiglu_oai").isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_the_whole_in_chunks(monkeypatch, activation, dtype):
    monkeypatch.setattr(whole, "CHUNK", 16)
    x, dy, norm = draw(2, 21, 32), draw(2, 21, 32, seed=1), 1 + draw(32, seed=2) / 4
    weights = [draw(*shape, seed=seed).to(dtype) / 8 for seed, shape in enumerate([(48, 32), (48, 32), (32, 48)], 3)]
    assert backend_name("mlp", None, x, weights[2]) == "triton"
    exact = [t.double() for t in (x, norm, *weights)]
    assert_near(whole.forward(x, norm, *weights, EPS, activation), whole.forward(*exact, EPS, activation), dtype, 3)
    found = whole.backward(dy, x, norm, *weights, EPS, activation)
    wanted = whole.backward(dy.double(), *exact, EPS, activation)
    for got, want, like in zip(found, wanted, (x, norm, *weights), strict=True):
        assert got.shape == like.shape
        assert got.dtype == like.dtype
        assert (got.double() - want).norm() <= 4 * TOLERANCE[dtype] * want.norm()


def test_refusal_names_unsupported_inputs():
    assert "float64" in feed_forward.refusal(draw(1, 16).double(), draw(1, 16))
    assert "16385 channels" in feed_forward.refusal(torch.zeros(1, 16385), draw(1, 16))
    assert feed_forward.refusal(draw(1, 16), draw(1, 16).half()) is None
