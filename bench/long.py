"""Training the 125M model on very long sequences on one GPU: `python -m bench.long` on a CUDA GPU.

Checks come first, and nothing is timed if one fails: the loss and the gradients of up to 65,536 tokens in chunks
against those computed at once, and attention at every length against a float64 computation of some of its rows. Then
tokens/s and peak memory of the trainer's step by length, with no recomputation, recomputation of all but attention, and
full recomputation, next to the prediction of `nsa memory`; lengths that do not fit are not run. Then the step of one
rank of `--ranks` context-parallel ranks: its collectives do nothing, and the bytes it would send are reported. Prints
tables, writes JSON after every result.

--quick  only the first length, one step
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.output import Results, add_dirty_option
from bench.shapes import SPEC, Inputs, Shape, make_inputs
from nsa.checks.memory_estimate import estimate
from nsa.config import Config, load_config
from nsa.data.loader import Batch
from nsa.data.tokenizers import ByteTokenizer
from nsa.nn import loss as losses
from nsa.ops import compressed_attention, select_blocks, selected_attention, window_attention
from nsa.ops.layout import visible_compressed
from nsa.ops.reference.selection import block_scores, pick_blocks
from nsa.parallel.numerics import numerics
from nsa.parallel.world import World, pick_device
from nsa.train.state import RunState, build_state
from nsa.train.step import train_step

LENGTHS = (1 << 16, 1 << 18, 1 << 20)
# Checked besides the heads of the model: one tensor of 2^31 numbers, more than 32-bit offsets reach.
WIDE = Shape(1, 1 << 18, 64, 4, 128)
CHUNKS_AT = 1 << 16  # tokens; the check patches the limits, so that a pass of any length is cut into chunks
ROWS = 12  # sampled queries
LIMITS = {"loss": 1e-6, "step_loss": 1e-3, "step_grad_norm": 1e-2, "attention": 5e-3, "dq": 1e-2, "selection": 0.05}


def config_of(seq_len: int, options: argparse.Namespace, *settings: str) -> Config:
    own = [f"train.seq_len={seq_len}", f"runtime.device={options.device}", *settings]
    return load_config(options.config, [*own, *options.override])


def eager(config: Config) -> Config:
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"compile": False})})


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def memory_gib(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[1] / 2**30 if device.type == "cuda" else math.inf


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()


def random_batch(config: Config, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (config.train.batch_size, config.train.seq_len + 1), generator=generator).to(device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


def timed_steps(state: RunState, batch: Batch, targets: int, steps: int) -> float:
    """The median seconds of a step, after one that is not counted."""
    times = []
    for step in range(steps + 1):
        synchronize(state.device)
        began = time.perf_counter()
        train_step(state, iter([batch]), targets, lr=1e-4)
        synchronize(state.device)
        if step:
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def measure(seq_len: int, checkpointing: str, options: argparse.Namespace) -> dict[str, Any]:
    config = config_of(seq_len, options, f"runtime.gradient_checkpointing={checkpointing}")
    device = pick_device(options.device)
    result: dict[str, Any] = {
        "seq_len": seq_len,
        "gradient_checkpointing": checkpointing,
        "compiled": config.runtime.compile,
        "predicted_gib": estimate(config).planned_gib,
    }
    free(device)
    seconds = None
    if result["predicted_gib"] < memory_gib(device):
        with suppress(torch.OutOfMemoryError):
            seconds = _measure(config, options.steps)
    result |= {"step_s": seconds, "toks_per_s": config.train.batch_size * seq_len / seconds if seconds else None}
    result["peak_gib"] = peak_gib(device) if seconds else None
    free(device)
    return result


def _measure(config: Config, steps: int) -> float:
    with numerics(config.runtime):
        state = build_state(config, ByteTokenizer())
        batch = random_batch(config, state.device)
        return timed_steps(state, batch, batch.targets.numel(), steps)


def check_chunks(seq_len: int, options: argparse.Namespace) -> dict[str, float]:
    """Relative differences between a pass in chunks of tokens and one that computes everything at once, both eager."""
    config = eager(config_of(seq_len, options))
    found = []
    with numerics(config.runtime):
        state = build_state(config, ByteTokenizer())
        batch = random_batch(config, state.device)
        with torch.no_grad(), state.autocast():
            hidden = state.model.hidden(batch.inputs)
        for limit in (1, 1 << 62):
            # Several chunks in the loss and in the MLP, or none.
            with mock.patch.object(losses, "LONG_PASS", limit), mock.patch.object(losses, "LOGITS_AT_ONCE", 1 << 20):
                with torch.no_grad(), state.autocast():
                    value = float(losses.next_token_loss(hidden, state.model.head, batch.targets))
                result = train_step(state, iter([batch]), batch.targets.numel(), lr=0.0)
                found.append((value, result.loss, result.grad_norm))
        device = state.device
        del state, batch, hidden
    free(device)
    pairs = zip(*found, strict=True)
    names = ("loss", "step_loss", "step_grad_norm")
    return {name: abs(a - b) / abs(b) for name, (a, b) in zip(names, pairs, strict=True)}


def check_attention(
    shape: Shape, device: str, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Errors of attention and of the gradient of queries at some rows, and the share of their blocks that differ."""
    x = make_inputs(shape, correlated=True, dtype=dtype, device=device)
    t = torch.linspace(SPEC.num_selected * SPEC.sel_block, shape.tokens - 1, rows, device=device).long()
    k_cmp, v_cmp = (part.detach() for part in x.compressed())
    o_cmp, lse = compressed_attention(x.q, k_cmp, v_cmp, SPEC)
    indices = select_blocks(x.q, k_cmp, lse, SPEC)
    branches = [o_cmp, selected_attention(x.q, x.k_sel, x.v_sel, indices, SPEC)]
    branches.append(window_attention(x.q, x.k_win, x.v_win, SPEC))
    wanted, blocks = zip(*(row_by_hand(x, k_cmp, v_cmp, int(row), indices[:, row]) for row in t), strict=True)
    errors = {"selection": sum(blocks) / rows}
    for number, o in enumerate(branches):
        do = torch.randn_like(o)
        (dq,) = torch.autograd.grad(o, x.q, do)
        want_o = torch.stack([row[number][0] for row in wanted])
        want_dq = torch.stack([
            torch.autograd.grad(row[number][0], row[number][1], do[0, place].double())[0]
            for place, row in zip(t, wanted, strict=True)
        ])  # fmt: skip
        name = ("cmp", "sel", "win")[number]
        errors[f"attention {name}"] = float(((o[0, t].double() - want_o).norm() / want_o.norm()).detach())
        errors[f"dq {name}"] = float((dq[0, t].double() - want_dq).norm() / want_dq.norm())
        del dq, do
    return errors


