"""Every operator on a GPU at real sizes against the float64 reference, through the public functions.

Memory that the allocator hands out is NaN, so an element nobody wrote shows.
"""

import pytest
import torch

from nsa.errors import ArgumentError, BackendError
from nsa.ops import NSASpec, checked_values, compress_mean, dispatch, nsa_attention, select_blocks, selected_attention
from nsa.ops.layout import num_compressed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LIMIT = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
SPEC = NSASpec()
TOKENS = 2500
PACKED = [0, 0, 700, 731, 2499, 2500]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """What was freed last is handed out first: leave NaN behind in blocks of every size. Several test processes share
    the GPU: memory is given back after each test."""
    sizes = [2**n for n in range(9, 30)] * 2
    blocks = [torch.full((size // 4,), float("nan"), device="cuda") for size in sizes]
    del blocks
    yield
    torch.cuda.empty_cache()


def draw(heads, groups, dk, dv, dtype, seed=0, tokens=TOKENS):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(h, d):
        return torch.randn(1, tokens, h, d, device="cuda", generator=generator).to(dtype).requires_grad_()

    raw = [normal(heads, dk), *(normal(groups, d) for _ in range(3) for d in (dk, dv))]
    gates = torch.rand(1, tokens, heads, 3, device="cuda", generator=generator).to(dtype).requires_grad_()
    return [*raw, gates]


def run(tensors, cu_seqlens, backend, do=None):
    """Output and gradients."""
    q, k_cmp, v_cmp, *rest, gates = tensors
    compressed = [compress_mean(x, SPEC, cu_seqlens=cu_seqlens, backend=backend) for x in (k_cmp, v_cmp)]
    o = nsa_attention(q, *compressed, *rest, gates, SPEC, cu_seqlens=cu_seqlens, backend=backend)
    if do is None:
        do = torch.randn(o.shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(9)).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, tensors, do)]


@pytest.fixture
def errors(monkeypatch):
    """Relative errors of the kernels' output and gradients on equal blocks: the reference reads what they selected."""

    def measure(tensors, cu_seqlens):
        chosen = []
        kernels = dispatch.kernels_for("select")
        original = kernels.forward

        def remembered(*args, **options):
            chosen.append(original(*args, **options))
            return chosen[-1]

        monkeypatch.setattr(kernels, "forward", remembered)
        got = run(tensors, cu_seqlens, "triton")
        monkeypatch.setattr(dispatch.REFERENCE["select"], "forward", lambda *args, **options: chosen[0])
        want = run([t.detach().double().requires_grad_() for t in tensors], cu_seqlens, "reference")
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]

    return measure


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "dk", "dv"), [(16, 1, 128, 128), (12, 2, 64, 64), (4, 4, 192, 128)])
def test_whole_attention_agrees_with_float64(heads, groups, dk, dv, dtype, packed, errors):
    cu_seqlens = torch.tensor(PACKED, dtype=torch.int32, device="cuda") if packed else None
    found = errors(draw(heads, groups, dk, dv, dtype), cu_seqlens)
    assert max(found) <= LIMIT[dtype], found


@pytest.mark.parametrize(
    ("tokens", "borders"), [(65_536 + 37, None), (131_072 + 5, None), (131_072, [0, 70_001, 70_002, 131_072])]
)
def test_long_sequences_agree_with_float64(tokens, borders, errors):
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda") if borders else None
    found = errors(draw(6, 1, 64, 64, torch.bfloat16, tokens=tokens), cu_seqlens)
    assert max(found) <= LIMIT[torch.bfloat16], found


