"""What a run reads, step after step: opened, checked against the checkpoint, made ahead, reported when it stalls."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nsa.config import Config
from nsa.data.build import Data, Place, build_data
from nsa.data.loader import Batch, Loader, Patience, Prefetcher, Request
from nsa.errors import DataError, DataUnavailableError
from nsa.parallel.collectives import sum_over_ranks
from nsa.train.monitor import Monitor
from nsa.train.state import RunState


class Feed:
    """This rank's batches, from the run's data cursor on. Which sequences a step reads, over all ranks, depends on the
    cursor alone: sequence number first + k is read by rank k % size."""

    def __init__(self, config: Config, state: RunState, folder: Path, micro_batch: int, monitor: Monitor):
        self.config, self.state, self.folder = config, state, folder
        self.micro_batch, self.monitor = micro_batch, monitor
        self.passes = config.train.batch_size // (micro_batch * state.world.size)
        self.fallback: str | None = None  # why the run trains on invented text
        self.first_batch_s = 0.0
        self._arrived = 0
        self._waiting: Batch | None = None

    def open(self, *, synthetic_on_fail: bool, accept_changes: bool) -> None:
        """Opens the source and gets the first batch, or falls back; all ranks do the same."""
        began = time.perf_counter()
        failure = self._try()
        # Every rank says how it went, so that none trains on invented text while another does not.
        failed = torch.tensor([float(failure is not None)], device=self.state.device)
        if float(sum_over_ranks(failed, self.state.world)[0]):
            if not synthetic_on_fail:
                raise failure or DataUnavailableError("another rank could not reach its data; see there")
            self._fall_back(failure)
        self._check_same_data(accept_changes)
        self._data.started()
        self.first_batch_s = time.perf_counter() - began
        self.monitor.emit("first_batch", self.state.progress.step, seconds=self.first_batch_s, data=self._data.summary)

    def _try(self) -> DataUnavailableError | None:
        try:
            self._start(self.config)
        except DataUnavailableError as error:
            return error
        return None

    def _start(self, config: Config) -> None:
        place = Place(self.folder, self.state.world.rank)
        self._data: Data = build_data(config.data, config.train, self.state.tokenizer, place)
        self._ahead: Prefetcher | None = None
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
                waiting_for=self._data.waiting_for,
                arrived=self._data.arrived,
            )
        if self.state.progress.step < config.train.steps:
            self._waiting = self.next()

    def _fall_back(self, failure: DataUnavailableError | None) -> None:
        self.fallback = str(failure or "another rank could not reach its data")
        self._waiting = None
        self._start(self.config.model_copy(update={"data": self._synthetic()}))
        for line in ("=" * 78, f"DATA FALLBACK: {self.fallback}", "THIS RUN TRAINS ON SYNTHETIC TEXT", "=" * 78):
            self.monitor.say(line)
        self.monitor.stream.incident("data_fallback", self.fallback, self.state.progress.step)

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
        return self._get(next(self._requests))

    def again(self) -> list[Batch]:
        """The micro-batches of the step under way, once more."""
        return [self._get(request) for request in self._requests_of(self.state.progress.sequences)]

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
        arrived, self._arrived = self._arrived, self._data.arrived()
        # A hub that is tried again and again, or delivers slowly, is no hang.
        if self._data.waiting_for() is not None or self._arrived != arrived:
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
        }

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._data.close()
