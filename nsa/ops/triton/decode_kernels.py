"""The kernels of `decode.py`: attention of few queries over a cache, bound by the bytes of keys and values.

A program streams the keys of one part of a sequence for the rows of one group, a few queries x their heads, and leaves
a partial result: output, maximum and sum. How long a part is follows on the device from the position of the query, so
that the grid depends on shapes alone; programs without keys leave at once. Keys that nobody sees are not read: their
addresses are clamped to keys that exist.

Scores of blocks. Parts do not know each other's maximum, yet equal blocks must score equal to the last bit, or ties
would not go to the lower index. So the maxima of compressed attention are whole numbers, in base 2: probabilities
relative to different maxima differ by powers of two, exactly. Compressed token c of block j gives to block j and, where
it sticks out, to block j+1: as in `selection_kernels.py` the two shares are stored apart, for every head; a kernel of
`decode_merging.py` scales them, sums over the heads and picks.

OVERLAP (Hopper and later): a kernel lets the next one start while it still runs, and waits for the one before it where
it needs its results.

Legend: B batch, n new tokens, G key/value heads, h query heads per group (HEADS, HP padded), H = G*h. A lane is a tile
of QT queries of one sequence and group. ROWS = QT x HP, row r: query r // HP, head r % HP.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.triton.flash_kernels import load_tile

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)  # the score of a key that is not seen: finite, so that differences are numbers


@triton.jit
def power_of_2(e):
    """2**e for whole numbers e up to 127, exactly; 0 below -126."""
    return ((tl.maximum(e, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _step(acc, peak, total, s, v, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax in base 2 over scores s [ROWS, BN]. EXACT: maxima are whole numbers and p is a
    power of two times a number that depends on s alone."""
    top = tl.max(s, 1)
    if EXACT:
        top = tl.ceil(top)
    peak_new = tl.maximum(peak, top)
    # A row that has seen nothing yet: any reference will do, all its terms are 0.
    reference = tl.where(peak_new > NOTHING / 2, peak_new, 0.0)
    if EXACT:
        whole = tl.floor(s)
        p = tl.exp2(s - whole) * power_of_2(whole - reference[:, None])
        alpha = power_of_2(peak - reference)
    else:
        p = tl.exp2(s - reference[:, None])
        alpha = tl.exp2(peak - reference)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, peak_new, total, p


