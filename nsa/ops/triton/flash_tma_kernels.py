"""dK and dV of `flash.py` on cards whose tensor memory accelerator (TMA) loads whole tiles: sm_90 and later.

It needs no addresses in registers, which leaves room for another program on each multiprocessor. A tile of queries must
then be one piece of memory: q and dO are read in the order of rows, [B, G, S, h], and a tile is any BLOCK_M consecutive
rows of one b and g, with 0 behind their end. Legend as in `flash_kernels.py`.
"""

import triton
import triton.language as tl

from nsa.ops.triton.flash_kernels import EDGES, INF, LOG2E, load_tile, seen_by, store_rows


@triton.jit
def _push(
    dk_acc, dv_acc, k, v, q_rows, do_rows, lse2_ptr, delta_ptr, lane, start, stop, first, behind, full_lo, full_hi,
    scale, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dV += P^T @ dO and dK += dS^T @ Q over rows start..stop of a lane, with keys as rows. Rows from `stop` on
    carry a log-sum-exp of +inf, so their probabilities are 0 without any mask."""
    i = tl.arange(0, BLOCK_M)
    zero = tl.zeros([], tl.int64)
    for r0 in tl.range(start, stop, BLOCK_M):
        r = r0 + i
        q = q_rows.load([lane, r0, 0]).reshape(BLOCK_M, BLOCK_DK)
        do = do_rows.load([lane, r0, 0]).reshape(BLOCK_M, BLOCK_DV)
        lse = tl.load(lse2_ptr + (zero + r0) + i, mask=r < stop, other=INF)
        delta = tl.load(delta_ptr + (zero + r0) + i, mask=r < stop, other=0.0)
        # Products that start from -lse and -delta: these then take no registers beside the result.
        s = tl.dot(k, tl.trans(q), tl.broadcast_to((lse / -scale)[None, :], [BLOCK_N, BLOCK_M]))
        p = tl.exp2(s * scale)
        if MASK == EDGES:
            if (r0 < full_lo) | (r0 + BLOCK_M > full_hi):
                p = tl.where((r[None, :] >= first[:, None]) & (r[None, :] < behind[:, None]), p, 0.0)
        else:
            p = tl.where((r[None, :] >= first[:, None]) & (r[None, :] < behind[:, None]), p, 0.0)
        dv_acc = tl.dot(p.to(do.dtype), do, dv_acc)
        dp = tl.dot(v, tl.trans(do), tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M]))
        dk_acc = tl.dot((p * dp).to(q.dtype), q, dk_acc)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["S", "N", "G", "lanes", "splits", "first_key", "part_keys"])
def dkv_tma_kernel(
    q_rows, k_ptr, v_ptr, do_rows, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, first_ptr, behind_ptr,
    k_sb, k_sn, k_sg, v_sb, v_sn, v_sg, S, N, G, lanes, splits, first_key, part_keys, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PER_GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, BY_SPLIT: tl.constexpr,
):  # fmt: skip
    """What `dkv_kernel` computes. BY_SPLIT: all key tiles of one part of the rows run side by side, so that the rows,
    many more than fit the cache, are read into it once. Otherwise every key tile has parts of equal length."""
    pid = tl.program_id(0)
    lane = pid % lanes
    key_tiles = (part_keys + BLOCK_N - 1) // BLOCK_N
    if BY_SPLIT:
        split, key_tile = splits - 1 - pid // lanes // key_tiles, pid // lanes % key_tiles
    else:
        split, key_tile = pid // lanes % splits, pid // lanes // splits  # early keys are seen by most: start them first
    n_start = first_key + key_tile * BLOCK_N
    b, g = (lane // G).to(tl.int64), lane % G
    n_last = tl.minimum(n_start + BLOCK_N, N) - 1
    n = n_start + tl.arange(0, BLOCK_N)
    real = n < N
    n = tl.minimum(n, N - 1)
    first_min, behind_min = seen_by(n_start, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    first_max, behind_max = seen_by(n_last, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    first, behind = seen_by(n, first_ptr, behind_ptr, S, SPAN, STRIDE, WINDOW)
    start, stop = first_min * PER_GROUP, behind_max * PER_GROUP
    begin = 0 if BY_SPLIT else start
    rows = S * PER_GROUP if BY_SPLIT else tl.maximum(stop - start, 0)
    share = ((rows + BLOCK_M - 1) // BLOCK_M + splits - 1) // splits * BLOCK_M
    start = tl.maximum(start, begin + split * share)
    stop = tl.minimum(stop, begin + split * share + share)
    full_lo, full_hi = first_max * PER_GROUP, behind_min * PER_GROUP

    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    k_rows = k_ptr + b * k_sb + g.to(tl.int64) * k_sg + n.to(tl.int64) * k_sn
    v_rows = v_ptr + b * v_sb + g.to(tl.int64) * v_sg + n.to(tl.int64) * v_sn
    k = load_tile(k_rows[:, None] + dk[None, :], real, dk, DK, BLOCK_DK, False)
    v = load_tile(v_rows[:, None] + dv[None, :], real, dv, DV, BLOCK_DV, False)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    base = lane * S * PER_GROUP
    lse2_ptr += base
    delta_ptr += base
    dk_acc, dv_acc = _push(
        dk_acc, dv_acc, k, v, q_rows, do_rows, lse2_ptr, delta_ptr, lane, start, stop, first * PER_GROUP,
        behind * PER_GROUP, full_lo, full_hi, scale * LOG2E, MASK, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV,
    )  # fmt: skip

    row = ((split * (lanes // G) + b) * part_keys + (n - first_key)) * G + g  # of [splits, B, part_keys, G]
    store_rows(dk_ptr, row, dk_acc * scale, real, DK, BLOCK_DK)
    store_rows(dv_ptr, row, dv_acc, real, DV, BLOCK_DV)
