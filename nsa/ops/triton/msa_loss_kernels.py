"""The kernels of `msa_loss.py`. Logarithms are in base 2 except for the attention's log-sum-exp and the loss itself.

Legend: B batch, S queries, N keys, G groups, h heads per group, n blocks per query, E index head size, P = B*G.
"""

import triton
import triton.language as tl

from nsa.ops.triton.flash_kernels import load_tile, store_rows
from nsa.ops.triton.selected_lists import block_place

_SIZES = ["chunk", "tokens", "groups", "blocks", "q_offset", "queries"]


@triton.jit
def _item_list(item, cell, chunk, queries_ptr, offsets_ptr, counts_ptr, item_first_ptr):
    """Of a work item: its place in the list of entries (int64), its queries, and how many these are."""
    first = (item - tl.load(item_first_ptr + cell)) * chunk
    place = tl.load(offsets_ptr + cell) + first
    return place, queries_ptr + place, tl.minimum(tl.load(counts_ptr + cell) - first, chunk)


@triton.jit(do_not_specialize=_SIZES)
def index_lse_kernel(
    index_q_ptr, index_k_ptr, parts_ptr,  # parts [entries, PIECES]
    queries_ptr, offsets_ptr, item_block_ptr, totals_ptr, counts_ptr, item_first_ptr, starts_ptr,
    stride_ib, stride_ig, stride_jb, stride_js, chunk, tokens, groups, blocks, q_offset,
    index_scale,  # E ** -0.5 * log2(e)
    STRIDE_I: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, SEL: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of a query's index scores over those of KEYS tokens of one block that it sees."""
    PIECES: tl.constexpr = SEL // KEYS
    item, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    if item >= tl.load(totals_ptr):
        return
    cell = tl.load(item_block_ptr + item)
    pair, start, end = block_place(cell, 0, 0, blocks, tokens, starts_ptr, SEL, PACKED)
    batch, group = pair // groups, pair % groups
    place, queries, count = _item_list(item, cell, chunk, queries_ptr, offsets_ptr, counts_ptr, item_first_ptr)
    if count <= 0:
        return
    e = tl.arange(0, BLOCK_E)
    key = start + piece * KEYS + tl.arange(0, KEYS)
    key_ok = key < end
    k_rows = index_k_ptr + batch * stride_jb + key.to(tl.int64) * stride_js
    k = load_tile(k_rows[:, None] + e[None, :], key_ok, e, E, BLOCK_E, True)
    q_base = index_q_ptr + batch * stride_ib + group * stride_ig
    for step in range(tl.cdiv(count, ROWS)):
        at = step * ROWS + tl.arange(0, ROWS)
        t = tl.load(queries + tl.minimum(at, count - 1))
        t_wide = t.to(tl.int64) if WIDE else t
        q = load_tile(q_base + (t_wide * STRIDE_I)[:, None] + e[None, :], at >= 0, e, E, BLOCK_E, False)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * index_scale  # [ROWS, KEYS]
        s = tl.where(key_ok[None, :] & (key[None, :] <= (t + q_offset)[:, None]), s, -float("inf"))
        top = tl.max(s, 1)
        if PIECES > 1:
            top = tl.where(top == -float("inf"), 0.0, top)  # sees nothing of them
        total = tl.sum(tl.exp2(s - top[:, None]), 1)
        tl.store(parts_ptr + (place + at) * PIECES + piece, top + tl.log2(total), mask=at < count)


@triton.jit(do_not_specialize=["rows"])
def merge_lse_kernel(
    parts_ptr, positions_ptr, lse_ptr,  # [entries, PIECES]; [P, S, n]; [P, S]
    rows, chosen, PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    column = tl.arange(0, WIDTH)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(0, chosen * PIECES, WIDTH):
        there = ok[:, None] & (i + column < chosen * PIECES)[None, :]
        place = row.to(tl.int64)[:, None] * chosen + (i + column)[None, :] // PIECES
        position = tl.load(positions_ptr + place, mask=there, other=-1).to(tl.int64)
        at = position * PIECES + (i + column)[None, :] % PIECES
        part = tl.load(parts_ptr + at, mask=position >= 0, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(part, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(part - base[:, None]), 1)
        top = new_top
    tl.store(lse_ptr + row, top + tl.log2(total), mask=ok)


@triton.jit(do_not_specialize=_SIZES)
def loss_kernel(
    q_ptr, k_ptr, index_q_ptr, index_k_ptr, lse_ptr,  # lse [B, S, H], base 2, plus log2(PER_GROUP)
    index_lse_ptr, kl_ptr,  # [P, S]; [programs]
    d_q_parts_ptr, d_k_parts_ptr,  # [entries, PIECES, E]; [items, SEL, E]: both without the scale, when GRADS
    queries_ptr, offsets_ptr, item_block_ptr, totals_ptr, counts_ptr, item_first_ptr, starts_ptr,
    stride_qb, stride_kb, stride_ks, stride_kg, stride_ib, stride_ig, stride_jb, stride_js, stride_lb,
    chunk, tokens, groups, blocks, q_offset, queries,
    scale, index_scale,  # Dk ** -0.5 * log2(e); E ** -0.5 * log2(e)
    STRIDE_QS: tl.constexpr, STRIDE_QH: tl.constexpr, STRIDE_I: tl.constexpr, HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, WIDE: tl.constexpr, GRADS: tl.constexpr, STAGES: tl.constexpr,
    HOPPER: tl.constexpr, INTERPRETED: tl.constexpr, SEL: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One program: KEYS keys of one block against the queries of a work item."""
    PIECES: tl.constexpr = SEL // KEYS
    program = tl.program_id(0)
    item, piece = program // PIECES, program % PIECES
    if item >= tl.load(totals_ptr):
        return
    cell = tl.load(item_block_ptr + item)
    pair, start, end = block_place(cell, 0, 0, blocks, tokens, starts_ptr, SEL, PACKED)
    batch, group = pair // groups, pair % groups
    place, listed, count = _item_list(item, cell, chunk, queries_ptr, offsets_ptr, counts_ptr, item_first_ptr)
    if count <= 0:
        return
    d, e, col = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_E), piece * KEYS + tl.arange(0, KEYS)
    key = start + col
    key_ok = key < end
    key64 = key.to(tl.int64)
    k_rows = k_ptr + batch * stride_kb + group * stride_kg + key64 * stride_ks
    k = load_tile(k_rows[:, None] + d[None, :], key_ok, d, DK, BLOCK_DK, True)
    index_k_rows = index_k_ptr + batch * stride_jb + key64 * stride_js
    index_k = load_tile(index_k_rows[:, None] + e[None, :], key_ok, e, E, BLOCK_E, True)
    since = tl.where(key_ok, key - q_offset, 0x7FFFFFFF)  # the first query that sees a key

    q_base = q_ptr + batch * stride_qb + (group * PER_GROUP) * STRIDE_QH
    lse_base = lse_ptr + batch * stride_lb + group * PER_GROUP
    index_q_base = index_q_ptr + batch * stride_ib + group * stride_ig
    index_lse_base = index_lse_ptr + pair * queries
    d_q_parts = d_q_parts_ptr + (place * PIECES + piece) * E
    # Lists ascend, so the queries inside the block, at most SEL, come first: only they need the causal mask. Their
    # steps and an incomplete last step form the masked loop; in the other loop all rows exist and see all keys.
    inside = tl.minimum(SEL - (item - tl.load(item_first_ptr + cell)) * chunk, count)
    split = tl.cdiv(tl.maximum(inside, 0), ROWS)
    full = tl.maximum(count // ROWS, split)
    kl = tl.zeros([KEYS, 8], tl.float32)
    d_k = tl.zeros([KEYS, BLOCK_E], tl.float32)
    for masked in tl.static_range(2):
        begin, stop = split, full
        if masked:
            begin, stop = 0, split + (full * ROWS < count).to(tl.int32)
        kl, d_k = _loss_rows(
            kl, d_k, k, index_k, since, listed, begin, stop, split, full, count, q_base, lse_base, index_q_base,
            index_lse_base, d_q_parts, scale, index_scale, STRIDE_QS, STRIDE_QH, STRIDE_I, HEADS, PER_GROUP, AT_ONCE,
            ROWS, KEYS, DK, BLOCK_DK, E, BLOCK_E, PIECES, WIDE, GRADS, STAGES, HOPPER, INTERPRETED, masked,
        )  # fmt: skip
    tl.store(kl_ptr + program, tl.sum(tl.sum(kl, 1), 0) * 0.6931471805599453)
    if GRADS:
        store_rows(d_k_parts_ptr, item.to(tl.int64) * SEL + col, d_k, key_ok, E, BLOCK_E)


@triton.jit
def _loss_rows(
    kl, d_k,  # [KEYS, 8]; [KEYS, BLOCK_E]
    k, index_k, since, listed, begin, stop, split, full, count, q_base, lse_base, index_q_base, index_lse_base,
    d_q_parts, scale, index_scale, STRIDE_QS: tl.constexpr, STRIDE_QH: tl.constexpr, STRIDE_I: tl.constexpr,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, PIECES: tl.constexpr,
    WIDE: tl.constexpr, GRADS: tl.constexpr, STAGES: tl.constexpr, HOPPER: tl.constexpr, INTERPRETED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Steps [begin, stop) of ROWS queries each; with MASKED, `full` comes after `split` - 1. One loop over steps and
    the heads of a group, AT_ONCE in a turn, pipelines the loads across both; the mean over heads is a sum inside every
    thread. Scores are transposed, [keys, queries]: their gradients are then the first operand of the product that
    accumulates."""
    TURNS: tl.constexpr = PER_GROUP // AT_ONCE
    d, e, row = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    # Queries are prefetched a turn ahead, since the gathers depend on them. Rows that do not exist repeat the last.
    ahead = begin
    if MASKED:
        ahead = tl.where(begin < split, begin, full)
    t_next = tl.load(listed + tl.minimum(ahead * ROWS + row, count - 1))
    p = tl.zeros([KEYS, ROWS], tl.float32)
    # Only with a number of stages of its own does the loop pipeline the loads that are not operands of a product.
    for i in tl.range(begin * TURNS, stop * TURNS, num_stages=STAGES):
        t, step, ahead, is_last = t_next, i // TURNS, (i + 1) // TURNS, i % TURNS == TURNS - 1
        if MASKED:
            step, ahead = tl.where(step < split, step, full), tl.where(ahead < split, ahead, full)
        t_next = tl.load(listed + tl.minimum(ahead * ROWS + row, count - 1))
        t_wide = t.to(tl.int64) if WIDE else t
        index_q_offs = (t_wide * STRIDE_I)[:, None] + e[None, :]
        index_q = load_tile(index_q_base + index_q_offs, is_last & (row >= 0), e, E, BLOCK_E, TURNS > 1)
        index_lse = tl.load(index_lse_base + t, mask=is_last)
        q_offs = (t_wide * STRIDE_QS)[:, None] + d[None, :]
        for number in tl.static_range(AT_ONCE):
            head = i % TURNS * AT_ONCE + number
            q = load_tile(q_base + head * STRIDE_QH + q_offs, row >= 0, d, DK, BLOCK_DK, False)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS, ROWS]
            p += tl.exp2(s * scale - tl.load(lse_base + head + t_wide * HEADS)[None, :])
        if is_last:
            log_r = tl.dot(index_k, tl.trans(index_q), input_precision="ieee") * index_scale - index_lse[None, :]
            at = step * ROWS + row
            there = at >= 0
            if MASKED:
                there = at < count
                seen = since[:, None] <= tl.where(there, t, -(1 << 31))[None, :]
                p = tl.where(seen, p, 0.0)
            term = p * (_log2(tl.maximum(p, 1e-37), INTERPRETED) - log_r)
            kl += tl.sum(tl.reshape(term, [KEYS, ROWS // 8, 8]), 1)  # inside every thread
            if GRADS:
                ds = tl.exp2(log_r) - p
                if MASKED:
                    ds = tl.where(seen, ds, 0.0)
                ds = ds.to(index_q.dtype)
                d_k = tl.dot(ds, index_q, d_k, input_precision="ieee")
                if HOPPER:  # whose instruction needs at least 64 rows
                    d_q = tl.trans(tl.dot(tl.trans(index_k), ds, input_precision="ieee"))
                else:
                    d_q = tl.dot(tl.trans(ds), index_k, input_precision="ieee")
                store_rows(d_q_parts, at * PIECES, d_q, there, E, BLOCK_E)
            p = tl.zeros([KEYS, ROWS], tl.float32)
    return kl, d_k


@triton.jit
def _log2(x, INTERPRETED: tl.constexpr):
    """In one instruction, with a relative error of 2^-22; `tl.log2` takes sixteen."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit(do_not_specialize=["rows", "queries", "groups"])
def merge_grads_kernel(
    parts_ptr, positions_ptr, out_ptr,  # [entries, PIECES, E]; [P, S, n]; [B, S, G, E]
    batch_rows, rows, queries, groups, chosen, scale, PIECES: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of the index queries: the sum of the parts of every row (pair, query)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = row < rows
    e = tl.arange(0, BLOCK_E)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for i in range(chosen):
        position = tl.load(positions_ptr + row * chosen + i, mask=ok, other=-1).to(tl.int64)
        for piece in tl.static_range(PIECES):
            part = (position * PIECES + piece) * E
            acc += load_tile(parts_ptr + part[:, None] + e[None, :], position >= 0, e, E, BLOCK_E, True).to(tl.float32)
    pair, t = row // queries, row % queries
    store_rows(out_ptr, pair // groups * batch_rows + t * groups + pair % groups, acc * scale, ok, E, BLOCK_E)


@triton.jit(do_not_specialize=_SIZES)
def sum_keys_kernel(
    parts_ptr, out_ptr,  # [items, SEL, E]; [B, N, E] float32
    counts_ptr, item_first_ptr, starts_ptr, chunk, tokens, groups, blocks, scale, KEYS: tl.constexpr,
    SEL: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of some index keys of a block: the sum over groups and the items of their lists, in order."""
    PIECES: tl.constexpr = SEL // KEYS
    block = tl.program_id(0) // PIECES % blocks
    batch = (tl.program_id(0) // PIECES // blocks).to(tl.int64)
    _, start, end = block_place(block, 0, 0, blocks, tokens, starts_ptr, SEL, PACKED)
    col = (tl.program_id(0) % PIECES) * KEYS + tl.arange(0, KEYS)
    key_ok = start + col < end
    e = tl.arange(0, BLOCK_E)
    acc = tl.zeros([KEYS, BLOCK_E], tl.float32)
    for group in range(groups):
        cell = (batch * groups + group) * blocks + block
        first = tl.load(item_first_ptr + cell).to(tl.int64)
        for item in range(tl.cdiv(tl.load(counts_ptr + cell), chunk)):
            row = (first + item) * SEL + col
            acc += load_tile(parts_ptr + row[:, None] * E + e[None, :], key_ok, e, E, BLOCK_E, True)
    row = batch * tokens + start + col
    out = out_ptr + row[:, None] * E + e[None, :]
    acc = acc * scale + load_tile(out, key_ok, e, E, BLOCK_E, True)
    store_rows(out_ptr, row, acc, key_ok, E, BLOCK_E)
