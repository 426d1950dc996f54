"""Gradients of selected attention.

dK and dV are computed block by block: a program holds one block of keys and values and gathers, tile by tile,
the rows (queries x heads) that chose it. A long list is divided into work items whose partial sums are added in a
fixed order, so dK and dV are deterministic. dQ comes either from the same programs through float32 atomics
("fused": five products instead of seven, best for few heads per group, order of sums not fixed) or from a
query-major kernel ("separate": deterministic).

Legend: B batch, S tokens, H query heads, G key/value heads, h = H/G, Dk/Dv head sizes, P = B*G, J blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton import selected_lists, selected_tiles
from nsa.ops.triton.flash_kernels import load_tile, store_rows
from nsa.ops.triton.launch_table import (
    Launch,
    LaunchTable,
    card_of,
    cdiv,
    head_class,
    launch_on,
    launcher,
    power_of_2,
    unit_last,
)
from nsa.ops.triton.selected_lists import BlockLists, Blocks, block_place, number_blocks
from nsa.ops.triton.selected_query_grads import query_grads_kernel
from nsa.ops.triton.selected_tiles import TilePlan, choose_tiles, extent, keys_at_once, load_block

ITEMS_WANTED = 1536  # work items that keep every GPU busy to the end
FUSED_MAX_PER_GROUP, FUSED_MAX_HEAD = 7, 128  # beyond, atomics cost more and registers run out
WIDE = Launch(64, 128, 8, 2)  # instead of "block", for blocks of so many keys and heads of 65 to 128 channels on sm90

# "block" (dQ separate) and "block_fused": the gathered rows of a step x keys. "query_...": of a separate dQ.
LAUNCHES = LaunchTable({
    ("block_fused", "sm90"): {64: Launch(128, 64, 4, 2), 128: Launch(32, 64, 4, 2), 256: Launch(32, 64, 8, 2)},
    ("block_fused", "sm80"): {64: Launch(32, 64, 4, 3), 128: Launch(32, 64, 8, 2), 256: Launch(32, 32, 8, 2)},
    ("block_fused", "sm86"): {128: Launch(32, 64, 8, 2)},
    ("block_fused", "fp32"): {64: Launch(16, 32, 4, 1), 128: Launch(16, 16, 4, 1), 256: Launch(16, 16, 8, 1)},
    ("block", "sm90"): {64: Launch(128, 64, 4, 2), 128: Launch(32, 64, 4, 3), 256: Launch(32, 64, 8, 2)},
    ("block", "sm80"): {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 8, 2), 256: Launch(32, 64, 8, 2)},
    ("block", "sm86"): {256: Launch(32, 32, 8, 1)},
    ("block", "fp32"): {128: Launch(16, 32, 4, 1), 256: Launch(16, 16, 8, 1)},
    ("query_small", "sm80"): {64: Launch(16, 64, 1, 3), 128: Launch(16, 32, 1, 3), 256: Launch(16, 32, 4, 2)},
    ("query_small", "fp32"): {128: Launch(16, 32, 4, 1), 256: Launch(16, 16, 8, 1)},
    ("query_large", "sm90"): {64: Launch(64, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(64, 64, 8, 2)},
    ("query_large", "sm80"): {128: Launch(64, 64, 4, 2), 256: Launch(64, 64, 8, 1)},
    ("query_large", "sm86"): {192: Launch(32, 32, 8, 1), 256: Launch(32, 32, 8, 1)},
    ("query_large", "fp32"): {128: Launch(16, 32, 4, 1), 256: Launch(16, 16, 8, 1)},
})  # fmt: skip


@dataclass(frozen=True)
class BackwardPlan:
    """dq is "fused" or "separate"; `block` is the block-major launch (rows = gathered rows per step), whose lists are
    divided into items of `chunk` queries; `query` are the query-major launches of a separate dQ."""

    dq: str
    block: Launch
    chunk: int
    query: TilePlan


def adds_dq(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dQ is "fused" for such tensors."""
    is_small = q.shape[2] // k.shape[2] <= FUSED_MAX_PER_GROUP and max(q.shape[3], v.shape[3]) <= FUSED_MAX_HEAD
    return is_small and not torch.are_deterministic_algorithms_enabled()


