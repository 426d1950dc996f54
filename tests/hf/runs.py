"""Run folders with random weights, as training would leave them."""

import torch
import yaml

from nsa import load_run
from nsa.checkpoint.export import weights_metadata, write_weights
from nsa.config import parse_config
from nsa.data.tokenizers import GPT2Tokenizer, load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.nn.model import build_model

TEXT = "def main():\n    return [x * 2 for x in range(10)]  # the end\n" * 4
SPEC = {"cmp_block": 8, "cmp_stride": 4, "sel_block": 16, "num_selected": 4, "window": 24}
SIZES = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim_k": 16,
    "head_dim_v": 32,
    "mlp_dim": 64,
}
VARIANTS = {
    "mean": {},
    "mlp": {"nsa": {"phi": "mlp"}, "model": {"rope_scaling": {"factor": 2.0}}},
    "shared": {"nsa": {"shared_kv": True}, "model": {"tied_head": True}},
    "pattern": {
        "model": {"layer_pattern": ["nsa", "dense"], "qk_norm": True, "n_layers": 3, "activation": "swiglu_oai"}
    },
    "window": {"model": {"layer_pattern": ["window", "nsa"], "qkv_bias": True, "rotary_dim": 12}},
}


def save_run(folder, config, weights):
    folder.mkdir(exist_ok=True)
    write_weights(folder / "model.safetensors", weights, **weights_metadata(7, config.to_dict()))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    return load_run(folder)


def make_run(folder, variant):
    content = {
        "model": SIZES | VARIANTS[variant].get("model", {}),
        "nsa": SPEC | VARIANTS[variant].get("nsa", {}),
        "train": {"seq_len": 256},
    }
    config = parse_config(content, "test")
    model = build_model(config, 256, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or ".gate.out." in name:
                p.add_(torch.randn_like(p) * 0.3)
    return save_run(folder, config, {name: p.detach() for name, p in model.named_parameters()})


def tokenizer_named(name, folder):
    """gpt2 is a small stand-in: byte-level BPE with its split pattern and its order of merges."""
    if name == "bytes":
        return load_tokenizer("bytes")
    file = folder / "tokenizer.json"
    train_bpe([TEXT, "naïve ß 日本語"], file, vocab_size=320, max_bytes=1 << 20)
    if name == "json":
        return load_tokenizer(str(file))
    ranks = {bytes([i]): i for i in range(256)}
    for merged in (b"re", b" t", b"ur", b"retur", b"return", b" the", b"in", b"ma", b"main", b"de", b"def", b"  "):
        parts = [merged[i : i + 1] for i in range(len(merged))]
        while len(parts) > 2:  # every token is made of two that come before it
            parts[:2] = [parts[0] + parts[1]]
            ranks.setdefault(parts[0], len(ranks))
        ranks.setdefault(merged, len(ranks))
    return GPT2Tokenizer(ranks)
