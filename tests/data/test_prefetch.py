"""Prefetched batches: the same ones in the same order, with a timeout for the first and another for later ones."""

import threading

import pytest
import torch

from nsa.data.loader import Loader, Prefetcher
from nsa.data.sequences import SyntheticSequences
from nsa.data.waiting import Activity, Waiter
from nsa.errors import DataError, DataUnavailableError
from tests.data.clock import Clock

CPU = torch.device("cpu")


def loader():
    return Loader(lambda: SyntheticSequences(32, 0, 255), 32, isolate_documents=True)


class Gate:
    """A loader of which `permits` batches come, and the next one when more are released."""

    def __init__(self, permits=0, error=None):
        self.inner, self.permits, self.requested, self.error = loader(), threading.Semaphore(permits), 0, error

    def batch(self, first, count, stride=1):
        self.requested += 1
        assert self.permits.acquire(timeout=30)
        if self.error:
            raise self.error
        return self.inner.batch(first, count, stride)


def prefetcher(source, requests, *, ahead=2, waiter=None, first_batch_s=30.0, timeout_s=30.0):
    waiter = waiter or Waiter(Activity(), 10.0, lambda *_: None)
    return Prefetcher(
        source, requests, ahead=ahead, device=CPU, waiter=waiter, first_batch_s=first_batch_s, timeout_s=timeout_s
    )


@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
def test_batches_come_in_order_and_are_those_of_the_loader(ahead):
    requests = [range(first, first + 6, 2) for first in range(0, 60, 6)]
    made = prefetcher(loader(), requests, ahead=ahead)
    for request in requests:
        batch, expected = made.next(), loader().batch(request.start, 3, 2)
        assert batch.inputs.equal(expected.inputs)
        assert batch.targets.equal(expected.targets)
        assert batch.cu_seqlens.equal(expected.cu_seqlens)


@pytest.mark.parametrize("ahead", [0, 3])
def test_no_more_is_prefetched_than_configured(ahead):
    gate = Gate(permits=1000)
    made = prefetcher(gate, (range(n, n + 1) for n in range(1000)), ahead=ahead)
    for taken in range(1, 5):
        made.next()
        # What the thread does is done when a job behind all of the prefetcher's is.
        made._pool.submit(lambda: None).result(30)
        assert gate.requested == taken + ahead
    made.close()


def test_the_first_batch_and_later_ones_have_timeouts_of_their_own():
    clock, gate, reports = Clock(), Gate(), []
    waiter = Waiter(Activity(), 10.0, lambda _, message: reports.append(message), clock=clock, pause=clock.pause)
    made = prefetcher(gate, [range(n, n + 1) for n in range(9)], ahead=1, waiter=waiter, first_batch_s=25, timeout_s=50)
    with pytest.raises(DataUnavailableError, match=r"waited 25\.\d s for the first batch.*data\.first_batch_s"):
        made.next()
    assert reports == [f"data: waited {seconds}.0 s for the first batch" for seconds in (10, 20)]
    gate.permits.release(2)
    made._pending[0].result(30)  # now the second batch is ready
    made.next()
    start = clock.now
    with pytest.raises(DataUnavailableError, match=r"waited 50\.\d s for the next batch.*data\.timeout_s"):
        made.next()
    assert clock.now - start == pytest.approx(50)
    gate.permits.release(9)
    made.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_the_source_comes_out_where_its_batch_would(ahead):
    with pytest.raises(DataError, match="shard 3 is torn"):
        prefetcher(Gate(permits=9, error=DataError("shard 3 is torn")), [range(1)], ahead=ahead).next()


def test_a_closed_prefetcher_lets_its_thread_end():
    before = set(threading.enumerate())
    made = prefetcher(Gate(permits=9), (range(n, n + 1) for n in range(10**6)), ahead=1)
    (thread,) = set(threading.enumerate()) - before
    made.next()
    made.close()
    thread.join(5)
    assert not thread.is_alive()
