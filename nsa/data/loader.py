"""Batches as a pure function of their sequence numbers, and a thread that prefetches them."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa import faults
from nsa.data.sequences import IGNORED, Sequences
from nsa.data.threads import DaemonPool
from nsa.data.waiting import Waiter


@dataclass(frozen=True)
class Batch:
    """inputs and targets [B, S] int64. With document borders: B = 1, concatenated sequences, `cu_seqlens` int32.

    The loss ignores targets of -100.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None = None  # upper bound of the length of packed documents

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def padded(self, borders: int | None) -> "Batch":
        """Repeats the last border until there are `borders`, which adds empty documents. Returns the batch unchanged if
        it has more borders or none, or if `borders` is None."""
        if borders is None or self.cu_seqlens is None or self.cu_seqlens.shape[0] > borders:
            return self
        missing = self.cu_seqlens[-1:].expand(borders - self.cu_seqlens.shape[0])
        return replace(self, cu_seqlens=torch.cat([self.cu_seqlens, missing]))

    def take(self, rows: Tensor, length: int) -> "Batch":
        """Pads every sequence to `length` tokens and selects the tokens `rows`; `cu_seqlens` still describes the whole.
        Padding has no targets, and is a separate document if there are borders."""
        extra = length - self.inputs.shape[1]
        inputs, targets = pad(self.inputs, (0, extra)), pad(self.targets, (0, extra), value=IGNORED)
        borders = self.cu_seqlens
        if borders is not None and extra:
            borders = torch.cat([borders, borders.new_tensor([length])])
        return Batch(inputs[:, rows], targets[:, rows], borders, self.max_seqlen)

    def pinned(self) -> "Batch":
        """Copies the batch to pinned memory, from which a GPU copies asynchronously."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        borders = None if self.cu_seqlens is None else change(self.cu_seqlens)
        return Batch(change(self.inputs), change(self.targets), borders, self.max_seqlen)


class Loader:
    """Stacks sequences into batches. Calls `make` when the sequences are first needed."""

    def __init__(self, make: Callable[[], Sequences], seq_len: int, *, isolate_documents: bool):
        self._make = make
        self.seq_len = seq_len
        self.isolate_documents = isolate_documents

    @cached_property
    def sequences(self) -> Sequences:
        return self._make()

    def batch(self, first: int, count: int, stride: int = 1) -> Batch:
        """Returns a batch of `count` sequences: first, first + stride, ..."""
        numbers = range(first, first + count * stride, stride)
        self.sequences.prefetch(numbers)
        rows = [self.sequences.row(number) for number in numbers]
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


class Prefetcher:
    """Loads the batches with these sequence numbers in order. A thread prefetches `ahead` batches; with 0 it loads each
    batch on demand.

    `waiter` reports and interrupts the wait in `next`; the first batch has a separate timeout. The `next` that would
    have returned a batch raises the error of its source. `borders`: see `Batch.padded`.
    """

    def __init__(
        self,
        loader: Loader,
        numbers: Iterable[range],
        *,
        ahead: int,
        device: torch.device,
        waiter: Waiter,
        first_batch_s: float,
        timeout_s: float,
        borders: int | None = None,
    ):
        self.loader, self.device, self.waiter, self.borders = loader, device, waiter, borders
        self.first_batch_s, self.timeout_s = first_batch_s, timeout_s
        self._numbers = iter(numbers)
        self._pool = DaemonPool(1, "data-prefetch")
        self._pending: deque[Future[Batch]] = deque()
        self._ahead = ahead
        self._has_begun = False  # the first batch has arrived
        self._fill(ahead)

    def _fill(self, count: int) -> None:
        while len(self._pending) < count and (numbers := next(self._numbers, None)) is not None:
            self._pending.append(self._pool.submit(partial(self._load, numbers)))

    def _load(self, numbers: range) -> Batch:
        faults.point("data.batch")
        batch = self.loader.batch(numbers.start, len(numbers), numbers.step).padded(self.borders)
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # otherwise this thread would create a context on the first GPU
        return batch.pinned()

    def next(self) -> Batch:
        self._fill(1)
        future = self._pending.popleft()
        self._fill(self._ahead)
        if self._has_begun:
            return self.waiter.wait(future, "the next batch", timeout_s=self.timeout_s, setting="data.timeout_s")
        batch = self.waiter.wait(future, "the first batch", timeout_s=self.first_batch_s, setting="data.first_batch_s")
        self._has_begun = True
        return batch

    def close(self) -> None:
        self._pool.close()
