"""The start and the end of a run in one process: everything it needs is built, and its results are written.

Rank 0 alone prints and writes results; every rank computes, agrees and saves its shards.
"""

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nsa import faults
from nsa.checkpoint.export import serialize_weights, weights_metadata
from nsa.checkpoint.format import write_atomically
from nsa.config import Config
from nsa.data.tokenizers import TOKENIZER_FILE, JsonTokenizer
from nsa.nn.flops import FlopsPerToken, flops_per_token
from nsa.parallel.collectives import on_first_rank
from nsa.parallel.strategy import effective, gather_weights
from nsa.record.environment import describe_environment
from nsa.record.schema import CHECKPOINTS_FOLDER, ENVIRONMENT_FILE, METRICS_FILE, WEIGHTS_FILE
from nsa.train.checkpointing import Checkpointing, resume, seed_generators
from nsa.train.feed import Feed
from nsa.train.folder import start_over, write_config, write_json
from nsa.train.monitor import Monitor
from nsa.train.signals import StopRequest
from nsa.train.state import RunState


@dataclass(frozen=True)
class StartOptions:
    """How `train` was called; see there."""

    fresh: bool = False
    accept_changes: bool = False
    synthetic_on_fail: bool = False


class Session:
    """A run that is ready for its next step: resumed or new, its data open, its files written."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        state: RunState,
        micro_batch: int,
        monitor: Monitor,
        stop: StopRequest,
        options: StartOptions,
    ):
        self.config, self.folder, self.state, self.micro_batch = config, folder, state, micro_batch
        self.monitor, self.stop = monitor, stop
        seed_generators(config.train.seed, state.world.rank)
        monitor.beat(0, "restore")
        resumed = None
        if not options.fresh:
            resumed = resume(state, config, folder, monitor, accept_changes=options.accept_changes)
        monitor.beat(self.step, "data")
        self.feed = Feed(config, state, folder, micro_batch, monitor, stop)
        self.feed.open(synthetic_on_fail=options.synthetic_on_fail, accept_changes=options.accept_changes)
        if options.fresh and state.world.is_first:
            start_over(folder)
        monitor.open(state)
        monitor.dump_memory(state, "boot")
        self.first_step = self.step + 1
        self.checkpointing = Checkpointing(config, state, folder / CHECKPOINTS_FOLDER, monitor, resumed)
        if state.world.is_first:
            self._write_start(resumed)
        monitor.emit(
            "start",
            self.step,
            strategy=state.world.strategy,
            world_size=state.world.size,
            backend=state.world.backend,
            steps=config.train.steps,
            fresh=options.fresh,
            from_checkpoint=resumed,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.state.progress.step

    def finish(self, started: float) -> None:
        """The last checkpoint, the weights in one file, the summary. No rank returns before all of them are there."""
        self.monitor.beat(self.step, "end")
        with self.monitor.extended_timeout():
            self.checkpointing.save_now()
        self.monitor.beat(self.step, "end")
        weights = gather_weights(self.state.parameters, self.state.world)
        self.feed.close()
        self.monitor.last_samples()
        self.monitor.emit("end", self.step)
        self.monitor.close()
        on_first_rank(self.state.world, lambda: self._write_results(weights, time.perf_counter() - started))

    def _write_start(self, resumed: str | None) -> None:
        # First: what lies here is not done.
        write_json(self.folder / METRICS_FILE, {"status": "running", "steps": self.step})
        faults.point("start.running")
        write_config(self.folder, self.config)
        if isinstance(self.state.tokenizer, JsonTokenizer):  # the folder can be used where the original is not
            write_atomically(self.folder / TOKENIZER_FILE, self.state.tokenizer.text.encode())
        environment = describe_environment(self.config.to_dict(), self.state.world.size, self.state.world.strategy)
        config = self.config
        flops = flops_per_token(self.state.model, config.model, config.nsa, config.train.seq_len)
        graphs = str(self.state.graphs)
        known = {"precision": self.state.precision, "flops_per_token": flops.sparse, "cuda_graphs": graphs}
        write_json(self.folder / ENVIRONMENT_FILE, environment | known)
        for line in self._describe(resumed, flops):
            self.monitor.log(line)

    def _write_results(self, weights: dict[str, Tensor], seconds: float) -> None:
        progress = self.state.progress
        faults.point("end.weights")
        metadata = weights_metadata(progress.step, self.config.to_dict())
        write_atomically(self.folder / WEIGHTS_FILE, serialize_weights(weights, **metadata))
        faults.point("end.metrics")
        write_json(
            self.folder / METRICS_FILE,
            {
                "status": "done",
                "exit_code": 0,
                "steps": progress.step,
                "tokens": progress.tokens,
                "loss": progress.loss if math.isfinite(progress.loss or 0.0) else None,
                "val_loss": progress.val_loss,
                "val_bits_per_byte": progress.val_bits_per_byte,
                "best_val_loss": progress.best_val_loss,
                "skipped_steps": progress.skipped,
                "data": self.feed.describe(),
                "cuda_graphs": str(self.state.graphs),
                **self.monitor.describe(),
                "strategy": self.state.world.strategy,
                "world_size": self.state.world.size,
                "seconds": seconds,
            },
        )

    def _describe(self, resumed: str | None, flops: FlopsPerToken) -> Iterator[str]:
        config, state = self.config, self.state
        yield f"data    {self.feed.data.summary}"
        yield f"first   batch after {self.feed.first_batch_s:.2f} s"
        yield (
            f"model   {state.model.num_parameters():,} parameters, {config.model.n_layers} layers, "
            f"{_describe_layers(config.model.layer_kinds())} attention, {state.precision} on {state.device}"
        )
        if state.device.type == "cuda":
            yield f"graphs  {state.graphs}"
        if config.runtime.precision not in ("auto", state.precision):
            yield f"note    this CPU has no bf16 instructions: bf16 is computed in {state.precision}"
        sparse = set(config.model.layer_kinds()) != {"dense"}
        costs = f"{flops.sparse:.3g} FLOPs per token, " if sparse else ""
        yield (
            f"cost    {costs}{flops.dense_equivalent:.3g} FLOPs per token with dense attention "
            f"at {config.train.seq_len} tokens (estimates, forward and backward)"
        )
        yield (
            f"batch   {config.train.batch_size} sequences a step: {state.world.data_size} ranks x {self.feed.passes} "
            f"passes x {self.micro_batch}"
        )
        if state.world.context is not None:
            yield f"context each of these is {state.world.context.size} ranks, which share every sequence"
        if config.parallel.ddp.safe_mode:
            used = effective(config.parallel.ddp)
            yield (
                f"safe    safe_mode: reference kernels; under ddp find_unused={used.find_unused}, "
                f"bucket_mb={used.bucket_mb}, bucket_view={used.bucket_view}, "
                f"broadcast_buffers={used.broadcast_buffers}"
            )
        if config.train.freeze:
            learning = sum(p.numel() for p in state.trainable)
            yield f"frozen  all but {learning:,} parameters of this rank (train.freeze)"
        if config.train.teacher:
            yield f"teacher {config.train.teacher}: the training loss is the KL divergence from it"
        if config.nsa.force_branch:
            yield f"branch  {config.nsa.force_branch} alone"
        yield f"folder  {self.folder}"
        if resumed:
            yield f"resume  {resumed}: step {self.step} of {config.train.steps} is done"


def _describe_layers(kinds: Sequence[str]) -> str:
    """nsa, or 9 nsa + 3 dense."""
    counts = Counter(kinds)
    return kinds[0] if len(counts) == 1 else " + ".join(f"{count} {kind}" for kind, count in counts.items())
