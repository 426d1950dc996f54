"""The kernels of `selection.py`: block scores on tensor cores, then an exact top-k.

Scores. A second pass over q.k with the log-sum-exp known. A tile is a few products, one after another, with (head,
query) as rows and compressed tokens as columns; their sum adds heads inside a thread, and no head is padded if the
heads per product divide the number of heads. Visibility depends only on the query: it is applied after that sum, h
times cheaper, and not at all if all invisible tokens are in the local blocks, which need no score.
Compressed token c of block j contributes to block j and, if it extends beyond it, to block j+1 (cmp_block never exceeds
sel_block): the two shares are stored as two planes, own[j] and next[j], and score j is own[j] + next[j-1]. No token is
computed twice, nothing is carried between tiles, and the terms of every block are added in a fixed order, so that equal
inputs give bitwise equal scores, and the blocks of a row can be split between programs.

Top-k. Scores become integers of the same order: of scores that are not negative, their bits. One program per row keeps
them in registers, finds the k-th largest by bisection on the bits, and compacts what reaches it by a prefix sum: the
order is ascending by construction. Of blocks that equal it the first are taken, found by bisection on their numbers.
The first bisection starts from the k-th of the best ones of 32 lines, which few more than k reach.

Legend: B batch, S tokens, G groups, h heads per group, N compressed tokens, J selection blocks.
"""

import triton
import triton.language as tl


