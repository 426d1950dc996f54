"""Attention over selected blocks, block by block: for groups of few heads whose queries select different blocks.

A tile of neighbouring queries reads every block that one of them chose, and with few heads per group most of its rows
are masked: the keys are then loaded again for every few rows. Here a program holds one block and gathers the rows that
chose it, as in the gradients. The normalised output of a row for one block is a part; a second kernel merges the parts
of a row in the order of its indices, so results are deterministic. Parts take n times the memory of the queries:
therefore one stretch of queries is processed at a time.

Legend: B batch, S tokens, G key/value heads, h query heads per group, n indices per query, P = B*G.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.layout import num_blocks
from nsa.ops.triton.flash_kernels import load_tile, store_rows
from nsa.ops.triton.launch_table import Launch, cdiv, launcher, power_of_2
from nsa.ops.triton.selected_lists import (
    SPAN,
    BlockLists,
    Blocks,
    Skipped,
    Turn,
    block_lists,
    block_place,
    count_steps,
    rows_of_step,
)
from nsa.ops.triton.selected_tiles import extent, load_block

MAX_BLOCK = 128  # tokens of a block, whose scores are in registers
# Parts take as many bytes as the tensors of the call, within these limits; further queries are processed in turns.
MIN_PARTS_BYTES, MAX_PARTS_BYTES = 512 << 20, 1 << 30
CHUNK = 256  # queries of a work item
MERGED_ROWS = 32


def queries_at_once(q: Tensor, v: Tensor, indices: Tensor) -> int:
    """The number of queries of every sequence per stretch: stretches of equal length, of whole spans."""
    batch, tokens, groups, chosen = indices.shape
    a_query = batch * chosen * q.shape[2] * (v.shape[3] * q.element_size() + 4)
    own = batch * tokens * (q.shape[2] + groups) * (q.shape[3] + v.shape[3]) * q.element_size()  # q, k, v and o
    limit = min(max(MIN_PARTS_BYTES, own), MAX_PARTS_BYTES)
    turns = cdiv(tokens, max(SPAN, limit // max(1, a_query)))
    return min(tokens, cdiv(cdiv(tokens, turns), SPAN) * SPAN)


def attend_parts(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], indices: Tensor, blocks: Blocks, take: Tensor, tile: int,
    params: Launch, scale: float,
) -> None:  # fmt: skip
    """Writes o and lse of `tensors` (q, k, v, o, lse) for the queries of all tiles of `tile` queries whose `take` is 0.
    `scale` in base 2."""
    q, _, v, o, lse = tensors
    batch, tokens, groups, chosen = indices.shape
    pairs, at_once = batch * groups, queries_at_once(q, v, indices)
    entries, per_group = pairs * at_once * chosen, q.shape[2] // groups
    parts = torch.empty(entries * per_group, v.shape[3], dtype=q.dtype, device=q.device)
    lse_parts = torch.empty(entries * per_group, dtype=torch.float32, device=q.device)
    positions = torch.empty(entries, dtype=torch.int32, device=q.device)
    for first in range(0, tokens, at_once):
        here = indices[:, first : first + at_once]
        seen = replace(blocks, q_offset=blocks.q_offset + first)
        visible = blocks.count if blocks.packed else num_blocks(seen.q_offset + here.shape[1], blocks.size)
        turn, skipped = Turn(0, pairs, 0, min(blocks.count, visible)), Skipped(take, tile, first)
        lists = block_lists(here, seen, CHUNK, turn, skipped, positions)
        _launch_block((q[:, first : first + at_once], *tensors[1:3], parts, lse_parts), lists, seen, params, scale)
        rows = here.shape[1] * per_group
        launcher(_merge_kernel, (pairs * cdiv(rows, MERGED_ROWS),), q)(
            parts, lse_parts, positions, take, o, lse, first, here.shape[1], tokens, groups, take.shape[1],
            CHOSEN=chosen, PADDED=power_of_2(chosen), PER_GROUP=per_group, TILE=tile, DV=v.shape[3],
            BLOCK_DV=power_of_2(v.shape[3]), ROWS=MERGED_ROWS, num_warps=4,
        )  # fmt: skip


def _launch_block(tensors: tuple[Tensor, ...], lists: BlockLists, blocks: Blocks, params: Launch, scale: float) -> None:
    q, k, v, *_ = tensors
    launcher(_attend_block_kernel, (lists.max_items,), q)(
        *tensors,
        lists.queries, lists.offsets, lists.item_block, lists.totals, lists.counts, lists.item_first, blocks.starts,
        q.stride(0), *k.stride()[:3], *v.stride()[:3], lists.chunk, k.shape[1], k.shape[2], lists.count,
        blocks.q_offset, scale,
        STRIDE_QS=q.stride(1), STRIDE_QH=q.stride(2), PER_GROUP=q.shape[2] // k.shape[2], ROWS=params.rows,
        KEYS=max(16, power_of_2(blocks.size)), WIDE=extent(q) >= 1 << 31, SEL=blocks.size, DK=q.shape[3],
        DV=v.shape[3], BLOCK_DK=power_of_2(q.shape[3]), BLOCK_DV=power_of_2(v.shape[3]), PACKED=blocks.packed,
        num_warps=params.num_warps, num_stages=params.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunk", "tokens", "groups", "blocks", "q_offset"])
def _attend_block_kernel(
    q_ptr, k_ptr, v_ptr,
    parts_ptr, lse_parts_ptr,  # [entries, h, DV]; [entries, h], base 2
    queries_ptr, offsets_ptr, item_block_ptr, totals_ptr, counts_ptr, item_first_ptr, starts_ptr,
    stride_qb, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg, chunk, tokens, groups, blocks,
    q_offset,
    scale,  # Dk ** -0.5 * log2(e)
    STRIDE_QS: tl.constexpr, STRIDE_QH: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDE: tl.constexpr, SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    if item >= tl.load(totals_ptr):
        return
    cell = tl.load(item_block_ptr + item)
    count = tl.load(counts_ptr + cell)
    first = (item - tl.load(item_first_ptr + cell)) * chunk  # of the list's queries
    if count == 0:
        return
    pair, start, end = block_place(cell, 0, 0, blocks, tokens, starts_ptr, SEL, PACKED)
    batch, group = pair // groups, pair % groups
    last = tl.minimum(count, first + chunk)
    offset = tl.load(offsets_ptr + cell) + first

    k_base = k_ptr + batch * stride_kb + group * stride_kg
    v_base = v_ptr + batch * stride_vb + group * stride_vg
    _, key, key_ok, k, v = load_block(
        k_base, v_base, stride_ks, stride_vs, start, end, 0, SEL, KEYS, DK, DV, BLOCK_DK, BLOCK_DV
    )

    q_base = q_ptr + batch * stride_qb + (group * PER_GROUP) * STRIDE_QH
    parts = parts_ptr + offset * (PER_GROUP * DV)
    lse_parts = lse_parts_ptr + offset * PER_GROUP
    # Lists ascend, so the queries inside the block, at most SEL, come first: only they need the causal mask.
    split = count_steps(tl.maximum(tl.minimum(last, SEL) - first, 0), PER_GROUP, ROWS)
    steps = count_steps(last - first, PER_GROUP, ROWS)
    _attend_rows(
        q_base, k, v, key - q_offset, key_ok, queries_ptr + offset, 0, split, last - first, parts, lse_parts, scale,
        STRIDE_QS, STRIDE_QH, PER_GROUP, ROWS, WIDE, DK, DV, BLOCK_DK, BLOCK_DV, SEL != KEYS, True,
    )  # fmt: skip
    _attend_rows(
        q_base, k, v, key - q_offset, key_ok, queries_ptr + offset, split, steps, last - first, parts, lse_parts,
        scale, STRIDE_QS, STRIDE_QH, PER_GROUP, ROWS, WIDE, DK, DV, BLOCK_DK, BLOCK_DV, SEL != KEYS, False,
    )  # fmt: skip


@triton.jit
def _attend_rows(
    q_base, k, v, key, key_ok, queries, begin, end, num_queries, parts, lse_parts, scale, STRIDE_QS: tl.constexpr,
    STRIDE_QH: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Steps [begin, end) of ROWS rows each."""
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    # Rows that do not exist repeat another and are not stored. Queries are prefetched a step ahead, since the gathers
    # depend on them.
    at = rows_of_step(begin, num_queries, PER_GROUP, ROWS)[0]
    t_next = tl.load(queries + at)
    for step in range(begin, end):
        t = t_next
        at = rows_of_step(step + 1, num_queries, PER_GROUP, ROWS)[0]
        t_next = tl.load(queries + at)
        at, head, there = rows_of_step(step, num_queries, PER_GROUP, ROWS)
        t_wide = t.to(tl.int64) if WIDE else t
        q_offs = t_wide * STRIDE_QS + head * STRIDE_QH
        q = load_tile(q_base + q_offs[:, None] + dk[None, :], there, dk, DK, BLOCK_DK, False)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        if MASKED:
            s = tl.where(key_ok[None, :] & (key[None, :] <= t[:, None]), s, -float("inf"))
        elif PADDED:
            s = tl.where(key_ok[None, :], s, -float("inf"))
        top = tl.max(s, 1) * scale
        p = tl.exp2(s * scale - top[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
        row = at * PER_GROUP + head
        out = row[:, None] * DV + dv[None, :]
        if DV == BLOCK_DV:
            tl.store(parts + out, o.to(parts.dtype.element_ty), mask=there[:, None])
        else:
            tl.store(parts + out, o.to(parts.dtype.element_ty), mask=there[:, None] & (dv < DV)[None, :])
        tl.store(lse_parts + row, top + tl.log2(total), mask=there)


@triton.jit(do_not_specialize=["first", "queries", "tokens", "groups", "tiles"])
def _merge_kernel(
    parts_ptr, lse_parts_ptr, positions_ptr, take_ptr,  # positions [P, queries, CHOSEN]; take [P, tiles]
    o_ptr, lse_ptr,  # [B, S, H, DV]; [B, S, H]
    first, queries, tokens, groups, tiles, CHOSEN: tl.constexpr, PADDED: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of ROWS rows (queries x heads of a pair)."""
    per_pair = tl.cdiv(queries * PER_GROUP, ROWS)
    pair = (tl.program_id(0) // per_pair).to(tl.int64)
    row = (tl.program_id(0) % per_pair) * ROWS + tl.arange(0, ROWS)
    t, head = row // PER_GROUP, row % PER_GROUP
    todo = t < queries
    todo = todo & (tl.load(take_ptr + pair * tiles + (first + t) // TILE, mask=todo, other=1) == 0)
    if tl.max(todo.to(tl.int32), axis=0) == 0:
        return
    positions = positions_ptr + (pair * queries + t) * CHOSEN  # [ROWS]
    place = tl.arange(0, PADDED)
    place_ok = todo[:, None] & (place < CHOSEN)[None, :]
    position = tl.load(positions[:, None] + place[None, :], mask=place_ok, other=-1)  # [ROWS, PADDED]
    part = position.to(tl.int64) * PER_GROUP + head[:, None]
    lse = tl.load(lse_parts_ptr + part, mask=position >= 0, other=-float("inf"))
    top = tl.max(lse, axis=1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[:, None]), axis=1)
    # A row that reads nothing gives 0 and -inf.
    lse_all = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i in tl.range(CHOSEN, loop_unroll_factor=4):
        position_i = tl.load(positions + i, mask=todo, other=-1)
        there = position_i >= 0
        part_i = position_i.to(tl.int64) * PER_GROUP + head
        weight = tl.exp2(tl.load(lse_parts_ptr + part_i, mask=there, other=-float("inf")) - lse_all)
        x = load_tile(parts_ptr + part_i[:, None] * DV + dv[None, :], there, dv, DV, BLOCK_DV, True)
        acc += weight[:, None] * x.to(tl.float32)
    out = ((pair // groups) * tokens + first + t) * (groups * PER_GROUP) + (pair % groups) * PER_GROUP + head
    store_rows(o_ptr, out, acc, todo, DV, BLOCK_DV)
    tl.store(lse_ptr + out, tl.where(total > 0, lse_all, -float("inf")) * 0.6931471805599453, mask=todo)
