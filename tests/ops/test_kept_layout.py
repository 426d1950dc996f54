"""What follows from document borders is worked out once, and never outlives or misreads them."""

import gc
import weakref

import torch

from nsa.ops import NSASpec
from nsa.ops.layout import keep_with, slot_layout, token_layout

SPEC = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, window=8)


def borders(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_same_borders_are_worked_out_once():
    cu_seqlens = borders(0, 5, 12)
    assert token_layout(12, SPEC, cu_seqlens, "cpu") is token_layout(12, SPEC, cu_seqlens, "cpu")
    assert slot_layout(12, SPEC, cu_seqlens, "cpu") is slot_layout(12, SPEC, cu_seqlens, "cpu")


def test_borders_that_are_written_to_are_worked_out_again():
    cu_seqlens = borders(0, 5, 12)
    assert token_layout(12, SPEC, cu_seqlens, "cpu").position.tolist()[5:] == list(range(7))
    cu_seqlens[1] = 9
    assert token_layout(12, SPEC, cu_seqlens, "cpu").position.tolist()[9:] == [0, 1, 2]


def test_equal_borders_in_another_tensor_and_another_spec_stand_for_themselves():
    first, second = borders(0, 5, 12), borders(0, 5, 12)
    assert token_layout(12, SPEC, first, "cpu") is not token_layout(12, SPEC, second, "cpu")
    wider = NSASpec(cmp_block=8, cmp_stride=2, sel_block=8, num_selected=4, window=8)
    assert (
        token_layout(12, wider, first, "cpu").cmp_start.tolist()
        != token_layout(12, SPEC, first, "cpu").cmp_start.tolist()
    )


def test_what_was_kept_goes_with_its_borders():
    class Table:
        pass

    cu_seqlens = borders(0, 5, 12)
    table = weakref.ref(keep_with(cu_seqlens, "table", Table))
    assert table() is not None
    del cu_seqlens
    gc.collect()
    assert table() is None


def test_nothing_is_kept_for_inference_tensors():
    with torch.inference_mode():
        cu_seqlens = borders(0, 5, 12)
        before = token_layout(12, SPEC, cu_seqlens, "cpu").position.tolist()
        cu_seqlens[1] = 9
        assert token_layout(12, SPEC, cu_seqlens, "cpu").position.tolist() != before
