"""Public implementations of NSA beside ours: `python -m bench.attention --peers --checkout flash_nsa=PATH ...`.

Each runs on the same queries, keys, values and gates, in its own process, so that a crash does not affect the others.
An implementation whose output or gradients differ from the float64 reference of the same sizes is refused. They have
one pair of keys and values for the three branches, ours has three. Their windows come from `flash_attn`, which few
machines have, and mostly read one token too many: here all use PyTorch's FlashAttention-2 with the right length.

fla                       flash-linear-attention, `pip install flash-linear-attention`; compresses whole blocks of 64
flash_nsa                 SFNSA, github.com/mdy666/Scalable-Flash-Native-Sparse-Attention
native_sparse_attention   github.com/XunhaoLai/native-sparse-attention-triton
fsa                       github.com/Relaxed-System-Lab/Flash-Sparse-Attention
"""

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.shapes import SHAPES, SPEC, Shape, make_inputs
from nsa.ops import NSASpec, compress_mean, nsa_attention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, gates, as in nsa.ops, to the output
CHECK_TOKENS = 4096
# Of the rows of an output, the median may be off by so much, and so many by more than FAR_OFF. Where queries read all
# blocks these are few. Where they choose, an implementation that keeps scores in bf16 takes another block in 5 to 8 %.
MEDIAN_LIMIT, FAR_OFF, FAR_OFF_LIMIT, OTHER_BLOCK_LIMIT = 1e-2, 5e-2, 0.02, 0.15
# Then every key is off, since many rows add to it. With float64 but for scores of fewer bits, the median of dK is 3.4 %
# off where 5.5 % of the rows read another block, and 7.5 % where 20 % do (4,096 tokens, 16 heads of 128).
OTHER_KEY_LIMIT = 6e-2


@dataclass(frozen=True)
class Peer:
    """`load` imports the package and returns its attention; `spec` has the sizes that it computes."""

    load: Callable[[Shape], Attention]
    source: str
    spec: NSASpec = SPEC


