"""Times a decode step of MSA: rows of `python -m bench.decode`, and `python -m bench.msa_decode` for other launches.

Every step is checked against the float64 reference on some of its sequences before it is timed. Times are those of a
CUDA graph's replay, in which calls alternate between caches that together exceed the L2 cache.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.shapes import Shape
from bench.timing import BANDWIDTH, LIMIT, copies, graph_ms, recorded, relative, twice
from nsa.ops import MSASpec, PagedKV, msa_decode
from nsa.ops.reference import decode as reference
from nsa.ops.triton import msa_decode as kernels
from nsa.ops.triton.decode import Launches
from nsa.ops.triton.launch_table import Launch

SPEC = MSASpec()
KERNELS = ("index_scores_kernel", "chosen_kernel", "merge_kernel")
# Programs for every multiprocessor, keys at a time, warps, stages, registers of a thread.
SCORES = [
    (4, 128, 4, 1, 128), (3, 128, 4, 1, 168), (6, 128, 4, 1, 80), (4, 128, 8, 1, 64), (2, 256, 8, 1, 128),
    (1, 128, 4, 3), (1, 128, 4, 6), (2, 128, 4, 3), (2, 128, 4, 4), (3, 128, 4, 2), (3, 128, 4, 3), (2, 128, 8, 3),
    (2, 256, 8, 2), (1, 256, 8, 3), (3, 64, 4, 4), (4, 64, 4, 3), (6, 64, 4, 2), (4, 64, 2, 3),
]  # fmt: skip
BLOCKS = [
    (1, 64, 4, 3), (1, 32, 4, 3), (2, 32, 4, 3), (1, 128, 4, 2), (1, 128, 8, 2), (1, 64, 8, 3), (2, 64, 4, 3),
    (3, 64, 4, 3), (3, 64, 4, 2), (4, 64, 4, 2), (2, 64, 4, 4), (2, 128, 8, 2), (3, 32, 4, 4), (4, 32, 4, 4),
]  # fmt: skip
TUNE_SHAPES = [Shape(1, 65536, 64, 4, 128), Shape(32, 65536, 64, 4, 128)]


class Step:
    """The arguments of one step at the end of sequences of `shape.tokens` tokens, in shuffled pages of one block; index
    heads have the size of the others. Steps `like` another one are those of other layers."""

    def __init__(self, shape: Shape, seed: int = 0, like: "Step | None" = None):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        pages = shape.tokens // SPEC.block
        total = shape.batch * pages + 1
        if like is None:
            order = torch.randperm(total - 1, generator=generator, device="cuda") + 1
            self.table = order.view(shape.batch, pages).to(torch.int32)
            self.q, self.index_q = (draw(shape.batch, 1, heads, shape.dim) for heads in (shape.heads, shape.groups))
            self.positions = torch.full((shape.batch, 1), shape.tokens - 1, device="cuda", dtype=torch.int32)
        else:
            self.table, self.q, self.index_q, self.positions = like.table, like.q, like.index_q, like.positions
        self.k, self.v = (draw(total, SPEC.block, shape.groups, shape.dim) for _ in range(2))
        self.index_keys = draw(total, SPEC.block, 1, shape.dim)

    @classmethod
    def layers(cls, shape: Shape) -> "list[Step]":
        """As many as together exceed the GPU's cache."""
        first = cls(shape)
        return [first, *(cls(shape, seed, first) for seed in range(1, copies(bytes_of_step(shape))))]

    def arguments(self) -> tuple[Any, ...]:
        kv = PagedKV(self.k, self.v, self.table)
        return self.q, self.index_q, kv, self.index_keys, self.positions, SPEC

    def tensors(self) -> list[Tensor]:
        """What a backend's `msa` takes before the spec."""
        return [self.q, self.index_q, self.k, self.v, self.index_keys, self.table, self.positions]

    def exact(self, count: int) -> tuple[Tensor, Tensor]:
        """The reference's output and blocks of the first sequences, in float64."""
        places = self.table[:count].flatten().long()
        pools = [x[places].double() for x in (self.k, self.v, self.index_keys)]
        table = torch.arange(len(places), device="cuda", dtype=torch.int32).view(count, -1)
        q, index_q = self.q[:count].double(), self.index_q[:count].double()
        return reference.msa(q, index_q, *pools, table, self.positions[:count], SPEC)


