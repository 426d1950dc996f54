"""The public functions on Triton against the reference: the same indices, outputs and gradients."""

import pytest
import torch

from nsa.errors import ArgumentError, BackendError
from nsa.nn import NSAAttention
from nsa.ops import NSASpec, compress_contract, compress_mean, dispatch, nsa_attention, window_attention
from tests.ops.cases import make_inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of test_gpu.py do this on a GPU")
SPEC = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=1, window=20)


def both(call, inputs):
    """Output and gradients of `call(backend)` on the reference and on Triton."""
    results = []
    for backend in ("reference", "triton"):
        o = call(backend)
        results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    return results


def assert_same(reference, triton):
    for want, got in zip(reference, triton, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


HEADS = [(1, False), (6, True), (16, False)]


@pytest.mark.parametrize(
    ("per_group", "packed"),
    [
        pytest.param(n, packed, marks=[] if (n, packed) in HEADS else pytest.mark.long)
        for n in (1, 2, 4, 6, 8, 12, 16, 32)
        for packed in (False, True)
    ],
)
def test_whole_attention_for_any_number_of_heads(per_group, packed):
    x = make_inputs(
        45,
        spec=SPEC,
        heads=2 * per_group if per_group < 8 else per_group,
        groups=2 if per_group < 8 else 1,
        dv=32,
        cu_seqlens=[0, 5, 5, 32, 45] if packed else None,
        dtype=torch.float32,
        requires_grad=True,
    )
    call = lambda backend: nsa_attention(*x.tensors(), SPEC, cu_seqlens=x.cu_seqlens, backend=backend)  # noqa: E731
    assert_same(*both(call, x.tensors()))


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_compression(packed):
    x = make_inputs(67, spec=SPEC, groups=2, heads=2, dtype=torch.float32, requires_grad=True)
    borders = torch.tensor([0, 5, 50, 67], dtype=torch.int32) if packed else None
    weight = torch.randn(8, 16, 32, requires_grad=True)
    assert_same(*both(lambda b: compress_mean(x.k_sel, SPEC, cu_seqlens=borders, backend=b), [x.k_sel]))
    contract = lambda b: compress_contract(x.k_sel, weight, SPEC, cu_seqlens=borders, backend=b)  # noqa: E731
    assert_same(*both(contract, [x.k_sel, weight]))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_empty_documents_at_the_end_change_no_bit(backend):
    """A CUDA graph of a training step pads borders to a fixed number."""
    x = make_inputs(41, spec=SPEC, cu_seqlens=[0, 3, 37, 41], dtype=torch.float32, requires_grad=True)
    raw = make_inputs(41, spec=SPEC, dtype=torch.float32, requires_grad=True).k_sel
    results = []
    for borders in (x.cu_seqlens, torch.tensor([0, 3, 37, *[41] * 9], dtype=torch.int32)):
        k_cmp = compress_mean(raw, SPEC, cu_seqlens=borders, backend=backend)
        tensors = (x.q, k_cmp, *x.tensors()[2:])
        o = nsa_attention(*tensors, SPEC, cu_seqlens=borders, backend=backend)
        results.append([o, *torch.autograd.grad(o.square().sum(), [raw, x.q, *x.tensors()[2:]])])
    for bare, padded in zip(*results, strict=True):
        assert torch.equal(bare, padded)


def test_the_compiled_layer_runs_on_the_kernels():
    layer = NSAAttention(24, 4, 2, 16, spec=SPEC, phi="mlp", backend="triton")
    torch.nn.init.normal_(layer.gate.out.weight, std=0.3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 24, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(got, expected)


def test_the_best_backend_runs_and_a_refusal_is_counted():
    x = make_inputs(20, spec=SPEC, dtype=torch.float32)
    before = dispatch.counters()
    window_attention(x.q, x.k_win, x.v_win, SPEC)
    assert dispatch.counters() == before
    low = make_inputs(20, spec=SPEC, dtype=torch.bfloat16)
    window_attention(low.q, low.k_win, low.v_win, SPEC)
    (key,) = {key for key in dispatch.counters() if dispatch.counters()[key] != before.get(key, 0)}
    assert key == ("win", "Triton's interpreter multiplies bfloat16 wrongly")
    with pytest.raises(BackendError, match="multiplies bfloat16 wrongly"):
        window_attention(low.q, low.k_win, low.v_win, SPEC, backend="triton")


def test_backends_can_be_named_by_operator():
    x = make_inputs(40, spec=SPEC, dtype=torch.float32)
    mixed = nsa_attention(*x.tensors(), SPEC, backend={"sel": "reference", "win": "triton"})
    torch.testing.assert_close(mixed, nsa_attention(*x.tensors(), SPEC, backend="reference"))
    with pytest.raises(ArgumentError, match="names the operator 'window'"):
        nsa_attention(*x.tensors(), SPEC, backend={"window": "triton"})
