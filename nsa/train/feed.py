"""The batches of a run: opens its data, checks it against the checkpoint, prefetches, and reports stalls."""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from nsa.config.schema import DataConfig
from nsa.data.build import Data, build_data
from nsa.data.loader import Batch, Loader, Prefetcher
from nsa.data.waiting import Activity, Waiter, WaitStopped
from nsa.errors import DataError, DataUnavailableError, Interrupted, Preempted
from nsa.parallel.collectives import gather_objects, sum_over_ranks
from nsa.supervise.signals import StopRequest
from nsa.train.monitor import Monitor
from nsa.train.state import RunState

T = TypeVar("T")


class Feed:
    """This rank's batches, from the run's data cursor on. The sequences of a step, over all ranks, depend only on the
    cursor: rank k % size reads sequence number first + k; under context parallelism, the group of that number reads it.

    Every long wait is reported. A request to stop interrupts the wait for the first batch, and in a run of one process
    any later wait, with `WaitStopped`. Ranks of a larger run finish their step, because the others wait for them.
    """

    def __init__(self, state: RunState, micro_batch: int, monitor: Monitor, stop: StopRequest):
        self.config, self.state, self.folder = state.config, state, monitor.folder
        self.micro_batch, self.monitor, self.stop = micro_batch, monitor, stop
        self.passes = self.config.train.batch_size // (micro_batch * state.world.data_size)
        self.fallback: str | None = None  # why the run trains on synthetic text
        self.first_batch_s = 0.0
        self._arrived = 0
        self._interruptible = False  # whether a request to stop ends a wait
        self._first: Batch | None = None
        self._batches: Prefetcher | None = None

    def open(self, *, synthetic_on_fail: bool, accept_changes: bool) -> None:
        """Opens the source and gets the first batch, or falls back to synthetic text; all ranks do the same."""
        began = time.perf_counter()
        failure: DataUnavailableError | WaitStopped | None = None
        self._interruptible = True
        try:
            self._start(self.config.data)
        except (DataUnavailableError, WaitStopped) as error:
            failure = error
        finally:
            self._interruptible = False
        # All ranks agree on the outcome: either all train on synthetic text, or all stop, or none.
        left = isinstance(failure, WaitStopped)
        votes = (failure is not None, left and self.stop.terminate, left and self.stop.interrupt)
        counted = torch.tensor([float(vote) for vote in votes], device=self.state.device)
        failed, terminated, interrupted = sum_over_ranks(counted, self.state.world).tolist()
        if failed:
            if self._batches is not None:
                self.close()
            if terminated or interrupted:
                raise self._stopped(Preempted if terminated else Interrupted)
            if not synthetic_on_fail:
                raise failure or DataUnavailableError("another rank could not reach its data; see its log")
            self._fall_back(str(failure or "another rank could not reach its data"))
        self._check_same_data(accept_changes)
        self._interruptible = self.state.world.size == 1
        self.first_batch_s = time.perf_counter() - began
        self.monitor.emit("first_batch", self.state.progress.step, seconds=self.first_batch_s, data=self.data.summary)

    def _stopped(self, kind: type[Preempted]) -> Preempted:
        step = self.state.progress.step
        self.monitor.emit("preempted", step)
        return kind(
            f"asked to stop at step {step} while the run waited for its first batch, with nothing to save; the same "
            "command resumes from there"
        )

    def _start(self, data: DataConfig) -> None:
        self._batches = None
        self._activity = Activity()
        self._waiter = Waiter(self._activity, data.stall_s, self._report_stall, stopped=self._is_stopped)
        train, state, world = self.config.train, self.state, self.state.world
        self.data: Data = self._waiter.run(
            lambda: build_data(data, train, state.tokenizer, self.folder, world.rank, self._activity, world.node_share),
            "the source to open",
            data.first_batch_s,
            "data.first_batch_s",
        )
        self._batches = Prefetcher(
            self.data.train,
            self._numbers_from(state.progress.sequences, state.progress.step),
            ahead=data.prefetch if data.workers else 0,
            device=state.device,
            waiter=self._waiter,
            first_batch_s=data.first_batch_s,
            timeout_s=data.timeout_s,
            borders=state.graphs.borders,
        )
        if state.progress.step < train.steps:
            self._first = self._batches.next()

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        self._first = None
        self._start(self.config.data.model_copy(update={"source": "synthetic", "mixture": [], "packing": "concat"}))
        for line in ("=" * 78, f"DATA FALLBACK: {reason}", "THIS RUN TRAINS ON SYNTHETIC TEXT", "=" * 78):
            self.monitor.log(line)
        self.monitor.stream.incident("data_fallback", reason, self.state.progress.step)

    def _check_same_data(self, accept_changes: bool) -> None:
        """Refuses other data than the checkpoint's: the cursor counts the sequences of one corpus."""
        found, known = self.data.fingerprint, self.state.data
        if len(set(gather_objects(found, self.state.world))) > 1:
            raise DataError(
                "data: ranks read different data; make the files of data.paths identical on all nodes, read them on "
                "all nodes from the hub, its cache or a mirror, and set data.revision to a commit"
            )
        if known is not None and known != found and not accept_changes:
            raise DataError(
                f"data: the checkpoint was trained on other data than {self.data.summary}: files, tokenizer or split "
                "changed, and its position in them is lost; restore the old data, or use --accept-changes to read the "
                "new data from the same sequence number on"
            )
        if known not in (None, found):
            self.state.progress.best_val_loss = None  # of other validation documents
        self.state.data = found

    def ready_validation(self) -> Loader:
        """The validation sequences; for a stream they are collected at the first call."""
        loader = self.data.validation
        assert loader is not None
        self._run(lambda: loader.sequences.count, "validation documents")
        return loader

    def num_targets(self) -> int:
        """The number of target tokens in the next step, over all ranks."""
        first = self.state.progress.sequences
        return self.data.train.sequences.num_targets(range(first, first + self.config.train.batch_size))

    def next(self) -> Batch:
        """The next micro-batch."""
        if self._first is not None:
            batch, self._first = self._first, None
            return batch
        assert self._batches is not None
        return self._batches.next()

    def reread(self) -> list[Batch]:
        """The micro-batches of the current step again."""
        passes = list(self._numbers_of(self.state.progress.sequences))
        batches = lambda: [self.data.train.batch(n.start, len(n), n.step) for n in passes]  # noqa: E731
        return self._run(batches, "the batches of the step", interruptible=False)

    def _run(self, function: Callable[[], T], what: str, *, interruptible: bool = True) -> T:
        limit, setting = self.config.data.timeout_s, "data.timeout_s"
        return self._waiter.run(function, what, limit, setting, interruptible=interruptible)

    def _is_stopped(self) -> bool:
        return self._interruptible and (self.stop.terminate or self.stop.interrupt)

    def _numbers_from(self, first: int, step: int) -> Iterator[range]:
        for later in range(self.config.train.steps - step):
            yield from self._numbers_of(first + later * self.config.train.batch_size)

    def _numbers_of(self, first: int) -> Iterator[range]:
        """The numbers of this rank's sequences in a step, by micro-batch."""
        size, rank, last = self.state.world.data_size, self.state.world.data_rank, first + self.config.train.batch_size
        for start in range(first, last, self.micro_batch * size):
            yield range(start + rank, start + self.micro_batch * size, size)

    def _report_stall(self, seconds: float, message: str) -> None:
        arrived, self._arrived = self._arrived, self._activity.arrived()
        # Retries and slow downloads are not a hang.
        if self._activity.server() is not None or self._arrived != arrived:
            self.monitor.beat(self.state.progress.step + 1, "data")
        self.monitor.emit("data_stall", self.state.progress.step, seconds=seconds, message=message)
        self.monitor.log(message)

    def describe(self) -> dict[str, Any]:
        """Fields for the summary of the run."""
        source = "mixture" if self.config.data.mixture else self.config.data.source
        return {
            "source": "synthetic" if self.fallback else source,
            "fallback": self.fallback,
            "first_batch_s": self.first_batch_s,
            "sequences": self.data.train.sequences.shares(self.state.progress.sequences),
            "fingerprint": self.data.fingerprint,
            "commits": self.data.commits,
            "skipped": self.data.skipped,
        }

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self.data.close()