@triton.jit
def _score_tiles(
    q0s, q1s, shifts, k_base, stride_kn, out, out_row, position, wanted, base, slots, width, begin, span, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRODUCTS: tl.constexpr,
    HP: tl.constexpr, QT: tl.constexpr, INNER: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, CHUNKS: tl.constexpr, PLANES: tl.constexpr,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The scores of the `wanted` queries, all of one document whose slots start at `base`, for `span` blocks from
    `begin` on."""
    BN: tl.constexpr = BJ * BC
    visible = tl.where(position + 1 >= CMP_BLOCK, (position + 1 - CMP_BLOCK) // CMP_STRIDE + 1, 0)  # [QT]
    newest = tl.max(tl.where(wanted, position, 0), axis=0) // SEL_BLOCK
    stop = tl.minimum(newest - NUM_LOCAL + 1, begin + span)

    row = tl.arange(0, BN)
    d0 = tl.arange(0, D0)
    chunk = tl.arange(0, BC)
    for j0 in range(begin, stop, BJ):
        own = tl.zeros([QT, BJ], dtype=tl.float32)
        nxt = tl.zeros([QT, BJ], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            place = part * BC + row % BC  # within the block; R of a power of two are real
            token = (j0 + row // BC) * R + place  # within the document, [BN]
            # Clamped rather than masked: tokens after the end are not visible, and a mask costs more.
            slot = tl.minimum(base + token, slots - 1)
            k_row = k_base + (slot.to(tl.int64) if WIDE else slot) * stride_kn
            k0 = tl.load(k_row[:, None] + d0[None, :])
            if D1 > 0:
                d1 = D0 + tl.arange(0, D1)
                k1 = tl.load(k_row[:, None] + d1[None, :], mask=(d1 < D)[None, :], other=0.0)
            for i in tl.static_range(PRODUCTS):
                s = tl.dot(q0s[i], tl.trans(k0), input_precision="ieee")
                if D1 > 0:
                    s = tl.dot(q1s[i], tl.trans(k1), acc=s, input_precision="ieee")
                e = tl.exp2(s * scale + shifts[i][:, None])
                if i == 0:
                    p = e
                else:
                    p += e
            p = tl.sum(tl.reshape(p, [QT // INNER, HP, INNER, BN]), axis=1)
            p = tl.reshape(p, [QT, BN])
            if MASKED:
                p = tl.where(token[None, :] < visible[:, None], p, 0.0)
            if R != BC * PARTS:
                p = tl.where((place < R)[None, :], p, 0.0)
            p = tl.reshape(p, [QT, BJ, BC])
            left = R - (part * BC + chunk)  # chunks from this compressed token's start to the block's end
            own_weight = tl.minimum(left, CHUNKS).to(tl.float32)
            own += tl.sum(p * own_weight[None, None, :], axis=2)
            if PLANES == 2:
                next_weight = tl.maximum(CHUNKS - left, 0).to(tl.float32)
                nxt += tl.sum(p * next_weight[None, None, :], axis=2)
        block = j0 + tl.arange(0, BJ)
        place = out + out_row[:, None] + block[None, :]
        if PLANES == 2:
            # next[j] has the index of own[j+1] in the next plane, so that the reader needs no shift.
            plane = tl.arange(0, 2)[None, None, :]
            ok = wanted[:, None, None] & (block[None, :, None] + plane < width)
            tl.store(place[:, :, None] + plane * (width + 1), tl.join(own, nxt), mask=ok)
        else:
            tl.store(place, own, mask=wanted[:, None] & (block < width)[None, :])


@triton.jit(do_not_specialize=["b0", "batch", "row_first", "row_stop", "slots", "splits", "span"])
def score_kernel(
    q, k, lse, out, doc_start, cmp_start,
    b0, batch, row_first, row_stop, slots, width, groups, splits, span,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_lb, stride_ls, stride_lh,
    scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, HEADS: tl.constexpr, PRODUCTS: tl.constexpr,
    HP: tl.constexpr, QT: tl.constexpr, INNER: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, CHUNKS: tl.constexpr, PLANES: tl.constexpr,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: QT neighbouring queries, all heads of one group, `span` blocks.
    out [batch, rows, G, PLANES, width]."""
    pid = tl.program_id(0)
    g = pid % groups
    b = pid // groups % batch
    split = pid // (groups * batch) % splits
    # The last queries see the most: they start first, so that no long program starts at the end.
    tile = tl.cdiv(row_stop - row_first, QT) - 1 - pid // (groups * batch * splits)
    s_first = row_first + tile * QT
    # Forced blocks need no score, but the first block after them gets a share from the block before it.
    begin = (NUM_INIT - 1 if NUM_INIT > 0 else 0) + split * span

    rows = s_first + tl.arange(0, QT)
    exists = rows < row_stop
    starts = tl.zeros([QT], tl.int32)
    if PACKED:
        starts = tl.load(doc_start + rows, mask=exists, other=0).to(tl.int32)
    position = tl.where(exists, rows - starts, 0)
    if begin > tl.max(position, axis=0) // SEL_BLOCK - NUM_LOCAL:
        return

    # A product's row: 16 // HP queries of one head, then as many of the next, so that heads are added inside a thread
    # or between neighbouring lanes.
    row = tl.arange(0, HP * QT)
    s_row = s_first + row // (HP * INNER) * INNER + row % INNER
    b64 = (b0 + b).to(tl.int64)
    s64 = s_row.to(tl.int64)
    d0 = tl.arange(0, D0)
    d1 = D0 + tl.arange(0, D1 if D1 > 0 else 16)
    q0s = ()
    q1s = ()
    shifts = ()
    for i in tl.static_range(PRODUCTS):
        head = i * HP + row // INNER % HP
        real = (head < HEADS) & (s_row < row_stop)
        h64 = (g * HEADS + head).to(tl.int64)
        q_row = q + b64 * stride_qb + s64 * stride_qs + h64 * stride_qh
        q0s += (tl.load(q_row[:, None] + d0[None, :], mask=real[:, None], other=0.0),)  # type: ignore[assignment]
        if D1 > 0:
            mask = real[:, None] & (d1 < D)[None, :]
            q1s += (tl.load(q_row[:, None] + d1[None, :], mask=mask, other=0.0),)  # type: ignore[assignment]
        row_lse = tl.load(lse + b64 * stride_lb + s64 * stride_ls + h64 * stride_lh, mask=real, other=0.0)
        # exp2(x - inf) = 0 removes the padding from the sum over heads.
        shift = tl.where(row_lse == -float("inf"), 0.0, row_lse * -1.4426950408889634)
        shifts += (tl.where(real, shift, -float("inf")),)  # type: ignore[assignment]

    k_base = k + b64 * stride_kb + g.to(tl.int64) * stride_kg
    out_row = ((b.to(tl.int64) * (row_stop - row_first) + (rows - row_first)) * groups + g) * (PLANES * width)
    if PACKED:
        bases = tl.load(cmp_start + rows, mask=exists, other=0).to(tl.int32)
        enough = exists & (position // SEL_BLOCK >= NUM_SELECTED)
        # A tile may touch several documents, which have different slots: they are processed in turn.
        at = s_first
        end = tl.minimum(s_first + QT, row_stop)
        while at < end:
            start = tl.sum(tl.where(rows == at, starts, 0), axis=0)  # negative if it is before the queries
            base = tl.max(tl.where(rows == at, bases, 0), axis=0)
            same = exists & (starts == start)
            wanted = enough & same
            if tl.max(wanted.to(tl.int32), axis=0) > 0:
                _score_tiles(
                    q0s, q1s, shifts, k_base, stride_kn, out, out_row, position, wanted,
                    base, slots, width, begin, span, scale,
                    D, D0, D1, PRODUCTS, HP, QT, INNER, BJ, BC, PARTS, R, CHUNKS, PLANES,
                    CMP_BLOCK, CMP_STRIDE, SEL_BLOCK, NUM_LOCAL, MASKED, WIDE,
                )  # fmt: skip
            at += tl.maximum(tl.sum(same.to(tl.int32), axis=0), 1)
    else:
        _score_tiles(
            q0s, q1s, shifts, k_base, stride_kn, out, out_row, position, exists,
            0, slots, width, begin, span, scale,
            D, D0, D1, PRODUCTS, HP, QT, INNER, BJ, BC, PARTS, R, CHUNKS, PLANES,
            CMP_BLOCK, CMP_STRIDE, SEL_BLOCK, NUM_LOCAL, MASKED, WIDE,
        )  # fmt: skip


@triton.jit
def load_keys(row, width, first, stop, start, BLOCK: tl.constexpr, PLANES: tl.constexpr, LEAST: tl.constexpr):
    """Blocks start .. start+BLOCK of a row as integer keys, LEAST outside [first, stop). Scores are not negative, and
    the keys their bits, where LEAST is -1; else it is -2**31, below every key."""
    block = start + tl.arange(0, BLOCK)
    # Whole vectors are loaded, within the row since its length is a multiple of 16; the rest is dropped below.
    readable = block < tl.cdiv(stop, 16) * 16
    score = tl.load(row + block, mask=readable, other=0.0)
    if PLANES == 2:
        before = tl.load(row + width + block, mask=readable, other=0.0)
        score += tl.where(block > 0, before, 0.0)
    inside = (block >= first) & (block < stop)
    if LEAST == -1:
        # Whatever is not a number counts as 0, so that the keys have one order.
        keys = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)
    else:
        bits = (score + 0.0).to(tl.int32, bitcast=True)  # of -0.0 those of 0.0
        keys = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST + 1)
    return block, tl.where(inside, keys, LEAST)


