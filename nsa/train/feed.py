"""What a run reads, step after step: opened, checked against the checkpoint, made ahead, reported when it stalls."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from nsa.config import Config
from nsa.data.build import Data, Place, build_data
from nsa.data.loader import Batch, Loader, Patience, Prefetcher, Request
from nsa.data.waiting import Activity, Waiter, WaitStopped
from nsa.errors import DataError, DataUnavailableError, Interrupted, Preempted
from nsa.parallel.collectives import sum_over_ranks
from nsa.train.monitor import Monitor
from nsa.train.signals import StopRequest
from nsa.train.state import RunState

T = TypeVar("T")


class Feed:
    """This rank's batches, from the run's data cursor on. Which sequences a step reads, over all ranks, depends on the
    cursor alone: sequence number first + k is read by rank k % size.

    No wait is silent. A process that is asked to stop leaves the wait for its first batch, and one that trains alone
    any later one, with `WaitStopped`. Ranks do not: within a step they wait for each other.
    """

    def __init__(
        self, config: Config, state: RunState, folder: Path, micro_batch: int, monitor: Monitor, stop: StopRequest
    ):
        self.config, self.state, self.folder = config, state, folder
        self.micro_batch, self.monitor, self.stop = micro_batch, monitor, stop
        self.passes = config.train.batch_size // (micro_batch * state.world.size)
        self.fallback: str | None = None  # why the run trains on invented text
        self.first_batch_s = 0.0
        self._arrived = 0
        self._may_leave = False  # whether a signal ends a wait
        self._waiting: Batch | None = None
        self._ahead: Prefetcher | None = None

    def open(self, *, synthetic_on_fail: bool, accept_changes: bool) -> None:
        """Opens the source and gets the first batch, or falls back; all ranks do the same."""
        began = time.perf_counter()
        failure = self._try()
        # Every rank says how it went, so that none trains on invented text, or stops, while another does not.
        left = isinstance(failure, WaitStopped)
        votes = (failure is not None, left and self.stop.terminate, left and self.stop.interrupt)
        counted = torch.tensor([float(vote) for vote in votes], device=self.state.device)
        failed, terminated, interrupted = sum_over_ranks(counted, self.state.world).tolist()
        if failed:
            self._abandon()
            if terminated or interrupted:
                raise self._stopped(Preempted if terminated else Interrupted)
            if not synthetic_on_fail:
                raise failure or DataUnavailableError("another rank could not reach its data; see there")
            self._fall_back(str(failure or "another rank could not reach its data"))
        self._check_same_data(accept_changes)
        self._data.started()
        self._may_leave = self.state.world.size == 1
        self.first_batch_s = time.perf_counter() - began
        self.monitor.emit("first_batch", self.state.progress.step, seconds=self.first_batch_s, data=self._data.summary)

    def _try(self) -> DataUnavailableError | WaitStopped | None:
        self._may_leave = True
        try:
            self._start(self.config)
        except (DataUnavailableError, WaitStopped) as error:
            return error
        finally:
            self._may_leave = False
        return None

    def _abandon(self) -> None:
        """Threads that still ask a source which is not read after all end soon."""
        self._activity.give_up()
        if self._ahead is not None:
            self.close()

    def _stopped(self, kind: type[Preempted]) -> Preempted:
        step = self.state.progress.step
        self.monitor.emit("preempted", step)
        return kind(
            f"asked to stop at step {step} while the first batch was waited for, with nothing to save; the same "
            "command goes on from there"
        )

    def _start(self, config: Config) -> None:
        place = Place(self.folder, self.state.world.rank)
        self._activity = Activity()
        self._waiter = Waiter(config.data.stall_s, self._report_stall, self._activity.waiting_for, stopped=self._leaves)
        self._ahead = None
        self._data: Data = self._waiter.run(
            lambda: build_data(config.data, config.train, self.state.tokenizer, place, self._activity),
            "the source to open",
        )
        self._requests = self._requests_from(self.state.progress.sequences, self.state.progress.step)
        data = config.data
        if data.workers:
            self._ahead = Prefetcher(
                self._data.train,
                self._requests,
                ahead=data.prefetch,
                device=self.state.device,
                patience=Patience(data.first_batch_s, data.timeout_s, data.stall_s),
                report=self._report_stall,
                waiting_for=self._activity.waiting_for,
                arrived=self._activity.arrived,
                stopped=self._leaves,
            )
        if self.state.progress.step < config.train.steps:
            self._waiting = self.next()

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        self._waiting = None
        self._start(self.config.model_copy(update={"data": self._synthetic()}))
        for line in ("=" * 78, f"DATA FALLBACK: {reason}", "THIS RUN TRAINS ON SYNTHETIC TEXT", "=" * 78):
            self.monitor.say(line)
        self.monitor.stream.incident("data_fallback", reason, self.state.progress.step)

    def _synthetic(self) -> Any:
        return self.config.data.model_copy(update={"source": "synthetic", "mixture": [], "packing": "concat"})

    def _check_same_data(self, accept_changes: bool) -> None:
        """The cursor counts sequences of one corpus: it means nothing in another."""
        found, known = self._data.fingerprint, self.state.data
        if known is not None and known != found and not accept_changes:
            raise DataError(
                f"data: the checkpoint was trained on other data than {self._data.summary}: files, tokenizer or split "
                "changed, and its place in them is lost; put the old data back, or --accept-changes to read the new "
                "from the same sequence number on"
            )
        self.state.data = found

    @property
    def summary(self) -> str:
        return self._data.summary

    @property
    def validation(self) -> Loader | None:
        return self._data.validation

    def ready_validation(self) -> Loader:
        """The validation sequences; those of a stream are collected when they are first asked for."""
        loader = self._data.validation
        assert loader is not None
        self._patiently(lambda: loader.num_sequences, "validation documents")
        return loader

    def num_targets(self) -> int:
        """Targets that count in the next step, over all ranks."""
        return self._data.train.num_targets(self.state.progress.sequences, self.config.train.batch_size)

    def next(self) -> Batch:
        """The next micro-batch."""
        if self._waiting is not None:
            batch, self._waiting = self._waiting, None
            return batch
        if self._ahead is not None:
            return self._ahead.next()
        request = next(self._requests)
        which = "the next batch" if self.first_batch_s else "the first batch"
        return self._waiter.run(lambda: self._get(request), which)

    def again(self) -> list[Batch]:
        """The micro-batches of the step under way, once more."""
        requests = list(self._requests_of(self.state.progress.sequences))
        return self._patiently(lambda: [self._get(request) for request in requests], "the batches of the step")

    def _patiently(self, function: Callable[[], T], what: str) -> T:
        """What must be had before the run may stop: the step is done, and only complete with it."""
        return replace(self._waiter, stopped=lambda: False).run(function, what)

    def _leaves(self) -> bool:
        return self._may_leave and (self.stop.terminate or self.stop.interrupt)

    def _get(self, request: Request) -> Batch:
        return self._data.train.batch(request.first, request.count, request.stride)

    def _requests_from(self, first: int, step: int) -> Iterator[Request]:
        for later in range(self.config.train.steps - step):
            yield from self._requests_of(first + later * self.config.train.batch_size)

    def _requests_of(self, first: int) -> Iterator[Request]:
        size, rank = self.state.world.size, self.state.world.rank
        for number in range(self.passes):
            yield Request(first + number * self.micro_batch * size + rank, self.micro_batch, size)

    def _report_stall(self, seconds: float, message: str) -> None:
        arrived, self._arrived = self._arrived, self._activity.arrived()
        # A hub that is tried again and again, or delivers slowly, is no hang.
        if self._activity.server() is not None or self._arrived != arrived:
            self.monitor.beat(self.state.progress.step + 1, "data")
        self.monitor.emit("data_stall", self.state.progress.step, seconds=seconds, message=message)
        self.monitor.say(message)

    def describe(self) -> dict[str, Any]:
        """For the summary of the run."""
        source = "mixture" if self.config.data.mixture else self.config.data.source
        return {
            "source": "synthetic" if self.fallback else source,
            "fallback": self.fallback,
            "first_batch_s": self.first_batch_s,
            "sequences": self._data.train.sequences.shares(self.state.progress.sequences),
            "fingerprint": self._data.fingerprint,
            "commits": list(self._data.commits),
        }

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._data.close()
