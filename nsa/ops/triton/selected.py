"""Attention over the blocks each query selected: query-major forward kernel and the host functions.

Same functions and results as the reference. A program processes a tile of neighbouring queries times the heads of one
group and iterates over the union of the blocks they chose, masked per query by bits. A small tile (one query if a group
has 16 heads) wastes no work; a large tile shares keys and values and fills the tensor cores; see `TilePlan` for the
choice, and `selected_parts` for cases that neither handles well. Softmax in base 2, accumulation in float32.

Legend: B batch, S tokens, H query heads, G key/value heads, h = H/G, Dk/Dv head sizes, P = B*G.
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton import launch_table, selected_backward, selected_parts
from nsa.ops.triton.flash_kernels import load_tile, store_rows
from nsa.ops.triton.launch_table import Launch, LaunchTable, card_of, head_class, launch_on, unit_last
from nsa.ops.triton.selected_lists import number_blocks
from nsa.ops.triton.selected_tiles import (
    KEY_MASK,
    NO_MASK,
    TilePlan,
    choose_tiles,
    decode_tile,
    loop_bounds,
    mask_scores,
    plan_tiles,
)

MAX_TOKENS = 1 << 30
PARTS_MAX_PER_GROUP = 7  # heads per group up to which rows without shared blocks are processed block by block; 0: never
PARTS_RATIO = {64: 3.0, 128: 5.0}  # TilePlan.ratio of "parts" by class of head size; other classes do not use it

LAUNCHES = LaunchTable({
    ("small", "sm80"): {64: Launch(16, 64, 1, 3), 128: Launch(16, 32, 1, 3), 256: Launch(16, 32, 2, 2)},
    ("small", "fp32"): {256: Launch(16, 32, 4, 1)},
    ("large", "sm90"): {64: Launch(64, 64, 4, 3, maxnreg=168)},
    ("large", "sm80"): {128: Launch(64, 64, 4, 3), 256: Launch(64, 64, 8, 2)},
    ("large", "fp32"): {64: Launch(32, 32, 4, 1), 256: Launch(16, 32, 4, 1)},
    # For selected_parts: the gathered rows of a step; a block is loaded whole.
    ("parts", "sm80"): {64: Launch(64, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(64, 64, 8, 2)},
    ("parts", "fp32"): {256: Launch(16, 64, 4, 1)},
})  # fmt: skip

backward, adds_dq = selected_backward.backward, selected_backward.adds_dq


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these kernels cannot run on such tensors; None if they can."""
    if v.shape[1] >= MAX_TOKENS:
        return f"the selected-attention kernels take fewer than {MAX_TOKENS} tokens"
    return launch_table.refusal(q, v)


