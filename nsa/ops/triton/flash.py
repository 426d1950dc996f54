"""Attention in which every query sees one interval of keys, forward and backward.

Query t sees keys lo(t) .. hi(t)-1 and neither end decreases as t grows, so an interval of queries sees key n.
Compressed and window attention (`compressed.py`, `windowed.py`) differ only in these ends (`KeyRange`). This file plans
a call on the host; the kernels are in `flash_kernels.py`. The rows of a launch are those of a query tile (queries x
heads of a group), its columns are keys.

Legend: B batch, S tokens, N keys, G key/value heads, H query heads, DK/DV head sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops.triton import launch_table
from nsa.ops.triton.flash_kernels import ALWAYS, EDGES, dkv_kernel, dq_kernel, forward_kernel, sum_parts_kernel
from nsa.ops.triton.launch_table import Card, Launch, LaunchTable, card_of, cdiv, launch_on, launcher, padded, unit_last

FAR = 2**30  # beyond any token; sums of two such distances fit 32 bits
LONGEST_SUM = 2**17  # query rows that one accumulator of dK or dV may sum
PART_BYTES = 512 << 20  # of partial dK and dV
SUM_BLOCK = 1024  # elements per program that adds parts
CACHED_BYTES = 256 << 20  # of q and dO; with more, programs of compressed attention for the same rows run together

_MASKS = {"always": ALWAYS.value, "branch": EDGES.value}

# Tests check for two problems of a branch around the mask: products that the assembler serializes on sm_90 (heads over
# 128), and spills on sm_80. float32 multiplies without tensor cores ("ieee"), hence small tiles on every GPU.
LAUNCHES = LaunchTable({
    ("cmp_forward", "sm90"): {
        64: Launch(128, 64, 8, 3, "branch", tma=True), 128: Launch(64, 64, 4, 3, "branch", tma=True),
        192: Launch(128, 64, 8, 2, "branch"), 256: Launch(64, 64, 8, 2, "branch")},
    ("cmp_dq", "sm90"): {
        64: Launch(128, 64, 4, 3, "branch", tma=True), 128: Launch(128, 64, 8, 3, "branch", tma=True),
        192: Launch(128, 32, 8, 2, "branch"), 256: Launch(64, 32, 8, 2)},
    ("cmp_dkv", "sm90"): {
        64: Launch(64, 64, 4, 3, tma=True, maxnreg=168), 128: Launch(64, 128, 8, 3, "branch"),
        256: Launch(32, 64, 8, 2)},
    ("win_forward", "sm90"): {
        64: Launch(64, 64, 4, 3, "branch", tma=True), 128: Launch(64, 64, 4, 3, "branch", tma=True),
        192: Launch(128, 64, 8, 2, "branch"), 256: Launch(64, 64, 8, 2, "branch")},
    ("win_dq", "sm90"): {
        64: Launch(64, 32, 4, 4, "branch", tma=True), 128: Launch(64, 64, 4, 2, "branch", tma=True),
        192: Launch(128, 32, 8, 2, "branch"), 256: Launch(64, 32, 8, 2)},
    ("win_dkv", "sm90"): {
        64: Launch(64, 64, 4, 3, tma=True, maxnreg=168), 128: Launch(64, 128, 8, 3, "branch"),
        256: Launch(32, 64, 8, 2)},
    ("cmp_forward", "sm80"): {
        64: Launch(128, 64, 8, 3), 128: Launch(128, 64, 8, 2), 192: Launch(64, 32, 4, 2), 256: Launch(64, 32, 8, 2)},
    ("cmp_dq", "sm80"): {64: Launch(128, 64, 8, 2), 128: Launch(128, 32, 8, 2), 256: Launch(64, 32, 8, 1)},
    ("cmp_dkv", "sm80"): {64: Launch(64, 128, 8, 2), 128: Launch(64, 64, 8, 2), 256: Launch(32, 64, 8, 1)},
    ("win_forward", "sm80"): {
        64: Launch(64, 64, 4, 3), 128: Launch(128, 64, 8, 2), 192: Launch(64, 32, 4, 2), 256: Launch(64, 32, 8, 2)},
    ("win_dq", "sm80"): {64: Launch(128, 64, 8, 2), 128: Launch(128, 32, 8, 2), 256: Launch(64, 32, 8, 1)},
    ("win_dkv", "sm80"): {64: Launch(32, 64, 4, 2), 128: Launch(64, 64, 8, 2), 256: Launch(32, 64, 8, 1)},
    ("cmp_dkv", "sm86"): {256: Launch(32, 32, 8, 1)},
    ("win_dkv", "sm86"): {256: Launch(32, 32, 8, 1)},
} | {
    (f"{branch}_{kernel}", "fp32"): {64: Launch(32, 32, 8, 1), 128: Launch(32, 16, 8, 1), 256: Launch(16, 16, 8, 1)}
    for branch in ("cmp", "win")
    for kernel in ("forward", "dq", "dkv")
})  # fmt: skip


@dataclass(frozen=True)
class KeyRange:
    """The keys that each query sees. Without documents and offset hi(t) is the number of n with
    n*stride + span - 1 <= t, and lo(t) is max(0, t - window + 1), or 0 if window is 0. Otherwise both ends are tables.

    lo, hi          [S] int32, by query: the first key that it sees, and one past the last
    first, behind   [N] int32, by key: the first query that sees it, and one past the last
    """

    span: int
    stride: int
    window: int
    lo: Tensor | None = None
    hi: Tensor | None = None
    _by_key: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def queries_of(self, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """The inverse tables, `first` and `behind` by key. Both are in 0..S for any content of the tables."""
        if self.lo is None or self.hi is None:
            return None, None
        if num_keys not in self._by_key:
            key = torch.arange(num_keys, device=self.lo.device, dtype=torch.int32)
            first = torch.searchsorted(self.hi, key, right=True, out_int32=True)
            behind = torch.searchsorted(self.lo, key, right=True, out_int32=True)
            self._by_key[num_keys] = (first, behind)
        return self._by_key[num_keys]


@dataclass(frozen=True)
class IntervalAttention:
    """Base of both kinds of attention. `tuned` overrides launches of the table."""

    name: str
    tuned: Mapping[str, Launch] = field(default_factory=dict)
    refusal = staticmethod(launch_table.refusal)

    def launch(self, kernel: str, q: Tensor, v: Tensor) -> Launch:
        """The launch of "forward", "dq" or "dkv" for tensors like q and v."""
        return self.tuned.get(kernel) or LAUNCHES.find(f"{self.name}_{kernel}", q, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_range: KeyRange) -> tuple[Tensor, Tensor]:
        """q [B,S,H,DK], k [B,N,G,DK], v [B,N,G,DV] -> o [B,S,H,DV], lse [B,S,H] float32, natural logarithm."""
        params = self.launch("forward", q, v)
        q, k, v = unit_last(q), unit_last(k), unit_last(v)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        lanes, tiles = _query_programs(q, k, params)
        if lanes * tiles:
            with launch_on(q):
                launcher(forward_kernel, (lanes * tiles,), q)(
                    q_ptr=q, k_ptr=k, v_ptr=v, o_ptr=o, lse_ptr=lse, lo_ptr=key_range.lo, hi_ptr=key_range.hi,
                    **_tma_keys(k, v, params), lanes=lanes, tiles=tiles,
                    **_strides(q=q, k=k, v=v), **_shape_args(q, k, v, key_range, params),
                )  # fmt: skip
        return o, lse

    def attend_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, key_range: KeyRange,
        sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k, v for the gradient `do` of `attend`'s output. `sums` [B,S,H] float32, contiguous: the row
        sums of do * o, if they are known."""
        dq_params, dkv_params = self.launch("dq", q, v), self.launch("dkv", q, v)
        do, q, k, v, o = (unit_last(x) for x in (do, q, k, v, o))
        (batch, tokens, heads, _), (_, num_keys, groups, _) = q.shape, k.shape
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        lse2 = q.new_empty(batch, groups, tokens, heads // groups, dtype=torch.float32)
        delta = torch.empty_like(lse2)
        shared = {"k_ptr": k, "v_ptr": v, "lse2_ptr": lse2, "delta_ptr": delta}
        rows, copies = _rows_of(q, do, groups) if dkv_params.tma and q.numel() else (None, (None, None))
        lanes, tiles = _query_programs(q, k, dq_params)
        splits = num_splits(q, k, key_range, dkv_params, card_of(q))
        first, behind = key_range.queries_of(num_keys)
        at_once = keys_at_once(k, v, splits, dkv_params)
        dk_parts, dv_parts = dk, dv
        if splits > 1:
            dk_parts, dv_parts = (
                x.new_empty(splits, batch, at_once, groups, x.shape[3], dtype=torch.float32) for x in (k, v)
            )
        with launch_on(q):
            if lanes * tiles:
                launcher(dq_kernel, (lanes * tiles,), q)(
                    **shared, q_ptr=q, o_ptr=o, do_ptr=do, lse_ptr=lse.contiguous(), dq_ptr=dq,
                    q_rows_ptr=copies[0], do_rows_ptr=copies[1],
                    lo_ptr=key_range.lo, hi_ptr=key_range.hi, sums_ptr=sums, **_tma_keys(k, v, dq_params), lanes=lanes,
                    tiles=tiles, **_strides(q=q, k=k, v=v, o=o, do=do), **_shape_args(q, k, v, key_range, dq_params),
                )  # fmt: skip
            row_tiles = _row_tiles(rows, key_range, dkv_params)
            for key in range(0, num_keys if batch * groups else 0, at_once):
                keys = min(at_once, num_keys - key)
                launcher(dkv_kernel, (batch * groups * splits * cdiv(keys, dkv_params.columns),), q)(
                    **shared, q_ptr=q, do_ptr=do, **row_tiles, dk_ptr=dk_parts, dv_ptr=dv_parts,
                    first_ptr=first, behind_ptr=behind, lanes=batch * groups, splits=splits, first_key=key,
                    part_keys=keys, **_strides(q=q, k=k, v=v, do=do), **_shape_args(q, k, v, key_range, dkv_params),
                    maxnreg=dkv_params.maxnreg,
                )  # fmt: skip
                for parts, out in ((dk_parts, dk), (dv_parts, dv)) if splits > 1 else ():
                    of_key = groups * out.shape[3]
                    launcher(sum_parts_kernel, (cdiv(batch * keys * of_key, SUM_BLOCK),), q)(
                        parts, out, batch * keys * of_key, splits, keys * of_key, num_keys * of_key, key * of_key,
                        BLOCK=SUM_BLOCK, num_warps=4, num_stages=1,
                    )  # fmt: skip
        return dq, dk, dv


def _tma_keys(k: Tensor, v: Tensor, params: Launch) -> dict[str, TensorDescriptor | None]:
    """Descriptors of k and v [B, N, heads] for the tensor memory accelerator, which fills a tile with 0 after the end
    of a sequence: a weight of 0 would not mask a value that is not finite. None if the launch does not use it or the
    strides do not allow it."""
    tokens, columns = k.shape[0] * k.shape[1], {x: (x.shape[2] - 1) * x.stride(2) + x.shape[3] for x in (k, v)}
    fits = params.tma and tokens > 0 and all(
        x.data_ptr() % 16 == 0
        and x.stride(1) * x.element_size() % 16 == 0
        and x.stride(2) * x.element_size() % 16 == 0
        and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
        and columns[x] <= x.stride(1)  # the heads of a token are contiguous
        and (x.shape[2] == 1 or padded(x.shape[3]) == x.shape[3])  # a tile does not overlap the next head
        for x in (k, v)
    )  # fmt: skip
    return {
        name: TensorDescriptor(
            x, [*x.shape[:2], columns[x]], [x.shape[1] * x.stride(1), x.stride(1), 1],
            [1, params.columns, padded(x.shape[3])],
        ) if fits else None
        for name, x in (("k_tma", k), ("v_tma", v))
    }  # fmt: skip


def _rows_of(
    q: Tensor, do: Tensor, groups: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | tuple[None, None]]:
    """q and do in row order, [B * G, S * h, D] each, and those of them that the dQ kernel must write first."""
    if groups == 1 and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, do)):
        q_rows, do_rows = (x.view(-1).view(x.shape[0], -1, x.shape[3]) for x in (q, do))
        return (q_rows, do_rows), (None, None)
    lanes, rows = q.shape[0] * groups, q.shape[1] * q.shape[2] // groups
    q_rows, do_rows = (x.new_empty(lanes, rows, x.shape[3]) for x in (q, do))
    return (q_rows, do_rows), (q_rows, do_rows)


