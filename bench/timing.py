"""What the benchmarks of kernels share: times of a GPU, and which machine they are from."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import triton

from nsa.record.environment import commit


def median_ms(function: Callable[[], Any], rep: int) -> float:
    return float(triton.testing.do_bench(function, warmup=rep // 3, rep=rep, return_mode="median"))


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Milliseconds of one of `calls`, all of them replayed in turn from one CUDA graph; the median of `repeats`. Where
    they read different tensors, larger together than the GPU's cache, none of them finds its own there."""
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


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "commit": commit() or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
