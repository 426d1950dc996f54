"""The kernels of `decode.py` that merge parts. See `decode_kernels.py`.

With few rows, latency after the previous kernel dominates: data that do not depend on that kernel are loaded before
waiting for it, and all parts are loaded at once. All loads but one precede a barrier, since the assembler would move
them after the wait for that one. `mix_parts_kernel` starts when `interval_kernel` has ended (`blocks_kernel` ensures
that), and merges its parts while the blocks are chosen, unless `blocks_kernel` computes them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.triton.decode_choice import NOTHING, pinned, splits_used, tiles_seen


@triton.jit
def _load_parts(o_parts, stats, row, num_rows, parts, there, d, DV: tl.constexpr, PARTS: tl.constexpr):
    """Outputs [PARTS, d], sums and maxima [PARTS] of the parts of a row that exist (`there`)."""
    at = row * parts + tl.arange(0, PARTS)
    # Bypass the L1 cache, which may have been filled before another kernel wrote them.
    o_part = tl.load(
        o_parts + at[:, None] * DV + d[None, :], mask=there[:, None] & (d < DV)[None, :], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    sums = tl.load(stats + num_rows * parts + at, mask=there, other=0.0, cache_modifier=".cg")
    tl.debug_barrier()
    return o_part, sums, tl.load(stats + at, mask=there, other=NOTHING, cache_modifier=".cg")


@triton.jit
def _weights(tops, sums, there):
    """The weights of a row's parts that exist (`there`); 0 for parts that saw no key."""
    tops = tl.where(there, tops, NOTHING)
    weight = tl.where(there, tl.exp2(tops - tl.max(tops, 0)), 0.0)
    total = tl.sum(weight * sums, 0)
    return weight / tl.where(total > 0.0, total, 1.0)


@triton.jit(do_not_specialize=["n", "H", "splits", "capacity"])
def merge_kernel(
    positions, o_parts, stats, o, n, H, splits, capacity,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, QT: tl.constexpr, TILE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merges the splits of `interval_kernel`. Grid (B * n * H, pieces of DV): one row each of o [B, n, H, DV]."""
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    used = splits_used(
        positions, row // H // n, row // H % n, n, splits, capacity, SPAN, STRIDE, WINDOW, QT, TILE
    )  # fmt: skip
    there = tl.arange(0, SPLITS) < used
    row64, num_rows = row.to(tl.int64), tl.num_programs(0).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    o_part, sums, tops = _load_parts(o_parts, stats, row64, num_rows, splits, there, d, DV, SPLITS)
    merged = tl.sum(o_part * _weights(tops, sums, there)[:, None], 0)
    tl.store(o + row64 * DV + d, merged.to(o.dtype.element_ty), mask=d < DV)


@triton.jit(do_not_specialize=["n", "H", "splits", "parts_sel", "parts_win", "capacity"])
def mix_parts_kernel(
    positions, gates, o_cmp, stats_cmp, o_blocks, stats_blocks, o,
    gates_sb, gates_sn, gates_sh, gates_sc, n, H, splits, parts_sel, parts_win, capacity,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, QT: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SEL_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr, PER_BLOCK: tl.constexpr,
    BN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    AFTER: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merges the parts of all three branches and mixes them. Grid (B * n * H, pieces of DV): one row each of o
    [B, n, H, DV]. AFTER: `blocks_kernel` also wrote the parts of the compressed tokens."""
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    b, i, head = row // H // n, row // H % n, row % H
    row64, num_rows = row.to(tl.int64), tl.num_programs(0).to(tl.int64)
    t = tl.minimum(tl.load(positions + b * n + i), capacity - 1)
    gate = gates + b.to(tl.int64) * gates_sb + i.to(tl.int64) * gates_sn + head.to(tl.int64) * gates_sh
    gate_cmp, gate_sel, gate_win = tl.load(gate), tl.load(gate + gates_sc), tl.load(gate + 2 * gates_sc)
    used = splits_used(positions, b, i, n, splits, capacity, SPAN, STRIDE, 0, QT, TILE)
    there_cmp = tl.arange(0, SPLITS) < used
    part = tl.arange(0, PARTS)  # of the window, then of the selected blocks
    _, tiles = tiles_seen(tl.maximum(t + 1 - WINDOW, 0), t + 1, BN)
    in_win = part < tl.minimum(tiles, parts_win)
    tiles = tl.where(t >= 0, tl.minimum(t // SEL_BLOCK + 1, NUM_SELECTED) * PER_BLOCK, 0)
    in_sel = (part >= parts_win) & (part < parts_win + tl.minimum(tiles, parts_sel))
    there = in_win | in_sel
    parts = parts_sel + parts_win
    if OVERLAP and AFTER:
        gdc_launch_dependents()
        gdc_wait()
    o_part_cmp, sums_cmp, tops_cmp = _load_parts(o_cmp, stats_cmp, row64, num_rows, splits, there_cmp, d, DV, SPLITS)
    if AFTER:
        o_part, sums, tops = _load_parts(o_blocks, stats_blocks, row64, num_rows, parts, there, d, DV, PARTS)
    tops_cmp = pinned(tops_cmp, INTERPRETED)  # else it would be loaded again in another layout
    mixed = tl.sum(o_part_cmp * _weights(tops_cmp, sums_cmp, there_cmp)[:, None], 0) * gate_cmp.to(tl.float32)
    if not AFTER:
        if OVERLAP:
            gdc_launch_dependents()
            gdc_wait()
        o_part, sums, tops = _load_parts(o_blocks, stats_blocks, row64, num_rows, parts, there, d, DV, PARTS)
    weight = _weights(tops, sums, in_sel) * gate_sel.to(tl.float32)
    weight += _weights(tops, sums, in_win) * gate_win.to(tl.float32)
    mixed += tl.sum(o_part * weight[:, None], 0)
    tl.store(o + row64 * DV + d, mixed.to(o.dtype.element_ty), mask=d < DV)
