"""The rows of the learning study: what sets them apart, and their results."""

import json
from pathlib import Path
from typing import Any

RATE, RECALL_RATE = 6e-4, 1e-3
# `dense` and `nsa` are the comparison; each of the others changes one thing, or adds norms to a pattern.
ROWS: dict[str, str] = {
    "dense": "model.attention=dense",
    "nsa": "",
    "msa": "model.attention=msa",
    "pattern-1-3": "model.layer_pattern=[dense,nsa,nsa,nsa]",
    "pattern-1-1": "model.layer_pattern=[nsa,dense]",
    "pattern-3-1": "model.layer_pattern=[nsa,nsa,nsa,dense]",
    "window": "model.layer_pattern=[window]",
    "nsa-mean-mlp": "nsa.phi=mean_mlp",
    "nsa-after-rotation": "nsa.compress=after_rotation",
    "dense-muon": "model.attention=dense train.optimizer=muon",
    "nsa-muon": "train.optimizer=muon",
    "msa-muon": "model.attention=msa train.optimizer=muon",
    "dense-wide-muon": "model.attention=dense model.mlp_dim=2256 train.optimizer=muon",  # parameters of nsa + 0.1 %
    "window-dense-muon": "model.layer_pattern=[window,window,window,dense] train.optimizer=muon",
    "msa-norm": "model.attention=msa model.qk_norm=true",
    "dense-norm": "model.attention=dense model.qk_norm=true",
    "nsa-norm": "model.qk_norm=true",
    "nsa-tensorwise": "runtime.float8=tensorwise",
    "nsa-rowwise": "runtime.float8=rowwise",
    "nsa-32": "nsa.num_selected=32",
    "nsa-mlp": "nsa.phi=mlp",
    "nsa-softmax": "nsa.gate=softmax",
    "nsa-block-16": "nsa.cmp_block=16 nsa.cmp_stride=8 nsa.sel_block=32 nsa.num_selected=32",
    "nsa-shared": "nsa.shared_kv=true",
    "nsa-shared-16": "nsa.shared_kv=true nsa.cmp_block=16 nsa.cmp_stride=8 nsa.sel_block=32 nsa.num_selected=32",
    "nsa-4-groups": "model.n_kv_heads=4",
    "dense-4-groups": "model.attention=dense model.n_kv_heads=4",
    "pattern-1-3-norm": "model.layer_pattern=[dense,nsa,nsa,nsa] model.qk_norm=true",
    "pattern-1-1-norm": "model.layer_pattern=[nsa,dense] model.qk_norm=true",
}


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    lr = result.get("lr", RECALL_RATE if "eval" in result else RATE)
    sizes = (result[name] for name in ("seq_len", "tokens", "seed"))
    return (
        result["row"],
        result.get("tokenizer", "bpe"),
        *sizes,
        lr,
        result.get("tasks", "pairs"),
        result.get("corpus"),
        further(result),
    )


def further(result: dict[str, Any]) -> str:
    return result["changes"].removeprefix(ROWS.get(result["row"], "")).strip()


def own_and_shared(result: dict[str, Any]) -> tuple[str, str]:
    """The further overrides that dense attention cannot have, and the others that may change what a model learns."""
    given = [o for o in further(result).split() if not o.startswith(("checkpoint.", "telemetry."))]
    own = [o for o in given if o.startswith(("nsa.", "msa."))]
    return " ".join(own), " ".join(o for o in given if o not in own)


def compared_with(result: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for the rows that can be compared with each other."""
    return (*key_of(result)[1:-1], own_and_shared(result)[1])
