"""Attention inputs of a trained model, for `python -m bench.attention --inputs trained --run RUN`.

    python -m bench.trained RUN --heads 12/2/64 --tokens 32768     # trains such a model for two minutes on a GPU

Queries, keys, values and gates are those of one layer, in bf16, on text of this machine's Python packages that the
command keeps out of training. A run provides inputs for shapes with its heads and at most the length it was trained at:
other heads and later positions are untrained. Any run folder with mean compression and the paper's block sizes works;
its data are not needed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from bench.learning import folders
from bench.shapes import SPEC, Inputs, Shape, agreement
from nsa.nn.attention import NSAAttention, attention_layers
from nsa.nn.compressor import MeanCompressor
from nsa.nn.rope import rotary_tables
from nsa.ops.observe import observing
from nsa.ops.positions import positions
from nsa.ops.spec import NSASpec
from nsa.train.trained import load_run

KEPT = 10  # every tenth document is kept out of training
MODEL = (
    "model.dim=768 model.n_layers=4 model.mlp_dim=2048 data.source=text data.isolate_documents=false "
    "data.validation_fraction=0 train.steps=1000000 train.lr=6e-4 train.warmup_steps=50 train.schedule=constant "
    "train.eval_every=0 runtime.precision=bf16 checkpoint.every=1000000 telemetry.tensorboard=false"
)


class Recording:
    """A trained model that provides the inputs of its layer number `layer`, by default the middle one."""

    def __init__(self, run: Path, layer: int | None = None):
        trained = load_run(run)
        self.run, self.model, self.tokenizer = run, trained.model, trained.tokenizer
        self.longest = trained.config.train.seq_len
        layers = [module for _, module in attention_layers(self.model) if isinstance(module, NSAAttention)]
        if not layers:
            sys.exit(f"--run: {run} has no NSA layer")
        self.number = len(layers) // 2 if layer is None else layer
        if not 0 <= self.number < len(layers):
            sys.exit(f"--layer: {run} has the NSA layers 0 to {len(layers) - 1}")
        self.layer = layers[self.number]

    def refusal(self, shape: Shape) -> str | None:
        """Why this run cannot provide a shape; None if it can."""
        layer = self.layer
        if layer.spec != SPEC or layer.force_branch or not isinstance(layer.phi_k, MeanCompressor):
            return f"{self.run} has other block sizes, one branch, or another phi than the mean"
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v)
        if heads != (shape.heads, shape.groups, shape.dim, shape.dim):
            return f"{self.run} has heads of {'/'.join(map(str, heads[:3]))}"
        if shape.tokens > self.longest:
            return f"{self.run} was trained at {self.longest:,} tokens"
        return None

    @torch.no_grad()
    def inputs(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        """The attention inputs of the layer for `batch` pieces of text of `tokens` tokens each."""
        device = next(self.model.parameters()).device
        stream = (token for text in texts(kept=True) for token in self.tokenizer.encode(text).tolist())
        tokens = torch.tensor(list(islice(stream, shape.batch * shape.tokens)))
        if len(tokens) < shape.batch * shape.tokens:
            sys.exit(f"{shape.name}: the Python packages of this machine hold {len(tokens):,} tokens of text only")
        tokens = tokens.view(shape.batch, shape.tokens)
        seen: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            try:
                self.model(tokens.to(device))
            finally:
                hook.remove()
            return layer_inputs(self.layer, seen[0], dtype)

    def agreements(self, tokens: int) -> list[float]:
        """The agreement of neighbours in every NSA layer, on one piece of text."""
        shape = Shape(1, tokens, self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim_k)
        observer = Agreements()
        with observing(observer):
            self.inputs(shape)
        return observer.found


class Agreements:
    """Observes the blocks that every layer selects."""

    def __init__(self) -> None:
        self.failures = 0
        self.found: list[float] = []

    def selected(self, indices: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int) -> None:
        self.found.append(agreement(indices, spec))

    def mixed(self, gates: Tensor) -> None:
        pass


def layer_inputs(layer: NSAAttention, x: Tensor, dtype: torch.dtype) -> Inputs:
    """The inputs of attention inside `layer` for its input x. Compressed keys are rotated after compression."""
    turns, slot_turns = (
        rotary_tables(position, *layer.rotary) for position in positions(x.shape[1], layer.spec, None, x.device)
    )
    q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = layer.projections(x, turns)
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, layer.gate(x))
    leaves = (t.detach().to(dtype).contiguous().requires_grad_() for t in tensors)
    return Inputs(*leaves, slot_turns=slot_turns)


def texts(*, kept: bool) -> Iterator[str]:
    """Documents for recording (`kept`) or for training."""
    for number, text in enumerate(folders(Path(torch.__file__).parents[1])):  # where packages are, torch among them
        if (number % KEPT == 0) == kept:
            yield text


def train(run: Path, heads: str, tokens: int, minutes: float, max_mb: int, overrides: list[str]) -> None:
    """Trains into `run` for `minutes`, then stops the trainer, which saves."""
    corpus = run.parent / f"{run.name}-text.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with corpus.open("w", encoding="utf-8") as file:
        for text in texts(kept=False):
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > max_mb << 20:
                break
    query, groups, dim = heads.split("/")
    layout = f"model.n_heads={query} model.n_kv_heads={groups} model.head_dim_k={dim} model.head_dim_v={dim}"
    sizes = f"train.seq_len={tokens} train.batch_size={max(1, 65536 // tokens)} train.out_dir={run}"
    arguments = [*f"{MODEL} {layout} {sizes}".split(), f"data.paths=[{corpus}]", *overrides]
    process = subprocess.Popen([sys.executable, "-m", "nsa", "train", "configs/m7c_125m.yaml", *arguments])
    try:
        process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.trained", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--heads", default="12/2/64", help="query heads / key-value heads / head size")
    parser.add_argument("--tokens", type=int, default=32768, help="length of a sequence")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--max-mb", type=int, default=100, help="text to train on")
    parser.add_argument("override", nargs="*", help="overrides of the configuration")
    options = parser.parse_intermixed_args()
    train(options.run, options.heads, options.tokens, options.minutes, options.max_mb, options.override)
    found = Recording(options.run).agreements(options.tokens)
    print("neighbours agree, by layer: " + ", ".join(f"{share:.0%}" for share in found))


if __name__ == "__main__":
    main()