@triton.jit
def _look_up(table, entry, INTERPRETED: tl.constexpr):
    """table[entry], by an instruction that the compiler does not pipeline: a load whose address is loaded in the loop
    would leave one stage for the keys."""
    if INTERPRETED:
        value = tl.load(table + entry)
    else:
        value = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [(table + entry).to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


@triton.jit
def _page_of(table, tile, c, lowest, highest, INTERPRETED: tl.constexpr,
             PAGE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """The pages of a tile's keys, one where a tile lies in one page."""
    if (R == BC) and (PAGE % (BJ * BC) == 0):
        entry = tl.minimum(tile * (BJ * BC), highest - 1) // PAGE
    else:
        entry = tl.minimum(tl.maximum((tile * BJ + c // BC) * R + c % BC, lowest), highest - 1) // PAGE
    return _look_up(table, entry, INTERPRETED)


@triton.jit
def tiles_of_part(tiles, parts):
    """Tiles of one part, where `tiles` are spread over at most `parts` parts."""
    return tl.maximum(tl.cdiv(tiles, parts), 1)


@triton.jit
def keys_seen(t, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """The interval of keys that queries at t see; empty for padding. Key i is seen from i*STRIDE + SPAN - 1 on."""
    hi = tl.where(t + 1 >= SPAN, (t + 1 - SPAN) // STRIDE + 1, 0)
    if WINDOW > 0:
        lo = tl.maximum(t + 1 - WINDOW, 0)
    else:
        lo = t * 0
    return lo, hi


@triton.jit
def tiles_seen(lowest, highest, TILE: tl.constexpr):
    """The first of the tiles that hold the keys lowest .. highest - 1, and how many there are."""
    first = lowest // TILE
    return first, tl.maximum(tl.cdiv(highest, TILE) - first, 0)


@triton.jit
def _load_queries(q_ptr, row, live, d, DK: tl.constexpr, BLOCK_DK: tl.constexpr):
    return load_tile(q_ptr + row[:, None] + d[None, :], live, d, DK, BLOCK_DK, True)


@triton.jit
def _attend_interval(
    acc, peak, total, q, lo, hi, lowest, highest, first, stop, k_ptr, v_ptr, places, pool,
    k_sp, k_st, v_sp, v_st, shares, peaks, live, scale,
    RING: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr, PLANES: tl.constexpr, HP: tl.constexpr, SAME: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tiles first .. stop of a sequence's keys, of which rows see lo .. hi and somebody lowest .. highest.

    A tile has BJ blocks of R keys, each padded to BC. `places` points to the page table, or to the ring's number.
    PLANES > 0 stores the shares of blocks, shares [row's] + [J, PLANES, HP], and the maximum they are relative to,
    peaks [row's] + [tiles, HP].
    """
    BN: tl.constexpr = BJ * BC
    c = tl.arange(0, BN)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    if RING > 0:
        ring = tl.minimum(tl.maximum(tl.load(places), 0), pool - 1).to(tl.int64)
        k_ptr += ring * k_sp
        v_ptr += ring * v_sp
        page = ring
    else:
        page = _page_of(places, first, c, lowest, highest, INTERPRETED, PAGE, R, BC, BJ)
    for tile in tl.range(first, stop):
        key = (tile * BJ + c // BC) * R + c % BC
        near = tl.minimum(tl.maximum(key, lowest), highest - 1)
        if RING > 0:
            k_row = (near % RING).to(tl.int64) * k_st
            v_row = k_row if SAME else (near % RING).to(tl.int64) * v_st
        else:
            this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
            k_row = this * k_sp + (near % PAGE).to(tl.int64) * k_st
            v_row = k_row if SAME else this * v_sp + (near % PAGE).to(tl.int64) * v_st
            page = _page_of(places, tile + 1, c, lowest, highest, INTERPRETED, PAGE, R, BC, BJ)  # one tile ahead
        k = load_tile(k_ptr + k_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
        v = load_tile(v_ptr + v_row[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        if R != BC:
            seen = seen & (c % BC < R)[None, :]
        s = tl.where(seen, s, NOTHING)
        acc, peak, total, p = _step(acc, peak, total, s, v, PLANES > 0, PRECISION)
        if PLANES > 0:
            left = R - tl.arange(0, BC)  # chunks from a compressed token's start to its block's end
            by_block = tl.reshape(p, [p.shape[0], BJ, BC])
            own = tl.sum(by_block * tl.minimum(left, CHUNKS).to(tl.float32)[None, None, :], 2)  # [ROWS, BJ]
            at = shares + ((tile * BJ + tl.arange(0, BJ)) * (PLANES * HP)).to(tl.int64)[None, :]
            tl.store(at, own, mask=live[:, None])
            if PLANES == 2:
                over = tl.sum(by_block * tl.maximum(CHUNKS - left, 0).to(tl.float32)[None, None, :], 2)
                tl.store(at + HP, over, mask=live[:, None])
            tl.store(peaks + tile * HP, peak, mask=live)
    return acc, peak, total


@triton.jit
def _store_part(
    o_parts, stats, num_rows, row, live, part, parts, acc, peak, total, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """o_parts [rows, parts, DV], stats [2, rows, parts]: a row is (b, query, head)."""
    d = tl.arange(0, BLOCK_DV)
    at = row * parts + part
    tl.store(o_parts + at[:, None] * DV + d[None, :], acc, mask=live[:, None] & (d < DV)[None, :])
    tl.store(stats + at, peak, mask=live)
    tl.store(stats + num_rows * parts + at, total, mask=live)


@triton.jit(do_not_specialize=["n", "G", "splits", "pool", "capacity", "blocks", "tiles"])
def interval_kernel(
    q_ptr, k_ptr, v_ptr, places, positions, o_parts, stats, shares, peaks,
    q_sb, q_sn, q_sh, k_sp, k_st, k_sg, v_sp, v_st, v_sg, places_sb,
    n, G, splits, pool, capacity, blocks, tiles, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, QT: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr, PLANES: tl.constexpr, SAME: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one lane. Grid (B * query tiles * G, splits). positions [B, n]. The first of its call,
    it starts when everything before it is done."""
    if OVERLAP:
        gdc_launch_dependents()
    ROWS: tl.constexpr = QT * HP
    lane, split = tl.program_id(0), tl.program_id(1)
    query_tiles = tl.cdiv(n, QT)
    g = lane % G
    query = lane // G % query_tiles * QT
    b = lane // G // query_tiles
    r = tl.arange(0, ROWS)
    i = query + r // HP
    head = r % HP
    live = (i < n) & (head < HEADS)
    t = tl.minimum(tl.load(positions + b * n + i, mask=i < n, other=-1), capacity - 1)
    lo, hi = keys_seen(t, SPAN, STRIDE, WINDOW)
    highest = tl.max(hi, 0)
    lowest = tl.min(tl.where(hi > 0, lo, 0x7FFFFFFF), 0)
    tile_first, count = tiles_seen(lowest, highest, BJ * R)
    share = tiles_of_part(count, splits)
    first = split * share
    if (highest > 0) & (first < count):
        b64, g64 = b.to(tl.int64), g.to(tl.int64)
        row = (b64 * n + i) * (G * HEADS) + g64 * HEADS + head
        d = tl.arange(0, BLOCK_DK)
        q_row = b64 * q_sb + i.to(tl.int64) * q_sn + (g64 * HEADS + head) * q_sh
        q = _load_queries(q_ptr, q_row, live, d, DK, BLOCK_DK)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        peak = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        share_rows, peak_rows = shares, peaks
        if PLANES > 0:
            at = (b64 * n + i) * G + g
            share_rows = (shares + at * blocks * (PLANES * HP) + head)[:, None]
            peak_rows = peaks + at * tiles * HP + head
        acc, peak, total = _attend_interval(
            acc, peak, total, q, lo, hi, lowest, highest, tile_first + first,
            tile_first + tl.minimum(first + share, count),
            k_ptr + g64 * k_sg, v_ptr + g64 * v_sg, places + b64 * places_sb, pool,
            k_sp, k_st, v_sp, v_st, share_rows, peak_rows, live, scale * LOG2E,
            RING, PAGE, R, BC, BJ, DK, DV, BLOCK_DK, BLOCK_DV, PRECISION, CHUNKS, PLANES, HP,
            SAME, INTERPRETED,
        )  # fmt: skip
        num_rows = (tl.num_programs(0).to(tl.int64) // G // query_tiles) * n * (G * HEADS)
        _store_part(o_parts, stats, num_rows, row, live, split, splits, acc, peak, total, DV, BLOCK_DV)


@triton.jit
def _next_tile(
    chosen, tile, last, start_win, table, selected, page_win,
    PAGE: tl.constexpr, SEL_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, BN: tl.constexpr, PAGED: tl.constexpr,
    PAGE_WIN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The first token and the page of a tile of `blocks_kernel`, the last one where `tile` lies behind it."""
    tile = tl.minimum(tile, last)
    # Without branches, which a pipelined loop must not have: the lookup of the other branch is harmless.
    block = _look_up(chosen, tl.where(selected, tile // PER_BLOCK, 0), INTERPRETED)
    start = tl.where(selected, block * SEL_BLOCK + tile % PER_BLOCK * BN, start_win + tile * BN)
    if PAGED:
        page = _look_up(table, tl.where(selected, start // PAGE, start // PAGE_WIN), INTERPRETED)
    else:
        page = _look_up(table, tl.where(selected, start // PAGE, 0), INTERPRETED)
        page = tl.where(selected, page, page_win)
    return start, page


@triton.jit(do_not_specialize=["n", "G", "parts_sel", "parts_win", "pool_sel", "pool_win", "capacity"])
def blocks_kernel(
    q_ptr, k_sel, v_sel, sel_table, k_win, v_win, win_places, positions, indices, o_parts, stats,
    q_sb, q_sn, q_sh, ks_sp, ks_st, ks_sg, vs_sp, vs_st, vs_sg, sel_sb,
    kw_sp, kw_st, kw_sg, vw_sp, vw_st, vw_sg, win_sb,
    n, G, parts_sel, parts_win, pool_sel, pool_win, capacity, scale,
    WINDOW: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, PAGE_WIN: tl.constexpr,
    SEL_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr, PER_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    SAME: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the selected blocks, or of the window, of one query and group. Grid (B * n * G, parts). A block is
    read in PER_BLOCK tiles of BN keys. One loop serves both branches, as two would not share their buffers."""
    lane, part = tl.program_id(0), tl.program_id(1)
    selected = part < parts_sel
    if OVERLAP:
        gdc_launch_dependents()
        if selected:  # the window needs no blocks
            gdc_wait()
    g = lane % G
    i = lane // G % n
    b = lane // G // n
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    lowest = tl.maximum(t + 1 - WINDOW, 0)
    first_win, tiles_win = tiles_seen(lowest, t + 1, BN)
    tiles = tl.where(selected, tl.minimum(t // SEL_BLOCK + 1, NUM_SELECTED) * PER_BLOCK, tiles_win)
    share = tiles_of_part(tiles, tl.where(selected, parts_sel, parts_win))
    first = tl.where(selected, part, part - parts_sel) * share
    if (t >= 0) & (first < tiles):
        b64, g64 = b.to(tl.int64), g.to(tl.int64)
        head = tl.arange(0, HP)
        live = head < HEADS
        dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
        q_row = b64 * q_sb + i.to(tl.int64) * q_sn + (g64 * HEADS + head) * q_sh
        q = _load_queries(q_ptr, q_row, live, dk, DK, BLOCK_DK)
        acc = tl.zeros([HP, BLOCK_DV], tl.float32)
        peak = tl.full([HP], NOTHING, tl.float32)
        total = tl.zeros([HP], tl.float32)

        k_ptr = tl.where(selected, k_sel + g64 * ks_sg, k_win + g64 * kw_sg)
        v_ptr = tl.where(selected, v_sel + g64 * vs_sg, v_win + g64 * vw_sg)
        k_sp, k_st = tl.where(selected, ks_sp, kw_sp).to(tl.int64), tl.where(selected, ks_st, kw_st).to(tl.int64)
        v_sp, v_st = tl.where(selected, vs_sp, vw_sp).to(tl.int64), tl.where(selected, vs_st, vw_st).to(tl.int64)
        pool = tl.where(selected, pool_sel, pool_win)
        chosen = indices + lane.to(tl.int64) * NUM_SELECTED
        table = sel_table + b64 * sel_sb
        places = win_places + b64 * win_sb
        ring = tl.load(places)
        if RING == 0:
            table = tl.where(selected, table, places)
        c = tl.arange(0, BN)
        last, start_win = tiles - 1, first_win * BN
        start, page = _next_tile(
            chosen, first, last, start_win, table, selected, ring,
            PAGE, SEL_BLOCK, PER_BLOCK, BN, RING == 0, PAGE_WIN, INTERPRETED,
        )  # fmt: skip
        for tile in tl.range(first, tl.minimum(first + share, tiles)):
            key = start + c
            low = tl.where(selected, start, lowest)
            high = tl.where(selected, tl.minimum(t, start // SEL_BLOCK * SEL_BLOCK + SEL_BLOCK - 1), t)
            near = tl.minimum(tl.maximum(key, low), high)
            if RING > 0:
                place = tl.where(selected, near % PAGE, near % RING)
            else:
                place = tl.where(selected, near % PAGE, near % PAGE_WIN)
                if PAGE_WIN % BN != 0:  # the tile may lie in several pages; a block never does
                    page = _look_up(table, tl.where(selected, start // PAGE, near // PAGE_WIN), INTERPRETED)
            this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
            k_row = this * k_sp + place * k_st
            v_row = k_row if SAME else this * v_sp + place * v_st
            start, page = _next_tile(
                chosen, tile + 1, last, start_win, table, selected, ring,
                PAGE, SEL_BLOCK, PER_BLOCK, BN, RING == 0, PAGE_WIN, INTERPRETED,
            )  # fmt: skip
            k = load_tile(k_ptr + k_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
            v = load_tile(v_ptr + v_row[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            s = tl.where(((key >= low) & (key <= high))[None, :], s, NOTHING)
            acc, peak, total, _ = _step(acc, peak, total, s, v, False, PRECISION)
        row = (b64 * n + i) * (G * HEADS) + g64 * HEADS + head
        num_rows = tl.num_programs(0).to(tl.int64) * HEADS
        _store_part(
            o_parts, stats, num_rows, row, live, part, parts_sel + parts_win, acc, peak, total, DV, BLOCK_DV
        )  # fmt: skip
