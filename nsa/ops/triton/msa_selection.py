"""Which blocks the index of MSA chooses: the maximum of every block's scores, then the top-k of `selection_kernels`.

Promises the results of the reference: ascending indices padded with -1, forced blocks always in, equal scores to the
lower index. Scores exist for a chunk of queries at a time (`selection.score_bytes`).

A row of the score kernel is a query and group: the index keys, one head for all groups, are read once for all of them.
Blocks of which a query sees a part only are its newest, and forced: where one local block or more is, no score needs a
mask. A launch of the scores has rows and, as columns, keys.

Legend: B batch, S tokens, N keys, G groups, E index head size.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.spec import MSASpec
from nsa.ops.triton.flash_kernels import load_tile
from nsa.ops.triton.launch_table import Launch, LaunchTable, cdiv, launch_on, launcher, padded, unit_last
from nsa.ops.triton.launch_table import refusal as refusal
from nsa.ops.triton.selection import LAUNCHES as SELECTION_LAUNCHES
from nsa.ops.triton.selection import (
    block_width,
    document_starts,
    pick_constants,
    plan_chunks,
    score_bytes,
    score_elements,
    split_blocks,
)
from nsa.ops.triton.selection_kernels import pick_kernel

LAUNCHES = LaunchTable({
    ("index", "sm90"): {256: Launch(128, 128, 8, 2)},
    ("index", "sm80"): {128: Launch(128, 64, 8, 3), 256: Launch(64, 64, 8, 2)},
    ("index", "fp32"): {128: Launch(32, 32, 4, 1), 256: Launch(16, 32, 4, 1)},
})  # fmt: skip


def choose(
    index_q: Tensor,
    index_k: Tensor,
    spec: MSASpec,
    cu_seqlens: Tensor | None,
    params: Launch | None = None,
    *,
    q_offset: int = 0,
) -> Tensor:
    """index_q [B,S,G,E], index_k [B,N,E] -> indices [B,S,G,num_selected] int32."""
    batch, tokens, groups, size = index_q.shape
    params, pick = params or LAUNCHES.find("index", index_q, index_q), SELECTION_LAUNCHES.find("pick", index_q, index_q)
    indices = torch.empty(batch, tokens, groups, spec.num_selected, dtype=torch.int32, device=index_q.device)
    if indices.numel() == 0:
        return indices
    q, k = unit_last(index_q), unit_last(index_k)
    packed = cu_seqlens is not None or q_offset > 0
    doc_start = document_starts(q, cu_seqlens, q_offset) if packed else indices
    constants = _score_constants(spec, size, k.shape[1] * k.stride(1) >= 1 << 31, params)
    limit, query_tile = score_bytes(q_offset + tokens), max(1, params.rows // groups)
    scored_from, chunks = plan_chunks(batch, tokens, groups, query_tile, spec, packed, limit, q_offset)
    elements = score_elements(chunks, groups, scored_from, spec, q_offset)
    workspace = torch.empty(max(1, elements), dtype=torch.float32, device=q.device)
    with launch_on(q):
        for b0, b1, first, stop in chunks:
            score_first, width = max(first, scored_from), block_width(q_offset + stop, spec)
            if stop > score_first:
                programs = cdiv((stop - score_first) * groups, params.rows) * (b1 - b0)
                splits, span = split_blocks(programs, width, constants["BLOCKS"])
                launcher(block_max_kernel, (programs * splits,), index_q)(
                    q, k, workspace, doc_start,
                    b0, b1 - b0, score_first, stop, q_offset, width, groups, splits, span,
                    *q.stride()[:3], *k.stride()[:2], **constants, PACKED=packed,
                    num_warps=params.num_warps, num_stages=params.num_stages, maxnreg=params.maxnreg,
                )  # fmt: skip
            pick_args, warps = pick_constants(spec, width, pick)
            launcher(pick_kernel, ((stop - first) * (b1 - b0) * groups,), index_q)(
                workspace, indices, doc_start,
                b0, first, stop, score_first, tokens, width, groups,
                **pick_args, PLANES=1, PACKED=packed, LEAST=-(2**31), num_warps=warps,
            )  # fmt: skip
    return indices


@lru_cache(maxsize=256)
def _score_constants(spec: MSASpec, size: int, wide: bool, params: Launch) -> dict[str, Any]:
    return {
        "E": size, "BLOCK_E": padded(size), "ROWS": params.rows, "KEYS": params.columns,
        "BLOCKS": max(1, params.columns // spec.sel_block), "PARTS": max(1, spec.sel_block // params.columns),
        "SEL": spec.sel_block, "NUM_SELECTED": spec.num_selected, "NUM_INIT": spec.num_init,
        "NUM_LOCAL": spec.num_local, "WIDE": wide,
    }  # fmt: skip


@triton.jit(do_not_specialize=["b0", "batch", "row_first", "row_stop", "q_offset", "splits", "span"])
def block_max_kernel(
    q, k, out, doc_start,
    b0, batch, row_first, row_stop, q_offset, width, groups, splits, span,
    stride_qb, stride_qs, stride_qg, stride_kb, stride_ks,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, SEL: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows (query, group) and `span` blocks. out [batch, queries, G, width]; `doc_start` counts from
    the first query."""
    pid = tl.program_id(0)
    b = pid % batch
    begin = NUM_INIT + pid // batch % splits * span
    # The last queries see most: they start first, so that no long program starts at the end.
    rows = (row_stop - row_first) * groups
    row = (tl.cdiv(rows, ROWS) - 1 - pid // (batch * splits)) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    t = row_first + row // groups
    start = tl.zeros([ROWS], tl.int32)
    if PACKED:
        start = tl.load(doc_start + t, mask=exists, other=0).to(tl.int32)
    position = tl.where(exists, t - start, 0)
    if begin > tl.max(position, axis=0) // SEL - NUM_LOCAL:
        return

    e = tl.arange(0, BLOCK_E)
    b64 = (b0 + b).to(tl.int64)
    q_rows = q + b64 * stride_qb + t.to(tl.int64) * stride_qs + (row % groups).to(tl.int64) * stride_qg
    q_tile = load_tile(q_rows[:, None] + e[None, :], exists, e, E, BLOCK_E, True)
    k_base = k + b64 * stride_kb
    out_rows = out + (b.to(tl.int64) * rows + row) * width
    if PACKED:
        # A tile may touch several documents, which take turns.
        enough = exists & (position // SEL >= NUM_SELECTED)
        at = tl.min(t, axis=0)
        while at < tl.minimum(row_stop, tl.max(t, axis=0) + 1):
            here = tl.max(tl.where(t == at, start, -(1 << 31)), axis=0)
            same = exists & (start == here)
            wanted = enough & same
            if tl.max(wanted.to(tl.int32), axis=0) > 0:
                _max_tiles(
                    q_tile, k_base, stride_ks, out_rows, position, wanted, here + q_offset, begin, span, width,
                    E, BLOCK_E, ROWS, KEYS, BLOCKS, PARTS, SEL, NUM_LOCAL, WIDE,
                )  # fmt: skip
            at = tl.max(tl.where(same, t, at), axis=0) + 1
    else:
        _max_tiles(
            q_tile, k_base, stride_ks, out_rows, position, exists, 0, begin, span, width,
            E, BLOCK_E, ROWS, KEYS, BLOCKS, PARTS, SEL, NUM_LOCAL, WIDE,
        )  # fmt: skip


@triton.jit
def _max_tiles(
    q, k_base, stride_ks, out_rows, position, wanted, base, begin, span, width,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, SEL: tl.constexpr, NUM_LOCAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The rows that are `wanted`, all of one document whose first key is `base`, against `span` blocks from `begin`."""
    last = tl.max(tl.where(wanted, position, 0), axis=0)
    stop = tl.minimum(last // SEL - NUM_LOCAL + 1, begin + span)
    col, e = tl.arange(0, KEYS), tl.arange(0, BLOCK_E)
    best = tl.full([ROWS, BLOCKS], -float("inf"), tl.float32)
    for i in range(begin * PARTS, stop * PARTS, BLOCKS):
        place = i * (SEL // PARTS) + col  # in the document
        key = base + place
        if NUM_LOCAL == 0 or BLOCKS > 1:
            key = base + tl.minimum(place, last)  # what comes after the last query is not looked up
        k_rows = k_base + (key.to(tl.int64) if WIDE else key) * stride_ks
        k = load_tile(k_rows[:, None] + e[None, :], col >= 0, e, E, BLOCK_E, False)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        if NUM_LOCAL == 0:
            s = tl.where(place[None, :] <= position[:, None], s, -float("inf"))
        here = tl.max(tl.reshape(s, [ROWS, BLOCKS, KEYS // BLOCKS]), axis=2)
        if PARTS > 1:
            here = tl.where(i % PARTS > 0, tl.maximum(here, best), here)
        best = here
        block = i // PARTS + tl.arange(0, BLOCKS)
        tl.store(out_rows[:, None] + block[None, :], best, mask=wanted[:, None] & (block < width)[None, :])
