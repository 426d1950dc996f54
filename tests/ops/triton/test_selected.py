"""The Triton kernels of selected attention against the float64 reference: on a GPU where there is one, else
through Triton's interpreter at small sizes. Every kernel is also compiled for sm_80 and sm_90.

Memory that the host functions hand to kernels is poisoned, so an element nobody wrote shows.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops.reference import selected as reference
from nsa.ops.spec import NSASpec
from nsa.ops.triton import selected, selected_backward, selected_lists, selected_parts, selected_tiles
from nsa.ops.triton.launch_table import Launch
from nsa.ops.triton.selected_tiles import TilePlan

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = NSASpec(cmp_block=8, cmp_stride=8, sel_block=16, num_selected=4, window=32)
SMALL = NSASpec(cmp_block=8, cmp_stride=8, sel_block=8, num_selected=3, num_local=1, window=16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


def rows_of_blocks(batch: int, tokens: int, groups: int, spec: NSASpec, seed: int = 0) -> Tensor:
    """What block selection would give for random scores: forced blocks, the rest drawn, ascending, padded."""
    gen = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // spec.sel_block)
    own = (torch.arange(tokens) // spec.sel_block)[:, None]
    block = torch.arange(blocks)
    scores = torch.rand(batch, groups, tokens, blocks, generator=gen)
    scores = scores.masked_fill((block < spec.num_init) | (block > own - spec.num_local), 2.0)
    scores = scores.masked_fill(block > own, -1.0)
    best = scores.topk(min(spec.num_selected, blocks), dim=-1)
    chosen = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, spec.num_selected - chosen.shape[-1]), value=blocks)
    return chosen.masked_fill(chosen == blocks, -1).transpose(1, 2).to(torch.int32).contiguous()


def wild_indices(batch: int, tokens: int, groups: int, spec: NSASpec, seed: int = 0) -> Tensor:
    """Anything a user might hand over: repeats, the future, far outside, -1 anywhere, empty rows."""
    gen = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // spec.sel_block)
    shape = (batch, tokens, groups, spec.num_selected)
    chosen = torch.randint(-2, blocks + 2, shape, generator=gen, dtype=torch.int32)
    chosen[:, ::7] = -1
    chosen[:, 1::7, :, 1:] = chosen[:, 1::7, :, :1]
    chosen[:, 2::7, :, 0] = 2**31 - 1
    chosen[:, 3::7, :, -1] = -(2**31)
    return chosen


def inputs(
    batch: int, tokens: int, heads: int, groups: int, dk: int, dv: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """q, k, v, do."""
    gen = torch.Generator().manual_seed(seed)
    shapes = [(heads, dk), (groups, dk), (groups, dv), (heads, dv)]
    return [torch.randn(batch, tokens, *shape, generator=gen).to(dtype).to(DEVICE) for shape in shapes]


def error(got: Tensor, want: Tensor) -> float:
    """Relative error; absolute where the exact result is zero but for rounding, as a lone token's dq is."""
    size = float(want.double().norm())
    zero = size <= 1e-6 * want.numel() ** 0.5
    return float((got.double() - want.double()).norm()) / (max(1.0, want.numel() ** 0.5) if zero else size)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    indices: Tensor,
    spec: NSASpec,
    borders: Tensor | None = None,
    **change: Any,
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and all gradients against the reference. `change`: fields of the plans."""
    indices = indices.to(DEVICE)
    params = selected.default_params(q, k, v, spec.sel_block, spec.num_selected)
    tiles = {name: change[name] for name in ("method", "small", "large", "ratio") if name in change}
    params = replace(params, **tiles)
    back = selected_backward.default_params(q, k, v, spec.sel_block, spec.num_selected)
    if tiles.get("method") == "parts":  # only the forward has it
        tiles["method"] = "adaptive"
    back = replace(back, query=replace(back.query, **tiles))
    back = replace(back, **{name: change[name] for name in ("dq", "chunk", "block") if name in change})

    q64, k64, v64, do64 = (x.double() for x in (q, k, v, do))
    want_o, want_lse = reference.forward(q64, k64, v64, indices, spec.sel_block, borders)
    want = reference.backward(do64, q64, k64, v64, indices, want_o, want_lse, spec.sel_block, borders)
    o, lse = selected.forward(q, k, v, indices, spec.sel_block, borders, params=params)
    grads = selected.backward(do, q, k, v, indices, o, lse, spec.sel_block, borders, params=back)

    assert o.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert [g.dtype for g in grads] == [q.dtype] * 3
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    nothing = torch.isinf(want_lse)
    assert torch.equal(lse == -torch.inf, nothing)
    assert not o[nothing].any()
    assert not grads[0][nothing].any()
    limit = TOLERANCE[q.dtype]
    assert error(lse[~nothing], want_lse[~nothing]) <= limit
    for name, got, exact in zip(("o", "dq", "dk", "dv"), (o, *grads), (want_o, *want), strict=True):
        assert error(got, exact) <= limit, name
    return o, lse, *grads


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


NARROW, WIDE = Launch(16, 16, 4, 1), Launch(64, 32, 4, 1)


METHODS = ("query", "tile", "adaptive", "parts")
PAIRS = [("query", "fused"), ("tile", "separate"), ("adaptive", "fused"), ("parts", "separate")]


@pytest.mark.parametrize(
    ("method", "dq"),
    [*PAIRS, *(long(m, dq) for m in METHODS for dq in ("fused", "separate") if (m, dq) not in PAIRS)],
)
def test_every_method_agrees_with_the_reference(method: str, dq: str) -> None:
    tensors = inputs(1, 72, 6, 1, 32, 16, torch.float32)
    indices = rows_of_blocks(1, 72, 1, SMALL)
    check(*tensors, indices, SMALL, method=method, dq=dq, chunk=24, small=NARROW, large=WIDE, ratio=1.5)


@pytest.mark.parametrize(
    ("ratio", "borders"),  # parts alone, and beside tiles
    [(100.0, None), (1.5, [0, 40, 41, 140]), long(1.5, None), long(100.0, [0, 40, 41, 140])],
)
def test_parts_of_several_stretches(monkeypatch: pytest.MonkeyPatch, ratio: float, borders: list[int] | None) -> None:
    """Block by block, two stretches of at most 128 queries, long lists cut into items."""
    monkeypatch.setattr(selected_parts, "MAX_PARTS_BYTES", 1)
    monkeypatch.setattr(selected_parts, "CHUNK", 24)
    groups = 1 if borders is None else 2
    tensors = inputs(1, 140, 3 * groups, groups, 16, 32, torch.float32)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    indices = (rows_of_blocks if borders is None else wild_indices)(1, 140, groups, SPEC)
    plan = {"method": "parts", "ratio": ratio, "large": WIDE}
    first = check(*tensors, indices, SPEC, cu_seqlens, **plan)
    q, k, v, _ = tensors
    params = replace(selected.default_params(q, k, v, SPEC.sel_block, SPEC.num_selected), **plan)
    again = selected.forward(q, k, v, indices.to(DEVICE), SPEC.sel_block, cu_seqlens, params=params)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=False)), "output and log-sum-exp"


@pytest.mark.parametrize(("dk", "dv", "sel_block"), [(48, 80, 24), (64, 16, 8), (16, 32, 128)])
def test_parts_of_sizes_that_need_padding(dk: int, dv: int, sel_block: int) -> None:
    spec = NSASpec(cmp_block=8, cmp_stride=8, sel_block=sel_block, num_selected=3, num_local=1, window=32)
    tensors = inputs(1, 131, 3, 1, dk, dv, torch.float16)
    check(*tensors, rows_of_blocks(1, 131, 1, spec), spec, method="parts", ratio=100.0)


def test_adaptive_takes_large_tiles_only_where_their_union_is_cheaper() -> None:
    indices = rows_of_blocks(1, 72, 1, SMALL).to(DEVICE)
    blocks = selected_lists.number_blocks(72, SMALL.sel_block, None, indices.device)
    params = selected_tiles.TilePlan("adaptive", NARROW, WIDE, 1.5)
    large, small = selected_tiles.plan_tiles(indices, blocks, 6, params)
    assert (large.lists.queries, small.lists.queries, small.sub) == (10, 2, 5)
    assert large.lists.take is not None
    assert large.lists.take is small.lists.take
    for tile, take in enumerate(large.lists.take[0].tolist()):
        covered = small.lists.counts[0, tile * 5 : tile * 5 + 5, 2].sum()
        assert take == int(large.lists.counts[0, tile, 2] * 1.5 <= covered)
    assert set(large.lists.take[0].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("value", "method"),
    [
        *((torch.nan, method) for method in METHODS),
        *((torch.inf, "adaptive"), long(torch.inf, "query"), long(torch.inf, "tile"), long(torch.inf, "parts")),
    ],
)
def test_keys_that_are_not_finite_reach_only_queries_that_chose_them(method: str, value: float) -> None:
    q, k, v, _ = inputs(1, 72, 6, 1, 32, 16, torch.float32)
    indices = torch.tensor([[0, 2], [0, -1]], dtype=torch.int32, device=DEVICE).repeat(36, 1)[None, :, None]
    plan = TilePlan(method, NARROW, WIDE, 100.0 if method == "parts" else 1.5)
    want = selected.forward(q, k, v, indices, SMALL.sel_block, None, plan)
    k = k.index_fill(1, torch.arange(2 * SMALL.sel_block, 3 * SMALL.sel_block, device=DEVICE), value)
    got = selected.forward(q, k, v, indices, SMALL.sel_block, None, plan)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[:, 1::2], b[:, 1::2])
        assert not a[:, 3 * SMALL.sel_block :: 2].isfinite().any()


@pytest.mark.parametrize("borders", [None, [0, 13, 14, 50, 72]])
@pytest.mark.parametrize("queries", [1, 10, 32])
def test_marked_lists_equal_compared_lists(
    monkeypatch: pytest.MonkeyPatch, queries: int, borders: list[int] | None
) -> None:
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    batch = 2 if borders is None else 1
    for indices in (rows_of_blocks(batch, 72, 2, SMALL), wild_indices(batch, 72, 2, SMALL)):
        found = []
        for limit in (1, 4096):
            monkeypatch.setattr(selected_tiles, "FEWEST_MARKED", limit)
            blocks = selected_lists.number_blocks(72, SMALL.sel_block, cu_seqlens, torch.device(DEVICE))
            lists = selected_tiles.tile_lists(indices.to(DEVICE), blocks, queries, ratio=2.0)
            assert lists.take is not None
            kinds = lists.counts.flatten(0, 1).tolist()
            rows = lists.entries.flatten(0, 1).tolist()
            found.append(
                [
                    (counts, *(sorted(row[a:b]) for a, b in pairwise([0, *counts])))
                    for row, counts in zip(rows, kinds, strict=True)
                ]
                + lists.take.tolist()
            )
        assert found[0] == found[1]


@pytest.mark.parametrize("per_group", [1, long(2), 3, 4, long(6), long(8), 12, 16])
def test_every_group_size(per_group: int) -> None:
    tensors = inputs(1, 41, per_group, 1, 16, 16, torch.float32)
    check(*tensors, rows_of_blocks(1, 41, 1, SMALL), SMALL, method="adaptive", chunk=24)


def test_more_heads_than_rows_in_a_tile() -> None:
    tensors = inputs(1, 19, 40, 1, 16, 16, torch.float32)
    tile = Launch(16, 32, 4, 1)
    check(*tensors, rows_of_blocks(1, 19, 1, SMALL), SMALL, method="query", small=tile, large=tile)


def test_one_query_per_program() -> None:
    tensors = inputs(1, 30, 16, 1, 16, 16, torch.float32)
    check(*tensors, rows_of_blocks(1, 30, 1, SMALL), SMALL, method="query", small=Launch(16, 16, 1, 1), dq="separate")


@pytest.mark.parametrize("tokens", [1, 17, long(63), 65])
def test_odd_lengths(tokens: int) -> None:
    tensors = inputs(2, tokens, 4, 1, 16, 32, torch.float32)
    check(*tensors, rows_of_blocks(2, tokens, 1, SPEC), SPEC, dq="fused")
    check(*tensors, rows_of_blocks(2, tokens, 1, SPEC), SPEC, method="tile", dq="separate")


@pytest.mark.parametrize("sel_block", [8, 24, long(48), 64, long(128)])
def test_every_block_size(sel_block: int) -> None:
    spec = NSASpec(cmp_block=8, cmp_stride=8, sel_block=sel_block, num_selected=3, num_local=1, window=32)
    tokens = min(140, 4 * sel_block + 3)
    tensors = inputs(1, tokens, 2, 1, 16, 16, torch.float32)
    for dq in ("fused", "separate"):
        check(*tensors, rows_of_blocks(1, tokens, 1, spec), spec, dq=dq, chunk=40)


@pytest.mark.parametrize(("dk", "dv"), [(48, 80), long(96, 64), (64, 128)])
def test_head_sizes_that_differ_and_need_padding(dk: int, dv: int) -> None:
    tensors = inputs(1, 49, 4, 2, dk, dv, torch.float16)
    for dq in ("fused", "separate"):
        check(*tensors, rows_of_blocks(1, 49, 2, SPEC), SPEC, dq=dq)


BORDERS = [[0, 60], [0, 1, 1, 34, 60], [0, 0, 16, 17, 50, 60, 60]]


@pytest.mark.parametrize("borders", BORDERS)
def test_packed_documents(borders: list[int]) -> None:
    tensors = inputs(1, 60, 6, 1, 16, 16, torch.float32)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    for dq in ("fused", "separate"):
        check(*tensors, wild_indices(1, 60, 1, SPEC), SPEC, cu_seqlens, method="adaptive", dq=dq, chunk=24)


def test_packed_equals_each_document_alone() -> None:
    q, k, v, do = inputs(1, 50, 4, 2, 16, 16, torch.float32)
    borders = [0, 21, 22, 50]
    parts = [rows_of_blocks(1, b - a, 2, SPEC) for a, b in pairwise(borders)]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    whole = check(q, k, v, do, torch.cat(parts, 1), SPEC, cu_seqlens, dq="separate")
    for part, (a, b) in zip(parts, pairwise(borders), strict=True):
        alone = check(q[:, a:b], k[:, a:b], v[:, a:b], do[:, a:b], part, SPEC, dq="separate")
        for got, want in zip(whole, alone, strict=True):
            assert error(got[:, a:b], want) <= 1e-6


@pytest.mark.parametrize(
    ("method", "dq"),
    [
        *PAIRS,
        *(long(method, dq) for method in METHODS for dq in ("fused", "separate") if (method, dq) not in PAIRS),
    ],
)
def test_any_index_is_masked_or_counted_once(method: str, dq: str) -> None:
    tensors = inputs(2, 50, 3, 1, 16, 16, torch.float32)
    check(*tensors, wild_indices(2, 50, 1, SPEC), SPEC, method=method, dq=dq, chunk=16)


def test_no_block_chosen_at_all() -> None:
    tensors = inputs(1, 40, 4, 2, 16, 16, torch.float32)
    indices = torch.full((1, 40, 2, SPEC.num_selected), -1, dtype=torch.int32)
    o, lse, *grads = check(*tensors, indices, SPEC)
    assert not any(x.any() for x in (o, *grads))
    assert (lse == -torch.inf).all()


def test_impossible_borders_touch_nothing_outside() -> None:
    tensors = inputs(1, 50, 4, 2, 16, 16, torch.float32)
    borders = torch.tensor([7, 900, -3, 20, 10, 12], dtype=torch.int32, device=DEVICE)
    check(*tensors, wild_indices(1, 50, 2, SPEC), SPEC, borders, chunk=16)


def strided(x: Tensor) -> Tensor:
    """The same values, cut out of the middle of a larger tensor."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), 7.0, dtype=x.dtype, device=x.device)
    wide[:, :, 1 : 1 + x.shape[2]] = x
    return wide[:, :, 1 : 1 + x.shape[2]]


