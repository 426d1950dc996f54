"""The tiles that a decode step reads, and its choice of blocks from the shares that `decode_kernels.py` stores.

Parts of compressed attention do not know each other's maximum, yet equal blocks must have bitwise equal scores, or ties
would not go to the lower index. So the maxima are integers, in base 2: probabilities relative to different maxima
differ exactly by powers of two. Compressed token c of block j contributes to block j and, if it extends beyond it, to
block j+1. The shares of a tile's blocks are stored for every head, the contribution of its last block to the next tile
separately. Every program that reads selected blocks chooses them itself, with the same result, and waits for no other
program.

Legend: B batch, n new tokens, G key/value heads, HEADS query heads per group, HP padded; BJ blocks of R keys a tile.
"""

import triton
import triton.language as tl

from nsa.ops.triton.flash_kernels import keys_seen
from nsa.ops.triton.selected_lists import popcount
from nsa.ops.triton.selection_kernels import pick_keys, pick_tiled

MOST_FREE = tl.constexpr(16)  # places up to which few blocks are left to compare
NOTHING = tl.constexpr(-1.0e30)  # the score of an invisible key: finite, so that differences are not NaN


@triton.jit
def power_of_2(e):
    """2**e for integers e up to 127, exactly; 0 below -126."""
    return ((tl.maximum(e, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tiles_seen(lowest, highest, TILE: tl.constexpr):
    """The first of the tiles that hold the keys lowest .. highest - 1, and their number."""
    first = lowest // TILE
    return first, tl.maximum(tl.cdiv(highest, TILE) - first, 0)


@triton.jit
def splits_used(
    positions, b, i, n, splits, capacity, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    QT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The number of splits of `interval_kernel` that hold keys of query i's lane."""
    query = i // QT * QT + tl.arange(0, QT)
    t = tl.minimum(tl.load(positions + b * n + query, mask=query < n, other=-1), capacity - 1)
    lo, hi = keys_seen(t, None, None, SPAN, STRIDE, WINDOW)
    highest = tl.max(hi, 0)
    lowest = tl.min(tl.where(hi > 0, lo, 0x7FFFFFFF), 0)
    _, count = tiles_seen(lowest, highest, TILE)
    return tl.where(highest > 0, tl.minimum(count, splits), 0)


@triton.jit
def _load_tiles(
    first, seen, shares, edges, peaks,
    HEADS: tl.constexpr, HP: tl.constexpr, R: tl.constexpr, BJ: tl.constexpr, PLANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The shares [TILES, BJ, HP] of the blocks in tiles `first` and on, of which `seen` keys count, and the share
    [TILES, HP] of each tile's first block from the tile before, both with the maxima they are relative to."""
    head, j = tl.arange(0, HP), tl.arange(0, BJ)
    tile = first + tl.arange(0, TILES)
    known = (tile * (BJ * R) < seen)[:, None] & (head < HEADS)[None, :]
    at = tile.to(tl.int64)[:, None] * HP + head[None, :]
    at_blocks = (tile.to(tl.int64)[:, None, None] * BJ + j[None, :, None]) * HP + head[None, None, :]
    share = tl.load(shares + at_blocks, mask=known[:, None, :], other=0.0)
    peak = tl.load(peaks + at, mask=known, other=NOTHING)
    edge, edge_peak = peak, peak
    if PLANES == 2:
        before = (tile >= 1)[:, None] & ((tile - 1) * (BJ * R) < seen)[:, None] & (head < HEADS)[None, :]
        edge = tl.load(edges + at - HP, mask=before, other=0.0)
        edge_peak = tl.load(peaks + at - HP, mask=before, other=NOTHING)
    return share, peak, edge, edge_peak


@triton.jit
def _score_tiles(share, peak, edge, edge_peak, whole, weight, PLANES: tl.constexpr):
    """Scores of the blocks in loaded tiles. The log-sum-exp of the heads is whole - log2(weight)."""
    TILES: tl.constexpr = share.shape[0]
    BJ: tl.constexpr = share.shape[1]
    power, weight = power_of_2(peak - whole[None, :])[:, None, :], weight[None, None, :]
    own, factor = share, power * weight
    if PLANES == 2:
        # Scaling by powers of two is exact, so its order does not matter. The score of every block but the first is one
        # product, the same for all: a sum that rounds differently would break ties.
        is_first = (tl.arange(0, BJ) == 0)[None, :, None]
        own = tl.where(is_first, share * power + (edge * power_of_2(edge_peak - whole[None, :]))[:, None, :], share)
        factor = tl.where(is_first, weight, factor)
    score = tl.reshape(tl.sum(own * factor, 2), [TILES * BJ])
    # Far below rounding, shares may have underflowed: all such scores are made equal.
    return tl.where(score > 1e-30, score, 0.0)


@triton.jit
def held(x, INTERPRETED: tl.constexpr):
    """x (of 16 or 32 bits), computed once and not used before here. Otherwise the compiler would compute it again for
    every layout in which it is used, or convert its layout right after the load while later loads wait."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
        )
    return x


@triton.jit
def pinned(x, INTERPRETED: tl.constexpr):
    """x, computed once: the compiler does not recompute the result of a `while`."""
    turn = 0
    while turn < 1:
        x = held(x, INTERPRETED)
        turn += 1
    return x


@triton.jit
def _larger(order, than):
    """The number of elements of the short `order` that are larger than each `than`."""
    return tl.sum((order[None, :] > than[:, None]).to(tl.int32), 1)


@triton.jit
def _nth_set(masks, ones, behind, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Places of the first 32 set bits in `masks` [LINES] of WIDTH bits. `ones` is the number of set bits of each line,
    `behind` their cumulative sum."""
    i, line, bit = tl.arange(0, 32), tl.arange(0, LINES), tl.arange(0, WIDTH)
    before = behind - ones
    here = (before[None, :] <= i[:, None]) & (behind[None, :] > i[:, None])  # [32, LINES]
    found = tl.sum(tl.where(here, (line * 64 + before)[None, :], 0), 1)
    mask = tl.sum(tl.where(here, masks[None, :], 0), 1)
    below = popcount(mask[:, None] & ((1 << bit) - 1)[None, :])  # [32, WIDTH]
    is_set = ((mask[:, None] >> bit[None, :]) & 1) > 0
    is_nth = is_set & (below == (i - found % 64)[:, None])
    return tl.sum(tl.where(is_nth, (found // 64 * WIDTH)[:, None] + bit[None, :], 0), 1)


@triton.jit
def pick_blocks(
    keys, out, slot, table, first, stop, write,
    SEL_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, FREE: tl.constexpr, INTERPRETED: tl.constexpr,
    LEAST: tl.constexpr = -1,
):  # fmt: skip
    """The FREE best of blocks first .. stop by their keys; keys of other blocks are LEAST. `write` stores the best to
    out, in ascending order. Returns one of them and its page, a different one for every `slot` of FREE.

    Block j is in line j % LINES. A block below the FREE-th largest of the maxima of the lines is not among the FREE
    best. Seldom more than 32 are left, which are all compared with each other. Neighbours, which are often similar, are
    in different lines. A line is in one warp, so that few steps need a barrier."""
    LINES: tl.constexpr = 32 if BLOCK <= 1024 else BLOCK // 32
    WIDTH: tl.constexpr = BLOCK // LINES
    i = tl.arange(0, 32)
    lines = pinned(tl.trans(tl.reshape(keys, [WIDTH, LINES])), INTERPRETED)
    count = stop
    bits = tl.full([LINES], 0, tl.int32)
    ones, behind = bits, bits
    if FREE <= MOST_FREE:
        best = tl.max(lines, 1)
        if LINES > 32:
            best = tl.max(tl.reshape(best, [LINES // 32, 32]), 0)
        others = pinned(best, INTERPRETED)
        rank = _larger(others.to(tl.int64) * 32 - i, best.to(tl.int64) * 32 - i)
        bound = tl.maximum(tl.sum(tl.where(rank == FREE - 1, others, 0), 0), LEAST + 1)
        bits = pinned(tl.sum((lines >= bound).to(tl.int32) << tl.arange(0, WIDTH)[None, :], 1), INTERPRETED)
        ones = popcount(bits)
        behind, count = tl.cumsum(ones, 0), tl.sum(ones, 0)
    if (FREE <= MOST_FREE) & (count <= 32):
        at = pinned(_nth_set(bits, ones, behind, LINES, WIDTH), INTERPRETED)
        left = at % WIDTH * LINES + at // WIDTH
        pages = tl.load(table + left * SEL_BLOCK // PAGE)  # arrive while the blocks are compared
        few = pinned(tl.gather(tl.reshape(lines, [BLOCK]), at, 0), INTERPRETED)
        order = tl.where(i < count, few, LEAST).to(tl.int64) * BLOCK - left  # ties go to the lower index
        rank = pinned(_larger(order, order), INTERPRETED)
        found = tl.sum(tl.where(rank == slot, left, 0), 0)
        page = tl.sum(tl.where(rank == slot, pages, 0), 0)
        if write:
            taken = -tl.where(rank < FREE, left, BLOCK)
            tl.store(out + _larger(taken, taken), left, mask=rank < FREE)
    else:
        keys = tl.reshape(tl.trans(lines), [BLOCK])
        block = tl.arange(0, BLOCK)
        places = pick_keys(block, keys, out, first, stop, BLOCK, FREE, FREE > MOST_FREE, LEAST)
        found = tl.sum(tl.where((places == slot) & (places >= 0), tl.reshape(block, [BLOCK // 32, 32]), 0), axis=None)
        page = tl.load(table + found * SEL_BLOCK // PAGE)
    return found, page


@triton.jit
def forced_blocks(
    out, t, slot, table, SEL_BLOCK: tl.constexpr, PAGE: tl.constexpr, NUM_SELECTED: tl.constexpr,
    NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
):  # fmt: skip
    """Writes the blocks that the query at t reads whatever their scores, to their places in out [NUM_SELECTED]: all,
    padded with -1, if it sees no more than NUM_SELECTED. Returns the block in place `slot`, unless it is a free place,
    and its page."""
    own = t // SEL_BLOCK
    known = tl.where((own < NUM_SELECTED) | (slot < NUM_INIT), slot, own - (NUM_SELECTED - 1 - slot))
    known = tl.minimum(tl.maximum(known, 0), tl.maximum(own, 0))
    page = tl.load(table + known * SEL_BLOCK // PAGE)
    place = tl.arange(0, NUM_PADDED)
    # With more blocks than places, forced blocks do not overlap: the first, then the free, then the newest.
    forced = (own < NUM_SELECTED) | (place < NUM_INIT) | (place >= NUM_SELECTED - NUM_LOCAL)
    all_seen = tl.where((place <= own) & (t >= 0), place, -1)
    newest = tl.where(place < NUM_INIT, place, own - (NUM_SELECTED - 1 - place))
    block = tl.where(own < NUM_SELECTED, all_seen, newest)
    tl.store(out + place, block, mask=forced & (place < NUM_SELECTED))
    return known, page


@triton.jit
def choose_blocks(
    out, t, used, row, splits, num_rows, stats, shares, edges, peaks, scores, width, slot, table,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, R: tl.constexpr, BJ: tl.constexpr, PLANES: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, ONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Writes the blocks of the query at t and one group to out [NUM_SELECTED]. `row` is that of the group's first head.
    Scores stay in registers, or if TILED in the workspace scores [width]. ONE without TILED: returns one of the blocks
    and its page from `table` without reading them back, a different one for every `slot`; the first slot writes out."""
    FREE: tl.constexpr = NUM_SELECTED - NUM_INIT - NUM_LOCAL
    CJ: tl.constexpr = TILES * BJ
    own = t // SEL_BLOCK
    found, page = forced_blocks(out, t, slot, table, SEL_BLOCK, PAGE, NUM_SELECTED, NUM_PADDED, NUM_INIT, NUM_LOCAL)
    is_free = (slot >= NUM_INIT) & (slot < NUM_SELECTED - NUM_LOCAL)
    if (own >= NUM_SELECTED) & (FREE > 0) & ((not ONE) | (slot == 0) | is_free):
        _, seen = keys_seen(t, None, None, CMP_BLOCK, CMP_STRIDE, 0)
        share, peak, edge, edge_peak = _load_tiles(0, seen, shares, edges, peaks, HEADS, HP, R, BJ, PLANES, TILES)
        # Issues all first loads before waiting for any. Without a barrier the assembler would move them after the
        # wait for the next one.
        tl.debug_barrier()
        head, split = tl.arange(0, HP), tl.arange(0, SPLITS)
        there = (head < HEADS)[:, None] & (split < used)[None, :]
        at = (row + head)[:, None] * splits + split[None, :]
        top = tl.load(stats + at, mask=there, other=NOTHING)
        total = tl.load(stats + num_rows * splits + at, mask=there, other=0.0)
        highest = tl.max(top, 1)
        lse = highest + tl.log2(tl.maximum(tl.sum(total * tl.exp2(top - highest[:, None]), 1), 1e-30))
        whole = tl.floor(lse)
        weight = tl.exp2(whole - lse)  # [HP]
        score = _score_tiles(share, peak, edge, edge_peak, whole, weight, PLANES)
        stop = own - NUM_LOCAL + 1
        if TILED:
            j = tl.arange(0, CJ)
            tl.store(scores + j, score, mask=j < width)
            for j0 in tl.range(CJ, stop, CJ):
                share, peak, edge, edge_peak = _load_tiles(
                    j0 // BJ, seen, shares, edges, peaks, HEADS, HP, R, BJ, PLANES, TILES
                )  # fmt: skip
                score = _score_tiles(share, peak, edge, edge_peak, whole, weight, PLANES)
                tl.store(scores + j0 + j, score, mask=j0 + j < width)
            tl.debug_barrier()
            pick_tiled(scores, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, 1, FREE)
        else:
            chunk = tl.arange(0, BLOCK // CJ)[:, None]
            keys = tl.where(chunk == 0, score.to(tl.int32, bitcast=True)[None, :], 0)
            if BLOCK > CJ:
                for number in tl.range(1, tl.cdiv(stop, CJ)):
                    share, peak, edge, edge_peak = _load_tiles(
                        number * TILES, seen, shares, edges, peaks, HEADS, HP, R, BJ, PLANES, TILES
                    )  # fmt: skip
                    score = _score_tiles(share, peak, edge, edge_peak, whole, weight, PLANES)
                    keys = tl.where(chunk == number, score.to(tl.int32, bitcast=True)[None, :], keys)
            block = tl.arange(0, BLOCK)
            inside = (block >= NUM_INIT) & (block < stop)
            keys = tl.where(inside, tl.reshape(keys, [BLOCK]), -1)
            if ONE:
                free, free_page = pick_blocks(
                    keys, out + NUM_INIT, slot - NUM_INIT, table, NUM_INIT, stop, slot == 0,
                    SEL_BLOCK, PAGE, BLOCK, FREE, INTERPRETED,
                )  # fmt: skip
                found, page = tl.where(is_free, free, found), tl.where(is_free, free_page, page)
            else:  # many programs hide latency, and the blocks are read back anyway
                pick_keys(block, keys, out + NUM_INIT, NUM_INIT, stop, BLOCK, FREE, True)
    return found, page
