"""Writes the model of a run as a folder that transformers can load."""

import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from transformers import GenerationConfig

from nsa import __version__
from nsa.checkpoint.export import read_metadata
from nsa.checkpoint.restore import read_step
from nsa.config.architecture import Architecture
from nsa.data.tokenizers import BUILT_IN
from nsa.errors import CheckpointError, ConfigError
from nsa.hf import stock
from nsa.hf.importer import HF_CONFIG, check_new_folder
from nsa.hf.modeling import CODE_FILE, NSAForCausalLM, NSALMConfig
from nsa.hf.tokenizer import fast_tokenizer
from nsa.installation import how_to_install, repository
from nsa.run_folder import METRICS_FILE, read_json
from nsa.train.trained import TrainedRun

LARGEST_SHARD = "5GB"
Form = stock.Form | Literal["nsa"]
PAPERS = {"nsa": "Native Sparse Attention (arXiv 2502.11089)", "msa": "MiniMax Sparse Attention (arXiv 2606.13392)"}


def export_model(run: TrainedRun, folder: Path, package: str | None = None, form: Form = "hf") -> list[str]:
    """Writes config.json, safetensors (large ones in shards), tokenizer, generation_config.json and a model card.

    A model that `nsa.hf.stock` can express is written as MiniMax-M3, which transformers loads without this package.
    Returns notes for the user: whether that is so, or else which settings prevent it, and warnings.

    folder    must be new or empty; a new one is created atomically, and an empty one gets config.json last
    package   address of this package for pip, for the model card; None means the repository in its metadata, if any
    form      hf: for transformers; vllm: for vLLM and SGLang, ConfigError if the model cannot be written as MiniMax-M3;
              nsa: with the code of this package in any case, so that transformers trains the index of MSA
    """
    folder = folder.absolute()
    check_new_folder(folder)
    stock_form = None if form == "nsa" else form
    missing = stock.missing_settings(run.config, stock_form) if stock_form else []
    if missing and form == "vllm":
        raise ConfigError(f"{run.weights}: vLLM has no class for this model; it needs {'; '.join(missing)}")
    stock_form = None if missing else stock_form
    is_there = folder.exists()  # it may be a mount point, or the working directory of a shell
    aside = (folder if is_there else folder.parent) / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        aside.mkdir(parents=True)
        tokenizer = fast_tokenizer(run.tokenizer, run.config.train.seq_len, run.chat_template)
        if stock_form is None:
            as_transformers_model(run, package).save_pretrained(aside, max_shard_size=LARGEST_SHARD)
        else:
            _save_stock(run, aside, stock_form)
            tokenizer.padding_side = "right"  # blocks of MiniMax-M3 in transformers count from the first column
        tokenizer.save_pretrained(aside)
        GenerationConfig(do_sample=True, temperature=0.8, top_p=0.95, **_special_tokens(run)).save_pretrained(aside)
        (aside / "README.md").write_text(model_card(run, folder.name, package, stock_form), encoding="utf-8")
        if is_there:
            for path in sorted(aside.iterdir(), key=lambda path: path.name == HF_CONFIG):
                path.rename(folder / path.name)
        else:
            aside.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _notes(run, missing, stock_form)


def _notes(run: TrainedRun, missing: list[str], form: stock.Form | None) -> list[str]:
    if form is None:
        needed = f"; the form that needs neither requires {'; '.join(missing)}" if missing else ""
        return [f"for transformers with trust_remote_code=True, faster with the package nsa{needed}"]
    notes = ["for transformers 5.12 and later, without the package nsa" if form == "hf" else "for vLLM and SGLang"]
    return [*notes, *(f"warning: {text}" for text in _limits(run))]


def _limits(run: TrainedRun) -> list[str]:
    sizes = stock.unusual_sizes(run.config)
    text = f"kernels of vLLM and SGLang need heads and blocks of 128; this model has {', '.join(sizes)}"
    return [text] if sizes else []


def as_transformers_model(run: TrainedRun, package: str | None = None) -> NSAForCausalLM:
    """Returns the class for transformers around the model of the run, which is not copied."""
    config = NSALMConfig(
        run.model.vocab_size,
        run.config.train.seq_len,
        **run.config.model_dump(mode="json", include=set(Architecture.model_fields)),
        package=package or repository(),
        tokenizer=run.tokenizer.name if run.tokenizer.name in BUILT_IN else None,
        architectures=[NSAForCausalLM.__name__],
        auto_map={
            "AutoConfig": f"{Path(CODE_FILE).stem}.{NSALMConfig.__name__}",
            "AutoModelForCausalLM": f"{Path(CODE_FILE).stem}.{NSAForCausalLM.__name__}",
        },
        **_special_tokens(run),
    )
    with torch.device("meta"):
        model = NSAForCausalLM(config)
    model.decoder = run.model
    return model