def bytes_of_step(shape: Shape) -> float:
    selected = min(shape.tokens, SPEC.dense_tokens) * shape.groups * shape.dim * 4.0
    return shape.batch * (shape.tokens * shape.dim * 2.0 + selected)


def errors_of(step: Step, wanted: tuple[Tensor, Tensor], params: Launches | None = None) -> dict[str, float]:
    """Of a step against the result of the float64 reference for its first sequences."""
    want, blocks = wanted
    got, chosen = kernels.msa(*step.tensors(), SPEC, params)
    count = len(want)
    return {"o": relative(got[:count], want), "blocks": float((chosen[:count] != blocks).any(-1).float().mean())}


def is_right(errors: dict[str, float]) -> bool:
    """No block may differ: inputs are random, so no two scores are close to equal."""
    return errors["o"] <= LIMIT and errors["blocks"] == 0.0


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    steps = Step.layers(shape)
    result: dict[str, Any] = {"shape": shape.name, "errors": errors_of(steps[0], steps[0].exact(min(2, shape.batch)))}
    if is_right(result["errors"]):
        result["ms"] = graph_ms(twice([partial(msa_decode, *step.arguments()) for step in steps]), repeats)
        result["limit_ms"] = bytes_of_step(shape) / BANDWIDTH * 1e3
        launches = []
        for step in steps:
            with recorded(kernels, KERNELS) as launched:
                kernels.msa(*step.tensors(), SPEC)
            launches.append(launched)
        result["kernels_ms"] = {name: graph_ms(twice([x[name] for x in launches]), repeats) for name in KERNELS}
    else:
        result["wrong"] = list(result["errors"])
    del steps
    torch.cuda.empty_cache()
    return result


def show(results: list[dict[str, Any]]) -> None:
    print("\nOne step of MSA, 16 blocks of 128, us; of the limit: bytes of index keys, K and V at 4.8 TB/s")
    print(f"{'shape':22}{'ours':>8}{'limit':>8}{'of limit':>9}  scores / blocks / merge")
    for r in results:
        if "wrong" in r:
            print(f"{r['shape']:22} WRONG: {r['errors']}")
            continue
        parts = " / ".join(f"{r['kernels_ms'][name] * 1e3:.1f}" for name in KERNELS)
        times = f"{r['ms'] * 1e3:8.1f}{r['limit_ms'] * 1e3:8.1f}{r['limit_ms'] / r['ms']:9.0%}"
        print(f"{r['shape']:22}{times}  {parts}")


def candidates(default: Launches) -> Iterator[tuple[str, Launches]]:
    """A launch in words, and all launches of a step with that one changed."""
    yield "checked in", default
    yield f"overlap {not default.overlap}", replace(default, overlap=not default.overlap)
    for name, kernel, sizes in (("scores", "cmp", SCORES), ("blocks", "blocks", BLOCKS)):
        for rows, columns, warps, stages, *registers in sizes:
            launch = Launch(rows, columns, warps, stages, maxnreg=registers[0] if registers else None)
            yield f"{name} {(rows, columns, warps, stages, *registers)}", replace(default, **{kernel: launch})


def tune(shape: Shape, repeats: int) -> None:
    """Checks and times a step with other launches of each kernel."""
    steps = Step.layers(shape)
    first = steps[0]
    capacity = first.k.shape[1] * first.table.shape[1]
    wanted = first.exact(1)
    print(f"{shape.name}, us of a step", flush=True)
    for text, params in candidates(kernels.default_params(first.q, first.index_q, first.v, capacity)):
        try:
            if is_right(errors_of(first, wanted, params)):
                calls = [partial(kernels.msa, *step.tensors(), SPEC, params) for step in steps]
                print(f"  {graph_ms(twice(calls), repeats) * 1e3:8.1f}  {text}", flush=True)
            else:
                print(f"     WRONG  {text}", flush=True)
        except Exception as error:
            print(f"  {type(error).__name__}  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.msa_decode needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    results = [measure(shape, options.repeats) for shape in TUNE_SHAPES]
    show(results)
    for shape in TUNE_SHAPES:
        tune(shape, options.repeats)
        torch.cuda.empty_cache()
    return 1 if any("wrong" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
