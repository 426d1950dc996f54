"""A decoding step of a few new tokens except its attention, in few launches, which dominate the time of such a step.

`product` computes all linear layers that read one input, with the norm before and the activation or residual after
them. `place` rotates the queries, writes new keys and values into a cache, and computes the gates. Both compute the
same as the modules of `nsa.nn`, with one rounding where those round after every operation.

A product of one row loads weights into registers before it waits for the previous kernel, which may still run. Results
of other kernels are loaded after the wait, and never from the L1 cache, which may be stale.

Legend: T tokens, C channels, N columns of a product, H heads, D head size, R rotated channels of a head, J hidden width
of the gate.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.ops.fused_step import Gate, Source, Write
from nsa.ops.reference.feed_forward import ACTIVATIONS
from nsa.ops.triton.feed_forward import gate_parts
from nsa.ops.triton.launch_table import DTYPES, Card, Launch, card_of, cdiv, launch_on, launcher, power_of_2

WIDEST = 1 << 14  # channels: a program holds a row of weights in registers
TILE = 1 << 13  # weights that a program of four warps holds
HEADS = 4  # per program of `place`
# For products of several tokens: columns of a program, and channels at a time (depth).
FEW, MORE, EXACT = Launch(16, 16, 4, 3, depth=256), Launch(32, 16, 4, 3, depth=256), Launch(16, 16, 4, 1, depth=32)


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these kernels cannot run on an input like q [..., C] and a weight like v [N, C'], or None."""
    if q.dtype not in DTYPES or v.dtype != q.dtype:
        return f"the Triton kernels compute float16, bfloat16 and float32, not {q.dtype} with {v.dtype}"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return None if max(q.shape[-1], v.shape[-1]) <= WIDEST else f"more than {WIDEST} channels"


def product(
    x_TC: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (), *, norm: Tensor | None = None,
    eps: float = 0.0, residual: Tensor | None = None, activation: str = "",
) -> Tensor:  # fmt: skip
    """x, after RMSNorm if there is a `norm`, times every weight [N, C], concatenated. All tensors are contiguous.

    residual     [T, N], is added; only without activation
    activation   "silu": for the columns of the last weight; "swiglu", "swiglu_oai": that activation of two weights,
                 gate and up
    """
    tokens, channels = x_TC.shape
    is_gated = activation in ACTIVATIONS
    sizes = tuple(weight.shape[0] for weight in (weights[:1] if is_gated else weights))
    y = x_TC.new_empty(tokens, sum(sizes))
    given = tuple(biases) or (None,) * len(sizes)
    launch = _product_launch(x_TC, tokens, sum(sizes), card_of(x_TC))
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages} | _overlap(card_of(x_TC))
    with launch_on(x_TC):
        launcher(product_kernel, (sum(cdiv(size, launch.columns) for size in sizes), cdiv(tokens, launch.rows)), x_TC)(
            x_TC, norm, residual, y, tuple(weights),
            tuple(weight if bias is None else bias for bias, weight in zip(given, weights, strict=False)),
            eps, tokens, SIZES=sizes, BIASED=tuple(bias is not None for bias in given), ACTIVATION=activation,
            IS_GATED=is_gated, C=channels, BLOCK_C=launch.depth, ROWS=launch.rows, COLUMNS=launch.columns,
            PRECISION="ieee" if x_TC.dtype == torch.float32 else "tf32", **options,
        )  # fmt: skip
    return y


