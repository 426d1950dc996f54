"""The kernels on queries with tokens before them (`q_offset`)."""

import pytest
import torch

from tests.ops.offset_cases import assert_pieces_make_the_whole

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("packed", "deterministic"), [(False, False), (True, True)])
def test_queries_in_pieces_give_the_whole(packed, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_pieces_make_the_whole(40, packed, [23], "triton", torch.float32, 1e-5, DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)
