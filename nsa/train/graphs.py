"""Forward and backward of a micro-batch as CUDA graphs: the host launches one graph instead of a thousand kernels.

A graph is captured once, on copies of a batch, and replayed for every later batch of its shape, with the same results
as without it. Two graphs share one memory pool: the first pass of a step sets the gradients, further passes add to
them. A pass that needs Python, for example to sample attention statistics, runs without graphs.

The graphs keep the activations of a pass reserved, in addition to those of a pass without graphs. `auto` therefore
disables graphs if memory does not suffice for both or if the capture fails; `reason` says why.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nsa import faults
from nsa.config import Config
from nsa.data.loader import Batch
from nsa.errors import ConfigError
from nsa.ops.layout import layouts_of_capture
from nsa.parallel.world import World

WARM_UP = 3  # passes before a capture: they load kernels, compile blocks and allocate library workspaces
GIB = 1 << 30

# Runs forward and backward of a batch, given the divisor and the scale of its loss, and returns its losses.
Pass = Callable[[Batch, Tensor, Tensor], Tensor]


def refusal(config: Config, world: World) -> str | None:
    """Why the steps of a run cannot be captured; None if they can."""
    telemetry = config.telemetry
    if world.device.type != "cuda":
        return "the run is not on a GPU"
    if world.strategy != "single":
        return f"{world.strategy} exchanges tensors between ranks from inside forward and backward"
    if telemetry.trace_grads or telemetry.trace_modules or telemetry.trace_buckets:
        return "telemetry.trace_* runs Python in every pass"
    if faults.armed():
        return "faults are injected into the steps"
    return None


def memory_refusal(needed: int, free: int) -> str | None:
    """Why memory does not suffice for the graphs of a pass of `needed` bytes and such a pass without graphs."""
    if free >= 2.2 * needed:
        return None
    return f"a pass needs {needed / GIB:.1f} GiB, twice with graphs, and {free / GIB:.1f} GiB are free"


def plan_graphs(config: Config, world: World, micro_batch: int) -> "StepGraphs":
    """Graphs as set by runtime.cuda_graphs. Raises ConfigError if it requires graphs that are refused."""
    wanted = config.runtime.cuda_graphs
    reason = "runtime.cuda_graphs is false" if wanted is False else refusal(config, world)
    if wanted is True and reason is not None:
        raise ConfigError(f"runtime.cuda_graphs: cannot be true, because {reason}; set it to auto or false")
    accumulates = config.train.batch_size > micro_batch * world.data_size
    return StepGraphs(micro_batch * config.train.seq_len, accumulates, reason, required=wanted is True)


class StepGraphs:
    """The graphs of steps whose passes have `tokens` tokens; `accumulates`: a step has several passes.

    `reason` is why steps run without graphs, or None. Graphs need fixed shapes: `borders` is the number of document
    borders that every batch is padded to, or None without graphs. A batch with more borders runs without graphs.
    """

    def __init__(self, tokens: int, accumulates: bool, reason: str | None = None, *, required: bool = False):
        self.reason, self.required, self.accumulates = reason, required, accumulates
        self.borders = None if reason else tokens // 256 + 16
        self.overflows = 0  # passes with more borders
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []  # for the first pass and for others; their losses
        self._gradients: list[Tensor | None] = []

    def __str__(self) -> str:
        if self.reason is not None:
            return f"off: {self.reason}"
        return f"on, but not for {self.overflows} passes of too many documents" if self.overflows else "on"

    def run(
        self, work: Pass, parameters: list[nn.Parameter], batch: Batch, divisor: Tensor, scale: float, *, is_first: bool
    ) -> Tensor | None:
        """Replays `work` on a batch, with gradients in the parameters, and returns its loss; None if that is not
        possible. The gradients are set if `is_first`, else added to those of earlier replays."""
        if self.reason is not None or not self._fits(batch):
            return None
        if not self._graphs:
            try:
                self._prepare(work, parameters, batch, divisor)
            except Exception as error:
                self._give_up(parameters, error)
            if self.reason is not None:
                return None
        for static, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        self._divisor.copy_(divisor)
        self._scale.fill_(scale)
        graph, loss = self._graphs[0 if is_first else 1]
        graph.replay()
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return loss

    def drop(self) -> None:
        """Drops the graphs, for a model that computes something else from now on; the next step captures new ones."""
        self._graphs.clear()
        self._gradients = []

    def _fits(self, batch: Batch) -> bool:
        borders = None if batch.cu_seqlens is None else batch.cu_seqlens.shape[0]
        if borders not in (None, self.borders):
            self.overflows += 1
            return False
        return not self._graphs or _shapes(batch) == _shapes(self._batch)

    def _prepare(self, work: Pass, parameters: list[nn.Parameter], batch: Batch, divisor: Tensor) -> None:
        """Captures the graphs if there is enough memory. Drops the gradients of its own passes."""
        borders = None if batch.cu_seqlens is None else batch.cu_seqlens.clone()
        self._batch = replace(batch, inputs=batch.inputs.clone(), targets=batch.targets.clone(), cu_seqlens=borders)
        self._divisor, self._scale = divisor.clone(), torch.ones_like(divisor)
        self._warm_up(work, parameters)
        if self.reason is not None:
            return
        pool = torch.cuda.graph_pool_handle()
        self._graphs.append(self._capture(work, pool))  # no gradients yet: they are allocated in the pool
        self._gradients = [parameter.grad for parameter in parameters]
        if self.accumulates:
            self._graphs.append(self._capture(work, pool))

    def _warm_up(self, work: Pass, parameters: list[nn.Parameter]) -> None:
        """Runs passes that set and add gradients, then drops these. Disables graphs if memory does not suffice."""
        stream, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work(self._batch, self._divisor, self._scale)
        torch.cuda.current_stream().wait_stream(stream)
        _drop_gradients(parameters)
        needed = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        if not self.required:
            self.reason = memory_refusal(needed, torch.cuda.mem_get_info()[0])

    def _capture(self, work: Pass, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads use the device during the capture: they copy the next batches.
            with layouts_of_capture(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                loss = work(self._batch, self._divisor, self._scale)
        finally:
            torch.cuda.set_stream(stream)  # a failed capture does not restore the stream
        return graph, loss

    def _give_up(self, parameters: list[nn.Parameter], error: Exception) -> None:
        self.drop()
        _drop_gradients(parameters)
        first_line = (str(error).splitlines() or [""])[0]
        self.reason = f"the step could not be captured: {type(error).__name__}: {first_line}"
        if self.required:
            raise ConfigError(f"runtime.cuda_graphs: {self.reason}; set it to auto or false") from error


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for tensor in (batch.inputs, batch.targets, batch.cu_seqlens) if tensor is not None]


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(batch)]


def _drop_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
