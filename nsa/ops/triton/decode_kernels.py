"""The kernels of `decode.py`: attention of few queries over a cache, bound by the bytes of keys and values.

A program streams the keys of one part of a sequence for the rows of one group, a few queries x their heads, and writes
a partial result: output, maximum and sum. Part p of P takes the tiles p, p+P, ... of the visible keys, so that the grid
depends only on shapes, and the first page can be looked up before the position is known; programs without keys return
early. Keys that no query sees are not read.

OVERLAP (Hopper and later): a kernel lets the next one start while it still runs, and waits for the previous one before
it reads its results; data from before the first kernel are read without waiting.

Legend: B batch, n new tokens, G key/value heads, h query heads per group (HEADS, HP padded), H = G*h. A lane is a tile
of QT queries of one sequence and group. ROWS = QT x HP, row r: query r // HP, head r % HP.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.triton.decode_choice import NOTHING, choose_blocks, held, power_of_2, splits_used, tiles_seen
from nsa.ops.triton.flash_kernels import keys_seen, load_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weigh(peak, total, s, EXACT: tl.constexpr):
    """One step of the online softmax in base 2 over scores s [ROWS, BN]: the new maximum and sum, the factor of earlier
    terms, and p. EXACT: maxima are integers, and p is a power of two times a number that depends only on s.
    """
    top = tl.max(s, 1)
    if EXACT:
        top = tl.ceil(top)
    peak_new = tl.maximum(peak, top)
    # For a row without any key so far, any maximum works: all its terms are 0.
    reference = tl.where(peak_new > NOTHING / 2, peak_new, 0.0)
    if EXACT:
        whole = tl.floor(s)
        p = tl.exp2(s - whole) * power_of_2(whole - reference[:, None])
        alpha = power_of_2(peak - reference)
    else:
        p = tl.exp2(s - reference[:, None])
        alpha = tl.exp2(peak - reference)
    return peak_new, total * alpha + tl.sum(p, 1), alpha, p


@triton.jit
def attend_step(acc, peak, total, s, v, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """`_weigh`, then adds the weighted values v [BN, DV] to the output."""
    peak, total, alpha, p = _weigh(peak, total, s, EXACT)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, peak, total, p


@triton.jit
def _finished(acc):
    """Waits for the product in acc, by an empty instruction. On Hopper, products of 64 rows run asynchronously; if a
    layout conversion follows, the assembler would wait for every part of a product."""
    return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def look_up(table, entry, INTERPRETED: tl.constexpr):
    """table[entry], by an instruction that the compiler does not pipeline: pipelining a load whose address is loaded in
    the loop would leave one stage for the keys."""
    if INTERPRETED:
        value = tl.load(table + entry)
    else:
        value = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [(table + entry).to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


@triton.jit
def page_of(table, tile, c, entries, INTERPRETED: tl.constexpr,
             PAGE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """The pages of a tile's keys; a scalar if the tile is in one page."""
    if (R == BC) and (PAGE % (BJ * BC) == 0):
        key = tile * (BJ * BC)
    else:
        key = (tile * BJ + c // BC) * R + c % BC
    return look_up(table, tl.maximum(tl.minimum(key // PAGE, entries - 1), 0), INTERPRETED)


@triton.jit
def _attend_interval(
    acc, peak, total, q, lo, hi, lowest, highest, first, step, stop, page, k_ptr, v_ptr, places, entries, pool,
    k_sp, k_st, v_sp, v_st, shares, edges, peaks, probs, live, scale,
    RING: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr, PLANES: tl.constexpr, HP: tl.constexpr, SAME: tl.constexpr, SINGLE: tl.constexpr,
    KEYS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attends to every `step`-th tile of first .. stop of a sequence's keys, of which rows see lo .. hi and any row
    lowest .. highest.

    A tile has BJ blocks of R keys, each padded to BC. `places` points to the page table, whose entry for the first tile
    is `page`; or to the number of the ring, `page`. PLANES > 0 stores the shares of blocks, shares [row's] + [J, HP],
    the contribution of a tile to the next, edges [row's] + [tiles, HP], and the maximum of both, peaks like edges.
    SINGLE: one tile without a loop. KEYS: reads no values, and stores the probabilities, probs [row's] +
    [tiles, HP, BN].
    """
    BN: tl.constexpr = BJ * BC
    c = tl.arange(0, BN)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    for turn in tl.range(0, 1 if SINGLE else tl.cdiv(stop - first, step)):
        tile = first + turn * step
        key = (tile * BJ + c // BC) * R + c % BC
        this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
        if RING > 0:
            place = (key % RING).to(tl.int64)
        else:
            place = (key % PAGE).to(tl.int64)
            if not SINGLE:  # one tile ahead
                page = page_of(places, tile + step, c, entries, INTERPRETED, PAGE, R, BC, BJ)
        k_row = this * k_sp + place * k_st
        v_row = k_row if SAME else this * v_sp + place * v_st
        exists = (key >= lowest) & (key < highest)
        k = load_tile(k_ptr + k_row[:, None] + dk[None, :], exists, dk, DK, BLOCK_DK, True)
        if not KEYS:
            v = load_tile(v_ptr + v_row[:, None] + dv[None, :], exists, dv, DV, BLOCK_DV, True)
        if SINGLE:
            tl.debug_barrier()  # issues both loads before waiting for either
            k = held(k, INTERPRETED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SINGLE and not KEYS:
            v = held(v, INTERPRETED)
        seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        if R != BC:
            seen = seen & (c % BC < R)[None, :]
        s = tl.where(seen, s, NOTHING)
        if KEYS:
            peak, total, _, p = _weigh(peak, total, s, True)
            tl.store(probs + tile * (HP * BN) + c[None, :], p.to(probs.dtype.element_ty), mask=live[:, None])
        else:
            acc, peak, total, p = attend_step(acc, peak, total, s, v, PLANES > 0, PRECISION)
            if (PLANES > 0) and (p.shape[0] >= 64) and not INTERPRETED:
                acc = _finished(acc)
        if PLANES > 0:
            left = R - tl.arange(0, BC)  # chunks from a compressed token's start to its block's end
            by_block = tl.reshape(p, [p.shape[0], BJ, BC])
            own = tl.sum(by_block * tl.minimum(left, CHUNKS).to(tl.float32)[None, None, :], 2)  # [ROWS, BJ]
            j = tl.arange(0, BJ)[None, :]
            if PLANES == 2:
                over = tl.sum(by_block * tl.maximum(CHUNKS - left, 0).to(tl.float32)[None, None, :], 2)
                tl.store(edges + tile * HP + 0 * j, over, mask=live[:, None] & (j == BJ - 1))
                if BJ > 1:
                    before = tl.gather(over, tl.maximum(j - 1, 0) + tl.zeros([p.shape[0], BJ], tl.int32), 1)
                    own += tl.where(j > 0, before, 0.0)
            tl.store(shares + ((tile * BJ + j) * HP).to(tl.int64), own, mask=live[:, None])
            tl.store(peaks + tile * HP, peak, mask=live)
    return acc, peak, total


@triton.jit
def store_part(
    o_parts, stats, num_rows, row, live, part, parts, acc, peak, total, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    OUTPUT: tl.constexpr = True,
):  # fmt: skip
    """o_parts [rows, parts, DV], if OUTPUT, and stats [2, rows, parts]: a row is (b, query, head)."""
    d = tl.arange(0, BLOCK_DV)
    at = row * parts + part
    if OUTPUT:
        tl.store(o_parts + at[:, None] * DV + d[None, :], acc, mask=live[:, None] & (d < DV)[None, :])
    tl.store(stats + at, peak, mask=live)
    tl.store(stats + num_rows * parts + at, total, mask=live)


@triton.jit(do_not_specialize=["n", "splits", "entries", "pool", "capacity", "tiles"])
def interval_kernel(
    q_ptr, k_ptr, v_ptr, places, positions, o_parts, stats, shares, edges, peaks, probs,
    q_sb, q_sn, q_sh, k_sp, k_st, k_sg, v_sp, v_st, v_sg, places_sb,
    n, splits, entries, pool, capacity, tiles, scale, G: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, QT: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr, PLANES: tl.constexpr, SAME: tl.constexpr, SINGLE: tl.constexpr, KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr, ALONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one lane. Grid (B * query tiles * G, splits). positions [B, n]. It is the first kernel
    of a call and lets others start when everything before it is done. ALONE: n is 1, which saves divisions before the
    first load."""
    if OVERLAP:
        gdc_launch_dependents()
    ROWS: tl.constexpr = QT * HP
    lane, split = tl.program_id(0), tl.program_id(1)
    query_tiles = 1 if ALONE else tl.cdiv(n, QT)
    g = lane % G
    query = lane // G % query_tiles * QT
    b = lane // G // query_tiles
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    r = tl.arange(0, ROWS)
    i = query + r // HP
    head = r % HP
    live = (i < n) & (head < HEADS)
    # Independent loads come first.
    at = tl.load(positions + b * n + i, mask=i < n, other=-1)
    q_row = b64 * q_sb + i.to(tl.int64) * q_sn + (g64 * HEADS + head) * q_sh
    dk = tl.arange(0, BLOCK_DK)
    q = load_tile(q_ptr + q_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, True)
    places += b64 * places_sb
    c = tl.arange(0, BJ * BC)
    first = split
    if RING > 0:
        page = tl.load(places)
    elif WINDOW == 0:
        page = page_of(places, first, c, entries, True, PAGE, R, BC, BJ)
    if ROWS == 16 and PRECISION != "ieee":  # other variants have no registers for it
        tl.debug_barrier()  # else the assembler would move loads after waits for others
    t = tl.minimum(at, capacity - 1)
    lo, hi = keys_seen(t, None, None, SPAN, STRIDE, WINDOW)
    highest = tl.max(hi, 0)
    lowest = tl.min(tl.where(hi > 0, lo, 0x7FFFFFFF), 0)
    tile_first, count = tiles_seen(lowest, highest, BJ * R)
    if WINDOW > 0:
        first += tile_first
        if RING == 0:
            page = page_of(places, first, c, entries, INTERPRETED, PAGE, R, BC, BJ)
    if (highest > 0) & (split < count):
        row = (b64 * n + i) * (G * HEADS) + g64 * HEADS + head
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        peak = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        share_rows, edge_rows, peak_rows, prob_rows = shares, edges, peaks, probs
        if PLANES > 0:
            line = (b64 * n + i) * G + g
            share_rows = (shares + line * tiles * (BJ * HP) + head)[:, None]
            edge_rows = (edges + line * tiles * HP + head)[:, None]
            peak_rows = peaks + line * tiles * HP + head
            prob_rows = (probs + (line * tiles * HP + head) * (BJ * BC))[:, None]
        acc, peak, total = _attend_interval(
            acc, peak, total, q, lo, hi, lowest, highest, first, splits, tile_first + count, page,
            k_ptr + g64 * k_sg, v_ptr + g64 * v_sg, places, entries, pool,
            k_sp, k_st, v_sp, v_st, share_rows, edge_rows, peak_rows, prob_rows, live, scale * LOG2E,
            RING, PAGE, R, BC, BJ, DK, DV, BLOCK_DK, BLOCK_DV, PRECISION, CHUNKS, PLANES, HP,
            SAME, SINGLE, KEYS, INTERPRETED,
        )  # fmt: skip
        num_rows = (tl.num_programs(0).to(tl.int64) // G // query_tiles) * n * (G * HEADS)
        store_part(o_parts, stats, num_rows, row, live, split, splits, acc, peak, total, DV, BLOCK_DV, not KEYS)


@triton.jit
def _attend_values(
    lane, part, positions, sums, peaks, v_ptr, table, probs, o_parts, stats, v_sp, v_st, v_sg, table_sb,
    G, parts, splits, tiles, pool, capacity, SPAN: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr,
    HP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up the values of VALUES tiles of compressed tokens for one query and group, with the probabilities
    [tiles, HP, BN], maxima and sums of `interval_kernel`. Only for one query per sequence, in 16 bits."""
    b64, g64, lane64 = (lane // G).to(tl.int64), (lane % G).to(tl.int64), lane.to(tl.int64)
    head, c, d = tl.arange(0, HP), tl.arange(0, BN), tl.arange(0, BLOCK_DV)
    live = head < HEADS
    t = tl.minimum(tl.load(positions + b64), capacity - 1)
    _, seen = keys_seen(t, None, None, SPAN, STRIDE, 0)
    pages = ()
    for number in tl.static_range(VALUES):
        page = ((part * VALUES + number) * BN + c) // PAGE
        page = tl.load(table + b64 * table_sb + tl.minimum(page, (capacity - 1) // (STRIDE * PAGE)))
        pages += (page,)  # type: ignore[assignment]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if part * (VALUES * BN) < seen:
        values = ()
        for number in tl.static_range(VALUES):
            key = (part * VALUES + number) * BN + c
            this = tl.minimum(tl.maximum(pages[number], 0), pool - 1).to(tl.int64)
            v_row = g64 * v_sg + this * v_sp + (key % PAGE).to(tl.int64) * v_st
            v = load_tile(v_ptr + v_row[:, None] + d[None, :], key < seen, d, DV, BLOCK_DV, True)
            values += (v,)  # type: ignore[assignment]
        row = lane64 * HEADS + head
        acc = tl.zeros([HP, BLOCK_DV], tl.float32)
        peak = tl.full([HP], NOTHING, tl.float32)
        total = tl.zeros([HP], tl.float32)
        for number in tl.static_range(VALUES):
            tile = part * VALUES + number
            there = (live & (tile * BN < seen))[:, None]  # two axes: a mask of rows alone would be loaded several times
            at = ((lane64 * tiles + tile) * HP + head)[:, None]
            p = tl.load(probs + at * BN + c[None, :], mask=there, other=0.0, cache_modifier=".cg")
            top = tl.load(peaks + at, mask=there, other=NOTHING, cache_modifier=".cg")
            added = tl.load(sums + row[:, None] * splits + tile, mask=there, other=0.0, cache_modifier=".cg")
            highest = tl.maximum(peak, tl.max(top, 1))
            before, after = power_of_2(peak - highest), power_of_2(top - highest[:, None])
            p = (p.to(tl.float32) * after).to(p.dtype)
            acc = tl.dot(p, held(values[number], INTERPRETED), acc * before[:, None])
            peak, total = highest, total * before + tl.sum(added * after, 1)
        num_rows = tl.num_programs(0).to(tl.int64) * HEADS
        store_part(o_parts, stats, num_rows, row, live, part, parts, acc, peak, total, DV, BLOCK_DV)


@triton.jit
def _next_tile(
    chosen, tile, last, start_win, table, selected, page_win,
    PAGE: tl.constexpr, SEL_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, BN: tl.constexpr, PAGED: tl.constexpr,
    PAGE_WIN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The first token and the page of a tile of `blocks_kernel`; those of the last tile if `tile` is after it."""
    tile = tl.maximum(tl.minimum(tile, last), 0)
    # Without control flow, which a pipelined loop must not have: the lookup for the other branch is harmless.
    place = tl.arange(0, chosen.shape[0])
    block = tl.maximum(tl.sum(tl.where(place == tile // PER_BLOCK, chosen, 0), 0), 0)  # padding has chosen -1
    start = tl.where(selected, block * SEL_BLOCK + tile % PER_BLOCK * BN, start_win + tile * BN)
    if PAGED:
        page = look_up(table, tl.where(selected, start // PAGE, start // PAGE_WIN), INTERPRETED)
    else:
        page = look_up(table, tl.where(selected, start // PAGE, 0), INTERPRETED)
        page = tl.where(selected, page, page_win)
    return start, page


@triton.jit(
    do_not_specialize=[
        "n", "G", "parts_cmp", "parts_sel", "parts_win", "splits", "tiles", "width", "pool_sel", "pool_win", "pool_cmp",
        "capacity",
    ]
)  # fmt: skip
def blocks_kernel(
    q_ptr, k_sel, v_sel, sel_table, k_win, v_win, win_places, positions,
    stats_cmp, shares, edges, peaks, scores, indices, o_parts, stats, v_cmp, cmp_table, probs, o_cmp, stats_values,
    q_sb, q_sn, q_sh, ks_sp, ks_st, ks_sg, vs_sp, vs_st, vs_sg, sel_sb,
    kw_sp, kw_st, kw_sg, vw_sp, vw_st, vw_sg, win_sb, vc_sp, vc_st, vc_sg, cmp_sb,
    n, G, parts_cmp, parts_sel, parts_win, splits, tiles, width, pool_sel, pool_win, pool_cmp, capacity, scale,
    WINDOW: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, PAGE_WIN: tl.constexpr,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    QT: tl.constexpr, R: tl.constexpr, BJ: tl.constexpr, PLANES: tl.constexpr, HP_CMP: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, ONE: tl.constexpr,
    PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    SAME: tl.constexpr, SINGLE: tl.constexpr, VALUES: tl.constexpr, PAGE_CMP: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the values of compressed tokens (VALUES > 0), of the window, or of the selected blocks, for one query
    and group. Grid (B * n * G, parts), in this order. A block is read in PER_BLOCK tiles of BN keys. ONE: a program has
    one tile of the selected blocks; SINGLE: also of the window, and no loop. One loop serves both branches, since two
    loops would not share their buffers. shares [B,n,G,tiles,BJ,HP_CMP], edges and peaks
    [B,n,G,tiles,HP_CMP], indices [B,n,G,NUM_SELECTED]."""
    lane, part = tl.program_id(0), tl.program_id(1)
    if VALUES > 0:
        if part < parts_cmp:
            _attend_values(
                lane, part, positions, stats_cmp + tl.num_programs(0).to(tl.int64) * HEADS * splits, peaks, v_cmp,
                cmp_table, probs, o_cmp, stats_values, vc_sp, vc_st, vc_sg, cmp_sb, G, parts_cmp, splits, tiles,
                pool_cmp, capacity, CMP_BLOCK, CMP_STRIDE, BJ * R, HP_CMP, HEADS, DV, BLOCK_DV, VALUES,
                PAGE_CMP, INTERPRETED, OVERLAP,
            )  # fmt: skip
            return
        part -= parts_cmp
    selected = part >= parts_win
    if OVERLAP:
        if not selected:
            if VALUES > 0:  # the keys of the compressed tokens come first
                gdc_wait()
            gdc_launch_dependents()
    g, i, b = lane % G, lane // G % n, lane // G // n
    b64, g64, lane64 = b.to(tl.int64), g.to(tl.int64), lane.to(tl.int64)
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    head = tl.arange(0, HP)
    live = head < HEADS
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    q_row = b64 * q_sb + i.to(tl.int64) * q_sn + (g64 * HEADS + head) * q_sh
    q = load_tile(q_ptr + q_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, True)
    row = (b64 * n + i) * (G * HEADS) + g64 * HEADS
    num_rows = tl.num_programs(0).to(tl.int64) * HEADS
    out = indices + lane64 * NUM_SELECTED
    first = tl.where(selected, part - parts_win, part)
    step = tl.where(selected, parts_sel, parts_win)
    lowest = tl.maximum(t + 1 - WINDOW, 0)
    first_win, tiles_win = tiles_seen(lowest, t + 1, BN)
    count = tl.where(selected, tl.minimum(t // SEL_BLOCK + 1, NUM_SELECTED) * PER_BLOCK, tiles_win)
    last, start_win = count - 1, first_win * BN
    sel_places, places = sel_table + b64 * sel_sb, win_places + b64 * win_sb
    ring = tl.load(places)
    table = sel_places if RING > 0 else tl.where(selected, sel_places, places)
    chosen = tl.zeros([NUM_PADDED], tl.int32)
    start, page = _next_tile(  # of the window
        chosen, first, last, start_win, table, selected, ring,
        PAGE, SEL_BLOCK, PER_BLOCK, BN, RING == 0, PAGE_WIN, INTERPRETED,
    )  # fmt: skip
    if selected:
        used = splits_used(positions, b, i, n, splits, capacity, CMP_BLOCK, CMP_STRIDE, 0, QT, BJ * R)
        if OVERLAP:
            gdc_wait()
            if VALUES == 0:  # not earlier: the next kernel reads the parts of the compressed tokens without waiting
                gdc_launch_dependents()
        block, page = choose_blocks(
            out, t, used, row, splits, num_rows, stats_cmp, shares + lane64 * tiles * (BJ * HP_CMP),
            edges + lane64 * tiles * HP_CMP, peaks + lane64 * tiles * HP_CMP, scores + lane64 * width, width,
            first // PER_BLOCK, sel_places,
            CMP_BLOCK, CMP_STRIDE, SEL_BLOCK, PAGE, NUM_SELECTED, NUM_PADDED, NUM_INIT, NUM_LOCAL,
            HEADS, HP_CMP, R, BJ, PLANES, SPLITS, TILES, BLOCK, TILED, ONE, INTERPRETED,
        )  # fmt: skip
        if OVERLAP and VALUES > 0:  # not earlier: the programs of the window have ended by now, which leaves room
            gdc_launch_dependents()
        if ONE:
            start = block * SEL_BLOCK + first % PER_BLOCK * BN
        else:
            tl.debug_barrier()
            number = tl.arange(0, NUM_PADDED)
            chosen = tl.load(out + number, mask=number < NUM_SELECTED, other=0)
            start, page = _next_tile(
                chosen, first, last, start_win, table, selected, ring,
                PAGE, SEL_BLOCK, PER_BLOCK, BN, RING == 0, PAGE_WIN, INTERPRETED,
            )  # fmt: skip
    if (t >= 0) & (first < count):
        acc = tl.zeros([HP, BLOCK_DV], tl.float32)
        peak = tl.full([HP], NOTHING, tl.float32)
        total = tl.zeros([HP], tl.float32)

        k_ptr = tl.where(selected, k_sel + g64 * ks_sg, k_win + g64 * kw_sg)
        v_ptr = tl.where(selected, v_sel + g64 * vs_sg, v_win + g64 * vw_sg)
        k_sp, k_st = tl.where(selected, ks_sp, kw_sp).to(tl.int64), tl.where(selected, ks_st, kw_st).to(tl.int64)
        v_sp, v_st = tl.where(selected, vs_sp, vw_sp).to(tl.int64), tl.where(selected, vs_st, vw_st).to(tl.int64)
        pool = tl.where(selected, pool_sel, pool_win)
        c = tl.arange(0, BN)
        for turn in tl.range(0, 1 if SINGLE else tl.cdiv(count - first, step)):
            key = start + c
            low = tl.where(selected, start, lowest)
            high = tl.where(selected, tl.minimum(t, start // SEL_BLOCK * SEL_BLOCK + SEL_BLOCK - 1), t)
            near = tl.minimum(tl.maximum(key, low), high)
            if RING > 0:
                place = tl.where(selected, near % PAGE, near % RING)
            else:
                place = tl.where(selected, near % PAGE, near % PAGE_WIN)
                if PAGE_WIN % BN != 0:  # the tile may span several pages; a block never does
                    page = look_up(table, tl.where(selected, start // PAGE, near // PAGE_WIN), INTERPRETED)
            this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
            k_row = this * k_sp + place * k_st
            v_row = k_row if SAME else this * v_sp + place * v_st
            if not SINGLE:
                start, page = _next_tile(
                    chosen, first + (turn + 1) * step, last, start_win, table, selected, ring,
                    PAGE, SEL_BLOCK, PER_BLOCK, BN, RING == 0, PAGE_WIN, INTERPRETED,
                )  # fmt: skip
            k = load_tile(k_ptr + k_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
            v = load_tile(v_ptr + v_row[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
            if SINGLE:
                tl.debug_barrier()
                k = held(k, INTERPRETED)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            if SINGLE:
                v = held(v, INTERPRETED)
            s = tl.where(((key >= low) & (key <= high))[None, :], s, NOTHING)
            acc, peak, total, _ = attend_step(acc, peak, total, s, v, False, PRECISION)
        store_part(
            o_parts, stats, num_rows, row + head, live, part, parts_sel + parts_win, acc, peak, total, DV, BLOCK_DV
        )  # fmt: skip
