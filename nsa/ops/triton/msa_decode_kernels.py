"""The kernels of `msa_decode.py`: the scores of all blocks, then attention over the chosen ones in parts, which
`merge_kernel` of `decode_merging.py` merges.

The scores are bound by the bytes of the index keys, which are one head for all groups: the rows of a program are
queries x groups of one sequence, so that each key is read once for all of them. Blocks of which a query sees only a
part are among its newest and, with one local block or more, forced: no score needs a mask then. Every program of the
attention chooses the blocks of its query and group itself, and waits for no other program. OVERLAP as in
`decode_kernels.py`.

Legend: B batch, n new tokens, G key/value heads, h query heads per group (HEADS, HP padded), E index head size.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.triton.decode_choice import NOTHING, forced_blocks, held, pick_blocks
from nsa.ops.triton.decode_kernels import LOG2E, attend_step, look_up, page_of, store_part
from nsa.ops.triton.flash_kernels import load_tile
from nsa.ops.triton.selection_kernels import load_keys, pick_keys, pick_tiled

LEAST = tl.constexpr(-(2**31))  # below the key of every score


@triton.jit(do_not_specialize=["n", "splits", "entries", "pool", "capacity", "width"])
def index_scores_kernel(
    q_ptr, k_ptr, table, positions, scores, q_sb, q_sn, q_sg, k_sp, k_st, table_sb,
    n, splits, entries, pool, capacity, width, G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, SEL_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_LOCAL: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, ALONE: tl.constexpr, SINGLE: tl.constexpr, INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores [B, n, G, width] of blocks: the maximum over their tokens. Grid (B * tiles of rows, splits); a row is a
    query and group. A split has every `splits`-th tile of KEYS keys: BLOCKS blocks, or one of the PARTS of a block, all
    of which it has. Blocks that no query needs are not read. ALONE: one tile of rows. SINGLE: one tile, no loop."""
    MASKED: tl.constexpr = (NUM_LOCAL == 0) or (BLOCKS > 1)
    if OVERLAP:
        gdc_launch_dependents()
    lane, split = tl.program_id(0), tl.program_id(1)
    row_tiles = 1 if ALONE else tl.cdiv(n * G, ROWS)
    b = lane // row_tiles
    b64 = b.to(tl.int64)
    row = lane % row_tiles * ROWS + tl.arange(0, ROWS)
    live = row < n * G
    c, e = tl.arange(0, KEYS), tl.arange(0, BLOCK_E)
    # Independent loads come first.
    at = tl.load(positions + b * n + row // G, mask=live, other=-1)
    q_row = b64 * q_sb + (row // G).to(tl.int64) * q_sn + (row % G).to(tl.int64) * q_sg
    q = load_tile(q_ptr + q_row[:, None] + e[None, :], live, e, E, BLOCK_E, True)
    table += b64 * table_sb
    page = page_of(table, split * PARTS, c, entries, True, PAGE, 1, 1, KEYS)
    if SINGLE:
        tl.debug_barrier()  # else the assembler would move loads after waits for others
    t = tl.minimum(at, capacity - 1)
    highest = tl.max(tl.where(t // SEL_BLOCK >= NUM_SELECTED, t, -1), 0)  # others read all blocks that they see
    stop = highest // SEL_BLOCK - NUM_LOCAL + 1
    count = tl.where(highest >= 0, tl.cdiv(stop, BLOCKS), 0)
    last = tl.minimum(stop * SEL_BLOCK - 1, highest)
    out = scores + (b64 * (n * G) + row) * width
    if split < count:
        best = tl.full([ROWS, BLOCKS], -float("inf"), tl.float32)
        for turn in tl.range(0, 1 if SINGLE else tl.cdiv(count - split, splits) * PARTS):
            unit = split + turn // PARTS * splits
            key = (unit * PARTS + turn % PARTS) * KEYS + c
            this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
            k_row = this * k_sp + (key % PAGE).to(tl.int64) * k_st
            if not SINGLE:  # one tile ahead
                after = (split + (turn + 1) // PARTS * splits) * PARTS + (turn + 1) % PARTS
                page = page_of(table, after, c, entries, INTERPRETED, PAGE, 1, 1, KEYS)
            k = load_tile(k_ptr + k_row[:, None] + e[None, :], key <= last, e, E, BLOCK_E, MASKED)
            if SINGLE:
                k = held(k, INTERPRETED)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if NUM_LOCAL == 0:
                s = tl.where(key[None, :] <= t[:, None], s, -float("inf"))
            if BLOCKS == 1:
                top = tl.max(s, 1)[:, None]
            else:
                top = tl.max(tl.reshape(s, [ROWS, BLOCKS, KEYS // BLOCKS]), 2)
            best = top if PARTS == 1 else tl.where(turn % PARTS > 0, tl.maximum(best, top), top)
            block = unit * BLOCKS + tl.arange(0, BLOCKS)
            tl.store(out[:, None] + block[None, :], best, mask=live[:, None] & (block < width)[None, :])


@triton.jit
def _choose(
    out, t, scores, width, slot, table, SEL_BLOCK: tl.constexpr, PAGE: tl.constexpr, NUM_SELECTED: tl.constexpr,
    NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr, BLOCK: tl.constexpr,
    TILED: tl.constexpr, ONE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Writes the blocks of the query at t and one group, whose scores are `scores` [width], to out [NUM_SELECTED]. ONE:
    returns one of the blocks and its page, a different one for every `slot`; the first slot writes out."""
    FREE: tl.constexpr = NUM_SELECTED - NUM_INIT - NUM_LOCAL
    own = t // SEL_BLOCK
    found, page = forced_blocks(out, t, slot, table, SEL_BLOCK, PAGE, NUM_SELECTED, NUM_PADDED, NUM_INIT, NUM_LOCAL)
    is_free = (slot >= NUM_INIT) & (slot < NUM_SELECTED - NUM_LOCAL)
    if (own >= NUM_SELECTED) & (FREE > 0) & ((not ONE) | (slot == 0) | is_free):
        stop = own - NUM_LOCAL + 1
        if TILED:
            pick_tiled(scores, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, 1, FREE, LEAST)
        else:
            block, keys = load_keys(scores, width, NUM_INIT, stop, 0, BLOCK, 1, LEAST)
            if ONE:
                free, free_page = pick_blocks(
                    keys, out + NUM_INIT, slot - NUM_INIT, table, NUM_INIT, stop, slot == 0,
                    SEL_BLOCK, PAGE, BLOCK, FREE, INTERPRETED, LEAST,
                )  # fmt: skip
                found, page = tl.where(is_free, free, found), tl.where(is_free, free_page, page)
            else:
                pick_keys(block, keys, out + NUM_INIT, NUM_INIT, stop, BLOCK, FREE, True, LEAST)
    return found, page


@triton.jit
def _tile_of(
    chosen, tile, last, table,
    PAGE: tl.constexpr, SEL_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, BN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The first token and the page of a tile of the chosen blocks; those of the last tile if `tile` is after it."""
    tile = tl.minimum(tile, last)
    block = tl.sum(tl.where(tl.arange(0, chosen.shape[0]) == tile // PER_BLOCK, chosen, 0), 0)
    start = block * SEL_BLOCK + tile % PER_BLOCK * BN
    return start, look_up(table, start // PAGE, INTERPRETED)


@triton.jit(do_not_specialize=["n", "G", "parts", "pool", "capacity", "width"])
def chosen_kernel(
    q_ptr, k_ptr, v_ptr, table, positions, scores, indices, o_parts, stats,
    q_sb, q_sn, q_sh, k_sp, k_st, k_sg, v_sp, v_st, v_sg, table_sb,
    n, G, parts, pool, capacity, width, scale, PAGE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, ONE: tl.constexpr,
    PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    SAME: tl.constexpr, SINGLE: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Chooses the blocks of one query and group and attends to every `parts`-th tile of them. Grid (B * n * G, parts).
    A block is read in PER_BLOCK tiles of BN keys. ONE: a program has one tile; SINGLE: without a loop. Part p has keys
    if the query sees more than p tiles, which `merge_kernel` relies on. indices [B, n, G, NUM_SELECTED]."""
    lane, part = tl.program_id(0), tl.program_id(1)
    g, i, b = lane % G, lane // G % n, lane // G // n
    b64, g64, lane64 = b.to(tl.int64), g.to(tl.int64), lane.to(tl.int64)
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    head = tl.arange(0, HP)
    live = head < HEADS
    dk, dv, c = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV), tl.arange(0, BN)
    q_rows = (q_ptr + b64 * q_sb + i.to(tl.int64) * q_sn + (g64 * HEADS + head) * q_sh)[:, None] + dk[None, :]
    if PRECISION != "ieee":
        q = load_tile(q_rows, live, dk, DK, BLOCK_DK, True)
    table += b64 * table_sb
    out = indices + lane64 * NUM_SELECTED
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    block, page = _choose(
        out, t, scores + lane64 * width, width, part // PER_BLOCK, table, SEL_BLOCK, PAGE,
        NUM_SELECTED, NUM_PADDED, NUM_INIT, NUM_LOCAL, BLOCK, TILED, ONE, INTERPRETED,
    )  # fmt: skip
    count = tl.minimum(tl.cdiv(tl.maximum(t + 1, 0), BN), NUM_SELECTED * PER_BLOCK)
    if part < count:
        start = block * SEL_BLOCK + part % PER_BLOCK * BN
        if not ONE:
            tl.debug_barrier()
            number = tl.arange(0, NUM_PADDED)
            chosen = tl.load(out + number, mask=number < NUM_SELECTED, other=0)
            start, page = _tile_of(chosen, part, count - 1, table, PAGE, SEL_BLOCK, PER_BLOCK, BN, INTERPRETED)
        if PRECISION == "ieee":  # loaded before, it would stay in registers that the products need
            q = load_tile(q_rows, live, dk, DK, BLOCK_DK, True)
        acc = tl.zeros([HP, BLOCK_DV], tl.float32)
        peak = tl.full([HP], NOTHING, tl.float32)
        total = tl.zeros([HP], tl.float32)
        k_ptr += g64 * k_sg
        v_ptr += g64 * v_sg
        for turn in tl.range(0, 1 if ONE else tl.cdiv(count - part, parts)):
            key = start + c
            # A token that is written: only the query's own block goes beyond t.
            place = (tl.minimum(key, t) % PAGE).to(tl.int64)
            this = tl.minimum(tl.maximum(page, 0), pool - 1).to(tl.int64)
            k_row = this * k_sp + place * k_st
            v_row = k_row if SAME else this * v_sp + place * v_st
            if not ONE:
                start, page = _tile_of(
                    chosen, part + (turn + 1) * parts, count - 1, table, PAGE, SEL_BLOCK, PER_BLOCK, BN, INTERPRETED
                )  # fmt: skip
            k = load_tile(k_ptr + k_row[:, None] + dk[None, :], live, dk, DK, BLOCK_DK, False)
            v = load_tile(v_ptr + v_row[:, None] + dv[None, :], live, dv, DV, BLOCK_DV, False)
            if SINGLE:
                tl.debug_barrier()  # issues both loads before waiting for either
                k = held(k, INTERPRETED)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            if SINGLE:
                v = held(v, INTERPRETED)
            s = tl.where((key <= t)[None, :], s, NOTHING)
            acc, peak, total, _ = attend_step(acc, peak, total, s, v, False, PRECISION)
        row, num_rows = lane64 * HEADS + head, tl.num_programs(0).to(tl.int64) * HEADS
        store_part(o_parts, stats, num_rows, row, live, part, parts, acc, peak, total, DV, BLOCK_DV)
