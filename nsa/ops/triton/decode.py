"""Attention of new tokens over a cache, in few launches whose grids depend only on shapes (`decode_kernels.py`,
`decode_choice.py`, `decode_merging.py`).

`nsa` has three launches: compressed attention split over the keys; the choice of blocks with selected and window
attention in parts; and the mix of all parts. With one sequence, the second adds up the compressed values. `paged` has
two. In a launch, `columns` are the keys that a program reads at a time and `rows` the desired programs per
multiprocessor: sequences are split accordingly. `depth` is the number of shares of blocks that a thread reads at a time
for the choice.

Legend: B batch, n new tokens, G key/value heads, H query heads, h = H/G.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import compressed_overlap, compressed_per_block
from nsa.ops.spec import NSASpec
from nsa.ops.triton import launch_table
from nsa.ops.triton.decode_kernels import blocks_kernel, interval_kernel
from nsa.ops.triton.decode_merging import merge_kernel, mix_parts_kernel
from nsa.ops.triton.launch_table import (
    Card,
    Launch,
    LaunchTable,
    card_of,
    cdiv,
    launch_on,
    launcher,
    padded,
    power_of_2,
    unit_last,
)
from nsa.ops.triton.selection import score_planes

MAX_TOKENS_PER_BLOCK = 128  # compressed tokens
MAX_SPLITS = 128
MERGE_WARPS = 8  # maximum; one warp for every 1024 numbers of a row's parts
LEAST_PIECE = 32  # minimum width of the piece of a row that a program merges
LEAST_REGISTERS = 168  # per thread: three programs of four warps fit a multiprocessor
QUERY_ROWS = 64  # queries x heads that share loads, if there are several queries
SCORE_BYTES = 256 << 20  # shares of blocks for one piece of the queries
MOST_KEPT = 8192  # block scores that a program keeps in registers
MOST_TILES = 32  # per sequence, if a program reads one tile: more would be slow to merge
FEW_SHARES = 16384  # keys x heads of a group up to which four warps choose blocks faster than eight
VALUES = 4  # tiles of compressed values per program of the second kernel
MOST_TILE_BYTES = 256  # of keys and values per thread, if a program reads one tile
UNLIMITED = 2**31 - 1

LAUNCHES = LaunchTable({
    ("cmp", "sm80"): {64: Launch(3, 64, 4, 5), 128: Launch(3, 32, 4, 5), 256: Launch(2, 32, 4, 3)},
    ("cmp", "sm90"): {64: Launch(3, 64, 4, 5), 128: Launch(3, 64, 4, 3), 256: Launch(2, 32, 4, 4)},
    ("cmp", "fp32"): {128: Launch(2, 32, 8, 1), 256: Launch(2, 16, 4, 1)},
    ("blocks", "sm80"): {64: Launch(3, 64, 4, 3, depth=32), 128: Launch(3, 32, 4, 3, depth=32),
        256: Launch(2, 32, 4, 2, depth=32)},
    ("blocks", "sm90"): {128: Launch(3, 64, 4, 3), 256: Launch(2, 32, 4, 3)},
    ("blocks", "fp32"): {128: Launch(2, 32, 4, 1), 256: Launch(2, 16, 4, 1)},
})  # fmt: skip


@dataclass(frozen=True)
class Launches:
    """The launches of a call. `cmp` is also the launch of `paged`. `overlap`: kernels start before the previous one has
    ended. `values`: with one query of 16 bits and one tile per program, the first kernel reads only keys, and each
    program of the second reads the values of this many tiles; 0: the first reads both."""

    cmp: Launch
    blocks: Launch
    overlap: bool = False
    values: int = 0

    def overlapping(self) -> dict[str, bool]:
        """Options of every launch except the first."""
        return {"OVERLAP": True, "launch_pdl": True} if self.overlap else {"OVERLAP": False}


def default_params(q: Tensor, v: Tensor, keys: int, card: Card | None = None) -> Launches:
    """The launches for queries like q over at most `keys` compressed tokens, or tokens of `paged`.

    With few sequences latency dominates. While one tile of keys per multiprocessor suffices, a program takes one tile,
    as small as that and MOST_TILES allow; and programs of `blocks_kernel` have more threads if there are many shares to
    read."""
    card = card or card_of(q)
    cmp, blocks = (LAUNCHES.find(kernel, q, v, card) for kernel in ("cmp", "blocks"))
    if q.shape[1] == 1 and q.dtype != torch.float32:
        groups = v.shape[2]
        programs = card.multiprocessors // (q.shape[0] * groups)  # for each sequence and group
        heads = q.shape[2] // groups
        columns = max(32, power_of_2(cdiv(keys, max(1, min(programs, MOST_TILES)))))
        if programs and columns <= cmp.columns * (2 if heads <= 16 else 1):
            cmp = Launch(1, columns, 8 if columns > 64 else 4, 2)
        if programs >= 16:
            blocks = replace(blocks, rows=1, num_warps=8 if keys * heads > FEW_SHARES else 4)
    hopper = card.kind == "sm90"
    return Launches(cmp, blocks, overlap=hopper, values=VALUES if hopper else 0)


def refusal(q: Tensor, v: Tensor, per_block: int = 1) -> str | None:
    """Why these kernels cannot run queries like q over values like v [P, page, G, Dv], with `per_block` compressed
    tokens in a selection block, or None."""
    if per_block > MAX_TOKENS_PER_BLOCK:
        return f"decoding takes at most {MAX_TOKENS_PER_BLOCK} compressed tokens in a selection block"
    return launch_table.group_refusal(q, v, "decoding")


def nsa(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, cmp_table: Tensor, k_sel: Tensor, v_sel: Tensor,
    sel_table: Tensor, k_win: Tensor, v_win: Tensor, win_places: Tensor, positions: Tensor, spec: NSASpec,
    params: Launches | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as `nsa.ops.reference.decode.nsa`."""
    batch, new, heads, _ = q.shape
    groups = v_sel.shape[2]
    params = params or default_params(q, v_sel, k_cmp.shape[1] * cmp_table.shape[1])
    capacity = min(
        k_cmp.shape[1] * spec.cmp_stride * cmp_table.shape[1],
        k_sel.shape[1] * sel_table.shape[1],
        k_win.shape[1] * win_places.shape[1] if win_places.dim() == 2 else UNLIMITED,
    )
    row_bytes = 4 * power_of_2(heads // groups) * groups * (capacity // spec.sel_block + 1)
    step = max(1, SCORE_BYTES // (batch * row_bytes))
    q, *caches = map(unit_last, (q, k_cmp, v_cmp, cmp_table, k_sel, v_sel, sel_table, k_win, v_win, win_places))
    pieces = [
        _nsa_piece(q[:, piece], gates[:, piece], caches, positions[:, piece].contiguous(), capacity, spec, params)
        for piece in (slice(first, first + step) for first in range(0, new, step))
    ]
    if len(pieces) == 1:
        return pieces[0]
    o, indices = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    return o, indices


def _nsa_piece(
    q: Tensor, gates: Tensor, caches: list[Tensor], positions: Tensor, capacity: int, spec: NSASpec, params: Launches
) -> tuple[Tensor, Tensor]:
    k_cmp, v_cmp, cmp_table, k_sel, v_sel, sel_table, k_win, v_win, win_places = caches
    batch, new, heads, dk = q.shape
    groups, dv = v_sel.shape[2:]
    plan = interval_plan(new, heads // groups, compressed_per_block(spec), params.cmp)
    tiles = cdiv(k_cmp.shape[1] * cmp_table.shape[1], plan["BJ"] * plan["R"])
    lanes = batch * groups * cdiv(new, plan["QT"])
    splits = num_parts(lanes, params.cmp, card_of(q), tiles)
    rows = batch * new * heads
    planes = score_planes(spec)
    block = blocks_plan(heads // groups, spec, params.blocks)
    choice = choice_plan(spec, tiles, plan["BJ"], splits, plan["HP"], params.blocks)
    lines, width = batch * new * groups, cdiv(tiles * plan["BJ"], 16) * 16
    f32: Any = {"dtype": torch.float32}
    shares = q.new_empty(lines, tiles * plan["BJ"], plan["HP"], **f32)
    edges, peaks = q.new_empty(2, lines, tiles, plan["HP"], **f32)
    scores = q.new_empty(lines, width, **f32) if choice["TILED"] else shares  # not used without TILED
    o = q.new_empty(batch, new, heads, dv)
    indices = q.new_empty(batch, new, groups, spec.num_selected, dtype=torch.int32)
    scale, window = dk**-0.5, min(spec.window, capacity)
    # The kernels do not get `window`, which would compile another kernel for every width of the page table.
    reach = min(spec.window, UNLIMITED)
    parts_sel, parts_win = branch_parts(lines, spec, window, params.blocks, card_of(q))
    parts = parts_sel + parts_win
    one = parts_sel == spec.num_selected * block["PER_BLOCK"] and not choice["TILED"]
    single = splits == tiles and in_registers(q, dv, plan["QT"] * plan["HP"], plan["BJ"] * plan["BC"], params.cmp)
    single_blocks = one and parts_win > cdiv(window, block["BN"])
    single_blocks = single_blocks and in_registers(q, dv, block["HP"], block["BN"], params.blocks)
    values = params.values if single and new == 1 and plan["R"] == plan["BC"] else 0
    parts_cmp = cdiv(tiles, values) if values else 0
    if lines * (parts_cmp + parts) > card_of(q).multiprocessors:  # programs would wait for each other
        values, parts_cmp = 0, 0
    o_cmp, stats_cmp = q.new_empty(rows, parts_cmp or splits, dv, **f32), q.new_empty(2, rows, splits, **f32)
    stats_values = q.new_empty(2, rows, parts_cmp, **f32) if values else stats_cmp
    probs = q.new_empty(lines, tiles, plan["HP"], plan["BJ"] * plan["BC"]) if values else q  # not used without values
    o_blocks, stats_blocks = q.new_empty(rows, parts, dv, **f32), q.new_empty(2, rows, parts, **f32)
    sizes = head_sizes(dk, dv, q.dtype == torch.float32)
    merge = merge_plan(rows, parts_cmp or splits, parts, dv, card_of(q))
    with launch_on(q):
        launcher(interval_kernel, (lanes, splits), q)(
            q, k_cmp, v_cmp, cmp_table, positions, o_cmp, stats_cmp, shares, edges, peaks, probs,
            *q.stride()[:3], *k_cmp.stride()[:3], *v_cmp.stride()[:3], cmp_table.stride(0),
            new, splits, cmp_table.shape[1], k_cmp.shape[0], capacity, tiles, scale, G=groups,
            SPAN=spec.cmp_block, STRIDE=spec.cmp_stride, WINDOW=0, RING=0, PAGE=k_cmp.shape[1],
            **plan, **sizes, CHUNKS=compressed_overlap(spec), PLANES=planes,
            SAME=same_rows(k_cmp, v_cmp), SINGLE=single, KEYS=values > 0, INTERPRETED=q.is_cpu, ALONE=new == 1,
            OVERLAP=params.overlap, **options(params.cmp, plan["QT"] * plan["HP"]),
        )  # fmt: skip
        launcher(blocks_kernel, (lines, parts_cmp + parts), q)(
            q, k_sel, v_sel, sel_table, k_win, v_win, win_places, positions,
            stats_cmp, shares, edges, peaks, scores, indices, o_blocks, stats_blocks,
            v_cmp, cmp_table, probs, o_cmp, stats_values,
            *q.stride()[:3], *k_sel.stride()[:3], *v_sel.stride()[:3], sel_table.stride(0),
            *k_win.stride()[:3], *v_win.stride()[:3], win_places.stride(0), *v_cmp.stride()[:3], cmp_table.stride(0),
            new, groups, parts_cmp, parts_sel, parts_win, splits, tiles, width,
            k_sel.shape[0], k_win.shape[0], k_cmp.shape[0], capacity, scale,
            WINDOW=reach, PAGE=k_sel.shape[1], **ring_or_pages(k_win, win_places, "PAGE_WIN"),
            **choice, ONE=one, QT=plan["QT"], R=plan["R"], BJ=plan["BJ"], PLANES=planes, HP_CMP=plan["HP"],
            **block, **sizes, SAME=same_rows(k_sel, v_sel) and same_rows(k_win, v_win),
            SINGLE=single_blocks, VALUES=values, PAGE_CMP=k_cmp.shape[1], INTERPRETED=q.is_cpu,
            **params.overlapping(), **options(params.blocks, block["HP"], LEAST_REGISTERS if values else 255),
        )  # fmt: skip
        launcher(mix_parts_kernel, (rows, cdiv(dv, merge["BLOCK_DV"])), q)(
            positions, gates, o_cmp, stats_values, o_blocks, stats_blocks, o,
            *gates.stride(), new, heads, parts_cmp or splits, parts_sel, parts_win, capacity,
            SPAN=spec.cmp_block, STRIDE=spec.cmp_stride, QT=plan["QT"], TILE=plan["BJ"] * plan["R"] * (values or 1),
            WINDOW=reach, SEL_BLOCK=spec.sel_block, NUM_SELECTED=spec.num_selected,
            PER_BLOCK=block["PER_BLOCK"], BN=block["BN"], DV=dv, AFTER=values > 0, INTERPRETED=q.is_cpu,
            **merge, **params.overlapping(),
        )  # fmt: skip
    return o, indices


def paged(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, positions: Tensor, window: int | None,
    params: Launches | None = None,
) -> Tensor:  # fmt: skip
    """The same as `nsa.ops.reference.decode.paged`."""
    batch, new, heads, dk = q.shape
    groups, dv = v.shape[2:]
    q, k, v, places, positions = (*map(unit_last, (q, k, v, places)), positions.contiguous())
    capacity = k.shape[1] * places.shape[1] if places.dim() == 2 else UNLIMITED
    params = params or default_params(q, v, min(capacity, 2 * window if window else capacity))  # it may start anywhere
    plan = interval_plan(new, heads // groups, 1, params.cmp)
    tiles = cdiv(min(capacity, window or capacity), plan["BJ"]) + (window is not None)
    lanes = batch * groups * cdiv(new, plan["QT"])
    splits = num_parts(lanes, params.cmp, card_of(q), tiles)
    rows = batch * new * heads
    o = q.new_empty(batch, new, heads, dv)
    o_parts = q.new_empty(rows, splits, dv, dtype=torch.float32)
    stats = q.new_empty(2, rows, splits, dtype=torch.float32)
    sizes = head_sizes(dk, dv, q.dtype == torch.float32)
    merge = merge_plan(rows, splits, 0, dv, card_of(q))
    # The windows of several queries may touch one more tile than that of one query.
    single = splits == tiles and (window is None or new == 1)
    single = single and in_registers(q, dv, plan["QT"] * plan["HP"], plan["BJ"], params.cmp)
    seen = {"SPAN": 1, "STRIDE": 1, "WINDOW": min(window or 0, UNLIMITED)}  # as in `nsa`: not `capacity`
    with launch_on(q):
        launcher(interval_kernel, (lanes, splits), q)(
            q, k, v, places, positions, o_parts, stats, o_parts, stats, stats, q,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], places.stride(0),
            new, splits, places.shape[-1], k.shape[0], capacity, 0, dk**-0.5, G=groups,
            **seen, **ring_or_pages(k, places, "PAGE"), **plan, **sizes, CHUNKS=0, PLANES=0,
            SAME=same_rows(k, v), SINGLE=single, KEYS=False, INTERPRETED=q.is_cpu, ALONE=new == 1,
            OVERLAP=params.overlap, **options(params.cmp, plan["QT"] * plan["HP"]),
        )  # fmt: skip
        launcher(merge_kernel, (rows, cdiv(dv, merge["BLOCK_DV"])), q)(
            positions, o_parts, stats, o, new, heads, splits, capacity,
            **seen, QT=plan["QT"], TILE=plan["BJ"], DV=dv, **merge, **params.overlapping(),
        )  # fmt: skip
    return o


# The following functions depend only on shapes and are cached; callers must not modify their results.


@lru_cache(maxsize=256)
def interval_plan(new: int, per_group: int, per_block: int, params: Launch) -> dict[str, int]:
    """Rows and tiles of `interval_kernel`: `new` queries, and blocks of `per_block` keys."""
    heads = power_of_2(per_group)
    queries = max(16 // heads, min(power_of_2(new), max(1, QUERY_ROWS // heads)), 1)
    padded_block = power_of_2(per_block)
    return {
        "HEADS": per_group, "HP": heads, "QT": queries,
        "R": per_block, "BC": padded_block, "BJ": max(1, max(16, params.columns) // padded_block),
    }  # fmt: skip


@lru_cache(maxsize=256)
def blocks_plan(per_group: int, spec: NSASpec, params: Launch) -> dict[str, int]:
    """Rows and tiles of `blocks_kernel`."""
    columns = min(max(16, params.columns), padded(spec.sel_block))
    return {
        "HEADS": per_group, "HP": padded(per_group), "BN": columns, "PER_BLOCK": cdiv(spec.sel_block, columns),
    }  # fmt: skip


@lru_cache(maxsize=256)
def branch_parts(lanes: int, spec: NSASpec, window: int, params: Launch, card: Card) -> tuple[int, int]:
    """The numbers of parts of the selected blocks and of the window: equal in tiles, enough to fill the GPU."""
    block = blocks_plan(1, spec, params)
    tiles_sel, tiles_win = spec.num_selected * block["PER_BLOCK"], cdiv(window, block["BN"])
    wanted = max(2, params.rows * card.multiprocessors // lanes)
    if tiles_sel + tiles_win < wanted and max(tiles_sel, tiles_win + 1) <= MAX_SPLITS // 2:
        return tiles_sel, tiles_win + 1  # one tile each; the window may start inside a tile
    parts_win = max(1, min(tiles_win, round(wanted * tiles_win / (tiles_sel + tiles_win)), MAX_SPLITS // 2))
    return max(1, min(tiles_sel, wanted - parts_win, MAX_SPLITS // 2)), parts_win


@lru_cache(maxsize=256)
def choice_plan(spec: NSASpec, tiles: int, per_tile: int, splits: int, heads: int, params: Launch) -> dict[str, Any]:
    """The constants of `choose_blocks` for sequences of at most `tiles` tiles of `per_tile` blocks."""
    blocks = max(32, power_of_2(tiles * per_tile))
    at_once = max(1, min(power_of_2(params.depth) * 32 * params.num_warps // heads, blocks) // per_tile)
    return {
        "CMP_BLOCK": spec.cmp_block, "CMP_STRIDE": spec.cmp_stride, "SEL_BLOCK": spec.sel_block,
        "NUM_SELECTED": spec.num_selected, "NUM_PADDED": power_of_2(spec.num_selected),
        "NUM_INIT": spec.num_init, "NUM_LOCAL": spec.num_local, "SPLITS": power_of_2(splits), "TILES": at_once,
        "BLOCK": min(blocks, 2048) if blocks > MOST_KEPT else blocks, "TILED": blocks > MOST_KEPT,
    }  # fmt: skip


@lru_cache(maxsize=256)
def merge_plan(rows: int, splits: int, others: int, dv: int, card: Card) -> dict[str, int]:
    """How the merging kernels read a row's `splits` and `others`: with few rows, in pieces of `dv`."""
    parts, most, piece = power_of_2(splits), power_of_2(others), padded(dv)
    while piece > LEAST_PIECE and rows * cdiv(dv, piece) <= card.multiprocessors:
        piece //= 2
    warps = power_of_2(max(1, min(MERGE_WARPS, max(parts, most) * piece // 1024)))
    return {"BLOCK_DV": piece, "SPLITS": parts, "num_warps": warps} | ({"PARTS": most} if others else {})


@lru_cache(maxsize=256)
def head_sizes(dk: int, dv: int, exact: bool) -> dict[str, Any]:
    return {
        "DK": dk, "DV": dv, "BLOCK_DK": padded(dk), "BLOCK_DV": padded(dv), "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip


@lru_cache(maxsize=256)
def options(params: Launch, rows: int, most: int = 255) -> dict[str, int]:
    """Launch options; with few rows they limit registers so that `params.rows` programs share a multiprocessor."""
    registers = 65536 // (32 * params.num_warps * params.rows) // 8 * 8
    registers = min(max(registers, LEAST_REGISTERS if rows <= 16 else 255), most)
    registers = params.maxnreg or registers
    return {"num_warps": params.num_warps, "num_stages": params.num_stages, "maxnreg": registers}


def in_registers(q: Tensor, dv: int, rows: int, columns: int, params: Launch) -> bool:
    """Whether a tile of `columns` keys and values takes few registers. Products of 64 rows would wait for the loads."""
    row_bytes = q.element_size() * (padded(q.shape[3]) + padded(dv))
    few = columns * row_bytes <= MOST_TILE_BYTES * 32 * params.num_warps
    return few and rows < 64 and q.dtype != torch.float32


def num_parts(lanes: int, params: Launch, card: Card, tiles: int) -> int:
    """The number of splits of a sequence of at most `tiles` tiles."""
    return max(1, min(params.rows * card.multiprocessors // lanes, tiles, MAX_SPLITS))


def same_rows(k: Tensor, v: Tensor) -> bool:
    """Whether k and v have the same strides, so that one set of offsets serves both."""
    return k.stride()[:2] == v.stride()[:2]


def ring_or_pages(k: Tensor, places: Tensor, page: str) -> dict[str, int]:
    ring = places.dim() == 1
    return {"RING": k.shape[1] if ring else 0, page: 1 if ring else k.shape[1]}
