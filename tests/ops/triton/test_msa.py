"""MSA on Triton computes what the reference computes: blocks exactly, attention, index loss and all gradients.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise.
"""

from types import SimpleNamespace

import pytest
import torch

from nsa.ops import MSASpec, msa_attention
from nsa.ops.reference import msa_index as reference
from nsa.ops.reference import selected, windowed
from nsa.ops.triton import msa_loss, msa_selection, selection
from nsa.ops.triton.launch_table import Launch
from tests.ops.test_msa import NAMES, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-3}
SPEC = MSASpec(block=16, num_selected=3)


def chosen(tensors, spec, borders=None, offset=0, params=None):
    """The blocks, after a look whether they are those of float64."""
    index_q, index_k = (x.detach().to(DEVICE) for x in tensors[3:])
    got = msa_selection.choose(index_q, index_k, spec, borders, params, q_offset=offset)
    want = reference.choose(index_q.double(), index_k.double(), spec, borders, offset)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return got


@pytest.mark.parametrize(
    ("spec", "tokens", "groups", "params"),
    [
        (SPEC, 97, 1, None),
        (SPEC, 97, 3, Launch(32, 64, 4, 1)),  # a tile of rows in the middle of a query, four blocks at a time
        (MSASpec(64, 2), 330, 2, Launch(32, 16, 4, 1)),  # a block in four parts
        (MSASpec(16, 4, 2, 1), 150, 2, Launch(16, 32, 4, 1)),
        (MSASpec(16, 2, 0, 0), 75, 1, Launch(32, 32, 4, 1)),  # the own block has a score
        (MSASpec(16, 3, 1, 2), 75, 1, None),  # every block is forced
        (MSASpec(16, 40), 700, 1, None),  # more than 32 free blocks
    ],
)
def test_every_geometry_chooses_what_the_reference_does(spec, tokens, groups, params):
    chosen(make_inputs(tokens, groups, groups, dtype=torch.float32, sizes=(16, 16, 48)), spec, params=params)


def test_the_choice_streams(monkeypatch):
    """Few scores at a time, blocks split between programs, and rows longer than a program's registers hold."""
    monkeypatch.setattr(selection, "SCORE_BYTES", 1 << 12)
    monkeypatch.setattr(selection, "SCORE_BYTES_PER_TOKEN", 0)
    monkeypatch.setattr(selection, "SCORE_PROGRAMS", 64)
    monkeypatch.setattr(selection, "SCORE_TILES", 1)
    tiled = SimpleNamespace(find=lambda *_: Launch(1, 32, 1))
    monkeypatch.setattr(msa_selection, "SELECTION_LAUNCHES", tiled)
    chosen(make_inputs(90, 2, 2, batch=2, dtype=torch.float32), SPEC, params=Launch(32, 16, 4, 1))
    long = make_inputs(20, 1, 1, offset=600, dtype=torch.float32)
    chosen(long, SPEC, offset=600, params=Launch(32, 128, 4, 1))


def test_scores_of_either_sign_and_equal_ones():
    index_q, index_k = torch.zeros(1, 150, 1, 16), torch.zeros(1, 150, 16)
    index_q[..., 0] = 1.0
    for block, score in enumerate([-3.0, -1.0, -1.0, -0.0, 0.0, -2.0, -1.0, -5.0, 7.0]):
        index_k[0, block * 16 : block * 16 + 16, 0] = score
    got = chosen((None, None, None, index_q, index_k), MSASpec(16, 5))
    assert got[0, 140, 0].tolist() == [1, 2, 3, 4, 8]


def test_a_score_that_is_not_a_number_is_the_lowest():
    _, _, _, index_q, index_k = make_inputs(100, 1, 1, dtype=torch.float32)
    index_k = index_k.detach().clone()
    index_k[0, 16:32] = torch.nan
    index_k[0, 40] = torch.inf
    chosen((None, None, None, index_q, index_k), SPEC)


CASES = [
    pytest.param(SPEC, {"heads": 1}, 90, None, 0, id="one head"),
    pytest.param(SPEC, {"heads": 6, "groups": 2}, 83, None, 0, id="groups of 3"),
    pytest.param(MSASpec(32, 2), {"heads": 16, "sizes": (16, 16, 48)}, 100, None, 0, id="a group of 16"),
    pytest.param(SPEC, {"heads": 2, "batch": 2, "sizes": (48, 16, 16)}, 70, None, 0, id="a batch"),
    pytest.param(SPEC, {"heads": 2}, 120, [0, 7, 88, 120], 0, id="packed"),
    pytest.param(SPEC, {"heads": 2, "offset": 45}, 40, None, 45, id="queries at the end"),
    pytest.param(SPEC, {"heads": 2, "offset": 70}, 55, [0, 30, 110, 125], 70, id="queries at the end, packed"),
]


