"""Numbers the blocks and builds, for every block, the list of queries that chose it, on the device.

Guarantees: no host synchronization, sizes that depend only on shapes, deterministic lists, and no access outside the
tensors for any indices. An index that is negative, outside the document or after its query is dropped, and a repeated
one counts once, so that the lists need no further checks.

A block is identified by its first token (unique also across packed documents) or, in tables, by its number: blocks are
numbered through the sequence, document after document.

Legend: B batch, S tokens, G key/value heads, n indices per query, pair = one (b, g), J blocks.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.layout import cached_with, num_blocks, token_layout
from nsa.ops.triton.launch_table import cdiv, launcher, power_of_2

MAX_TABLE_BYTES = 256 << 20  # workspace of the inversion; beyond it, pairs (b, g) or parts of them take turns
_SIZES = ["first_pair", "first_block", "tokens", "q_offset", "groups", "spans", "blocks", "first", "tiles"]
SPAN = 128  # queries whose bits for one block are adjacent: 4 words of 32


@dataclass(frozen=True)
class Blocks:
    """The numbering of blocks. Unpacked, block j starts at token j * size and the tables are placeholders.

    size       tokens of a block
    count      number of blocks, or when packed an upper bound that depends only on shapes
    packed     whether the tables are used
    doc_start  [S] int32, first token of every token's document
    number     [S] int32, number of the block that starts at a token
    starts     [count + 1] int32, first token of a block; S from the first unused number on
    q_offset   tokens before the first query: indices exist only for the queries, blocks for the whole sequence
    """

    size: int
    count: int
    packed: bool
    doc_start: Tensor
    number: Tensor
    starts: Tensor
    q_offset: int = 0


def number_blocks(
    tokens: int, block: int, cu_seqlens: Tensor | None, device: torch.device, q_offset: int = 0
) -> Blocks:
    if cu_seqlens is None:
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return Blocks(block, num_blocks(tokens, block), False, nothing, nothing, nothing, q_offset)
    blocks = cached_with(cu_seqlens, ("blocks", tokens, block), lambda: _number_packed(tokens, block, cu_seqlens))
    return replace(blocks, q_offset=q_offset)


def _number_packed(tokens: int, block: int, cu_seqlens: Tensor) -> Blocks:
    device = cu_seqlens.device
    layout = token_layout(tokens, cu_seqlens, device)
    count = min(tokens, tokens // block + cu_seqlens.shape[0] - 1)  # a document adds at most one short block
    opens = layout.position % block == 0
    number = opens.cumsum(0) - 1
    starts = torch.full((count + 2,), tokens, dtype=torch.int32, device=device)
    # Tokens inside a block write to the last entry, which is then dropped.
    place = torch.where(opens, number, count + 1)
    starts.scatter_(0, place, torch.arange(tokens, dtype=torch.int32, device=device))
    return Blocks(block, count, True, layout.doc_start.to(torch.int32), number.to(torch.int32), starts[: count + 1])


@dataclass(frozen=True)
class BlockLists:
    """The queries of `count` blocks (J in the shapes below) from number `first_block` on, for each of `pairs` pairs
    (b, g) from `first_pair` on.

    queries     [pairs * S * n] int32, the lists back to back
    offsets     [pairs * J] int64, where a block's list starts
    counts      [pairs * J] int32, its length
    item_first  [pairs * J] int32, first work item of a block; a block without queries also has one
    slot_first  [pairs * J] int32, first partial result of a block with several items, -1 with one
    item_block  [max_items] int32, the block (pair * J + number) of an item
    totals      [2] int32, items and slots in use
    max_items, max_slots  upper bounds of these from shapes alone
    """

    first_pair: int
    pairs: int
    first_block: int
    count: int
    chunk: int
    queries: Tensor
    offsets: Tensor
    counts: Tensor
    item_first: Tensor
    slot_first: Tensor
    item_block: Tensor
    totals: Tensor
    max_items: int
    max_slots: int


def table_bytes(tokens: int, blocks: int) -> int:
    """Workspace of `block_lists` for one pair: a bit per (query, block) and a number per span of queries."""
    return cdiv(tokens, SPAN) * blocks * (SPAN // 8 + 4)


class Turn(NamedTuple):
    """The blocks that `block_lists` processes at a time: `first_block` .. + `blocks` of some pairs."""

    first_pair: int
    pairs: int
    first_block: int
    blocks: int


def plan_turns(tokens: int, blocks: int, pairs: int) -> list[Turn]:
    """All blocks of as many pairs as fit the workspace; if not even one pair fits, parts of its blocks."""
    at_once = max(1, MAX_TABLE_BYTES // max(1, table_bytes(tokens, blocks)))
    size = min(blocks, max(1, MAX_TABLE_BYTES // max(1, table_bytes(tokens, 1))))
    return [
        Turn(pair, min(at_once, pairs - pair), block, min(size, blocks - block))
        for pair in range(0, pairs, at_once)
        for block in range(0, blocks, size)
    ]


class Skipped(NamedTuple):
    """Queries to skip: those of tiles of `queries` queries for which `take` [P, tiles] is not 0. The first query of the
    indices has number `first` in the tiles."""

    take: Tensor
    queries: int
    first: int


def empty_lists(turn: Turn, chunk: int, queries: int, device: torch.device) -> BlockLists:
    """Lists of `queries` entries in all, to be filled; `chunk` queries make a work item."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    cells = turn.pairs * turn.blocks
    items = cells + queries // chunk
    return BlockLists(
        *turn,
        chunk,
        queries=ints(queries),
        offsets=ints(cells, dtype=torch.int64),
        counts=ints(cells),
        item_first=ints(cells),
        slot_first=ints(cells),
        item_block=ints(items),
        totals=ints(2),
        max_items=items,
        # A block gets slots when its list is longer than a chunk: at most 2 * length / chunk of them.
        max_slots=min(items, 2 * queries // chunk + 1),
    )


def plan_items(lists: BlockLists) -> None:
    """Fills in all but `queries` from the counts."""
    cells = lists.pairs * lists.count
    launcher(_plan_kernel, (1,), lists.counts)(
        lists.counts, lists.offsets, lists.item_first, lists.slot_first, lists.totals, cells, lists.chunk,
        WIDTH=2048, num_warps=8,
    )  # fmt: skip
    launcher(_fill_kernel, (cdiv(cells, 32),), lists.counts)(
        lists.counts, lists.item_first, lists.item_block, cells, lists.chunk, WIDTH=32, num_warps=1
    )


def block_lists(
    indices: Tensor,
    blocks: Blocks,
    chunk: int,
    turn: Turn,
    skipped: Skipped | None = None,
    positions: Tensor | None = None,
) -> BlockLists:
    """Inverts the indices: bits -> column counts -> offsets -> every query to its place. No sort; the only
    atomics set bits, so the order is fixed. `positions` [pairs, S, n] int32, if given, receives for every index where
    its query stands in `queries`; -1 where it does not, or where an equal index comes first."""
    (pairs, count), spans = (turn.pairs, turn.blocks), cdiv(indices.shape[1], SPAN)
    queries = pairs * indices.shape[1] * indices.shape[3]
    bits, (grid, source, sizes, shape) = mark_queries(indices, blocks, SPAN, turn, skipped)
    before = torch.empty(pairs, spans, count, dtype=torch.int32, device=indices.device)
    lists = empty_lists(turn, chunk, queries, indices.device)
    launcher(_count_kernel, (pairs * cdiv(count, 32),), indices)(
        bits, before, lists.counts, spans, count, BLOCKS=32, SPANS=16, WORDS=SPAN // 32
    )
    plan_items(lists)
    launcher(_scatter_kernel, grid, indices)(
        *source, bits, before, lists.offsets, lists.queries, lists.queries if positions is None else positions, *sizes,
        **shape, POSITIONS=positions is not None,
    )  # fmt: skip
    return lists


Choices = tuple[tuple[int], tuple[Any, ...], tuple[int, ...], dict[str, Any]]


def mark_queries(
    indices: Tensor, blocks: Blocks, span: int, turn: Turn, skipped: Skipped | None = None
) -> tuple[Tensor, Choices]:
    """[pairs, spans, J, span / 32] int32: a bit for every query of a span of `span` queries that chose a block. A span
    has whole words or is shorter than one. Also the grid and the arguments of kernels that call `_chosen_numbers`."""
    _, tokens, groups, chosen = indices.shape
    at_once = max(1, min(64, 1024 // power_of_2(chosen)))
    take, tile, first = skipped or Skipped(indices, 0, 0)
    source = (indices, *indices.stride(), blocks.doc_start, blocks.number, take)
    (first_pair, pairs, first_block, count), spans = turn, cdiv(tokens, span)
    sizes = (first_pair, first_block, tokens, blocks.q_offset, groups, spans, count, first, take.shape[1])
    shape = {
        "CHOSEN": chosen, "PADDED": power_of_2(chosen), "TOKENS": at_once,
        "SEL": blocks.size, "SPAN": span, "PACKED": blocks.packed, "TILE": tile,
    }  # fmt: skip
    bits = torch.zeros(pairs, spans, count, cdiv(span, 32), dtype=torch.int32, device=indices.device)
    grid = (pairs * cdiv(tokens, at_once),)
    launcher(_mark_kernel, grid, indices)(*source, bits, *sizes, **shape)
    return bits, (grid, source, sizes, shape)


@triton.jit
def block_start(index, t, there, doc_start_ptr, SEL: tl.constexpr, PACKED: tl.constexpr):
    """The first token of block `index` of query t's document, -1 if t may not read it."""
    if PACKED:
        doc = tl.load(doc_start_ptr + t, mask=there, other=0)
        last = (t - doc) // SEL
        return tl.where(there & (index >= 0) & (index <= last), doc + index * SEL, -1)
    else:
        return tl.where(there & (index >= 0) & (index <= t // SEL), index * SEL, -1)


@triton.jit
def block_place(cell, first_pair, first_block, blocks, tokens, starts_ptr, SEL: tl.constexpr, PACKED: tl.constexpr):
    """(pair int64, first token, token after the last) of a block; an unused number is an empty block."""
    pair = (first_pair + cell // blocks).to(tl.int64)
    number = first_block + cell % blocks
    if PACKED:
        start = tl.load(starts_ptr + number)
        return pair, start, tl.minimum(start + SEL, tl.load(starts_ptr + number + 1))
    else:
        return pair, number * SEL, tl.minimum(number * SEL + SEL, tokens)


@triton.jit
def count_steps(num_queries, PER_GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The number of steps of `rows_of_step`, each of ROWS rows (queries of a list x heads)."""
    WHOLE: tl.constexpr = ROWS // PER_GROUP
    if WHOLE * PER_GROUP * 16 >= ROWS * 15:
        return tl.cdiv(num_queries, WHOLE)
    else:
        return tl.cdiv(num_queries * PER_GROUP, ROWS)


@triton.jit
def rows_of_step(step, num_queries, PER_GROUP: tl.constexpr, ROWS: tl.constexpr):
    """For each of ROWS rows: the place of the query in its list, the head, and whether the row exists; a row that does
    not exist repeats another. If whole queries leave few rows idle, a step has only these, which avoids divisions."""
    WHOLE: tl.constexpr = ROWS // PER_GROUP
    row = tl.arange(0, ROWS)
    if WHOLE * PER_GROUP * 16 >= ROWS * 15:
        at = step * WHOLE + tl.minimum(row // PER_GROUP, WHOLE - 1)
        return tl.minimum(at, num_queries - 1), row % PER_GROUP, (at < num_queries) & (row < WHOLE * PER_GROUP)
    else:
        row += step * ROWS
        there = row < num_queries * PER_GROUP
        row = tl.minimum(row, num_queries * PER_GROUP - 1)
        return row // PER_GROUP, row % PER_GROUP, there


@triton.jit
def _chosen_numbers(
    idx_ptr, stride_b, stride_s, stride_g, stride_n, doc_start_ptr, number_ptr, take_ptr, first_pair, first_block,
    tokens, q_offset, groups, blocks, first, tiles,
    CHOSEN: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, SEL: tl.constexpr, PACKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """For a program: the pair relative to first_pair, queries [TOKENS, 1], and block numbers [TOKENS, PADDED] relative
    to first_block, negative for padding."""
    per_pair = tl.cdiv(tokens, TOKENS)
    local = tl.program_id(0) // per_pair
    pair = first_pair + local
    base = idx_ptr + (pair // groups).to(tl.int64) * stride_b + (pair % groups).to(tl.int64) * stride_g
    t = ((tl.program_id(0) % per_pair) * TOKENS + tl.arange(0, TOKENS))[:, None]
    place = tl.arange(0, PADDED)[None, :]
    there = (t < tokens) & (place < CHOSEN)
    index = tl.load(base + t.to(tl.int64) * stride_s + place * stride_n, mask=there, other=-1)
    start = block_start(index, q_offset + t, there, doc_start_ptr, SEL, PACKED)
    if PACKED:
        number = tl.load(number_ptr + start, mask=start >= 0, other=-1)
    else:
        number = tl.where(start >= 0, index, -1)
    if TILE > 0:
        take = tl.load(take_ptr + pair.to(tl.int64) * tiles + (first + t) // TILE, mask=t < tokens, other=1)
        number = tl.where(take == 0, number, -1)
    number -= first_block
    return local, t, tl.where(number < blocks, number, -1)


@triton.jit(do_not_specialize=_SIZES)
def _mark_kernel(
    idx_ptr, stride_b, stride_s, stride_g, stride_n, doc_start_ptr, number_ptr, take_ptr,
    bits_ptr,  # [pairs, spans, J, SPAN / 32]
    first_pair, first_block, tokens, q_offset, groups, spans, blocks, first, tiles, CHOSEN: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, SEL: tl.constexpr, SPAN: tl.constexpr, PACKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    local, t, number = _chosen_numbers(
        idx_ptr, stride_b, stride_s, stride_g, stride_n, doc_start_ptr, number_ptr, take_ptr, first_pair, first_block,
        tokens, q_offset, groups, blocks, first, tiles, CHOSEN, PADDED, TOKENS, SEL, PACKED, TILE,
    )  # fmt: skip
    cell = (local.to(tl.int64) * spans + t // SPAN) * blocks + number
    word = bits_ptr + cell * ((SPAN + 31) // 32) + (t % SPAN) // 32
    bit = (tl.full([TOKENS, PADDED], 1, tl.int32)) << (t % SPAN % 32)
    tl.atomic_or(word, bit, mask=number >= 0, sem="relaxed")


@triton.jit
def popcount(bits):
    """The number of set bits of 32; the compiler recognizes this form as one instruction."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["spans", "blocks"])
def _count_kernel(
    bits_ptr, before_ptr, counts_ptr,  # [pairs, spans, J, WORDS]; [pairs, spans, J]; [pairs, J]
    spans, blocks, BLOCKS: tl.constexpr, SPANS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """For every block: the number of queries of earlier spans that chose it, for each span, and the total."""
    per_pair = tl.cdiv(blocks, BLOCKS)
    pair = (tl.program_id(0) // per_pair).to(tl.int64)
    block = (tl.program_id(0) % per_pair) * BLOCKS + tl.arange(0, BLOCKS)
    so_far = tl.zeros([BLOCKS], dtype=tl.int32)
    for begin in range(0, spans, SPANS):
        span = begin + tl.arange(0, SPANS)
        ok = (span < spans)[:, None] & (block < blocks)[None, :]
        cell = (pair * spans + span)[:, None] * blocks + block[None, :]
        here = tl.zeros([SPANS, BLOCKS], dtype=tl.int32)
        for w in tl.static_range(WORDS):
            here += popcount(tl.load(bits_ptr + cell * WORDS + w, mask=ok, other=0))
        tl.store(before_ptr + cell, so_far[None, :] + tl.cumsum(here, axis=0) - here, mask=ok)
        so_far += tl.sum(here, axis=0)
    tl.store(counts_ptr + pair * blocks + block, so_far, mask=block < blocks)


@triton.jit(do_not_specialize=["cells", "chunk"])
def _plan_kernel(
    counts_ptr, offsets_ptr, item_first_ptr, slot_first_ptr, totals_ptr, cells, chunk, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: running sums over all blocks of list lengths, work items and partial results."""
    queries = tl.zeros([], dtype=tl.int64)
    items = tl.zeros([], dtype=tl.int32)
    slots = tl.zeros([], dtype=tl.int32)
    for begin in range(0, cells, WIDTH):
        cell = begin + tl.arange(0, WIDTH)
        ok = cell < cells
        count = tl.load(counts_ptr + cell, mask=ok, other=0)
        parts = tl.where(ok, tl.maximum(tl.cdiv(count, chunk), 1), 0)
        split = tl.where(parts > 1, parts, 0)
        tl.store(offsets_ptr + cell, queries + tl.cumsum(count.to(tl.int64), axis=0) - count, mask=ok)
        tl.store(item_first_ptr + cell, items + tl.cumsum(parts, axis=0) - parts, mask=ok)
        slot = slots + tl.cumsum(split, axis=0) - split
        tl.store(slot_first_ptr + cell, tl.where(parts > 1, slot, -1), mask=ok)
        queries += tl.sum(count.to(tl.int64), axis=0)
        items += tl.sum(parts, axis=0)
        slots += tl.sum(split, axis=0)
    tl.store(totals_ptr, items)
    tl.store(totals_ptr + 1, slots)


@triton.jit(do_not_specialize=["cells", "chunk"])
def _fill_kernel(counts_ptr, item_first_ptr, item_block_ptr, cells, chunk, WIDTH: tl.constexpr):
    """item -> block, for all items of WIDTH blocks."""
    cell = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    ok = cell < cells
    parts = tl.where(ok, tl.maximum(tl.cdiv(tl.load(counts_ptr + cell, mask=ok, other=0), chunk), 1), 0)
    first = tl.load(item_first_ptr + cell, mask=ok, other=0)
    for i in range(tl.max(parts, axis=0)):
        tl.store(item_block_ptr + first + i, cell, mask=i < parts)


@triton.jit(do_not_specialize=_SIZES)
def _scatter_kernel(
    idx_ptr, stride_b, stride_s, stride_g, stride_n, doc_start_ptr, number_ptr, take_ptr,
    bits_ptr, before_ptr, offsets_ptr,  # [pairs, spans, J, SPAN / 32]; [pairs, spans, J]; [pairs, J]
    queries_ptr, positions_ptr,  # positions [pairs, S, CHOSEN]
    first_pair, first_block, tokens, q_offset, groups, spans, blocks, first, tiles, CHOSEN: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, SEL: tl.constexpr, SPAN: tl.constexpr, PACKED: tl.constexpr,
    TILE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Writes every query to its place, after the queries of earlier spans and of the lower bits of its own span. A
    repeated index writes the same value to the same place."""
    local, t, number = _chosen_numbers(
        idx_ptr, stride_b, stride_s, stride_g, stride_n, doc_start_ptr, number_ptr, take_ptr, first_pair, first_block,
        tokens, q_offset, groups, blocks, first, tiles, CHOSEN, PADDED, TOKENS, SEL, PACKED, TILE,
    )  # fmt: skip
    ok = number >= 0
    cell = (local.to(tl.int64) * spans + t // SPAN) * blocks + number
    rank = tl.load(before_ptr + cell, mask=ok, other=0)
    own = (t % SPAN) // 32
    lower = (tl.full([TOKENS, PADDED], 1, tl.int32) << (t % 32)) - 1
    for w in tl.static_range(SPAN // 32):
        bits = tl.load(bits_ptr + cell * (SPAN // 32) + w, mask=ok & (w <= own), other=0)
        rank += popcount(tl.where(w == own, bits & lower, bits))
    offset = tl.load(offsets_ptr + local.to(tl.int64) * blocks + number, mask=ok, other=0)
    tl.store(queries_ptr + offset + rank, tl.broadcast_to(t, [TOKENS, PADDED]), mask=ok)
    if POSITIONS:
        place = tl.arange(0, PADDED)[None, :]
        repeated = number < -2
        for i in range(CHOSEN - 1):
            other = tl.max(tl.where(place == i, number, -(1 << 31)), axis=1)[:, None]  # column i of number
            repeated = repeated | ((number == other) & (place > i))
        at = (local.to(tl.int64) * tokens + t) * CHOSEN + place
        value = tl.where(ok & (repeated == 0), (offset + rank).to(tl.int32), -1)
        tl.store(positions_ptr + at, value, mask=(t < tokens) & (place < CHOSEN))
