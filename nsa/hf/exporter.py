"""Writes the model of a run as a folder that transformers can load."""

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from nsa import __version__
from nsa.checkpoint.export import read_metadata
from nsa.checkpoint.restore import read_step
from nsa.config.schema import Architecture
from nsa.data.tokenizers import BUILT_IN
from nsa.errors import CheckpointError
from nsa.hf.importer import check_new_folder
from nsa.hf.modeling import CODE_FILE, NSAForCausalLM, NSALMConfig
from nsa.hf.tokenizer import fast_tokenizer
from nsa.installation import how_to_install, repository
from nsa.run_folder import METRICS_FILE, read_json
from nsa.train.trained import TrainedRun

LARGEST_SHARD = "5GB"


def export_model(run: TrainedRun, folder: Path, package: str | None = None) -> None:
    """Writes config.json, safetensors (large ones in shards), tokenizer, generation_config.json and a model card.

    `folder` must be new or empty and is created atomically. `package` is the address of this package for pip, for the
    model card; None means the repository in its metadata, if there is one.
    """
    folder = folder.absolute()
    check_new_folder(folder)
    separator, ends = run.tokenizer.separator, list(run.tokenizer.ends)
    eos = ends[0] if len(ends) == 1 else ends
    special: Any = {"bos_token_id": separator, "eos_token_id": eos, "pad_token_id": separator}
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
        **special,
    )
    with torch.device("meta"):
        model = NSAForCausalLM(config)
    model.decoder = run.model
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        aside.mkdir(parents=True)
        model.save_pretrained(aside, max_shard_size=LARGEST_SHARD)
        fast_tokenizer(run.tokenizer, run.config.train.seq_len).save_pretrained(aside)
        GenerationConfig(do_sample=True, temperature=0.8, top_p=0.95, **special).save_pretrained(aside)
        (aside / "README.md").write_text(model_card(run, folder.name, package))
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def model_card(run: TrainedRun, name: str, package: str | None = None) -> str:
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
    attention = config.model_dump(mode="json", include=set(Architecture.model_fields) - {"model"})
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [nsa, native-sparse-attention]
---

# {name}

A language model with Native Sparse Attention (arXiv 2502.11089), trained with nsa {__version__}.

| | |
|---|---|
{table}

It needs the package nsa with its extra hf: {how_to_install("hf", package)}.

```python
import nsa.hf  # or trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))
```

The configuration of attention: `{json.dumps(attention)}`.
"""


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
