"""Compression of blocks of tokens: their mean, or their contraction with a learned weight, and the gradients.

The results are those of the reference, with sums in float32, one rounding, no atomics. The overlapping blocks are never
copied: the contraction and its gradients are matrix products whose kernels read the rows of a block in place, so that
packed documents cost only one table. Unused slots at the end of a packed sequence are 0, and so is the gradient of
tokens in no block. A launch of the mean has slots (in backward, tokens) as rows and channels (heads x D) as columns.

Legend: B batch, S tokens, N compressed tokens (slots), G key/value heads, D head size, E width of the weight;
a chunk is `cmp_stride` tokens, so that every block is a whole number of neighbouring chunks.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.layout import first_compressed, num_slots, slot_layout, token_layout
from nsa.ops.spec import NSASpec
from nsa.ops.triton import launch_table
from nsa.ops.triton.launch_table import Launch, LaunchTable, cdiv, launch_on, launcher, power_of_2, unit_last

LAUNCHES = LaunchTable({
    ("mean", "sm80"): {256: Launch(8, 128)},
    ("mean_backward", "sm80"): {256: Launch(16, 128)},
    ("product", "sm90"): {256: Launch(128, 64)},
    ("product", "sm80"): {256: Launch(64, 64)},
    ("product", "fp32"): {256: Launch(64, 64, 4, 2, depth=16)},
})  # fmt: skip
# The gradient of the weight has few tiles and a long sum, which is split into parts for this many programs.
WEIGHT_PROGRAMS = 512

refusal = launch_table.refusal


def mean(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,S,G,D] -> [B,N,G,D]."""
    batch, tokens, groups, dim = x.shape
    slots = num_slots(tokens, spec, packed=cu_seqlens is not None)
    y = torch.empty(batch, slots, groups, dim, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = unit_last(x)
    table = _slot_table(tokens, spec, cu_seqlens, y)
    params = LAUNCHES.find("mean", x, x)
    channels = min(power_of_2(groups * dim), params.columns)
    grid = (cdiv(slots, params.rows), cdiv(groups * dim, channels), batch)
    with launch_on(x):
        launcher(_mean_kernel, grid, x)(
            x, y, *table, slots, tokens, groups * dim, *x.stride()[:3],
            D=dim, CMP_BLOCK=spec.cmp_block, CMP_STRIDE=spec.cmp_stride, UNROLL=divisor(spec.cmp_block, 8),
            ROWS=params.rows, CHANNELS=channels, PACKED=cu_seqlens is not None, num_warps=params.num_warps,
        )  # fmt: skip
    return y


def mean_backward(dy: Tensor, tokens: int, spec: NSASpec, cu_seqlens: Tensor | None) -> Tensor:
    """dy [B,N,G,D] -> the gradient of x [B,S,G,D], S = tokens."""
    batch, slots, groups, dim = dy.shape
    dx = torch.empty(batch, tokens, groups, dim, dtype=dy.dtype, device=dy.device)
    if dx.numel() == 0:
        return dx
    if slots == 0:
        return dx.zero_()
    dy = unit_last(dy)
    tables = (*_slot_table(tokens, spec, cu_seqlens, dx), *_token_table(tokens, spec, cu_seqlens, dx))
    params = LAUNCHES.find("mean_backward", dy, dy)
    channels = min(power_of_2(groups * dim), params.columns)
    grid = (cdiv(tokens, params.rows), cdiv(groups * dim, channels), batch)
    with launch_on(dy):
        launcher(_mean_backward_kernel, grid, dy)(
            dy, dx, *tables, slots, tokens, groups * dim, *dy.stride()[:3],
            D=dim, CMP_BLOCK=spec.cmp_block, CMP_STRIDE=spec.cmp_stride, ROWS=params.rows, CHANNELS=channels,
            PACKED=cu_seqlens is not None, num_warps=params.num_warps,
        )  # fmt: skip
    return dx


def contract(
    x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, params: Launch | None = None
) -> Tensor:
    """x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E], summed over a block's tokens and channels."""
    batch, tokens, groups, dim = x.shape
    slots, width = num_slots(tokens, spec, packed=cu_seqlens is not None), weight.shape[2]
    y = torch.empty(batch, slots, groups, width, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, weight = unit_last(x), weight.contiguous()
    table = _slot_table(tokens, spec, cu_seqlens, y)
    params = params or LAUNCHES.find("product", x, x)
    depth, columns = divisor(dim, params.depth), _tile(width, params.columns)
    grid = (cdiv(batch * slots * groups, params.rows), cdiv(width, columns))
    with launch_on(x):
        launcher(_contract_kernel, grid, x)(
            x, weight, y, *table, batch * slots * groups, slots, groups, tokens, width, *x.stride()[:3],
            D=dim, CMP_BLOCK=spec.cmp_block, CMP_STRIDE=spec.cmp_stride,
            ROWS=params.rows, COLUMNS=columns, DEPTH=depth, PACKED=cu_seqlens is not None,
            num_warps=params.num_warps, num_stages=params.num_stages,
        )  # fmt: skip
    return y


def contract_backward(
    dy: Tensor, x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, params: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """dy [B,N,G,E] -> the gradients of x [B,S,G,D] and weight [cmp_block,D,E]."""
    if dy.numel() == 0:
        return x.new_zeros(x.shape), weight.new_zeros(weight.shape)
    dy, x, weight = unit_last(dy), unit_last(x), weight.contiguous()
    params = params or LAUNCHES.find("product", x, x)
    dx = _contract_dx(dy, x, weight, spec, cu_seqlens, params)
    return dx, _contract_dweight(dy, x, weight, spec, cu_seqlens, params)


def _contract_dx(
    dy: Tensor, x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, params: Launch
) -> Tensor:
    """One product [chunks, blocks of a chunk * E] x [blocks of a chunk * E, tokens of a chunk * D]."""
    batch, tokens, groups, dim = x.shape
    slots, width = dy.shape[1], dy.shape[3]
    packed = cu_seqlens is not None
    # Blocks cover whole chunks, so the rest of a document has no gradient. Chunks are blocks of one stride.
    chunk_spec = replace(spec, cmp_block=spec.cmp_stride)
    chunks = num_slots(tokens, chunk_spec, packed=packed)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx[:, 0 if packed else chunks * spec.cmp_stride :].zero_()
    chunks_table = _slot_table(tokens, chunk_spec, cu_seqlens, dx)
    tables = (*_slot_table(tokens, spec, cu_seqlens, dx), *_token_table(tokens, spec, cu_seqlens, dx))
    columns, depth = divisor(dim, params.columns), _tile(width, params.depth)
    grid = (cdiv(batch * chunks * groups, params.rows), spec.cmp_stride * (dim // columns))
    with launch_on(x):
        launcher(_contract_dx_kernel, grid, x)(
            dy, weight, dx, *chunks_table, *tables,
            batch * chunks * groups, chunks, slots, groups, tokens, width, *dy.stride()[:3],
            D=dim, CMP_BLOCK=spec.cmp_block, CMP_STRIDE=spec.cmp_stride,
            ROWS=params.rows, COLUMNS=columns, DEPTH=depth, PACKED=packed,
            num_warps=params.num_warps, num_stages=params.num_stages,
        )  # fmt: skip
    return dx


def _contract_dweight(
    dy: Tensor, x: Tensor, weight: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, params: Launch
) -> Tensor:
    """For every place in a block, the product [D, slots] x [slots, E]; its parts are added in a fixed order."""
    batch, tokens, groups, dim = x.shape
    slots, width = dy.shape[1], dy.shape[3]
    table = _slot_table(tokens, spec, cu_seqlens, x)
    total = batch * slots * groups
    rows, columns = divisor(dim, params.rows), _tile(width, params.columns)
    steps = cdiv(total, params.depth)
    tiles = spec.cmp_block * (dim // rows) * cdiv(width, columns)
    parts = max(1, min(WEIGHT_PROGRAMS // tiles, steps // 8))
    partial = torch.empty(parts, *weight.shape, dtype=torch.float32, device=x.device)
    with launch_on(x):
        launcher(_contract_dweight_kernel, (spec.cmp_block * (dim // rows), cdiv(width, columns), parts), x)(
            dy, x, partial, *table, total, slots, groups, tokens, width, cdiv(steps, parts),
            *dy.stride()[:3], *x.stride()[:3],
            D=dim, CMP_BLOCK=spec.cmp_block, CMP_STRIDE=spec.cmp_stride,
            ROWS=rows, COLUMNS=columns, DEPTH=params.depth, PACKED=cu_seqlens is not None,
            num_warps=params.num_warps, num_stages=params.num_stages,
        )  # fmt: skip
    return partial.sum(0).to(weight.dtype)


def divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`: tiles of a head need no mask."""
    return min(size & -size, most)


def _tile(size: int, most: int) -> int:
    return max(16, min(power_of_2(size), most))


def _slot_table(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, unread: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of every slot, and whether it is used. Without documents the kernels do not read them."""
    if cu_seqlens is None:
        return unread, unread
    layout = slot_layout(tokens, spec, cu_seqlens, unread.device)
    return layout.first_token, layout.used.view(torch.int8)


def _token_table(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, unread: Tensor) -> tuple[Tensor, Tensor]:
    """The first token and the first slot of every token's document; not read without documents."""
    if cu_seqlens is None:
        return unread, unread
    doc_start = token_layout(tokens, cu_seqlens, unread.device).doc_start
    return doc_start, first_compressed(tokens, spec, cu_seqlens, unread.device)


@triton.jit
def _slot_first(first, used, slot, live, CMP_STRIDE: tl.constexpr, PACKED: tl.constexpr):
    """The first token of each slot, and which of the `live` slots are used."""
    if PACKED:
        live = live & (tl.load(used + slot, mask=live, other=0) != 0)
        return tl.load(first + slot, mask=live, other=0), live
    else:
        return slot.to(tl.int64) * CMP_STRIDE, live


@triton.jit
def _slot_of(first, used, token_start, base, number, slots, live, CMP_STRIDE: tl.constexpr, PACKED: tl.constexpr):
    """The slot of a document's compressed token `number`, and whether the document has that token. `base` is the
    document's first slot; the slot belongs to the document if its first token is that of `number`."""
    slot = base + number
    live = live & (number >= 0) & (slot >= 0) & (slot < slots)
    if PACKED:
        at, live = _slot_first(first, used, slot, live, CMP_STRIDE, PACKED)
        live = live & (at == token_start + number * CMP_STRIDE)
    return slot, live


@triton.jit(do_not_specialize=["slots", "tokens"])
def _mean_kernel(
    x, y, first, used, slots, tokens, channels, stride_xb, stride_xs, stride_xg,
    D: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr, UNROLL: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # over (head, d)
    b = tl.program_id(2).to(tl.int64)
    exists = slot < slots
    at, live = _slot_first(first, used, slot, exists, CMP_STRIDE, PACKED)
    row = x + b * stride_xb + at * stride_xs
    column = (channel // D).to(tl.int64) * stride_xg + channel % D
    wanted = channel < channels
    total = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for t in range(0, CMP_BLOCK, UNROLL):
        for u in tl.static_range(UNROLL):  # several loads in flight
            mask = (live & (at + (t + u) < tokens))[:, None] & wanted[None, :]
            total += tl.load(row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
            row += stride_xs
    place = (b * slots + slot) * channels
    result = (total / CMP_BLOCK).to(y.dtype.element_ty)
    tl.store(y + place[:, None] + channel[None, :], result, mask=exists[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["slots", "tokens"])
def _mean_backward_kernel(
    dy, dx, first, used, doc_start, cmp_start, slots, tokens, channels, stride_yb, stride_yn, stride_yg,
    D: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # over (head, d)
    b = tl.program_id(2).to(tl.int64)
    exists = token < tokens
    start = tl.zeros([ROWS], dtype=tl.int64)
    base = tl.zeros([ROWS], dtype=tl.int64)
    if PACKED:
        start = tl.load(doc_start + token, mask=exists, other=0)
        base = tl.load(cmp_start + token, mask=exists, other=0)
    newest = (token - start) // CMP_STRIDE  # the last compressed token that may include this token
    column = (channel // D).to(tl.int64) * stride_yg + channel % D
    wanted = channel < channels
    total = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for m in range(CMP_BLOCK // CMP_STRIDE):
        slot, live = _slot_of(first, used, start, base, newest - m, slots, exists, CMP_STRIDE, PACKED)
        row = dy + b * stride_yb + slot * stride_yn
        mask = live[:, None] & wanted[None, :]
        total += tl.load(row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    place = (b * tokens + token) * channels
    result = (total / CMP_BLOCK).to(dx.dtype.element_ty)
    tl.store(dx + place[:, None] + channel[None, :], result, mask=exists[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["num_rows", "slots", "tokens"])
def _contract_kernel(
    x, weight, y, first, used, num_rows, slots, groups, tokens, width, stride_xb, stride_xs, stride_xg,
    D: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y [num_rows, width] over rows (b, slot, group); the depth runs over (place in the block, channel)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    exists = row < num_rows
    slot = row // groups % slots
    b = (row // groups // slots).to(tl.int64)
    at, live = _slot_first(first, used, slot, exists, CMP_STRIDE, PACKED)
    live = live & (at + CMP_BLOCK <= tokens)
    x_row = x + b * stride_xb + at * stride_xs + (row % groups).to(tl.int64) * stride_xg
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(CMP_BLOCK * (D // DEPTH)):
        t = step // (D // DEPTH)
        x_at = x_row + (t.to(tl.int64) * stride_xs + step % (D // DEPTH) * DEPTH)
        x_tile = tl.load(x_at[:, None] + k[None, :], mask=live[:, None], other=0.0)
        w_at = weight + (step * DEPTH + k).to(tl.int64) * width
        w_tile = tl.load(w_at[:, None] + e[None, :], mask=(e < width)[None, :], other=0.0)
        total = tl.dot(x_tile, w_tile, acc=total, input_precision="ieee")
    place = row.to(tl.int64) * width
    mask = exists[:, None] & (e < width)[None, :]
    tl.store(y + place[:, None] + e[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "chunks", "slots", "tokens"])
def _contract_dx_kernel(
    dy, weight, dx, chunk_first, chunk_used, first, used, doc_start, cmp_start,
    num_rows, chunks, slots, groups, tokens, width, stride_yb, stride_yn, stride_yg,
    D: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For rows (b, chunk, group), the gradient of token `place` of the chunk, COLUMNS of its channels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) // (D // COLUMNS)
    d = tl.program_id(1) % (D // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    g = (row % groups).to(tl.int64)
    chunk = row // groups % chunks
    b = (row // groups // chunks).to(tl.int64)
    at, live = _slot_first(chunk_first, chunk_used, chunk, row < num_rows, CMP_STRIDE, PACKED)
    live = live & (at + place < tokens)
    start = tl.zeros([ROWS], dtype=tl.int64)
    base = tl.zeros([ROWS], dtype=tl.int64)
    if PACKED:
        start = tl.load(doc_start + at, mask=live, other=0)
        base = tl.load(cmp_start + at, mask=live, other=0)
    newest = (at - start) // CMP_STRIDE  # this chunk's number in its document

    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for m in range(CMP_BLOCK // CMP_STRIDE):  # the chunk is the m-th of block newest - m
        slot, held = _slot_of(first, used, start, base, newest - m, slots, live, CMP_STRIDE, PACKED)
        y_row = dy + b * stride_yb + slot * stride_yn + g * stride_yg
        w_row = weight + ((m * CMP_STRIDE + place) * D + d).to(tl.int64) * width
        for e0 in range(0, width, DEPTH):
            e = e0 + tl.arange(0, DEPTH)
            inside = (e < width)[None, :]
            y_tile = tl.load(y_row[:, None] + e[None, :], mask=held[:, None] & inside, other=0.0)
            w_tile = tl.load(w_row[:, None] + e[None, :], mask=inside, other=0.0)
            total = tl.dot(y_tile, tl.trans(w_tile), acc=total, input_precision="ieee")
    x_row = dx + ((b * tokens + at + place) * groups + g) * D
    tl.store(x_row[:, None] + d[None, :], total.to(dx.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["num_rows", "slots", "tokens", "steps"])
def _contract_dweight_kernel(
    dy, x, partial, first, used, num_rows, slots, groups, tokens, width, steps,
    stride_yb, stride_yn, stride_yg, stride_xb, stride_xs, stride_xg,
    D: tl.constexpr, CMP_BLOCK: tl.constexpr, CMP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """partial [parts, CMP_BLOCK, D, width]: one place in the block, `steps` tiles of (b, slot, group)."""
    place = tl.program_id(0) // (D // ROWS)
    d = tl.program_id(0) % (D // ROWS) * ROWS + tl.arange(0, ROWS)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        row = step * DEPTH + tl.arange(0, DEPTH)
        g = (row % groups).to(tl.int64)
        slot = row // groups % slots
        b = (row // groups // slots).to(tl.int64)
        at, live = _slot_first(first, used, slot, row < num_rows, CMP_STRIDE, PACKED)
        live = live & (at + place < tokens)
        x_row = x + b * stride_xb + (at + place) * stride_xs + g * stride_xg
        y_row = dy + b * stride_yb + slot.to(tl.int64) * stride_yn + g * stride_yg
        x_tile = tl.load(x_row[:, None] + d[None, :], mask=live[:, None], other=0.0)
        y_tile = tl.load(y_row[:, None] + e[None, :], mask=live[:, None] & (e < width)[None, :], other=0.0)
        total = tl.dot(tl.trans(x_tile), y_tile, acc=total, input_precision="ieee")
    w_row = (part.to(tl.int64) * (CMP_BLOCK * D) + place * D + d) * width
    tl.store(partial + w_row[:, None] + e[None, :], total, mask=(e < width)[None, :])