def default_params(q: Tensor, k: Tensor, v: Tensor, block: int, num_selected: int) -> BackwardPlan:
    """The checked-in launch parameters for such tensors."""
    fused = adds_dq(q, k, v)
    gathered = LAUNCHES.find("block_fused" if fused else "block", q, v)
    is_wide = block >= WIDE.columns and head_class(q.shape[3], v.shape[3]) == 128
    if is_wide and card_of(q).kind == "sm90" and q.element_size() == 2:
        gathered = WIDE
    # On average num_selected * block queries choose a block: lists up to twice that length are not divided, and their
    # results are written once. Short sequences need shorter items to occupy the GPU.
    items = q.shape[0] * q.shape[1] * k.shape[2] * num_selected // ITEMS_WANTED
    chunk = min(max(256, power_of_2(items)), max(256, 2 * num_selected * block))
    query = choose_tiles(q, k, v, block, num_selected, LAUNCHES, "query_")
    return BackwardPlan("fused" if fused else "separate", gathered, chunk, query)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, o: Tensor, lse: Tensor, block: int,
    cu_seqlens: Tensor | None, params: BackwardPlan | None = None, *, q_offset: int = 0, sums: Tensor | None = None,
    keep_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Shapes as in `selected.forward`; do and o [B,S,H,Dv] -> dq, dk, dv in the shapes of q, k, v. `sums` [B,S,H]
    float32: the row sums of do * o, if they are known. With `keep_float32`, a fused dQ is returned as it was added."""
    if q.numel() == 0:
        return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    do, q, k, v, o = (unit_last(x) for x in (do, q, k, v, o))
    # The gathers assume that the heads of a token are contiguous.
    q, do = (x if x.stride(2) == x.shape[3] else x.contiguous() for x in (q, do))
    lse = lse.contiguous()
    with launch_on(q):
        params = params or default_params(q, k, v, block, indices.shape[3])
        blocks = number_blocks(k.shape[1], block, cu_seqlens, q.device, q_offset)
        if params.dq == "fused":
            dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            if sums is None:
                sums = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
                _launch_sums(do, o, sums)
        else:
            dq, sums = q.new_empty(q.shape), torch.empty(lse.shape, dtype=torch.float32, device=q.device)
            tensors, strides = (q, k, v, o, do, lse, sums, dq), (*o.stride()[:3], *do.stride()[:3])
            for tile_pass in selected_tiles.plan_tiles(indices, blocks, q.shape[2] // k.shape[2], params.query):
                tile_pass.launch(query_grads_kernel, tensors, strides, q.shape[3] ** -0.5, block)
        pairs = k.shape[0] * k.shape[2]
        for turn in selected_lists.plan_turns(q.shape[1], blocks.count, pairs):
            lists = selected_lists.block_lists(indices, blocks, params.chunk, turn)
            _launch_block(lists, blocks, params, (q, k, v, do, lse, sums, dq, dk, dv))
    return dq if keep_float32 else dq.to(q.dtype), dk, dv


def _launch_sums(do: Tensor, o: Tensor, sums: Tensor) -> None:
    rows = sums.numel()
    launcher(_sums_kernel, (cdiv(rows, 32),), do)(
        do, o, sums, *do.stride()[:3], *o.stride()[:3], do.shape[1], do.shape[2], rows,
        D=do.shape[3], BLOCK_D=power_of_2(do.shape[3]), ROWS=32, num_warps=4,
    )  # fmt: skip


def _launch_block(lists: BlockLists, blocks: Blocks, params: BackwardPlan, tensors: tuple[Tensor, ...]) -> None:
    q, k, v, do, *_, dk, dv = tensors
    keys = keys_at_once(params.block, blocks.size)
    shape = {
        "SEL": blocks.size, "DK": q.shape[3], "DV": v.shape[3],
        "BLOCK_DK": power_of_2(q.shape[3]), "BLOCK_DV": power_of_2(v.shape[3]), "PACKED": blocks.packed,
    }  # fmt: skip
    dk_parts = torch.empty(lists.max_slots, blocks.size, q.shape[3], dtype=torch.float32, device=q.device)
    dv_parts = torch.empty(lists.max_slots, blocks.size, v.shape[3], dtype=torch.float32, device=q.device)
    places = (lists.counts, lists.item_first, lists.slot_first, blocks.starts)
    sizes = (lists.first_pair, lists.first_block, lists.chunk, k.shape[1], k.shape[2], lists.count)
    launcher(_block_grads_kernel, (lists.max_items * cdiv(blocks.size, keys),), q)(
        *tensors, dk_parts, dv_parts,
        lists.queries, lists.offsets, lists.item_block, lists.totals, *places,
        q.stride(0), *k.stride()[:3], *v.stride()[:3], do.stride(0), *sizes, blocks.q_offset, q.shape[3] ** -0.5,
        STRIDE_Q=q.stride(1), STRIDE_DO=do.stride(1), HEADS=q.shape[2], PER_GROUP=q.shape[2] // k.shape[2],
        ROWS=params.block.rows, KEYS=keys, FUSED=params.dq == "fused",
        WIDE=max(extent(q), extent(do), q[0].numel()) >= 1 << 31,
        **shape, num_warps=params.block.num_warps, num_stages=params.block.num_stages,
    )  # fmt: skip
    launcher(_sum_parts_kernel, (lists.pairs * lists.count * cdiv(blocks.size, 16),), q)(
        dk, dv, dk_parts, dv_parts, *places, *sizes, KEYS=16, **shape, num_warps=4
    )


@triton.jit(do_not_specialize=["tokens", "rows"])
def _sums_kernel(
    do_ptr, o_ptr,
    sums_ptr,  # [B, S, H]
    stride_db, stride_ds, stride_dh, stride_ob, stride_os, stride_oh, tokens, heads, rows, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of do * o over the channels of each head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    head, t, b = row % heads, (row // heads) % tokens, row // heads // tokens
    d = tl.arange(0, BLOCK_D)
    do_rows = do_ptr + b * stride_db + t * stride_ds + head * stride_dh
    o_rows = o_ptr + b * stride_ob + t * stride_os + head * stride_oh
    do = load_tile(do_rows[:, None] + d[None, :], ok, d, D, BLOCK_D, True)
    o = load_tile(o_rows[:, None] + d[None, :], ok, d, D, BLOCK_D, True)
    tl.store(sums_ptr + row, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1), mask=ok)


@triton.jit(do_not_specialize=["first_pair", "first_block", "chunk", "tokens", "groups", "blocks", "q_offset"])
def _block_grads_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    lse_ptr, delta_ptr, dq_ptr,  # [B, S, H]; [B, S, H]; [B, S, H, DK] float32, when FUSED
    dk_ptr, dv_ptr, dk_parts_ptr,  # [B, S, G, DK] contiguous; [B, S, G, DV] contiguous; [slots, SEL, DK] float32
    dv_parts_ptr,  # [slots, SEL, DV] float32
    queries_ptr, offsets_ptr, item_block_ptr, totals_ptr, counts_ptr, item_first_ptr, slot_first_ptr,
    starts_ptr, stride_qb, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg, stride_db,
    first_pair, first_block, chunk, tokens, groups, blocks, q_offset, scale, STRIDE_Q: tl.constexpr,
    STRIDE_DO: tl.constexpr,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FUSED: tl.constexpr,
    WIDE: tl.constexpr, SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (SEL + KEYS - 1) // KEYS
    item = tl.program_id(0) // PIECES
    shift = (tl.program_id(0) % PIECES) * KEYS
    if item >= tl.load(totals_ptr):
        return
    cell = tl.load(item_block_ptr + item)
    pair, start, end = block_place(cell, first_pair, first_block, blocks, tokens, starts_ptr, SEL, PACKED)
    batch, group = pair // groups, pair % groups
    part = item - tl.load(item_first_ptr + cell)
    slot_first = tl.load(slot_first_ptr + cell)
    first = part * chunk  # of the list's queries
    last = tl.minimum(tl.load(counts_ptr + cell), first + chunk)
    queries = queries_ptr + tl.load(offsets_ptr + cell) + first

    k_base = k_ptr + batch * stride_kb + group * stride_kg
    v_base = v_ptr + batch * stride_vb + group * stride_vg
    col, key, key_ok, k, v = load_block(
        k_base, v_base, stride_ks, stride_vs, start, end, shift, SEL, KEYS, DK, DV, BLOCK_DK, BLOCK_DV
    )

    q_base = q_ptr + batch * stride_qb + (group * PER_GROUP) * DK
    do_base = do_ptr + batch * stride_db + (group * PER_GROUP) * DV
    row_base = batch * (tokens - q_offset) * HEADS + group * PER_GROUP  # of the queries, the last of the tokens
    lse_base, delta_base, dq_base = lse_ptr + row_base, delta_ptr + row_base, dq_ptr + row_base * DK
    # Lists ascend, so the queries inside the block, at most SEL, come first: only they need the causal mask. Their
    # steps and an incomplete last step form the masked loop; in the other loop all rows exist.
    num_queries = last - first
    num_rows = num_queries * PER_GROUP
    split = tl.cdiv(tl.maximum(tl.minimum(last, SEL) - first, 0) * PER_GROUP, ROWS)
    full = tl.maximum(num_rows // ROWS, split)
    acc_dk = tl.zeros([KEYS, BLOCK_DK], tl.float32)
    acc_dv = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    for masked in tl.static_range(2):
        begin, end = split, full
        if masked:
            begin, end = 0, split + (full * ROWS < num_rows).to(tl.int32)
        acc_dk, acc_dv = _block_grads_rows(
            acc_dk, acc_dv, k, v, key - q_offset, key_ok, queries, begin, end, split, full, num_queries,
            q_base, do_base, lse_base, delta_base, dq_base, scale, STRIDE_Q, STRIDE_DO, HEADS, PER_GROUP, ROWS, FUSED,
            WIDE, DK, DV, BLOCK_DK, BLOCK_DV, SEL % KEYS != 0, masked,
        )  # fmt: skip
    if slot_first < 0:
        out = (batch * tokens + key) * groups + group
        store_rows(dk_ptr, out, acc_dk, key_ok, DK, BLOCK_DK)
        store_rows(dv_ptr, out, acc_dv, key_ok, DV, BLOCK_DV)
    else:
        out = (slot_first + part).to(tl.int64) * SEL + col
        store_rows(dk_parts_ptr, out, acc_dk, key_ok, DK, BLOCK_DK)
        store_rows(dv_parts_ptr, out, acc_dv, key_ok, DV, BLOCK_DV)


@triton.jit
def _block_grads_rows(
    acc_dk, acc_dv,  # [KEYS, BLOCK_DK]; [KEYS, BLOCK_DV]
    k, v, key, key_ok, queries, begin, end, split, full, num_queries, q_base, do_base, lse_base, delta_base, dq_base,
    scale, STRIDE_Q: tl.constexpr, STRIDE_DO: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr, FUSED: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Steps [begin, end) of ROWS rows each; with MASKED, `full` comes after `split` - 1. Scores are transposed,
    [keys, rows], so that they are first operands of both accumulating products."""
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    # Queries are prefetched a step ahead, since the gathers depend on them. Rows that do not exist repeat those of the
    # last query, with probability 0: no gather and no atomic needs a mask.
    ahead = begin
    if MASKED:
        ahead = tl.where(begin < split, begin, full)
    at = _places(ahead, PER_GROUP, ROWS)[0]
    t_next = tl.load(queries + tl.minimum(at, num_queries - 1), mask=num_queries > 0, other=0)
    for i in range(begin, end):
        t, step, ahead = t_next, i, i + 1
        if MASKED:
            step, ahead = tl.where(i < split, i, full), tl.where(i + 1 < split, i + 1, full)
        t_next = tl.load(queries + tl.minimum(_places(ahead, PER_GROUP, ROWS)[0], num_queries - 1))
        at, head = _places(step, PER_GROUP, ROWS)
        # Offsets inside one sequence, in 32 bits if they suffice.
        t_wide = t.to(tl.int64) if WIDE else t
        q_offs = t_wide * STRIDE_Q + head * DK
        do_offs = t_wide * STRIDE_DO + head * DV
        row = t_wide * HEADS + head
        q = load_tile(q_base + q_offs[:, None] + dk[None, :], at >= 0, dk, DK, BLOCK_DK, False)
        do = load_tile(do_base + do_offs[:, None] + dv[None, :], at >= 0, dv, DV, BLOCK_DV, False)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS, ROWS]
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        # Row constants are loaded where they are used: in the layout of a score tile they take many registers.
        lse = tl.load(lse_base + row) * 1.4426950408889634
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse[None, :])
        if MASKED:
            until = tl.where(at < num_queries, t, -(1 << 31))  # the last key that a row may see
            p = tl.where(key_ok[:, None] & (key[:, None] <= until[None, :]), p, 0.0)
        elif PADDED:
            p = tl.where(key_ok[:, None], p, 0.0)
        delta = tl.load(delta_base + row) * scale
        ds = p * (dp * scale - delta[None, :])
        acc_dv = tl.dot(p.to(do.dtype), do, acc_dv, input_precision="ieee")
        acc_dk = tl.dot(ds.to(q.dtype), q, acc_dk, input_precision="ieee")
        if FUSED:
            _add_dq(dq_base, k, ds, row, DK, BLOCK_DK)
    return acc_dk, acc_dv


