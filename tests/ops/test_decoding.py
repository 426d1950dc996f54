"""New tokens over a cache read what the whole sequence reads at those positions, shown on the reference."""

import pytest
import torch

from nsa.errors import ArgumentError, BackendError
from nsa.ops import (
    MSASpec,
    NSASpec,
    PagedKV,
    RingKV,
    compressed_attention,
    dispatch,
    index_blocks,
    msa_attention,
    msa_decode,
    nsa_attention,
    nsa_decode,
    paged_attention,
    select_blocks,
    window_attention,
)
from nsa.ops.decoding import msa_decode_node, nsa_decode_node
from tests.ops.cases import SMALL, Inputs, make_inputs
from tests.ops.decode_cases import make_cache, make_msa_cache
from tests.ops.test_msa import loops
from tests.ops.test_msa import make_inputs as make_msa_inputs
from tests.ops.test_reference import causal

WIDE = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, num_init=1, num_local=2, window=20)
ODD = NSASpec(cmp_block=6, cmp_stride=3, sel_block=24, num_selected=3, num_init=0, num_local=1, window=31)


def whole(x: Inputs, spec: NSASpec):
    """Output and blocks of whole sequences."""
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, spec)
    return nsa_attention(*x.tensors(), spec), select_blocks(x.q, x.k_cmp, lse, spec)


def decode_with_blocks(q, gates, cmp, sel, win, positions, spec):
    """What `nsa_decode` gives, and the blocks that every query read, which the operator under it gives as well."""
    pools = [x for kv in (cmp, sel, win) for x in vars(kv).values()]
    _, blocks = nsa_decode_node(q, gates, *pools, positions, spec.as_ints(), None)
    return nsa_decode(q, gates, cmp, sel, win, positions, spec), blocks


def msa_with_blocks(q, index_q, kv, index_keys, positions, spec):
    """What `msa_decode` gives, and the blocks that every query read."""
    pools = (kv.k, kv.v, index_keys, kv.table)
    _, blocks = msa_decode_node(q, index_q, *pools, positions, spec.as_ints(), None)
    return msa_decode(q, index_q, kv, index_keys, positions, spec), blocks


def repeated(x: Inputs, batch: int) -> Inputs:
    """One sequence as a batch, so that one call has a query at every position."""
    return Inputs(*(t.expand(batch, *t.shape[1:]) for t in x.tensors()), None)


def assert_equal_at(positions, got, want):
    """Rows of `got` [B, n, ...] are those of `want` [B, S, ...] at `positions`; padding is 0."""
    row = torch.arange(positions.shape[0])[:, None]
    wanted = want[row, positions.clamp(min=0).long()]
    wanted = wanted.masked_fill((positions < 0).view(*positions.shape, *[1] * (got.dim() - 2)), 0.0)
    torch.testing.assert_close(got, wanted)


def combinations():
    """Heads, sizes and rings of the window; every pair of the first two once, the rest in `make test-long`."""
    layouts = [(1, 1, 16, 32), (4, 1, 16, 16), (12, 2, 32, 16), (16, 1, 16, 16)]
    specs = {"small": SMALL, "wide": WIDE, "odd": ODD}
    for i, layout in enumerate(layouts):
        for j, (name, spec) in enumerate(specs.items()):
            for k, ring in enumerate((None, "least", 64)):
                marks = () if k == (i + j) % 3 else pytest.mark.long
                yield pytest.param(spec, ring, layout, marks=marks, id=f"{layout}-{name}-{ring}")


@pytest.mark.parametrize(("spec", "ring", "layout"), combinations())
def test_a_step_at_every_position_is_the_whole_sequence(spec, ring, layout):
    tokens, (heads, groups, dk, dv) = 90, layout
    x = make_inputs(tokens, spec=spec, heads=heads, groups=groups, dk=dk, dv=dv)
    want, indices = whole(x, spec)
    every = repeated(x, tokens)
    positions = torch.arange(tokens, dtype=torch.int32)[:, None]
    cache = make_cache(every, positions, spec, ring=spec.window if ring == "least" else ring)
    got, blocks = decode_with_blocks(*cache.arguments(), positions, spec)
    assert_equal_at(positions, got, want.expand(tokens, *want.shape[1:]))
    assert torch.equal(blocks[:, 0], indices[0])


