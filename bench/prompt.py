"""Times how a model reads a long prompt into a cache, whole and in chunks, on a CUDA GPU: `python -m bench.prompt`.

Weights and tokens are random, batch 1. Three times of each model: the whole prompt at once, chunks on the training
kernels, and the same chunks on the decoding kernels (by a larger `nsa.nn.cache_step.FEW_TOKENS`). The last hidden state
of a short prompt is first compared with that of the whole sequence; a wrong model is not timed. Prints a table, writes
JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.generate import LIMIT, VOCABULARY, build
from bench.output import Results, add_dirty_option
from nsa.config import load_config
from nsa.nn import KVCache, cache_step
from nsa.nn.model import Decoder


@torch.no_grad()
def read(model: Decoder, cache: KVCache, tokens: Tensor, chunk: int) -> Tensor:
    """Fills the cache with the prompt [1, S] and returns its last hidden state [1, C]."""
    cache.crop(0)
    for part in tokens.split(chunk, dim=1):
        last = model.hidden(part, cache=cache.append(part.shape[1]))[:, -1]
    return last


def error(model: Decoder, tokens: int = 960, chunk: int = 320) -> float:
    """Short enough that every query reads all blocks: the choice of a model with random weights depends on rounding."""
    prompt, cache = prepare(model, tokens)
    got, want = (read(model, cache, prompt, size).float() for size in (chunk, tokens))
    return float((got - want).norm() / want.norm())


def prepare(model: Decoder, tokens: int) -> tuple[Tensor, KVCache]:
    cache = KVCache(model, sequences=1, max_length=tokens)
    cache.add()
    return torch.randint(0, VOCABULARY, (1, tokens), device=cache.device), cache


def seconds(model: Decoder, cache: KVCache, prompt: Tensor, chunk: int, repeats: int) -> float:
    """The median of `repeats` readings after one that compiles kernels."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        read(model, cache, prompt, chunk)[0, 0].item()  # waits for the GPU
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(model: Decoder, tokens: int, chunk: int, repeats: int) -> dict[str, float]:
    prompt, cache = prepare(model, tokens)
    found = {"whole_s": seconds(model, cache, prompt, tokens, repeats)}
    found["chunks_s"] = seconds(model, cache, prompt, chunk, repeats)
    with mock.patch.object(cache_step, "FEW_TOKENS", tokens):
        found["decode_kernels_s"] = seconds(model, cache, prompt, chunk, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="m7c_125m")
    parser.add_argument("--attention", default="nsa,dense,window")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--chunks", default="8192,1024,128", help="tokens of a chunk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/prompt.json"))
    add_dirty_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.prompt needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    file = Results(options.out, options.allow_dirty)
    results: list[dict[str, Any]] = []
    table = Table("attention", "chunk", "whole s", "chunks s", "of whole", "decoding kernels s")
    for attention in options.attention.split(","):
        model = build(load_config(options.config, [f"model.attention={attention}"]))
        found = error(model)
        if not found <= LIMIT:
            print(f"{attention}: the hidden state is off by {found:.1e}, more than {LIMIT}", file=sys.stderr)
            return 1
        for chunk in map(int, options.chunks.split(",")):
            row = {"attention": attention, "chunk": chunk, "error": found}
            row |= measure(model, options.tokens, chunk, options.repeats)
            results.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            file.write(config=options.config, tokens=options.tokens, results=results)
            times = [row["whole_s"], row["chunks_s"], row["chunks_s"] / row["whole_s"], row["decode_kernels_s"]]
            table.add_row(attention, str(chunk), *(f"{value:.3f}" for value in times))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
