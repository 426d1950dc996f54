"""Times whole NSA attention against dense attention on a CUDA GPU: `make bench`, or `python -m bench.attention`.

Every shape is checked against the float64 reference first; a wrong kernel is not timed. Prints a table and writes JSON
with the machine, the versions and the commit. Three kinds of input (`--inputs`): random; correlated, in which queries
agree in runs of 32; and trained, recorded from a layer of the run folder `--run` (see `bench.trained`). The table shows
how much neighbouring queries agree. `--peers` times the public implementations in the same run (`bench.peers`).
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench import peers
from bench.output import Results, add_dirty_option
from bench.shapes import BEST_PUBLIC, SHAPES, SPEC, Inputs, Shape, agreement, make_inputs
from bench.timing import median_ms
from bench.trained import Recording
from nsa.nn.rope import rotate
from nsa.ops import compressed_attention, nsa_attention, select_blocks
from nsa.ops.dispatch import OPERATORS, REFERENCE, kernels_for
from nsa.ops.mixing import all_gradients

CHECK_TOKENS = 4096
LIMIT = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
KINDS = ("random", "correlated", "trained")
Maker = Callable[[Shape, int], Inputs]  # inputs of a shape from a seed


def attention(x: Inputs, backend: str | None = None) -> Tensor:
    """Compression by mean, compressed attention, selection, selected attention, window, gates."""
    return nsa_attention(
        x.q, *x.compressed(backend), x.k_sel, x.v_sel, x.k_win, x.v_win, x.gates, SPEC, backend=backend
    )


def check(shape: Shape, make: Maker) -> dict[str, float]:
    """Relative errors of each branch and gradient against the float64 reference on equal blocks.

    Gradients are compared with those that float64 computes from the same o, which the forward pass kept in bf16. If the
    keys of a trained layer are similar, this rounding alone changes dq by 1 %, with any FlashAttention, and would hide
    errors of the backward pass."""
    small = Shape(min(shape.batch, 1), min(shape.tokens, CHECK_TOKENS), shape.heads, shape.groups, shape.dim)
    x = make(small, 1)
    dtype = x.q.dtype
    exact = Inputs(*(t.detach().double().requires_grad_() for t in x.all()))
    errors: dict[str, float] = {}
    do = torch.randn(x.q.shape, device=x.q.device).to(dtype)
    kernels = {operator: kernels_for(operator) for operator in OPERATORS}

    def compare(name: str, got: Tensor, want: Tensor) -> None:
        errors[name] = float((got.double() - want).norm() / want.norm())

    k, v = (kernels["phi"].mean(t.detach(), SPEC, None) for t in (x.k_cmp, x.v_cmp))
    compare("phi", k, REFERENCE["phi"].mean(exact.k_cmp.detach(), SPEC, None))
    dk = kernels["phi"].mean_backward(k, small.tokens, SPEC, None)
    compare("phi.dx", dk, REFERENCE["phi"].mean_backward(k.double(), small.tokens, SPEC, None))
    k = k if x.slot_turns is None else rotate(k, x.slot_turns)
    q, do64 = x.q.detach(), do.double()
    o, lse = kernels["cmp"].forward(q, k, v, SPEC, None)
    o64, lse64 = REFERENCE["cmp"].forward(q.double(), k.double(), v.double(), SPEC, None)
    compare("cmp", o, o64)
    grads = kernels["cmp"].backward(do, q, k, v, o, lse, SPEC, None)
    wanted = REFERENCE["cmp"].backward(do64, q.double(), k.double(), v.double(), o.double(), lse64, SPEC, None)
    for name, a, b in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        compare(f"cmp.{name}", a, b)
    outputs, kept, kept64 = [o], [o, lse], [o.double(), lse64]
    indices = kernels["select"].forward(q, k, lse, SPEC, None)
    indices64 = REFERENCE["select"].forward(q.double(), k.double(), lse64, SPEC, None)
    errors["select"] = float((indices != indices64).any(-1).float().mean())
    for name, tensors, size in (
        ("sel", (q, x.k_sel.detach(), x.v_sel.detach(), indices), SPEC.sel_block),
        ("win", (q, x.k_win.detach(), x.v_win.detach()), SPEC.window),
    ):
        tensors64 = tuple(t.double() if t.is_floating_point() else t for t in tensors)
        o, lse = kernels[name].forward(*tensors, size, None)
        o64, lse64 = REFERENCE[name].forward(*tensors64, size, None)
        compare(name, o, o64)
        grads = kernels[name].backward(do, *tensors, o, lse, size, None)
        wanted = REFERENCE[name].backward(do64, *tensors64, o.double(), lse64, size, None)
        for suffix, a, b in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
            compare(f"{name}.{suffix}", a, b)
        outputs.append(o)
        kept, kept64 = [*kept, o, lse], [*kept64, o.double(), lse64]
    gates = x.gates.detach()
    exact_mix = [t.double() for t in (*outputs, gates)]
    compare("mix", kernels["mix"].forward(*outputs, gates), REFERENCE["mix"].forward(*exact_mix))
    mix64 = REFERENCE["mix"].backward(do64, *exact_mix)
    for name, a, b in zip(
        ("dcmp", "dsel", "dwin", "dgates"), kernels["mix"].backward(do, *outputs, gates), mix64, strict=True
    ):
        compare(f"mix.{name}", a, b)
    keys = [k, v, *(t.detach() for t in (x.k_sel, x.v_sel, x.k_win, x.v_win))]
    settings = (indices, SPEC.as_ints(), None)
    together = all_gradients(do, q, *keys, gates, *kept, *settings, *[None] * 4)
    keys64 = (t.double() for t in (q, *keys, gates))
    wanted = all_gradients(do64, *keys64, *kept64, *settings, *["reference"] * 4)
    branches = [f"d{kind}_{branch}" for branch in ("cmp", "sel", "win") for kind in "kv"]
    for name, a, b in zip(("dq", *branches, "dgates"), together, wanted, strict=True):
        compare(f"together.{name}", a, b)
    return errors


def wrong(errors: dict[str, float], dtype: torch.dtype) -> list[str]:
    """Names whose error is over the limit or NaN. The error of selection is the share of rows that differ: a few may,
    if two scores agree to 1e-5; the tests of the kernels compare these scores."""
    limits = {"select": 1e-3}
    return [name for name, error in errors.items() if not error <= limits.get(name, LIMIT[dtype])]


Call = Callable[[], Tensor | tuple[Tensor, ...]]  # gives one output, or several that have gradients


def outputs_of(call: Call) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """What `call` gives, and a gradient of each."""
    given = call()
    outputs = (given,) if isinstance(given, Tensor) else given
    return outputs, [torch.randn_like(o) for o in outputs]


def time_eager(call: Call, leaves: list[Tensor], rep: int) -> dict[str, float]:
    """Forward and backward of `call`, started by Python."""
    o, do = outputs_of(call)
    with torch.no_grad():
        forward = median_ms(call, rep)
    backward = median_ms(partial(torch.autograd.grad, o, leaves, do, retain_graph=True), rep)
    return {"eager_fwd_ms": forward, "eager_bwd_ms": backward}


def time_graph(call: Call, leaves: list[Tensor], rep: int) -> dict[str, float]:
    """Forward and backward of `call`, replayed from a CUDA graph, which leaves out what the host needs to start the
    kernels."""
    both, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o, do = outputs_of(call)
        torch.autograd.grad(o, leaves, do)
        del o
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(forward), torch.no_grad():
        call()
    forward_ms = median_ms(forward.replay, rep)
    del forward
    with torch.cuda.graph(both):
        torch.autograd.grad(call(), leaves, do)
    return {"fwd_ms": forward_ms, "bwd_ms": median_ms(both.replay, rep) - forward_ms}


def time_call(call: Call, leaves: list[Tensor], rep: int) -> dict[str, float]:
    return time_graph(call, leaves, rep) | time_eager(call, leaves, rep)


def time_ours(x: Inputs, rep: int) -> dict[str, Any]:
    leaves = x.all()
    torch.cuda.reset_peak_memory_stats()
    o = attention(x)
    torch.autograd.grad(o, leaves, torch.randn_like(o))
    peak = torch.cuda.max_memory_allocated() / 2**30
    del o
    return {**time_call(lambda: attention(x), leaves, rep), "peak_gib": peak}


def time_parts(x: Inputs, rep: int) -> dict[str, float]:
    """Milliseconds of every kernel separately."""
    m = {operator: kernels_for(operator) for operator in OPERATORS}
    q, raw, gates, tokens = x.q.detach(), x.k_cmp.detach(), x.gates.detach(), x.q.shape[1]
    parts = {"phi.fwd": 2 * median_ms(lambda: m["phi"].mean(raw, SPEC, None), rep)}
    k, v = (t.detach() for t in x.compressed())
    parts["phi.bwd"] = 2 * median_ms(lambda: m["phi"].mean_backward(k, tokens, SPEC, None), rep)
    o, lse = m["cmp"].forward(q, k, v, SPEC, None)
    do = torch.randn_like(o)
    parts["cmp.fwd"] = median_ms(lambda: m["cmp"].forward(q, k, v, SPEC, None), rep)
    parts["cmp.bwd"] = median_ms(lambda: m["cmp"].backward(do, q, k, v, o, lse, SPEC, None), rep)
    parts["select"] = median_ms(lambda: m["select"].forward(q, k, lse, SPEC, None), rep)
    indices = m["select"].forward(q, k, lse, SPEC, None)
    ks, vs = x.k_sel.detach(), x.v_sel.detach()
    os_, ls = m["sel"].forward(q, ks, vs, indices, SPEC.sel_block, None)
    parts["sel.fwd"] = median_ms(lambda: m["sel"].forward(q, ks, vs, indices, SPEC.sel_block, None), rep)
    selected = (do, q, ks, vs, indices, os_, ls, SPEC.sel_block, None)
    parts["sel.bwd"] = median_ms(lambda: m["sel"].backward(*selected), rep)
    kw, vw = x.k_win.detach(), x.v_win.detach()
    ow, lw = m["win"].forward(q, kw, vw, SPEC.window, None)
    parts["win.fwd"] = median_ms(lambda: m["win"].forward(q, kw, vw, SPEC.window, None), rep)
    parts["win.bwd"] = median_ms(lambda: m["win"].backward(do, q, kw, vw, ow, lw, SPEC.window, None), rep)
    parts["mix.fwd"] = median_ms(lambda: m["mix"].forward(o, os_, ow, gates), rep)
    parts["mix.bwd"] = median_ms(lambda: m["mix"].backward(do, o, os_, ow, gates), rep)
    return parts


def time_dense(shape: Shape, backend: SDPBackend, rep: int) -> dict[str, float] | None:
    """PyTorch's fused causal attention on the same heads; None where it cannot run them."""

    def draw(heads: int) -> Tensor:
        return torch.randn(
            shape.batch, heads, shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()

    q, k, v = draw(shape.heads), draw(shape.groups), draw(shape.groups)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        return time_call(run, [q, k, v], rep)
    except RuntimeError:
        return None


def neighbours_agree(x: Inputs) -> float:
    """`agreement` of the first sequence."""
    with torch.no_grad():
        q, (k, v) = x.q[:1], (t[:1] for t in x.compressed())
        _, lse = compressed_attention(q, k, v, SPEC)
        return agreement(select_blocks(q, k, lse, SPEC), SPEC)


def measure(shape: Shape, makers: dict[str, Maker], options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"shape": shape.name}
    if not options.skip_dense:
        result["dense_cudnn"] = time_dense(shape, SDPBackend.CUDNN_ATTENTION, options.rep)
        result["dense_flash"] = time_dense(shape, SDPBackend.FLASH_ATTENTION, options.rep)
    for kind, make in makers.items():
        errors = check(shape, make)
        bad = wrong(errors, torch.bfloat16)
        result[kind] = {"errors": errors}
        if bad:
            result[kind]["wrong"] = bad
            continue
        torch.cuda.empty_cache()
        x = make(shape, 0)
        result[kind] |= {"agreement": neighbours_agree(x)} | time_ours(x, options.rep)
        if not options.no_parts:
            result[kind]["parts_ms"] = time_parts(x, options.rep)
    if options.peers:
        kinds = [kind for kind in makers if kind != "trained"]
        torch.cuda.empty_cache()
        result["peers"] = peers.measure_all(shape, kinds, options.rep, options.checkouts, list(peers.PEERS))
    return result


def makers_of(shape: Shape, kinds: list[str], recording: Recording | None) -> dict[str, Maker]:
    """The functions that make the requested kinds of input; prints which kinds the run cannot provide."""
    makers: dict[str, Maker] = {
        "random": lambda shape, seed: make_inputs(shape, correlated=False, seed=seed),
        "correlated": lambda shape, seed: make_inputs(shape, correlated=True, seed=seed),
    }
    if recording is not None:
        refusal = recording.refusal(shape)
        if refusal is None:
            makers["trained"] = lambda shape, seed: recording.inputs(shape)
        else:
            print(f"{shape.name}: no trained inputs: {refusal}", file=sys.stderr, flush=True)
    return {kind: makers[kind] for kind in kinds if kind in makers}


def table(results: list[dict[str, Any]]) -> Table:
    out = Table(title="NSA attention on one GPU, ms (forward / backward), bf16; eager includes the host's share")
    timed = ("ours", "ours eager", "dense cuDNN", "dense flash", "x dense", "x public", "peak GiB")
    for column in ("shape", "inputs", "agree", *timed):
        out.add_column(column, justify="left" if column in ("shape", "inputs") else "right")

    def pair(t: dict[str, float] | None, prefix: str = "") -> str:
        return f"{t[prefix + 'fwd_ms']:.2f} / {t[prefix + 'bwd_ms']:.2f}" if t else "-"

    def total(t: dict[str, float]) -> float:
        return t["fwd_ms"] + t["bwd_ms"]

    for r in results:
        for kind in (kind for kind in KINDS if kind in r):
            ours = r[kind]
            if "wrong" in ours:
                out.add_row(r["shape"], kind, "-", "WRONG: " + ", ".join(ours["wrong"]))
                continue
            dense, public = r.get("dense_cudnn"), BEST_PUBLIC[r["shape"]]
            out.add_row(
                r["shape"],
                kind,
                f"{ours['agreement']:.0%}",
                pair(ours),
                pair(ours, "eager_"),
                pair(dense),
                pair(r.get("dense_flash")),
                f"{total(dense) / total(ours):.2f}" if dense else "-",
                f"{(public[1] + public[2]) / total(ours):.2f}",
                f"{ours['peak_gib']:.1f}",
            )
    return out


def parts_table(results: list[dict[str, Any]]) -> Table:
    out = Table(title="Single kernels, ms")
    names: list[str] = []
    for r in results:
        names = next((list(r[kind]["parts_ms"]) for kind in KINDS if "parts_ms" in r.get(kind, {})), names)
    for column in ("shape", "inputs", *names):
        out.add_column(column)
    for r in results:
        for kind in KINDS:
            if "parts_ms" in r.get(kind, {}):
                out.add_row(r["shape"], kind, *(f"{t:.2f}" for t in r[kind]["parts_ms"].values()))
    return out


def peers_table(results: list[dict[str, Any]]) -> Table:
    out = Table(title="Public implementations in the same run, ms (forward / backward), started by Python")
    for column in ("shape", "inputs", "ours", *peers.PEERS):
        out.add_column(column, overflow="fold")
    for r in results:
        for kind in (kind for kind in KINDS if "eager_fwd_ms" in r.get(kind, {}) and kind != "trained"):
            found = [r["peers"][name] for name in peers.PEERS]
            cells = [peer.get("missing") or peer.get("refused") or peer.get(kind) for peer in found]
            out.add_row(
                r["shape"], kind, *(_eager(cell) if isinstance(cell, dict) else cell for cell in [r[kind], *cells])
            )
    return out


def _eager(times: dict[str, float]) -> str:
    return f"{times['eager_fwd_ms']:.2f} / {times['eager_bwd_ms']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/attention.json"))
    parser.add_argument("--shapes", default="", help="comma-separated parts of shape names; all when empty")
    parser.add_argument("--inputs", default="random,correlated", help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--run", type=Path, help="run folder that trained inputs are recorded from")
    parser.add_argument("--layer", type=int, help="which NSA layer of the run, the middle one when not given")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds to repeat each measurement for")
    parser.add_argument("--skip-dense", action="store_true")
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--peers", action="store_true", help="also time the public implementations; see bench.peers")
    parser.add_argument("--checkout", action="append", default=[], help="NAME=PATH, the checkout of a peer")
    add_dirty_option(parser)
    options = parser.parse_args()
    options.checkouts = {name: Path(path) for name, _, path in (given.partition("=") for given in options.checkout)}
    if set(options.checkouts) - set(peers.PEERS):
        parser.error(f"--checkout: NAME=PATH with a name of {', '.join(peers.PEERS)}")
    kinds = options.inputs.split(",")
    if set(kinds) - set(KINDS) or ("trained" in kinds) != (options.run is not None):
        parser.error(f"--inputs: of {', '.join(KINDS)}; trained needs --run, a run folder, and --run needs trained")
    if not torch.cuda.is_available():
        print("bench.attention needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    file = Results(options.out, options.allow_dirty)
    recording = Recording(options.run, options.layer) if options.run else None
    results: list[dict[str, Any]] = []
    for shape in (s for s in SHAPES if any(part in s.name for part in options.shapes.split(","))):
        makers = makers_of(shape, kinds, recording)
        if makers:
            results.append(measure(shape, makers, options))
            file.write(results=results)
            print(f"done {shape.name}", file=sys.stderr, flush=True)
    console = Console(width=200)
    console.print(table(results))
    console.print(parts_table(results))
    if options.peers:
        console.print(peers_table(results))
    return 1 if any("wrong" in r.get(kind, {}) for r in results for kind in KINDS) else 0


if __name__ == "__main__":
    sys.exit(main())