@pytest.mark.parametrize("ring", [None, WIDE.window + 6])
def test_chunks_of_sequences_of_different_lengths(ring):
    x = make_inputs(130, spec=WIDE, batch=4, heads=6, groups=2)
    want, _ = whole(x, WIDE)
    starts = torch.tensor([0, 5, 61, 123], dtype=torch.int32)
    positions = starts[:, None] + torch.arange(7, dtype=torch.int32)
    positions[1, 4:] = -1
    positions[2] = -1
    cache = make_cache(x, positions, WIDE, ring=ring)
    got, blocks = decode_with_blocks(*cache.arguments(), positions, WIDE)
    assert_equal_at(positions, got, want)
    assert (blocks[positions < 0] == -1).all()


@pytest.mark.parametrize(
    ("spec", "heads", "groups", "page"),
    [
        (MSASpec(16, 3), 1, 1, None),
        (MSASpec(16, 2), 8, 4, 16),
        (MSASpec(16, 4, 2, 1), 4, 2, 48),
        (MSASpec(32, 2, 0, 0), 4, 1, None),
        (MSASpec(16, 1), 2, 2, None),
        (MSASpec(16, 40), 2, 1, None),
    ],
    ids=str,
)
def test_a_step_of_msa_at_every_position_is_the_whole_sequence(spec, heads, groups, page):
    x = make_msa_inputs(101, heads, groups)
    wanted_blocks, want, *_ = loops(*x, spec)
    positions = torch.arange(101, dtype=torch.int32)[:, None]
    cache = make_msa_cache([t.expand(101, *t.shape[1:]) for t in x], positions, spec, page=page)
    got, blocks = msa_with_blocks(*cache, positions, spec)
    assert_equal_at(positions, got, want.detach().expand(101, *want.shape[1:]))
    assert torch.equal(blocks[:, 0], wanted_blocks[0])


@pytest.mark.parametrize("new", [1, 2, 5])
def test_chunks_of_msa_of_different_lengths(new):
    spec = MSASpec(16, 3)
    x = [t.detach() for t in make_msa_inputs(130, 4, 2, batch=4)]
    positions = torch.tensor([0, 61, 124, 9], dtype=torch.int32)[:, None] + torch.arange(new, dtype=torch.int32)
    positions[1, 1:] = -1
    positions[3] = -1
    got, blocks = msa_with_blocks(*make_msa_cache(x, positions, spec), positions, spec)
    assert_equal_at(positions, got, msa_attention(*x, spec)[0])
    wanted = index_blocks(*x[3:], spec)[torch.arange(4)[:, None], positions.clamp(min=0).long()]
    assert torch.equal(blocks, wanted.masked_fill(positions[..., None, None] < 0, -1))


def test_more_places_than_blocks_and_default_sizes():
    """At the default sizes, around the borders of blocks, compressed tokens and the window."""
    spec = NSASpec()
    tokens = 1100
    x = make_inputs(tokens, spec=spec, heads=2, groups=1)
    want, _ = whole(x, spec)
    borders = [
        0,
        15,
        30,
        31,
        32,
        46,
        47,
        48,
        62,
        63,
        64,
        65,
        127,
        128,
        510,
        511,
        512,
        513,
        1022,
        1023,
        1024,
        1025,
        1099,
    ]
    positions = torch.tensor(borders, dtype=torch.int32)[:, None]
    every = repeated(x, len(borders))
    cache = make_cache(every, positions, spec, ring=spec.window + 3)
    assert_equal_at(positions, nsa_decode(*cache.arguments(), positions, spec), want.expand(len(borders), -1, -1, -1))


