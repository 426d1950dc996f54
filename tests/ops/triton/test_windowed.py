"""What only the window kernels promise; the rest is in test_flash.py."""

import pytest
import torch

from nsa.ops.spec import NSASpec
from tests.ops.triton.branch_cases import SPEC, Case, assert_agrees, inputs, run_kernels

pytestmark = pytest.mark.usefixtures("poisoned")
BRANCH = "win"


@pytest.mark.parametrize(
    "spec",
    [
        NSASpec(window=1),
        NSASpec(window=2),
        NSASpec(window=33),
        NSASpec(window=50),
        NSASpec(window=2**40),
    ],
)
def test_agrees_for_every_geometry(spec):
    assert_agrees(BRANCH, Case(tokens=50, spec=spec))


def test_an_empty_batch_is_fine():
    empty = run_kernels(BRANCH, Case(batch=0), inputs(BRANCH, Case(batch=0)))
    assert empty["dk"].shape == (0, 40, 2, 16)


def test_the_window_contains_the_query_and_the_tokens_before_it():
    case = Case(tokens=48)
    q, k, v, do = inputs(BRANCH, case)
    before = run_kernels(BRANCH, case, (q, k, v, do))["o"]
    v = v.clone()
    v[:, 10] += 1.0
    changed = (run_kernels(BRANCH, case, (q, k, v, do))["o"] != before).flatten(2).any(2)[0]
    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + SPEC.window))


def test_later_tokens_change_nothing_before_them():
    case = Case(tokens=48)
    q, k, v, do = inputs(BRANCH, case)
    before = run_kernels(BRANCH, case, (q, k, v, do))
    k, v = k.clone(), v.clone()
    k[:, 30:], v[:, 30:] = 50.0, -50.0
    after = run_kernels(BRANCH, case, (q, k, v, do))
    assert torch.equal(before["o"][:, :30], after["o"][:, :30])
    assert torch.equal(before["dq"][:, :30], after["dq"][:, :30])
    assert not torch.equal(before["o"][:, 30], after["o"][:, 30])


def test_a_window_over_everything_is_causal_attention():
    case = Case(tokens=40, heads=2, groups=2, spec=NSASpec(window=64))
    q, k, v, do = inputs(BRANCH, case)
    o = run_kernels(BRANCH, case, (q, k, v, do))["o"]
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    assert float((o.double() - wanted).norm() / wanted.norm()) < 1e-5
