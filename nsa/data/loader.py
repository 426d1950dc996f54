"""Batches as a pure function of their sequences' numbers, and a thread that makes them before they are asked for."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsa import faults
from nsa.data.sequences import Row, Sequences
from nsa.data.waiting import Limit, Waiter


@dataclass(frozen=True)
class Batch:
    """inputs and targets [B, S] int64. With document borders: B = 1, sequences back to back, `cu_seqlens` int32.

    A target of -100 does not count.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None = None  # no packed document is longer

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """In memory that a GPU copies from while the host goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        borders = None if self.cu_seqlens is None else change(self.cu_seqlens)
        return Batch(change(self.inputs), change(self.targets), borders, self.max_seqlen)


class Loader:
    """Joins sequences into batches."""

    def __init__(self, sequences: Sequences, seq_len: int, *, isolate_documents: bool):
        self.sequences = sequences
        self.seq_len = seq_len
        self.isolate_documents = isolate_documents

    @property
    def num_sequences(self) -> int | None:
        """Sequences in one epoch; None for an endless stream."""
        return self.sequences.count

    def num_targets(self, first: int, count: int) -> int:
        """Targets that count in `count` sequences from `first` on."""
        return self.sequences.num_targets(range(first, first + count))

    def batch(self, first: int, count: int, stride: int = 1) -> Batch:
        """The sequences first, first + stride, ..., `count` of them."""
        numbers = range(first, first + count * stride, stride)
        self.sequences.expect(numbers)
        return self._join([self.sequences.row(number) for number in numbers])

    def _join(self, rows: list[Row]) -> Batch:
        joined = torch.empty(2, len(rows), self.seq_len, dtype=torch.int64)
        array = joined.numpy()
        for place, row in enumerate(rows):
            array[0, place], array[1, place] = row.inputs, row.targets
        if not self.isolate_documents:
            return Batch(joined[0], joined[1], None)
        starts = [row.starts + place * self.seq_len for place, row in enumerate(rows)]
        cu_seqlens = np.concatenate([*starts, [len(rows) * self.seq_len]]).astype(np.int32)
        borders = torch.from_numpy(cu_seqlens)
        return Batch(joined[0].view(1, -1), joined[1].view(1, -1), borders, self.seq_len)


@dataclass(frozen=True)
class Request:
    """What `Loader.batch` is asked for."""

    first: int
    count: int
    stride: int = 1


@dataclass(frozen=True)
class Patience:
    """How long a batch may take: the first, any later one, and the wait after which it is said aloud.

    It may take longer as long as something arrives: a slow tokenizer, or a run that has to find its place again.
    """

    first_s: float
    later_s: float
    stall_s: float


class Prefetcher:
    """The batches of `requests` in their order, made ahead by a thread.

    `next` gives the next one and never waits in silence: every `stall_s` seconds `report` is called with how long it
    has been and what is being waited for. `arrived` counts what a source has delivered so far. Patience that is at its
    end is a DataUnavailableError, a request to stop (`stopped`) a WaitStopped; an error of the source is raised by the
    `next` that would have got its batch.
    """

    def __init__(
        self,
        loader: Loader,
        requests: Iterable[Request],
        *,
        ahead: int,
        device: torch.device,
        patience: Patience,
        report: Callable[[float, str], None],
        waiting_for: Callable[[], str | None],
        arrived: Callable[[], int] = lambda: 0,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self.loader, self.device, self.patience = loader, device, patience
        self._waiter = Waiter(patience.stall_s, report, waiting_for, arrived, stopped)
        self.first_wait_s: float | None = None  # how long the first batch took
        self._began = time.perf_counter()
        self._requests = iter(requests)
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self.device.type == "cuda":  # else this thread would open a context on the first GPU
            torch.cuda.set_device(self.device)
        try:
            for batch in self._make(self._requests):
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # whatever it is, the thread that trains must hear of it
            self._put(error)

    def _make(self, requests: Iterator[Request]) -> Iterator[Batch]:
        for request in requests:
            faults.point("data.batch")
            batch = self.loader.batch(request.first, request.count, request.stride)
            yield batch.pinned() if self.device.type == "cuda" else batch

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> Batch:
        def get(timeout: float) -> Batch | BaseException | None:
            return self._ready.get(timeout=timeout)

        is_first = self.first_wait_s is None
        if is_first:
            limit = Limit(self.patience.first_s, "data.first_batch_s")
            item = self._waiter.wait(get, "the first batch", limit=limit, began=self._began)
        else:
            item = self._waiter.wait(get, "the next batch", limit=Limit(self.patience.later_s, "data.timeout_s"))
        if isinstance(item, BaseException):
            raise item
        assert item is not None, "more batches were taken than asked for"
        if is_first:
            self.first_wait_s = time.perf_counter() - self._began
        return item

    def close(self) -> None:
        self._closed.set()
