"""Attention in which every query sees one interval of keys, forward and backward: the core of two branches.

Query t sees keys lo(t) .. hi(t)-1 and both ends never fall as t grows; so key n is seen by one interval of
queries too. The compressed and the window branch differ in nothing but these ends (`Sight`). Here is what a call
plans on the host; the kernels are in `flash_kernels.py`.

Legend: B batch, S tokens, N keys, G key/value heads, H query heads, DK/DV head sizes.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from nsa.ops.triton.common import Call, Launch, cdiv, multiprocessors, padded, unit_last
from nsa.ops.triton.flash_kernels import (
    ALWAYS,
    EDGES,
    NEVER,
    dkv_kernel,
    dq_kernel,
    forward_kernel,
    sum_parts_kernel,
)

_FAR = 2**30  # further than any token; sums of two such distances still fit 32 bits
LONGEST_SUM = 2**17  # rows of queries that one accumulator of dK or dV may run over

_TENSORS = ("q", "k", "v", "o", "do")
_MASKS = {"split": NEVER.value, "always": ALWAYS.value, "branch": EDGES.value}


@dataclass(frozen=True)
class Sight:
    """Which keys each query sees. Without documents hi(t) counts the n with n*stride + span - 1 <= t and
    lo(t) is max(0, t - window + 1), or 0 where window is 0. With documents both ends are tables.

    lo, hi          [S] int32, first key seen and first key no longer seen, by query
    first, behind   [N] int32, first query that sees and first that no longer sees, by key
    """

    span: int
    stride: int
    window: int
    lo: Tensor | None = None
    hi: Tensor | None = None
    _turned: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def queries_of(self, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """The tables turned round: `first` and `behind` by key. Both lie in 0..S whatever the tables hold."""
        if self.lo is None or self.hi is None:
            return None, None
        if num_keys not in self._turned:
            key = torch.arange(num_keys, device=self.lo.device, dtype=torch.int32)
            first = torch.searchsorted(self.hi, key, right=True, out_int32=True)
            behind = torch.searchsorted(self.lo, key, right=True, out_int32=True)
            self._turned[num_keys] = (first, behind)
        return self._turned[num_keys]


def _shape_args(q: Tensor, k: Tensor, v: Tensor, sight: Sight, launch: Launch) -> dict[str, object]:
    """The arguments that all three kernels take."""
    sees = (sight.span, sight.stride, sight.window)
    return _shape_constants(q.shape[1:], k.shape[1:3], v.shape[3], q.dtype == torch.float32, sees, launch)


@lru_cache(maxsize=256)
def _shape_constants(
    query: tuple[int, ...],
    keys: tuple[int, ...],
    dv: int,
    exact: bool,
    sees: tuple[int, int, int],
    launch: Launch,
) -> dict[str, object]:
    """Once for every shape: whoever gets them only reads them."""
    (tokens, all_heads, dk), (num_keys, groups) = query, keys
    per_group = all_heads // groups
    heads = min(per_group, launch.block_m)
    span, stride, window = (min(distance, _FAR) for distance in sees)
    return {
        "S": tokens, "N": num_keys, "G": groups, "scale": dk**-0.5, "SPAN": span, "STRIDE": stride, "WINDOW": window,
        "PER_GROUP": per_group, "HEADS": heads, "QUERIES": launch.block_m // heads,
        "DK": dk, "DV": dv, "BLOCK_DK": padded(dk), "BLOCK_DV": padded(dv),
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "MASK": _MASKS[launch.mask],
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip


# The strides of batch, token or key, and head, as the kernels call them.
_STRIDES = {name: tuple(f"{name}_s{axis}" for axis in ("bng" if name in "kv" else "bsh")) for name in _TENSORS}


def _strides(**tensors: Tensor) -> dict[str, int]:
    strides: dict[str, int] = {}
    for name, x in tensors.items():
        strides.update(zip(_STRIDES[name], x.stride(), strict=False))  # not of the last dimension, which is dense
    return strides


def _query_programs(q: Tensor, k: Tensor, launch: Launch) -> tuple[int, int]:
    """Lanes (batch x groups x head tiles) and query tiles of the kernels that own query tiles."""
    per_group = q.shape[2] // k.shape[2]
    heads = min(per_group, launch.block_m)
    lanes = q.shape[0] * k.shape[2] * cdiv(per_group, heads)
    return lanes, cdiv(q.shape[1], launch.block_m // heads)


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    launch: Launch,
) -> tuple[Tensor, Tensor, list[Call]]:
    """q [B,S,H,DK], k [B,N,G,DK], v [B,N,G,DV] -> o [B,S,H,DV], lse [B,S,H] and the calls that fill them."""
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    o = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    lanes, tiles = _query_programs(q, k, launch)
    args = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "lse_ptr": lse,
        "lo_ptr": sight.lo, "hi_ptr": sight.hi, "lanes": lanes, "tiles": tiles,
        **_strides(q=q, k=k, v=v), **_shape_args(q, k, v, sight, launch),
    }  # fmt: skip
    return o, lse, [Call(forward_kernel, lanes * tiles, args, launch.num_warps, launch.num_stages, q)]


def plan_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sight: Sight,
    dq_launch: Launch,
    dkv_launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, list[Call]]:
    """dq, dk, dv, shaped like q, k, v, and the calls that fill them."""
    do, q, k, v, o = (unit_last(x) for x in (do, q, k, v, o))
    batch, tokens, heads, _ = q.shape
    num_keys, groups = k.shape[1], k.shape[2]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    lse2 = q.new_empty(batch, groups, tokens, heads // groups, dtype=torch.float32)
    delta = torch.empty_like(lse2)
    lanes, tiles = _query_programs(q, k, dq_launch)
    args = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "do_ptr": do, "lse_ptr": lse.contiguous(),
        "dq_ptr": dq, "lse2_ptr": lse2, "delta_ptr": delta, "lo_ptr": sight.lo, "hi_ptr": sight.hi,
        "lanes": lanes, "tiles": tiles,
        **_strides(q=q, k=k, v=v, o=o, do=do), **_shape_args(q, k, v, sight, dq_launch),
    }  # fmt: skip
    calls = [Call(dq_kernel, lanes * tiles, args, dq_launch.num_warps, dq_launch.num_stages, q)]

    splits = dkv_launch.splits or num_splits(q, k, sight, dkv_launch)
    first, behind = sight.queries_of(num_keys)
    dk_parts = k.new_empty(splits, *k.shape, dtype=torch.float32) if splits > 1 else dk
    dv_parts = v.new_empty(splits, *v.shape, dtype=torch.float32) if splits > 1 else dv
    args = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "lse2_ptr": lse2, "delta_ptr": delta,
        "dk_ptr": dk_parts, "dv_ptr": dv_parts, "first_ptr": first, "behind_ptr": behind,
        "lanes": batch * groups, "splits": splits,
        **_strides(q=q, k=k, v=v, do=do), **_shape_args(q, k, v, sight, dkv_launch),
    }  # fmt: skip
    programs = batch * groups * splits * cdiv(num_keys, dkv_launch.block_n)
    calls.append(Call(dkv_kernel, programs, args, dkv_launch.num_warps, dkv_launch.num_stages, q))
    if splits > 1:
        for parts, out in ((dk_parts, dk), (dv_parts, dv)):
            args = {"parts_ptr": parts, "out_ptr": out, "numel": out.numel(), "splits": splits, "BLOCK": 1024}
            calls.append(Call(sum_parts_kernel, cdiv(out.numel(), 1024), args, where=q))
    return dq, dk, dv, calls


def num_splits(q: Tensor, k: Tensor, sight: Sight, launch: Launch) -> int:
    """Parts per key tile. Enough programs to fill the card three times over, or eight where early keys have
    most of the work, yet sixteen query tiles in each; at most 32, as every part is written in float32. More where
    a sum would run over too many rows: at 2**20 rows a part (128k tokens, 16 heads a group) gradients differed by
    0.3 % from those of shorter parts; tensor cores do not round every partial sum to nearest."""
    programs = max(1, q.shape[0] * k.shape[2] * cdiv(k.shape[1], launch.block_n))
    queries = min(q.shape[1], sight.window + launch.block_n) if sight.window else q.shape[1]
    rows = queries * (q.shape[2] // k.shape[2])
    wanted: int = cdiv((3 if sight.window else 8) * multiprocessors(q), programs)
    return max(1, min(wanted, rows // launch.block_m // 16, 32), -(-rows // LONGEST_SUM))