def test_inputs_of_any_stride() -> None:
    q, k, v, do = inputs(2, 12, 4, 2, 16, 16, torch.float32)
    indices = rows_of_blocks(2, 12, 2, SMALL)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do)]
    last_apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, do)]
    spread = indices.repeat_interleave(2, -1)[..., ::2]
    for tensors in (heads_first, last_apart, [strided(x) for x in (q, k, v, do)]):
        assert not all(x.is_contiguous() for x in tensors)
        check(*tensors, spread, SMALL, dq="separate")
    check(q, k, v, do[:1, :1, :1, :1].expand_as(do), indices, SMALL, dq="fused")
    check(q, k, v, do[:, :1].expand_as(do), indices, SMALL, dq="separate")


def test_many_indices_per_query() -> None:
    spec = NSASpec(cmp_block=4, cmp_stride=4, sel_block=4, num_selected=40, window=8)
    tensors = inputs(1, 24, 4, 1, 16, 16, torch.float32)
    indices = torch.cat([rows_of_blocks(1, 24, 1, spec)[..., :20], wild_indices(1, 24, 1, spec)[..., 20:]], -1)
    check(*tensors, indices, spec, method="tile")


def test_gradients_are_the_same_every_time_when_asked_for() -> None:
    q, k, v, do = inputs(1, 40, 4, 1, 16, 16, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        back = selected_backward.default_params(q, k, v, SPEC.sel_block, SPEC.num_selected)
        assert back.dq == "separate"
        indices = rows_of_blocks(1, 40, 1, SPEC).to(DEVICE)
        o, lse = selected.forward(q, k, v, indices, SPEC.sel_block, None)
        first = selected.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, None, params=replace(back, chunk=16))
        again = selected.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, None, params=replace(back, chunk=16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("at_once", [10, 3], ids=["pairs", "parts-of-pairs"])
def test_long_sequences_in_turns_and_with_wide_offsets(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """What only very long sequences use: pairs, or `at_once` of their 10 blocks, inverted one at a time, and 64-bit
    offsets in the gathers."""
    monkeypatch.setattr(selected_lists, "MAX_TABLE_BYTES", selected_lists.table_bytes(40, at_once))
    assert len(selected_lists.plan_turns(40, 10, 4)) == 4 * -(-10 // at_once)
    monkeypatch.setattr(selected_backward, "extent", lambda x: 1 << 31)
    tensors = inputs(2, 40, 4, 2, 16, 16, torch.float32)
    check(*tensors, rows_of_blocks(2, 40, 2, SPEC), SPEC, dq="fused", chunk=16)


def test_keys_that_no_query_reads_have_no_gradient(monkeypatch) -> None:
    q, k, v, do = inputs(1, 20, 4, 2, 16, 16, torch.float32)
    q, do, indices = q[:, :0], do[:, :0], torch.zeros(1, 0, 2, SPEC.num_selected, dtype=torch.int32, device=DEVICE)
    o, lse = selected.forward(q, k, v, indices, SPEC.sel_block, None, q_offset=20)
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *sizes, **options: x.new_full(*sizes, float("nan"), **options))
    _, dk, dv = selected.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, None, q_offset=20)
    assert dk.shape == k.shape
    assert not dk.any()
    assert not dv.any()


def test_an_empty_batch_gives_empty_results() -> None:
    q, k, v, do = inputs(0, 20, 4, 2, 16, 16, torch.float32)
    indices = torch.zeros(0, 20, 2, SPEC.num_selected, dtype=torch.int32, device=DEVICE)
    o, lse = selected.forward(q, k, v, indices, SPEC.sel_block, None)
    assert o.shape == (0, 20, 4, 16)
    assert lse.shape == (0, 20, 4)
    assert [g.shape for g in selected.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, None)] == [
        q.shape,
        k.shape,
        v.shape,
    ]


