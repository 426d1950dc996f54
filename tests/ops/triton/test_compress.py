"""The mean and the contraction of blocks on Triton, forward and backward, against the float64 reference.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

import pytest
import torch

from nsa.ops.layout import slot_layout
from nsa.ops.reference import compress as reference
from nsa.ops.spec import NSASpec
from nsa.ops.triton import compress
from nsa.ops.triton.launch_table import Launch

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRET = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter has no bf16: those cases are part of `make test-gpu`.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
TYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [BF16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
SMALL = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, num_init=1, num_local=1, window=16)
RAGGED = [0, 3, 3, 30, 50, 57, 91]


def borders(cu):
    return None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)


def tokens_of(tokens, cu, *, batch=2, groups=2, dim=16, dtype=torch.float32):
    shape = (batch if cu is None else 1, tokens if cu is None else cu[-1], groups, dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)


def close(got, want, dtype):
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


def exact_gradients(output, inputs, do):
    grads = torch.autograd.grad(output, inputs, do.double(), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def check_mean(x, spec, cu):
    exact = x.double().requires_grad_()
    want = reference.mean(exact, spec, cu)
    got = compress.mean(x, spec, cu)
    close(got, want.detach(), x.dtype)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(x)
    dx = exact_gradients(want, [exact], dy)[0] if want.requires_grad else torch.zeros_like(exact)
    close(compress.mean_backward(dy, x.shape[1], spec, cu), dx, x.dtype)


def check_contract(x, spec, cu, width, params=None):
    weight = torch.randn(spec.cmp_block, x.shape[3], width, generator=torch.Generator().manual_seed(2)).to(x)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    want = reference.contract(*exact, spec, cu)
    close(compress.contract(x, weight, spec, cu, params), want.detach(), x.dtype)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(3)).to(x)
    wanted = exact_gradients(want, exact, dy)
    got = compress.contract_backward(dy, x, weight, spec, cu, params)
    for result, gradient in zip(got, wanted, strict=True):
        close(result, gradient, x.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cu", [None, RAGGED])
def test_types(dtype, cu):
    x = tokens_of(65, cu, dtype=dtype)
    check_mean(x, SMALL, borders(cu))
    check_contract(x, SMALL, borders(cu), 24)


@pytest.mark.parametrize("tokens", [1, 7, 8, 17, 63])
def test_every_length(tokens):
    x = tokens_of(tokens, None)
    check_mean(x, SMALL, None)
    check_contract(x, SMALL, None, 16)


@pytest.mark.parametrize("cu", [[0, 40], [0, 5], [0, 7, 8, 8, 23], [0, 1, 2, 3, 40]])
def test_packed_documents(cu):
    x = tokens_of(0, cu)
    check_mean(x, SMALL, borders(cu))
    check_contract(x, SMALL, borders(cu), 16)


@pytest.mark.parametrize("sizes", [(4, 1, 4), (8, 8, 8), (12, 4, 24), (1, 1, 1)])
@pytest.mark.parametrize("cu", [None, [0, 9, 50]])
def test_every_geometry(sizes, cu):
    spec = NSASpec(*sizes, 4, 1, 1, 16)
    x = tokens_of(50, cu, groups=3)
    check_mean(x, spec, borders(cu))
    check_contract(x, spec, borders(cu), 16)


@pytest.mark.parametrize(("dim", "width"), [(48, 40), (80, 7), (128, 130)])
def test_head_sizes_and_widths(dim, width):
    x = tokens_of(30, None, dim=dim, batch=1)
    check_mean(x, SMALL, None)
    check_contract(x, SMALL, None, width, Launch(32, 32, depth=32))


def test_long_sums_are_cut_into_parts():
    check_contract(tokens_of(300, None), SMALL, None, 16, Launch(16, 16, depth=16))


def test_strides_do_not_matter():
    x = tokens_of(40, None)
    for view in (x.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([x, x], dim=-1)[..., 0]):
        check_mean(view, SMALL, None)
        check_contract(view, SMALL, None, 16)
    one = torch.ones((), device=DEVICE)
    dy = one.expand(2, 9, 2, 16)
    weight = torch.randn(8, 16, 16).to(x).transpose(1, 2)
    for got, want in (
        (compress.mean_backward(dy, 40, SMALL, None), compress.mean_backward(dy.clone(), 40, SMALL, None)),
        (
            compress.contract_backward(dy, x, weight, SMALL, None)[0],
            compress.contract_backward(dy.clone(), x, weight.clone(), SMALL, None)[0],
        ),
    ):
        assert torch.equal(got, want)


def test_invalid_borders_are_clamped():
    x = tokens_of(0, [0, 90])
    bad = borders([7, 900, -3, 50, 1 << 30])
    used = slot_layout(90, SMALL, bad, DEVICE).used
    weight = torch.randn(8, 16, 16).to(x)
    for y in (compress.mean(x, SMALL, bad), compress.contract(x, weight, SMALL, bad)):
        assert y.isfinite().all()
        assert (y[:, ~used] == 0).all()
        assert compress.mean_backward(y, 90, SMALL, bad).isfinite().all()
        assert all(g.isfinite().all() for g in compress.contract_backward(y, x, weight, SMALL, bad))


def test_float64_is_refused_with_a_reason():
    v = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    assert "float64" in (compress.refusal(v, v) or "")
    assert compress.refusal(v.float(), v.float()) is None
    many = torch.empty(1 << 16, 1, 1, 16)
    assert "65,535 sequences" in (compress.refusal(many, many) or "")
