"""Tokens/s of whole models that generate with a cache, on a CUDA GPU: `make bench`, or `python -m bench.generate`.

The weights and the content of the cache are random, as if a context of that length had been read. Tokens/s are those of
`nsa generate`: sampling is part of a step, and the next step starts before the host has read the tokens. The time of a
step is that of the GPU, over steps without the host between them. The logits after a prompt and steps are first
compared with those of the whole sequence; a wrong model is not timed. The table also shows the bytes that a step must
read and how long the memory of the GPU needs for them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.output import Results, add_dirty_option
from nsa.config import Config, load_config
from nsa.generate.batch import DecodeGraphs, Pending
from nsa.generate.sampling import Sampling, uniform
from nsa.nn import KVCache
from nsa.nn.model import Decoder, build_model
from nsa.ops.layout import num_compressed

VOCABULARY = 50_257
TYPE = torch.bfloat16
LIMIT = 3e-2  # relative error of the logits
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
STEPS = 50  # a few more are taken to warm up and to count kernels


def build(config: Config) -> Decoder:
    return build_model(config, VOCABULARY, seed=0).to("cuda", TYPE).eval()


@torch.no_grad()
def error(model: Decoder, prompt: int = 960, steps: int = 40) -> float:
    """Relative error of the logits of `steps` steps after a prompt, against the whole sequence. Short enough that all
    blocks are read: the choice of a model with random weights would depend on rounding."""
    tokens = torch.randint(0, VOCABULARY, (2, prompt + steps), device="cuda")
    want = model(tokens)[:, prompt:].float()
    cache = KVCache(model, sequences=2, max_length=prompt + steps)
    model(tokens[:, :prompt], cache=cache)
    graphs, numbers = DecodeGraphs(model, cache, cache.sequences, SAMPLING), torch.zeros(2, 1, dtype=torch.float64)
    logits = []
    for tokens_B in tokens[:, prompt:].unbind(1):
        graphs.feed(tokens_B)
        graphs.run([0, 1], numbers)
        logits.append(graphs.logits_BV.clone())
    got = torch.stack(logits, dim=1).float()
    return float((got - want).norm() / want.norm())


def bytes_of_step(config: Config, model: Decoder, context: int, batch: int) -> dict[str, int]:
    """The bytes that a step must read: every weight once, and the cached tokens that the layers read."""
    weights = model.num_parameters() - (0 if config.model.tied_head else model.embedding.weight.numel())
    spec, sizes = config.nsa.spec(), config.model
    window, msa = min(context, spec.window), config.msa
    tokens = {
        "nsa": num_compressed(context, spec) + min(context, spec.num_selected * spec.sel_block) + window,
        "dense": context,
        "window": window,
        "msa": min(context, msa.num_selected * msa.block),
    }
    per_token = sizes.n_kv_heads * (sizes.head_dim_k + sizes.head_dim_v) * TYPE.itemsize
    cached = batch * per_token * sum(tokens[kind] for kind in sizes.layer_kinds())
    index_keys = context * (msa.index_dim or sizes.head_dim_k) * TYPE.itemsize
    cached += batch * index_keys * sizes.layer_kinds().count("msa")
    return {"weights": weights * TYPE.itemsize, "cache": cached}


def count_kernels(call: Callable[[], Any]) -> tuple[int, float]:
    """The number of kernels and copies on the GPU, and their milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    found = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(found), sum(event.device_time for event in found) / 1000


def device_ms(graphs: DecodeGraphs, repeats: int = 20) -> float:
    """Milliseconds of a step that completes no compressed block, over consecutive replays. The host state of the cache
    does not include them, so this comes last: they write where the page table has no page."""
    graph, _ = graphs._graphs[False]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    graph.replay()  # keeps the GPU busy while the host goes ahead
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


@torch.no_grad()
def measure(config: Config, model: Decoder, context: int, batch: int, bandwidth_tbs: float) -> dict[str, Any]:
    cache = KVCache(model, sequences=batch, max_length=context + 2 * STEPS)
    rows = [cache.add() for _ in range(batch)]
    cache.append(context)
    for layer in cache.layers.values():
        for tensors in layer.parts().values():
            for tensor in tensors:
                tensor.normal_()
    graphs, generators = DecodeGraphs(model, cache, rows, SAMPLING), [torch.Generator() for _ in rows]
    pending, times = Pending(rows, graphs.run(rows, uniform(generators))), []
    for step in range(STEPS + 5):
        began = time.perf_counter()
        started = Pending(rows, graphs.run(rows, uniform(generators)))
        pending.read(rows)
        pending = started
        if step >= 5:
            times.append(time.perf_counter() - began)
    greedy, numbers = DecodeGraphs(model, cache, rows, Sampling(temperature=0.0)), uniform(generators)
    greedy.run(rows, numbers)
    launches, kernels_ms = count_kernels(lambda: greedy.run(rows, numbers))
    step_ms = device_ms(greedy)
    read = bytes_of_step(config, model, context, batch)
    limit_ms = sum(read.values()) / (bandwidth_tbs * 1e9)
    return {
        "context": context,
        "batch": batch,
        "tokens_per_s": batch / statistics.median(times),
        "step_ms": step_ms,  # on the GPU, with the likeliest token
        "launches": launches,
        "kernels_ms": kernels_ms,  # each from its start, which may be before the end of the one before it
        "bytes": read,
        "limit_ms": limit_ms,
        "of_limit": step_ms / limit_ms,
        "cache_gib": sum(cache.memory().values()) / 2**30,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", default="m7c_125m,llama_1b")
    parser.add_argument("--attention", default="nsa,dense")
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s of the GPU's memory; an H200's unless given")
    parser.add_argument("--out", type=Path, default=Path("bench/results/generate.json"))
    add_dirty_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.generate needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    file = Results(options.out, options.allow_dirty)
    results: list[dict[str, Any]] = []
    columns = ("tokens/s", "step ms", "launches", "in kernels", "limit ms", "of limit")
    table = Table("model", "attention", "context", "batch", *columns)
    for name in options.configs.split(","):
        for attention in options.attention.split(","):
            config = load_config(name, [f"model.attention={attention}"])
            model = build(config)
            found = error(model)
            if not found <= LIMIT:
                print(f"{name}, {attention}: logits are off by {found:.1e}, more than {LIMIT}", file=sys.stderr)
                return 1
            for context in map(int, options.contexts.split(",")):
                for batch in map(int, options.batches.split(",")):
                    sizes = {"model": name, "attention": attention, "error": found}
                    results.append(sizes | measure(config, model, context, batch, options.bandwidth))
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                    file.write(bandwidth_tbs=options.bandwidth, results=results)
                    torch.cuda.empty_cache()
            del model
    for row in results:
        numbers = [f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.3f}", str(row["launches"])]
        numbers += [f"{row['kernels_ms']:.3f}", f"{row['limit_ms']:.3f}"]
        place = [row["model"], row["attention"], f"{row['context']:,}", str(row["batch"])]
        table.add_row(*place, *numbers, f"{row['of_limit']:.2f}x")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
