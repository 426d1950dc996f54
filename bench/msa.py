"""Times MSA, selection and index loss included, against dense attention on a CUDA GPU: `python -m bench.msa`.

Every shape is checked against the float64 reference first; a kernel that is wrong gets no time. Prints a table and
writes JSON with the machine, the versions and the commit. Two kinds of input: random, and correlated, in which queries
and index queries agree in runs of 32. `--tune` times launches of the kernels of the index in place of all that.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.attention import time_call, time_dense
from bench.output import Results, add_dirty_option
from bench.shapes import Shape, agreement
from bench.timing import median_ms
from nsa.ops import MSASpec, index_blocks, msa_attention
from nsa.ops.dispatch import REFERENCE, kernels_for
from nsa.ops.triton import msa_loss, msa_selection
from nsa.ops.triton.launch_table import Launch

KINDS = ("random", "correlated")
CHECK_TOKENS = 4096
LIMIT = 5e-3
# A share of the rows may choose otherwise, where two scores agree to rounding.
DIFFERENT_ROWS = 2e-3


@dataclass(frozen=True)
class Case:
    """A shape, whose head size the index has too, and how many blocks of 128 tokens a query reads."""

    shape: Shape
    num_selected: int = 16

    @property
    def spec(self) -> MSASpec:
        return MSASpec(num_selected=self.num_selected)

    @property
    def name(self) -> str:
        return f"{self.shape.name} n={self.num_selected}"


CASES = [
    Case(Shape(1, 65536, 64, 4, 128)),
    Case(Shape(1, 65536, 64, 4, 128), 8),
    Case(Shape(1, 32768, 16, 2, 128)),
    Case(Shape(1, 32768, 32, 8, 128)),
    Case(Shape(1, 32768, 12, 2, 64)),
    Case(Shape(16, 2048, 12, 2, 64)),
]


def make_inputs(shape: Shape, kind: str, seed: int = 0) -> list[Tensor]:
    """q, k, v, index_q and index_k."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*heads: int, run: int = 1) -> Tensor:
        size = (shape.batch, -(-shape.tokens // run), *heads, shape.dim)
        x = torch.randn(size, generator=generator, device="cuda")
        if run > 1:
            x = x.repeat_interleave(run, dim=1)[:, : shape.tokens]
            x = x + 0.05 * torch.randn(x.shape, generator=generator, device="cuda")
        return x.to(torch.bfloat16).requires_grad_()

    run = 32 if kind == "correlated" else 1
    q, index_q = draw(shape.heads, run=run), draw(shape.groups, run=run)
    return [q, draw(shape.groups), draw(shape.groups), index_q, draw()]


def check(case: Case, kind: str) -> dict[str, float]:
    """Relative errors against the float64 reference on equal blocks, of the loss in the warm-up too."""
    shape = Shape(1, min(CHECK_TOKENS, case.shape.tokens), case.shape.heads, case.shape.groups, case.shape.dim)
    spec, block, tokens = case.spec, case.spec.block, shape.tokens
    q, k, v, index_q, index_k = (x.detach() for x in make_inputs(shape, kind, seed=1))
    q64, k64, v64, index_q64, index_k64 = (x.double() for x in (q, k, v, index_q, index_k))
    errors: dict[str, float] = {}

    def compare(name: str, got: Tensor, want: Tensor) -> None:
        size = float(want.norm())
        errors[name] = float((got.double() - want).norm()) / size if size else float(got.double().norm())

    indices = msa_selection.choose(index_q, index_k, spec, None)
    wanted = REFERENCE["index"].choose(index_q64, index_k64, spec, None)
    errors["choice"] = float((indices != wanted).any(-1).float().mean())
    o, lse = kernels_for("sel").forward(q, k, v, indices, block, None)
    o64, lse64 = REFERENCE["sel"].forward(q64, k64, v64, indices, block, None)
    compare("o", o, o64)
    do = torch.randn_like(o)
    grads = kernels_for("sel").backward(do, q, k, v, indices, o, lse, block, None)
    grads64 = REFERENCE["sel"].backward(do.double(), q64, k64, v64, indices, o.double(), lse64, block, None)
    for name, got, want in zip(("dq", "dk", "dv"), grads, grads64, strict=True):
        compare(name, got, want)
    counted = (torch.arange(tokens, device="cuda") >= case.spec.dense_tokens)[None] & (
        torch.rand(1, tokens, device="cuda") > 0.1
    )
    all_lse, all_lse64 = (
        module.forward(*x, tokens, None)[1]
        for module, x in ((kernels_for("win"), (q, k, v)), (REFERENCE["win"], (q64, k64, v64)))
    )
    names = ("kl", "d_index_q", "d_index_k")
    for prefix, blocks, row_lse, row_lse64 in (("", indices, lse, lse64), ("all ", None, all_lse, all_lse64)):
        found = msa_loss.loss(index_q, index_k, q, k, row_lse, blocks, counted, block, None)
        exact = REFERENCE["index_loss"].loss(index_q64, index_k64, q64, k64, row_lse64, blocks, counted, block, None)
        again = msa_loss.loss(index_q, index_k, q, k, row_lse, blocks, counted, block, None)
        for name, got, want, repeated in zip(names, found, exact, again, strict=True):
            compare(prefix + name, got, want)
            if not torch.equal(got, repeated):
                errors[prefix + name + " differs between runs"] = 1.0
    return errors


def wrong(errors: dict[str, float]) -> list[str]:
    return [name for name, error in errors.items() if not error <= (DIFFERENT_ROWS if name == "choice" else LIMIT)]


def time_ours(case: Case, leaves: list[Tensor], rep: int) -> dict[str, Any]:
    def call() -> tuple[Tensor, ...]:
        o, kl, _ = msa_attention(*leaves, case.spec)
        return (o, kl) if kl.requires_grad or not torch.is_grad_enabled() else (o,)

    used = leaves if case.shape.tokens > case.spec.dense_tokens else leaves[:3]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = call()
    torch.autograd.grad(outputs, used, [torch.randn_like(o) for o in outputs])
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    del outputs
    return {**time_call(call, used, rep), "peak_gib": peak}


def time_parts(case: Case, leaves: list[Tensor], rep: int) -> dict[str, float]:
    """Milliseconds of every step by itself."""
    q, k, v, index_q, index_k = (x.detach() for x in leaves)
    spec, block, sel = case.spec, case.spec.block, kernels_for("sel")
    indices = msa_selection.choose(index_q, index_k, spec, None)
    o, lse = sel.forward(q, k, v, indices, block, None)
    do = torch.randn_like(o)
    counted = (torch.arange(case.shape.tokens, device="cuda") >= case.spec.dense_tokens).expand(q.shape[:2])
    loss = partial(msa_loss.loss, index_q, index_k, q, k, lse, indices, counted, block, None)
    calls: dict[str, Callable[[], Any]] = {
        "index_blocks": lambda: msa_selection.choose(index_q, index_k, spec, None),
        "sel.fwd": lambda: sel.forward(q, k, v, indices, block, None),
        "sel.bwd": lambda: sel.backward(do, q, k, v, indices, o, lse, block, None),
        "loss": loss,
        "loss value": lambda: loss(has_grads=False),
    }
    return {name: median_ms(call, rep) for name, call in calls.items()}


def time_kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of every kernel of one call, longest first; empty where the machine's profiler sees none."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def variants(case: Case) -> Iterator[tuple[str, Launch, dict[str, Any]]]:
    """Kernel, launch, and constants of `msa_loss`, to be timed."""
    for rows, keys, warps, stages in (
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 2), (64, 128, 4, 2), (64, 128, 4, 3), (256, 128, 8, 2),
        (128, 256, 8, 2),
    ):  # fmt: skip
        yield "index", Launch(rows, keys, warps, stages), {"CHUNK": msa_loss.CHUNK}
    for launch in (
        Launch(32, 128, 8, 2, maxnreg=128), Launch(32, 128, 8, 3, maxnreg=128), Launch(32, 128, 8, 2),
        Launch(64, 128, 8, 2, maxnreg=128), Launch(64, 128, 8, 3, maxnreg=128), Launch(64, 128, 8, 2),
        Launch(32, 128, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 2, maxnreg=168),
    ):  # fmt: skip
        for heads in (1, 2, 4, 6, 8):
            yield "loss", replace(launch, depth=heads * case.shape.dim), {"CHUNK": msa_loss.CHUNK}
    for constants in ({"CHUNK": 512}, {"CHUNK": 2048}, {"MERGED_ROWS": 16}, {"MERGED_ROWS": 64}):
        yield "loss", Launch(32, 128, 8, 2), constants


def tune(case: Case, rep: int) -> list[dict[str, Any]]:
    results = []
    for kind in KINDS:
        q, k, v, index_q, index_k = (x.detach() for x in make_inputs(case.shape, kind))
        spec, block = case.spec, case.spec.block
        indices = msa_selection.choose(index_q, index_k, spec, None)
        lse = kernels_for("sel").forward(q, k, v, indices, block, None)[1]
        counted = (torch.arange(case.shape.tokens, device="cuda") >= case.spec.dense_tokens).expand(q.shape[:2])
        for kernel, launch, constants in variants(case):
            if kernel == "index" and kind == "correlated":
                continue  # the same work
            calls: dict[str, Callable[[], Any]] = {
                "index": partial(msa_selection.choose, index_q, index_k, spec, None, launch),
                "loss": partial(
                    msa_loss.loss, index_q, index_k, q, k, lse, indices, counted, block, None, launch
                ),
            }  # fmt: skip
            try:
                with mock.patch.multiple(msa_loss, **constants):
                    took: float | str = median_ms(calls[kernel], rep)
            except Exception as error:
                took = f"{type(error).__name__}: {str(error)[:60]}"
            shown = f"{launch.rows} x {launch.columns}, {launch.num_warps} warps, {launch.num_stages} stages"
            row = {"case": case.name, "inputs": kind, "kernel": kernel, "launch": shown, "maxnreg": launch.maxnreg}
            results.append(row | constants | {"ms": took})
            print(*results[-1].values(), flush=True)
    return results


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case.name}
    if not options.skip_dense:
        result["dense_cudnn"] = time_dense(case.shape, SDPBackend.CUDNN_ATTENTION, options.rep)
    for kind in KINDS:
        errors = check(case, kind)
        result[kind] = {"errors": errors}
        if bad := wrong(errors):
            result[kind]["wrong"] = {name: errors[name] for name in bad}
            continue
        torch.cuda.empty_cache()
        leaves = make_inputs(case.shape, kind)
        if case.shape.tokens > case.spec.dense_tokens:
            indices = index_blocks(leaves[3], leaves[4], case.spec)
            result[kind]["agreement"] = agreement(indices, case.spec)
            result[kind]["parts_ms"] = time_parts(case, leaves, options.rep)
            result[kind]["kernels_ms"] = time_kernels(partial(msa_attention, *leaves, case.spec))
        result[kind] |= time_ours(case, leaves, options.rep)
    return result


