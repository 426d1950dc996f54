"""Everything a run holds in memory, and how it is built from a configuration."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nsa.checkpoint.weights import load_weights
from nsa.config import Config
from nsa.data.tokenizers import Tokenizer
from nsa.errors import CheckpointError, ConfigError, LaunchError
from nsa.nn.model import Decoder, build_model
from nsa.parallel.recompute import apply_recompute
from nsa.train.optimizer import build_optimizer

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class RunState:
    model: Decoder
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    tokenizer: Tokenizer
    device: torch.device
    precision: str
    grad_clip: float
    step: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.trainable: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]

    def autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST_TYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def build_state(config: Config, tokenizer: Tokenizer) -> RunState:
    device = pick_device(config.runtime.device)
    precision = config.runtime.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    _apply_runtime(config)
    kernels = config.runtime.kernels.chosen() or None
    model = build_model(config.model, config.nsa, vocabulary(config, tokenizer), config.train.seed, kernels)
    if config.train.init_from is not None:
        try:
            load_weights(model, Path(config.train.init_from))
        except CheckpointError as error:
            raise CheckpointError(f"train.init_from: {error}") from None
    apply_recompute(model, config.runtime.gradient_checkpointing)
    model.to(device)
    if config.runtime.compile:
        for block in model.blocks:
            block.compile()
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    optimizer = build_optimizer(model, config.train)
    return RunState(model, optimizer, scaler, tokenizer, device, precision, config.train.grad_clip)


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LaunchError("runtime.device: 'cuda' was asked for and PyTorch sees no GPU; use auto or cpu")
    return torch.device(wanted)


def vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    wanted = config.model.vocab_size
    if wanted is not None and wanted != tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {wanted} differs from the {tokenizer.vocab_size} of tokenizer "
            f"{config.data.tokenizer!r}; leave it unset to take the tokenizer's"
        )
    return tokenizer.vocab_size


def _apply_runtime(config: Config) -> None:
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    torch.use_deterministic_algorithms(config.runtime.deterministic)
    torch.backends.cuda.matmul.allow_tf32 = config.runtime.tf32
    torch.backends.cudnn.allow_tf32 = config.runtime.tf32
