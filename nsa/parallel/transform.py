"""Everything that changes a model between building and training it, as one ordered list of functions.

    1. convert_to_float8  linear layers multiply in FP8 (`nsa.parallel.float8`)
    2. divide_sequences   attention layers exchange keys and values within their context-parallel group
    3. recompute          backward recomputes activations instead of keeping them
    4. compile_blocks     torch.compile of every decoder block (the step compiles its loss)
    5. wrap or shard      DDP or FSDP (`nsa.parallel.strategy`), with the model on its device
    6. trace              hooks that record the backward pass

Each function takes the model and returns the module to call. Modules keep their names and parameter names, and all but
the converted layers their types.

Recomputation is always non-reentrant. It keeps the blocks that attention selected in the forward pass, so that backward
reads the same ones: in a SelectionCache, or in compiled blocks by torch's selective checkpointing, which a compiler
understands and which otherwise costs a Python call per operator. "selective" keeps the outputs of the attention
operators in the same way: they are small and expensive to compute.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nsa.ops.mixing  # noqa: F401  (registers torch.ops.nsa)
from nsa.config.schema import Config
from nsa.errors import ConfigError
from nsa.nn.attention import Attention, attention_layers
from nsa.nn.block import DecoderBlock, call
from nsa.ops.selection_cache import SelectionCache
from nsa.parallel.context import Context
from nsa.parallel.float8 import convert_to_float8
from nsa.parallel.strategy import HookWrapper, shard, wrap_ddp
from nsa.parallel.world import World

Granularity = Literal["none", "selective", "block", "branch"]


class Tracing(Protocol):
    """Records the backward pass; `nsa.record.tracer.Tracer` implements it."""

    def traced_hook(self, inner: Any) -> Any: ...

    def attach(self, model: nn.Module, module: nn.Module) -> None: ...


def transform(model: nn.Module, config: Config, world: World, precision: str, trace: Tracing | None) -> nn.Module:
    """Applies all transforms to `model` in place and returns the module to call."""
    runtime, parallel = config.runtime, config.parallel
    if runtime.float8 != "none":
        convert_to_float8(model, runtime.float8, world.device)
    divided = world.context is not None
    if world.context is not None:
        divide_sequences(model, world.context)
    # torch.compile can trace recomputation inside a block, but exchanges between ranks break its graph.
    recompute(model, runtime.gradient_checkpointing, compiled=runtime.compile and not divided)
    if world.strategy != "fsdp":  # FSDP moves unit by unit, so that no GPU holds the whole model
        model.to(world.device)
    if runtime.compile:
        compile_blocks(model, inside_recompute=divided)
    module = model
    if world.strategy == "ddp":
        hook: HookWrapper = trace.traced_hook if trace is not None else lambda inner: inner
        module = wrap_ddp(model, parallel.ddp, world, hook)
    elif world.strategy == "fsdp":
        module = shard(model, parallel.fsdp, world, precision)
    if trace is not None:
        trace.attach(model, module)
    return module


def divide_sequences(model: nn.Module, context: Context) -> nn.Module:
    """Makes the attention layers of a model take this rank's tokens of each sequence (`Context.rows`)."""
    for name, layer in attention_layers(model):
        if type(layer).attend_context is Attention.attend_context:
            cannot = f"{name} is a {type(layer).__name__}, which cannot divide a sequence among ranks"
            raise ConfigError(f"parallel.context: {cannot}; use parallel.context=1")
        layer.context = context
    return model


def recompute(model: nn.Module, granularity: Granularity, *, compiled: bool = False) -> nn.Module:
    """Recomputes every decoder block ("block"), each block except its attention operators ("selective"), or attention
    and MLP of a block separately ("branch"); "none" keeps all activations. Overrides an earlier call."""
    layers = [layer for _, layer in attention_layers(model)]
    context_fn: Callable[[], Any] = _remember_selection
    if granularity == "selective":
        context_fn = _keeping(operator for layer in layers for operator in layer.saved_operators())
    elif compiled:
        context_fn = _keeping(operator for layer in layers for operator in layer.fixed_operators())
    # No layer draws random numbers, so there is no random state to restore.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": context_fn}
    for block in _blocks(model):
        block.recompute = None if granularity == "none" else partial(checkpoint, **options)
        block.recomputes_parts = granularity == "branch"
    return model


def compile_blocks(model: nn.Module, *, inside_recompute: bool = False) -> nn.Module:
    """Compiles every decoder block including its recomputation, or only the part inside it with `inside_recompute`.
    Hooks that a strategy registers on a block are not compiled."""
    # Attention exchanges keys and values with other ranks, which would break the graph.
    uncompiled = torch.compiler.disable(call) if inside_recompute else call
    for block in _blocks(model):
        block.call_attention = uncompiled
        if inside_recompute:
            block.compute = torch.compile(block.compute)  # type: ignore[method-assign]
        else:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    return model


def _blocks(model: nn.Module) -> list[DecoderBlock]:
    return [module for module in model.modules() if isinstance(module, DecoderBlock)]


def _keeping(operators: Iterable[Any]) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, list(dict.fromkeys(operators)))


def _remember_selection() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    cache = SelectionCache()
    return cache.record(), cache.replay()