def default_params(q: Tensor, k: Tensor, v: Tensor, block: int, num_selected: int) -> TilePlan:
    """The checked-in launch parameters for such tensors."""
    plan = choose_tiles(q, k, v, block, num_selected, LAUNCHES)
    head, kind = head_class(q.shape[3], v.shape[3]), card_of(q).kind
    is_small = q.shape[2] // k.shape[2] <= PARTS_MAX_PER_GROUP and block <= selected_parts.MAX_BLOCK
    if plan.method != "adaptive" or not is_small or head not in PARTS_RATIO or kind != "sm90" or q.element_size() != 2:
        return plan
    return replace(plan, method="parts", ratio=PARTS_RATIO[head])


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, cu_seqlens: Tensor | None,
    params: TilePlan | None = None, *, q_offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B,S,H,Dk], k [B,S,G,Dk], v [B,S,G,Dv], indices [B,S,G,n] -> o [B,S,H,Dv], lse [B,S,H] (natural log)."""
    o = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    scale = q.shape[3] ** -0.5 * math.log2(math.e)
    with launch_on(q):
        params = params or default_params(q, k, v, block, indices.shape[3])
        blocks = number_blocks(k.shape[1], block, cu_seqlens, q.device, q_offset)
        tensors = (q, k, v, o, lse)
        passes = plan_tiles(indices, blocks, q.shape[2] // k.shape[2], params)
        for tile_pass in passes:
            tile_pass.launch(_attend_kernel, tensors, (), scale, block)
        if params.method == "parts":
            lists, parts = passes[0].lists, LAUNCHES.find("parts", q, v)
            assert lists.take is not None
            selected_parts.attend_parts(tensors, indices, blocks, lists.take, lists.queries, parts, scale)
    return o, lse


@triton.jit(do_not_specialize=["tokens", "q_offset", "groups", "tiles", "capacity", "large_tiles"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr,
    o_ptr, lse_ptr, entries_ptr,  # [B, S, H, DV] contiguous; [B, S, H]; [P, tiles, capacity]
    counts_ptr, take_ptr,  # [P, tiles, 3]; [P, large_tiles]
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kg, stride_vb, stride_vg, tokens, q_offset, groups, tiles,
    capacity, large_tiles,
    scale,  # Dk ** -0.5 * log2(e)
    PER_GROUP: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SEL: tl.constexpr, STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, WANTED: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    pair, tile, slot, t, head, row_ok = decode_tile(tokens, tiles, PER_GROUP, QUERIES, HEADS, HEAD_TILES, ROWS)
    if WANTED >= 0:
        if tl.load(take_ptr + pair * large_tiles + tile // SUB) != WANTED:
            return
    batch, group = pair // groups, pair % groups
    heads_all = groups * PER_GROUP
    dk = tl.arange(0, BLOCK_DK)
    query_head = group * PER_GROUP + head  # [ROWS]
    q_rows = q_ptr + batch * stride_qb + t.to(tl.int64) * stride_qs + query_head * stride_qh
    q = load_tile(q_rows[:, None] + dk[None, :], row_ok, dk, DK, BLOCK_DK, True)
    k_base = k_ptr + batch * stride_kb + group * stride_kg
    v_base = v_ptr + batch * stride_vb + group * stride_vg

    # The queries are the last tokens of the sequence. Tokens after the tile's last query, perhaps of the next document,
    # are not loaded: a weight of 0 would not mask a NaN.
    keys = q_offset + tl.minimum(tokens, tile * QUERIES + QUERIES)
    here = pair * tiles + tile
    entries = entries_ptr + here * capacity
    top = tl.full([ROWS], -float("inf"), tl.float32)  # running maximum, in base-2 units
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    # Consecutive loops instead of a branch, so that they share their buffers.
    for mode in tl.static_range(3):
        begin, end = loop_bounds(mode, counts_ptr + here * 3)
        acc, top, total = _attend_entries(
            acc, top, total, q, q_offset + t, slot, entries, begin, end, k_base, v_base, keys, scale, STRIDE_KS,
            STRIDE_VS, DK, DV, BLOCK_DK, BLOCK_DV, SEL, KEYS, mode,
        )  # fmt: skip

    # A row that reads nothing gives 0 and -inf.
    safe = tl.where(total > 0, total, 1.0)
    o = acc / safe[:, None]
    lse = tl.where(total > 0, (top + tl.log2(safe)) * 0.6931471805599453, -float("inf"))
    out = (batch * tokens + t) * heads_all + query_head  # int64 [ROWS]
    store_rows(o_ptr, out, o, row_ok, DV, BLOCK_DV)
    tl.store(lse_ptr + out, lse, mask=row_ok)


@triton.jit
def _attend_entries(
    acc, top, total, q,  # [ROWS, BLOCK_DV]; [ROWS]; [ROWS]; [ROWS, BLOCK_DK]
    t, slot, entries, begin, end, k_base, v_base, tokens, scale, STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, SEL: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Online softmax over entries [begin, end). With NO_MASK every row reads all of every block, with ROW_MASK all or
    nothing. Only with KEY_MASK can a key lie outside the sequence."""
    PIECES: tl.constexpr = (SEL + KEYS - 1) // KEYS
    PADDED: tl.constexpr = SEL % KEYS != 0
    CHECKED: tl.constexpr = PADDED or MASK == KEY_MASK
    col = tl.arange(0, KEYS)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_offs = col.to(tl.int64)[:, None] * STRIDE_KS + dk[None, :]
    v_offs = col.to(tl.int64)[:, None] * STRIDE_VS + dv[None, :]
    for i in range(begin * PIECES, end * PIECES):
        entry = tl.load(entries + i // PIECES)
        shift = (i % PIECES) * KEYS
        first = entry.to(tl.int32) + shift
        readable = first + col < tokens
        if PADDED:
            readable = readable & (col < SEL - shift)
        k = load_tile(k_base + first.to(tl.int64) * STRIDE_KS + k_offs, readable, dk, DK, BLOCK_DK, CHECKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        if PADDED:
            s = tl.where((col < SEL - shift)[None, :], s, -float("inf"))
        s = mask_scores(s, entry, slot, first + col, t, MASK)
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        base = new_top
        if MASK != NO_MASK:
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s * scale - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        v = load_tile(v_base + first.to(tl.int64) * STRIDE_VS + v_offs, readable, dv, DV, BLOCK_DV, CHECKED)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total
