"""Attention over a cache on Triton gives what the reference gives, block for block.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise. Fresh memory and unused pages hold NaN.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from nsa.ops import NSASpec, PagedKV, nsa_decode, paged_attention
from nsa.ops.reference import decode as reference
from nsa.ops.triton import decode, launch_table, selection
from nsa.ops.triton.decode import Launches
from nsa.ops.triton.decode_choice import pick_blocks
from nsa.ops.triton.launch_table import Card, Launch
from tests.ops.cases import SMALL, Inputs, make_inputs
from tests.ops.decode_cases import make_cache
from tests.ops.triton.branch_cases import DEVICE, LIMIT

pytestmark = pytest.mark.usefixtures("poisoned")
WIDE = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, num_init=1, num_local=2, window=20)
LARGE = Card("sm90", 132)


def launches(programs=100, columns=16):
    """As many parts as `programs` for a card with one multiprocessor, and small tiles."""
    keys = Launch(programs, columns, 1, 1, depth=1)
    return Launches(keys, keys)


def tensors(cache):
    """The arguments of a backend's `nsa`, without positions and spec."""
    pools = [x for kv in (cache.cmp, cache.sel, cache.win) for x in vars(kv).values()]
    return [x.to(DEVICE) for x in (cache.q, cache.gates, *pools)]


def double(arguments):
    return [x.double() if x.is_floating_point() else x for x in arguments]


def check(x, positions, spec, params=None, ring=None):
    """Output and blocks against the reference in float64; returns both."""
    positions = torch.tensor(positions, dtype=torch.int32)
    arguments = tensors(make_cache(x, positions, spec, ring=ring))
    positions = positions.to(DEVICE)
    got, blocks = decode.nsa(*arguments, positions, spec, params)
    want, wanted_blocks = reference.nsa(*double(arguments), positions, spec)
    assert torch.equal(blocks, wanted_blocks)
    assert got.dtype == x.q.dtype
    assert float((got.double() - want).norm() / want.norm()) <= LIMIT[x.q.dtype]
    assert (got[positions < 0] == 0).all()
    return got, blocks


def inputs(tokens, **settings):
    return make_inputs(tokens, **({"spec": WIDE, "dtype": torch.float32} | settings))


def repeated(x, batch):
    return Inputs(*(t.expand(batch, *t.shape[1:]) for t in x.tensors()), None)


@pytest.mark.parametrize(("programs", "ring"), [(40, None), (1, 20), (7, 33)])
def test_lengths_around_every_border(programs, ring):
    borders = [0, 6, 7, 10, 11, 15, 16, 19, 20, 63, 64, 79, 129]
    x = repeated(inputs(130, heads=1), len(borders))
    check(x, [[t] for t in borders], WIDE, launches(programs * len(borders)), ring)


@pytest.mark.parametrize(
    ("heads", "groups", "dk", "dv", "dtype"),
    [(1, 1, 16, 32, torch.float32), (4, 1, 32, 16, torch.float16), (12, 2, 48, 16, torch.float32),
     (16, 1, 16, 16, torch.float16), (20, 1, 16, 80, torch.float32)],
)  # fmt: skip
def test_heads_and_types(heads, groups, dk, dv, dtype):
    x = inputs(100, batch=2, heads=heads, groups=groups, dk=dk, dv=dv, dtype=dtype)
    check(x, [[99], [70]], WIDE, launches(12), ring=30)


@pytest.mark.parametrize(("new", "ring"), [(2, None), (5, 24)])
def test_several_new_tokens_with_padding(new, ring):
    x = inputs(140, batch=4, heads=3)
    positions = torch.tensor([0, 62, 130, 9])[:, None] + torch.arange(new)
    positions[1, new // 2 :] = -1
    positions[3] = -1
    check(x, positions.tolist(), WIDE, launches(40), ring)


def test_pieces_of_the_queries_change_nothing(monkeypatch):
    """With as many parts as there are tiles, that is: more parts for fewer queries would round differently."""
    x = inputs(80, heads=1)
    positions = [[72, 73, -1]]
    whole = check(x, positions, WIDE, launches(1000))
    pieces = mock.Mock(wraps=decode._nsa_piece)
    monkeypatch.setattr(decode, "_nsa_piece", pieces)
    monkeypatch.setattr(decode, "SCORE_BYTES", 120)
    for got, want in zip(check(x, positions, WIDE, launches(1000)), whole, strict=True):
        assert torch.equal(got, want)
    assert pieces.call_count == 2


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,  # blocks of 4 tokens
        NSASpec(8, 8, 8, 5, 2, 2, 7),  # no share for the neighbour
        NSASpec(16, 4, 16, 3, 0, 0, 1),  # blocks stick out by three quarters; nothing forced
        NSASpec(6, 3, 24, 3, 0, 1, 31),  # pages of 72 tokens; eight compressed tokens in a block
        NSASpec(4, 4, 12, 5, 2, 0, 200),  # three compressed tokens in a block; a window of everything
        NSASpec(8, 4, 16, 3, 1, 2, 16),  # all places forced
        NSASpec(4, 1, 32, 40, 1, 2, 16),  # more places than blocks; more compressed tokens in a block than a tile has
        NSASpec(32, 16, 64, 2, 0, 1, 64),
    ],
)
def test_every_geometry(spec):
    x = inputs(150, spec=spec, batch=2, heads=2)
    check(x, [[149, 148], [97, 31]], spec, launches(30))