def place(
    read_TN: Tensor, queries: Sequence[Source], writes: Sequence[Write[Source]], gate: Gate | None, eps: float,
    positions: Tensor, table: Tensor, slots: Tensor, tables: tuple[Tensor, Tensor],
) -> list[Tensor]:  # fmt: skip
    """Returns the rotated queries [B, n, H, D] of a product, of every source in turn, and then the gates [B, n, H, 3],
    if there is a gate; stores keys and values.

    positions [B, n], -1 for padding, which is not written; the page `table` [B, pages], the ring of every row `slots`
    [B], and rotary tables [B, n, R/2] for the first R channels of a head, or for all of a smaller one. A ring must hold
    n tokens.
    """
    batch, new = positions.shape
    found = [read_TN.new_empty(batch, new, query.heads, query.dim) for query in queries]
    all_writes = [*(Write(query, q, False, True) for query, q in zip(queries, found, strict=True)), *writes]
    if gate is not None:
        found.append(read_TN.new_empty(batch, new, queries[0].heads, 3))
    sources, q = [write.source for write in all_writes], found[0]
    # The length of a ring, minus the length of a page, or 0 for a tensor that is not a cache.
    places = [0] * len(queries) + [write.pool.shape[1] * (1 if write.is_ring else -1) for write in writes]
    angles = tables[0].shape[-1]
    grid = (batch * new, len(sources) + (gate is not None), cdiv(max(source.heads for source in sources), HEADS))
    with launch_on(q):
        launcher(place_kernel, grid, q)(
            read_TN, tuple(write.pool for write in all_writes),
            tuple(write.pool if write.source.norm is None else write.source.norm for write in all_writes),
            positions, table, slots, *tables, gate and gate.weight, gate and gate.bias, gate and found[-1],
            eps, new, read_TN.shape[1], table.stride(0),
            COLUMN=tuple(s.column for s in sources), NUM_HEADS=tuple(s.heads for s in sources),
            DIM=tuple(s.dim for s in sources), NORMED=tuple(s.norm is not None for s in sources),
            ROTATED=tuple(min(2 * angles, write.source.dim) if write.is_rotated else 0 for write in all_writes),
            ANGLES=angles, PLACES=tuple(places),
            GATE_COLUMN=gate and gate.column, J=gate and gate.weight.shape[1],
            BLOCK_J=gate and power_of_2(gate.weight.shape[1]), SOFTMAX=gate and gate.is_softmax,
            HEADS=HEADS, num_warps=4, **_overlap(card_of(q)),
        )  # fmt: skip
    return found


