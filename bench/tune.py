"""Re-tunes the kernels' checked-in launch parameters on this machine's GPU: `python -m bench.tune --what cmp,win,sel`.

Many processes compile the candidates, then this one checks and times them one after the other: on a short sequence
against the reference in float64, on the timed one against the checked-in launch. A candidate that does not run (too
much shared memory) or is wrong is not timed. Prints the fastest of each kernel and the checked-in launch; changes
nothing. Ends after --seconds with the results so far, in the order of --what. For compressed attention of one sequence,
"cudnn" is cuDNN instead of a launch.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.output import Results, add_dirty_option
from bench.shapes import SPEC, Shape, make_inputs
from bench.timing import median_ms
from nsa.ops.dispatch import kernels_for
from nsa.ops.reference import compressed as reference_compressed
from nsa.ops.reference import selected as reference_selected
from nsa.ops.reference import windowed as reference_windowed
from nsa.ops.triton import selected, selected_backward, selection
from nsa.ops.triton.launch_table import Launch
from nsa.ops.triton.selected_tiles import TilePlan

SHAPES = {
    "64": [Shape(1, 32768, 12, 2, 64), Shape(4, 8192, 12, 2, 64), Shape(16, 2048, 12, 2, 64)],
    "128": [Shape(1, 65536, 64, 4, 128), Shape(1, 32768, 32, 8, 128)],
}
SHORT = 2600  # tokens on which candidates are compared with the reference
LIMIT = 5e-3
FLASH = {
    "forward": [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 4),
                (128, 64, 4, 3), (128, 64, 8, 4), (128, 32, 4, 4), (64, 64, 4, 4)],
    "dq": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2),
           (64, 32, 4, 3), (64, 32, 4, 4), (64, 128, 4, 2), (64, 128, 8, 2), (128, 64, 4, 2), (64, 64, 8, 3)],
    "dkv": [(64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 1),
            (128, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3), (64, 64, 8, 3), (64, 128, 8, 4), (32, 128, 8, 4),
            (128, 64, 4, 2), (32, 128, 4, 3)],
}  # fmt: skip
CUDNN = "cudnn"


SCORE = [Launch(*size, maxnreg=registers) for *size, registers in (
    (64, 192, 4, 2, None), (64, 192, 4, 3, None), (64, 192, 4, 2, 128), (64, 192, 4, 3, 128), (64, 384, 4, 2, None),
    (64, 384, 8, 2, 128), (64, 256, 4, 2, None), (64, 256, 8, 2, 128), (128, 192, 4, 2, None), (32, 192, 4, 4, 96),
)]  # fmt: skip
BLOCK = [(32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 64, 8, 3),
         (128, 64, 8, 2), (128, 64, 4, 2)]  # fmt: skip
SMALL = [(16, 64, 1, 3), (16, 64, 2, 3), (16, 64, 1, 2), (16, 64, 4, 3), (16, 32, 1, 3), (16, 32, 2, 3),
         (16, 32, 1, 4)]  # fmt: skip
LARGE = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3),
         (32, 64, 2, 3), (64, 64, 8, 3)]  # fmt: skip


class Case:
    """One kernel call whose launch parameters are swept, and the float64 result of the reference, if results can be
    compared. No two candidates have the same launches."""

    def __init__(
        self,
        name: str,
        run: Callable[[Any], Any],
        candidates: list[Any],
        default: Any,
        exact: Callable[[], Any] | None = None,
    ):
        self.name, self.run, self.default, self.exact = name, run, default, exact
        self.candidates = [candidate for candidate in dict.fromkeys(candidates) if candidate != default]


def double(*tensors: Tensor) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


def flash_cases(branch: str, shape: Shape) -> Iterator[Case]:
    x, kernels = make_inputs(shape, correlated=False), kernels_for(branch)
    exact = {"cmp": reference_compressed, "win": reference_windowed}[branch]
    sizes = SPEC if branch == "cmp" else SPEC.window
    q, k, v = x.q.detach(), x.k_win.detach(), x.v_win.detach()
    others = []
    if branch == "cmp":
        k, v = (kernels_for("phi").mean(t, SPEC, None) for t in (k, v))
        others = [CUDNN] if shape.batch == 1 else []
    o, lse = kernels.forward(q, k, v, sizes, None)
    do = torch.randn_like(o)

    def forward(launch: Any) -> Any:
        if launch == CUDNN:
            return kernels.forward_by_runs(q, k, v, SPEC)[:1]
        return replace(kernels, tuned={"forward": launch}).forward(q, k, v, sizes, None)[:1]

    def dq(launch: Any) -> Any:
        if launch == CUDNN:
            return kernels.backward_by_runs(do, q, k, v, o, lse, SPEC)
        return replace(kernels, tuned={"dq": launch}).backward(do, q, k, v, o, lse, sizes, None)

    def dkv(launch: Launch) -> Any:
        return replace(kernels, tuned={"dkv": launch}).backward(do, q, k, v, o, lse, sizes, None)

    def exact_backward() -> Any:
        args = double(q, k, v)
        return exact.backward(do.double(), *args, *exact.forward(*args, sizes, None), sizes, None)

    # The last two time the whole backward pass.
    for name, run, more in (("forward", forward, others), ("dq", dq, others), ("dkv", dkv, [])):
        modes = (("always", False), ("branch", False), ("branch", True))  # the last: loads by the TMA
        candidates = [
            Launch(*size, mask, tma=tma and q.dtype != torch.float32)
            for size, (mask, tma) in itertools.product(FLASH[name], modes)
        ]
        wanted = exact_backward if name != "forward" else lambda: exact.forward(*double(q, k, v), sizes, None)[:1]
        yield Case(f"{branch}_{name} {shape.name}", run, more + candidates, kernels.launch(name, q, v), wanted)


def selection_cases(shape: Shape) -> Iterator[Case]:
    x = make_inputs(shape, correlated=False)
    q = x.q.detach()
    k = kernels_for("phi").mean(x.k_cmp.detach(), SPEC, None)
    _, lse = kernels_for("cmp").forward(q, k, k, SPEC, None)
    score, pick = selection.default_params(q, k)
    width = selection.block_width(shape.tokens, SPEC)
    picks = [pick] + [replace(pick, columns=32 * n * pick.num_warps) for n in (1, 2, 4, 8, 16)]
    # Rows that fit fewer blocks than a launch could keep make the same launch.
    different = {str(selection.pick_constants(SPEC, width, p)): p for p in reversed(picks)}
    # So do columns that hold as many queries.
    heads = shape.heads // shape.groups
    scores = {
        (str(selection.score_constants(SPEC, heads, shape.dim, False, s)), s.num_warps, s.num_stages, s.maxnreg): s
        for s in [*SCORE, score]
    }
    candidates = [(s, pick) for s in scores.values()] + [(score, p) for p in different.values()]
    yield Case(
        f"select {shape.name}",
        lambda p: (selection.forward(q, k, lse, SPEC, None, p).float(),),
        candidates,
        (score, pick),
    )


def selected_cases(shape: Shape, correlated: bool) -> Iterator[Case]:
    x = make_inputs(shape, correlated=correlated)
    q, k, v = x.q.detach(), x.k_sel.detach(), x.v_sel.detach()
    k_cmp = kernels_for("phi").mean(x.k_cmp.detach(), SPEC, None)
    _, lse_cmp = kernels_for("cmp").forward(q, k_cmp, k_cmp, SPEC, None)
    indices = kernels_for("select").forward(q, k_cmp, lse_cmp, SPEC, None)
    o, lse = selected.forward(q, k, v, indices, SPEC.sel_block, None)
    do = torch.randn_like(o)
    kind = "correlated" if correlated else "random"
    forward, backward = (
        module.default_params(q, k, v, SPEC.sel_block, SPEC.num_selected) for module in (selected, selected_backward)
    )
    yield Case(
        f"sel_forward {shape.name} {kind}",
        lambda p: selected.forward(q, k, v, indices, SPEC.sel_block, None, p),
        list(query_candidates(forward)),
        forward,
        lambda: reference_selected.forward(*double(q, k, v), indices, SPEC.sel_block, None),
    )
    blocks = [Launch(*size) for size in BLOCK]
    chunks = sorted({backward.chunk, 512, 1024, 2048})
    both = [replace(backward, dq=dq, block=block) for dq, block in itertools.product(("fused", "separate"), blocks)] + [
        replace(backward, chunk=chunk) for chunk in chunks
    ]
    separate = replace(backward, dq="separate")
    queries = [replace(separate, query=query) for query in query_candidates(backward.query)]

    def exact_backward() -> Any:
        args = (*double(q, k, v), indices)
        outputs = reference_selected.forward(*args, SPEC.sel_block, None)
        return reference_selected.backward(do.double(), *args, *outputs, SPEC.sel_block, None)

    yield Case(
        f"sel_backward {shape.name} {kind}",
        lambda p: selected_backward.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, None, p),
        both + queries,
        backward,
        exact_backward,
    )


def query_candidates(default: TilePlan) -> Iterator[TilePlan]:
    for size in SMALL:
        yield replace(default, method="query", small=replace(Launch(*size), rows=max(size[0], default.small.rows)))
    for size in LARGE:
        yield replace(default, method="tile", large=Launch(*size))
    for ratio in (1.0, 1.5, 2.0, 2.6, 3.5):
        yield replace(default, method="adaptive", ratio=ratio)


def cases(what: list[str], dims: list[str], tokens: int | None = None) -> Iterator[Case]:
    """The cases of every kernel in turn; each with one sequence of `tokens` tokens, if given."""
    builders: dict[str, list[Callable[[Shape], Iterator[Case]]]] = {
        "cmp": [partial(flash_cases, "cmp")],
        "win": [partial(flash_cases, "win")],
        "select": [selection_cases],
        "sel": [partial(selected_cases, correlated=False), partial(selected_cases, correlated=True)],
    }
    for name in what:
        for shape in (shape for dim in dims for shape in SHAPES[dim]):
            for build in builders[name]:
                yield from build(replace(shape, batch=1, tokens=tokens) if tokens else shape)


def compile_share(what: list[str], dims: list[str], worker: int, workers: int) -> None:
    everything = ((case, c) for case in cases(what, dims) for c in case.candidates)
    for number, (case, candidate) in enumerate(everything):
        if number % workers == worker and candidate != CUDNN:
            try:
                case.run(candidate)
            except Exception as error:
                print(f"{case.name} {candidate}: {str(error)[:100]}", file=sys.stderr)


def close(a: Any, b: Any, limit: float) -> bool:
    """Equal to rounding; infinities (the log-sum-exp of rows that read nothing) must be the same."""

    def error(x: Tensor, y: Tensor) -> float:
        x, y = (t.double().nan_to_num(nan=1e9, posinf=1e3, neginf=-1e3) for t in (x, y))
        return float((x - y).norm() / y.norm())

    return all(error(x, y) < limit for x, y in zip(a, b, strict=True))


def sweep(case: Case, short: Case, rep: int, end: float) -> list[tuple[float, str]]:
    """The times of a case's candidates and what they are, the checked-in launch first."""
    wanted = short.exact() if short.exact else short.run(short.default)
    expected, rows = case.run(case.default), []
    for candidate in (case.default, *case.candidates):
        text = f"{'checked in ' if candidate == case.default else ''}{candidate}"
        if time.monotonic() > end:
            break
        try:
            if close(short.run(candidate), wanted, LIMIT) and close(case.run(candidate), expected, 1e-2):
                rows.append((median_ms(partial(case.run, candidate), rep), text))
            else:
                rows.append((float("inf"), f"WRONG {text}"))
        except Exception as error:
            rows.append((float("inf"), f"{type(error).__name__} {text}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="cmp,win,sel")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--rep", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540.0, help="in all; compiling takes at most half of it")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--workers", type=int, default=min(8, max(1, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--out", type=Path)
    add_dirty_option(parser)
    options = parser.parse_args()
    what, dims = options.what.split(","), options.dims.split(",")
    if options.worker is not None:
        compile_share(what, dims, options.worker, options.workers)
        return
    file = Results(options.out, options.allow_dirty) if options.out else None
    end = time.monotonic() + options.seconds
    command = [sys.executable, "-m", "bench.tune", "--what", options.what, "--dims", options.dims]
    processes = [
        subprocess.Popen([*command, "--worker", str(i), "--workers", str(options.workers)], stderr=subprocess.DEVNULL)
        for i in range(options.workers)
    ]
    for process in processes:
        try:
            process.wait(max(0.0, end - options.seconds / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()  # frees its GPU memory
        else:
            if process.returncode:
                print(f"a worker that compiles ended with {process.returncode}; its share is compiled when it is timed")
    everything: dict[str, list[tuple[float, str]]] = {}
    for case, short in zip(cases(what, dims), cases(what, dims, SHORT), strict=True):
        if time.monotonic() > end:
            print(f"{case.name}: no time left")
            continue
        rows = everything[case.name] = sweep(case, short, options.rep, end)
        print(f"{case.name}: {len(rows)} of {1 + len(case.candidates)}")
        others = [row for row in rows if "checked in" in row[1] or "WRONG" in row[1] or CUDNN in row[1]]
        for ms, text in sorted(rows)[:4] + others:
            print(f"  {ms:8.3f}  {text}", flush=True)
    if file:
        file.write(results=everything)


if __name__ == "__main__":
    main()