def test_refusal_names_unsupported_inputs() -> None:
    q, _, v, _ = inputs(1, 4, 2, 1, 16, 16, torch.float32)
    assert selected.refusal(q, v) is None
    assert "float64" in (selected.refusal(q.double(), v.double()) or "")


@pytest.mark.parametrize("packed", [False, True])
def test_block_lists_hold_exactly_the_queries_that_chose(packed: bool) -> None:
    tokens, groups = 200, 2
    indices = wild_indices(2 - packed, tokens, groups, SPEC).to(DEVICE)
    borders = torch.tensor([0, 3, 3, 150, 200], dtype=torch.int32, device=DEVICE) if packed else None
    blocks = selected_lists.number_blocks(tokens, SPEC.sel_block, borders, indices.device)
    turn = selected_lists.Turn(1, indices.shape[0] * groups - 1, 5, blocks.count - 8)
    first, pairs, first_block, num_blocks = turn
    lists = selected_lists.block_lists(indices, blocks, 32, turn)
    doc = blocks.doc_start.tolist() if packed else [0] * tokens
    items, slots = 0, 0
    for pair in range(pairs):
        batch, group = divmod(first + pair, groups)
        want: dict[int, list[int]] = {}
        for t, row in enumerate(indices[batch, :, group].tolist()):
            for j in {j for j in row if 0 <= j <= (t - doc[t]) // SPEC.sel_block}:
                want.setdefault(doc[t] + j * SPEC.sel_block, []).append(t)
        for number in range(blocks.count):
            cell = pair * num_blocks + number - first_block
            start = int(blocks.starts[number]) if packed else number * SPEC.sel_block
            queries = want.pop(start, [])
            if not first_block <= number < first_block + num_blocks:
                continue
            begin, count = int(lists.offsets[cell]), int(lists.counts[cell])
            assert lists.queries[begin : begin + count].tolist() == queries
            parts = max(1, -(-count // 32))
            assert int(lists.item_first[cell]) == items
            assert lists.item_block[items : items + parts].tolist() == [cell] * parts
            assert int(lists.slot_first[cell]) == (slots if parts > 1 else -1)
            items, slots = items + parts, slots + (parts if parts > 1 else 0)
        assert not want
    assert lists.totals.tolist() == [items, slots]
    assert items <= lists.max_items
    assert slots <= lists.max_slots


@pytest.mark.parametrize("marked", [1, 4096])
@pytest.mark.parametrize("queries", [1, 5, 32])
def test_tile_lists_hold_the_union_and_the_queries_that_chose_each_block(
    monkeypatch: pytest.MonkeyPatch, queries: int, marked: int
) -> None:
    monkeypatch.setattr(selected_tiles, "FEWEST_MARKED", marked)
    tokens = 130
    indices = torch.cat([rows_of_blocks(1, tokens, 1, SPEC), wild_indices(1, tokens, 1, SPEC)], 2).to(DEVICE)
    blocks = selected_lists.number_blocks(tokens, SPEC.sel_block, None, indices.device)
    lists = selected_tiles.tile_lists(indices, blocks, queries)
    for pair in range(2):
        for tile in range(lists.tiles):
            first = tile * queries
            want: dict[int, int] = {}
            for s, row in enumerate(indices[0, first : first + queries, pair].tolist()):
                for j in row:
                    if 0 <= j <= (first + s) // SPEC.sel_block:
                        want[j * SPEC.sel_block] = want.get(j * SPEC.sel_block, 0) | 1 << s
            whole, over, count = lists.counts[pair, tile].tolist()
            entries = [(e & 0xFFFFFFFF, e >> 32 & 0xFFFFFFFF) for e in lists.entries[pair, tile, :count].tolist()]
            assert dict(entries) == want
            assert len(entries) == len(want)
            everyone = (1 << min(queries, tokens - first)) - 1
            full = {s for s, mask in want.items() if mask == everyone and s + SPEC.sel_block - 1 <= first}
            assert {s for s, _ in entries[:whole]} == full
            assert {s for s, _ in entries[:over]} == {s for s in want if s + SPEC.sel_block - 1 <= first}