def _window(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
    """PyTorch's FlashAttention-2 over the last `window` tokens; q [T,H,D], k and v [T,G,D]."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    window = (SPEC.window - 1, 0)
    o = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=window, **grouped)
    assert isinstance(o, Tensor)
    return o


def _borders(shape: Shape) -> Tensor:
    return torch.arange(0, (shape.batch + 1) * shape.tokens, shape.tokens, dtype=torch.int32, device="cuda")


def _fla(shape: Shape) -> Attention:
    from fla.ops.nsa import parallel_nsa

    if shape.heads // shape.groups < 16:
        raise NotImplementedError("takes groups of 16 query heads and more")
    borders = _borders(shape)

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        g_cmp, g_sel, g_win = gates.unbind(-1)
        o = parallel_nsa(q=q, k=k, v=v, g_cmp=g_cmp, g_slc=g_sel, block_counts=SPEC.num_selected, block_size=64)
        win = _window(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), borders, shape.tokens).view_as(o)
        return torch.addcmul(o, win, g_win[..., None])

    return run


def _flash_nsa(shape: Shape) -> Attention:
    from flash_nsa import NSAHelper, compress_attn, mean_pooling, select_attn, slc_topk_indices
    from flash_nsa.ops.combine import fused_sigmoid_combine

    borders, scale = _borders(shape), shape.dim**-0.5
    NSAHelper.set_hyperparameters(
        kernel_size=SPEC.cmp_block,
        stride=SPEC.cmp_stride,
        block_size=SPEC.sel_block,
        window_size=SPEC.window,
        top_n=SPEC.num_selected,
        num_init_blocks=SPEC.num_init,
        num_local_blocks=SPEC.num_local,
    )

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        like = q
        q, k, v, gates = (x.flatten(0, 1) for x in (q, k, v, gates))
        NSAHelper.init_cu_seqlens(borders)
        k_cmp, v_cmp = mean_pooling(k), mean_pooling(v)
        cmp, lse = compress_attn(q, k_cmp, v_cmp, sm_scale=scale)
        blocks, _ = slc_topk_indices(q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True)
        sel = select_attn(q, k, v, blocks, sm_scale=scale)
        win = _window(q, k, v, borders, shape.tokens)
        mixed: Tensor = fused_sigmoid_combine(cmp, sel, win, gates.logit())  # it applies the sigmoid itself
        return mixed.view_as(like)

    return run


def _by_topk(
    shape: Shape, compress: Callable[..., Any], compressed: Callable[..., Any], selected: Callable[..., Any]
) -> Attention:
    """The part that native_sparse_attention and fsa share."""
    borders, slots = _borders(shape), (shape.tokens - SPEC.cmp_block) // SPEC.cmp_stride + 1

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        like = q
        q, k, v, gates = (x.flatten(0, 1) for x in (q, k, v, gates))
        (k_cmp, cmp_borders), (v_cmp, _) = (
            compress(x, None, borders, SPEC.cmp_block, SPEC.cmp_stride, None) for x in (k, v)
        )
        cmp, blocks = compressed(
            q, k_cmp, v_cmp, SPEC.cmp_block, SPEC.cmp_stride, SPEC.sel_block, SPEC.num_selected, borders, cmp_borders,
            shape.tokens, slots, None, SPEC.num_init, SPEC.num_local,
        )  # fmt: skip
        sel = selected(q, k, v, blocks, SPEC.sel_block, borders, None)
        win = _window(q, k, v, borders, shape.tokens)
        g_cmp, g_sel, g_win = gates.unbind(-1)
        return (g_cmp[..., None] * cmp + g_sel[..., None] * sel + g_win[..., None] * win).view_as(like)

    return run


def _native_sparse_attention(shape: Shape) -> Attention:
    from native_sparse_attention.ops import avgpool_compress, compressed_attention, topk_sparse_attention

    return _by_topk(shape, avgpool_compress, compressed_attention, topk_sparse_attention)


def _fsa(shape: Shape) -> Attention:
    from fsa.ops import FSA_topk_sparse_attention
    from nsa_ref.ops import avgpool_compress, compressed_attention, topk_sparse_attention

    # The choice of its own layer.
    selected = FSA_topk_sparse_attention if shape.heads // shape.groups <= 8 else topk_sparse_attention
    return _by_topk(shape, avgpool_compress, compressed_attention, selected)


PEERS = {
    "fla": Peer(_fla, "pip install flash-linear-attention", NSASpec(cmp_block=64, cmp_stride=64)),
    "flash_nsa": Peer(_flash_nsa, "--checkout flash_nsa=PATH"),
    "native_sparse_attention": Peer(_native_sparse_attention, "--checkout native_sparse_attention=PATH"),
    "fsa": Peer(_fsa, "--checkout fsa=PATH"),
}


def reference(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, spec: NSASpec, backend: str | None) -> Tensor:
    """NSA with one pair of keys and values."""
    k_cmp, v_cmp = (compress_mean(x, spec, backend=backend) for x in (k, v))
    return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, spec, backend=backend)


def disagreement(run: Attention, spec: NSASpec, leaves: list[Tensor]) -> str | None:
    """How the output or gradients of `run` differ from the float64 reference on [q, k, v, gates]; None if they agree.
    Rows are compared one by one: if two scores nearly tie, a row may read another block and be far off."""
    reads_all = leaves[0].shape[1] <= spec.num_selected * spec.sel_block
    far_off_limit = FAR_OFF_LIMIT if reads_all else OTHER_BLOCK_LIMIT
    key_limit = MEDIAN_LIMIT if reads_all else OTHER_KEY_LIMIT
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    o, wanted = run(leaves[0], leaves[1], leaves[2], leaves[3]), reference(*exact, spec, "reference")
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, leaves[:3], do)
    wanted_grads = torch.autograd.grad(wanted, exact[:3], do.double())
    for name, got, want in zip(("o", "dq", "dk", "dv"), (o, *grads), (wanted, *wanted_grads), strict=True):
        rows, exact_rows = got.detach().double().flatten(2), want.detach().flatten(2)
        off = (rows - exact_rows).norm(dim=-1) / exact_rows.norm(dim=-1).clamp(min=1e-6)
        median, share = float(off.median()), float((~(off <= FAR_OFF)).double().mean())
        of_queries = name in ("o", "dq")
        if not median <= (MEDIAN_LIMIT if of_queries else key_limit) or (of_queries and share > far_off_limit):
            return f"{name} differs from the reference: by {median:.1%} in the median row, {share:.1%} of rows are off"
    return None


def measure(name: str, shape: Shape, kinds: list[str], rep: int) -> dict[str, Any]:
    """The times of one peer in this process by kind of input, or the reason why there are none."""
    from bench.attention import time_eager, time_graph

    peer = PEERS[name]
    read_whole = peer.spec.num_selected * peer.spec.sel_block
    try:
        peer.load(shape)
    except ImportError as error:
        return {"missing": f"{error}; {peer.source}"}
    except NotImplementedError as error:
        return {"refused": str(error)}
    result: dict[str, Any] = {}
    for kind in kinds:
        for tokens in (read_whole, min(shape.tokens, CHECK_TOKENS)):
            small = replace(shape, batch=1, tokens=tokens)
            x = make_inputs(small, correlated=kind == "correlated", seed=1)
            problem = disagreement(peer.load(small), peer.spec, [x.q, x.k_sel, x.v_sel, x.gates])
            if problem is not None:
                return {"refused": f"at {tokens:,} tokens {problem}"}
        x = make_inputs(shape, correlated=kind == "correlated")
        leaves = [x.q, x.k_sel, x.v_sel, x.gates]
        attend = peer.load(shape)  # after the checks: some keep the sizes of the last call
        result[kind] = time_eager(partial(attend, *leaves), leaves, rep)
        try:
            result[kind] |= time_graph(partial(attend, *leaves), leaves, rep)
        except Exception as error:  # reads values back, as most of them do
            result[kind]["no_graph"] = str(error).splitlines()[0][:200]
            return result  # the device may not be usable after a failed capture
    return result


def measure_all(
    shape: Shape, kinds: list[str], rep: int, checkouts: dict[str, Path], names: list[str]
) -> dict[str, dict[str, Any]]:
    """Every peer in its own process, kind by kind."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        result = results[name] = {}
        for kind in kinds:
            command = [sys.executable, "-m", "bench.peers", name, shape.name, "--kind", kind, "--rep", str(rep)]
            command += ["--checkout", str(checkouts[name])] if name in checkouts else []
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
            result |= json.loads(lines[-1]) if lines else {"refused": f"it crashed: {reason}"}
            if "missing" in result or "refused" in result:
                break
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.peers", description="One peer; see bench.attention --peers.")
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("shape", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--kind", default="random")
    parser.add_argument("--rep", type=int, default=100)
    parser.add_argument("--checkout", type=Path)
    options = parser.parse_args()
    if options.checkout is not None:
        sys.path.insert(0, str(options.checkout))
    shape = next(shape for shape in SHAPES if shape.name == options.shape)
    print(json.dumps(measure(options.name, shape, [options.kind], options.rep)))


if __name__ == "__main__":
    main()
