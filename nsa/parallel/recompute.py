"""Gradient checkpointing: activations are recomputed in backward, selected blocks never are.

Always the non-reentrant kind. The outputs of `nsa::select_blocks` are kept from the forward pass, so that
backward reads the very blocks the forward pass read: by a SelectionMemory, or in compiled blocks by torch's selective
checkpointing, which a compiler understands and which costs a Python call per operator otherwise. Modules keep their
place, type and names: only their `forward` is replaced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nsa.ops.library  # noqa: F401  (registers torch.ops.nsa)
from nsa.nn.block import DecoderBlock
from nsa.ops.memory import SelectionMemory

Granularity = Literal["none", "block", "branch"]


def apply_recompute(model: nn.Module, granularity: Granularity, *, compiled: bool = False) -> None:
    """Recomputes every decoder block ("block"), or each block's attention and MLP by itself ("branch")."""
    context_fn = partial(create_selective_checkpoint_contexts, _keep_selection) if compiled else _remember_selection
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            if granularity == "block":
                _recompute(module, context_fn)
            elif granularity == "branch":
                _recompute(module.attention, context_fn)
                _recompute(module.mlp, context_fn)


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every decoder block's forward; whatever a strategy hooks onto a block stays outside."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


def _recompute(module: nn.Module, context_fn: Callable[[], Any]) -> None:
    # No layer draws random numbers, so there is no random state to put back.
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=context_fn,
    )


def _remember_selection() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    memory = SelectionMemory()
    return memory.record(), Repeatable(memory.replay)


class Repeatable:
    """A context that can be entered more than once: backward may run twice over one forward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make = make

    def __enter__(self) -> None:
        self._current = self._make()
        self._current.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._current.__exit__(*error)


def _keep_selection(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op == torch.ops.nsa.select_blocks.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
