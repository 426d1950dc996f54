"""Loads a trained model with its tokenizer and its configuration."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.checkpoint.export import find_checkpoint, find_weights, load_weights, read_metadata
from nsa.checkpoint.format import BEST, FOLDER, LATEST, committed, read_pointer
from nsa.checkpoint.restore import read_state
from nsa.config import Config, load_config, parse_config
from nsa.config.schema import KernelsConfig
from nsa.data.chat import CHAT_TEMPLATE_FILE, ChatTokenizer, chat_template_of
from nsa.data.tokenizers import BUILT_IN, TOKENIZER_FILE, Tokenizer, load_tokenizer, tokenizer_for
from nsa.errors import CheckpointError, ConfigError, NSAError
from nsa.files import LARGEST_DOCUMENT, expand_home
from nsa.nn.model import Decoder, build_model
from nsa.parallel.numerics import compute_precision
from nsa.parallel.transform import divide_sequences
from nsa.parallel.world import pick_device
from nsa.run_folder import CONFIG_FILE, WEIGHTS_FILE, reading_run, run_of
from nsa.train.state import AUTOCAST_TYPES, RunState, chosen_kernels, vocabulary


@dataclass(frozen=True)
class TrainedRun:
    """`model` is on its device and in eval mode; `weights` is the file or the checkpoint that it was loaded from."""

    model: Decoder
    tokenizer: Tokenizer
    config: Config
    weights: Path

    @property
    def chat_template(self) -> str | None:
        return chat_template_of(self.config.data)

    def chat_tokenizer(self) -> ChatTokenizer:
        """Encodes conversations with the chat template of the run."""
        template = self.chat_template
        if template is None:
            raise ConfigError(f"data.chat_template: {self.weights} has no chat template; set it to a Jinja file")
        return ChatTokenizer(self.tokenizer, template)


def load_run(
    path: str | Path,
    *,
    checkpoint: str | None = None,
    overrides: Iterable[str] = (),
    device: torch.device | str | None = None,
) -> TrainedRun:
    """Loads a trained run: `model` (in eval mode), `tokenizer`, `config`, and `weights`, the path of the weights.

    path         a run folder (its model.safetensors, or the newest sound checkpoint of a run that has not finished, or
                 was resumed since), one checkpoint (its folder, checkpoints/latest or checkpoints/best), or a
                 .safetensors file that a run or `nsa ckpt export` wrote
    checkpoint   a checkpoint of the run folder instead: its name, for example step_00000500, or "latest" or "best"
    overrides    `section.key=value`, as on the command line, for example runtime.device=cpu
    device       the device of the model, for example "cuda:1"; None uses runtime.device

    Without a GPU, a run that was trained on one is loaded onto the CPU, with a warning, unless an override requests the
    GPU. Needs the packages of the extra `train`.
    """
    path, overrides = Path(path), list(overrides)
    weights = find_weights(path) if checkpoint is None else _named_checkpoint(path, checkpoint)
    config = _without_missing_gpu(_saved_config(path, weights, overrides), overrides)
    config = _with_saved_template(config, weights, overrides)
    tokenizer = _saved_tokenizer(config, weights, overrides)
    size = vocabulary(config, tokenizer)
    model = build_model(config, size, config.train.seed, chosen_kernels(config))
    load_weights(model, weights)
    return TrainedRun(model.to(device or pick_device(config.runtime.device)).eval(), tokenizer, config, weights)


def load_teacher(state: RunState) -> Decoder | None:
    """The model of `train.teacher`, on the device of the run."""
    config = state.config
    if config.train.teacher is None:
        return None
    try:
        wanted = [f"runtime.device={state.device.type}"]
        run = load_run(expand_home(config.train.teacher), overrides=wanted, device=state.device)
    except NSAError as error:
        raise type(error)(f"train.teacher: {error}") from None
    if not run.tokenizer.encodes_like(state.tokenizer) or run.model.vocab_size != state.model.vocab_size:
        raise ConfigError(
            f"train.teacher: {config.train.teacher} has another vocabulary ({run.config.data.tokenizer!r}, "
            f"{run.model.vocab_size} tokens) than this run ({config.data.tokenizer!r}, {state.model.vocab_size})"
        )
    if state.world.context is not None:
        divide_sequences(run.model, state.world.context)
    return run.model.requires_grad_(False)


def in_compute_type(run: TrainedRun) -> TrainedRun:
    """Converts the model in place to the dtype in which it computes on a GPU, so that a step reads half the bytes."""
    device = run.model.head.weight.device
    dtype = AUTOCAST_TYPES.get(compute_precision(run.config.runtime.precision, device))
    if device.type == "cuda" and dtype is not None:
        run.model.to(dtype)
    return run


def _named_checkpoint(path: Path, name: str) -> Path:
    root = path / FOLDER
    with reading_run(path):
        path.stat()
    if name == LATEST:
        return find_checkpoint(root)
    names = [found.name for found in committed(root)]
    wanted = read_pointer(root, BEST) if name == BEST else name
    if wanted not in names:
        raise CheckpointError(f"{path}: has no checkpoint {name!r}; it has {', '.join(names) or 'none'}")
    return find_checkpoint(root / wanted)


def _saved_config(path: Path, weights: Path, overrides: list[str]) -> Config:
    """The configuration in config.yaml of a run folder, or in a checkpoint or a file of weights."""
    run = path.parent if path.name == WEIGHTS_FILE else path  # the metadata of the file lack data and lengths
    if (run / CONFIG_FILE).is_file():
        return load_config(run / CONFIG_FILE, overrides, in_run=True)
    if not weights.exists():
        raise CheckpointError(f"{path}: not a run folder (no {CONFIG_FILE} in it); give the out_dir of a run")
    saved: Any = (read_state(weights) if weights.is_dir() else read_metadata(weights)).get("config")
    if saved is None:
        hint = "give the folder of the run that wrote it, or `nsa import` the folder of a Hugging Face model"
        raise CheckpointError(f"{weights}: carries no configuration; {hint}")
    return parse_config(saved, str(weights), overrides)


def _without_missing_gpu(config: Config, overrides: list[str]) -> Config:
    """Without a GPU, resets settings that need one, unless an override sets them."""
    if torch.cuda.is_available() and config.runtime.device != "cpu":
        return config
    device, kernels = config.runtime.device, config.runtime.kernels.model_dump()
    if device == "cuda" and not _is_overridden("runtime.device", overrides):
        warnings.warn("runtime.device: the run used a GPU and PyTorch finds none here; using the CPU", stacklevel=3)
        device = "cpu"
    for name, choice in kernels.items():
        if choice == "triton" and not _is_overridden(f"runtime.kernels.{name}", overrides):
            kernels[name] = "auto"
    changed = {"device": device, "kernels": KernelsConfig(**kernels)}
    return config.model_copy(update={"runtime": config.runtime.model_copy(update=changed)})


def _with_saved_template(config: Config, weights: Path, overrides: list[str]) -> Config:
    """Names the run's own copy of its chat template, unless an override names another."""
    kept = (run_of(weights) or weights) / CHAT_TEMPLATE_FILE
    if not kept.is_file() or kept.is_symlink() or _is_overridden("data.chat_template", overrides):
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template": str(kept)})})


def _saved_tokenizer(config: Config, weights: Path, overrides: list[str]) -> Tokenizer:
    """The run's own copy of a tokenizer.json, unless an override names another."""
    kept = (run_of(weights) or weights) / TOKENIZER_FILE
    has_own = kept.is_file() and not kept.is_symlink()
    if config.data.tokenizer in BUILT_IN or not has_own or _is_overridden("data.tokenizer", overrides):
        return tokenizer_for(config.data)
    if kept.stat().st_size > LARGEST_DOCUMENT:
        raise CheckpointError(
            f"{kept}: it has more than {LARGEST_DOCUMENT:,} bytes; set data.tokenizer to another file"
        )
    return load_tokenizer(str(kept), separator=config.data.separator, end_tokens=config.data.end_tokens)


def _is_overridden(key: str, overrides: list[str]) -> bool:
    """Whether an override sets this key or a section around it."""
    given = [override.partition("=")[0].strip() for override in overrides]
    return any(key == name or key.startswith(f"{name}.") for name in given)