@pytest.mark.parametrize("packed", [False, True])
def test_branches_side_by_side_give_the_same_gradients(packed, monkeypatch):
    """A CUDA graph of several passes, each of which takes the memory of the one before, against a pass without a graph
    and against autograd's branches one after the other. There the row sums of dO * O are added in another order and dQ
    is rounded more often: dQ, and dK of cmp and win, differ by rounding."""
    cu_seqlens = torch.tensor(PACKED, dtype=torch.int32, device="cuda") if packed else None
    tensors = draw(12, 2, 64, 64, torch.bfloat16)
    do = torch.randn_like(tensors[0])
    torch.use_deterministic_algorithms(True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("nsa.ops.mixing.LONGEST", 0)
            want = run(tensors, cu_seqlens, "triton", do)
        passes = [run(tensors, cu_seqlens, "triton", do)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            passes += [run(tensors, cu_seqlens, "triton", do) for _ in range(4)]
        graph.replay()
    finally:
        torch.use_deterministic_algorithms(False)
    for got in passes:
        assert all(torch.equal(a, b) for a, b in zip(got, passes[0], strict=True))
    rounded = {1, 2, 6}
    for place, (a, b) in enumerate(zip(passes[0], want, strict=True)):
        assert torch.equal(a, b) or place in rounded, place
        assert float((a - b).float().norm() / b.float().norm()) <= LIMIT[torch.bfloat16], place


def test_tensors_of_more_than_2_to_the_31_elements(monkeypatch):
    """Groups do not know of each other: the last one of a huge call is as if it had been called alone, by the kernels
    that take tensors of any size."""
    monkeypatch.setattr("nsa.ops.triton.compressed.MOST_ELEMENTS", 0)
    tokens, heads, groups = 131_072 + 5, 144, 9
    tensors = [t.detach() for t in draw(heads, groups, 128, 128, torch.bfloat16, tokens=tokens)]
    assert tensors[0].numel() > 2**31
    alone = [t[:, :, -(t.shape[2] // groups) :].clone().requires_grad_() for t in tensors]
    huge = run([t.requires_grad_() for t in tensors], None, "triton")
    huge = [t[:, :, -(t.shape[2] // groups) :].clone() for t in huge]
    q, k_cmp, v_cmp, *rest, gates = alone
    compressed = [compress_mean(x, SPEC, backend="triton") for x in (k_cmp, v_cmp)]
    o = nsa_attention(q, *compressed, *rest, gates, SPEC, backend="triton")
    generator = torch.Generator(device="cuda").manual_seed(9)
    do = torch.randn(1, tokens, heads, 128, device="cuda", generator=generator).to(o.dtype)[:, :, -16:].clone()
    single = [o, *torch.autograd.grad(o, alone, do)]
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(huge, single, strict=True)]
    assert max(errors) <= 1e-3, errors


def test_two_deterministic_runs_give_the_same_bits():
    tensors = draw(12, 2, 64, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(tensors, None, None), run(tensors, None, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bad_values_are_masked():
    q, _, _, k, v, *_ = draw(12, 2, 64, 64, torch.bfloat16)
    wild = torch.randint(-(2**31), 2**31 - 1, (1, TOKENS, 2, 16), device="cuda", dtype=torch.int32)
    o = selected_attention(q, k, v, wild, SPEC, backend="triton")
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), (q, k, v)))
    borders = torch.tensor([9, -5, 10**6, 40, 7], dtype=torch.int32, device="cuda")
    compressed = compress_mean(k, SPEC, cu_seqlens=borders, backend="triton")
    lse = torch.zeros(q.shape[:3], device="cuda")
    indices = select_blocks(q, compressed, lse, SPEC, cu_seqlens=borders, backend="triton")
    assert int(indices.min()) >= -1
    assert int(indices.max()) < -(-TOKENS // SPEC.sel_block)


def test_checked_mode_names_the_bad_argument():
    q, _, _, k, v, *_ = draw(12, 2, 64, 64, torch.bfloat16)
    far = torch.full((1, TOKENS, 2, 16), 10**6, device="cuda", dtype=torch.int32)
    falling = torch.tensor([0, 900, 700, TOKENS], dtype=torch.int32, device="cuda")
    with checked_values():
        with pytest.raises(ArgumentError, match="indices: must be -1 or one of the 40 blocks"):
            selected_attention(q, k, v, far, SPEC)
        with pytest.raises(ArgumentError, match="cu_seqlens: must never decrease"):
            compress_mean(k, SPEC, cu_seqlens=falling)


def test_float64_falls_back_and_says_so_once():
    tensors = [t.detach().double().requires_grad_() for t in draw(4, 2, 16, 16, torch.float32)]
    dispatch._fallbacks.clear()
    with pytest.warns(dispatch.FallbackWarning, match="float64"):
        run(tensors, None, None)
    assert {operator for operator, _ in dispatch.counters()} == {"phi", "cmp", "select", "sel", "win", "mix"}
    with pytest.raises(BackendError, match="float64"):
        run(tensors, None, "triton")


@pytest.mark.parametrize(("heads", "groups", "dim"), [(12, 2, 64), (64, 4, 128)])
@pytest.mark.parametrize("tokens", [2608, 2607, 2599])
def test_cudnn_computes_compressed_attention(heads, groups, dim, tokens):
    """One token, none and eight behind the last whole run."""
    kernels, reference = dispatch.kernels_for("cmp"), dispatch.REFERENCE["cmp"]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(length, heads):
        return torch.randn(1, length, heads, dim, device="cuda", generator=generator).to(torch.bfloat16)

    keys = num_compressed(tokens, SPEC)
    q, k, v, do = draw(tokens, heads), draw(keys, groups), draw(keys, groups), draw(tokens, heads)
    exact = [x.double() for x in (q, k, v)]
    o64, lse64 = reference.forward(*exact, SPEC, None)
    o, lse = kernels.forward_by_runs(q, k, v, SPEC)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-5, atol=1e-5)
    grads = kernels.backward_by_runs(do, q, k, v, o, lse, SPEC)
    wanted = reference.backward(do.double(), *exact, o64, lse64, SPEC, None)
    for x, want in zip((o, *grads), (o64, *wanted), strict=True):
        assert float((x.double() - want).norm() / want.norm()) <= 5e-3
