"""GPU timing for the benchmarks of kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

BANDWIDTH = 4.8e12  # bytes/s of an H200
CACHE = 120 << 20  # bytes, more than the L2 cache of a GPU holds
LIMIT = 5e-3  # of relative errors in bf16


def median_ms(function: Callable[[], Any], rep: int) -> float:
    return float(triton.testing.do_bench(function, warmup=rep // 3, rep=rep, return_mode="median"))


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Milliseconds of one of `calls`, all of them replayed in turn from one CUDA graph; the median of `repeats`. If
    they read different tensors that together exceed the L2 cache, no call finds its own tensors there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(stop) for start, stop in events)) / len(calls)


def copies(bytes_read: float) -> int:
    """The number of caches that calls alternate between."""
    return max(1, min(16, -(-CACHE // int(bytes_read))))


def twice(calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    return calls * max(2, 16 // len(calls))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Recorded:
    """Replaces a kernel: launches it and records the launch."""

    def __init__(self, kernel: Any, name: str, launched: dict[str, Callable[[], Any]]):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> None:
            # Repeated alone, it must not start while its previous launch still runs.
            options = {name: value for name, value in options.items() if name != "launch_pdl"} | {"OVERLAP": False}
            self.launched[self.name] = partial(self.kernel[grid], *args, **options)
            self.launched[self.name]()

        return launch


@contextmanager
def recorded(module: ModuleType, names: Sequence[str]) -> Iterator[dict[str, Callable[[], Any]]]:
    """Inside, the launches of a module's kernels are recorded with their tensors, and can be repeated one by one."""
    launched: dict[str, Callable[[], Any]] = {}
    kernels: dict[str, Any] = {name: Recorded(getattr(module, name), name, launched) for name in names}
    with mock.patch.multiple(module, **kernels):
        yield launched
