"""GPU timing for the benchmarks of kernels."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import triton


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
