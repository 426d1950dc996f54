"""Times the attention of one decode step against dense attention over a cache as long: `python -m bench.decode`. Steps
of MSA are timed in the same run (`bench.msa_decode`).

Every head layout is checked first against whole sequences in float64, and every timed step against the float64
reference on some of its sequences; a wrong kernel is not timed. Times are those of a CUDA graph's replay, in which
calls alternate between caches that together exceed the L2 cache. Prints a table, writes JSON. Needs torch and triton.

--quick  8k and 64k, batch 1 and 32, only 64/4/128
--tune   checks and times a step with other launches of each kernel, then with the best of each together; prints the
         fastest and the checked-in launches. Ends after --seconds with the results so far
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench import msa_decode
from bench.output import Results, add_dirty_option
from bench.shapes import SPEC, Shape
from bench.timing import BANDWIDTH, LIMIT, copies, graph_ms, recorded, relative, twice
from nsa.ops import PagedKV, RingKV, compressed_attention, nsa_attention, nsa_decode, paged_attention, select_blocks
from nsa.ops.layout import num_compressed
from nsa.ops.reference import decode as reference
from nsa.ops.triton import decode
from nsa.ops.triton.launch_table import Launch

PAGE = 64
RING = SPEC.window + 64
LENGTHS = (8192, 16384, 32768, 65536, 131072, 262144)
BATCHES = (1, 8, 32)
HEADS = ((64, 4, 128), (12, 2, 64))
DENSE = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KERNELS = ("interval_kernel", "blocks_kernel", "mix_parts_kernel")
# What --tune tries: programs for every multiprocessor, keys at a time, warps, stages. With one sequence, fewer programs
# leave fewer parts to put together, and room on a multiprocessor for the next kernel to start early.
STREAMS = [
    (1, 64, 4, 3), (2, 64, 4, 3), (3, 64, 4, 3), (4, 64, 4, 3), (1, 64, 4, 4), (2, 64, 4, 4), (1, 64, 8, 3),
    (2, 64, 8, 3), (1, 64, 4, 6), (1, 32, 4, 6), (2, 32, 4, 4), (3, 32, 4, 4), (4, 32, 4, 4), (4, 32, 2, 4),
    (6, 32, 2, 4), (8, 32, 1, 3), (1, 128, 4, 2), (1, 128, 8, 2), (1, 128, 8, 3), (2, 128, 8, 2), (2, 64, 4, 2),
    (2, 64, 8, 2), (1, 32, 4, 2), (1, 16, 4, 2),
]  # fmt: skip
# Of the blocks: also the shares that a thread reads at a time, in the choice of blocks.
BLOCKS = [(*size, 64) for size in STREAMS if 16 < size[1] <= SPEC.sel_block] + [
    (1, 64, 4, 3, 128), (1, 64, 4, 3, 32), (1, 64, 8, 3, 32), (3, 64, 8, 3, 32), (1, 32, 8, 4, 64)
]  # fmt: skip
TUNED = {"cmp": ("interval_kernel", STREAMS), "blocks": ("blocks_kernel", BLOCKS)}
TUNE_SHAPES = [
    Shape(1, 65536, 64, 4, 128), Shape(1, 8192, 64, 4, 128), Shape(32, 65536, 64, 4, 128),
    Shape(1, 32768, 12, 2, 64), Shape(8, 32768, 12, 2, 64),
]  # fmt: skip


class Step:
    """The arguments of one step at the end of sequences of `shape.tokens` tokens, in shuffled pages.

    Steps `like` another one are those of other layers: keys and values are their own, the page table and the positions
    are the same. So are queries and gates, as for dense attention: in a model the kernel before has just written them.
    """

    def __init__(self, shape: Shape, seed: int = 0, like: "Step | None" = None):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        pages = shape.tokens // PAGE
        total = shape.batch * pages + 1
        heads = (shape.groups, shape.dim)
        if like is None:
            order = torch.randperm(total - 1, generator=generator, device="cuda") + 1
            self.table = order.view(shape.batch, pages).to(torch.int32)
            self.q = draw(shape.batch, 1, shape.heads, shape.dim)
            self.gates = torch.rand(shape.batch, 1, shape.heads, 3, generator=generator, device="cuda").bfloat16()
            self.positions = torch.full((shape.batch, 1), shape.tokens - 1, device="cuda", dtype=torch.int32)
        else:
            self.table, self.q, self.gates, self.positions = like.table, like.q, like.gates, like.positions
        self.cmp = PagedKV(*(draw(total, PAGE // SPEC.cmp_stride, *heads) for _ in range(2)), self.table)
        self.sel = PagedKV(*(draw(total, PAGE, *heads) for _ in range(2)), self.table)
        slots = torch.arange(shape.batch, device="cuda", dtype=torch.int32)
        self.win = RingKV(*(draw(shape.batch, RING, *heads) for _ in range(2)), slots)

    @classmethod
    def layers(cls, shape: Shape) -> "list[Step]":
        """As many as together exceed the GPU's cache."""
        first = cls(shape)
        return [first, *(cls(shape, seed, first) for seed in range(1, copies(bytes_of_step(shape))))]

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.gates, self.cmp, self.sel, self.win, self.positions, SPEC

    def tensors(self) -> list[Tensor]:
        """What a backend's `nsa` takes before the spec."""
        pools = [x for kv in (self.cmp, self.sel, self.win) for x in vars(kv).values()]
        return [self.q, self.gates, *pools, self.positions]

    def rows(self, count: int) -> list[Tensor]:
        """`tensors` of the first sequences alone, in float64; of the pages only those that they have."""

        def double(kv: PagedKV | RingKV) -> tuple[Tensor, ...]:
            places = vars(kv)["table" if isinstance(kv, PagedKV) else "slots"][:count]
            mine, numbered = places.flatten().long(), torch.arange(places.numel(), device="cuda", dtype=torch.int32)
            return kv.k[mine].double(), kv.v[mine].double(), numbered.view(places.shape)

        pools = (*double(self.cmp), *double(self.sel), *double(self.win))
        return [self.q[:count].double(), self.gates[:count].double(), *pools, self.positions[:count]]


