"""Tiles of neighbouring queries, the union of the blocks they read, and code that the attention kernels share.

The lists have the same guarantees as in `selected_lists`. For the `queries` queries of a tile there is one entry
(mask << 32 | start) per block that any of them chose; bit s of the mask is set if query s chose it. Entries that all
queries of the tile read whole come first, so that the attention loop over them needs no mask. Next come blocks that end
before the first query, which a row reads whole or not at all, and last the other blocks.

Legend: B batch, S tokens, G key/value heads, h query heads per group, n indices per query, P = B*G pairs (b, g).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.layout import num_blocks
from nsa.ops.triton.flash_kernels import load_tile
from nsa.ops.triton.launch_table import Launch, LaunchTable, cdiv, head_class, launcher, power_of_2
from nsa.ops.triton.selected_lists import Blocks, Turn, block_start, mark_queries, popcount

MAX_TILE_QUERIES = 32  # one bit each in half an entry
MAX_CANDIDATES = 2048  # indices of one tile
FEWEST_MARKED = 256  # indices of a tile from which they are marked in a table of all blocks instead of compared
MAX_UNROLLED = 32  # indices of a query up to which loops over them are unrolled


@dataclass(frozen=True)
class TilePlan:
    """How queries are divided into tiles. A launch has queries x heads as rows and keys as columns.

    method  "query": small tiles, least wasted work; "tile": large tiles, least traffic and full tensor cores;
            "adaptive": for each large tile of queries, the cheaper of both according to its lists;
            "parts": like "adaptive", with `selected_parts` in place of small tiles
    ratio   cost of an entry in a large tile relative to an entry of a small tile; for "parts", to a block of a query
    """

    method: str
    small: Launch
    large: Launch
    ratio: float = 2.0


@dataclass(frozen=True)
class TileLists:
    """entries [P, tiles, capacity] int64; counts [P, tiles, 3] int32: entries that all queries read whole, entries that
    end before the first query (including the former), all entries;
    take [P, large tiles] int32: 1 if the large tile is used, 0 if small ones or `selected_parts` are."""

    queries: int
    tiles: int
    capacity: int
    entries: Tensor
    counts: Tensor
    take: Tensor | None = None


class TileShape(NamedTuple):
    """Row r of a tile is query r // heads, head r % heads."""

    rows: int
    heads: int
    queries: int


@dataclass(frozen=True)
class TilePass:
    """One launch over all tiles. If the lists have `take`, a tile runs if the entry of its large tile (of `sub` tiles)
    equals `wanted`."""

    params: Launch
    shape: TileShape
    lists: TileLists
    wanted: int = 0
    sub: int = 1

    def launch(
        self, kernel: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], scale: float, block: int
    ) -> None:
        """Starts a kernel on `tensors`, which begin with q, k and v, on the lists and with `strides` of its own."""
        q, k, v, *_ = tensors
        lists, take, per_group = self.lists, self.lists.take, q.shape[2] // k.shape[2]
        head_tiles = cdiv(per_group, self.shape.heads)
        launcher(kernel, (lists.entries.shape[0] * lists.tiles * head_tiles,), q)(
            *tensors, lists.entries, lists.counts, lists.counts if take is None else take,
            *q.stride()[:3], k.stride(0), k.stride(2), v.stride(0), v.stride(2), *strides,
            q.shape[1], k.shape[1] - q.shape[1], k.shape[2], lists.tiles, lists.capacity,
            0 if take is None else take.shape[1], scale,
            PER_GROUP=per_group, QUERIES=lists.queries, HEADS=self.shape.heads, HEAD_TILES=head_tiles,
            ROWS=self.shape.rows, KEYS=keys_at_once(self.params, block), SEL=block,
            STRIDE_KS=k.stride(1), STRIDE_VS=v.stride(1), DK=q.shape[3], DV=v.shape[3],
            BLOCK_DK=power_of_2(q.shape[3]), BLOCK_DV=power_of_2(v.shape[3]),
            WANTED=-1 if take is None else self.wanted, SUB=self.sub,
            num_warps=self.params.num_warps, num_stages=self.params.num_stages, maxnreg=self.params.maxnreg,
        )  # fmt: skip


def keys_at_once(params: Launch, block: int) -> int:
    """The keys of a launch, at most a block."""
    return min(params.columns, max(16, power_of_2(block)))