def test_ties_go_to_the_lower_index():
    x = make_inputs(150, spec=WIDE, heads=3)
    x.q.zero_()
    positions = torch.tensor([[149]], dtype=torch.int32)
    _, blocks = decode_with_blocks(*make_cache(x, positions, WIDE).arguments(), positions, WIDE)
    assert blocks[0, 0, 0].tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("ring", [None, 23])
def test_window_layers_read_the_last_tokens(ring):
    x = make_inputs(70, spec=WIDE, heads=6, groups=2)
    positions = torch.arange(70, dtype=torch.int32)[:, None]
    cache = make_cache(repeated(x, 70), positions, WIDE, ring=ring)
    got = paged_attention(cache.q, cache.win, positions, window=WIDE.window)
    want = window_attention(x.q, x.k_win, x.v_win, WIDE)
    assert_equal_at(positions, got, want.expand(70, -1, -1, -1))


def test_dense_layers_read_all_tokens():
    x = make_inputs(70, spec=WIDE, batch=2, heads=6, groups=2)
    positions = torch.tensor([[66, 67, 68], [4, -1, -1]], dtype=torch.int32)
    cache = make_cache(x, positions, WIDE)
    got = paged_attention(cache.q, cache.sel, positions)
    assert_equal_at(positions, got, causal(x.q, x.k_sel, x.v_sel))
    assert got.is_contiguous()  # as compiled code expects


def test_a_batch_of_only_padding_gives_zeros():
    x = make_inputs(20, spec=WIDE, batch=2)
    positions = torch.full((2, 3), -1, dtype=torch.int32)
    cache = make_cache(x, positions, WIDE, ring=30)
    got, blocks = decode_with_blocks(*cache.arguments(), positions, WIDE)
    assert (got == 0).all()
    assert (blocks == -1).all()
    assert (paged_attention(cache.q, cache.sel, positions) == 0).all()


def test_no_gradient_and_no_tokens():
    x = make_inputs(20, spec=WIDE, requires_grad=True)
    positions = torch.tensor([[19]], dtype=torch.int32)
    cache = make_cache(x, positions, WIDE)
    assert not nsa_decode(*cache.arguments(), positions, WIDE).requires_grad
    none = positions[:, :0]
    assert nsa_decode(cache.q[:, :0], cache.gates[:, :0], cache.cmp, cache.sel, cache.win, none, WIDE).numel() == 0
    assert paged_attention(cache.q[:, :0], cache.sel, none).shape == (1, 0, 2, 16)


def test_shapes_without_a_device():
    x = make_inputs(20, spec=WIDE, dv=32)
    positions = torch.tensor([[19]], dtype=torch.int32)
    cache = make_cache(x, positions, WIDE, ring=20)

    def meta(kv):
        return type(kv)(*(t.to("meta") for t in vars(kv).values()))

    q, gates, *kv = cache.arguments()
    o, blocks = decode_with_blocks(q.to("meta"), gates.to("meta"), *map(meta, kv), positions.to("meta"), WIDE)
    assert (o.shape, blocks.shape, blocks.dtype) == ((1, 1, 2, 32), (1, 1, 1, 4), torch.int32)
    q, index_q, kv, keys = make_msa_cache(make_msa_inputs(20), positions, MSASpec(16, 3))
    o, blocks = msa_with_blocks(
        *(x.to("meta") for x in (q, index_q)), meta(kv), keys.to("meta"), positions.to("meta"), MSASpec(16, 3)
    )
    assert (o.shape, blocks.shape, blocks.dtype) == ((1, 1, 2, 32), (1, 1, 1, 3), torch.int32)


