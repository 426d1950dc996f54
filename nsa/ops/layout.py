"""Every block and mask formula of NSA, once.

The reference, the kernels, the layer and the tests take their geometry from here. Positions count from 0
inside a document; without `cu_seqlens` the whole sequence is one document. Nothing here reads a value of a
device tensor back to the host.

Legend: S tokens, N compressed tokens (slots, when packed).
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.ops.spec import NSASpec

IntLike = TypeVar("IntLike", int, Tensor)


def num_compressed(length: int, spec: NSASpec) -> int:
    """Compressed tokens of one document of `length` tokens."""
    return max(0, (length - spec.cmp_block) // spec.cmp_stride + 1)


def num_slots(tokens: int, spec: NSASpec, *, packed: bool) -> int:
    """Length of the compressed tensors. Packed, it depends on S alone, so that no size depends on values."""
    return tokens // spec.cmp_stride if packed else num_compressed(tokens, spec)


def visible_compressed(position: IntLike, spec: NSASpec) -> IntLike:
    """How many compressed tokens a query at `position` sees: block i when i*stride + cmp_block - 1 <= position."""
    count = (position + 1 - spec.cmp_block) // spec.cmp_stride + 1
    return count.clamp(min=0) if isinstance(count, Tensor) else max(0, count)


def num_blocks(length: int, spec: NSASpec) -> int:
    """Selection blocks, the last possibly cut short, of one document of `length` tokens."""
    return -(-length // spec.sel_block)


def overlap_weights(spec: NSASpec) -> tuple[int, list[int]]:
    """Eq. 9 as a stencil: `(first, weights)` such that block j takes compressed token `j*r + first + n`
    with `weights[n]`, where r = sel_block / cmp_stride. A weight is the number of stride-sized chunks
    that the two share; 32/16/64 gives (-1, [1, 2, 2, 2, 1])."""
    chunks_cmp = spec.cmp_block // spec.cmp_stride
    chunks_sel = spec.sel_block // spec.cmp_stride
    first = 1 - chunks_cmp
    weights = [min(start + chunks_cmp, chunks_sel) - max(start, 0) for start in range(first, chunks_sel)]
    return first, weights


@dataclass(frozen=True)
class TokenLayout:
    """Where every token of a sequence stands in its document. All `[S]` int64.

    position   place inside the document
    doc_start  index of the document's first token
    cmp_start  index of the document's first compressed token
    """

    position: Tensor
    doc_start: Tensor
    cmp_start: Tensor


def token_layout(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device | str) -> TokenLayout:
    index = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        zero = torch.zeros_like(index)
        return TokenLayout(index, zero, zero)
    bounds = _safe_bounds(cu_seqlens, tokens)
    doc = _segment_of(index, bounds)
    doc_start = bounds[doc]
    return TokenLayout(index - doc_start, doc_start, _compressed_bounds(bounds, spec)[doc])


@dataclass(frozen=True)
class SlotLayout:
    """What every compressed token summarises. All `[N]`.

    first_token  index of its first token in the sequence (0 for an unused slot)
    position     where its key is turned: `i * cmp_stride` inside its document
    used         False for what is left over at the end of a packed tensor
    """

    first_token: Tensor
    position: Tensor
    used: Tensor


def slot_layout(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device | str) -> SlotLayout:
    slots = num_slots(tokens, spec, packed=cu_seqlens is not None)
    index = torch.arange(slots, device=device)
    if cu_seqlens is None:
        start = index * spec.cmp_stride
        return SlotLayout(start, start, torch.ones_like(index, dtype=torch.bool))
    bounds = _safe_bounds(cu_seqlens, tokens)
    cmp_bounds = _compressed_bounds(bounds, spec)
    doc = _segment_of(index, cmp_bounds)
    used = index < cmp_bounds[-1]
    position = torch.where(used, (index - cmp_bounds[doc]) * spec.cmp_stride, 0)
    first_token = torch.where(used, bounds[doc] + position, 0)
    return SlotLayout(first_token, position, used)


def _safe_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Document borders made harmless: whatever the values, they start at 0, end at S and never fall.

    Valid borders pass unchanged; values on a device are not read back, so bad ones are bent, never followed.
    """
    inner = cu_seqlens[1:-1].to(torch.int64).clamp(0, tokens).cummax(0).values
    return pad(pad(inner, (1, 0), value=0), (0, 1), value=tokens)


def _compressed_bounds(bounds: Tensor, spec: NSASpec) -> Tensor:
    lengths = bounds.diff()
    counts = ((lengths - spec.cmp_block) // spec.cmp_stride + 1).clamp(min=0)
    return pad(counts.cumsum(0), (1, 0), value=0)


def _segment_of(index: Tensor, bounds: Tensor) -> Tensor:
    """The segment of `bounds` that holds each index; empty segments hold none."""
    segment = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return segment.clamp(max=bounds.shape[0] - 2)
