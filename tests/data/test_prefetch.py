"""Batches made ahead: the same ones in the same order, and never a silent wait."""

import itertools
import threading
import time

import pytest
import torch

from nsa.data.loader import Loader, Patience, Prefetcher, Request
from nsa.data.sequences import Cut
from nsa.data.stream import SyntheticStream
from nsa.errors import DataError, DataUnavailableError

CPU = torch.device("cpu")


def loader():
    return Loader(Cut(SyntheticStream(0, 64, 255), 32, 0), 32, isolate_documents=True)


class Gate:
    """A loader whose batches wait for `open`."""

    def __init__(self, error=None):
        self.inner, self.opened, self.asked, self.error = loader(), threading.Event(), 0, error

    def batch(self, first, count, stride=1):
        self.asked += 1
        self.opened.wait(30)
        if self.error:
            raise self.error
        return self.inner.batch(first, count, stride)


def prefetcher(source, requests, *, ahead=2, first_s=30.0, later_s=30.0, stall_s=10.0, reports=None, what=None, **more):
    reports = [] if reports is None else reports
    return Prefetcher(
        source,
        requests,
        ahead=ahead,
        device=CPU,
        patience=Patience(first_s, later_s, stall_s),
        arrived=more.get("arrived", lambda: 0),
        report=lambda seconds, message: reports.append((seconds, message)),
        waiting_for=lambda: what,
    )


@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_batches_come_in_order_and_are_those_of_the_loader(ahead):
    requests = [Request(first, 3, 2) for first in range(0, 60, 6)]
    made = prefetcher(loader(), requests, ahead=ahead)
    for request in requests:
        batch, expected = made.next(), loader().batch(request.first, 3, 2)
        assert batch.inputs.equal(expected.inputs)
        assert batch.targets.equal(expected.targets)
        assert batch.cu_seqlens.equal(expected.cu_seqlens)
    assert made.first_wait_s is not None


def test_no_more_is_read_ahead_than_asked_for():
    gate = Gate()
    gate.opened.set()
    made = prefetcher(gate, (Request(n, 1) for n in range(1000)), ahead=3)
    made.next()
    time.sleep(0.5)
    assert gate.asked <= 1 + 3 + 1  # taken, waiting ready, in the thread's hands
    made.close()


def test_a_stall_is_reported_while_it_lasts_with_what_is_waited_for():
    gate, reports = Gate(), []
    made = prefetcher(gate, [Request(0, 1)], stall_s=0.1, reports=reports, what="file.parquet, row group 3: HTTP 503")
    threading.Timer(0.55, gate.opened.set).start()
    made.next()
    assert 3 <= len(reports) <= 6
    seconds = [s for s, _ in reports]
    assert seconds == sorted(seconds)
    assert "waiting for the first batch since" in reports[0][1]
    assert "row group 3: HTTP 503" in reports[0][1]


def test_a_source_that_never_answers_ends_the_wait():
    made = prefetcher(Gate(), [Request(0, 1)], first_s=0.3, stall_s=0.1)
    began = time.monotonic()
    with pytest.raises(DataUnavailableError, match=r"waiting for the first batch.*data\.first_batch_s"):
        made.next()
    assert time.monotonic() - began < 5


def test_a_batch_may_take_longer_while_something_arrives():
    count = itertools.count()
    gate = Gate()
    threading.Timer(1.0, gate.opened.set).start()
    prefetcher(gate, [Request(0, 1)], first_s=0.4, stall_s=0.1, arrived=lambda: next(count)).next()


def test_patience_with_later_batches_is_its_own():
    gate = Gate()
    gate.opened.set()
    endless = (Request(n, 1) for n in itertools.count())
    made = prefetcher(gate, endless, ahead=1, first_s=30, later_s=0.3, stall_s=0.1)
    made.next()
    gate.opened.clear()
    with pytest.raises(DataUnavailableError, match=r"waiting for the next batch.*data\.timeout_s"):
        [made.next() for _ in range(10)]  # those made before the gate shut, then one that does not come
    made.close()


def test_an_error_of_the_source_comes_out_where_its_batch_would():
    gate = Gate(error=DataError("shard 3 is torn"))
    gate.opened.set()
    with pytest.raises(DataError, match="shard 3 is torn"):
        prefetcher(gate, [Request(0, 1)]).next()


def test_a_closed_prefetcher_lets_its_thread_end():
    gate = Gate()
    gate.opened.set()
    made = prefetcher(gate, (Request(n, 1) for n in range(10**6)), ahead=1)
    made.next()
    made.close()
    made._thread.join(5)
    assert not made._thread.is_alive()