def bytes_of_step(shape: Shape) -> float:
    selected = min(shape.tokens, SPEC.num_selected * SPEC.sel_block)
    tokens = num_compressed(shape.tokens, SPEC) + selected + min(shape.tokens, SPEC.window)
    return shape.batch * shape.groups * shape.dim * 4.0 * tokens


def bytes_of_dense(shape: Shape) -> float:
    return shape.batch * shape.groups * shape.dim * 4.0 * shape.tokens


def check_layout(heads: int, groups: int, dim: int) -> dict[str, float]:
    """Steps at several lengths against the operators on the whole sequence in float64."""
    tokens = 2600
    lengths = [1, 31, 32, 64, 65, 512, 513, 1024, 1025, 1600, 2559, 2600]
    generator = torch.Generator(device="cuda").manual_seed(3)

    def draw(h: int) -> Tensor:
        return torch.randn(1, tokens, h, dim, generator=generator, device="cuda").bfloat16()

    q, k_sel, v_sel, k_win, v_win = (draw(h) for h in (heads, *[groups] * 4))
    k_cmp, v_cmp = (draw(groups)[:, : num_compressed(tokens, SPEC)] for _ in range(2))
    gates = torch.rand(1, tokens, heads, 3, generator=generator, device="cuda").bfloat16()
    exact = [x.double() for x in (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)]
    want = nsa_attention(*exact, SPEC, backend="reference")
    _, lse = compressed_attention(*exact[:3], SPEC, backend="reference")
    blocks = select_blocks(exact[0], exact[1], lse, SPEC, backend="reference")

    pages = -(-tokens // PAGE)
    order = torch.randperm(pages, generator=generator, device="cuda") + 1

    def paged(k: Tensor, v: Tensor, page: int) -> list[Tensor]:
        pools = []
        for x in (k, v):
            pool = x.new_full((pages + 1, page, groups, dim), torch.nan)
            full = x.new_zeros(pages * page, groups, dim)
            full[: x.shape[1]] = x[0]
            pool[order] = full.view(pages, page, groups, dim)
            pools.append(pool)
        return [*pools, order.to(torch.int32).expand(len(lengths), pages).contiguous()]

    rings = []
    for x in (k_win, v_win):
        ring = x.new_full((len(lengths), RING, groups, dim), torch.nan)
        for b, length in enumerate(lengths):
            kept = torch.arange(max(0, length - RING), length, device="cuda")
            ring[b, kept % RING] = x[0, kept]
        rings.append(ring)
    slots = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    at = torch.tensor(lengths, device="cuda") - 1
    got, chosen = decode.nsa(
        q[0, at].unsqueeze(1), gates[0, at].unsqueeze(1), *paged(k_cmp, v_cmp, PAGE // SPEC.cmp_stride),
        *paged(k_sel, v_sel, PAGE), *rings, slots, at[:, None].to(torch.int32), SPEC,
    )  # fmt: skip
    return {
        "o": relative(got[:, 0], want[0, at]),
        "blocks": float((chosen[:, 0] != blocks[0, at]).any(-1).float().mean()),
    }


def check_step(step: Step) -> dict[str, float]:
    """The first sequences of a timed step against the float64 reference, and dense attention over its pages."""
    count = min(2, step.q.shape[0])
    got, chosen = decode.nsa(*step.tensors(), SPEC)
    exact = step.rows(count)
    want, blocks = reference.nsa(*exact, SPEC)
    dense = paged_attention(step.q, step.sel, step.positions, backend="triton")
    q, _, *pools, positions = exact
    wanted = reference.paged(q, *pools[3:6], positions, None)
    return {
        "o": relative(got[:count], want),
        "blocks": float((chosen[:count] != blocks).any(-1).float().mean()),
        "dense": relative(dense[:count], wanted),
    }


def wrong(errors: dict[str, float]) -> list[str]:
    """Names over the limit, or NaN. No block may differ: inputs are random, so no two scores are close to equal."""
    return [name for name, error in errors.items() if not error <= (0.0 if name == "blocks" else LIMIT)]


def time_dense(shape: Shape, repeats: int) -> dict[str, float]:
    """PyTorch's fused attention of one query over `shape.tokens` keys, every way that runs: the heads of a group as
    heads (gqa), or as queries of one head, which lets a kernel read keys once for all of them."""
    number = copies(bytes_of_dense(shape))
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    keys = [[draw(shape.batch, shape.groups, shape.tokens, shape.dim) for _ in range(2)] for _ in range(number)]
    forms = {"gqa": (shape.heads, 1), "rows": (shape.groups, shape.heads // shape.groups)}
    times = {}
    for form, (heads, rows) in forms.items():
        q = draw(shape.batch, heads, rows, shape.dim)
        for name, backend in DENSE.items():
            calls = [
                partial(scaled_dot_product_attention, q, k, v, enable_gqa=form == "gqa")
                for k, v in keys
                for _ in (0, 1)
            ]
            try:
                with sdpa_kernel(backend):
                    times[f"{name} {form}"] = graph_ms(calls, repeats)
            except RuntimeError:
                torch.cuda.synchronize()
    return times


def launches_of(steps: list[Step], params: decode.Launches | None = None) -> dict[str, list[Callable[[], Any]]]:
    """Every kernel of a step separately, on the caches of each of `steps`."""
    kernels: dict[str, list[Callable[[], Any]]] = {name: [] for name in KERNELS}
    for step in steps:
        with recorded(decode, KERNELS) as launched:
            decode.nsa(*step.tensors(), SPEC, params)
        for name, launch in launched.items():
            kernels[name].append(launch)
    return kernels


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    read = bytes_of_step(shape)
    steps = Step.layers(shape)
    result: dict[str, Any] = {"shape": shape.name, "errors": check_step(steps[0])}
    if wrong(result["errors"]):
        return result | {"wrong": wrong(result["errors"])}
    result["ms"] = graph_ms(twice([partial(nsa_decode, *s.arguments()) for s in steps]), repeats)
    result["limit_ms"] = read / BANDWIDTH * 1e3
    result["kernels_ms"] = {name: graph_ms(twice(calls), repeats) for name, calls in launches_of(steps).items()}
    few = steps[: copies(bytes_of_dense(shape))]
    pages = [partial(paged_attention, s.q, s.sel, s.positions) for s in few]
    result["dense_pages_ms"] = graph_ms(twice(pages)[:8], repeats)
    del steps, few, pages
    torch.cuda.empty_cache()
    result["dense_ms"] = time_dense(shape, repeats)
    result["dense_limit_ms"] = bytes_of_dense(shape) / BANDWIDTH * 1e3
    torch.cuda.empty_cache()
    return result


def show(results: list[dict[str, Any]]) -> None:
    print("\nAttention of one step, us; of the limit: bytes of K and V at 4.8 TB/s")
    heading = f"{'shape':22}{'ours':>8}{'of limit':>9}{'dense':>8}{'x':>6}  {'by':14}{'own dense':>9}"
    print(f"{heading}  cmp / blocks / mix")
    for r in results:
        if "wrong" in r:
            print(f"{r['shape']:22} WRONG: {', '.join(r['wrong'])} {r['errors']}")
            continue
        by = min(r["dense_ms"], key=r["dense_ms"].__getitem__) if r["dense_ms"] else "none"
        best = r["dense_ms"].get(by, float("nan"))
        parts = " / ".join(f"{r['kernels_ms'][name] * 1e3:.1f}" for name in KERNELS)
        print(
            f"{r['shape']:22}{r['ms'] * 1e3:8.1f}{r['limit_ms'] / r['ms']:9.0%}{best * 1e3:8.1f}{best / r['ms']:6.2f}  "
            f"{by:14}{r['dense_pages_ms'] * 1e3:9.1f}  {parts}"
        )


def launches_for(step: Step) -> decode.Launches:
    return decode.default_params(step.q, step.sel.v, step.cmp.k.shape[1] * step.table.shape[1])


def candidates(default: decode.Launches) -> Iterator[tuple[str, str, decode.Launches]]:
    """The kernel, its launch in words, and all launches of a step with that one changed."""
    yield "checked in", str(default), default
    yield "overlap", str(not default.overlap), replace(default, overlap=not default.overlap)
    for values in (0, 2, 4, 8):
        if values != default.values:
            yield "values", str(values), replace(default, values=values)
    for name, (_, sizes) in TUNED.items():
        for rows, columns, warps, stages, *depth in sizes:
            launch = Launch(rows, columns, warps, stages, depth=depth[0] if depth else Launch.depth)
            if launch != getattr(default, name):
                yield name, str((rows, columns, warps, stages, *depth)), replace(default, **{name: launch})


class Tuned:
    """The times of one shape's candidates, each checked before it is timed."""

    def __init__(self, shape: Shape, repeats: int):
        self.steps = Step.layers(shape)
        self.repeats = repeats
        self.default = launches_for(self.steps[0])
        self.want, self.blocks = reference.nsa(*self.steps[0].rows(1), SPEC)
        self.found: list[tuple[float, str, str, decode.Launches]] = []

    def time(self, kernel: str, text: str, params: decode.Launches) -> None:
        ms = float("inf")
        try:
            got, blocks = decode.nsa(*self.steps[0].tensors(), SPEC, params)
            if relative(got[:1], self.want) <= LIMIT and torch.equal(blocks[:1], self.blocks):
                ms = graph_ms(
                    twice([partial(decode.nsa, *s.tensors(), SPEC, params) for s in self.steps]), self.repeats
                )
            else:
                text += "  WRONG"
        except Exception as error:
            text += f"  {type(error).__name__}"
        self.found.append((ms, kernel, text, params))

    def best(self, kernel: str, number: int) -> list[tuple[float, str, str, decode.Launches]]:
        return sorted((row for row in self.found if row[1] == kernel), key=lambda row: row[0])[:number]

    def time_together(self) -> None:
        """Times combinations of the two best launches of each kernel, with or without overlap, whichever was faster."""
        found = self.best("overlap", 1) + self.best("checked in", 1)
        if not found:  # no time was left
            return
        *_, overlap = min(found, key=lambda row: row[0])
        for *_, text, cmp in self.best("cmp", 2):
            for *_, other, blocks in self.best("blocks", 2):
                together = replace(overlap, cmp=cmp.cmp, blocks=blocks.blocks)
                self.time("together", f"{text} {other} overlap={overlap.overlap}", together)

    def show(self) -> None:
        for kernel in ("checked in", "overlap", "values", "cmp", "blocks", "together"):
            for ms, _, text, _ in self.best(kernel, 4):
                print(f"  {ms * 1e3:8.1f}  {kernel} {text}", flush=True)
        for _, kernel, text, _ in self.found:
            if "WRONG" in text:
                print(f"  {kernel} {text}", flush=True)


def tune(shapes: list[Shape], repeats: int, worker: int | None, workers: int, seconds: float) -> None:
    """Compiles in many processes at once, then checks and times one launch after the other."""
    end = time.monotonic() + seconds
    if worker is not None:
        for shape in shapes:
            step = Step(shape)
            for number, (*_, params) in enumerate(candidates(launches_for(step))):
                if number % workers == worker:
                    with suppress(Exception):
                        decode.nsa(*step.tensors(), SPEC, params)
        return
    names = ",".join(shape.name for shape in shapes)
    command = [sys.executable, "-m", "bench.decode", "--tune", "--shapes", names, "--workers", str(workers), "--worker"]
    started = [subprocess.Popen([*command, str(i)], stderr=subprocess.DEVNULL) for i in range(workers)]
    for process in started:
        try:
            process.wait(max(0.0, end - seconds / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for number, shape in enumerate(shapes):
        tuned = Tuned(shape, repeats)
        stop = time.monotonic() + (end - time.monotonic()) / (len(shapes) - number)
        for candidate in candidates(tuned.default):
            if time.monotonic() < stop:
                tuned.time(*candidate)
        tuned.time_together()
        print(f"{shape.name}: {len(tuned.found)} timed, us of a step", flush=True)
        tuned.show()
        del tuned
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/decode.json"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", help='of --tune, such as "1x64k 64/4/128,1x8k 64/4/128"; all if not given')
    parser.add_argument("--seconds", type=float, default=420.0, help="of --tune; compiling takes at most half of it")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    add_dirty_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.decode needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    if options.tune:
        shapes = [s for s in TUNE_SHAPES if not options.shapes or s.name in options.shapes.split(",")]
        if not shapes:
            sys.exit(f"--shapes: the shapes are {', '.join(s.name for s in TUNE_SHAPES)}")
        tune(shapes, options.repeats, options.worker, options.workers, options.seconds)
        return 0
    file = Results(options.out, options.allow_dirty)
    lengths, batches = ((8192, 65536), (1, 32)) if options.quick else (LENGTHS, BATCHES)
    results = []
    for heads in HEADS[:1] if options.quick else HEADS:
        errors = check_layout(*heads)
        print(f"{heads}: {errors}", file=sys.stderr, flush=True)
        if wrong(errors):
            print(f"WRONG: {', '.join(wrong(errors))}; nothing is timed", file=sys.stderr)
            return 1
        for tokens in lengths:
            for batch in batches:
                results.append(measure(Shape(batch, tokens, *heads), options.repeats))
                print(f"done {results[-1]['shape']}", file=sys.stderr, flush=True)
    show(results)
    msa = [msa_decode.measure(Shape(b, t, *HEADS[0]), options.repeats) for t in lengths for b in batches]
    msa_decode.show(msa)
    file.write(results=results, msa=msa)
    return 1 if any("wrong" in r for r in results + msa) else 0


if __name__ == "__main__":
    sys.exit(main())
