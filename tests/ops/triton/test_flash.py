"""The kernels of the compressed and the window branch: same results as the reference, for every shape, type, layout and
launch. What only one of them promises is in test_compressed.py and test_windowed.py."""

from dataclasses import replace

import pytest
import torch

from nsa.checks.memory_trace import peak_bytes
from nsa.checks.memory_workspaces import workspace_bytes
from nsa.ops.spec import NSASpec
from nsa.ops.triton import flash
from nsa.ops.triton.launch_table import Launch
from tests.ops.triton.branch_cases import (
    BRANCHES,
    DEVICE,
    SMALL,
    Case,
    assert_agrees,
    inputs,
    run_kernels,
    run_reference,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(params=["cmp", "win"])
def branch(request):
    return request.param


@pytest.mark.parametrize("tokens", [1, 7, 8, long(17), long(63), 65, 150])
def test_agrees_with_the_reference_at_every_length(branch, tokens):
    assert_agrees(branch, Case(tokens=tokens, heads=2, groups=1))


@pytest.mark.parametrize("per_group", [1, long(2), 3, 4, long(6), long(8), long(12), 16, 32])
def test_agrees_for_every_number_of_heads_in_a_group(branch, per_group):
    assert_agrees(branch, Case(tokens=30, heads=per_group, groups=1))


def test_agrees_when_a_group_has_more_heads_than_a_tile_has_rows(branch):
    assert_agrees(branch, Case(tokens=9, heads=20, groups=1, launch=replace(SMALL, rows=16), splits=2))


@pytest.mark.parametrize(("dk", "dv"), [(16, 32), (48, 16), (80, 64), (192, 128)])
def test_agrees_for_every_head_size(branch, dk, dv):
    assert_agrees(branch, Case(tokens=33, dk=dk, dv=dv))


@pytest.mark.parametrize(
    ("rows", "columns", "splits", "mask"),
    [
        (32, 16, 3, "branch"),
        (16, 32, 1, "always"),
        long(16, 32, 1, "branch"),
        long(32, 16, 3, "always"),
    ],
)
def test_agrees_however_it_is_launched(branch, mask, rows, columns, splits):
    launch = Launch(rows, columns, 4, 1, mask)
    assert_agrees(branch, Case(tokens=45, heads=3, groups=1, batch=2, launch=launch, splits=splits))


def test_agrees_with_the_checked_in_launch_parameters(branch):
    assert_agrees(branch, Case(tokens=130, heads=4, groups=1, dk=64, dv=64, launch=None))


SOME, EVEN = (0, 3, 3, 41, 42, 70), tuple(range(0, 71, 7))


@pytest.mark.parametrize(
    ("mask", "borders"),
    [
        ("always", (0, 70)),
        ("always", SOME),
        ("branch", SOME),
        ("branch", (0, 0, 8, 16, 70, 70)),
        ("always", EVEN),
        *(long("branch", (0, 70)), long("always", (0, 0, 8, 16, 70, 70)), long("branch", EVEN)),
    ],
)
def test_agrees_on_packed_documents(branch, borders, mask):
    assert_agrees(
        branch,
        Case(tokens=70, heads=2, groups=1, borders=borders, launch=replace(SMALL, mask=mask), splits=2),
    )


TMA = replace(SMALL, mask="branch", tma=True)


LOADED = [
    Case(tokens=70, heads=6, batch=2, dk=32, dv=16, splits=3, launch=TMA),
    Case(tokens=40, heads=6, dk=32, dv=48, launch=TMA),  # keys and values by threads, rows by the TMA
    Case(tokens=45, heads=3, groups=1, launch=replace(TMA, mask="always")),  # read in place
    Case(tokens=70, heads=4, borders=SOME, splits=2, launch=replace(TMA, mask="always")),
]


@pytest.mark.parametrize(
    ("case", "cached_bytes"),
    [
        *((LOADED[0], 0), (LOADED[1], 2**40), (LOADED[2], 0), (LOADED[2], 2**40), (LOADED[3], 2**40)),
        *(long(LOADED[0], 2**40), long(LOADED[1], 0), long(LOADED[3], 0)),
    ],
    ids=str,
)
def test_agrees_where_the_tensor_memory_accelerator_loads(branch, case, cached_bytes, monkeypatch):
    monkeypatch.setattr(flash, "CACHED_BYTES", cached_bytes)
    assert_agrees(branch, replace(case, dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize(
    ("tma", "groups", "mask"),
    [
        *((False, 2, "always"), (True, 1, "branch"), (True, 2, "always")),
        *(long(False, 2, "branch"), long(True, 1, "always"), long(True, 2, "branch")),
    ],
)
def test_nothing_of_the_next_sequence_or_group_reaches_a_tile(branch, mask, tma, groups):
    """0 as the weight of NaN is not enough. The first group of the first sequence is as if it were alone."""
    case = Case(
        45, 3 * groups, groups, 32, batch=2, splits=2, dtype=torch.float16, launch=replace(TMA, mask=mask, tma=tma)
    )
    tensors = inputs(branch, case)
    first = tuple(x[:1, :, : x.shape[2] // groups].clone() for x in tensors)
    wanted = run_kernels(branch, replace(case, heads=3, groups=1, batch=1), first)
    for x, kept in zip(tensors, first, strict=True):
        x.fill_(torch.nan)[:1, :, : kept.shape[2]] = kept
    got = run_kernels(branch, case, tensors)
    for name, want in wanted.items():
        assert torch.equal(got[name][:1, :, : want.shape[2]], want), name


@pytest.mark.parametrize("case", [Case(tokens=45, heads=6, batch=2, splits=2), *LOADED[1:]], ids=str)
def test_the_backward_pass_does_not_read_the_output_if_its_sums_are_known(branch, case):
    case = replace(case, dtype=torch.float16)
    tensors = inputs(branch, case)
    wanted, got = run_kernels(branch, case, tensors), run_kernels(branch, case, tensors, gives_sums=True)
    for name in ("dq", "dk", "dv"):  # the sums are added in another order
        error = float((got[name] - wanted[name]).float().norm())
        assert error <= 1e-3 * max(1.0, float(wanted[name].float().norm())), name


def test_agrees_where_memory_is_not_laid_out_for_it(branch):
    case = Case(tokens=45, heads=4, launch=TMA, dtype=torch.float16)
    wide = inputs(branch, replace(case, dk=17, dv=17))
    assert_agrees(branch, case, tuple(x[..., 1:] for x in wide))


def test_tiles_that_would_hold_more_than_one_head_are_loaded_by_threads():
    def is_by_tma(k):
        return flash._tma_keys(k, k, TMA)["k_tma"] is not None

    x = torch.zeros(2, 40, 4, 64, dtype=torch.float16)
    assert is_by_tma(x)
    assert is_by_tma(x[:1, :, 1:3])
    assert is_by_tma(torch.zeros(1, 40, 1, 48, dtype=torch.float16))
    assert not is_by_tma(x[..., :48])  # the last columns of a tile would be the next head's
    assert not is_by_tma(torch.zeros(1, 4, 40, 64, dtype=torch.float16).transpose(1, 2))  # heads far apart
    assert not is_by_tma(x[:1].expand(2, -1, -1, -1))
    assert not is_by_tma(x[:, :0])


def test_agrees_in_half_precision(branch):
    assert_agrees(branch, Case(tokens=65, heads=6, dk=32, dv=48, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "dk", "dv"), [(64, 4, 128, 128), (12, 2, 64, 64), (8, 8, 192, 128), (6, 1, 256, 80)]
)
@pytest.mark.parametrize("borders", [None, (0, 5, 5, 700, 731, 2000)])
def test_agrees_at_real_sizes(branch, heads, groups, dk, dv, dtype, borders):
    case = Case(2000, heads, groups, dk, dv, dtype=dtype, spec=NSASpec(), launch=None, borders=borders)
    assert_agrees(branch, case)


def test_reads_any_strides(branch):
    case = Case(tokens=37, heads=4)
    q, k, v, do = inputs(branch, case)
    other = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    assert_agrees(branch, case, (other, k.repeat(1, 1, 1, 2)[..., ::2], v[..., :].flip(1).flip(1), do))
    wide = torch.randn(1, 37, 4, 48, device=DEVICE)[..., 16:32]
    assert_agrees(branch, case, (wide, k, v, do[:, :1, :1].expand(do.shape)))
    assert_agrees(branch, case, (q, k[:, :, :1].expand(k.shape), v, torch.ones(1, device=DEVICE).expand(do.shape)))


def test_invalid_borders_are_clamped_as_in_the_reference(branch):
    assert_agrees(branch, Case(tokens=50, borders=(7, -90, 30, 20, 100000, 12)))


def test_two_runs_give_the_same_bits(branch):
    case = Case(tokens=60, splits=3)
    tensors = inputs(branch, case)
    first, second = run_kernels(branch, case, tensors), run_kernels(branch, case, tensors)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_large_scores_do_not_overflow(branch):
    case = Case(tokens=40)
    q, k, v, do = inputs(branch, case)
    got = run_kernels(branch, case, (q * 100, k * 100, v, do))
    wanted = run_reference(branch, case, (q * 100, k * 100, v, do))
    assert all(torch.isfinite(got[name]).all() for name in ("o", "dq", "dk", "dv"))
    assert float((got["o"].double() - wanted["o"]).norm() / wanted["o"].norm()) < 1e-4


def test_refusal_names_unsupported_inputs(branch):
    q, _, v, _ = inputs(branch, Case())
    assert BRANCHES[branch][0].refusal(q, v) is None
    reason = BRANCHES[branch][0].refusal(q.double(), v.double())
    assert reason is not None
    assert "float64" in reason
    if DEVICE == "cpu":
        assert "bfloat16" in str(BRANCHES[branch][0].refusal(q.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize("borders", [None, (0, 13, 13, 40)])
def test_gradients_of_keys_in_turns_equal_those_of_one_launch(branch, borders, monkeypatch):
    """What only very long sequences use: the parts of dK and dV exist for some keys at a time."""
    case = Case(tokens=40, heads=2, groups=1, batch=1 if borders else 2, splits=2, borders=borders)
    tensors = inputs(branch, case)
    whole = run_kernels(branch, case, tensors)
    monkeypatch.setattr(flash, "PART_BYTES", 1)
    k, v = tensors[1:3]
    assert flash.keys_at_once(k, v, case.splits, SMALL) == min(SMALL.columns, k.shape[1])
    turns = run_kernels(branch, case, tensors)
    assert all(torch.equal(turns[name], whole[name]) for name in ("dk", "dv"))


def test_parts_of_gradients_do_not_grow_with_the_square_of_the_length():
    for tokens, heads, groups, dim in ((1 << 20, 12, 2, 64), (1 << 20, 64, 4, 128), (1 << 22, 64, 4, 128)):
        q = torch.empty(1, tokens, heads, dim, device="meta", dtype=torch.bfloat16)
        k = torch.empty(1, tokens // 16, groups, dim, device="meta", dtype=torch.bfloat16)
        lse = torch.empty(1, tokens, heads, device="meta")
        settings = (NSASpec().as_ints(), torch.empty(2, dtype=torch.int32, device="meta"), 0, "triton")
        func = torch.ops.nsa.compressed_attention_backward.default
        needed = workspace_bytes(func, (q, q, k, k, q, lse, *settings), peak_bytes)
        in_rows = 2 * q.numel() * q.element_size()
        assert flash.PART_BYTES // 2 <= needed <= 8 * lse.numel() + flash.PART_BYTES + in_rows
