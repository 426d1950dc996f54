"""Gradient checkpointing: activations are recomputed in backward, selected blocks never are.

Always the non-reentrant kind. The outputs of `nsa::select_blocks` are kept from the forward pass, so that
backward reads the very blocks the forward pass read: by a SelectionCache, or in compiled blocks by torch's selective
checkpointing, which a compiler understands and which costs a Python call per operator otherwise. "selective" keeps the
outputs of the attention operators in the same way: a few bytes that are expensive to compute. Modules keep their place,
type and names: only their `forward` is replaced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nsa.ops.library  # noqa: F401  (registers torch.ops.nsa)
from nsa.nn.block import DecoderBlock
from nsa.nn.dense import DenseAttention
from nsa.ops.selection_cache import SelectionCache

Granularity = Literal["none", "selective", "block", "branch"]

_SELECTION = [torch.ops.nsa.select_blocks.default]
_ATTENTION = [
    *_SELECTION,
    torch.ops.nsa.compressed_attention.default,
    torch.ops.nsa.selected_attention.default,
    torch.ops.nsa.window_attention.default,
    # Of the dense twin, whichever of these PyTorch takes.
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def apply_recompute(model: nn.Module, granularity: Granularity, *, compiled: bool = False) -> None:
    """Recomputes every decoder block ("block"), all of it but its attention operators ("selective"), or each block's
    attention and MLP by itself ("branch"). Long passes then run the MLP in chunks of tokens. Replaces what an earlier
    call did; "none" takes it back."""
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), partial) and forward.func is checkpoint:
            module.forward = forward.args[0]
        if isinstance(module, DecoderBlock):
            module.saves_memory = granularity != "none"
    context_fn: Callable[[], Any] = _remember_selection
    if granularity == "selective":
        context_fn = partial(create_selective_checkpoint_contexts, [*_ATTENTION, *_varlen_operators(model)])
    elif compiled:
        context_fn = partial(create_selective_checkpoint_contexts, _SELECTION)
    for module in model.modules():
        if isinstance(module, DecoderBlock) and granularity != "none":
            if granularity in ("block", "selective"):
                _recompute(module, context_fn)
            else:
                _recompute(module.attention, context_fn)
                _recompute(module.mlp, context_fn)


def _varlen_operators(model: nn.Module) -> list[Any]:
    """Dense attention over packed documents on a GPU. Importing it takes a second, so only where a layer may use it."""
    if not any(isinstance(module, DenseAttention) for module in model.modules()):
        return []
    import torch.nn.attention.varlen

    return [torch.ops.torch_attn._varlen_attn.default]


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every decoder block's forward; whatever a strategy hooks onto a block stays outside."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


def _recompute(module: nn.Module, context_fn: Callable[[], Any]) -> None:
    # No layer draws random numbers, so there is no random state to restore.
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=context_fn,
    )


def _remember_selection() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    cache = SelectionCache()
    return cache.record(), cache.replay()
