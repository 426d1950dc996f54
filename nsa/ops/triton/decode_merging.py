"""The kernels of `decode.py` that put parts together: the choice of blocks, and outputs. See `decode_kernels.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.triton.decode_kernels import NOTHING, keys_seen, power_of_2, tiles_of_part, tiles_seen
from nsa.ops.triton.selection_kernels import pick_row, pick_tiled


@triton.jit
def _splits_used(
    positions, b, i, n, splits, capacity, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    QT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many splits of `interval_kernel` hold keys of query i's lane."""
    query = i // QT * QT + tl.arange(0, QT)
    t = tl.minimum(tl.load(positions + b * n + query, mask=query < n, other=-1), capacity - 1)
    lo, hi = keys_seen(t, SPAN, STRIDE, WINDOW)
    highest = tl.max(hi, 0)
    lowest = tl.min(tl.where(hi > 0, lo, 0x7FFFFFFF), 0)
    _, count = tiles_seen(lowest, highest, TILE)
    return tl.where(highest > 0, tl.cdiv(count, tiles_of_part(count, splits)), 0)


@triton.jit(do_not_specialize=["n", "G", "splits", "capacity", "blocks", "tiles", "width"])
def pick_blocks_kernel(
    positions, stats, shares, peaks, scores, indices,
    n, G, splits, capacity, blocks, tiles, width,
    CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, SEL_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, QT: tl.constexpr, R: tl.constexpr, BJ: tl.constexpr,
    PLANES: tl.constexpr, SPLITS: tl.constexpr, CJ: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The blocks of one query and group. Grid (B * n * G). shares [B,n,G,blocks,PLANES,HP], peaks [B,n,G,tiles,HP],
    scores [B,n,G,width] is workspace, indices [B,n,G,NUM_SELECTED]."""
    FREE: tl.constexpr = NUM_SELECTED - NUM_INIT - NUM_LOCAL
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.program_id(0)
    g = lane % G
    i = lane // G % n
    b = lane // G // n
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    own = t // SEL_BLOCK
    lane64 = lane.to(tl.int64)
    out = indices + lane64 * NUM_SELECTED
    place = tl.arange(0, NUM_PADDED)
    if (t < 0) | (own < NUM_SELECTED):
        tl.store(out + place, tl.where((place <= own) & (t >= 0), place, -1), mask=place < NUM_SELECTED)
    else:
        # More blocks than places, so the forced ones are apart: the first, then the free, then the newest.
        forced = (place < NUM_INIT) | (place >= NUM_SELECTED - NUM_LOCAL)
        newest = own - (NUM_SELECTED - 1 - place)
        tl.store(out + place, tl.where(place < NUM_INIT, place, newest), mask=forced & (place < NUM_SELECTED))
        if FREE > 0:
            head = tl.arange(0, HP)
            row = (b.to(tl.int64) * n + i) * (G * HEADS) + g * HEADS + head
            used = _splits_used(positions, b, i, n, splits, capacity, CMP_BLOCK, CMP_STRIDE, 0, QT, BJ * R)
            split = tl.arange(0, SPLITS)
            there = (head < HEADS)[:, None] & (split < used)[None, :]
            at = row[:, None] * splits + split[None, :]
            num_rows = tl.num_programs(0).to(tl.int64) * HEADS
            peak = tl.load(stats + at, mask=there, other=NOTHING)
            total = tl.load(stats + num_rows * splits + at, mask=there, other=0.0)
            top = tl.max(peak, 1)
            lse = top + tl.log2(tl.maximum(tl.sum(total * tl.exp2(peak - top[:, None]), 1), 1e-30))
            whole = tl.floor(lse)
            weight = tl.exp2(whole - lse)  # [HP]
            _, seen = keys_seen(t, CMP_BLOCK, CMP_STRIDE, 0)
            stop = own - NUM_LOCAL + 1
            line = scores + lane64 * width
            share = shares + lane64 * blocks * (PLANES * HP) + head[None, :]
            relative = peaks + lane64 * tiles * HP + head[None, :]
            for j0 in tl.range(0, stop, CJ):
                j = j0 + tl.arange(0, CJ)
                known = (j * R < seen)[:, None] & (head < HEADS)[None, :]
                mine = tl.load(share + (j * (PLANES * HP)).to(tl.int64)[:, None], mask=known, other=0.0)
                exponent = tl.load(relative + (j // BJ * HP)[:, None], mask=known, other=NOTHING)
                score = mine * power_of_2(exponent - whole[None, :])
                if PLANES == 2:
                    before = (j >= 1)[:, None] & ((j - 1) * R < seen)[:, None] & (head < HEADS)[None, :]
                    at_before = ((j - 1) * (PLANES * HP) + HP).to(tl.int64)
                    over = tl.load(share + at_before[:, None], mask=before, other=0.0)
                    exponent = tl.load(relative + ((j - 1) // BJ * HP)[:, None], mask=before, other=NOTHING)
                    score += over * power_of_2(exponent - whole[None, :])
                score = tl.sum(score * weight[None, :], 1)
                # Far below rounding, where shares may have been too small to be kept: all alike.
                tl.store(line + j, tl.where(score > 1e-30, score, 0.0), mask=j < width)
            tl.debug_barrier()
            if TILED:
                pick_tiled(line, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, 1, FREE)
            else:
                pick_row(line, out + NUM_INIT, width, NUM_INIT, stop, BLOCK, 1, FREE)


@triton.jit
def _add_parts(
    acc, peak, total, o_parts, stats, num_rows, row, start, stop, parts,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds those of a row's parts start .. start + PARTS that lie before `stop`."""
    part = start + tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_DV)
    there = part < stop
    at = row * parts + part
    tops = tl.load(stats + at, mask=there, other=NOTHING)
    sums = tl.load(stats + num_rows * parts + at, mask=there, other=0.0)
    o = tl.load(o_parts + at[:, None] * DV + d[None, :], mask=there[:, None] & (d < DV)[None, :], other=0.0)
    peak_new = tl.maximum(peak, tl.max(tops, 0))
    weight = tl.exp2(tops - peak_new)
    alpha = tl.exp2(peak - peak_new)
    return acc * alpha + tl.sum(o * weight[:, None], 0), peak_new, total * alpha + tl.sum(sums * weight, 0)


