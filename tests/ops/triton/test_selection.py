"""Block selection on Triton chooses what the reference chooses: exactly, ties included.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

from itertools import pairwise

import pytest
import torch

from nsa.ops.layout import num_blocks, num_slots, token_layout
from nsa.ops.reference import compressed
from nsa.ops.reference import selection as reference
from nsa.ops.spec import NSASpec
from nsa.ops.triton import selection
from nsa.ops.triton.launch_table import Launch

pytestmark = pytest.mark.usefixtures("poisoned")
INTERPRET = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRET else "cuda"
SMALL = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, num_init=1, num_local=1, window=16)


def tensors(spec, tokens, heads, groups, dim, *, batch=1, dtype=torch.float32, cu=None, seed=0):
    """q, k, the exact log-sum-exp in float32, and cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)
    slots = num_slots(tokens, spec, packed=cu is not None)
    q = torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype).to(DEVICE)
    k = torch.randn(batch, slots, groups, dim, generator=generator).to(dtype).to(DEVICE)
    borders = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    return q, k, exact_lse(q, k, spec, borders), borders


def exact_lse(q, k, spec, cu):
    return compressed.forward(q.double(), k.double(), k.double(), spec, cu)[1].float()


def expected(q, k, spec, cu):
    _, lse = compressed.forward(q.double(), k.double(), k.double(), spec, cu)
    return reference.forward(q.double(), k.double(), lse, spec, cu)


def params(columns, tokens, pick=Launch(1, 16384, 16)):  # noqa: B008
    """Launches of scores and top-k."""
    return Launch(tokens, columns, 8, 2), pick


def check(q, k, lse, spec, cu, launches=None):
    got = selection.forward(q, k, lse, spec, cu, launches)
    assert got.dtype == torch.int32
    torch.testing.assert_close(got, expected(q, k, spec, cu), rtol=0, atol=0)
    return got


@pytest.mark.parametrize("tokens", [1, 17, 63, 65, 130])
def test_every_length(tokens):
    check(*tensors(SMALL, tokens, 4, 2, 16)[:3], SMALL, None)


@pytest.mark.parametrize("per_group", [1, 2, 3, 6, 8, 12, 16])
def test_every_group_size(per_group):
    q, k, lse, _ = tensors(SMALL, 97, per_group, 1, 16, batch=1)
    check(q, k, lse, SMALL, None, params(64, 32))


def test_groups_wider_than_a_tile():
    q, k, lse, _ = tensors(SMALL, 97, 32, 1, 16)
    check(q, k, lse, SMALL, None, params(16, 16))


@pytest.mark.parametrize("dim", [16, 48, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_sizes_and_types(dim, dtype):
    check(*tensors(SMALL, 72, 4, 2, dim, dtype=dtype)[:3], SMALL, None, params(64, 32))


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 1, 8, 5, 0, 1),  # stride 1
        (8, 8, 8, 5, 2, 2),  # every block alike: no share for the neighbour
        (16, 4, 16, 3, 0, 0),  # blocks stick out by three quarters; nothing forced
        (4, 4, 12, 5, 2, 0),  # three compressed tokens in a block: not a power of two
        (12, 4, 24, 6, 0, 3),
        (8, 4, 16, 3, 1, 2),  # all places forced
        (8, 4, 16, 1, 0, 1),
        (8, 4, 16, 1, 0, 0),
    ],
)
def test_every_geometry(sizes):
    spec = NSASpec(*sizes, 16)
    check(*tensors(spec, 110, 2, 1, 16)[:3], spec, None, params(32, 32))


@pytest.mark.parametrize("free", [31, 32, 33])  # the bound from 32 lines' best ones serves up to 32 places
def test_many_free_places(free):
    spec = NSASpec(4, 4, 4, free + 1, 0, 1, 16)
    check(*tensors(spec, 180, 2, 1, 16)[:3], spec, None, params(32, 32))


def test_blocks_of_more_compressed_tokens_than_a_tile():
    spec = NSASpec(32, 1, 32, 3, 0, 1, 16)
    check(*tensors(spec, 150, 2, 1, 16)[:3], spec, None, params(16, 16))


