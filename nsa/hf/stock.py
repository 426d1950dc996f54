"""The text model of MiniMax-M3, which transformers, vLLM and SGLang have as a class of their own: conversion of a
decoder of `msa` and `dense` layers to its configuration and weights, and back.

transformers (`MiniMaxM3VLForCausalLM`) and the serving engines (`MiniMaxM3SparseForCausalLM`) differ in the shape of
config.json and in the names of some tensors. Norms are stored as weight - 1 in both.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from nsa.config.architecture import Architecture, MSAConfig
from nsa.ops.reference.feed_forward import ALPHA, LIMIT

# The names of a decoder's parameters in the files of transformers.
HF_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(.+)\.(weight|bias)")
OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
INSIDE = {  # of a layer
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.out",
}

Form = Literal["hf", "vllm"]
TYPE = "minimax_m3_vl_text"
ROPE_THETA = 5_000_000.0  # where config.json does not say it
SPARSE, DENSE = "minimax_m3_sparse", "full_attention"  # kinds of layers in `layer_types`
_INDEX = {"q_proj": "index_q", "k_proj": "index_k", "q_norm": "index_q_norm", "k_norm": "index_k_norm"}
_INDEX_PREFIX = {"hf": "self_attn.indexer.", "vllm": "self_attn.index_"}
_OWN_LAYER = re.compile(r"blocks\.([0-9]+)\.(.+)\.weight")
_GATE, _UP, _GATE_UP = "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"


def missing_settings(config: Architecture, form: Form = "hf") -> list[str]:
    """Returns the settings that the form requires and the model does not have."""
    model, msa = config.model, config.msa
    kinds = set(model.layer_kinds())
    has_index = "msa" in kinds
    required = {
        "msa and dense layers only (model.attention, model.layer_pattern)": kinds <= {"msa", "dense"},
        "model.qk_norm=true": model.qk_norm,
        "model.activation=swiglu_oai": model.activation == "swiglu_oai",
        "model.qkv_bias=false": not model.qkv_bias,
        "model.head_dim_v equal to model.head_dim_k": model.head_dim_v == model.head_dim_k,
        "msa.num_init=0": not has_index or msa.num_init == 0,
        "model.rotary_dim at most msa.index_dim": not has_index or _rotary_dim(config) <= _index_dim(config),
        "model.rope_scaling=null": form != "vllm" or model.rope_scaling is None,
    }
    return [setting for setting, holds in required.items() if not holds]


def unusual_sizes(config: Architecture) -> list[str]:
    """Returns the sizes for which the serving engines have no kernels: all heads and blocks have to be 128."""
    found = {"model.head_dim_k": config.model.head_dim_k}
    if "msa" in config.model.layer_kinds():
        found |= {"msa.index_dim": _index_dim(config), "msa.block": config.msa.block}
    return [f"{name}={size}" for name, size in found.items() if size != 128]


def stock_config(config: Architecture, form: Form, **fields: Any) -> dict[str, Any]:
    """Returns config.json; `fields` are those that the configuration of a run does not decide."""
    if "msa" not in config.model.layer_kinds():  # own_sections reads no section `msa` then
        config = config.model_copy(update={"msa": MSAConfig()})
    model, msa = config.model, config.msa
    is_sparse = [int(kind == "msa") for kind in model.layer_kinds()]
    fields |= {
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim_k,
        "intermediate_size": model.resolved_mlp_dim(),
        "dense_intermediate_size": model.resolved_mlp_dim(),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head and form == "hf",  # the class of vLLM never ties them
        "layer_types": [SPARSE if sparse else DENSE for sparse in is_sparse],
        "mlp_layer_types": ["dense"] * model.n_layers,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
        "index_n_heads": model.n_kv_heads,
        "index_head_dim": _index_dim(config),
        "index_block_size": msa.block,
        "index_topk_blocks": msa.num_selected,
        "index_local_blocks": msa.num_local,
        **_rope(config),
        # The rest is for programs that read the file with another class than that of transformers.
        "hidden_act": "swigluoai",
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "moe_layer_freq": [0] * model.n_layers,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "n_shared_experts": 0,
        "num_mtp_modules": 0,
        "router_aux_loss_coef": 0.0,  # otherwise TRL computes a loss of routers, and the model has none
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": model.n_kv_heads,
            "sparse_index_dim": _index_dim(config),
            "sparse_block_size": msa.block,
            "sparse_topk_blocks": msa.num_selected,
            "sparse_local_block": msa.num_local,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": is_sparse,
            "sparse_disable_index_value": is_sparse,
        },
    }
    if form == "hf":
        return {"architectures": ["MiniMaxM3VLForCausalLM"], "model_type": TYPE, **fields}
    # vLLM reads text_config, SGLang the fields outside.
    nested = {"text_config": {"model_type": "minimax_m3_text", **fields}}
    return {"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_vl", **fields, **nested}


def _index_dim(config: Architecture) -> int:
    return config.msa.index_dim or config.model.head_dim_k


def _rotary_dim(config: Architecture) -> int:
    return config.model.rotary_dim or config.model.head_dim_k


def _rope(config: Architecture) -> dict[str, Any]:
    model, rotary_dim = config.model, _rotary_dim(config)
    factor = rotary_dim / model.head_dim_k
    if int(model.head_dim_k * factor) != rotary_dim:  # as transformers computes it
        factor = math.nextafter(factor, 1.0)
    plain = {"rope_theta": model.rope_base, "partial_rotary_factor": factor}
    kind: dict[str, Any] = {"rope_type": "default"}
    if (scaling := model.rope_scaling) is not None:
        kind = {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_length is not None:
            kind |= {"rope_type": "llama3", "original_max_position_embeddings": scaling.original_length}
            kind |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {**plain, "rotary_dim": rotary_dim, "rope_parameters": {**plain, **kind}}


def own_sections(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections `model` and `msa` of the form for transformers, without the keys of `model` that a model of
    the Llama family has too. Raises KeyError and ValueError."""
    kinds, mlps = described["layer_types"], described["mlp_layer_types"]
    if not isinstance(kinds, list) or any(kind not in (SPARSE, DENSE) for kind in kinds):
        raise ValueError(f"layer_types must be a list of {SPARSE} and {DENSE}")
    if not isinstance(mlps, list) or any(kind != "dense" for kind in mlps):
        raise ValueError("mlp_layer_types has experts; only dense MLPs are supported")
    if not len(kinds) == len(mlps) == described["num_hidden_layers"]:
        raise ValueError("layer_types and mlp_layer_types must have num_hidden_layers entries")
    supported = {"index_n_heads": described["num_key_value_heads"], "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}
    for key, value in supported.items():
        if described[key] != value:
            raise ValueError(f"{key} must be {value!r}, got {described[key]!r}")
    pattern = ["msa" if kind == SPARSE else "dense" for kind in kinds]
    model = {"attention": pattern[0], "layer_pattern": pattern, "activation": "swiglu_oai", "qk_norm": True}
    if "msa" not in pattern:
        return {"model": model}
    keys = {
        "block": "index_block_size",
        "num_selected": "index_topk_blocks",
        "num_local": "index_local_blocks",
        "index_dim": "index_head_dim",
    }
    return {"model": model, "msa": {own: described[key] for own, key in keys.items()}}


def check_fields(described: dict[str, Any], config: Architecture) -> None:
    """Raises ValueError if a field that repeats others for some programs has another value."""
    repeated = stock_config(config, "hf")
    for key in ("sparse_attention_config", "moe_layer_freq"):
        if described.get(key, repeated[key]) != repeated[key]:
            raise ValueError(f"{key} does not agree with layer_types, mlp_layer_types and index_*; remove it")


def stock_tensors(weights: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Converts the parameters of a decoder."""
    inside = {own: part for part, own in (INSIDE | _inside(form)).items()}
    outside = {own: name for name, own in OUTSIDE.items()}
    found = {}
    for name, tensor in weights.items():
        layer = _OWN_LAYER.fullmatch(name)
        stored = outside[name] if layer is None else f"model.layers.{layer[1]}.{inside[layer[2]]}.weight"
        found[stored] = tensor - 1.0 if name.endswith("norm.weight") else tensor
    if form == "vllm":
        found.setdefault("lm_head.weight", weights["embedding.weight"].clone())
        return found
    for gate in [name for name in found if _GATE in name]:
        both = [found.pop(gate), found.pop(gate.replace(_GATE, _UP))]
        found[gate.replace(_GATE, _GATE_UP)] = torch.cat(both)
    return found


def own_tensors(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the parameters of a decoder that a tensor of the form for transformers contains."""
    layer = HF_LAYER.fullmatch(name)
    if layer is None:
        parts = [OUTSIDE.get(name, "")]
    elif layer[2] == _GATE_UP:
        parts = [f"blocks.{layer[1]}.mlp.{part}.{layer[3]}" for part in ("gate", "up")]
    else:
        parts = [f"blocks.{layer[1]}.{_inside('hf').get(layer[2])}.{layer[3]}"]
    if name.endswith("norm.weight"):
        tensor = tensor.float() + 1.0
    can_split = tensor.ndim > 0 and len(tensor) % len(parts) == 0
    return list(zip(parts, tensor.chunk(len(parts)) if can_split else [tensor], strict=False))


def _inside(form: Form) -> dict[str, str]:
    """Returns the names of a layer's parameters; in the form for transformers, gate and up are one."""
    index = {_INDEX_PREFIX[form] + part: f"attention.{own}" for part, own in _INDEX.items()}
    return index | {part: own for part, own in INSIDE.items() if form == "vllm" or part not in (_GATE, _UP)}
