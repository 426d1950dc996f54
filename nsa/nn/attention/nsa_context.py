"""An NSA layer under context parallelism.

The rank that has the last token of a block computes its compressed key and value, with a halo from the chunk before;
then all of them are gathered. The window also uses a halo. Raw keys and values of the selected branch are gathered one
key/value head after the other (`nsa.nn.attention.gathered`).

Legend: B batch, S tokens of this rank, G key/value heads, M slots: places for the compressed tokens of a chunk, N
compressed tokens of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa.nn.attention.gathered import (
    SELECTED,
    WINDOW,
    Gathered,
    GatheredCall,
    Half,
    attend_gathered,
    attend_halos,
    chunk_places,
    plan,
    with_halos,
)
from nsa.nn.attention.layer import Exchange
from nsa.nn.rope import rotary_tables, rotate
from nsa.ops.branches import cached_selection, compressed_backward_node, compressed_node
from nsa.ops.dispatch import backend_of
from nsa.ops.layout import cached_with, first_compressed, num_slots, slot_layout, token_layout, visible_compressed
from nsa.ops.mixing import mix_node
from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.nn.attention.nsa import NSAAttention


@dataclass(frozen=True)
class SlotPlan:
    """Where the compressed tokens of this rank are in their sequence; the same for all layers of a pass.

    borders    by chunk, borders of the documents in the chunk with its halo
    skipped    by chunk without documents, tokens of the halo before the first block that ends in the chunk
    position   [2, M], positions of the compressed tokens of this rank's chunks
    place      [N], indices of the compressed tokens of the sequence in a gathered tensor [ranks * 2 * M]
    """

    borders: tuple[Tensor | None, Tensor | None]
    skipped: tuple[int, int]
    position: Tensor
    place: Tensor


def num_chunk_slots(length: int, spec: NSASpec) -> int:
    """Upper bound of the compressed tokens that end in one chunk of `length` tokens, for any document borders."""
    return length // spec.cmp_stride + 1


def slot_plan(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, context: Exchange) -> SlotPlan:
    """The plan for tensors like x [B, S, ...] of this rank and the document borders of the whole sequence."""
    length = x.shape[1] // 2
    make = partial(_slot_plan, length, spec, cu_seqlens, context, x.device)
    if cu_seqlens is None:
        return context.once(("slots", length, spec, x.device), make)
    return cached_with(cu_seqlens, ("context slots", context.rank, context.size, length, spec), make)


def _slot_plan(
    length: int, spec: NSASpec, cu_seqlens: Tensor | None, context: Exchange, device: torch.device
) -> SlotPlan:
    size = context.size
    slots = num_chunk_slots(length, spec)
    tokens = 2 * size * length
    position = token_layout(tokens, cu_seqlens, device).position
    # Number of compressed tokens that end before each chunk: chunk c has those from ended[c] on.
    ended = first_compressed(tokens, spec, cu_seqlens, device) + visible_compressed(position, spec)
    ended = pad(ended[length - 1 :: length], (1, 0))
    number = torch.arange(num_slots(tokens, spec, packed=cu_seqlens is not None), device=device)
    chunk = torch.searchsorted(ended[1:].contiguous(), number, right=True).clamp(max=2 * size - 1)
    within = (number - ended[chunk]).clamp(max=slots - 1)  # unused slots may go anywhere
    slot_position = slot_layout(tokens, spec, cu_seqlens, device).position
    starts = context.starts(length)
    own = ended[[start // length for start in starts]][:, None] + torch.arange(slots, device=device)
    halos = [_halo(start, start + length, spec, cu_seqlens) for start in starts]
    return SlotPlan(
        (halos[0][0], halos[1][0]),
        (halos[0][1], halos[1][1]),
        pad(slot_position, (0, 1))[own.clamp(max=slot_position.shape[0])],
        chunk_places(size, device)[chunk] * slots + within,
    )


def _halo(first: int, stop: int, spec: NSASpec, cu_seqlens: Tensor | None) -> tuple[Tensor | None, int]:
    """Borders and skipped tokens of a chunk with its halo."""
    halo_first = max(0, first - spec.cmp_block + 1)
    if cu_seqlens is None:
        return None, visible_compressed(first - 1, spec) * spec.cmp_stride - halo_first
    border = cu_seqlens.to(torch.int64)
    # A document that starts before `first` keeps its block grid: here it starts with its first block that ends in this
    # chunk. The tokens before, fewer than a block, are treated as another document.
    current = torch.searchsorted(border, torch.full((1,), first, device=border.device), right=True) - 1
    blocks = -((border - halo_first) // spec.cmp_stride)
    aligned = border + blocks.clamp(min=0) * spec.cmp_stride
    is_current = torch.arange(border.shape[0], device=border.device) == current
    local = torch.where(is_current, aligned, border)
    return pad((local - halo_first).clamp(0, stop - halo_first), (1, 0)).to(torch.int32), 0


@dataclass(frozen=True)
class CompressedCall(GatheredCall):
    """Compressed attention. If `selects`, the backend `select_backend` also selects blocks."""

    spec: NSASpec
    slots: SlotPlan
    selects: bool
    select_backend: str | None

    @property
    def place(self) -> Tensor:
        return self.slots.place

    @property
    def pieces(self) -> tuple[int, int]:
        return -1, 1

    def heads_at_once(self, groups: int) -> int:
        return groups

    def num_keys(self, half: Half) -> int:
        return num_slots(half.stop, self.spec, packed=half.borders is not None)

    def select(self, half: Half, q: Tensor, k: Tensor, lse: Tensor) -> Tensor | None:
        if not self.selects:
            return None
        where: dict[str, Any] = {"cu_seqlens": half.borders, "q_offset": half.first}
        return cached_selection(q, k, lse, self.spec, **where, backend=self.select_backend)

    def scatter(self, grad: Tensor, local: int) -> Tensor:
        # Unused slots may share a place with others.
        spread = grad.new_zeros(self.context.size * local, *grad.shape[1:])
        return spread.index_add_(0, self.place, grad)


def attend_context(layer: "NSAAttention", x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
    """`NSAAttention` on this rank's tokens; `cu_seqlens` has the borders of the whole sequence."""
    spec, forced = layer.spec, layer.force_branch
    here = plan(x_BSC, cu_seqlens, context)
    by = {name: backend_of(name, layer.backend) for name in ("cmp", "select", "sel", "win", "mix")}
    q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = layer.projections(
        x_BSC, rotary_tables(here.position, *layer.rotary)
    )
    o_cmp: Tensor | None = None
    o_sel: Tensor | None = None
    # First: exchanges of a group run in order, and that of the keys of the selected branch takes long.
    near = with_halos(k_win, v_win, spec.window - 1, context) if forced in (None, "win") else []
    if forced != "win":
        slots = slot_plan(x_BSC, spec, cu_seqlens, context)
        keys, values = zip(*with_halos(k_cmp, v_cmp, spec.cmp_block - 1, context), strict=True)
        k_slots, v_slots = _compress(layer.phi_k, keys, slots), _compress(layer.phi_v, values, slots)
        if layer.compress == "before_rotation":
            k_slots = rotate(k_slots, rotary_tables(slots.position.flatten(), *layer.rotary))
        nodes = compressed_node, compressed_backward_node
        arguments = (nodes, {"spec": spec.as_ints()}, context, here, by["cmp"])
        cmp = CompressedCall(*arguments, spec, slots, forced != "cmp", by["select"])
        gathered_slots = Gathered(k_slots, v_slots, cmp)
        # Gathered while compressed attention is computed.
        sel = GatheredCall(SELECTED, {"block": spec.sel_block}, context, here, by["sel"])
        heads = Gathered(k_sel, v_sel, sel) if forced != "cmp" else None
        o_cmp, indices = attend_gathered(gathered_slots, q, k_slots, v_slots)
    win = GatheredCall(WINDOW, {"window": spec.window}, context, here, by["win"])
    o_win = attend_halos(q, near, win) if near else None
    if forced in (None, "sel"):
        assert heads is not None
        o_sel, _ = attend_gathered(heads, q, k_sel, v_sel, indices)
    if forced is None:
        o_BSHV = mix_node(o_cmp, o_sel, o_win, layer.gate(x_BSC), by["mix"])
    else:
        o_BSHV = {"cmp": o_cmp, "sel": o_sel, "win": o_win}[forced]
    assert isinstance(o_BSHV, Tensor)
    out_BSC: Tensor = layer.out(o_BSHV.flatten(2))
    return out_BSC


def _compress(phi: nn.Module, halves: Sequence[Tensor], plan: SlotPlan) -> Tensor:
    """Chunks with their halos -> the compressed tokens that end in each chunk, [B, 2 * M, G, D]."""
    slots = plan.position.shape[1]
    compressed = []
    for x, skipped, borders in zip(halves, plan.skipped, plan.borders, strict=True):
        y: Tensor = phi(x[:, skipped:], borders)[:, :slots]
        compressed.append(pad(y, (0, 0, 0, 0, 0, slots - y.shape[1])))
    return torch.cat(compressed, dim=1)