WARM_UP = {"groups of 3", "queries at the end, packed"}


@pytest.mark.parametrize(("spec", "shape", "tokens", "borders", "offset"), CASES)
def test_the_loss_and_its_gradients_are_those_of_the_reference(spec, shape, tokens, borders, offset):
    check_loss(spec, make_inputs(tokens, dtype=torch.float32, **shape), borders, offset)


@pytest.mark.parametrize(
    ("spec", "shape", "tokens", "borders", "offset"),
    [pytest.param(*c.values, id=c.id, marks=() if c.id in WARM_UP else pytest.mark.long) for c in CASES],
)
def test_the_loss_of_the_warm_up_and_its_gradients_are_those_of_the_reference(spec, shape, tokens, borders, offset):
    check_loss(spec, make_inputs(tokens, dtype=torch.float32, **shape), borders, offset, is_dense=True)


def check_loss(spec, tensors, borders=None, offset=0, is_dense=False):
    """On the blocks and the log-sum-exp of the reference."""
    q, k, v, index_q, index_k = (x.detach().to(DEVICE) for x in tensors)
    block, exact = spec.block, [x.double() for x in (index_q, index_k, q, k)]
    counted = torch.arange(offset, offset + q.shape[1], device=DEVICE) % 7 > 0
    counted = (counted & (torch.arange(q.shape[1], device=DEVICE) >= spec.dense_tokens - offset)).expand(q.shape[:2])
    where = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=DEVICE), offset
    indices = reference.choose(*exact[:2], spec, *where)
    attention = (q.double(), k.double(), v.double())
    if is_dense:
        indices, lse = None, windowed.forward(*attention, k.shape[1], where[0], q_offset=offset)[1]
    else:
        lse = selected.forward(*attention, indices, block, where[0], q_offset=offset)[1]
    want = reference.loss(*exact, lse, indices, counted, block, where[0], q_offset=offset)
    arguments = (index_q, index_k, q, k, lse.float(), indices, counted, block, where[0])
    got = msa_loss.loss(*arguments, q_offset=offset)
    again = msa_loss.loss(*arguments, q_offset=offset)
    value, *nothing = msa_loss.loss(*arguments, q_offset=offset, has_grads=False)
    assert torch.equal(value, got[0])
    assert [x.numel() for x in nothing] == [0, 0]
    assert [x.dtype for x in got] == [torch.float32, q.dtype, torch.float32]
    for name, a, b, repeated in zip(("kl", "index_q", "index_k"), got, want, again, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= LIMIT[q.dtype], f"{name}: {error:.1e}"
        assert torch.equal(a, repeated), f"{name} differs between runs"


@pytest.mark.parametrize("is_dense", [False, pytest.param(True, marks=pytest.mark.long)], ids=["chosen", "warm-up"])
def test_the_loss_streams_and_adds_in_parts(monkeypatch, is_dense):
    """A few queries at a time, lists in several items, a block in several pieces."""
    monkeypatch.setattr(msa_loss, "MIN_PARTS_BYTES", 1)
    monkeypatch.setattr(msa_loss, "MAX_PARTS_BYTES", 1)
    monkeypatch.setattr(msa_loss, "CHUNK", 24)
    monkeypatch.setattr(msa_loss, "LAUNCHES", SimpleNamespace(find=lambda *_: Launch(16, 16, 4, 1)))
    tensors = make_inputs(140, 2, 2, dtype=torch.float32)
    assert msa_loss.queries_at_once(tensors[3], tensors[0], 3, 1, True) == 128
    check_loss(MSASpec(32, 2), tensors, is_dense=is_dense)


def test_the_loss_in_half_precision():
    check_loss(SPEC, make_inputs(90, 4, 2, dtype=torch.float16))


@pytest.mark.parametrize("is_dense", [False, True], ids=["chosen", "warm-up"])
def test_the_whole_operator_is_that_of_the_reference(is_dense):
    tensors = make_inputs(75, 3, 1, dtype=torch.float32)
    borders = torch.tensor([0, 7, 75], dtype=torch.int32, device=DEVICE)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in tensors]
        o, kl, queries = msa_attention(*leaves, SPEC, cu_seqlens=borders, is_dense=is_dense, backend=backend)
        do = torch.ones_like(o) * torch.arange(o.shape[3], device=DEVICE)
        grads = torch.autograd.grad((o, kl), leaves, (do, torch.full_like(kl, 3.0)))
        results.append(dict(zip(("o", "kl", "queries", *NAMES), (o, kl, queries, *grads), strict=True)))
    for name, want in results[1].items():
        error = float((results[0][name].double() - want).detach().norm() / want.detach().double().norm())
        assert error <= LIMIT[torch.float32], f"{name}: {error:.1e}"
