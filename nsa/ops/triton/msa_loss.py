"""The index loss of MSA and its gradients, block by block (`msa_loss_kernels.py`).

A program holds one block of keys and index keys and gathers the queries that read it, as the gradients of selected
attention do: the traffic is that of the queries, whether or not neighbours agree. Two passes: log-sum-exp of the index
scores; p, r, the loss, the gradients r - p of the scores and with them those of index queries and keys. What a query
gets from one block is a part; a merge adds the parts of a query in the order of its blocks. Parts of a block's list are
added in order as well: results are the same every time. Parts exist for a stretch of queries at a time. The gradients
are those of a loss with weight 1, so that backward has only to scale them.

Over all visible tokens (no indices) the lists hold every block that a query sees, and the rest is the same.

Legend: B batch, S queries, N keys, G groups, h heads per group, n blocks per query, J blocks, E index head size,
P = B*G pairs (b, g).
"""

from dataclasses import replace
from math import log2

import torch
from torch import Tensor

from nsa.ops.reference.msa_index import empty_grads
from nsa.ops.triton.launch_table import (
    Launch,
    LaunchTable,
    card_of,
    cdiv,
    head_class,
    launch_on,
    launcher,
    padded,
    unit_last,
)
from nsa.ops.triton.launch_table import refusal as refusal
from nsa.ops.triton.msa_loss_kernels import (
    index_lse_kernel,
    loss_kernel,
    merge_grads_kernel,
    merge_lse_kernel,
    sum_keys_kernel,
)
from nsa.ops.triton.selected_lists import (
    SPAN,
    BlockLists,
    Blocks,
    Turn,
    block_lists,
    empty_lists,
    number_blocks,
    plan_items,
)
from nsa.ops.triton.selected_parts import MAX_PARTS_BYTES, MIN_PARTS_BYTES
from nsa.ops.triton.selected_tiles import extent

LOG2E = 1.4426950408889634
CHUNK = 1024  # queries of a work item
MERGED_ROWS = 32

MANY_HEADS = 8  # of a group, from which MANY is faster with heads of 65 to 128 channels on sm90
MANY = Launch(32, 128, 8, 2, depth=1024)

# The gathered queries of a step x keys of a block. Depth: channels of the heads that a step loads at once.
LAUNCHES = LaunchTable({
    ("lse", "sm90"): {256: Launch(64, 128, 4, 3)},
    ("lse", "sm80"): {128: Launch(64, 128, 4, 2), 256: Launch(32, 64, 4, 2)},
    ("lse", "fp32"): {128: Launch(16, 32, 4, 1), 256: Launch(16, 16, 4, 1)},
    ("loss", "sm90"): {
        64: Launch(32, 128, 8, 2, depth=384, maxnreg=128), 128: Launch(64, 128, 8, 2, depth=384),
        256: Launch(16, 128, 8, 2, depth=384),
    },
    ("loss", "sm80"): {64: Launch(64, 64, 4, 2, depth=384), 256: Launch(32, 64, 8, 2, depth=384)},
    ("loss", "fp32"): {128: Launch(16, 32, 8, 1, depth=384), 256: Launch(16, 16, 8, 1, depth=384)},
})  # fmt: skip


