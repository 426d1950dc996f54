"""Tiles of neighbouring queries, the union of the blocks each reads, and what the attention kernels share.

Promises the same of its lists as `selected_lists`. For the `queries` queries of a tile there is one entry
(mask << 32 | start) per block that any of them chose; bit s of the mask tells whether query s did. Entries that
all queries of the tile read whole come first, so that the attention loop over them needs no mask.

Legend: B batch, S tokens, G key/value heads, h query heads per group, n indices per query, P = B*G pairs (b, g).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.spec import NSASpec
from nsa.ops.triton.common import arch_of, cdiv, power_of_2
from nsa.ops.triton.selected_lists import Blocks, block_start

MAX_TILE_QUERIES = 32  # one bit each in half an entry
MAX_CANDIDATES = 2048  # indices of one tile, all compared with one another


@dataclass(frozen=True)
class TileParams:
    """One launch: `rows` rows (queries x heads) against `keys` keys at a time. A query-major tile holds as many
    queries as fit, or at most `queries`."""

    rows: int
    warps: int
    stages: int
    keys: int = 64
    queries: int = MAX_TILE_QUERIES


@dataclass(frozen=True)
class QueryParams:
    """How queries are cut into tiles.

    method  "query": small tiles, least wasted work; "tile": large ones, least traffic and full tensor cores;
            "adaptive": each large tile of queries is done whichever way its own lists make cheaper
    ratio   cost of an entry in a large tile, counted in entries of a small one; for "adaptive"
    """

    method: str
    small: TileParams
    large: TileParams
    ratio: float = 2.0


@dataclass(frozen=True)
class TileLists:
    """entries [P, tiles, capacity] int64; counts [P, tiles, 2] int32: entries read whole by all, and all entries."""

    queries: int
    tiles: int
    capacity: int
    entries: Tensor
    counts: Tensor


@dataclass(frozen=True)
class TilePass:
    """One launch: row r of a tile is query r // heads, head r % heads; `head_tiles` tiles make up all heads.
    With `take`, a tile runs where the entry of its large tile (of `sub` tiles) equals `wanted`."""

    params: TileParams
    rows: int
    heads: int
    head_tiles: int
    lists: TileLists
    take: Tensor | None
    wanted: int
    sub: int

    @property
    def programs(self) -> int:
        return self.lists.entries.shape[0] * self.lists.tiles * self.head_tiles


LaunchKey = tuple[int, int, int]  # architecture, head class, bits per element
TileTable = dict[LaunchKey, tuple[TileParams, TileParams, float]]  # -> small tile, large tile, ratio


def launch_key(q: Tensor, v: Tensor) -> LaunchKey:
    """Float32 runs on the ordinary cores and has one set of parameters, filed under 80."""
    head_class = max(64, power_of_2(max(q.shape[3], v.shape[3])))
    bits = q.element_size() * 8
    arch = 90 if arch_of(q) >= 90 and bits == 16 else 80
    return arch, head_class, bits


def choose_tiles(q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, table: TileTable) -> QueryParams:
    """The launch parameters that a table has for such tensors."""
    per_group = q.shape[2] // k.shape[2]
    small, large, ratio = table[launch_key(q, v)]
    # A group of many heads fills a tile with one query; four warps carry 64 rows.
    rows = min(large.rows, max(small.rows, power_of_2(per_group)))
    small = large if rows == large.rows else replace(small, rows=rows, warps=max(small.warps, rows // 16))
    if per_group >= 16:
        ratio = min(ratio, 1.5)  # small tiles have no idle rows then
    visible = -(-q.shape[1] // spec.sel_block)
    # When a query reads most of what it may see, so do its neighbours: nearly dense, whatever was selected.
    return QueryParams("tile" if visible <= 2 * spec.num_selected else "adaptive", small, large, ratio)


def plan_tiles(indices: Tensor, spec: NSASpec, blocks: Blocks, per_group: int, params: QueryParams) -> list[TilePass]:
    """The launches that together cover every query once."""
    small, large = (_tile_shape(per_group, indices.shape[3], tile) for tile in (params.small, params.large))
    many = large[2] // small[2] * small[2]  # large tiles consist of whole small ones
    if params.method == "adaptive" and many > small[2]:
        lists = tile_lists(indices, spec, blocks, small[2])
        wide, take = tile_lists_where_cheaper(indices, spec, blocks, many, lists, params.ratio)
        return [
            TilePass(params.large, large[0], large[1], -(-per_group // large[1]), wide, take, 1, 1),
            TilePass(params.small, small[0], small[1], -(-per_group // small[1]), lists, take, 0, many // small[2]),
        ]
    tile, (rows, heads, queries) = (params.large, large) if params.method == "tile" else (params.small, small)
    lists = tile_lists(indices, spec, blocks, queries)
    return [TilePass(tile, rows, heads, -(-per_group // heads), lists, None, 0, 1)]


def _tile_shape(per_group: int, chosen: int, tile: TileParams) -> tuple[int, int, int]:
    """(rows, heads, queries) of a tile: `rows` cut to what the mask bits can tell apart."""
    rows = tile.rows
    while rows > MAX_TILE_QUERIES * per_group:
        rows //= 2
    heads = min(per_group, rows)
    return rows, heads, max(1, min(rows // heads, tile.queries, MAX_CANDIDATES // chosen))


def tile_lists(indices: Tensor, spec: NSASpec, blocks: Blocks, queries: int) -> TileLists:
    """The union of the blocks of each `queries` neighbouring queries."""
    return _tile_lists(indices, spec, blocks, queries, None, 0.0, None)


def tile_lists_where_cheaper(
    indices: Tensor, spec: NSASpec, blocks: Blocks, queries: int, small: TileLists, ratio: float
) -> tuple[TileLists, Tensor]:
    """The same for large tiles, and for each [P, tiles] int32 whether it should be used: 1 where its union,
    at `ratio` times the cost per entry, costs no more than those of the small tiles that it covers."""
    assert queries % small.queries == 0
    batch, tokens, groups, _ = indices.shape
    take = torch.empty(batch * groups, -(-tokens // queries), dtype=torch.int32, device=indices.device)
    return _tile_lists(indices, spec, blocks, queries, small, ratio, take), take


def _tile_lists(
    indices: Tensor,
    spec: NSASpec,
    blocks: Blocks,
    queries: int,
    small: TileLists | None,
    ratio: float,
    take: Tensor | None,
) -> TileLists:
    assert 1 <= queries <= MAX_TILE_QUERIES
    batch, tokens, groups, chosen = indices.shape
    tiles = -(-tokens // queries)
    capacity = min(queries * chosen, blocks.count)
    pairs = batch * groups
    entries = torch.empty(pairs, tiles, capacity, dtype=torch.int64, device=indices.device)
    counts = torch.empty(pairs, tiles, 2, dtype=torch.int32, device=indices.device)
    width = power_of_2(queries * chosen)
    at_once = max(1, 512 // width)
    _tile_lists_kernel[(pairs * cdiv(tiles, at_once),)](
        indices,
        *indices.stride(),
        blocks.doc_start,
        entries,
        counts,
        counts if small is None else small.counts,
        counts if take is None else take,
        ratio,
        tokens,
        groups,
        tiles,
        0 if small is None else small.tiles,
        capacity,
        CHOSEN=chosen,
        QUERIES=queries,
        WIDTH=width,
        TILES=at_once,
        SEL=spec.sel_block,
        PACKED=blocks.packed,
        SUB=0 if small is None else queries // small.queries,
        SUB_WIDTH=1 if small is None else power_of_2(queries // small.queries),
        UNROLL=chosen <= 32,
        num_warps=4 if width <= 1024 else 8,
    )
    return TileLists(queries, tiles, capacity, entries, counts)


@triton.jit(do_not_specialize=["tokens", "groups", "tiles", "small_tiles", "capacity"])
def _tile_lists_kernel(
    idx_ptr,
    stride_b,
    stride_s,
    stride_g,
    stride_n,
    doc_start_ptr,  # [S]
    entries_ptr,  # [P, tiles, capacity]
    counts_ptr,  # [P, tiles, 2]
    small_counts_ptr,  # [P, small_tiles, 2]
    take_ptr,  # [P, tiles]
    ratio,
    tokens,
    groups,
    tiles,
    small_tiles,
    capacity,
    CHOSEN: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SEL: tl.constexpr,
    PACKED: tl.constexpr,
    SUB: tl.constexpr,
    SUB_WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Every candidate (query of the tile, place) is compared with all of its tile: who else chose it, and is
    it the first to name its block. Quadratic in a few hundred candidates, which beats sorting them."""
    per_pair = tl.cdiv(tiles, TILES)
    pair = tl.program_id(0) // per_pair
    tile = (tl.program_id(0) % per_pair) * TILES + tl.arange(0, TILES)  # [TILES]
    base = idx_ptr + (pair // groups).to(tl.int64) * stride_b + (pair % groups).to(tl.int64) * stride_g

    place = tl.arange(0, WIDTH)
    t = tile[:, None] * QUERIES + (place // CHOSEN)[None, :]  # [TILES, WIDTH]
    there = (place < QUERIES * CHOSEN)[None, :] & (t < tokens) & (tile < tiles)[:, None]
    index = tl.load(base + t.to(tl.int64) * stride_s + (place % CHOSEN)[None, :] * stride_n, mask=there, other=-1)
    start = block_start(index, t, there, doc_start_ptr, SEL, PACKED)

    # Candidates from the last to the first, so that what remains in `first` is the first equal one.
    first = tl.zeros([TILES, WIDTH], dtype=tl.int32)
    mask = tl.zeros([TILES, WIDTH], dtype=tl.int32)
    for back in range(QUERIES):
        slot = QUERIES - 1 - back
        t2 = tile * QUERIES + slot  # [TILES]
        there2 = (t2 < tokens) & (tile < tiles)
        row = base + t2.to(tl.int64) * stride_s
        hit = start < -1
        if UNROLL:
            for i in tl.static_range(CHOSEN - 1, -1, -1):
                index2 = tl.load(row + i * stride_n, mask=there2, other=-1)
                same = start == block_start(index2, t2, there2, doc_start_ptr, SEL, PACKED)[:, None]
                hit = hit | same
                first = tl.where(same, slot * CHOSEN + i, first)
        else:
            for n in range(CHOSEN):
                i = CHOSEN - 1 - n
                index2 = tl.load(row + i * stride_n, mask=there2, other=-1)
                same = start == block_start(index2, t2, there2, doc_start_ptr, SEL, PACKED)[:, None]
                hit = hit | same
                first = tl.where(same, slot * CHOSEN + i, first)
        mask = mask | tl.where(hit, 1 << slot, 0)

    entry = (start >= 0) & (first == place[None, :])
    present = tl.minimum(QUERIES, tokens - tile * QUERIES)
    everyone = ((tl.full([TILES], 1, tl.int64) << tl.maximum(present, 0).to(tl.int64)) - 1).to(tl.int32)
    # A block chosen by all and over before the tile's first query is read whole by all.
    whole = entry & (mask == everyone[:, None]) & (start + (SEL - 1) <= (tile * QUERIES)[:, None])
    partial = entry & (whole == 0)
    num_whole = tl.sum(whole.to(tl.int32), axis=1)
    num_all = num_whole + tl.sum(partial.to(tl.int32), axis=1)
    goes_to = tl.where(
        whole,
        tl.cumsum(whole.to(tl.int32), axis=1) - 1,
        num_whole[:, None] + tl.cumsum(partial.to(tl.int32), axis=1) - 1,
    )
    out = pair.to(tl.int64) * tiles + tile
    value = start.to(tl.int64) | (mask.to(tl.int64) << 32)
    tl.store(entries_ptr + out[:, None] * capacity + goes_to, value, mask=entry)
    tl.store(counts_ptr + out * 2, num_whole, mask=tile < tiles)
    tl.store(counts_ptr + out * 2 + 1, num_all, mask=tile < tiles)
    if SUB > 0:
        sub = tl.arange(0, SUB_WIDTH)[None, :]
        small = tile[:, None] * SUB + sub
        small_ok = (sub < SUB) & (small < small_tiles)
        small_at = pair.to(tl.int64) * small_tiles + small
        entries_small = tl.sum(tl.load(small_counts_ptr + small_at * 2 + 1, mask=small_ok, other=0), axis=1)
        tl.store(take_ptr + out, (num_all * ratio <= entries_small).to(tl.int32), mask=tile < tiles)


def unit_stride(x: Tensor) -> Tensor:
    """x itself, or a copy where the kernels could not walk it: head dimension not contiguous, or overflow of
    the 32-bit offsets inside a tile of keys."""
    return x if x.stride(3) == 1 and x.stride(1) < 1 << 20 else x.contiguous()


@triton.jit
def decode_tile(
    tokens,
    tiles,
    PER_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(pair int64, tile, and per row: slot, query, head of the group, whether it exists) of this program.
    Neighbouring programs read neighbouring queries of one pair, whose keys then stay in L2; late ones first,
    since they have most to read."""
    program = tl.program_id(0)
    head_tile = program % HEAD_TILES
    pair = (program // HEAD_TILES) // tiles
    tile = tiles - 1 - (program // HEAD_TILES) % tiles
    row = tl.arange(0, ROWS)
    slot = row // HEADS
    head = head_tile * HEADS + row % HEADS
    t = tile * QUERIES + slot
    return pair.to(tl.int64), tile, slot, t, head, (slot < QUERIES) & (head < PER_GROUP) & (t < tokens)


@triton.jit
def load_tile(ptrs, row_ok, d, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """ptrs [rows, BLOCK_D] -> values, 0 where a row or a channel does not exist."""
    if CHECK_ROWS:
        if D == BLOCK_D:
            return tl.load(ptrs, mask=row_ok[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(d < D)[None, :], other=0.0)
