"""What follows from document borders is computed once, and never outlives or misreads them."""

import gc
import weakref

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.ops import NSASpec, layout
from nsa.ops.layout import cached_with, first_compressed, layouts_of_capture, slot_layout, token_layout

SPEC = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, window=8)


def borders(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_same_borders_are_computed_once():
    cu_seqlens = borders(0, 5, 12)
    assert token_layout(12, cu_seqlens, "cpu") is token_layout(12, cu_seqlens, "cpu")
    assert slot_layout(12, SPEC, cu_seqlens, "cpu") is slot_layout(12, SPEC, cu_seqlens, "cpu")


def test_borders_that_are_written_to_are_computed_again():
    cu_seqlens = borders(0, 5, 12)
    assert token_layout(12, cu_seqlens, "cpu").position.tolist()[5:] == list(range(7))
    cu_seqlens[1] = 9
    assert token_layout(12, cu_seqlens, "cpu").position.tolist()[9:] == [0, 1, 2]


def test_borders_on_the_cpu_that_are_written_to_unnoticed_are_computed_again():
    """As a collective does it: the tensor keeps its version."""
    memory = np.array([0, 5, 12], dtype=np.int32)
    cu_seqlens = torch.from_numpy(memory)
    before = token_layout(12, cu_seqlens, "cpu")
    memory[1] = 9
    assert token_layout(12, cu_seqlens, "cpu").position.tolist()[9:] == [0, 1, 2]
    memory[1] = 5
    assert token_layout(12, cu_seqlens, "cpu").position.tolist() == before.position.tolist()


def test_fake_borders_have_a_layout():
    with FakeTensorMode():
        assert token_layout(12, borders(0, 5, 12), "cpu").position.shape == (12,)


def test_another_tensor_or_another_spec_has_its_own_layout():
    first, second = borders(0, 5, 12), borders(0, 5, 12)
    assert token_layout(12, first, "cpu") is not token_layout(12, second, "cpu")
    wider = NSASpec(cmp_block=8, cmp_stride=2, sel_block=8, num_selected=4, window=8)
    assert first_compressed(12, wider, first, "cpu").tolist() != first_compressed(12, SPEC, first, "cpu").tolist()


def test_the_cache_is_freed_with_its_borders():
    class Table:
        pass

    cu_seqlens = borders(0, 5, 12)
    table = weakref.ref(cached_with(cu_seqlens, "table", Table))
    assert table() is not None
    del cu_seqlens
    gc.collect()
    assert table() is None


def test_nothing_is_cached_for_inference_tensors():
    with torch.inference_mode():
        cu_seqlens = borders(0, 5, 12)
        before = token_layout(12, cu_seqlens, "cpu").position.tolist()
        cu_seqlens[1] = 9
        assert token_layout(12, cu_seqlens, "cpu").position.tolist() != before


def test_a_captured_graph_computes_layouts_once_and_shares_none_with_eager_code(monkeypatch):
    cu_seqlens = borders(0, 5, 12)
    outside = token_layout(12, cu_seqlens, "cpu")
    monkeypatch.setattr(layout, "_is_capturing", lambda tensor: True)
    with layouts_of_capture():
        inside = token_layout(12, cu_seqlens, "cpu")
        assert inside is token_layout(12, cu_seqlens, "cpu")
        assert inside is not outside
    with layouts_of_capture():
        assert token_layout(12, cu_seqlens, "cpu") is not inside
    # A capture that nobody announced: every operator computes for itself.
    assert token_layout(12, cu_seqlens, "cpu") is not token_layout(12, cu_seqlens, "cpu")
    monkeypatch.undo()
    assert token_layout(12, cu_seqlens, "cpu") is outside
