"""The query-major gradient of the queries, with the tiles and lists of the forward pass; deterministic.

Also writes delta = rowsum(do * o), which it needs first and the block-major kernel needs next.
"""

import triton
import triton.language as tl

from nsa.ops.triton.flash_kernels import load_tile, store_rows
from nsa.ops.triton.selected_tiles import KEY_MASK, decode_tile, loop_bounds, mask_scores


@triton.jit(do_not_specialize=["tokens", "q_offset", "groups", "tiles", "capacity", "large_tiles"])
def query_grads_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr,
    lse_ptr, delta_ptr, dq_ptr,  # [B, S, H]; written here; [B, S, H, DK] contiguous
    entries_ptr, counts_ptr, take_ptr,  # [P, tiles, capacity]; [P, tiles, 3]; [P, large_tiles]
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kg, stride_vb, stride_vg, stride_ob, stride_os,
    stride_oh, stride_db, stride_ds, stride_dh, tokens, q_offset, groups, tiles, capacity, large_tiles, scale,
    PER_GROUP: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SEL: tl.constexpr, STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, WANTED: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """dQ over the same tiles and lists as the forward kernel; also writes delta."""
    pair, tile, slot, t, head, row_ok = decode_tile(tokens, tiles, PER_GROUP, QUERIES, HEADS, HEAD_TILES, ROWS)
    if WANTED >= 0:
        if tl.load(take_ptr + pair * large_tiles + tile // SUB) != WANTED:
            return
    batch, group = pair // groups, pair % groups
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    query_head = group * PER_GROUP + head
    t64 = t.to(tl.int64)
    q_rows = q_ptr + batch * stride_qb + t64 * stride_qs + query_head * stride_qh
    o_rows = o_ptr + batch * stride_ob + t64 * stride_os + query_head * stride_oh
    do_rows = do_ptr + batch * stride_db + t64 * stride_ds + query_head * stride_dh
    q = load_tile(q_rows[:, None] + dk[None, :], row_ok, dk, DK, BLOCK_DK, True)
    do = load_tile(do_rows[:, None] + dv[None, :], row_ok, dv, DV, BLOCK_DV, True)
    o = load_tile(o_rows[:, None] + dv[None, :], row_ok, dv, DV, BLOCK_DV, True)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    out = (batch * tokens + t) * (groups * PER_GROUP) + query_head
    tl.store(delta_ptr + out, delta, mask=row_ok)
    lse = tl.load(lse_ptr + out, mask=row_ok, other=0.0) * 1.4426950408889634
    lse = tl.where(lse == -float("inf"), float("inf"), lse)  # a row that reads nothing

    k_base = k_ptr + batch * stride_kb + group * stride_kg
    v_base = v_ptr + batch * stride_vb + group * stride_vg
    keys = q_offset + tl.minimum(tokens, tile * QUERIES + QUERIES)  # as in the forward kernel
    here = pair * tiles + tile
    entries = entries_ptr + here * capacity
    dq = tl.zeros([ROWS, BLOCK_DK], tl.float32)
    for mode in tl.static_range(3):
        begin, end = loop_bounds(mode, counts_ptr + here * 3)
        dq = _query_grads_entries(
            dq, q, do, lse, delta, q_offset + t, slot, entries, begin, end, k_base, v_base, keys, scale, STRIDE_KS,
            STRIDE_VS, DK, DV, BLOCK_DK, BLOCK_DV, SEL, KEYS, mode,
        )  # fmt: skip
    store_rows(dq_ptr, out, dq * scale, row_ok, DK, BLOCK_DK)


@triton.jit
def _query_grads_entries(
    dq,  # [ROWS, BLOCK_DK]
    q, do,
    lse, delta,  # [ROWS], base 2; [ROWS]
    t, slot, entries, begin, end, k_base, v_base, tokens, scale, STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, SEL: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dQ over entries [begin, end); MASK as in the forward kernel."""
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
        v = load_tile(v_base + first.to(tl.int64) * STRIDE_VS + v_offs, readable, dv, DV, BLOCK_DV, CHECKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        if PADDED:
            s = tl.where((col < SEL - shift)[None, :], s, -float("inf"))
        s = mask_scores(s, entry, slot, first + col, t, MASK)
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq
