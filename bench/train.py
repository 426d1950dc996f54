"""Training speed of a shipped model against its dense twin: `python -m bench.train` on a CUDA GPU.

    python -m bench.train                                                       # the 125M model
    python -m bench.train --config llama_1b --lengths 8192,32768 --compile yes  # the 1B model

Both train in one run on random tokens of the configuration's vocabulary with the trainer's own step: forward, backward,
clipping, fused AdamW, bf16, with and without CUDA graphs, in one process. One forward and backward pass is 32,768
tokens, or one sequence where that is longer; a step is one pass, or `--passes` of them. TFLOP/s are the estimate that
`nsa train` prints (nsa/nn/flops.py) divided by the step time.
"""

import argparse
import gc
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.output import Results, add_dirty_option
from nsa.checks.memory_estimate import vocabulary_size
from nsa.config import Config, load_config
from nsa.data.loader import Batch
from nsa.data.tokenizers import ByteTokenizer
from nsa.nn.flops import flops_per_token
from nsa.parallel.numerics import numerics
from nsa.train.graphs import plan_graphs
from nsa.train.state import build_state
from nsa.train.step import train_step

PASS_TOKENS = 32_768
CHECKPOINTED_FROM = 131_072
PEAK_TFLOPS = 989.0  # of an H200 in bf16 without sparsity
OWN = "configured"
CHOICES = {"no": [False], "yes": [True], "both": [False, True]}


def measure(
    attention: str, seq_len: int, compiled: bool, packed: bool, graphs: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Median tokens/s over the steps after a warm-up, and the peak memory."""
    batch_size = max(1, options.pass_tokens // seq_len)
    checkpointing = options.checkpointing if seq_len >= CHECKPOINTED_FROM else "none"
    config = load_config(
        options.config,
        [
            *([] if attention == OWN else [f"model.attention={attention}"]),
            f"train.seq_len={seq_len}",
            f"train.batch_size={batch_size * options.passes}",
            f"train.micro_batch={batch_size}",
            "parallel.strategy=single",
            f"runtime.compile={str(compiled).lower()}",
            f"runtime.cuda_graphs={'auto' if graphs else 'false'}",
            f"runtime.gradient_checkpointing={checkpointing}",
            "runtime.device=cuda",
            *options.override,
        ],
    )
    vocabulary = vocabulary_size(config)  # without the tokenizer, which may be a download
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocabulary})})
    with numerics(config.runtime):
        return _measure(config, options.steps, options.passes, packed)


def _measure(config: Config, steps: int, passes: int, packed: bool) -> dict[str, Any]:
    batch_size, seq_len = config.train.batch_size // passes, config.train.seq_len
    torch.cuda.reset_peak_memory_stats()
    state = build_state(config, ByteTokenizer())
    state.graphs = plan_graphs(config, state.world, batch_size)
    tokens = torch.randint(0, state.model.vocab_size, (batch_size, seq_len + 1), device=state.device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
    if packed:
        borders = torch.nn.functional.pad(batch_documents(batch_size, seq_len, packed).cumsum(0), (1, 0))
        borders = borders.to(state.device, torch.int32)
        batch = Batch(batch.inputs.view(1, -1), batch.targets.view(1, -1), borders, seq_len)
        batch = batch.padded(state.graphs.borders)
    targets = batch.targets.numel() * passes
    times = []
    for step in range(steps + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        train_step(state, [batch] * passes, targets, lr=1e-4)
        torch.cuda.synchronize()
        if step >= 3:
            times.append(time.perf_counter() - began)
    median = sorted(times)[len(times) // 2]
    documents = batch_documents(batch_size, seq_len, packed).tolist()
    operations = passes * sum(n * flops_per_token(state.model, n).sparse for n in documents)
    result = {
        "parameters": state.model.num_parameters(),
        "attention": "+".join(dict.fromkeys(config.model.layer_kinds())),
        "seq_len": seq_len,
        "batch_size": batch_size,
        "passes": passes,
        "steps": steps,
        "packed": packed,
        "compiled": config.runtime.compile,
        "float8": config.runtime.float8,
        "graphs": state.graphs.reason is None,
        "gradient_checkpointing": config.runtime.gradient_checkpointing,
        "step_ms": 1000 * median,
        "toks_per_s": targets / median,
        "tflops": operations / median / 1e12,
        "share_of_peak": operations / median / 1e12 / PEAK_TFLOPS,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
    del state, batch, tokens
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return result


def batch_documents(batch_size: int, seq_len: int, packed: bool) -> torch.Tensor:
    """Lengths of the documents in a batch. Where they are packed, the first sequence and every second one after it
    hold four documents of a quarter of its length; the others hold one."""
    quarters = [seq_len // 4] * 3 + [seq_len - 3 * (seq_len // 4)]
    return torch.tensor([n for row in range(batch_size) for n in (quarters if packed and row % 2 == 0 else [seq_len])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="m7c_125m", help="a shipped configuration or a YAML file")
    parser.add_argument("--lengths", default="2048,8192,32768,65536,131072")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--attention", default=f"{OWN},dense", help=f"{OWN}: the layers of the configuration")
    parser.add_argument("--packed", choices=["no", "yes", "both"], default="no", help="documents in each sequence")
    parser.add_argument("--graphs", choices=["no", "yes", "both"], default="yes", help="CUDA graphs")
    parser.add_argument("--pass-tokens", type=int, default=PASS_TOKENS)
    parser.add_argument("--passes", type=int, default=1, help="forward and backward passes in a step")
    parser.add_argument("--checkpointing", default="block", help=f"of sequences from {CHECKPOINTED_FROM:,} tokens on")
    parser.add_argument("--out", type=Path, default=Path("bench/results/train.json"))
    parser.add_argument("override", nargs="*", help="further overrides, such as runtime.float8=rowwise")
    add_dirty_option(parser)
    options = parser.parse_intermixed_args()
    if not torch.cuda.is_available():
        print("bench.train needs a CUDA GPU; none is visible", file=sys.stderr)
        return 1
    file = Results(options.out, options.allow_dirty)
    results = []
    for seq_len in map(int, options.lengths.split(",")):
        for compiled in CHOICES[options.compile]:
            choices = (options.attention.split(","), CHOICES[options.packed], CHOICES[options.graphs])
            for attention, packed, graphs in product(*choices):
                results.append(measure(attention, seq_len, compiled, packed, graphs, options))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                file.write(config=options.config, results=results)
    table = Table(title=" ".join((f"Training {options.config} on one GPU, bf16", *options.override)))
    columns = ("tokens", "attention", "packed", "compiled", "graphs", "checkpointed", "tokens/s", "step ms")
    columns += ("TFLOP/s", "of peak", "peak GiB")
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r["seq_len"]),
            r["attention"],
            str(r["packed"]),
            str(r["compiled"]),
            str(r["graphs"]),
            r["gradient_checkpointing"],
            f"{r['toks_per_s']:,.0f}",
            f"{r['step_ms']:.1f}",
            f"{r['tflops']:.0f}",
            f"{r['share_of_peak']:.0%}",
            f"{r['peak_gib']:.1f}",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