def extent(x: Tensor) -> int:
    """The maximum distance in memory between elements of one sequence."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1


def choose_tiles(
    q: Tensor, k: Tensor, v: Tensor, block: int, num_selected: int, table: LaunchTable, prefix: str = ""
) -> TilePlan:
    """The plan for such tensors, with the launches "small" and "large" of a table."""
    per_group = q.shape[2] // k.shape[2]
    small, large = (table.find(prefix + name, q, v) for name in ("small", "large"))
    ratio = 2.6 if head_class(q.shape[3], v.shape[3]) == 64 and q.dtype != torch.float32 else 2.0
    # A group of many heads fills a tile with one query; four warps process 64 rows.
    rows = min(large.rows, max(small.rows, power_of_2(per_group)))
    if rows == large.rows:
        small = large
    else:
        small = replace(small, rows=rows, num_warps=max(small.num_warps, rows // 16))
    if per_group >= 16:
        ratio = min(ratio, 1.5)  # small tiles have no idle rows then
    visible = num_blocks(k.shape[1], block)
    # If a query reads most blocks that it can see, so do its neighbours: attention is nearly dense.
    return TilePlan("tile" if visible <= 2 * num_selected else "adaptive", small, large, ratio)


def _tile_shape(per_group: int, chosen: int, params: Launch) -> TileShape:
    """The rows of a launch, limited to the number of mask bits."""
    rows = params.rows
    while rows > MAX_TILE_QUERIES * per_group:
        rows //= 2
    heads = min(per_group, rows)
    return TileShape(rows, heads, max(1, min(rows // heads, MAX_TILE_QUERIES, MAX_CANDIDATES // chosen)))


def plan_tiles(indices: Tensor, blocks: Blocks, per_group: int, plan: TilePlan) -> list[TilePass]:
    """The launches that together cover every query once; for "parts", one over the large tiles that are used."""
    small, large = (_tile_shape(per_group, indices.shape[3], params) for params in (plan.small, plan.large))
    if plan.method in ("tile", "parts"):
        ratio, wanted = (0.0, 0) if plan.method == "tile" else (plan.ratio, 1)
        return [TilePass(plan.large, large, tile_lists(indices, blocks, large.queries, ratio=ratio), wanted)]
    lists = tile_lists(indices, blocks, small.queries)
    sub = large.queries // small.queries  # large tiles then consist of whole small ones
    if plan.method == "query" or sub <= 1:
        return [TilePass(plan.small, small, lists)]
    large = large._replace(queries=sub * small.queries)
    wide = tile_lists(indices, blocks, large.queries, lists, plan.ratio)
    lists = replace(lists, take=wide.take)
    return [TilePass(plan.large, large, wide, 1), TilePass(plan.small, small, lists, 0, sub)]


def tile_lists(
    indices: Tensor, blocks: Blocks, queries: int, small: TileLists | None = None, ratio: float = 0.0
) -> TileLists:
    """The union of the blocks of each `queries` neighbouring queries. With a ratio also `take`: 1 where a tile's union,
    at `ratio` times the cost per entry, costs no more than those of the `small` tiles it covers, or without them no
    more than all blocks of its queries."""
    assert small is None or queries % small.queries == 0
    assert 1 <= queries <= MAX_TILE_QUERIES
    batch, tokens, groups, chosen = indices.shape
    tiles = cdiv(tokens, queries)
    capacity = min(queries * chosen, blocks.count)
    pairs = batch * groups
    entries = torch.empty(pairs, tiles, capacity, dtype=torch.int64, device=indices.device)
    counts = torch.empty(pairs, tiles, 3, dtype=torch.int32, device=indices.device)
    take = None if ratio == 0.0 else torch.empty(pairs, tiles, dtype=torch.int32, device=indices.device)
    width = power_of_2(queries * chosen)
    # Comparing all indices of a tile with each other is faster for few indices, or blocks many times their number.
    by_number = width >= FEWEST_MARKED and power_of_2(blocks.count) <= min(4 * width, MAX_CANDIDATES)
    bits = counts
    if by_number:
        bits, _ = mark_queries(indices, blocks, queries, Turn(0, pairs, 0, blocks.count))
        width = power_of_2(blocks.count)
    at_once, num_warps = max(1, 512 // width), 4 if width <= 1024 else 8
    launcher(_tile_lists_kernel, (pairs * cdiv(tiles, at_once),), indices)(
        indices, *indices.stride(), blocks.doc_start, blocks.starts, bits, entries, counts,
        counts if small is None else small.counts, counts if take is None else take,
        ratio, tokens, blocks.q_offset, groups, tiles, 0 if small is None else small.tiles, capacity, blocks.count,
        CHOSEN=chosen, QUERIES=queries, WIDTH=width, TILES=at_once, SEL=blocks.size, PACKED=blocks.packed,
        SUB=0 if small is None else queries // small.queries,
        SUB_WIDTH=1 if small is None else power_of_2(queries // small.queries), TAKE=take is not None,
        BY_NUMBER=by_number, UNROLL=chosen <= MAX_UNROLLED, num_warps=num_warps,
    )  # fmt: skip
    return TileLists(queries, tiles, capacity, entries, counts, take)


@triton.jit(do_not_specialize=["tokens", "q_offset", "groups", "tiles", "small_tiles", "capacity", "blocks"])
def _tile_lists_kernel(
    idx_ptr, stride_b, stride_s, stride_g, stride_n,
    doc_start_ptr, starts_ptr,  # of `Blocks`
    bits_ptr, entries_ptr, counts_ptr,  # [P, tiles, blocks], with BY_NUMBER; [P, tiles, capacity]; [P, tiles, 3]
    small_counts_ptr, take_ptr,  # [P, small_tiles, 3]; [P, tiles]
    ratio, tokens, q_offset, groups, tiles, small_tiles, capacity, blocks, CHOSEN: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, SEL: tl.constexpr, PACKED: tl.constexpr, SUB: tl.constexpr,
    SUB_WIDTH: tl.constexpr, TAKE: tl.constexpr, BY_NUMBER: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    per_pair = tl.cdiv(tiles, TILES)
    pair = tl.program_id(0) // per_pair
    tile = (tl.program_id(0) % per_pair) * TILES + tl.arange(0, TILES)  # [TILES]
    base = idx_ptr + (pair // groups).to(tl.int64) * stride_b + (pair % groups).to(tl.int64) * stride_g

    if BY_NUMBER:
        # One candidate per block of the sequence, in order.
        number = tl.arange(0, WIDTH)[None, :]
        start, real = number * SEL, (number < blocks) & (tile < tiles)[:, None]
        if PACKED:
            start = tl.load(starts_ptr + number, mask=number < blocks, other=0)
        start += tl.zeros([TILES, WIDTH], dtype=tl.int32)
        cell = (pair.to(tl.int64) * tiles + tile)[:, None] * blocks + number
        mask = tl.load(bits_ptr + cell, mask=real, other=0)
        entry = mask != 0
    else:
        start, mask, entry = _candidates(
            base, stride_s, stride_n, doc_start_ptr, tile, tokens, q_offset, tiles, CHOSEN, QUERIES, WIDTH, TILES, SEL,
            PACKED, UNROLL,
        )  # fmt: skip
    present = tl.minimum(QUERIES, tokens - tile * QUERIES)
    everyone = ((tl.full([TILES], 1, tl.int64) << tl.maximum(present, 0).to(tl.int64)) - 1).to(tl.int32)
    # A block that all queries chose and that ends before the tile's first query is read whole by all.
    over = entry & (start + (SEL - 1) <= (q_offset + tile * QUERIES)[:, None])
    whole = over & (mask == everyone[:, None])
    partial = over & (whole == 0)
    cut = entry & (over == 0)
    num_whole = tl.sum(whole.to(tl.int32), axis=1)
    num_over = tl.sum(over.to(tl.int32), axis=1)
    num_all = tl.sum(entry.to(tl.int32), axis=1)
    goes_to = tl.where(
        whole,
        tl.cumsum(whole.to(tl.int32), axis=1) - 1,
        tl.where(
            cut,
            num_over[:, None] + tl.cumsum(cut.to(tl.int32), axis=1) - 1,
            num_whole[:, None] + tl.cumsum(partial.to(tl.int32), axis=1) - 1,
        ),
    )
    out = pair.to(tl.int64) * tiles + tile
    value = start.to(tl.int64) | (mask.to(tl.int64) << 32)
    tl.store(entries_ptr + out[:, None] * capacity + goes_to, value, mask=entry)
    tl.store(counts_ptr + out * 3, num_whole, mask=tile < tiles)
    tl.store(counts_ptr + out * 3 + 1, num_over, mask=tile < tiles)
    tl.store(counts_ptr + out * 3 + 2, num_all, mask=tile < tiles)
    if TAKE and SUB == 0:
        chosen = tl.sum(tl.where(entry, popcount(mask), 0), axis=1)
        tl.store(take_ptr + out, (num_all * ratio <= chosen).to(tl.int32), mask=tile < tiles)
    if SUB > 0:
        sub = tl.arange(0, SUB_WIDTH)[None, :]
        small = tile[:, None] * SUB + sub
        small_ok = (sub < SUB) & (small < small_tiles)
        small_at = pair.to(tl.int64) * small_tiles + small
        entries_small = tl.sum(tl.load(small_counts_ptr + small_at * 3 + 2, mask=small_ok, other=0), axis=1)
        tl.store(take_ptr + out, (num_all * ratio <= entries_small).to(tl.int32), mask=tile < tiles)


@triton.jit
def _candidates(
    base, stride_s, stride_n, doc_start_ptr, tile, tokens, q_offset, tiles, CHOSEN: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, SEL: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """[TILES, WIDTH]: a block's start, the bits of the queries that chose it, and whether it makes an entry.

    Every candidate (query of the tile, place) is compared with all of its tile: which other queries chose its block,
    and whether it is the first. Quadratic in a few hundred candidates, which is faster than sorting."""
    place = tl.arange(0, WIDTH)
    t = tile[:, None] * QUERIES + (place // CHOSEN)[None, :]  # [TILES, WIDTH]
    there = (place < QUERIES * CHOSEN)[None, :] & (t < tokens) & (tile < tiles)[:, None]
    index = tl.load(base + t.to(tl.int64) * stride_s + (place % CHOSEN)[None, :] * stride_n, mask=there, other=-1)
    start = block_start(index, q_offset + t, there, doc_start_ptr, SEL, PACKED)

    # From the last candidate to the first, so that `first` ends as the first equal one.
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
                same = start == block_start(index2, q_offset + t2, there2, doc_start_ptr, SEL, PACKED)[:, None]
                hit = hit | same
                first = tl.where(same, slot * CHOSEN + i, first)
        else:
            for n in range(CHOSEN):
                i = CHOSEN - 1 - n
                index2 = tl.load(row + i * stride_n, mask=there2, other=-1)
                same = start == block_start(index2, q_offset + t2, there2, doc_start_ptr, SEL, PACKED)[:, None]
                hit = hit | same
                first = tl.where(same, slot * CHOSEN + i, first)
        mask = mask | tl.where(hit, 1 << slot, 0)

    return start, mask, (start >= 0) & (first == place[None, :])


NO_MASK = tl.constexpr(0)  # how an attention kernel masks the entries of a loop, in the order of the list
ROW_MASK = tl.constexpr(1)
KEY_MASK = tl.constexpr(2)


@triton.jit
def loop_bounds(mode: tl.constexpr, counts):
    """First entry and end of the loop of one mode; `counts` are those of the tile."""
    begin, end = 0, tl.load(counts + mode)
    if mode != NO_MASK:
        begin = tl.load(counts + mode - 1)
    return begin, end


@triton.jit
def mask_scores(s, entry, slot, key, t, MASK: tl.constexpr):
    """Scores [ROWS, KEYS] of an entry, -inf where the row's query did not choose it or, with KEY_MASK, precedes the
    key. Uses `where` instead of adding -inf: the block of another query may hold values that are not finite."""
    if MASK != NO_MASK:
        chosen = (((entry >> 32).to(tl.int32) >> slot) & 1) != 0
        if MASK == KEY_MASK:
            s = tl.where(key[None, :] <= tl.where(chosen, t, -1)[:, None], s, -float("inf"))
        else:
            s = tl.where(chosen[:, None], s, -float("inf"))
    return s


@triton.jit
def load_block(
    k_base, v_base, stride_ks, stride_vs, start, end, shift, SEL: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """KEYS tokens of the block [start, end) from offset `shift` on: their offsets in the block, token indices, whether
    they belong to the block, keys and values."""
    col = shift + tl.arange(0, KEYS)
    key = start + col
    key_ok = (col < SEL) & (key < end)
    key64 = key.to(tl.int64)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_rows, v_rows = k_base + key64 * stride_ks, v_base + key64 * stride_vs
    k = load_tile(k_rows[:, None] + dk[None, :], key_ok, dk, DK, BLOCK_DK, True)
    v = load_tile(v_rows[:, None] + dv[None, :], key_ok, dv, DV, BLOCK_DV, True)
    return col, key, key_ok, k, v


@triton.jit
def decode_tile(
    tokens, tiles, PER_GROUP: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(pair int64, tile, and per row: slot, query, head of the group, whether it exists) of this program. Neighbouring
    programs process neighbouring queries of one pair, whose keys then stay in L2; late queries first, since they read
    the most."""
    program = tl.program_id(0)
    head_tile = program % HEAD_TILES
    pair = (program // HEAD_TILES) // tiles
    tile = tiles - 1 - (program // HEAD_TILES) % tiles
    row = tl.arange(0, ROWS)
    slot = row // HEADS
    head = head_tile * HEADS + row % HEADS
    t = tile * QUERIES + slot
    return pair.to(tl.int64), tile, slot, t, head, (slot < QUERIES) & (head < PER_GROUP) & (t < tokens)
