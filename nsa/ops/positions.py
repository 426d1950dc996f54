"""Positions of tokens in their documents, and cos and sin of rotary angles, as nodes: compiled code then computes them
once for all heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.ops.layout import num_slots, slot_layout, token_layout
from nsa.ops.library import define, spec_of
from nsa.ops.spec import NSASpec


def positions(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The position of every token [S] and every compressed token [N] in its document, for rotary tables."""
    if cu_seqlens is None:
        slots = slot_layout(tokens, spec, None, device).position
    else:
        slots = _packed_slot_positions(cu_seqlens, tokens, spec.as_ints())
    return token_positions(tokens, cu_seqlens, device), slots


def token_positions(tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The position of every token in its document: [S]."""
    if cu_seqlens is None:
        return token_layout(tokens, None, device).position
    return _packed_positions(cu_seqlens, tokens)


# Copies: compiled code may write to the result of a node, and the cached layout must not be modified.


def _of_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    return token_layout(tokens, cu_seqlens, cu_seqlens.device).position.clone()


def _of_slots(cu_seqlens: Tensor, tokens: int, spec: Sequence[int]) -> Tensor:
    return slot_layout(tokens, spec_of(spec), cu_seqlens, cu_seqlens.device).position.clone()


def _cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


_packed_positions = define(
    "packed_positions", _of_tokens, lambda cu_seqlens, tokens: cu_seqlens.new_empty(tokens, dtype=torch.int64)
)
_packed_slot_positions = define(
    "packed_slot_positions",
    _of_slots,
    lambda cu_seqlens, tokens, spec: cu_seqlens.new_empty(
        num_slots(tokens, spec_of(spec), packed=True), dtype=torch.int64
    ),
)
# Angles have no gradient.
cos_sin = define("cos_sin", _cos_sin, lambda angle: (torch.empty_like(angle), torch.empty_like(angle)))
