"""Decoding of MSA in three launches whose grids depend only on shapes: the scores of all blocks, the choice of blocks
with their attention in parts (`msa_decode_kernels.py`), and the merge of the parts (`decode_merging.py`).

In a launch, `columns` are the keys that a program reads at a time and `rows` the desired programs per multiprocessor.
`Launches.cmp` is the launch of the scores.

Legend: B batch, n new tokens, G key/value heads, H query heads, E index head size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.ops.spec import MSASpec
from nsa.ops.triton import decode
from nsa.ops.triton.decode import (
    LEAST_REGISTERS,
    MOST_KEPT,
    MOST_TILE_BYTES,
    Launches,
    blocks_plan,
    head_sizes,
    in_registers,
    merge_plan,
    num_parts,
    options,
    same_rows,
)
from nsa.ops.triton.decode import refusal as refusal
from nsa.ops.triton.decode_merging import merge_kernel
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
from nsa.ops.triton.msa_decode_kernels import chosen_kernel, index_scores_kernel

SCORE_BYTES = 256 << 20  # scores of blocks for one piece of the queries
MOST_ROWS = 64  # queries x groups that share loads of index keys
# If every program reads one tile of index keys: programs per multiprocessor, so that all of them run at once.
ONE_TILE = 4

LAUNCHES = LaunchTable({
    ("scores", "sm90"): {64: Launch(3, 128, 4, 4), 128: Launch(3, 128, 4, 3), 256: Launch(2, 64, 4, 3)},
    ("scores", "sm80"): {64: Launch(3, 128, 4, 3), 128: Launch(3, 64, 4, 3), 256: Launch(2, 32, 4, 3)},
    ("scores", "fp32"): {64: Launch(2, 64, 4, 1), 128: Launch(2, 32, 4, 1), 256: Launch(2, 16, 4, 1)},
})  # fmt: skip


def default_params(q: Tensor, index_q: Tensor, v: Tensor, capacity: int, card: Card | None = None) -> Launches:
    """The launches for queries like q and index_q over at most `capacity` tokens. While one tile of index keys per
    program suffices, programs are so many, and hold their tile in registers."""
    card = card or card_of(q)
    scores = LAUNCHES.find("scores", index_q, index_q, card)
    tiles = q.shape[0] * cdiv(capacity, scores.columns)
    if q.shape[1] == 1 and tiles <= ONE_TILE * card.multiprocessors:
        scores = replace(scores, rows=ONE_TILE, maxnreg=128)
    return replace(decode.default_params(q, v, 0, card), cmp=scores)


def msa(
    q: Tensor, index_q: Tensor, k: Tensor, v: Tensor, index_keys: Tensor, table: Tensor, positions: Tensor,
    spec: MSASpec, params: Launches | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as `nsa.ops.reference.decode.msa`."""
    q, index_q, *cache = map(unit_last, (q, index_q, k, v, index_keys, table))
    capacity = k.shape[1] * table.shape[1]
    params = params or default_params(q, index_q, v, capacity)
    step = max(1, SCORE_BYTES // (4 * q.shape[0] * v.shape[2] * _width(capacity, spec)))
    pieces = [
        _piece(q[:, piece], index_q[:, piece], cache, positions[:, piece].contiguous(), spec, params)
        for piece in (slice(first, first + step) for first in range(0, q.shape[1], step))
    ]
    if len(pieces) == 1:
        return pieces[0]
    o, indices = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    return o, indices


def _piece(
    q: Tensor, index_q: Tensor, cache: list[Tensor], positions: Tensor, spec: MSASpec, params: Launches
) -> tuple[Tensor, Tensor]:
    k, v, index_keys, table = cache
    (batch, new, heads, dk), (pool, page, groups, dv) = q.shape, v.shape
    entries, size, card = table.shape[1], index_q.shape[3], card_of(q)
    capacity = page * entries
    width, rows, lines = _width(capacity, spec), batch * new * heads, batch * new * groups
    tile_rows = max(16, min(MOST_ROWS, power_of_2(new * groups)))
    keys = params.cmp.columns
    blocks_per_tile, tiles = max(1, keys // spec.block), cdiv(capacity, max(keys, spec.block))
    lanes = batch * cdiv(new * groups, tile_rows)
    splits = max(1, min(params.cmp.rows * card.multiprocessors // lanes, tiles))
    few_bytes = keys * padded(size) * q.element_size() <= MOST_TILE_BYTES * 32 * params.cmp.num_warps
    single = splits == tiles and keys >= spec.block and tile_rows < 64 and few_bytes and q.dtype != torch.float32
    block = blocks_plan(heads // groups, spec, params.blocks)
    tiles_chosen = spec.num_selected * block["PER_BLOCK"]
    parts = num_parts(lines, params.blocks, card, tiles_chosen)
    kept = max(32, power_of_2(width))
    one = parts == tiles_chosen and kept <= MOST_KEPT
    f32: Any = {"dtype": torch.float32}
    scores = q.new_empty(lines, width, **f32)
    o = q.new_empty(batch, new, heads, dv)
    indices = q.new_empty(batch, new, groups, spec.num_selected, dtype=torch.int32)
    o_parts, stats = q.new_empty(rows, parts, dv, **f32), q.new_empty(2, rows, parts, **f32)
    sizes = head_sizes(dk, dv, q.dtype == torch.float32)
    with launch_on(q):
        launcher(index_scores_kernel, (lanes, splits), q)(
            index_q, index_keys, table, positions, scores,
            *index_q.stride()[:3], *index_keys.stride()[:2], table.stride(0),
            new, splits, entries, pool, capacity, width, G=groups, ROWS=tile_rows, KEYS=keys,
            BLOCKS=blocks_per_tile, PARTS=max(1, spec.block // keys), SEL_BLOCK=spec.block, PAGE=page,
            NUM_SELECTED=spec.num_selected, NUM_LOCAL=spec.num_local, E=size, BLOCK_E=padded(size),
            PRECISION=sizes["PRECISION"], ALONE=lanes == batch, SINGLE=single, INTERPRETED=q.is_cpu,
            OVERLAP=params.overlap, **options(params.cmp, tile_rows, LEAST_REGISTERS),
        )  # fmt: skip
        launcher(chosen_kernel, (lines, parts), q)(
            q, k, v, table, positions, scores, indices, o_parts, stats,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], table.stride(0),
            new, groups, parts, pool, capacity, width, dk**-0.5, PAGE=page, SEL_BLOCK=spec.block,
            NUM_SELECTED=spec.num_selected, NUM_PADDED=power_of_2(spec.num_selected),
            NUM_INIT=spec.num_init, NUM_LOCAL=spec.num_local,
            BLOCK=min(kept, 2048) if kept > MOST_KEPT else kept, TILED=kept > MOST_KEPT, ONE=one, **block, **sizes,
            SAME=same_rows(k, v), SINGLE=one and in_registers(q, dv, block["HP"], block["BN"], params.blocks),
            INTERPRETED=q.is_cpu, **params.overlapping(), **options(params.blocks, block["HP"]),
        )  # fmt: skip
        merge = merge_plan(rows, parts, 0, dv, card)
        launcher(merge_kernel, (rows, cdiv(dv, merge["BLOCK_DV"])), q)(
            positions, o_parts, stats, o, new, heads, parts, capacity,
            SPAN=1, STRIDE=1, WINDOW=0, QT=1, TILE=block["BN"], DV=dv, **merge, **params.overlapping(),
        )  # fmt: skip
    return o, indices


def _width(capacity: int, spec: MSASpec) -> int:
    """The length of a row of block scores, a multiple of 16."""
    return cdiv(capacity // spec.block, 16) * 16
