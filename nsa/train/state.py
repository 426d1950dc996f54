"""The state of a run in memory, and how it is built from a configuration."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from nsa.checkpoint.export import find_weights, load_weights
from nsa.config import Config
from nsa.data.loader import Batch
from nsa.data.tokenizers import Tokenizer
from nsa.errors import CheckpointError, ConfigError, reworded
from nsa.files import expand_home
from nsa.formatting import counted
from nsa.nn.attention import attention_layers
from nsa.nn.model import Decoder, build_model
from nsa.ops.dispatch import Backend
from nsa.parallel.numerics import compute_precision
from nsa.parallel.transform import Tracing, transform
from nsa.parallel.world import World, pick_device
from nsa.record.memory_dump import run_tensors
from nsa.train.graphs import StepGraphs
from nsa.train.optimizer import build_optimizer

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """The progress of a run. All fields are saved and restored."""

    step: int = 0  # completed optimizer steps, including skipped ones
    tokens: int = 0
    sequences: int = 0  # the data cursor: sequences read by all ranks together
    skipped: int = 0
    loss: float | None = None  # of the last step
    val_loss: float | None = None  # of the last validation
    val_bits_per_byte: float | None = None
    best_val_loss: float | None = None


@dataclass
class LossScale:
    """fp16 gradients are small: the loss is multiplied by `value`, which is halved after an overflow."""

    enabled: bool
    value: float = 1.0
    clean_steps: int = 0

    GROWTH_INTERVAL = 2000
    SMALLEST = 2.0**-14

    def overflowed(self) -> None:
        self.value, self.clean_steps = self.value / 2, 0

    def succeeded(self) -> None:
        if self.enabled:
            self.clean_steps += 1
            if self.clean_steps == self.GROWTH_INTERVAL:
                self.value, self.clean_steps = self.value * 2, 0


@dataclass
class RunState:
    """`model` is the decoder; `module` is the decoder wrapped for its strategy, to be called."""

    config: Config
    model: Decoder
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scale: LossScale
    tokenizer: Tokenizer
    world: World
    precision: str
    progress: Progress = field(default_factory=Progress)
    teacher: Decoder | None = None  # not sharded
    data: str | None = None  # fingerprint of the data
    graphs: StepGraphs = field(default_factory=lambda: StepGraphs(0, False, "not planned"))

    def __post_init__(self) -> None:
        # Collected once, sharded as between steps: these are the tensors that the optimizer updates.
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.trainable: list[nn.Parameter] = [p for p in self.parameters.values() if p.requires_grad]
        layers = [layer for _, layer in attention_layers(self.model)]
        self.index_parameters = [p for layer in layers for p in layer.index_parameters() if p.requires_grad]
        self.index_terms = self.model.num_index_terms()
        learns_apart = set(map(id, self.index_parameters))
        rest = [p for p in self.trainable if id(p) not in learns_apart]
        self.clipped = [group for group in (rest, self.index_parameters) if group]  # each by its own norm

    @property
    def device(self) -> torch.device:
        return self.world.device

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this rank keeps between steps, named as in `run_tensors`."""
        return run_tensors(self.parameters, dict(self.model.named_buffers()), self.optimizer)

    def autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST_TYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def build_state(
    config: Config,
    tokenizer: Tokenizer,
    world: World | None = None,
    trace: Tracing | None = None,
    *,
    initialize: bool = True,
) -> RunState:
    """Builds model, optimizer and loss scale. Call it and use the state inside `numerics(config.runtime)`.

    `trace` records the backward pass. `initialize` loads train.init_from, which a resumed run does not need.
    """
    world = world or World(pick_device(config.runtime.device))
    precision = compute_precision(config.runtime.precision, world.device)
    model = build_model(config, vocabulary(config, tokenizer), config.train.seed, chosen_kernels(config))
    if initialize and config.train.init_from is not None:
        with reworded(CheckpointError, "train.init_from", caught=CheckpointError):
            load_weights(model, find_weights(expand_home(config.train.init_from)), converts=True)
    for _, layer in attention_layers(model):
        layer.prepare(config.train.seq_len)
    freeze(model, config.train.freeze)
    module = transform(model, config, world, precision, trace)
    computed = {precision}
    if world.strategy == "fsdp":
        computed |= {config.parallel.fsdp.param_dtype, config.parallel.fsdp.reduce_dtype}
    scale = LossScale(enabled="fp16" in computed, value=65536.0 if "fp16" in computed else 1.0)
    optimizer = build_optimizer(model, config.train)
    return RunState(config, model, module, optimizer, scale, tokenizer, world, precision)


def own_tokens(batch: Batch, world: World) -> Batch:
    """This rank's part of every sequence of a batch."""
    return batch if world.context is None else batch.take(*world.context.rows(batch.inputs.shape[1]))


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Disables gradients for the parameters that match `train.freeze`."""
    frozen: dict[str, bool] = {}
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern.removeprefix("!"))]
        if not found:
            raise ConfigError(
                f"train.freeze: {pattern!r} matches no parameter; the model has {', '.join(list(parameters)[:4])}, ..."
            )
        frozen.update(dict.fromkeys(found, not pattern.startswith("!")))
    for name, is_frozen in frozen.items():
        if is_frozen:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        left = [name for name in parameters if not frozen.get(name)]
        why = f"; {left[0]} is not trained here: train.seq_len is too short, or nsa.force_branch is set" if left else ""
        raise ConfigError(f"train.freeze: leaves no trainable parameter{why}")


def chosen_kernels(config: Config) -> Backend:
    return "reference" if config.parallel.ddp.safe_mode else config.runtime.kernels.chosen() or None


def micro_batch_size(config: Config, world_size: int) -> int:
    """Sequences per pass of a rank: all sequences of the rank, or train.micro_batch. A context-parallel group counts as
    one rank."""
    batch, size = config.train.batch_size, config.train.micro_batch
    shared = config.parallel.context
    ranks = f"{world_size} ranks" if shared == 1 else f"{world_size} groups of {shared} ranks (parallel.context)"
    if batch % world_size:
        raise ConfigError(
            f"train.batch_size: {batch} sequences cannot be divided among {ranks}; choose a multiple of {world_size}"
        )
    own = batch // world_size
    if size == "auto":
        size = own
    if own % size:
        raise ConfigError(f"train.micro_batch: {size} must divide the {own} sequences of a rank ({batch} over {ranks})")
    if config.parallel.ddp.static_graph and not config.parallel.ddp.safe_mode and own > size:
        raise ConfigError("parallel.ddp.static_graph: needs one pass a step; set train.micro_batch=auto or turn it off")
    return size


def describe_batch(config: Config, world_size: int) -> str:
    """How the sequences of a step are divided, for example 2 groups of 4 ranks x 1 pass x 8 sequences."""
    size = micro_batch_size(config, world_size)
    passes, shared = config.train.batch_size // world_size // size, config.parallel.context
    ranks = counted(world_size, "rank") if shared == 1 else f"{counted(world_size, 'group')} of {shared} ranks"
    return f"{ranks} x {counted(passes, 'pass', 'passes')} x {counted(size, 'sequence')}"


def vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size:
        needed = f"the {tokenizer.vocab_size} of tokenizer {config.data.tokenizer!r}"
        raise ConfigError(f"model.vocab_size: {wanted} is less than {needed}; leave it unset to use that size")
    return wanted or tokenizer.vocab_size
