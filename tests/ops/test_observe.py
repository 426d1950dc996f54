"""An observer sees what operators do where it was installed, compiled or not, and never stops them."""

import threading
from unittest import mock

import torch

from nsa.nn import NSAAttention
from nsa.ops import nsa_attention
from nsa.ops.observe import observing
from tests.ops.cases import SMALL, make_inputs


class Observer:
    def __init__(self):
        self.failures, self.seen = 0, []

    def selected(self, indices, spec, cu_seqlens, q_offset):
        self.seen.append(("selected", tuple(indices.shape), spec, cu_seqlens, q_offset))

    def mixed(self, gates):
        self.seen.append(("mixed", tuple(gates.shape)))


SEEN = [("selected", (1, 23, 2, SMALL.num_selected), SMALL, None, 0), ("mixed", (1, 23, 4, 3))]


def attend():
    x = make_inputs(23, heads=4, groups=2)
    return nsa_attention(*x.tensors(), SMALL)


def test_gates_and_selected_blocks_are_observed_inside_only():
    outer, inner = Observer(), Observer()
    with observing(outer):
        with observing(inner):
            attend()
        with observing(None):
            attend()
        assert outer.seen == []
        attend()
    attend()
    assert inner.seen == outer.seen == SEEN


def test_compiled_graphs_are_observed():
    layer = NSAAttention(24, 4, 2, 16, spec=SMALL)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(1, 23, 24)
    compiled(x)
    observer = Observer()
    with observing(observer):
        compiled(x)
    assert observer.seen == SEEN


def test_another_thread_is_not_observed():
    observer = Observer()
    with observing(observer):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    assert observer.seen == []


def test_an_observer_that_fails_is_removed_and_counted():
    broken, outer = Observer(), Observer()
    broken.selected = mock.Mock(side_effect=RuntimeError("no"))
    with observing(outer):
        with observing(broken):
            attended = attend()
            attend()
        attend()
    assert torch.equal(attended, attend())
    assert broken.failures == 1
    assert broken.seen == []
    assert outer.seen == SEEN
