"""Imports a Hugging Face model of the Llama family as a run folder, with dense attention or converted to NSA or MSA.

No code in the folder is executed: weights are safetensors, and a model with its own code is refused. Options that this
project's decoder does not support are errors, so that an imported model computes the same function.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nsa.checkpoint.export import start_from_dense, weights_metadata, write_weights
from nsa.checkpoint.format import write_atomically
from nsa.checkpoint.storage import open_safetensors
from nsa.config import Config, load_config, parse_config
from nsa.config.architecture import Architecture
from nsa.data.chat import CHAT_TEMPLATE_FILE, template_beside
from nsa.data.tokenizers import BUILT_IN, TOKENIZER_FILE, ByteTokenizer, load_tokenizer
from nsa.errors import CheckpointError, ConfigError, reworded
from nsa.hf import stock
from nsa.nn.attention import attention_layers
from nsa.nn.model import build_model
from nsa.run_folder import WEIGHTS_FILE, read_json
from nsa.train.folder import write_config

HF_CONFIG = "config.json"
OWN_TYPE = "nsa"  # the model_type in exports of `nsa export`
HF_TOKENIZER_CONFIG, HF_GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
HF_WEIGHTS, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
_OWN = "decoder."  # prefix of all names in exports of `nsa export`


def import_model(
    source: Path,
    run: Path,
    *,
    attention: Literal["nsa", "msa"] | None = None,
    shared_kv: bool = True,
    base: str | Path | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """Writes config.yaml, model.safetensors, tokenizer.json and its chat template into `run`, a new or empty folder.

    attention   None keeps the attention layers; "nsa" or "msa" converts every layer, or those in an override of
                model.layer_pattern: queries, keys, values and output keep their weights. NSA starts close to the dense
                model, with gates for the selected branch (88 %) and the window (12 %). MSA equals it up to
                msa.num_selected * msa.block tokens; its index is new and needs training
    shared_kv   whether the branches of a layer that is converted to NSA share keys and values, or each has a copy
    base        configuration for the other sections of the run; None means the defaults
    """
    check_new_folder(run)
    overrides = list(overrides)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key == "model.attention" or (key == "model.layer_pattern" and attention is None):
            raise ConfigError(f"override '{override}': layers keep their kind; --attention nsa or msa converts them")
    described = _read_json(source / HF_CONFIG)
    is_own, is_stock = (described.get("model_type") == kind for kind in (OWN_TYPE, stock.TYPE))
    content = load_config(base).to_dict() if base is not None else {"data": {}}
    wanted: dict[str, Any] = {name: content[name] for name in ("nsa", "msa") if name in content}
    origin = str(source / HF_CONFIG)
    if is_own:
        content |= _own_sections(described, origin)
    elif is_stock:
        content |= _stock_sections(described, origin)
    else:
        content["model"] = model_section(described, origin) | {"attention": "dense"}
    saved = parse_config({"model": content["model"]}, origin).model
    found = dict.fromkeys(saved.layer_kinds())
    is_dense = found.keys() <= {"dense", "window"}
    if attention is not None:
        if not is_dense:
            raise ConfigError(f"{source}: has {', '.join(found)} layers already; leave --attention out")
        content["model"] |= {"layer_pattern": None}
        content |= wanted  # without a base, window layers of an export of this project keep their window
        if attention == "nsa":
            content["nsa"] = content.get("nsa", {}) | {"shared_kv": shared_kv}
    context = described.get("max_position_embeddings")
    if base is None and type(context) is int:
        content["train"] = {"seq_len": context}  # an export writes it as max_position_embeddings again
    keys, kept = _tokenizer(source, content["model"]["vocab_size"], described)
    template = template_beside(source)
    if template is not None and kept is None:  # otherwise it is found beside the tokenizer
        keys["chat_template"] = str((run / CHAT_TEMPLATE_FILE).resolve())
    content["data"] |= {"tokenizer": str((run / TOKENIZER_FILE).resolve())} | keys
    # As an override, the kind resets settings of the base for one that no layer has.
    kinds = f"model.attention={attention or saved.attention}"
    if content["model"].get("layer_pattern"):
        kinds = f"model.layer_pattern=[{','.join(saved.layer_pattern or ())}]"
    config = parse_config(content, str(source), [kinds, *overrides])
    if attention is not None and attention not in config.model.layer_kinds():
        raise ConfigError(f"--attention {attention}: model.layer_pattern has no such layer; name one in it")
    described_model = {} if attention is None else {"attention": "dense", "layer_pattern": None}
    dense_or_same = config.model_copy(update={"model": config.model.model_copy(update=described_model)})
    weights = read_weights(source, dense_or_same, is_own=is_own, is_stock=is_stock)
    if attention is not None:
        _convert(weights, config)
    _write_run(run, config, weights, kept, template)
    return config


def _write_run(
    run: Path, config: Config, weights: dict[str, Tensor], tokenizer: bytes | None, template: str | None
) -> None:
    with reworded(CheckpointError, f"{run}: cannot be written"):
        run.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            write_atomically(run / TOKENIZER_FILE, tokenizer)
        if template is not None:
            write_atomically(run / CHAT_TEMPLATE_FILE, template.encode())
        write_weights(run / WEIGHTS_FILE, weights, **weights_metadata(0, config.to_dict()))
        write_config(run, config)


def check_new_folder(folder: Path) -> None:
    """Raises ConfigError unless the folder does not exist or is empty."""
    with reworded(ConfigError, f"{folder}: cannot be used", "give another folder"):
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new:
        raise ConfigError(f"{folder}: exists already and is not an empty folder; give a new one")


def model_section(described: dict[str, Any], origin: str) -> dict[str, Any]:
    """Converts a Hugging Face configuration of the Llama family to the `model` section."""
    family = described.get("model_type")

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{origin}: {what}")

    if described.get("auto_map"):
        raise refuse("the model brings its own code (auto_map), which is never executed here")
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        supported = f"llama, mistral, qwen2, qwen3 and {stock.TYPE}"
        raise refuse(f"model_type {family!r} is not supported; there are {supported}")
    if described.get("quantization_config"):
        raise refuse("the weights are quantized (quantization_config); import the original")
    if described.get("hidden_act", "silu") != "silu":
        raise refuse(f"hidden_act {described['hidden_act']!r} is not supported; the MLP here is SwiGLU (silu)")
    for key in ("mlp_bias", "attention_bias"):
        if described.get(key):
            raise refuse(f"{key} is not supported")
    if _slides(described):
        raise refuse("sliding_window is not supported; layers here attend to the whole past")
    try:
        heads, width = int(described["num_attention_heads"]), int(described["hidden_size"])
        head_dim = int(described.get("head_dim") or width // heads)
        section = {
            "dim": width,
            "n_layers": int(described["num_hidden_layers"]),
            "n_heads": heads,
            "n_kv_heads": int(described.get("num_key_value_heads") or heads),
            "head_dim_k": head_dim,
            "head_dim_v": head_dim,
            "mlp_dim": int(described["intermediate_size"]),
            "vocab_size": int(described["vocab_size"]),
            "norm_eps": float(described.get("rms_norm_eps", 1e-6)),
            "tied_head": bool(described.get("tie_word_embeddings", False)),
            "qk_norm": family == "qwen3",
            "qkv_bias": family == "qwen2",
        }
    except KeyError as error:
        raise refuse(f"has no {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise refuse(f"cannot be read: {error}") from None
    return section | _rotary(described, head_dim, refuse)


def _own_sections(described: dict[str, Any], origin: str) -> dict[str, Any]:
    """Returns the sections that `nsa export` wrote; an older version wrote fewer."""
    sections = {name: described[name] for name in Architecture.model_fields if isinstance(described.get(name), dict)}
    if not {"model", "nsa"} <= sections.keys():
        raise CheckpointError(f"{origin}: has no sections model and nsa")
    vocab_size = described.get("vocab_size")
    if type(vocab_size) is not int:
        raise CheckpointError(f"{origin}: has no vocab_size")
    return sections | {"model": {**sections["model"], "vocab_size": vocab_size}}


def _stock_sections(described: dict[str, Any], origin: str) -> dict[str, Any]:
    """Returns the sections `model` and `msa` of the text model of MiniMax-M3."""
    try:
        sections = stock.own_sections(described)
        alike = {"model_type": "qwen3", "hidden_act": "silu", "layer_types": None, "use_sliding_window": False}
        alike |= {"intermediate_size": described["dense_intermediate_size"], "head_dim": described["head_dim"]}
        model = model_section({"rope_theta": stock.ROPE_THETA, **described, **alike}, origin)
        sections["model"] = model | sections["model"]
        stock.check_fields(described, parse_config(sections, origin))
    except KeyError as error:
        raise CheckpointError(f"{origin}: has no {error}") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{origin}: {error}") from None
    return sections


def _slides(described: dict[str, Any]) -> bool:
    """Whether any layer has a sliding window. In Qwen files use_sliding_window may disable it, and a Mistral file
    without the key has a window of 4,096 tokens."""
    types = described.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        return True
    family = described.get("model_type")
    if family in ("qwen2", "qwen3"):
        return bool(described.get("use_sliding_window"))
    return described.get("sliding_window", 4096 if family == "mistral" else None) is not None


def _rotary(described: dict[str, Any], head_dim: int, refuse: Any) -> dict[str, Any]:
    """Returns rope_base, rope_scaling and rotary_dim, from `rope_parameters` or from the keys of older files. In a file
    with both, transformers reads `rope_scaling` alone."""
    rope = described.get("rope_scaling") or described.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise refuse(f"rope_scaling must be a mapping, got {rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        found: dict[str, Any] = {"rope_base": float(rope.get("rope_theta") or described.get("rope_theta") or 10_000.0)}
        factor = rope.get("partial_rotary_factor", described.get("partial_rotary_factor"))
        if factor is not None and float(factor) != 1.0:
            found["rotary_dim"] = int(head_dim * float(factor))
        if kind == "linear":
            found["rope_scaling"] = {"factor": float(rope["factor"])}
        elif kind == "llama3":
            found["rope_scaling"] = {
                "factor": float(rope["factor"]),
                "original_length": int(rope["original_max_position_embeddings"]),
                "low_freq_factor": float(rope["low_freq_factor"]),
                "high_freq_factor": float(rope["high_freq_factor"]),
            }
        elif kind != "default":
            raise refuse(f"rope_type {kind!r} is not supported; there are default, linear and llama3")
    except KeyError as error:
        raise refuse(f"rope_scaling of type {kind} has no {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise refuse(f"rope_scaling cannot be read: {error}") from None
    return found


def read_weights(source: Path, config: Config, *, is_own: bool, is_stock: bool) -> dict[str, Tensor]:
    """Returns every parameter of the decoder that `config` describes, from a folder whose tensors have the names of
    `nsa export` (`is_own`), of MiniMax-M3 (`is_stock`) or of Llama."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    with torch.device("meta"):
        model = build_model(config, vocab_size, 0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if config.model.tied_head:
        shapes["head.weight"] = shapes["embedding.weight"]  # some files contain it too
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}  # where each tensor was found
    for file, name, tensor in _read_tensors(source):
        if name.endswith("rotary_emb.inv_freq"):  # a table that old versions of transformers saved
            continue
        if not tensor.is_floating_point():
            raise CheckpointError(f"{source}: {name} has dtype {tensor.dtype}, which is not a floating-point type")
        for target, part in stock.own_tensors(name, tensor) if is_stock else [(_target(name, is_own=is_own), tensor)]:
            if target not in shapes:
                raise CheckpointError(f"{source}: {name} has no place in the model of {HF_CONFIG}; remove the tensor")
            if shapes[target] != part.shape:
                wanted = f"{list(shapes[target])} by {HF_CONFIG}"
                raise CheckpointError(f"{source}: {name}: {target} is {list(part.shape)} in its file and {wanted}")
            if target in found:
                raise CheckpointError(
                    f"{source}: has two tensors for {target}: {origins[target]} and {name} in {file}; remove one"
                )
            found[target], origins[target] = part, f"{name} in {file}"
    if config.model.tied_head:
        shapes.pop("head.weight")
        head = found.pop("head.weight", None)
        if head is not None and not torch.equal(head, found.get("embedding.weight", head)):
            raise CheckpointError(f"{source}: tie_word_embeddings is true, but the head differs from the embedding")
    if missing := sorted(set(shapes) - set(found)):
        raise CheckpointError(f"{source}: the weights do not match {HF_CONFIG}: no tensor for {missing[:3]}")
    return found


