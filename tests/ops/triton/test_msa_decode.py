"""Decoding of MSA on Triton gives what the reference gives, block for block.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise. Fresh memory and unused pages hold NaN.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from nsa.ops import MSASpec, PagedKV, msa_decode
from nsa.ops.reference import decode as reference
from nsa.ops.triton import msa_decode as kernels
from nsa.ops.triton.decode import Launches
from nsa.ops.triton.launch_table import Card, Launch
from tests.ops.decode_cases import make_msa_cache
from tests.ops.test_msa import make_inputs
from tests.ops.triton.branch_cases import DEVICE, LIMIT

pytestmark = pytest.mark.usefixtures("poisoned")
SPEC = MSASpec(block=16, num_selected=3)
LARGE = Card("sm90", 132)


def launches(programs=100, keys=16, columns=16):
    """As many parts as `programs` for a card with one multiprocessor; tiles of `keys` index keys and `columns` keys."""
    return Launches(Launch(programs, keys, 1, 1), Launch(programs, columns, 1, 1))


def tensors(q, index_q, kv, index_keys):
    """The arguments of a backend's `msa`, without positions and spec."""
    return [x.to(DEVICE) for x in (q, index_q, kv.k, kv.v, index_keys, kv.table)]


def check(x, positions, spec=SPEC, params=None, page=None):
    """Output and blocks against the reference in float64; returns both."""
    positions = torch.tensor(positions, dtype=torch.int32)
    arguments = tensors(*make_msa_cache(x, positions, spec, page=page))
    positions = positions.to(DEVICE)
    got, blocks = kernels.msa(*arguments, positions, spec, params)
    exact = [x.double() if x.is_floating_point() else x for x in arguments]
    want, wanted_blocks = reference.msa(*exact, positions, spec)
    assert torch.equal(blocks, wanted_blocks)
    assert got.dtype == arguments[0].dtype
    assert float((got.double() - want).norm() / want.norm()) <= LIMIT[got.dtype]
    assert (got[positions < 0] == 0).all()
    return got, blocks


def inputs(tokens, heads=2, groups=1, **settings):
    return make_inputs(tokens, heads, groups, **({"dtype": torch.float32} | settings))


def repeated(x, batch):
    return [t.expand(batch, *t.shape[1:]) for t in x]


@pytest.mark.parametrize(("programs", "keys"), [(1, 16), (3, 64), (400, 32)])
def test_lengths_around_every_border(programs, keys):
    borders = [0, 14, 15, 16, 31, 32, 46, 47, 48, 49, 63, 64, 79, 100, 129]
    x = repeated(inputs(130, heads=1), len(borders))
    check(x, [[t] for t in borders], params=launches(programs * len(borders), keys))


@pytest.mark.parametrize("per_group", [1, 2, 4])
@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.float16), (2, torch.float32), (4, torch.float16)])
def test_heads_and_types(groups, dtype, per_group):
    x = inputs(100, groups * per_group, groups, batch=2, dtype=dtype, sizes=(48, 16, 80))
    check(x, [[99], [70]], params=launches(12))