def _special_tokens(run: TrainedRun) -> dict[str, Any]:
    separator, ends = run.tokenizer.separator, list(run.tokenizer.ends)
    return {"bos_token_id": separator, "eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": separator}


def _save_stock(run: TrainedRun, folder: Path, form: stock.Form) -> None:
    weights = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    fields = _special_tokens(run)
    fields |= {"vocab_size": run.model.vocab_size, "max_position_embeddings": run.config.train.seq_len}
    del fields["pad_token_id"]  # transformers would not train its embedding, and it is the separator
    fields["dtype"] = str(weights["norm.weight"].dtype).removeprefix("torch.")
    (folder / HF_CONFIG).write_text(json.dumps(stock.stock_config(run.config, form, **fields), indent=2) + "\n")
    save_torch_state_dict(stock.stock_tensors(weights, form), folder, max_shard_size=LARGEST_SHARD)


def model_card(run: TrainedRun, name: str, package: str | None = None, form: stock.Form | None = None) -> str:
    """`form` is the form of MiniMax-M3 that the folder has, None for the classes of this package."""
    config, model = run.config, run.config.model
    kinds = model.layer_kinds()
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rows = {
        "parameters": f"{run.model.num_parameters():,}",
        "layers": f"{layers}, width {model.dim}",
        "query and key/value heads": f"{model.n_heads} and {model.n_kv_heads}",
        "sizes of keys and values": f"{model.head_dim_k} and {model.head_dim_v}",
        "vocabulary": f"{run.model.vocab_size:,} ({Path(config.data.tokenizer).name})",
        "context in training": f"{config.train.seq_len:,} tokens",
        **_numbers(run),
    }
    attention = config.model_dump(mode="json", include={"nsa" if kind == "window" else kind for kind in kinds})
    papers = " and ".join(paper for kind, paper in PAPERS.items() if kind in kinds) or "dense attention"
    tags = ["nsa", "native-sparse-attention"] if "nsa" in kinds else ["msa"] if "msa" in kinds else []
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: {"vllm" if form == "vllm" else "transformers"}
pipeline_tag: text-generation
tags: [{", ".join(tags)}]
---

# {name}

A language model with {papers}, trained with nsa {__version__}.

| | |
|---|---|
{table}

{_usage(run, name, package, form)}

The configuration of attention: `{json.dumps(attention)}`.
"""


def _usage(run: TrainedRun, name: str, package: str | None, form: stock.Form | None) -> str:
    stock_form = "It has the form of MiniMax-M3's text model and needs no code of its own"
    if form == "vllm":
        warnings = [f"**Warning:** {text}." for text in _limits(run)]
        command = f"```sh\nvllm serve {name} --dtype bfloat16\n```"
        return "\n\n".join([f"{stock_form}, for vLLM and SGLang.", *warnings, command])
    if form == "hf":
        needs, trust = f"{stock_form} (transformers 5.12 or later).", ""
    else:
        needs = (
            f"transformers 5 loads it with the code in `{CODE_FILE}`, which is plain PyTorch for inference. Where the "
            f"package nsa with its extra hf is installed, the code uses the package, which is faster and trains the "
            f"model: {how_to_install('hf', package)}."
        )
        trust = ", trust_remote_code=True"
    return f"""{needs}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))
```"""


def _numbers(run: TrainedRun) -> dict[str, str]:
    """Returns the training step, tokens and validation loss of the weights, as far as the run folder has them."""
    weights = run.weights
    step = read_step(weights) if weights.is_dir() else read_metadata(weights).get("step")
    found = {"training step": f"{step:,}"} if isinstance(step, int) and step > 0 else {}
    try:
        metrics: dict[str, Any] = read_json(weights.parent / METRICS_FILE) if weights.is_file() else {}
    except (OSError, ValueError):
        metrics = {}
    if isinstance(tokens := metrics.get("tokens"), int):
        found["training tokens"] = f"{tokens:,}"
    if isinstance(loss := metrics.get("val_loss"), float):
        found["validation loss"] = f"{loss:.4f} nats per token"
    if isinstance(bits := metrics.get("val_bits_per_byte"), float):
        found["validation bits per byte"] = f"{bits:.4f}"
    return found