def _convert(weights: dict[str, Tensor], config: Config) -> None:
    """Replaces the parameters of dense layers by those of the layers of `config`."""
    slim = config.model.model_copy(update={"vocab_size": None, "mlp_dim": 1, "tied_head": True})
    fresh = build_model(config.model_copy(update={"model": slim}), 1, config.train.seed)
    start_from_dense(weights, dict(attention_layers(fresh)))


def _target(name: str, *, is_own: bool) -> str:
    """Returns the parameter of a decoder with dense layers, or of an own export, that a tensor of the folder fills."""
    if is_own:
        return name.removeprefix(_OWN) if name.startswith(_OWN) else ""
    if match := stock.HF_LAYER.fullmatch(name):
        return f"blocks.{match[1]}.{stock.INSIDE.get(match[2])}.{match[3]}"
    return stock.OUTSIDE.get(name, "")


def _read_tensors(source: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the name of a file, the name of a tensor in it, and the tensor."""
    for path in _weight_files(source):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield path.name, name, file.get_tensor(name)


def _weight_files(source: Path) -> list[Path]:
    with reworded(CheckpointError, f"{source}: cannot be listed"):
        present = {path.name for path in source.iterdir()}
    if HF_WEIGHTS in present:
        return [source / HF_WEIGHTS]
    if HF_INDEX not in present:
        pickles = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth")))
        why = f"; {pickles[0]} is a pickle, which can execute code and is not loaded" if pickles else ""
        raise CheckpointError(f"{source}: has neither {HF_WEIGHTS} nor {HF_INDEX}{why}")
    files = _read_json(source / HF_INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{source / HF_INDEX}: has no weight_map")
    names = sorted(set(map(str, files.values())))
    for name in names:
        if name not in present:
            raise CheckpointError(f"{source / HF_INDEX}: the folder has no shard {name[:200]!r}; download it")
    return [source / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path.resolve())  # the hub's cache consists of links
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _tokenizer(source: Path, vocab_size: int, described: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """Returns keys of the `data` section, and the bytes of the tokenizer file. Without a file, a vocabulary of 256
    means the tokenizer `bytes`. The file of a built-in tokenizer matters only if tokens were added to its own one."""
    file, name = source / TOKENIZER_FILE, ByteTokenizer.name if vocab_size == ByteTokenizer.vocab_size else None
    added = _read_json(file).get("added_tokens") if file.is_file() else None
    is_built_in = described.get("model_type") == OWN_TYPE and described.get("tokenizer") in BUILT_IN
    if is_built_in and not (isinstance(added, list) and len(added) > 1):
        name = described["tokenizer"]
    elif file.is_file():
        separator, end_tokens = _special_tokens(source, described)
        tokenizer = load_tokenizer(str(file), separator=separator, end_tokens=end_tokens)
        if tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"{file}: has {tokenizer.vocab_size} tokens, the model {vocab_size}; they do not belong together"
            )
        return {"separator": separator, "end_tokens": end_tokens}, file.read_bytes()
    if name is None:
        raise CheckpointError(
            f"{source}: has no {TOKENIZER_FILE}; transformers writes one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return {"tokenizer": name, "separator": None, "end_tokens": []}, None


def _special_tokens(source: Path, described: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Returns the separator, which is the bos token or else an eos token, and the other tokens that end generation."""
    about, generation = (
        _read_json(source / name) if (source / name).is_file() else {}
        for name in (HF_TOKENIZER_CONFIG, HF_GENERATION_CONFIG)
    )
    added = _read_json(source / TOKENIZER_FILE).get("added_tokens")
    listed = [token for token in (added if isinstance(added, list) else []) if isinstance(token, dict)]
    names = {token["id"]: token.get("content") for token in listed if type(token.get("id")) is int}

    def named(key: str) -> Any:
        token = about.get(key)
        return token.get("content") if isinstance(token, dict) else token

    eos_ids = generation.get("eos_token_id", described.get("eos_token_id"))
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    ends = [names[i] for i in eos_ids if type(i) is int and i in names] or [named("eos_token")]
    starts = [named("bos_token"), *(name for i, name in names.items() if i == described.get("bos_token_id")), *ends]
    separator = next((token for token in starts if isinstance(token, str) and token), None)
    return separator, [token for token in ends if isinstance(token, str) and token not in ("", separator)]
