"""The kernels of `flash.py`: attention in which every query sees one interval of keys, forward and backward.

The rows of a tile are queries x heads of one group, so that all of them read the same keys. Every sum has a fixed
order: results are the same from run to run.

Legend: B batch, S tokens, N keys, G key/value heads, h query heads per group (PER_GROUP), H = G*h.
A tile of forward and dQ has BLOCK_M rows = QUERIES x HEADS (row r: query r // HEADS, head r % HEADS; rows left over are
idle); HEADS < h only where a group has more heads than a tile has rows. A tile of dK and dV has any BLOCK_M consecutive
rows of a group (row r: query r // h, head r % h). DK, DV: head sizes, BLOCK_D* padded.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
# When a loop masks: in every tile, or only in tiles that some row does not see completely.
ALWAYS, EDGES = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def keys_seen(t, lo_ptr, hi_ptr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """lo(t), hi(t) of one query or of a vector of queries; without tables, padding (t = -1) sees no key."""
    if lo_ptr is not None:
        lo = tl.load(lo_ptr + t)
        hi = tl.load(hi_ptr + t)
    else:
        hi = (tl.maximum(t + 1 - SPAN, -STRIDE) + STRIDE) // STRIDE
        if WINDOW > 0:
            lo = tl.maximum(t + 1 - WINDOW, 0)
        else:
            lo = t * 0
    return lo, hi


@triton.jit
def seen_by(n, first_ptr, behind_ptr, S, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """The first query that sees key n, and one past the last."""
    if first_ptr is not None:
        first = tl.load(first_ptr + n)
        behind = tl.load(behind_ptr + n)
    else:
        first = n * STRIDE + (SPAN - 1)
        if WINDOW > 0:
            behind = tl.minimum(n + WINDOW, S)
        else:
            behind = n * 0 + S
    return first, behind


@triton.jit
def _tile_rows(
    tile, head_tile, S, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Query, head inside the group and liveness of each row. Idle rows repeat a live one, so that loads are safe."""
    r = tl.arange(0, BLOCK_M)
    t = tile * QUERIES + r // HEADS
    head = head_tile * HEADS + r % HEADS
    live = (r < QUERIES * HEADS) & (t < S) & (head < PER_GROUP)
    t = tl.minimum(tl.minimum(t, tile * QUERIES + QUERIES - 1), S - 1)
    return t, tl.minimum(head, PER_GROUP - 1), live


@triton.jit
def load_tile(ptrs, row_mask, d, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS_MASKED: tl.constexpr):
    """Loads a [rows, BLOCK_D] tile, 0 outside; masks only if a part can be outside."""
    if ROWS_MASKED and D != BLOCK_D:
        x = tl.load(ptrs, mask=row_mask[:, None] & (d < D)[None, :], other=0.0)
    elif ROWS_MASKED:
        x = tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif D != BLOCK_D:
        x = tl.load(ptrs, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def store_rows(ptr, row, x, row_mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores a [rows, BLOCK_D] tile into rows of D numbers."""
    d = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (d < D)[None, :]
    tl.store(ptr + row[:, None] * D + d[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    acc, peak, total, q, k_ptr, v_ptr, k_tma, v_tma, b, k_column, v_column, k_sn, v_sn, start, stop, lo, hi,
    full_lo, full_hi, scale, MASK: tl.constexpr, BLOCK_N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [BLOCK_M, BLOCK_DK] over keys start..stop; total and acc are sums of 2^(s - peak)."""
    n = tl.arange(0, BLOCK_N)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_offsets = n.to(tl.int64)[:, None] * k_sn + dk[None, :]
    v_offsets = n.to(tl.int64)[:, None] * v_sn + dv[None, :]
    zero = tl.zeros([], tl.int64)  # makes loop counters wide
    for n0 in tl.range(start, stop, BLOCK_N):
        key = n0 + n
        if k_tma is not None:
            k = k_tma.load([b, n0, k_column]).reshape(BLOCK_N, BLOCK_DK)
            v = v_tma.load([b, n0, v_column]).reshape(BLOCK_N, BLOCK_DV)
        else:
            k = load_tile(k_ptr + (zero + n0) * k_sn + k_offsets, key < stop, dk, DK, BLOCK_DK, True)
            v = load_tile(v_ptr + (zero + n0) * v_sn + v_offsets, key < stop, dv, DV, BLOCK_DV, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASK == ALWAYS:
            s = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), s, -INF)
        elif MASK == EDGES:
            if (n0 < full_lo) | (n0 + BLOCK_N > full_hi):
                s = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), s, -INF)
        peak_new = tl.maximum(peak, tl.max(s, 1) * scale)
        # For a row without any key so far, any finite maximum works: all its terms are 0.
        reference = tl.where(peak_new == -INF, 0.0, peak_new)
        p = tl.exp2(s * scale - reference[:, None])
        alpha = tl.exp2(peak - reference)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        peak = peak_new
    return acc, peak, total


