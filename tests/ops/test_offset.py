"""The reference operators on queries with tokens before them (`q_offset`)."""

import pytest
import torch

from nsa.errors import ArgumentError
from nsa.ops import nsa_attention, window_attention
from tests.ops.cases import SMALL, make_inputs
from tests.ops.offset_cases import assert_pieces_make_the_whole


@pytest.mark.parametrize("cuts", [[1], [22, 40], [13, 57, 74]], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_queries_in_pieces_give_the_whole(packed, cuts):
    assert_pieces_make_the_whole(75, packed, cuts, "reference", torch.float64, 1e-12)


@pytest.mark.parametrize("start", [0, 1, 5, 40])
@pytest.mark.parametrize("is_cut", [False, True], ids=["all window keys", "those that are read"])
def test_mixed_branches_of_the_last_queries_equal_those_of_the_whole(start, is_cut):
    x = make_inputs(61, heads=4, groups=2, requires_grad=True)
    want = nsa_attention(*x.tensors(), SMALL)[:, start:]
    q, *keys, k_win, v_win, gates = x.tensors()
    first = max(0, start - SMALL.window + 1) if is_cut else 0
    got = nsa_attention(
        q[:, start:], *keys, k_win[:, first:], v_win[:, first:], gates[:, start:], SMALL, q_offset=start
    )
    torch.testing.assert_close(got, want)
    do = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(o, x.tensors(), do) for o in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_keys_must_cover_the_whole_sequence():
    x = make_inputs(20)
    with pytest.raises(ArgumentError, match="12"):
        window_attention(x.q[:, 12:], x.k_win, x.v_win, SMALL, q_offset=4)
    with pytest.raises(ArgumentError, match="q_offset"):
        window_attention(x.q, x.k_win, x.v_win, SMALL, q_offset=-1)
    q, *keys, k_win, v_win, gates = x.tensors()
    late = (x[:, 12 - SMALL.window + 2 :] for x in (k_win, v_win))
    with pytest.raises(ArgumentError, match="k_win"):
        nsa_attention(q[:, 12:], *keys, *late, gates[:, 12:], SMALL, q_offset=12)
