"""What only the compressed kernels promise; the rest is in test_flash.py."""

import pytest
import torch

from nsa.ops.spec import NSASpec
from nsa.ops.triton.flash import LONGEST_SUM, KeyRange, num_splits
from nsa.ops.triton.launch_table import INTERPRETER, Launch
from tests.ops.triton.branch_cases import SPEC, Case, assert_agrees, inputs, run_kernels

pytestmark = pytest.mark.usefixtures("poisoned")
BRANCH = "cmp"


@pytest.mark.parametrize(
    "spec",
    [
        NSASpec(cmp_block=1, cmp_stride=1, sel_block=8),
        NSASpec(cmp_block=3, cmp_stride=3, sel_block=6),
        NSASpec(cmp_block=16, cmp_stride=2, sel_block=16),
        NSASpec(cmp_block=2**40, cmp_stride=2**40, sel_block=2**40),
    ],
)
def test_agrees_for_every_geometry(spec):
    assert_agrees(BRANCH, Case(tokens=50, spec=spec))


def test_an_empty_batch_and_no_compressed_token_are_fine():
    got = run_kernels(BRANCH, Case(tokens=5), inputs(BRANCH, Case(tokens=5)))
    assert (got["o"] == 0).all()
    assert (got["dq"] == 0).all()
    assert (got["lse"] == -torch.inf).all()
    empty = run_kernels(BRANCH, Case(batch=0), inputs(BRANCH, Case(batch=0)))
    assert empty["dk"].shape == (0, 9, 2, 16)


def test_later_tokens_change_nothing_before_them():
    case = Case(tokens=48)
    q, k, v, do = inputs(BRANCH, case)
    blocks = 7  # seen by queries up to 35, one more by query 35 and later
    cut = (blocks - 1) * SPEC.cmp_stride + SPEC.cmp_block + SPEC.cmp_stride - 1
    before = run_kernels(BRANCH, case, (q, k, v, do))
    k, v = k.clone(), v.clone()
    k[:, blocks:], v[:, blocks:] = 50.0, -50.0
    after = run_kernels(BRANCH, case, (q, k, v, do))
    assert torch.equal(before["o"][:, :cut], after["o"][:, :cut])
    assert torch.equal(before["dq"][:, :cut], after["dq"][:, :cut])
    assert not torch.equal(before["o"][:, cut], after["o"][:, cut])


@pytest.mark.parametrize("groups", [1, 64])
def test_no_sum_over_queries_runs_over_too_many_rows(groups):
    tokens, per_group = 300_000, 16
    q = torch.empty(1, tokens, groups * per_group, 16, device="meta")
    k = torch.empty(1, tokens // 16, groups, 16, device="meta")
    splits = num_splits(q, k, KeyRange(span=32, stride=16, window=0), Launch(64, 64, 4, 1), INTERPRETER)
    assert tokens * per_group / splits <= LONGEST_SUM