@pytest.mark.parametrize("new", [2, 3, 4, 5])
def test_several_new_tokens_with_padding(new):
    x = inputs(140, 4, 2, batch=4)
    positions = torch.tensor([0, 46, 130, 9])[:, None] + torch.arange(new)
    positions[1, new // 2 :] = -1
    positions[3] = -1
    check(x, positions.tolist(), params=launches(24))


def test_more_rows_than_a_tile_has(monkeypatch):
    """Queries x groups are split into tiles of rows, in the middle of a query too."""
    monkeypatch.setattr(kernels, "MOST_ROWS", 16)
    check(inputs(140, 3, 3, batch=2), [list(range(120, 127)), [*range(60, 66), -1]], params=launches(40))


def test_pieces_of_the_queries_change_nothing(monkeypatch):
    """With as many parts as there are tiles, that is: more parts for fewer queries would round differently."""
    x = inputs(80, heads=1)
    whole = check(x, [[72, 73, -1]], params=launches(1000))
    pieces = mock.Mock(wraps=kernels._piece)
    monkeypatch.setattr(kernels, "_piece", pieces)
    monkeypatch.setattr(kernels, "SCORE_BYTES", 128)
    for got, want in zip(check(x, [[72, 73, -1]], params=launches(1000)), whole, strict=True):
        assert torch.equal(got, want)
    assert pieces.call_count == 2


@pytest.mark.parametrize(
    ("spec", "params", "page"),
    [
        (MSASpec(16, 4, 2, 1), launches(30, 64), 16),  # a tile of index keys over four pages
        (MSASpec(64, 2), launches(30, 16, 32), None),  # a block in four parts, attended in two tiles
        (MSASpec(16, 2, 0, 0), launches(30, 32), 48),  # nothing forced: the own block has a score
        (MSASpec(64, 1, 0, 0), launches(30, 16), None),  # the same, in parts
        (MSASpec(16, 3, 1, 2), launches(30), None),  # every block is forced
        (
            MSASpec(16, 20, 1, 1),
            launches(300, 32),
            None,
        ),  # more than 16 free places, more places than blocks in one row
        (MSASpec(32, 1), launches(1, 128, 32), 96),
    ],
)
def test_every_geometry(spec, params, page):
    check(inputs(400, batch=2, heads=2), [[399, 398], [97, 31]], spec, params, page)


def test_the_default_launches():
    check(inputs(300, 4, 2, sizes=(32, 32, 32)), [[299]], MSASpec(64, 3))


@pytest.mark.parametrize(("heads", "groups", "sizes"), [(4, 2, (32, 80, 16)), (20, 1, (64, 64, 64))])
def test_one_sequence_on_a_large_card(monkeypatch, heads, groups, sizes):
    """One tile a program, the chosen block kept in registers, rows merged in pieces."""
    for module in (kernels, kernels.decode):
        monkeypatch.setattr(module, "card_of", lambda x: Card("sm80", LARGE.multiprocessors))
    x = inputs(700, heads, groups, dtype=torch.float16, sizes=sizes)
    check(x, [[699]], MSASpec(64, 5))
    check(repeated(x, 2), [[40], [-1]], MSASpec(64, 5))


def test_launches_for_one_sequence():
    """A tile of index keys for every program while all of them fit the card at once; the table's launches otherwise."""
    q, index_q, v = (torch.empty(1, 1, heads, 128, dtype=torch.float16, device="meta") for heads in (64, 4, 4))
    many = kernels.default_params(*(x.expand(32, -1, -1, -1) for x in (q, index_q)), v, 65536, LARGE)
    one = kernels.default_params(q, index_q, v, 65536, LARGE)
    assert one.cmp == replace(many.cmp, rows=kernels.ONE_TILE, maxnreg=128)
    assert kernels.default_params(q, index_q, v, 131072, LARGE).cmp == many.cmp
    assert (one.blocks.rows, many.blocks.rows) == (1, 3)


def test_scores_of_either_sign_and_equal_ones():
    """As `index_blocks` orders them; -0.0 equals 0.0."""
    x = inputs(150, 1, 1)
    index_q, index_k = torch.zeros(1, 150, 1, 16), torch.zeros(1, 150, 16)
    index_q[..., 0] = 1.0
    for block, score in enumerate([-3.0, -1.0, -1.0, -0.0, 0.0, -2.0, -1.0, -5.0, 7.0]):
        index_k[0, block * 16 : block * 16 + 16, 0] = score
    for programs in (1, 100):  # the choice of many tiles, and of one
        _, blocks = check((*x[:3], index_q, index_k), [[140]], MSASpec(16, 5), launches(programs))
        assert blocks[0, 0, 0].tolist() == [1, 2, 3, 4, 8]
    index_k[0, 32:48] = torch.nan  # never a maximum
    index_k[0, 70] = torch.inf
    index_k[0, 90] = torch.nan
    check((*x[:3], index_q, index_k), [[140]], MSASpec(16, 5), launches())


def test_rows_longer_than_the_registers(monkeypatch):
    x = inputs(400, heads=1)
    wanted = check(x, [[399]], params=launches(8))
    monkeypatch.setattr(kernels, "MOST_KEPT", 16)
    got = check(x, [[399]], params=launches(8))
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0])


def test_strides_do_not_matter():
    positions = torch.tensor([[99], [50]], dtype=torch.int32)
    arguments = tensors(*make_msa_cache(inputs(100, 4, 2, batch=2), positions, SPEC))
    wanted, _ = kernels.msa(*arguments, positions.to(DEVICE), SPEC, launches())
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in arguments]
    heads_first[4] = torch.stack([arguments[4], arguments[4]], dim=-1)[..., 0]
    wide = positions.repeat(1, 2)[:, ::2].to(DEVICE)
    assert torch.equal(wanted, kernels.msa(*heads_first, wide, SPEC, launches())[0])


def test_bad_values_are_masked():
    """On a GPU nobody looks at them first: whatever they are, nothing outside the pools is read."""
    positions = torch.tensor([[70], [30]], dtype=torch.int32)
    arguments = tensors(*make_msa_cache(inputs(80, batch=2), positions, SPEC))
    arguments = [x.nan_to_num() if x.is_floating_point() else x for x in arguments]
    arguments[5] = torch.full_like(arguments[5], 1 << 30)
    arguments[5][0] = -(1 << 30)
    positions = torch.tensor([[1 << 30], [-5]], dtype=torch.int32, device=DEVICE)
    for params in (launches(), launches(1)):
        o, blocks = kernels.msa(*arguments, positions, SPEC, params)
        assert o.isfinite().all()
        assert (o[1] == 0).all()
        assert blocks[0].min() >= 0
        assert blocks[0].max() < 192 // SPEC.block
        assert (blocks[1] == -1).all()


def test_the_public_function_runs_the_kernels():
    positions = torch.tensor([[99], [50]], dtype=torch.int32)
    q, index_q, kv, keys = make_msa_cache(inputs(100, 4, 2, batch=2), positions, SPEC)
    q, index_q, keys, positions = (x.to(DEVICE) for x in (q, index_q, keys, positions))
    kv = PagedKV(*(x.to(DEVICE) for x in vars(kv).values()))
    got = msa_decode(q, index_q, kv, keys, positions, SPEC, backend="triton")
    torch.testing.assert_close(got, msa_decode(q, index_q, kv, keys, positions, SPEC, backend="reference"))