def _product_launch(x: Tensor, tokens: int, columns: int, card: Card) -> Launch:
    """For one row: as many columns as fit into registers while every multiprocessor has a program."""
    if tokens > 1:
        return EXACT if x.dtype == torch.float32 else FEW if tokens <= FEW.rows else MORE
    width = power_of_2(x.shape[1])
    most = max(1, min(16, TILE // width))
    while most > 1 and columns < most * card.multiprocessors:
        most //= 2
    return Launch(1, most, 4 * max(1, width // TILE), 1, depth=width)


def _overlap(card: Card) -> dict[str, bool]:
    """Launch options that let a kernel start before the previous one has ended, on GPUs that can."""
    return {"OVERLAP": True, "launch_pdl": True} if card.kind == "sm90" else {"OVERLAP": False}


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    """Waits until the previous kernel has ended; the next one may start meanwhile."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _normed(x, inverse, scale):
    """RMSNorm of x, rounded like the output of the norm."""
    return (x.to(tl.float32) * inverse * scale.to(tl.float32)).to(x.dtype)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x, norm, residual, y, weights, biases, eps, tokens,
    SIZES: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of columns, tiles of tokens). A tile is part of one weight; with one row, BLOCK_C is all channels."""
    tile, t = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w, first, start, size = weights[0], 0, 0, SIZES[0]
    tiles, width = 0, 0  # of the preceding weights
    for i in tl.static_range(1, len(biases)):
        tiles += (SIZES[i - 1] + COLUMNS - 1) // COLUMNS
        width += SIZES[i - 1]
        is_later = tile >= tiles
        w = tl.where(is_later, weights[i], w)
        first, start = tl.where(is_later, tiles, first), tl.where(is_later, width, start)
        size = tl.where(is_later, SIZES[i], size)
    n = (tile - first) * COLUMNS + tl.arange(0, COLUMNS)
    column = start + n
    rows = w + n.to(tl.int64)[:, None] * C
    others = weights[1 if IS_GATED else 0] + n.to(tl.int64)[:, None] * C
    added = tl.zeros([1, COLUMNS], tl.float32)
    width = 0
    for i in tl.static_range(len(biases)):
        if BIASED[i]:
            at_bias = column - width
            is_biased = (at_bias >= 0) & (at_bias < SIZES[i])
            added += tl.load(biases[i] + at_bias, mask=is_biased, other=0.0).to(tl.float32)[None, :]
        width += SIZES[i]
    c = tl.arange(0, BLOCK_C)
    if ROWS == 1:
        mask = (n < size)[:, None] & (c < C)[None, :]
        weight = tl.load(rows + c[None, :], mask=mask, other=0.0)
        if IS_GATED:
            other = tl.load(others + c[None, :], mask=mask, other=0.0)
        if norm is not None:
            scale = tl.load(norm + c, mask=c < C, other=0.0)
    _wait(OVERLAP)
    at = t.to(tl.int64)[:, None] * width + column[None, :]
    is_there = (t < tokens)[:, None] & (n < size)[None, :]
    if residual is not None:
        added += tl.load(residual + at, mask=is_there, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.debug_barrier()  # else the assembler moves this load after the wait for the next one
    if ROWS == 1:
        row = tl.load(x + c, mask=c < C, other=0.0, cache_modifier=".cg")
        if norm is not None:
            squares = tl.sum(row.to(tl.float32) * row.to(tl.float32), 0)
            row = _normed(row, tl.rsqrt(squares / C + eps), scale)
        total = tl.sum(weight.to(tl.float32) * row.to(tl.float32)[None, :], 1)[None, :]
        if IS_GATED:
            up = tl.sum(other.to(tl.float32) * row.to(tl.float32)[None, :], 1)[None, :]
    else:
        x += t.to(tl.int64)[:, None] * C
        if norm is not None:
            squares = tl.zeros([ROWS, BLOCK_C], tl.float32)
            for c0 in range(0, C, BLOCK_C):
                channel = c0 + c[None, :]
                mask = (t < tokens)[:, None] & (channel < C)
                read = tl.load(x + channel, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
                squares += read * read
            inverse = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / C + eps)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for c0 in range(0, C, BLOCK_C):
            channel = c0 + c[None, :]
            part = tl.load(x + channel, mask=(t < tokens)[:, None] & (channel < C), other=0.0, cache_modifier=".cg")
            if norm is not None:
                part = _normed(part, inverse, tl.load(norm + channel, mask=channel < C, other=0.0))
            mask = (n < size)[:, None] & (channel < C)
            weight = tl.load(rows + channel, mask=mask, other=0.0)
            total = tl.dot(part, tl.trans(weight), total, input_precision=PRECISION)
            if IS_GATED:
                other = tl.load(others + channel, mask=mask, other=0.0)
                up = tl.dot(part, tl.trans(other), up, input_precision=PRECISION)
    total += added
    if IS_GATED:
        gate, opened, up = gate_parts(total, up, ACTIVATION == "swiglu_oai")
        total = gate * opened * up
    if ACTIVATION == "silu":
        total = tl.where((column >= width - SIZES[len(biases) - 1])[None, :], _silu(total), total)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _put(
    read, pool, norm, positions, table, slots, cos, sin, eps, row, h, new, table_sb,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, ANGLES: tl.constexpr,
    PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Writes heads h of a row, the first at `read`, to a pool, with norm and rotation of the first ROTATED channels if
    requested. Two blocks hold the channels of the rotated pairs, a third the others."""
    HALF: tl.constexpr = (ROTATED if ROTATED > 0 else DIM) // 2
    REST: tl.constexpr = DIM - 2 * HALF
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    REST_BLOCK: tl.constexpr = triton.next_power_of_2(REST)
    _wait(OVERLAP)
    place = row.to(tl.int64)
    is_kept = row >= 0
    if PLACES != 0:
        b, position = row // new, tl.load(positions + row, cache_modifier=".cg")
        is_kept = position >= 0
        if PLACES > 0:
            place = tl.load(slots + b, cache_modifier=".cg").to(tl.int64) * PLACES + position % PLACES
        else:
            entry = table + b.to(tl.int64) * table_sb + position // -PLACES
            page = tl.load(entry, mask=is_kept, other=0, cache_modifier=".cg")
            place = page.to(tl.int64) * -PLACES + position % -PLACES
    c = tl.arange(0, BLOCK)
    mask = (h < NUM_HEADS)[:, None] & (c < HALF)[None, :]
    at = h[:, None] * DIM + c[None, :]
    low = tl.load(read + at, mask=mask, other=0.0, cache_modifier=".cg")
    high = tl.load(read + at + HALF, mask=mask, other=0.0, cache_modifier=".cg")
    to = pool + place * (NUM_HEADS * DIM)
    if REST > 0:
        d = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_mask = (h < NUM_HEADS)[:, None] & (d < DIM)[None, :]
        rest = tl.load(read + h[:, None] * DIM + d[None, :], mask=rest_mask, other=0.0, cache_modifier=".cg")
    if NORMED:
        squares = low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
        total = tl.sum(squares, 1, keep_dims=True)
        if REST > 0:
            total += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1, keep_dims=True)
        inverse = tl.rsqrt(total / DIM + eps)
        if REST > 0:
            rest = _normed(rest, inverse, tl.load(norm + d, mask=d < DIM, other=0.0)[None, :])
        low = _normed(low, inverse, tl.load(norm + c, mask=c < HALF, other=0.0)[None, :])
        high = _normed(high, inverse, tl.load(norm + HALF + c, mask=c < HALF, other=0.0)[None, :])
    if ROTATED > 0:
        turn = row.to(tl.int64) * ANGLES + c
        cosine = tl.load(cos + turn, mask=c < HALF, other=0.0, cache_modifier=".cg")[None, :]
        sine = tl.load(sin + turn, mask=c < HALF, other=0.0, cache_modifier=".cg")[None, :]
        x, y = low.to(tl.float32), high.to(tl.float32)
        low, high = (x * cosine - y * sine).to(low.dtype), (y * cosine + x * sine).to(low.dtype)
    tl.store(to + at, low, mask=mask & is_kept)
    tl.store(to + at + HALF, high, mask=mask & is_kept)
    if REST > 0:
        tl.store(to + h[:, None] * DIM + d[None, :], rest, mask=rest_mask & is_kept)


@triton.jit
def _gates(
    hidden, weight, bias, gates, h,
    H: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr, SOFTMAX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes the gates of heads h of a row, whose hidden layer and gates start at `hidden` and `gates`."""
    j = tl.arange(0, BLOCK_J)
    at = weight + 3 * h[:, None] * J + j[None, :]
    there, mask = h < H, (h < H)[:, None] & (j < J)[None, :]
    w_cmp = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    w_sel = tl.load(at + J, mask=mask, other=0.0).to(tl.float32)
    w_win = tl.load(at + 2 * J, mask=mask, other=0.0).to(tl.float32)
    b_cmp = tl.load(bias + 3 * h, mask=there, other=0.0).to(tl.float32)
    b_sel = tl.load(bias + 3 * h + 1, mask=there, other=0.0).to(tl.float32)
    b_win = tl.load(bias + 3 * h + 2, mask=there, other=0.0).to(tl.float32)
    _wait(OVERLAP)
    x = tl.load(hidden + j, mask=j < J, other=0.0, cache_modifier=".cg").to(tl.float32)[None, :]
    cmp, sel, win = tl.sum(w_cmp * x, 1) + b_cmp, tl.sum(w_sel * x, 1) + b_sel, tl.sum(w_win * x, 1) + b_win
    if SOFTMAX:
        top = tl.maximum(tl.maximum(cmp, sel), win)
        cmp, sel, win = tl.exp(cmp - top), tl.exp(sel - top), tl.exp(win - top)
        total = cmp + sel + win
        cmp, sel, win = cmp / total, sel / total, win / total
    else:
        cmp, sel, win = tl.sigmoid(cmp), tl.sigmoid(sel), tl.sigmoid(win)
    kind = gates.dtype.element_ty
    tl.store(gates + 3 * h, cmp.to(kind), mask=there)
    tl.store(gates + 3 * h + 1, sel.to(kind), mask=there)
    tl.store(gates + 3 * h + 2, win.to(kind), mask=there)


@triton.jit(do_not_specialize=["new", "table_sb"])
def place_kernel(
    read, pools, norms, positions, table, slots, cos, sin, gate_weight, gate_bias, gates, eps, new, width, table_sb,
    COLUMN: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    ANGLES: tl.constexpr, PLACES: tl.constexpr, GATE_COLUMN: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr,
    SOFTMAX: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, queries and writes and then the gates, pieces of HEADS heads)."""
    row, number = tl.program_id(0), tl.program_id(1)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    read += row.to(tl.int64) * width
    for i in tl.static_range(len(pools)):
        if number == i:
            _put(
                read + COLUMN[i], pools[i], norms[i], positions, table, slots, cos, sin, eps, row, h, new, table_sb,
                NUM_HEADS[i], DIM[i], NORMED[i], ROTATED[i], ANGLES, PLACES[i], OVERLAP,
            )  # fmt: skip
    if gates is not None:
        if number == len(pools):
            to = gates + row.to(tl.int64) * 3 * NUM_HEADS[0]
            _gates(read + GATE_COLUMN, gate_weight, gate_bias, to, h, NUM_HEADS[0], J, BLOCK_J, SOFTMAX, OVERLAP)