def row_by_hand(
    x: Inputs, k_cmp: Tensor, v_cmp: Tensor, t: int, indices: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """(output [H, D], query) of each branch for query t in float64, reading the blocks `indices` [1, G, n], and the
    share of these blocks that differ from the reference."""
    groups, seen = indices.shape[1], visible_compressed(t, SPEC)
    tokens = (
        indices[0].long()[..., None] * SPEC.sel_block + torch.arange(SPEC.sel_block, device=indices.device)
    ).flatten(1)
    tokens = tokens[(tokens >= 0) & (tokens <= t)].view(groups, -1) if bool((indices >= 0).all()) else tokens[:, :0]
    first = max(0, t - SPEC.window + 1)

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k and v [G, keys, D] -> output, query, probabilities [G, h, keys]."""
        q = x.q[0, t].detach().double().requires_grad_()
        scores = q.view(groups, -1, q.shape[1]) @ k.double().transpose(1, 2) * q.shape[1] ** -0.5
        p = scores.softmax(-1)
        return (p @ v.double()).flatten(0, 1), q, p

    def picked(part: Tensor) -> Tensor:
        return torch.stack([part[0, tokens[g], g].detach() for g in range(groups)])

    cmp = attend(*(part[0, :seen].transpose(0, 1) for part in (k_cmp, v_cmp)))
    sel = attend(picked(x.k_sel), picked(x.v_sel))
    win = attend(*(part[0, first : t + 1].transpose(0, 1).detach() for part in (x.k_win, x.v_win)))
    scores = block_scores(cmp[2].detach().sum(1), t // SPEC.sel_block + 1, SPEC)
    best = pick_blocks(scores[None, :, None], torch.tensor([t], device=scores.device), SPEC)[0, :, 0]
    common = (indices[0][:, :, None] == best[:, None, :]).any(-1)
    return [part[:2] for part in (cmp, sel, win)], 1.0 - float(common.double().mean())


@contextmanager
def silent_ranks(size: int) -> Iterator[dist.ProcessGroup]:
    """A group of `size` ranks of which this is the first. Collectives return at once and exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def rank_share(seq_len: int, options: argparse.Namespace) -> dict[str, Any]:
    """A step of one context-parallel rank, and the bytes it would send."""
    ranks, config = options.ranks, eager(config_of(seq_len, options))
    context: Any = import_module("nsa.parallel.context")
    formula: Any = import_module("bench.traffic")
    states: Any = import_module("nsa.train.state")
    model, kinds = config.model, config.model.layer_kinds()
    heads = {"num_kv_heads": model.n_kv_heads, "head_dim_k": model.head_dim_k, "head_dim_v": model.head_dim_v}
    index = config.msa.index_dim or model.head_dim_k
    traffic = [
        formula.bytes_per_layer(
            kind, seq_len, ranks, 0, config.nsa.spec(), index_dim=index if kind == "msa" else 0, **heads
        )
        for kind in kinds
    ]
    device = pick_device(options.device)
    with numerics(config.runtime), silent_ranks(ranks) as group:
        own: dict[str, Any] = {"context": context.Context(None, ranks)}
        world = World(device, size=ranks, cpu_group=group, **own)
        state = build_state(config, ByteTokenizer(), world)
        free(device)
        whole = random_batch(config, torch.device("cpu"))
        batch = states.own_tokens(whole, world).to(device)
        seconds = timed_steps(state, batch, whole.targets.numel(), options.steps)
        result = {
            "seq_len": seq_len,
            "ranks": ranks,
            "step_s": seconds,
            "toks_per_s_of_all_ranks_without_communication": whole.targets.numel() / seconds,
            "peak_gib": peak_gib(device),
            "sent_bytes_forward": sum(t.forward for t in traffic),
            "sent_bytes_backward": sum(t.backward for t in traffic),
        }
        del state, batch
    free(device)
    return result


def wrong(errors: dict[str, float]) -> list[str]:
    """Names whose error is over the limit or NaN."""
    return [name for name, error in errors.items() if not error <= LIMITS[name.split()[0]]]


def run_checks(options: argparse.Namespace, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    chunked = min(lengths[0], CHUNKS_AT)  # the pass without chunks would not fit at a million tokens
    found = {f"chunks {chunked}": check_chunks(chunked, options)}
    model = config_of(lengths[0], options).model
    shapes = [Shape(1, length, model.n_heads, model.n_kv_heads, model.head_dim_k) for length in lengths]
    if not options.quick:
        shapes.append(WIDE)
    for shape in shapes:
        found[f"attention {shape.name}"] = check_attention(shape, options.device)
        free(torch.device(options.device))
    return found


def print_tables(results: list[dict[str, Any]], shares: list[dict[str, Any]]) -> None:
    for title, rows in (("One GPU, 125M, bf16", results), ("One rank's share, without communication", shares)):
        if not rows:
            continue
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(width=180).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/m7c_125m_1m.yaml")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8, help="that share a sequence; 0 leaves this out")
    parser.add_argument("--checkpointing", default="none,selective,block", help="kinds of recomputation to time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--override", nargs="*", default=[], help="settings such as runtime.compile=false")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/long.json"))
    add_dirty_option(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.long needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.quick:
        lengths, options.steps = lengths[:1], 1
    file = Results(options.out, options.allow_dirty)
    content: dict[str, Any] = {"quick": options.quick, "checks": run_checks(options, lengths)}
    failed = {place: names for place, errors in content["checks"].items() if (names := wrong(errors))}
    results = content["results"] = []
    shares = content["rank_shares"] = []
    for length in [] if failed else lengths:
        for checkpointing in options.checkpointing.split(","):
            results.append(measure(length, checkpointing, options))
            file.write(**content)
        if options.ranks and find_spec("nsa.parallel.context") is not None:
            shares.append(rank_share(length, options))
    file.write(**content)
    print_tables(results, shares)
    for place, names in failed.items():
        print(f"wrong, {place}: {', '.join(names)}; nothing was timed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
