"""Attention over a cache on a GPU: real sizes against float64, and one CUDA graph for every length."""

import pytest
import torch

from nsa.ops import MSASpec, NSASpec, PagedKV, RingKV, msa_decode, nsa_decode, paged_attention
from nsa.ops.reference import decode as reference
from nsa.ops.triton import decode
from tests.ops.triton import test_msa_decode as msa_cases
from tests.ops.triton.branch_cases import LIMIT
from tests.ops.triton.test_decode import check, double, inputs, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SPEC = NSASpec()
PAGE = 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "dk", "dv"),
    [(64, 4, 128, 128), (12, 2, 64, 64), (4, 4, 192, 128), (6, 1, 96, 80), (2, 2, 256, 256)],
)
def test_steps_agree_with_float64(heads, groups, dk, dv, dtype):
    x = inputs(2500, spec=SPEC, batch=3, heads=heads, groups=groups, dk=dk, dv=dv, dtype=dtype)
    check(x, [[2499], [1039], [30]], SPEC, ring=SPEC.window + 64)


@pytest.mark.parametrize("new", [4, 40])
def test_chunks_agree_with_float64(new):
    x = inputs(1500, spec=SPEC, batch=2, heads=32, groups=2, dk=128, dv=128, dtype=torch.bfloat16)
    positions = torch.tensor([[1400], [60]]) + torch.arange(new)
    positions[1, new // 2 :] = -1
    check(x, positions.tolist(), SPEC, ring=SPEC.window + 64)
    check(x, positions.tolist(), SPEC)


class LongCache:
    """Pools for `batch` sequences of at most `tokens` tokens, all of them written."""

    def __init__(self, batch, tokens, heads, groups, dim, dtype=torch.bfloat16):
        generator = torch.Generator(device="cuda").manual_seed(5)

        def normal(*shape):
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        pages = tokens // PAGE
        table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages).int() + 1
        self.q, self.gates = normal(batch, 1, heads, dim), normal(batch, 1, heads, 3)
        self.cmp = PagedKV(*(normal(batch * pages + 1, PAGE // SPEC.cmp_stride, groups, dim) for _ in "kv"), table)
        self.sel = PagedKV(*(normal(batch * pages + 1, PAGE, groups, dim) for _ in "kv"), table)
        slots = torch.arange(batch, device="cuda", dtype=torch.int32)
        self.win = RingKV(*(normal(batch, SPEC.window + 64, groups, dim) for _ in "kv"), slots)

    def arguments(self, dtype=None):
        def cast(kv):
            return type(kv)(*(x.to(dtype) if dtype and x.is_floating_point() else x for x in vars(kv).values()))

        return *(x.to(dtype or x.dtype) for x in (self.q, self.gates)), cast(self.cmp), cast(self.sel), cast(self.win)


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(("heads", "groups", "dim"), [(64, 4, 128), (12, 2, 64)])
def test_long_caches_agree_with_float64(heads, groups, dim):
    cache = LongCache(3, 65_536, heads, groups, dim)
    positions = torch.tensor([[65_535], [40_000], [2_047]], device="cuda", dtype=torch.int32)
    arguments = tensors(cache)
    got, blocks = decode.nsa(*arguments, positions, SPEC)
    want, wanted = reference.nsa(*double(arguments), positions, SPEC)
    assert torch.equal(blocks, wanted)
    assert relative(got, want) <= LIMIT[torch.bfloat16]
    exact = cache.arguments(torch.float64)
    for kv, kv64, window in ((cache.sel, exact[3], None), (cache.win, exact[4], SPEC.window)):
        got = paged_attention(cache.q, kv, positions, window=window, backend="triton")
        want = paged_attention(exact[0], kv64, positions, window=window, backend="reference")
        assert relative(got, want) <= LIMIT[torch.bfloat16]


def captured(step):
    """A CUDA graph of `step`, and the outputs that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "sizes"),
    [(64, 4, (128, 128, 128)), (12, 2, (64, 64, 64)), (4, 4, (192, 128, 96)), (2, 2, (256, 256, 256))],
)
def test_steps_of_msa_agree_with_float64(heads, groups, sizes, dtype):
    x = msa_cases.make_inputs(4500, heads, groups, batch=3, sizes=sizes, dtype=dtype)
    msa_cases.check(x, [[4499], [2048], [30]], MSASpec())
    positions = torch.tensor([[4400], [2040], [0]]) + torch.arange(16)
    msa_cases.check(x, positions.tolist(), MSASpec())


@pytest.mark.parametrize(("batch", "capacity"), [(1, 65_536), (1, 131_072), (8, 32_768)])
def test_a_captured_graph_of_msa_serves_every_length(batch, capacity):
    spec = MSASpec()
    generator = torch.Generator(device="cuda").manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    pages = capacity // spec.block
    table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages).int() + 1
    q, index_q = normal(batch, 1, 64, 128), normal(batch, 1, 4, 128)
    kv = PagedKV(*(normal(batch * pages + 1, spec.block, 4, 128) for _ in "kv"), table)
    index_keys = normal(batch * pages + 1, spec.block, 1, 128)
    positions = torch.full((batch, 1), 700, device="cuda", dtype=torch.int32)

    def step():
        return (msa_decode(q, index_q, kv, index_keys, positions, spec, backend="triton"),)

    graph, (output,) = captured(step)
    for length in (1, 128, 2_048, 2_049, 5_000, capacity):
        positions.fill_(length - 1)
        positions[batch // 2 + 1 :] = max(0, length - 70)
        q.normal_()
        index_q.normal_()
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, step()[0])
        exact = [x.double() for x in (q, index_q, kv.k, kv.v, index_keys)]
        want, _ = reference.msa(*exact, table, positions, spec)
        assert relative(output, want) <= LIMIT[torch.bfloat16]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_captured_graph_serves_every_length(batch):
    cache = LongCache(batch, 32_768, 12, 2, 64)
    positions = torch.full((batch, 1), 700, device="cuda", dtype=torch.int32)

    def step():
        o = nsa_decode(*cache.arguments(), positions, SPEC, backend="triton")
        return o, paged_attention(cache.q, cache.sel, positions, backend="triton")

    graph, outputs = captured(step)
    for length in (1, 31, 64, 1025, 5_000, 32_768):
        positions.fill_(length - 1)
        positions[batch // 2 :] = max(0, length - 70)
        cache.q.normal_()
        cache.win.k.normal_()
        for x in outputs:
            x.fill_(torch.nan)
        graph.replay()
        for got, want in zip(outputs, step(), strict=True):
            assert torch.equal(got, want)
        exact = cache.arguments(torch.float64)
        want = nsa_decode(*exact, positions, SPEC, backend="reference")
        assert relative(outputs[0], want) <= LIMIT[torch.bfloat16]


def test_a_step_never_waits_for_the_device():
    cache = LongCache(2, 4_096, 12, 2, 64)
    positions = torch.full((2, 1), 4_000, device="cuda", dtype=torch.int32)
    wanted = nsa_decode(*cache.arguments(), positions, SPEC)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = nsa_decode(*cache.arguments(), positions, SPEC)
        paged_attention(cache.q, cache.win, positions, window=SPEC.window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(wanted, again)