@triton.jit(do_not_specialize=["S", "N", "G", "lanes", "tiles"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, lo_ptr, hi_ptr, k_tma, v_tma,
    q_sb, q_ss, q_sh, k_sb, k_sn, k_sg, v_sb, v_sn, v_sg,
    S, N, G, lanes, tiles, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PER_GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one group. If k_tma and v_tma [B, N, heads] are given, the tensor memory accelerator loads keys
    and values from them."""
    HEADS: tl.constexpr = PER_GROUP if PER_GROUP < BLOCK_M else BLOCK_M
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (PER_GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    tile = tiles - 1 - pid // lanes  # late queries see the most keys: start them first
    lane = pid % lanes
    b, g = (lane // HEAD_TILES // G).to(tl.int64), lane // HEAD_TILES % G
    t, head, live = _tile_rows(tile, lane % HEAD_TILES, S, PER_GROUP, HEADS, QUERIES, BLOCK_M)
    head = (g * PER_GROUP + head).to(tl.int64)
    last = tl.minimum(tile * QUERIES + QUERIES, S) - 1
    lo_min, hi_min = keys_seen(tile * QUERIES, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)
    lo_max, hi_max = keys_seen(last, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)
    lo, hi = keys_seen(t, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)

    dk = tl.arange(0, BLOCK_DK)
    q_rows = q_ptr + b * q_sb + t.to(tl.int64) * q_ss + head * q_sh
    q = load_tile(q_rows[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
    k_column, v_column = g.to(tl.int64) * k_sg, g.to(tl.int64) * v_sg
    k_ptr += b * k_sb + k_column
    v_ptr += b * v_sb + v_column
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    peak = tl.full([BLOCK_M], -INF, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scale *= LOG2E
    acc, peak, total = _attend(
        acc, peak, total, q, k_ptr, v_ptr, k_tma, v_tma, b.to(tl.int32), k_column.to(tl.int32),
        v_column.to(tl.int32), k_sn, v_sn, lo_min, hi_max, lo, hi, lo_max, hi_min, scale, MASK,
        BLOCK_N, DK, DV, BLOCK_DK, BLOCK_DV, PRECISION,
    )  # fmt: skip

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    o = acc / total[:, None]
    lse = tl.where(seen, (peak + tl.log2(total)) * LN2, -INF)
    row = (b * S + t) * (G * PER_GROUP) + head
    tl.store(lse_ptr + row, lse, mask=live)
    store_rows(o_ptr, row, o, live, DV, BLOCK_DV)


@triton.jit
def _pull(
    acc, q, do, lse, delta, k_ptr, v_ptr, k_tma, v_tma, b, k_column, v_column, k_sn, v_sn, start, stop, lo, hi,
    full_lo, full_hi, scale, MASK: tl.constexpr, BLOCK_N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc += dS @ K over keys start..stop, rows = queries."""
    n = tl.arange(0, BLOCK_N)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_offsets = n.to(tl.int64)[:, None] * k_sn + dk[None, :]
    v_offsets = n.to(tl.int64)[:, None] * v_sn + dv[None, :]
    zero = tl.zeros([], tl.int64)
    for n0 in tl.range(start, stop, BLOCK_N):
        key = n0 + n
        if k_tma is not None:
            k = k_tma.load([b, n0, k_column]).reshape(BLOCK_N, BLOCK_DK)
            v = v_tma.load([b, n0, v_column]).reshape(BLOCK_N, BLOCK_DV)
        else:
            k = load_tile(k_ptr + (zero + n0) * k_sn + k_offsets, key < stop, dk, DK, BLOCK_DK, True)
            v = load_tile(v_ptr + (zero + n0) * v_sn + v_offsets, key < stop, dv, DV, BLOCK_DV, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse[:, None])
        if MASK == ALWAYS:
            p = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), p, 0.0)
        elif MASK == EDGES:
            if (n0 < full_lo) | (n0 + BLOCK_N > full_hi):
                p = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), p, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["S", "N", "G", "lanes", "tiles"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dq_ptr, lse2_ptr, delta_ptr, q_rows_ptr, do_rows_ptr, lo_ptr, hi_ptr,
    sums_ptr, k_tma, v_tma,
    q_sb, q_ss, q_sh, k_sb, k_sn, k_sg, v_sb, v_sn, v_sg, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    S, N, G, lanes, tiles, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PER_GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile of one group. Also writes each row's sum of dO*O and its log-sum-exp in base 2 for dK and
    dV, as [B, G, S, h], and q and dO in the same order if requested. The log-sum-exp of a row that sees nothing is
    +inf, which makes all its probabilities 0. If the sums [B, S, H] are given, O is not read."""
    HEADS: tl.constexpr = PER_GROUP if PER_GROUP < BLOCK_M else BLOCK_M
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (PER_GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    tile = tiles - 1 - pid // lanes
    lane = pid % lanes
    b, g = (lane // HEAD_TILES // G).to(tl.int64), lane // HEAD_TILES % G
    t, head, live = _tile_rows(tile, lane % HEAD_TILES, S, PER_GROUP, HEADS, QUERIES, BLOCK_M)
    stat = ((b * G + g) * S + t) * PER_GROUP + head
    head = (g * PER_GROUP + head).to(tl.int64)
    last = tl.minimum(tile * QUERIES + QUERIES, S) - 1
    lo_min, hi_min = keys_seen(tile * QUERIES, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)
    lo_max, hi_max = keys_seen(last, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)
    lo, hi = keys_seen(t, lo_ptr, hi_ptr, SPAN, STRIDE, WINDOW)

    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    t = t.to(tl.int64)
    row = (b * S + t) * (G * PER_GROUP) + head
    do_rows = do_ptr + b * do_sb + t * do_ss + head * do_sh
    q_rows = q_ptr + b * q_sb + t * q_ss + head * q_sh
    do = load_tile(do_rows[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
    q = load_tile(q_rows[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
    if sums_ptr is not None:
        delta = tl.load(sums_ptr + row)
    else:
        o_rows = o_ptr + b * o_sb + t * o_ss + head * o_sh
        o = load_tile(o_rows[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(lse_ptr + row) * LOG2E
    lse = tl.where(lse == -INF, INF, lse)
    tl.store(delta_ptr + stat, delta, mask=live)
    tl.store(lse2_ptr + stat, lse, mask=live)
    if q_rows_ptr is not None:
        store_rows(q_rows_ptr, stat, q, live, DK, BLOCK_DK)
        store_rows(do_rows_ptr, stat, do, live, DV, BLOCK_DV)

    k_column, v_column = g.to(tl.int64) * k_sg, g.to(tl.int64) * v_sg
    k_ptr += b * k_sb + k_column
    v_ptr += b * v_sb + v_column
    acc = tl.zeros([BLOCK_M, BLOCK_DK], tl.float32)
    scale2 = scale * LOG2E
    acc = _pull(
        acc, q, do, lse, delta, k_ptr, v_ptr, k_tma, v_tma, b.to(tl.int32), k_column.to(tl.int32),
        v_column.to(tl.int32), k_sn, v_sn, lo_min, hi_max, lo, hi, lo_max, hi_min, scale2, MASK,
        BLOCK_N, DK, DV, BLOCK_DK, BLOCK_DV, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr, row, acc * scale, live, DK, BLOCK_DK)


@triton.jit
def _row_pointers(ptr, r0, s_token, s_head, PER_GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pointers to rows r0 .. r0 + BLOCK_M - 1 of a group: row r is query r // PER_GROUP, head r % PER_GROUP."""
    i = tl.arange(0, BLOCK_M)
    zero = tl.zeros([], tl.int64)
    if BLOCK_M % PER_GROUP == 0:  # every tile starts with a new query: no division in the loop over r0
        offsets = (i // PER_GROUP).to(tl.int64) * s_token + (i % PER_GROUP).to(tl.int64) * s_head
        rows = ptr + (zero + r0 // PER_GROUP) * s_token + offsets
    else:
        r = r0 + i
        rows = ptr + (r // PER_GROUP).to(tl.int64) * s_token + (r % PER_GROUP).to(tl.int64) * s_head
    return rows


@triton.jit
def _push(
    dk_acc, dv_acc, k, v, q_ptr, do_ptr, q_tma, do_tma, lse2_ptr, delta_ptr, lane, q_ss, q_sh, do_ss, do_sh,
    start, stop, first, behind, full_lo, full_hi, scale, MASK: tl.constexpr, PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV += P^T @ dO and dK += dS^T @ Q over rows start..stop of a lane, with keys as rows: no result is transposed.
    Rows from `stop` on have a log-sum-exp of +inf, so their probabilities are 0 without a mask."""
    i = tl.arange(0, BLOCK_M)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    zero = tl.zeros([], tl.int64)
    for r0 in tl.range(start, stop, BLOCK_M):
        r = r0 + i
        if q_tma is not None:
            q = q_tma.load([lane, r0, 0]).reshape(BLOCK_M, BLOCK_DK)
            do = do_tma.load([lane, r0, 0]).reshape(BLOCK_M, BLOCK_DV)
        else:
            q_rows = _row_pointers(q_ptr, r0, q_ss, q_sh, PER_GROUP, BLOCK_M)
            do_rows = _row_pointers(do_ptr, r0, do_ss, do_sh, PER_GROUP, BLOCK_M)
            q = load_tile(q_rows[:, None] + dk[None, :], r < stop, dk, DK, BLOCK_DK, True)
            do = load_tile(do_rows[:, None] + dv[None, :], r < stop, dv, DV, BLOCK_DV, True)
        lse = tl.load(lse2_ptr + (zero + r0) + i, mask=r < stop, other=INF)
        delta = tl.load(delta_ptr + (zero + r0) + i, mask=r < stop, other=0.0)
        # With the TMA, accumulators start from -lse and -delta, which then need no other registers: more programs fit a
        # multiprocessor. These hide that Triton prefetches only the operands of a product.
        if q_tma is not None:
            s = tl.broadcast_to((lse / -scale)[None, :], [BLOCK_N, BLOCK_M])
            s = tl.dot(k, tl.trans(q), s, input_precision=PRECISION)
            p = tl.exp2(s * scale)
        else:
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            p = tl.exp2(s * scale - lse[None, :])
        if MASK == ALWAYS:
            p = tl.where((r[None, :] >= first[:, None]) & (r[None, :] < behind[:, None]), p, 0.0)
        elif MASK == EDGES:
            if (r0 < full_lo) | (r0 + BLOCK_M > full_hi):
                p = tl.where((r[None, :] >= first[:, None]) & (r[None, :] < behind[:, None]), p, 0.0)
        dv_acc = tl.dot(p.to(do.dtype), do, dv_acc, input_precision=PRECISION)
        if q_tma is not None:
            dp = tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M])
            dp = tl.dot(v, tl.trans(do), dp, input_precision=PRECISION)
        else:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :]
        dk_acc = tl.dot((p * dp).to(q.dtype), q, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["S", "N", "G", "lanes", "splits", "first_key", "part_keys"])
def dkv_kernel(
    q_tma, k_ptr, v_ptr, do_tma, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, first_ptr, behind_ptr,
    k_sb, k_sn, k_sg, v_sb, v_sn, v_sg, S, N, G, lanes, splits, first_key, part_keys, scale,
    q_ptr, do_ptr, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PER_GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile of one group from one part of the rows that see it. The `splits` parts of the
    `part_keys` keys from `first_key` on are written to [splits, B, part_keys, G, D].

    If q_tma and do_tma [B * G, S * h, D] are given, the tensor memory accelerator loads tiles of rows from them: with 0
    after the end, and without addresses in registers, which leaves room for another program on each multiprocessor.
    BY_SPLIT: all key tiles of one part of the rows run at the same time, so that the rows, which exceed the cache, are
    read into it once. Otherwise every key tile has parts of equal length."""
    pid = tl.program_id(0)
    lane = pid % lanes
    key_tiles = (part_keys + BLOCK_N - 1) // BLOCK_N
    if BY_SPLIT:
        split, key_tile = splits - 1 - pid // lanes // key_tiles, pid // lanes % key_tiles
    else:
        split, key_tile = pid // lanes % splits, pid // lanes // splits  # most queries see early keys: start them first
    n_start = first_key + key_tile * BLOCK_N
    b, g = (lane // G).to(tl.int64), lane % G
    n_last = tl.minimum(n_start + BLOCK_N, N) - 1
    n = n_start + tl.arange(0, BLOCK_N)
    real = n < N
    n = tl.minimum(n, N - 1)
    first_min, behind_min = seen_by(n_start, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    first_max, behind_max = seen_by(n_last, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    first, behind = seen_by(n, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    start, stop = first_min * PER_GROUP, behind_max * PER_GROUP
    begin = 0 if BY_SPLIT else start
    rows = S * PER_GROUP if BY_SPLIT else tl.maximum(stop - start, 0)
    share = ((rows + BLOCK_M - 1) // BLOCK_M + splits - 1) // splits * BLOCK_M
    start = tl.maximum(start, begin + split * share)
    stop = tl.minimum(stop, begin + split * share + share)

    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_rows = k_ptr + b * k_sb + g.to(tl.int64) * k_sg + n.to(tl.int64) * k_sn
    v_rows = v_ptr + b * v_sb + g.to(tl.int64) * v_sg + n.to(tl.int64) * v_sn
    k = load_tile(k_rows[:, None] + dk[None, :], real, dk, DK, BLOCK_DK, False)
    v = load_tile(v_rows[:, None] + dv[None, :], real, dv, DV, BLOCK_DV, False)
    q_ptr += b * q_sb + (g * PER_GROUP).to(tl.int64) * q_sh
    do_ptr += b * do_sb + (g * PER_GROUP).to(tl.int64) * do_sh
    before = lane * S * PER_GROUP  # 32 bits suffice: no GPU holds 2^31 rows of q, o and dQ
    lse2_ptr += before
    delta_ptr += before
    dk_acc = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk_acc, dv_acc = _push(
        dk_acc, dv_acc, k, v, q_ptr, do_ptr, q_tma, do_tma, lse2_ptr, delta_ptr, lane, q_ss, q_sh, do_ss, do_sh,
        start, stop, first * PER_GROUP, behind * PER_GROUP, first_max * PER_GROUP, behind_min * PER_GROUP,
        scale * LOG2E, MASK, PER_GROUP, BLOCK_M, BLOCK_N, DK, DV, BLOCK_DK, BLOCK_DV, PRECISION,
    )  # fmt: skip

    row = ((split * (lanes // G) + b) * part_keys + (n - first_key)) * G + g  # of [splits, B, part_keys, G]
    store_rows(dk_ptr, row, dk_acc * scale, real, DK, BLOCK_DK)
    store_rows(dv_ptr, row, dv_acc, real, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["splits", "first"])
def sum_parts_kernel(parts_ptr, out_ptr, numel, splits, width, out_width, first, BLOCK: tl.constexpr):
    """Adds the parts [splits, B, width] in a fixed order into out [B, out_width] from column `first` on."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    zero = tl.zeros([], tl.int64)
    for part in range(splits):
        total += tl.load(parts_ptr + (zero + part) * numel + i, mask=i < numel, other=0.0)
    out = i // width * out_width + first + i % width
    tl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=i < numel)