@triton.jit
def _merge(
    o_parts, stats, num_rows, row, first, used, parts,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The output of one row from its parts first .. first + used; 0 where they saw nothing. Without LOOP there are at
    most PARTS of them, and the loads of several merges overlap."""
    acc = tl.zeros([BLOCK_DV], tl.float32)
    peak = tl.full([], NOTHING, tl.float32)
    total = tl.zeros([], tl.float32)
    if LOOP:
        for start in tl.range(first, first + used, PARTS):
            acc, peak, total = _add_parts(
                acc, peak, total, o_parts, stats, num_rows, row, start, first + used, parts, DV, BLOCK_DV, PARTS
            )  # fmt: skip
    else:
        acc, peak, total = _add_parts(
            acc, peak, total, o_parts, stats, num_rows, row, first, first + used, parts, DV, BLOCK_DV, PARTS
        )  # fmt: skip
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit(do_not_specialize=["n", "H", "splits", "capacity"])
def merge_kernel(
    positions, o_parts, stats, o, n, H, splits, capacity,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, QT: tl.constexpr, TILE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The splits of `interval_kernel` put together. Grid (B * n * H): one row each of o [B, n, H, DV]."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    used = _splits_used(
        positions, row // H // n, row // H % n, n, splits, capacity, SPAN, STRIDE, WINDOW, QT, TILE
    )  # fmt: skip
    row64 = row.to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    acc = _merge(o_parts, stats, num_rows, row64, 0, used, splits, DV, BLOCK_DV, PARTS, LOOP)
    d = tl.arange(0, BLOCK_DV)
    tl.store(o + row64 * DV + d, acc.to(o.dtype.element_ty), mask=d < DV)


@triton.jit(do_not_specialize=["n", "H", "splits", "parts_sel", "parts_win", "capacity"])
def mix_parts_kernel(
    positions, gates, o_cmp, stats_cmp, o_blocks, stats_blocks, o,
    gates_sb, gates_sn, gates_sh, gates_sc, n, H, splits, parts_sel, parts_win, capacity,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, QT: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SEL_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr, PER_BLOCK: tl.constexpr,
    BN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCKS: tl.constexpr,
    LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The parts of all three branches put together and mixed. Grid (B * n * H): one row each of o [B, n, H, DV]."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    b, i, head = row // H // n, row // H % n, row % H
    row64 = row.to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    d = tl.arange(0, BLOCK_DV)
    mixed = tl.zeros([BLOCK_DV], tl.float32)
    if t >= 0:
        gate = gates + b.to(tl.int64) * gates_sb + i.to(tl.int64) * gates_sn + head.to(tl.int64) * gates_sh
        used = _splits_used(positions, b, i, n, splits, capacity, SPAN, STRIDE, 0, QT, TILE)
        cmp = _merge(o_cmp, stats_cmp, num_rows, row64, 0, used, splits, DV, BLOCK_DV, PARTS, LOOP)
        parts = parts_sel + parts_win
        tiles = tl.minimum(t // SEL_BLOCK + 1, NUM_SELECTED) * PER_BLOCK
        used = tl.cdiv(tiles, tiles_of_part(tiles, parts_sel))
        sel = _merge(o_blocks, stats_blocks, num_rows, row64, 0, used, parts, DV, BLOCK_DV, PARTS_BLOCKS, False)
        _, tiles = tiles_seen(tl.maximum(t + 1 - WINDOW, 0), t + 1, BN)
        used = tl.cdiv(tiles, tiles_of_part(tiles, parts_win))
        win = _merge(o_blocks, stats_blocks, num_rows, row64, parts_sel, used, parts, DV, BLOCK_DV, PARTS_BLOCKS, False)
        mixed = (
            tl.load(gate).to(tl.float32) * cmp
            + tl.load(gate + gates_sc).to(tl.float32) * sel
            + tl.load(gate + 2 * gates_sc).to(tl.float32) * win
        )
    tl.store(o + row64 * DV + d, mixed.to(o.dtype.element_ty), mask=d < DV)
