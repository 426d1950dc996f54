"""Selection of the blocks that each query reads: block scores, then an exact top-k (`selection_kernels.py`).

The results are those of the reference: ascending indices padded with -1, forced blocks always included, ties to the
lower index. Block scores exist for a chunk of queries at a time (`score_bytes`). In a launch of the scores, rows are
compressed tokens and columns are the most heads x queries that a program keeps in shared memory; in a launch of the
top-k, columns are the blocks that its warps keep in registers.

Legend: B batch, S tokens, G groups, h heads per group, N compressed tokens, J selection blocks.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import compressed_overlap, compressed_per_block, first_compressed, num_blocks, token_layout
from nsa.ops.spec import MSASpec, NSASpec
from nsa.ops.triton import launch_table
from nsa.ops.triton.launch_table import H200, Launch, LaunchTable, cdiv, launch_on, launcher, power_of_2, unit_last
from nsa.ops.triton.selection_kernels import pick_kernel, score_kernel

LOG2E = 1.4426950408889634
SCORE_BYTES = 256 << 20  # per chunk of queries
SCORE_BYTES_PER_TOKEN = 1 << 10  # of the sequence, if that is more
SCORE_PROGRAMS = 32 * H200.multiprocessors  # per launch, about: fewer would leave multiprocessors idle at its end
SCORE_TILES = 16  # minimum tiles of a program, so that loading the queries is a small part

# Of sm90 found by timing, of the others by counting registers and shared memory.
AnySpec = NSASpec | MSASpec  # for what every kind of selection has

LAUNCHES = LaunchTable({
    ("score", "sm90"): {64: Launch(64, 192, 4, 3, maxnreg=128), 128: Launch(64, 256, 4, 2), 256: Launch(64, 128, 4, 2)},
    ("score", "sm80"): {128: Launch(64, 192, 4, 3), 256: Launch(64, 64, 4, 2)},
    ("score", "fp32"): {128: Launch(32, 64, 8, 1), 256: Launch(32, 32, 4, 1)},
    ("pick", "sm80"): {256: Launch(1, 16384, 16)},
})  # fmt: skip


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these kernels cannot run queries like q with key/value heads like v's, or None."""
    return launch_table.group_refusal(q, v, "block selection")


def default_params(q: Tensor, k: Tensor) -> tuple[Launch, Launch]:
    """The launches of scores and top-k."""
    return LAUNCHES.find("score", q, k), LAUNCHES.find("pick", q, k)