def test_the_default_launches():
    x = inputs(300, spec=NSASpec(num_selected=3), heads=4, groups=2)
    check(x, [[299]], NSASpec(num_selected=3), ring=520)


@pytest.mark.parametrize(("heads", "groups", "dv"), [(4, 2, 80), (20, 1, 64)])
def test_one_sequence_on_a_large_card(monkeypatch, heads, groups, dv):
    """Small tiles, the chosen block kept in registers, rows merged in pieces."""
    spec = NSASpec(num_selected=5, window=64)
    monkeypatch.setattr(decode, "card_of", lambda x: Card("sm80", LARGE.multiprocessors))
    x = inputs(400, spec=spec, heads=heads, groups=groups, dv=dv, dtype=torch.float16)
    check(x, [[399]], spec, ring=80)
    check(repeated(x, 2), [[40], [-1]], spec)


@pytest.mark.parametrize(
    ("spec", "values", "multiprocessors", "apart", "dtype", "ring"),
    [(WIDE, 2, 1000, True, torch.float16, 33), (NSASpec(8, 8, 8, 5, 2, 2, 7), 2, 1000, True, torch.float16, None),
     (WIDE, 2, 1000, False, torch.float32, None),  # of which registers would hold too little
     (WIDE, 2, 40, False, torch.float16, None),  # more programs than multiprocessors
     (NSASpec(4, 4, 12, 5, 2, 0, 20), 2, 1000, False, torch.float16, None)],  # blocks of three keys are padded
)  # fmt: skip
def test_values_of_compressed_tokens_apart(monkeypatch, spec, values, multiprocessors, apart, dtype, ring):
    """Programs of the second kernel add up the values, of sequences from none to all of their tiles."""
    monkeypatch.setattr(decode, "card_of", lambda x: Card("sm80", multiprocessors))
    merged = mock.Mock(wraps=decode.merge_plan)
    monkeypatch.setattr(decode, "merge_plan", merged)
    positions = [[-1], [6], [7], [70], [149]]
    x = repeated(inputs(150, spec=spec, heads=3, dv=24, dtype=dtype), len(positions))
    together, _ = check(x, positions, spec, launches(), ring)
    tiles = merged.call_args.args[1]
    got, _ = check(x, positions, spec, replace(launches(), values=values), ring)
    assert tiles >= 2
    assert merged.call_args.args[1] == (-(-tiles // values) if apart else tiles)
    assert float((got - together).norm() / together.norm()) <= LIMIT[dtype]


def test_launches_for_one_sequence():
    """One tile for every program while that fills no more than the card; the table's launches otherwise."""
    q, v = (torch.empty(1, 1, heads, 128, dtype=torch.float16, device="meta") for heads in (64, 4))
    usual = decode.default_params(q.expand(32, -1, -1, -1), v, 4096, LARGE)
    for keys, columns, warps in ((512, 32, 4), (2048, 64, 8), (4096, 128, 8)):
        params = decode.default_params(q, v, keys, LARGE)
        tiles = -(-keys // columns)
        assert params.cmp.columns == columns
        assert params.blocks.num_warps == warps
        assert decode.num_parts(4, params.cmp, LARGE, tiles) == tiles
    assert decode.default_params(q, v, 8192, LARGE).cmp == usual.cmp
    assert decode.default_params(q.expand(-1, 2, -1, -1), v, 512, LARGE) == usual
    assert decode.merge_plan(64, 32, 24, 128, LARGE)["BLOCK_DV"] == 32
    assert decode.merge_plan(2048, 3, 3, 128, LARGE)["BLOCK_DV"] == 128


def test_ties_go_to_the_lower_index():
    x = inputs(150, heads=3)
    x.q.zero_()
    _, blocks = check(x, [[149]], WIDE, launches(30))
    assert blocks[0, 0, 0].tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_ties_between_splits_with_different_maxima(shift):
    """Whole blocks repeated, beside one that lifts the maximum of its split far above the others'."""
    spec = NSASpec(8, 4, 16, 6, 1, 1, 16)
    x = inputs(400, spec=spec, heads=2)
    x.k_cmp[:] = x.k_cmp[:, :4].repeat(1, 25, 1, 1)[:, : x.k_cmp.shape[1]]
    x.k_cmp[:, 50] += shift * x.q[:, -1:, 0] / x.q[:, -1, 0].norm() ** 2
    _, blocks = check(x, [[399]], spec, launches(30))
    picked = blocks[0, 0, 0].tolist()
    assert picked[0] == 0
    assert picked[-1] == 24
    if shift == 0.0:
        assert picked == [0, 1, 2, 3, 4, 24]


@triton.jit
def _pick_kernel(
    keys, table, out, found, first, stop, BLOCK: tl.constexpr, FREE: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    block = tl.arange(0, BLOCK)
    key = tl.load(keys + block)
    key = tl.where((block >= first) & (block < stop), key, -1)
    slot = tl.program_id(0) - 1  # of a forced block: nothing is found
    mine, page = pick_blocks(key, out, slot, table, first, stop, slot == 0, 2, 4, BLOCK, FREE, INTERPRETED)
    tl.store(found + 2 * slot + 2, mine)
    tl.store(found + 2 * slot + 3, page)


KEYS = ["random", "ties", "few values", "rising", "one line", "zeros"]
PICKED = [(20, 5), (33, 16), (128, 13), (300, 1), (1024, 13), (1024, 40), (2048, 16)]


@pytest.mark.parametrize(
    ("kind", "blocks", "free"),
    [
        pytest.param(kind, *sizes, marks=() if sizes in ((33, 16), (1024, 13)) or kind == "ties" else pytest.mark.long)
        for kind in KEYS
        for sizes in PICKED
    ],
)
def test_the_best_blocks_are_picked(kind, blocks, free):
    """Whatever the keys, the lower index before the higher; also where many are left to compare."""
    size = max(32, triton.next_power_of_2(blocks))
    keys = torch.randint(0, 2**31 - 2**24, (size,), generator=torch.Generator().manual_seed(blocks)).int()
    if kind == "ties":
        keys[: blocks // 2] = keys[-(blocks // 2) :]
    elif kind == "few values":
        keys %= 3
    elif kind == "rising":
        keys = keys.sort().values
    elif kind == "one line":
        keys[::32] |= 1 << 30
    elif kind == "zeros":
        keys.zero_()
    first, stop = 1, blocks - 1
    table = torch.arange(size) * 3 + 1
    out, found = torch.full((free,), -7).int().to(DEVICE), torch.full((1 + free, 2), -7).int().to(DEVICE)
    constants = {"BLOCK": size, "FREE": free, "INTERPRETED": DEVICE == "cpu"}
    _pick_kernel[(1 + free,)](keys.to(DEVICE), table.int().to(DEVICE), out, found, first, stop, **constants)
    best = sorted(range(first, stop), key=lambda j: (-int(keys[j]), j))[:free]
    assert out.tolist() == sorted(best)
    assert found[0, 0] == 0
    assert sorted(found[1:].tolist()) == [[j, 3 * (j * 2 // 4) + 1] for j in sorted(best)]


def test_rows_longer_than_the_registers(monkeypatch):
    x = inputs(300, spec=SMALL, heads=2)
    wanted = check(x, [[299]], SMALL, launches(30))
    monkeypatch.setattr(decode, "MOST_KEPT", 16)
    decode.choice_plan.cache_clear()
    got = check(x, [[299]], SMALL, launches(30))
    decode.choice_plan.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_strides_do_not_matter():
    positions = torch.tensor([[99], [50]], dtype=torch.int32)
    arguments = tensors(make_cache(inputs(100, batch=2, heads=4, groups=2, dv=32), positions, WIDE))
    wanted, _ = decode.nsa(*arguments, positions.to(DEVICE), WIDE, launches())
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in arguments]
    heads_first[2] = torch.stack([arguments[2], arguments[2]], dim=-1)[..., 0]
    wide = positions.repeat(1, 2)[:, ::2].to(DEVICE)
    assert torch.equal(wanted, decode.nsa(*heads_first, wide, WIDE, launches())[0])


def check_paged(x, positions, window, params, ring=None):
    positions = torch.tensor(positions, dtype=torch.int32)
    cache = make_cache(x, positions, WIDE, ring=ring)
    kv = [t.to(DEVICE) for t in vars(cache.win).values()]
    q, positions = cache.q.to(DEVICE), positions.to(DEVICE)
    got = decode.paged(q, *kv, positions, window, params)
    want = reference.paged(*double((q, *kv)), positions, window)
    assert float((got.double() - want).norm() / want.norm()) <= LIMIT[x.q.dtype]
    assert (got[positions < 0] == 0).all()


@pytest.mark.parametrize(("window", "ring"), [(None, None), (20, None), (20, 27), (1, 9), (1000, None)])
def test_dense_and_window_layers(window, ring):
    x = inputs(140, batch=4, heads=3, dk=32)
    positions = torch.tensor([0, 60, 130, 9])[:, None] + torch.arange(3)
    positions[1, 2:] = -1
    positions[3] = -1
    check_paged(x, positions.tolist(), window, launches(48), ring)
    check_paged(x, positions[:, :1].tolist(), window, launches(1, 32), ring)


@pytest.mark.parametrize("first", [60, 61, 62, 63, 64])
def test_windows_of_several_new_tokens_that_touch_one_tile_more(first):
    x = inputs(80, heads=4, dk=16, dtype=torch.float16)
    check_paged(x, [[first + i for i in range(4)]], 32, launches(100))


def test_bad_values_are_masked():
    """On a GPU nobody looks at them first: whatever they are, nothing outside the pools is read."""
    positions = torch.tensor([[70], [30]], dtype=torch.int32)
    cache = make_cache(inputs(80, batch=2, heads=2), positions, WIDE, ring=20)
    arguments = [x.nan_to_num() if x.is_floating_point() else x for x in tensors(cache)]
    for place in (4, 7, 10):  # tables and rings
        arguments[place] = torch.full_like(arguments[place], 1 << 30)
        arguments[place][0] = -(1 << 30)
    positions = torch.tensor([[1 << 30], [-5]], dtype=torch.int32, device=DEVICE)
    o, blocks = decode.nsa(*arguments, positions, WIDE, launches())
    assert o.isfinite().all()
    assert (o[1] == 0).all()
    assert blocks[0].min() >= 0
    assert blocks[0].max() < 192 // WIDE.sel_block
    assert (blocks[1] == -1).all()


def test_public_functions_run_the_kernels():
    positions = torch.tensor([[99], [50]], dtype=torch.int32)
    cache = make_cache(inputs(100, batch=2, heads=4, groups=2), positions, WIDE, ring=30)
    q, gates, *kv = cache.arguments()
    kv = [type(pool)(*(x.to(DEVICE) for x in vars(pool).values())) for pool in kv]
    q, gates, positions = q.to(DEVICE), gates.to(DEVICE), positions.to(DEVICE)
    got = nsa_decode(q, gates, *kv, positions, WIDE, backend="triton")
    torch.testing.assert_close(got, nsa_decode(q, gates, *kv, positions, WIDE, backend="reference"))
    assert isinstance(kv[1], PagedKV)
    got = paged_attention(q, kv[1], positions, backend="triton")
    torch.testing.assert_close(got, paged_attention(q, kv[1], positions, backend="reference"))


@pytest.mark.parametrize("refusal", [decode.refusal, selection.refusal])
def test_small_cards_take_64_heads_per_group_of_large_heads(refusal, monkeypatch):
    """With 128 heads of 256 a program needs 104 KiB of shared memory for decoding in bf16, 160 to select in fp32."""
    few, many, large = (torch.zeros(1, 1, heads, dim) for heads, dim in ((64, 256), (65, 128), (65, 256)))
    for capability, refused in ((86, [large]), (80, []), (90, [])):
        card = launch_table.Card(launch_table.card_class(capability), 84)
        monkeypatch.setattr(launch_table, "card_of", lambda _, card=card: card)
        for q in (few, many, large):
            assert (refusal(q, q[:, :, :1]) is not None) == any(q is other for other in refused)


def test_unsupported_inputs_are_refused_with_a_reason():
    q = torch.zeros(1, 1, 4, 16)
    pool = torch.zeros(3, 64, 2, 16)
    assert decode.refusal(q, pool) is None
    assert "float64" in (decode.refusal(q.double(), pool.double()) or "")
    assert "query heads" in (decode.refusal(q.repeat(1, 1, 100, 1), pool) or "")
    assert "at most 128 query" in (selection.refusal(q.repeat(1, 1, 100, 1), pool) or "")
    assert "compressed tokens" in (decode.refusal(q, pool, per_block=256) or "")