@triton.jit
def _places(step, PER_GROUP: tl.constexpr, ROWS: tl.constexpr):
    """For the rows of a step, the place of the query in its list and the head."""
    row = tl.arange(0, ROWS)
    if ROWS % PER_GROUP == 0:  # no division in the loop
        return step * (ROWS // PER_GROUP) + row // PER_GROUP, row % PER_GROUP
    else:
        row += step * ROWS
        return row // PER_GROUP, row % PER_GROUP


@triton.jit
def _add_dq(dq_base, k, ds, row, DK: tl.constexpr, BLOCK_DK: tl.constexpr):
    """Adds to dQ. Also transposed, so that the result has at least the 64 rows that Hopper's instruction needs."""
    dk = tl.arange(0, BLOCK_DK)
    dq = tl.trans(tl.dot(tl.trans(k), ds.to(k.dtype), input_precision="ieee"))
    dq_ptrs = dq_base + row[:, None] * DK + dk[None, :]
    if DK == BLOCK_DK:
        tl.atomic_add(dq_ptrs, dq, sem="relaxed")
    else:
        tl.atomic_add(dq_ptrs, dq, mask=(dk < DK)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["first_pair", "first_block", "chunk", "tokens", "groups", "blocks"])
def _sum_parts_kernel(
    dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, counts_ptr, item_first_ptr, slot_first_ptr, starts_ptr,
    first_pair, first_block, chunk, tokens, groups, blocks, KEYS: tl.constexpr, SEL: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds, in order, the partial results of the blocks whose lists were divided."""
    PIECES: tl.constexpr = (SEL + KEYS - 1) // KEYS
    cell = tl.program_id(0) // PIECES
    slot_first = tl.load(slot_first_ptr + cell)
    if slot_first < 0:
        return
    pair, start, end = block_place(cell, first_pair, first_block, blocks, tokens, starts_ptr, SEL, PACKED)
    col = (tl.program_id(0) % PIECES) * KEYS + tl.arange(0, KEYS)
    key_ok = (col < SEL) & (start + col < end)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    sum_dk = tl.zeros([KEYS, BLOCK_DK], tl.float32)
    sum_dv = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    parts = tl.cdiv(tl.load(counts_ptr + cell), chunk)
    for part in range(parts):
        at = (slot_first + part).to(tl.int64) * SEL + col
        sum_dk += load_tile(dk_parts_ptr + at[:, None] * DK + dk[None, :], key_ok, dk, DK, BLOCK_DK, True)
        sum_dv += load_tile(dv_parts_ptr + at[:, None] * DV + dv[None, :], key_ok, dv, DV, BLOCK_DV, True)
    out = ((pair // groups) * tokens + start + col) * groups + pair % groups
    store_rows(dk_ptr, out, sum_dk, key_ok, DK, BLOCK_DK)
    store_rows(dv_ptr, out, sum_dv, key_ok, DV, BLOCK_DV)