def _row_tiles(rows: tuple[Tensor, Tensor] | None, key_range: KeyRange, params: Launch) -> dict[str, Any]:
    """The arguments of dK and dV that define how q and dO are loaded: in row order by the tensor memory accelerator, or
    by threads."""
    if rows is None:
        return {"q_tma": None, "do_tma": None, "BY_SPLIT": False}
    q_tma, do_tma = (TensorDescriptor.from_tensor(x, [1, params.rows, padded(x.shape[2])]) for x in rows)
    is_long = not key_range.window and sum(x.numel() * x.element_size() for x in rows) > CACHED_BYTES
    return {"q_tma": q_tma, "do_tma": do_tma, "BY_SPLIT": is_long}


def num_splits(q: Tensor, k: Tensor, key_range: KeyRange, params: Launch, card: Card) -> int:
    """Parts per key tile: enough programs to fill the GPU three times, or eight times if early keys have most of the
    work, but at least sixteen query tiles each; at most 32, since every part is written in float32. More parts if a sum
    had too many rows: with 2**20 rows per part (128k tokens, 16 heads per group) gradients differed by 0.3 % from those
    of shorter parts, because tensor cores do not round every partial sum to nearest."""
    programs = max(1, q.shape[0] * k.shape[2] * cdiv(k.shape[1], params.columns))
    queries = min(q.shape[1], key_range.window + params.columns) if key_range.window else q.shape[1]
    rows = queries * (q.shape[2] // k.shape[2])
    wanted: int = cdiv((3 if key_range.window else 8) * card.multiprocessors, programs)
    return max(1, min(wanted, rows // params.rows // 16, 32), -(-rows // LONGEST_SUM))


def keys_at_once(k: Tensor, v: Tensor, splits: int, params: Launch) -> int:
    """The number of keys whose gradients one launch computes: whole tiles whose parts fit PART_BYTES, or all without
    parts. The number of parts grows with the queries, so the parts of all keys would grow with the square of S."""
    if splits == 1:
        return max(1, k.shape[1])
    tiles = PART_BYTES // max(1, params.columns * _part_bytes(k, v, splits))
    return max(1, min(k.shape[1], params.columns * max(1, tiles)))


def _part_bytes(k: Tensor, v: Tensor, splits: int) -> int:
    """Bytes of all parts of dK and dV for one key, in float32."""
    return 4 * splits * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])


def _query_programs(q: Tensor, k: Tensor, params: Launch) -> tuple[int, int]:
    """Lanes (batch x groups x head tiles) and query tiles of the kernels that own query tiles."""
    per_group = q.shape[2] // k.shape[2]
    heads = min(per_group, params.rows)
    lanes = q.shape[0] * k.shape[2] * cdiv(per_group, heads)
    return lanes, cdiv(q.shape[1], params.rows // heads)


# The kernels' names of the strides of batch, token or key, and head.
_STRIDES = {
    name: tuple(f"{name}_s{axis}" for axis in ("bng" if name in "kv" else "bsh")) for name in ("q", "k", "v", "o", "do")
}


def _strides(**tensors: Tensor) -> dict[str, int]:
    strides: dict[str, int] = {}
    for name, x in tensors.items():
        strides.update(zip(_STRIDES[name], x.stride(), strict=False))  # except that of the last dimension, which is 1
    return strides


def _shape_args(q: Tensor, k: Tensor, v: Tensor, key_range: KeyRange, params: Launch) -> dict[str, object]:
    """The arguments that all three kernels share. The ends are constants of a kernel. Those that a call does not need
    are always the same, or dense layers would compile other kernels for every number of tokens."""
    window = key_range.window if key_range.window < k.shape[1] else 0
    ends = (key_range.span, key_range.stride, window) if key_range.lo is None else (1, 1, 0)
    return _shape_constants(q.shape[1:], k.shape[1:3], v.shape[3], q.dtype == torch.float32, ends, params)


@lru_cache(maxsize=256)
def _shape_constants(
    query: tuple[int, ...], keys: tuple[int, ...], dv: int, exact: bool, ends: tuple[int, int, int], params: Launch
) -> dict[str, object]:
    """Cached by shape; callers must not modify the result."""
    (tokens, all_heads, dk), (num_keys, groups) = query, keys
    span, stride, window = (min(distance, FAR) for distance in ends)
    return {
        "S": tokens, "N": num_keys, "G": groups, "scale": dk**-0.5, "SPAN": span, "STRIDE": stride, "WINDOW": window,
        "PER_GROUP": all_heads // groups, "DK": dk, "DV": dv, "BLOCK_DK": padded(dk), "BLOCK_DV": padded(dv),
        "BLOCK_M": params.rows, "BLOCK_N": params.columns, "MASK": _MASKS[params.mask],
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": params.num_warps, "num_stages": params.num_stages,
    }  # fmt: skip
