"""What every operator demands of its arguments, the same for every backend.

Shapes, types and devices are always checked and cost nothing. Values (document borders, block indices) are
checked on the CPU; on a device that costs a synchronisation, so there it happens inside `checked_values()` only, and
elsewhere the formulas mask bad ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops.layout import num_blocks, num_slots
from nsa.ops.spec import NSASpec

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPE_NAMES = "[B, S, heads, D]"


_checked_everywhere: ContextVar[bool] = ContextVar("checked_everywhere", default=False)


@contextmanager
def checked_values() -> Iterator[None]:
    """Inside, values are checked on every device. For finding a fault: it synchronises at every operator."""
    token = _checked_everywhere.set(True)
    try:
        yield
    finally:
        _checked_everywhere.reset(token)


def _checks_values_of(x: Tensor) -> bool:
    return x.device.type == "cpu" or _checked_everywhere.get()


def check_query(q: Tensor) -> None:
    check_sequence("q", q)


def check_sequence(name: str, x: Tensor) -> None:
    _check_float(name, x)
    _check_head_size(name, x)


def check_weight(weight: Tensor, x: Tensor, spec: NSASpec) -> None:
    if weight.dim() != 3 or weight.shape[0] != spec.cmp_block or weight.shape[1] != x.shape[3]:
        raise ArgumentError(
            "weight", f"must be [cmp_block={spec.cmp_block}, D={x.shape[3]}, E], got {list(weight.shape)}"
        )
    _check_like("weight", weight, x, "x")


def check_pair(names: tuple[str, str], k: Tensor, v: Tensor, q: Tensor, *, length: int) -> None:
    """k and v against q: same type, device, batch and `length`; H a multiple of G; head sizes allowed."""
    check_keys(names[0], k, q, length=length)
    name_v = names[1]
    _check_float(name_v, v)
    _check_like(name_v, v, q)
    _check_head_size(name_v, v)
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            name_v,
            f"must have the shape of {names[0]} up to the head size; got {list(v.shape)} beside {list(k.shape)}",
        )


def check_keys(name: str, k: Tensor, q: Tensor, *, length: int) -> None:
    _check_float(name, k)
    _check_like(name, k, q)
    if k.shape[0] != q.shape[0] or k.shape[1] != length:
        raise ArgumentError(
            name, f"must start with [B={q.shape[0]}, {length}] to fit q {list(q.shape)}; got {list(k.shape)}"
        )
    if k.shape[3] != q.shape[3]:
        raise ArgumentError(name, f"head size {k.shape[3]} differs from q's {q.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            name,
            f"q's {q.shape[2]} heads are no multiple of {k.shape[2]} key/value heads; "
            "each group needs the same whole number of query heads",
        )


def compressed_length(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None) -> int:
    return num_slots(q.shape[1], spec, packed=cu_seqlens is not None)


def check_lse(lse: Tensor, q: Tensor) -> None:
    if lse.shape != q.shape[:3]:
        raise ArgumentError("lse", f"must be [B, S, H] = {list(q.shape[:3])}, got {list(lse.shape)}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != wanted:
        raise ArgumentError("lse", f"must be {wanted} for {q.dtype} queries, got {lse.dtype}")
    _check_device("lse", lse, q)


def check_indices(indices: Tensor, q: Tensor, groups: int, spec: NSASpec) -> None:
    wanted = [q.shape[0], q.shape[1], groups, spec.num_selected]
    if list(indices.shape) != wanted:
        raise ArgumentError("indices", f"must be [B, S, G, num_selected] = {wanted}, got {list(indices.shape)}")
    if indices.dtype != torch.int32:
        raise ArgumentError("indices", f"must be int32, got {indices.dtype}")
    _check_device("indices", indices, q)


def check_gates(gates: Tensor, q: Tensor) -> None:
    wanted = [*q.shape[:3], 3]
    if list(gates.shape) != wanted:
        raise ArgumentError("gates", f"must be [B, S, H, 3] = {wanted}, got {list(gates.shape)}")
    if gates.dtype not in FLOAT_TYPES:
        raise ArgumentError("gates", f"must be a float tensor, got {gates.dtype}")
    _check_device("gates", gates, q)


def check_borders(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """The shape and type of `cu_seqlens` for a sequence tensor x [B, S, ...]."""
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype != torch.int32:
        raise ArgumentError("cu_seqlens", f"must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ArgumentError("cu_seqlens", f"must be one row of at least 2 borders, got shape {list(cu_seqlens.shape)}")
    if x.shape[0] != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one sequence, so B must be 1, got B={x.shape[0]}")
    _check_device("cu_seqlens", cu_seqlens, x)


def check_border_values(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Borders start at 0, end at S and never fall."""
    if cu_seqlens is None or not _checks_values_of(cu_seqlens):
        return
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens:
        raise ArgumentError("cu_seqlens", f"must start at 0 and end at S={tokens}, got {borders[0]} and {borders[-1]}")
    for place, (left, right) in enumerate(pairwise(borders), start=1):
        if right < left:
            raise ArgumentError("cu_seqlens", f"must never fall, but entry {place} goes from {left} to {right}")


def check_index_values(indices: Tensor, spec: NSASpec) -> None:
    """Every index is -1 or a block of the sequence."""
    if indices.numel() == 0 or not _checks_values_of(indices):
        return
    blocks = num_blocks(indices.shape[1], spec)
    low, high = int(indices.min()), int(indices.max())
    if low < -1 or high >= blocks:
        raise ArgumentError("indices", f"must be -1 or one of the {blocks} blocks, got values from {low} to {high}")


def _check_float(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ArgumentError(name, f"must be {SHAPE_NAMES}, got {x.dim()} dimensions: {list(x.shape)}")
    if x.dtype not in FLOAT_TYPES:
        raise ArgumentError(name, f"must be a float tensor (16, 32 or 64 bits), got {x.dtype}")


def _check_like(name: str, x: Tensor, q: Tensor, first: str = "q") -> None:
    if x.dtype != q.dtype:
        raise ArgumentError(name, f"must have {first}'s type {q.dtype}, got {x.dtype}")
    _check_device(name, x, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ArgumentError(name, f"must be on q's device {q.device}, got {x.device}")


def _check_head_size(name: str, x: Tensor) -> None:
    size = x.shape[3]
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"head size must be a multiple of 16 from 16 to 256, got {size}")
