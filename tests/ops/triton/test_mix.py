"""The gated mix on Triton, forward and backward, against plain float64 arithmetic.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

import pytest
import torch

from nsa.ops.reference import mix as reference
from nsa.ops.triton import mix
from nsa.ops.triton.launch_table import Launch

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRET = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter has no bf16: those cases are part of `make test-gpu`.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
TYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [BF16])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def tensors(shape, dtype, gate_dtype):
    generator = torch.Generator().manual_seed(0)
    branches = [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(4)]
    gates = torch.rand(*shape[:3], 3, generator=generator).to(gate_dtype).to(DEVICE)
    return branches[:3], gates, branches[3]


def check(branches, gates, do, params=None):
    exact = [x.double() for x in (*branches, gates)]
    sums = torch.empty(3, *do.shape[:3], device=DEVICE)
    of_branches = mix.backward(do, *branches, gates, params, sums=sums)
    alone = mix.backward(do, *branches, gates, params)
    assert all(torch.equal(a, b) for a, b in zip(of_branches, alone, strict=True))
    for found, grad, o in zip(sums, of_branches[:3], branches, strict=True):
        error = (found.double() - (grad.double() * o.double()).sum(3)).norm()
        assert error <= 1e-6 * (grad.double().norm() * o.double().norm())
    got = [mix.forward(*branches, gates, params), *of_branches]
    want = [reference.forward(*exact), *reference.backward(do.double(), *exact)]
    for result, wanted, like in zip(got, want, (do, *branches, gates), strict=True):
        assert result.dtype == like.dtype
        assert result.shape == like.shape
        assert result.is_contiguous()
        error = (result.double() - wanted).norm() / wanted.norm()
        assert error <= TOLERANCE[like.dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_types_of_branches_and_gates(dtype, gate_dtype):
    branches, gates, do = tensors((2, 17, 6, 32), dtype, gate_dtype)
    check(branches, gates, do)


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 65, 3, 48), (1, 63, 12, 128), (3, 5, 2, 256)])
def test_every_shape(shape):
    branches, gates, do = tensors(shape, torch.float32, torch.float32)
    check(branches, gates, do, Launch(512, 1))


def test_strides_do_not_matter():
    branches, gates, do = tensors((2, 19, 4, 32), torch.float32, torch.float32)
    heads_first = branches[0].transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack([branches[1]] * 2, dim=-1)[..., 0]
    gates_apart = gates.movedim(3, 0).contiguous().movedim(0, 3)
    check([heads_first, spread, branches[2]], gates_apart, do[:, :, :1].expand_as(do))
    check(branches, gates, torch.ones((), device=DEVICE).expand_as(do))


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_the_queries_are_added_in_float32(dtype):
    total, other = (torch.randn(3, 7, 2, 160).to(dtype).to(DEVICE) for _ in range(2))
    exact = torch.randn(3, 7, 2, 160).to(DEVICE)
    want = (total.float() + exact + other.float()).to(dtype)
    assert mix.add_into(total, exact, other) is total
    assert torch.equal(total, want)
    assert mix.add_into(total[:0], exact[:0], other[:0]).shape == (0, 7, 2, 160)


def test_nothing_to_mix():
    branches, gates, do = tensors((2, 0, 4, 32), torch.float32, torch.float32)
    assert mix.forward(*branches, gates).shape == do.shape
    assert mix.backward(do, *branches, gates)[3].shape == gates.shape


def test_float64_is_refused_with_a_reason():
    v = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    assert "float64" in (mix.refusal(v, v) or "")
    assert mix.refusal(v.float(), v.float()) is None
