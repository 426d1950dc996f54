"""Gradient checkpointing: activations are recomputed in backward, selected blocks never are.

Always the non-reentrant kind. The outputs of `nsa::select_blocks` are kept from the forward pass, so that
backward reads the very blocks the forward pass read. Modules keep their place, type and names: only their
`forward` is replaced.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nsa.ops.library  # noqa: F401  (registers torch.ops.nsa)
from nsa.nn.block import DecoderBlock

Granularity = Literal["none", "block", "branch"]


def apply_recompute(model: nn.Module, granularity: Granularity) -> None:
    """Recomputes every decoder block ("block"), or each block's attention and MLP by itself ("branch")."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            if granularity == "block":
                _recompute(module)
            elif granularity == "branch":
                _recompute(module.attention)
                _recompute(module.mlp)


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every decoder block's forward; whatever a strategy hooks onto a block stays outside."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


def _recompute(module: nn.Module) -> None:
    # No layer draws random numbers, so there is no random state to put back.
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_selection),
    )


def _keep_selection(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op == torch.ops.nsa.select_blocks.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