def loss(
    index_q: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    counted: Tensor,
    block: int,
    cu_seqlens: Tensor | None,
    params: Launch | None = None,
    *,
    q_offset: int = 0,
    has_grads: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    kl = torch.zeros((), dtype=torch.float32, device=q.device)
    d_index_q, d_index_k = empty_grads(index_q)
    if has_grads:
        d_index_q = index_q.new_empty(index_q.shape)
        d_index_k = torch.zeros(index_k.shape, dtype=torch.float32, device=q.device)
    if index_q.numel() == 0:
        return kl, d_index_q, d_index_k
    tokens = q.shape[1]
    lse = lse.contiguous() * LOG2E + log2(q.shape[2] // k.shape[2])  # base 2; exponentials are then parts of a mean
    index_q, index_k, q, k = (unit_last(x) for x in (index_q, index_k, q, k))
    blocks = number_blocks(k.shape[1], block, cu_seqlens, q.device, q_offset)
    if indices is not None:
        indices = indices.masked_fill(~counted[:, :, None, None], -1)
    params = params or default_params(q, index_q)
    pieces = cdiv(block, params.columns)
    at_once = queries_at_once(index_q, q, blocks.count if indices is None else indices.shape[3], pieces, has_grads)
    with launch_on(q):
        for first in range(0, tokens, at_once):
            rows = slice(first, min(tokens, first + at_once))
            seen = replace(blocks, q_offset=q_offset + first)
            visible = blocks.count if blocks.packed else cdiv(q_offset + rows.stop, block)
            turn = Turn(0, index_q.shape[0] * index_q.shape[2], 0, min(blocks.count, visible))
            if indices is None:
                lists, positions = visible_lists(counted[:, rows], block, seen, turn)
            else:
                positions = torch.empty(
                    turn.pairs, rows.stop - first, indices.shape[3], dtype=torch.int32, device=q.device
                )
                lists = block_lists(indices[:, rows], seen, CHUNK, turn, None, positions)
            tensors = (q[:, rows], k, index_q[:, rows], index_k, lse[:, rows])
            grads = (d_index_q[:, rows], d_index_k) if has_grads else None
            kl += _stretch(tensors, lists, positions, seen, pieces, grads, params)
    return kl, d_index_q, d_index_k


def default_params(q: Tensor, index_q: Tensor) -> Launch:
    """The checked-in launch parameters for such tensors."""
    params = LAUNCHES.find("loss", q, index_q)
    has_many = q.shape[2] // index_q.shape[2] >= MANY_HEADS and head_class(q.shape[3], index_q.shape[3]) == 128
    return MANY if has_many and card_of(q).kind == "sm90" and q.element_size() == 2 else params


def queries_at_once(index_q: Tensor, q: Tensor, chosen: int, pieces: int, has_grads: bool) -> int:
    """How many queries of every sequence are done at a time: stretches of equal length, of whole spans. Parts take as
    many bytes as q, within limits."""
    batch, tokens, groups, size = index_q.shape
    a_query = batch * groups * chosen * (12 + (pieces * size * index_q.element_size() if has_grads else 0))
    turns = cdiv(tokens, max(SPAN, min(max(MIN_PARTS_BYTES, q.nbytes), MAX_PARTS_BYTES) // a_query))
    return min(tokens, cdiv(cdiv(tokens, turns), SPAN) * SPAN)


def visible_lists(counted: Tensor, block: int, blocks: Blocks, turn: Turn) -> tuple[BlockLists, Tensor]:
    """`block_lists` and its positions [P, S, J], where all queries that are `counted` [B, S] read every block that they
    see."""
    (batch, tokens), device, offset = counted.shape, counted.device, blocks.q_offset
    groups, t = turn.pairs // batch, torch.arange(tokens, device=device)
    begin = torch.arange(turn.blocks, device=device) * block
    end = torch.full_like(begin, offset + tokens)
    if blocks.packed:
        begin = blocks.starts[: turn.blocks].to(torch.int64)
        # Every token after the last one has no document.
        own = blocks.doc_start[begin.clamp(max=blocks.doc_start.shape[0] - 1)]
        end = torch.searchsorted(blocks.doc_start, own, right=True)
    begin, end = ((x - offset).clamp(0, tokens) for x in (begin, end))  # the queries that see a block, [J]
    before = torch.nn.functional.pad(counted.cumsum(1), (1, 0))  # counted queries before each, [B, S + 1]
    counts = (before[:, end] - before[:, begin]).clamp(min=0)  # [B, J]
    lists = empty_lists(turn, CHUNK, turn.pairs * tokens * turn.blocks, device)
    lists.counts.copy_(counts.unsqueeze(1).expand(-1, groups, -1).reshape(-1))
    plan_items(lists)
    reads = counted[:, :, None] & (t[:, None] >= begin) & (t[:, None] < end)  # [B, S, J]
    place = (before[:, :-1, None] - before[:, None, begin]).unsqueeze(1) + lists.offsets.view(batch, groups, 1, -1)
    positions = place.masked_fill(~reads.unsqueeze(1), -1).to(torch.int32).view(turn.pairs, tokens, turn.blocks)
    # What is not read goes to an entry behind the last, which is then dropped.
    queries = torch.empty(lists.queries.shape[0] + 1, dtype=torch.int32, device=device)
    place = positions.to(torch.int64).masked_fill(positions < 0, lists.queries.shape[0])
    queries.scatter_(0, place.view(-1), t.to(torch.int32)[None, :, None].expand_as(place).reshape(-1))
    return replace(lists, queries=queries[:-1]), positions


def _stretch(
    tensors: tuple[Tensor, ...],
    lists: BlockLists,
    positions: Tensor,
    blocks: Blocks,
    pieces: int,
    grads: tuple[Tensor, Tensor] | None,
    params: Launch,
) -> Tensor:
    """The loss of some queries. Writes their gradient and adds that of the index keys, where `grads` are given. The
    keys of a block are those of `pieces` programs."""
    q, k, index_q, index_k, lse = tensors
    (batch, tokens, groups, size), (pairs, _, chosen) = index_q.shape, positions.shape
    per_group, most = q.shape[2] // groups, max(1, params.depth // q.shape[3])
    entries, block, by_lse = lists.queries.shape[0], blocks.size, LAUNCHES.find("lse", index_q, index_q)
    lists_of = (
        lists.queries, lists.offsets, lists.item_block, lists.totals, lists.counts, lists.item_first, blocks.starts
    )  # fmt: skip
    sizes = (lists.chunk, k.shape[1], groups, lists.count, blocks.q_offset)
    shape = {"SEL": block, "E": size, "BLOCK_E": padded(size), "PACKED": blocks.packed}
    index_shape = shape | {"STRIDE_I": index_q.stride(1), "WIDE": max(extent(q), extent(index_q)) >= 1 << 31}
    index_strides = (index_q.stride(0), index_q.stride(2), *index_k.stride()[:2])

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=q.device)

    lse_pieces = cdiv(block, by_lse.columns)
    lse_parts, index_lse = floats(entries, lse_pieces), floats(pairs, tokens)
    launcher(index_lse_kernel, (lists.max_items * lse_pieces,), q)(
        index_q, index_k, lse_parts, *lists_of, *index_strides, *sizes, size**-0.5 * LOG2E,
        ROWS=by_lse.rows, KEYS=block // lse_pieces, **index_shape,
        num_warps=by_lse.num_warps, num_stages=by_lse.num_stages,
    )  # fmt: skip
    merges = (cdiv(pairs * tokens, MERGED_ROWS),)
    launcher(merge_lse_kernel, merges, q)(
        lse_parts, positions, index_lse, pairs * tokens, chosen, PIECES=lse_pieces, ROWS=MERGED_ROWS, WIDTH=16,
        num_warps=4,
    )  # fmt: skip
    del lse_parts
    programs = lists.max_items * pieces
    kl = torch.zeros(programs, dtype=torch.float32, device=q.device)
    d_q_parts = d_k_parts = kl
    if grads:
        d_q_parts, d_k_parts = index_q.new_empty(entries * pieces, size), floats(lists.max_items, block, size)
    launcher(loss_kernel, (programs,), q)(
        q, k, index_q, index_k, lse, index_lse, kl, d_q_parts, d_k_parts, *lists_of,
        q.stride(0), *k.stride()[:3], *index_strides, lse.stride(0), *sizes, tokens,
        q.shape[3] ** -0.5 * LOG2E, size**-0.5 * LOG2E,
        STRIDE_QS=q.stride(1), STRIDE_QH=q.stride(2), HEADS=q.shape[2], PER_GROUP=per_group,
        AT_ONCE=max(n for n in range(1, most + 1) if per_group % n == 0), ROWS=params.rows, KEYS=block // pieces,
        DK=q.shape[3], BLOCK_DK=padded(q.shape[3]), GRADS=grads is not None,
        STAGES=params.num_stages, HOPPER=q.dtype != torch.float32 and card_of(q).kind == "sm90", INTERPRETED=q.is_cpu,
        **index_shape, num_warps=min(params.num_warps, max(4, block // 16)), num_stages=params.num_stages,
        maxnreg=params.maxnreg,
    )  # fmt: skip
    if grads:
        d_index_q, d_index_k = grads
        launcher(merge_grads_kernel, merges, q)(
            d_q_parts, positions, d_index_q, d_index_q.stride(0) // size, pairs * tokens, tokens, groups, chosen,
            size**-0.5, PIECES=pieces, ROWS=MERGED_ROWS, E=size, BLOCK_E=padded(size), num_warps=4,
        )  # fmt: skip
        launcher(sum_keys_kernel, (batch * lists.count * (block // 16),), q)(
            d_k_parts, d_index_k, lists.counts, lists.item_first, blocks.starts, lists.chunk, k.shape[1], groups,
            lists.count, size**-0.5, KEYS=16, **shape, num_warps=4,
        )  # fmt: skip
    return kl.sum()