@pytest.mark.parametrize(
    "cu",
    [[0, 120], [0, 5, 100, 120], [0, 0, 37, 37, 38, 120, 120], [0, 70, 77, 84, 150], [0, 1, 2, 3, 4]],
)
def test_packed_documents(cu):
    q, k, lse, borders = tensors(SMALL, cu[-1], 6, 2, 16, cu=cu)
    k[:, sum(max(0, (b - a - 8) // 4 + 1) for a, b in pairwise(cu)) :] = float("nan")
    got = selection.forward(q, k, lse, SMALL, borders, params(64, 32))
    torch.testing.assert_close(got, expected(q, k.nan_to_num(), SMALL, borders), rtol=0, atol=0)


def test_invalid_borders_are_clamped():
    q, k, lse, _ = tensors(SMALL, 100, 2, 1, 16, cu=[0, 100])
    borders = torch.tensor([7, 900, -3, 50, 1 << 30], dtype=torch.int32, device=DEVICE)
    got = selection.forward(q, k, lse, SMALL, borders)
    assert got.min() >= -1
    assert got.max() < num_blocks(100, SMALL.sel_block)


def test_ties_go_to_the_lower_index():
    q, k, _, _ = tensors(SMALL, 150, 3, 1, 16)
    q.zero_()
    got = check(q, k, exact_lse(q, k, SMALL, None), SMALL, None)
    assert got[0, -1, 0].tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("cu", [None, [0, 20, 160]])
def test_ties_between_repeated_keys(cu):
    """Whole blocks repeated: scores equal to the last bit in different tiles, and cut off by their rank."""
    q, k, _, borders = tensors(SMALL, 160, 2, 1, 16, cu=cu)
    k[:] = k[:, :4].repeat(1, k.shape[1] // 4 + 1, 1, 1)[:, : k.shape[1]]
    check(q, k, exact_lse(q, k, SMALL, borders), SMALL, borders, params(32, 16))


def test_ties_among_small_integers():
    spec = NSASpec(4, 4, 8, 6, 1, 1, 16)
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(0, 2, (1, 140, 2, 16), generator=generator).float().to(DEVICE)
    k = torch.zeros(1, 35, 1, 16, device=DEVICE)
    k[0, :, 0, 0] = torch.randint(0, 2, (35,), generator=generator).float().to(DEVICE)
    check(q, k, exact_lse(q, k, spec, None), spec, None)


@pytest.mark.parametrize("ties", [False, True])
def test_rows_longer_than_the_registers(ties):
    spec = NSASpec(2, 1, 2, 7, 1, 1, 16)
    q, k, lse, _ = tensors(spec, 76, 1, 1, 16)
    if ties:
        q[:, ::2] = 0
        lse = exact_lse(q, k, spec, None)
    check(q, k, lse, spec, None, params(64, 64, pick=Launch(1, 32, 1)))


def test_small_workspaces_change_nothing(monkeypatch):
    q, k, lse, _ = tensors(SMALL, 90, 2, 1, 16, batch=2)
    whole = selection.forward(q, k, lse, SMALL, None, params(32, 32))
    for limit in (1, 5_000):
        monkeypatch.setattr(selection, "SCORE_BYTES", limit)
        monkeypatch.setattr(selection, "SCORE_BYTES_PER_TOKEN", 0)
        assert torch.equal(whole, selection.forward(q, k, lse, SMALL, None, params(32, 32)))


def test_chunks_cover_all_queries_within_the_limit():
    spec = NSASpec()
    shapes = [(1, 65536, False), (16, 2048, False), (1, 1 << 20, True), (600, 70000, False)]
    for batch, tokens, packed in shapes:
        start = 0 if packed else spec.num_selected * spec.sel_block
        scored_from, chunks = selection.plan_chunks(batch, tokens, 4 * 2, 8, spec, packed, selection.SCORE_BYTES)
        assert scored_from == start
        covered = 0
        for b0, b1, first, stop in chunks:
            size = (b1 - b0) * max(0, stop - max(first, start)) * 8 * 4 * selection.block_width(stop, spec)
            assert size <= selection.SCORE_BYTES
            covered += (b1 - b0) * (stop - first)
        assert covered == batch * tokens


def test_launches_of_a_million_tokens_occupy_a_card():
    spec, groups, query_tile = NSASpec(), 2, 32
    for tokens in (1 << 16, 1 << 20, 1 << 22):
        _, chunks = selection.plan_chunks(1, tokens, 2 * groups, query_tile, spec, False, selection.score_bytes(tokens))
        for _, _, first, stop in chunks[:-1]:
            width = selection.block_width(stop, spec)
            programs = (stop - max(first, 1024)) // query_tile * groups
            splits, span = selection.split_blocks(programs, width, 16)
            assert programs * splits >= 2000
            assert span % 16 == 0
            assert (splits - 1) * span < width <= splits * span


PACKED = [0, 40, 41, 130]


@pytest.mark.parametrize(
    ("sizes", "cu"),
    [
        ((8, 4, 16, 4, 1, 1), None),
        ((8, 4, 16, 4, 1, 1), PACKED),
        ((8, 4, 16, 5, 2, 2), PACKED),
        ((8, 4, 16, 5, 0, 2), None),
        pytest.param((8, 4, 16, 5, 2, 2), None, marks=pytest.mark.long),
        pytest.param((8, 4, 16, 5, 0, 2), PACKED, marks=pytest.mark.long),
    ],
)
def test_rows_split_between_programs_change_nothing(sizes, cu, monkeypatch):
    """With two local blocks nothing that is not visible needs a score: there is no mask then."""
    spec = NSASpec(*sizes, 16)
    q, k, lse, borders = tensors(spec, 130, 3, 1, 16, cu=cu)
    launches = params(48, 16)
    whole = check(q, k, lse, spec, borders, launches)
    monkeypatch.setattr(selection, "SCORE_TILES", 1)
    assert selection.split_blocks(1, selection.block_width(130, spec), 4)[0] > 1
    assert torch.equal(whole, selection.forward(q, k, lse, spec, borders, launches))


def test_strides_do_not_matter():
    q, k, lse, _ = tensors(SMALL, 80, 4, 2, 16)
    wanted = selection.forward(q, k, lse, SMALL, None)
    q_heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_spread = torch.stack([k, k], dim=-1)[..., 0]
    lse_heads_first = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert k_spread.stride(-1) == 2
    assert torch.equal(wanted, selection.forward(q_heads_first, k_spread, lse_heads_first, SMALL, None))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stay_inside(bad):
    q, k, lse, _ = tensors(SMALL, 100, 2, 1, 16)
    q[:, 70:] = bad
    lse[:, 60:] = bad
    got = selection.forward(q, k, lse, SMALL, None)
    assert torch.equal(got[:, :60], expected(q, k, SMALL, None)[:, :60])
    own = token_layout(100, None, DEVICE).position // SMALL.sel_block
    assert (got[:, 64:] >= 0).all()
    assert (got[:, 64:] <= own[64:, None, None]).all()
    assert (got[:, 64:].diff(dim=-1) > 0).all()


def test_float64_is_refused_with_a_reason():
    q = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    assert "float64" in (selection.refusal(q, q) or "")
    assert selection.refusal(q.float(), q.float()) is None


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET, reason="needs a GPU")
@pytest.mark.parametrize(("heads", "groups", "dim"), [(64, 4, 128), (12, 2, 64), (16, 1, 192)])
def test_real_sizes_differ_only_between_close_scores(heads, groups, dim):
    spec = NSASpec()
    q, k, lse, _ = tensors(spec, 4000, heads, groups, dim, dtype=torch.bfloat16)
    got, want = selection.forward(q, k, lse, spec, None), expected(q, k, spec, None)
    for b, s, g in (got != want).any(-1).nonzero().tolist():
        logits = q[b, s].double().view(groups, -1, dim)[g] @ k[b, :, g].double().T * dim**-0.5
        logits[:, max(0, (s + 1 - 32) // 16 + 1) :] = -torch.inf
        scores = reference.block_scores(logits.softmax(-1).sum(0), s // 64 + 1, spec)
        swapped = set(got[b, s, g].tolist()) ^ set(want[b, s, g].tolist())
        values = scores[torch.tensor(sorted(swapped), device=DEVICE)]
        assert 0 < values.max() - values.min() <= 1e-5 * values.max()