def arguments(**changes):
    x = make_inputs(40, spec=WIDE, batch=2, heads=4, groups=2)
    positions = torch.tensor([[30], [20]], dtype=torch.int32)
    cache = make_cache(x, positions, WIDE, ring=20)
    given = vars(cache) | {"positions": positions, "spec": WIDE}
    for name, change in changes.items():
        given[name] = change(given[name])
    return given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": lambda p: p.long()}, "positions: must be int32"),
        ({"positions": lambda p: p[:, 0]}, r"positions: must be \[B, n\] = \[2, 1\]"),
        ({"positions": lambda p: p + 400}, "positions: 430 is beyond the 128 tokens"),
        ({"gates": lambda g: g[..., :2]}, "gates: must be"),
        ({"sel": lambda s: PagedKV(s.k, s.v, s.table[0])}, r"sel.table: must be \[B, pages\]"),
        ({"sel": lambda s: PagedKV(s.k, s.v, s.table[:, :0])}, r"sel.table: must be \[B, pages\] = \[2, 1\]"),
        ({"sel": lambda s: PagedKV(s.k, s.v[..., :8], s.table)}, "sel.v: head size"),
        ({"sel": lambda s: PagedKV(s.k[:, :60], s.v[:, :60], s.table)}, "sel.k: a page must hold whole blocks of 16"),
        ({"sel": lambda s: PagedKV(s.k, s.v, s.table + 999)}, "sel: refers to"),
        ({"cmp": lambda c: PagedKV(c.k[:, :4], c.v[:, :4], c.table)}, "cmp.k: must hold 16 compressed tokens per page"),
        ({"cmp": lambda c: PagedKV(c.k[:, :, :1], c.v[:, :, :1], c.table)}, "cmp.v: must have sel.v's heads"),
        ({"win": lambda w: RingKV(w.k[:, :19], w.v[:, :19], w.slots)}, "win.k: a ring of 19 tokens is too short"),
        ({"win": lambda w: RingKV(w.k, w.v, w.slots + 9)}, "win: refers to"),
        ({"win": lambda w: RingKV(w.k, w.v, w.slots[:1])}, r"win.slots: must be \[B\] = \[2\]"),
        ({"q": lambda q: q[..., :8]}, "q: head size"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(changes, message):
    nsa_decode(**arguments())
    with pytest.raises(ArgumentError, match=message):
        nsa_decode(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": lambda p: p + 400}, "positions: 460 is beyond the 192 tokens"),
        ({"index_q": lambda q: q[:, :, :1]}, r"index_q: must start with \[B, n, G\] = \[2, 1, 2\]"),
        ({"index_q": lambda q: q.float()}, "index_q: must have q's type"),
        ({"index_q": lambda q: q[..., :8]}, "index_q: head size"),
        ({"index_keys": lambda k: k[:-1]}, r"index_keys: must be \[P, page, 1, E\]"),
        ({"index_keys": lambda k: k.float()}, "index_keys: must have q's type"),
        ({"spec": lambda s: MSASpec(128)}, "kv.k: a page must hold whole blocks of 128 tokens, got 64"),
        ({"kv": lambda kv: PagedKV(kv.k, kv.v, kv.table + 999)}, "kv: refers to"),
    ],
)
def test_wrong_arguments_of_msa_are_named(changes, message):
    positions = torch.tensor([[60], [40]], dtype=torch.int32)
    cache = make_msa_cache(make_msa_inputs(70, 4, 2, batch=2), positions, MSASpec(16, 3))
    given = dict(zip(("q", "index_q", "kv", "index_keys"), cache, strict=True))
    given |= {"positions": positions, "spec": MSASpec(16, 3)}
    assert not msa_decode(**given).requires_grad
    with pytest.raises(ArgumentError, match=message):
        msa_decode(**given | {name: change(given[name]) for name, change in changes.items()})


def test_wrong_windows_are_named():
    given = arguments()
    with pytest.raises(ArgumentError, match="window: must be given for a ring"):
        paged_attention(given["q"], given["win"], given["positions"])
    with pytest.raises(ArgumentError, match="window: must be None or at least 1"):
        paged_attention(given["q"], given["win"], given["positions"], window=0)


def test_a_backend_that_cannot_run_is_refused_and_counted():
    given = arguments()  # float64
    with pytest.raises(BackendError, match="operator 'decode'"):
        nsa_decode(**given, backend="triton")
    before = sum(n for (operator, _), n in dispatch.counters().items() if operator == "decode")
    nsa_decode(**given)
    assert sum(n for (operator, _), n in dispatch.counters().items() if operator == "decode") == before + 1
