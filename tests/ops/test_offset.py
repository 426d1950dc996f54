"""The reference operators on queries with tokens before them (`q_offset`)."""

import pytest
import torch

from nsa.errors import ArgumentError
from nsa.ops import window_attention
from tests.ops.cases import SMALL, make_inputs
from tests.ops.offset_cases import assert_pieces_make_the_whole


@pytest.mark.parametrize("cuts", [[1], [22, 40], [13, 57, 74]], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_queries_in_pieces_give_the_whole(packed, cuts):
    assert_pieces_make_the_whole(75, packed, cuts, "reference", torch.float64, 1e-12)


def test_keys_must_cover_the_whole_sequence():
    x = make_inputs(20)
    with pytest.raises(ArgumentError, match="12"):
        window_attention(x.q[:, 12:], x.k_win, x.v_win, SMALL, q_offset=4)
    with pytest.raises(ArgumentError, match="q_offset"):
        window_attention(x.q, x.k_win, x.v_win, SMALL, q_offset=-1)
