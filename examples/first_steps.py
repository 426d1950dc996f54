"""From a layer to a model that writes: run it once, then read it from top to bottom.

python examples/first_steps.py
"""

import tempfile
from pathlib import Path

import torch

import nsa
from nsa.config import load_config
from nsa.nn import NSAAttention
from nsa.ops import NSASpec
from nsa.train import train


def try_the_layer() -> None:
    """1. The layer takes and returns [batch, tokens, dim], like any self-attention."""
    spec = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, window=16)
    layer = NSAAttention(dim=64, num_heads=4, num_kv_heads=2, head_dim_k=16, spec=spec)
    y = layer(torch.randn(1, 100, 64))
    print(f"1. the layer gives {list(y.shape)}\n")


def train_a_model(folder: Path) -> Path:
    """2. A configuration, changed key by key, is trained into a folder. `nsa train` does the same from a shell."""
    text = folder / "counting.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400, encoding="utf-8")
    config = load_config(
        "quickstart",
        [
            "data.source=text",
            f"data.paths=[{text}]",
            "data.validation_fraction=0",
            "model.n_layers=2",
            "model.dim=64",
            "train.seq_len=128",
            "train.steps=40",
            "train.warmup_steps=5",
            "train.log_every=10",
            "telemetry.tensorboard=false",
        ],
    )
    print(f"2. training {config.train.steps} steps; `nsa config show quickstart` prints every key")
    run = folder / "run"
    train(config, run)
    return run


def let_it_write(run: Path) -> str:
    """3. The folder has all that is needed: the weights, the tokenizer and the configuration."""
    trained = nsa.load_run(run)
    return "".join(piece.text for piece in nsa.generate_tokens(trained, ["one two "], max_tokens=31, temperature=0.0))


def main() -> None:
    torch.manual_seed(0)
    try_the_layer()
    with tempfile.TemporaryDirectory() as folder:
        run = train_a_model(Path(folder))
        print(f"\n3. after 'one two ' the model writes {let_it_write(run)!r}\n")
    print("Next: `make train`, then `nsa watch`, `nsa report` and `nsa generate` on runs/quickstart.")


if __name__ == "__main__":
    main()