def table(results: list[dict[str, Any]]) -> Table:
    out = Table(title="MSA on one GPU, ms, bf16: forward / backward, selection and index loss included")
    names = ("index_blocks", "sel.fwd", "sel.bwd", "loss", "loss value")
    for column in ("case", "inputs", "agree", "ours", "sum", "eager", "dense cuDNN", "peak GiB", *names):
        out.add_column(column)
    for r in results:
        dense = r.get("dense_cudnn")
        for kind in (kind for kind in KINDS if kind in r):
            ours = r[kind]
            if "wrong" in ours:
                out.add_row(r["case"], kind, "-", f"WRONG: {ours['wrong']}")
                continue
            out.add_row(
                r["case"],
                kind,
                f"{ours['agreement']:.0%}" if "agreement" in ours else "-",
                f"{ours['fwd_ms']:.2f} / {ours['bwd_ms']:.2f}",
                f"{ours['fwd_ms'] + ours['bwd_ms']:.2f}",
                f"{ours['eager_fwd_ms']:.2f} / {ours['eager_bwd_ms']:.2f}",
                f"{dense['fwd_ms']:.2f} / {dense['bwd_ms']:.2f}" if dense else "-",
                f"{ours['peak_gib']:.2f}",
                *(f"{ours['parts_ms'][name]:.2f}" if "parts_ms" in ours else "-" for name in names),
            )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/msa.json"))
    parser.add_argument("--shapes", default="", help="comma-separated parts of case names; all when empty")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds to repeat each measurement for")
    parser.add_argument("--skip-dense", action="store_true")
    parser.add_argument("--tune", action="store_true", help="time launches of the index's kernels instead")
    add_dirty_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.msa needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    file = Results(options.out, options.allow_dirty)
    results: list[dict[str, Any]] = []
    for case in (c for c in CASES if any(part in c.name for part in options.shapes.split(","))):
        if options.tune:
            results += tune(case, options.rep) if case.shape.tokens > case.spec.dense_tokens else []
        else:
            results.append(measure(case, options))
        file.write(results=results)
        print(f"done {case.name}", file=sys.stderr, flush=True)
    if not options.tune:
        for r in results:
            for kind in (kind for kind in KINDS if "kernels_ms" in r.get(kind, {})):
                times = [f"{name[:40]} {ms:.2f}" for name, ms in list(r[kind]["kernels_ms"].items())[:16]]
                print(r["case"], kind, "kernels of the forward pass, ms:", ", ".join(times))
        Console(width=230).print(table(results))
    return 1 if any("wrong" in r.get(kind, {}) for r in results for kind in KINDS) else 0


if __name__ == "__main__":
    sys.exit(main())