def forward(
    q: Tensor, k: Tensor, lse: Tensor, spec: NSASpec, cu_seqlens: Tensor | None,
    params: tuple[Launch, Launch] | None = None, *, q_offset: int = 0,
) -> Tensor:  # fmt: skip
    """q [B,S,H,D], k [B,N,G,D], lse [B,S,H] -> indices [B,S,G,num_selected] int32."""
    batch, tokens, heads, dim = q.shape
    groups = k.shape[2]
    score, pick = params or default_params(q, k)
    indices = torch.empty(batch, tokens, groups, spec.num_selected, dtype=torch.int32, device=q.device)
    if indices.numel() == 0:
        return indices
    q, k = unit_last(q), unit_last(k)

    wide = k.shape[1] * k.stride(1) >= 1 << 31  # else 32-bit offsets inside a head, which save a tenth of the loop
    constants = score_constants(spec, heads // groups, dim, wide, score)
    packed = cu_seqlens is not None or q_offset > 0
    doc_start = cmp_start = indices
    if packed:
        doc_start = document_starts(q, cu_seqlens, q_offset)
        cmp_start = first_compressed(q_offset + tokens, spec, cu_seqlens, q.device)[q_offset:]
    planes, query_tile = constants["PLANES"], constants["QT"]
    limit = score_bytes(q_offset + tokens)
    scored_from, chunks = plan_chunks(batch, tokens, groups * planes, query_tile, spec, packed, limit, q_offset)
    size = score_elements(chunks, groups * planes, scored_from, spec, q_offset)
    workspace = torch.empty(max(1, size), dtype=torch.float32, device=q.device)

    with launch_on(q):
        for b0, b1, first, stop in chunks:
            score_first = max(first, scored_from)
            width = block_width(q_offset + stop, spec)
            if stop > score_first:
                tiles = cdiv(stop - score_first, query_tile)
                programs = tiles * (b1 - b0) * groups
                splits, span = split_blocks(programs, width, constants["BJ"])
                launcher(score_kernel, (programs * splits,), q)(
                    q, k, lse, workspace, doc_start, cmp_start,
                    b0, b1 - b0, score_first, stop, k.shape[1], width, groups, splits, span,
                    *q.stride()[:3], *k.stride()[:3], *lse.stride(),
                    dim**-0.5 * LOG2E,
                    **constants, PACKED=packed,
                    num_warps=score.num_warps, num_stages=score.num_stages, maxnreg=score.maxnreg,
                )  # fmt: skip
            pick_args, warps = pick_constants(spec, width, pick)
            launcher(pick_kernel, ((stop - first) * (b1 - b0) * groups,), q)(
                workspace, indices, doc_start,
                b0, first, stop, score_first, tokens, width, groups,
                **pick_args, PLANES=planes, PACKED=packed, LEAST=-1, num_warps=warps,
            )  # fmt: skip
    return indices


def document_starts(q: Tensor, cu_seqlens: Tensor | None, q_offset: int) -> Tensor:
    """The first token of every query's document, counted from the first query."""
    doc_start = token_layout(q_offset + q.shape[1], cu_seqlens, q.device).doc_start
    return doc_start[q_offset:] - q_offset if q_offset else doc_start


# The following functions depend only on shapes and are cached; callers must not modify their results.


@lru_cache(maxsize=256)
def score_constants(spec: NSASpec, per_group: int, dim: int, wide: bool, params: Launch) -> dict[str, Any]:
    """The compile-time constants of the score kernel."""
    rows = min(16 * params.num_warps, 1 << (params.columns.bit_length() - 1))  # of one product (heads x queries)
    most = max(1, params.columns // per_group)
    queries = min(rows, 1 << (most.bit_length() - 1))
    heads = rows // queries
    chunks = compressed_per_block(spec)
    padded = power_of_2(chunks)
    per_tile = min(padded, params.rows)
    # A head size such as 192 is two products, 128 + 64, rather than one padded to 256.
    low = 1 << (dim.bit_length() - 1)
    return {
        "D": dim, "D0": low, "D1": max(16, power_of_2(dim - low)) if dim > low else 0,
        "HEADS": per_group, "PRODUCTS": cdiv(per_group, heads),
        "HP": heads, "QT": queries, "INNER": max(1, 16 // heads),
        "BJ": params.rows // per_tile, "BC": per_tile, "PARTS": padded // per_tile,
        "R": chunks, "CHUNKS": compressed_overlap(spec),
        "PLANES": score_planes(spec),
        "CMP_BLOCK": spec.cmp_block, "CMP_STRIDE": spec.cmp_stride, "SEL_BLOCK": spec.sel_block,
        "NUM_SELECTED": spec.num_selected, "NUM_INIT": spec.num_init, "NUM_LOCAL": spec.num_local,
        # A scored block ends NUM_LOCAL blocks before the query's own: often all its compressed tokens are visible.
        "MASKED": spec.cmp_block - spec.cmp_stride > (spec.num_local - 1) * spec.sel_block + 1,
        "WIDE": wide,
    }  # fmt: skip


@lru_cache(maxsize=256)
def pick_constants(spec: AnySpec, width: int, params: Launch) -> tuple[dict[str, Any], int]:
    """The compile-time constants of the top-k kernel for rows of at most `width` blocks, and its warps."""
    block = max(32, power_of_2(width))
    per_warp = params.columns // params.num_warps
    warps = min(params.num_warps, power_of_2(cdiv(block, per_warp)))
    block = min(block, per_warp * warps)
    tiled = width > block
    constants = {
        "BLOCK": max(32, block // 4) if tiled else block,  # the loop over tiles needs registers of its own
        "SMALL": max(32, block // 8), "TILED": tiled, "SEL_BLOCK": spec.sel_block,
        "NUM_SELECTED": spec.num_selected, "NUM_PADDED": power_of_2(spec.num_selected),
        "NUM_INIT": spec.num_init, "NUM_LOCAL": spec.num_local,
    }  # fmt: skip
    return constants, warps


def block_width(stop: int, spec: AnySpec) -> int:
    """Length of one plane of a row's scores, for queries before `stop`: whole 64-byte pieces."""
    return cdiv(num_blocks(stop, spec.sel_block), 16) * 16


def score_planes(spec: NSASpec) -> int:
    """Planes of a row's scores: one for own blocks, and if compressed blocks overlap, one for the next blocks."""
    return 1 if compressed_overlap(spec) == 1 else 2


def score_bytes(tokens: int) -> int:
    """Maximum bytes of the scores of a chunk. Grows with the length, as rows do."""
    return max(SCORE_BYTES, SCORE_BYTES_PER_TOKEN * tokens)


def split_blocks(programs: int, width: int, tile: int) -> tuple[int, int]:
    """The number of parts, one program each, into which the blocks of a row are split if there would otherwise be
    `programs`, and the blocks per part: whole tiles. With a million tokens rows are long, and a chunk has few."""
    splits = max(1, min(cdiv(SCORE_PROGRAMS, programs), width // (SCORE_TILES * tile)))
    span = cdiv(cdiv(width, splits), tile) * tile
    return cdiv(width, span), span


@lru_cache(maxsize=256)
def plan_chunks(
    batch: int, tokens: int, planes: int, query_tile: int, spec: AnySpec, packed: bool, limit: int, q_offset: int = 0
) -> tuple[int, list[tuple[int, int, int, int]]]:
    """The first query that needs scores, and chunks (batch from, to, query from, to) whose scores fit `limit` bytes, as
    far as single tiles of queries allow. `planes` counts those of all groups of a query."""
    # Without documents the first queries see too few blocks to need scores; packed, any query may.
    scored_from = 0 if packed else spec.num_selected * spec.sel_block
    if spec.num_selected == spec.num_init + spec.num_local:
        scored_from = tokens  # all blocks are forced
    if scored_from >= tokens:
        return scored_from, [(0, batch, 0, tokens)]

    def row_bytes(stop: int) -> int:
        return 4 * planes * block_width(q_offset + stop, spec)

    batch_step = min(batch, max(1, limit // (row_bytes(tokens) * min(query_tile, tokens))))
    pieces = []
    first = 0
    while first < tokens:
        start = max(first, scored_from)
        most = cdiv(tokens - start, query_tile)

        def cost(tiles: int, start: int = start) -> int:
            stop = min(tokens, start + tiles * query_tile)
            return batch_step * (stop - start) * row_bytes(stop)

        tiles = max(1, bisect_right(range(1, most + 1), limit, key=cost))
        stop = min(tokens, start + tiles * query_tile)
        pieces.append((first, stop))
        first = stop
    chunks = [(b, min(b + batch_step, batch), *piece) for b in range(0, batch, batch_step) for piece in pieces]
    return scored_from, chunks


def score_elements(
    chunks: list[tuple[int, int, int, int]], planes: int, scored_from: int, spec: AnySpec, q_offset: int = 0
) -> int:
    """The number of scores of the largest chunk, [B, S, G, planes, width]; 0 if none are needed."""
    return max(
        (b1 - b0) * max(0, stop - max(first, scored_from)) * planes * block_width(q_offset + stop, spec)
        for b0, b1, first, stop in chunks
    )