@triton.jit
def pick_row(
    row, out, width, first, stop, BLOCK: tl.constexpr, PLANES: tl.constexpr, FREE: tl.constexpr, LEAST: tl.constexpr
):
    """The FREE best of blocks first .. stop, more than FREE of them, kept in registers."""
    block, keys = load_keys(row, width, first, stop, 0, BLOCK, PLANES, LEAST)
    pick_keys(block, keys, out, first, stop, BLOCK, FREE, True, LEAST)


@triton.jit
def ranks(keys):
    """The rank of each of few keys: the number of larger keys, and of equal keys before it."""
    i = tl.arange(0, keys.shape[0])
    least = keys[:, None] + (i[None, :] >= i[:, None]).to(tl.int32)
    return tl.sum((keys[None, :] >= least).to(tl.int32), 1)


@triton.jit
def pick_keys(
    block, keys, out, first, stop, BLOCK: tl.constexpr, FREE: tl.constexpr, BOUND: tl.constexpr,
    LEAST: tl.constexpr = -1,
):  # fmt: skip
    """The FREE best of blocks first .. stop by their keys; those of the others are LEAST. BOUND: it pays to look for a
    bound first. Returns the places of the blocks in `out` [BLOCK // 32, 32], or -1."""
    # Always: `count` keys, FREE or more, reach `low`; fewer than FREE reach `high`.
    if BOUND and FREE <= 32:
        # The FREE-th largest of the maxima of 32 lines: few more keys than FREE reach it. Neighbours, which are often
        # similar, are in different lines.
        best = tl.max(tl.reshape(keys, [BLOCK // 32, 32]), axis=0)
        high = tl.max(best, axis=0) + 1
        low = tl.maximum(tl.sum(tl.where(ranks(best) == FREE - 1, best, 0), axis=0), LEAST + 1)
        count = tl.sum((keys >= low).to(tl.int32), axis=0)
    else:
        high = tl.max(keys, axis=0) + 1
        low = tl.min(tl.where(keys == LEAST, 0x7FFFFFFF, keys), axis=0)
        count = stop - first
    while (low + 1 < high) & (count != FREE):
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down; a difference might not fit 32 bits
        reach = tl.sum((keys >= middle).to(tl.int32), axis=0)
        enough = reach >= FREE
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    # Too many only if several keys equal `low`: of these the blocks before `cut` are taken.
    cut = stop
    if count > FREE:
        ties = FREE - tl.sum((keys > low).to(tl.int32), axis=0)  # 1 or more
        early = first
        while cut - early > 1:  # fewer than `ties` are before `early`, enough before `cut`
            middle = early + ((cut - early) >> 1)
            enough = tl.sum(((keys == low) & (block < middle)).to(tl.int32), axis=0) >= ties
            cut = tl.where(enough, middle, cut)
            early = tl.where(enough, early, middle)
    chosen = (keys > low) | ((keys == low) & (block < cut))
    # A prefix sum in two steps, within lines of 32 and over the lines, takes far fewer shuffles than one.
    line = tl.reshape(chosen.to(tl.int32), [BLOCK // 32, 32])
    in_line = tl.sum(line, axis=1)
    place = tl.cumsum(line, axis=1) + (tl.cumsum(in_line, axis=0) - in_line)[:, None] - 1
    tl.store(out + place, tl.reshape(block, [BLOCK // 32, 32]), mask=line > 0)
    return tl.where(line > 0, place, -1)


@triton.jit
def pick_tiled(
    row, out, width, first, stop, BLOCK: tl.constexpr, PLANES: tl.constexpr, FREE: tl.constexpr,
    LEAST: tl.constexpr = -1,
):  # fmt: skip
    """As pick_row for rows longer than the registers hold: every pass reads the scores again."""
    low = LEAST + 1
    high = 0x7FFFFFFF
    count = stop - first
    while (low + 1 < high) & (count != FREE):
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down; a difference might not fit 32 bits
        reach = 0
        for start in range(0, stop, BLOCK):
            block, keys = load_keys(row, width, first, stop, start, BLOCK, PLANES, LEAST)
            reach += tl.sum((keys >= middle).to(tl.int32), axis=0)
        enough = reach >= FREE
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    ties = FREE
    for start in range(0, stop, BLOCK):
        block, keys = load_keys(row, width, first, stop, start, BLOCK, PLANES, LEAST)
        ties -= tl.sum((keys > low).to(tl.int32), axis=0)
    put = 0
    for start in range(0, stop, BLOCK):
        block, keys = load_keys(row, width, first, stop, start, BLOCK, PLANES, LEAST)
        equal = (keys == low).to(tl.int32)
        chosen = (keys > low) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= ties))
        place = put + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out + place, block, mask=chosen)
        ties = tl.maximum(ties - tl.sum(equal, axis=0), 0)
        put += tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["b0", "row_first", "row_stop", "score_first", "tokens"])
def pick_kernel(
    scores, indices, doc_start,
    b0, row_first, row_stop, score_first, tokens, width, groups,
    BLOCK: tl.constexpr, SMALL: tl.constexpr, TILED: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    PLANES: tl.constexpr, PACKED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One program: one query and group. indices [B, S, G, NUM_SELECTED]. LEAST as for `load_keys`."""
    FREE: tl.constexpr = NUM_SELECTED - NUM_INIT - NUM_LOCAL
    pid = tl.program_id(0)
    g = pid % groups
    s = row_first + pid // groups % (row_stop - row_first)
    b = pid // (groups * (row_stop - row_first))
    position = s
    if PACKED:
        position = s - tl.load(doc_start + s).to(tl.int32)
    own = position // SEL_BLOCK
    out = indices + (((b0 + b).to(tl.int64) * tokens + s) * groups + g) * NUM_SELECTED
    place = tl.arange(0, NUM_PADDED)
    if own < NUM_SELECTED:
        tl.store(out + place, tl.where(place <= own, place, -1), mask=place < NUM_SELECTED)
    else:
        # More blocks than places, so forced blocks do not overlap: the first, then the free, then the newest.
        forced = (place < NUM_INIT) | (place >= NUM_SELECTED - NUM_LOCAL)
        newest = own - (NUM_SELECTED - 1 - place)
        tl.store(out + place, tl.where(place < NUM_INIT, place, newest), mask=forced & (place < NUM_SELECTED))
        if FREE > 0:
            scored = b.to(tl.int64) * (row_stop - score_first) + (s - score_first)
            row = scores + (scored * groups + g) * (PLANES * width)
            stop = own - NUM_LOCAL + 1
            if TILED:
                pick_tiled(row, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, PLANES, FREE, LEAST)
            elif stop <= SMALL:
                pick_row(row, out + NUM_INIT, width, NUM_INIT, stop, SMALL, PLANES, FREE, LEAST)
            else:
                pick_row(row, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, PLANES, FREE, LEAST)
