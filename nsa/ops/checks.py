"""Argument checks of operators: shapes, dtypes and devices, the same for every backend.

They read no values and do not synchronize. An invalid argument raises ArgumentError with its name.
"""

import torch
from torch import Tensor

from nsa.errors import ArgumentError, whole_number

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(name, f"must be a tensor, got {type(x).__name__}")


def check_spec(spec: object, kind: type) -> None:
    if not isinstance(spec, kind):
        raise ArgumentError("spec", f"must be an {kind.__name__}, got {type(spec).__name__}")


def check_sequence(name: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Checks x [B, S, heads, D] and the borders of packed documents."""
    check_float(name, x)
    check_head_size(name, x)
    check_borders(cu_seqlens, x)


def check_borders(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """Checks shape and dtype of `cu_seqlens` for a sequence tensor x [B, S, ...]."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        wanted = "an int32 tensor such as torch.tensor([0, 400, 1000], dtype=torch.int32)"
        raise ArgumentError("cu_seqlens", f"must be {wanted}, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise ArgumentError("cu_seqlens", f"must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ArgumentError("cu_seqlens", f"must be one row of at least 2 borders, got shape {list(cu_seqlens.shape)}")
    if x.shape[0] != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one sequence, so B must be 1, got B={x.shape[0]}")
    check_device("cu_seqlens", cu_seqlens, x)


def sequence_length(q: Tensor, q_offset: int) -> int:
    """The length of the sequence whose last tokens are the queries q [B, S, H, D]."""
    if not torch.compiler.is_compiling():  # where it may be a symbol
        whole_number("q_offset", q_offset, 0)
    return q_offset + q.shape[1]


def check_pair(name_k: str, k: Tensor, name_v: str, v: Tensor, q: Tensor, length: int | None) -> None:
    """Checks k and v against q: dtype, device, batch, `length` (unless None, as in a cache), H a multiple of G, head
    sizes."""
    check_keys(name_k, k, q, length)
    check_float(name_v, v)
    check_like(name_v, v, q, "q")
    check_head_size(name_v, v)
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            name_v, f"must have the shape of {name_k} up to the head size; got {list(v.shape)} beside {list(k.shape)}"
        )


def check_keys(name: str, k: Tensor, q: Tensor, length: int | None) -> None:
    check_float(name, k)
    check_like(name, k, q, "q")
    if length is not None and (k.shape[0] != q.shape[0] or k.shape[1] != length):
        raise ArgumentError(
            name, f"must start with [B={q.shape[0]}, {length}] to fit q {list(q.shape)}; got {list(k.shape)}"
        )
    if k.shape[3] != q.shape[3]:
        raise ArgumentError(name, f"head size {k.shape[3]} differs from q's {q.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            name,
            f"q's {q.shape[2]} heads are not a multiple of {k.shape[2]} key/value heads; "
            "each group needs the same whole number of query heads",
        )


def check_gates(gates: Tensor, q: Tensor) -> None:
    check_tensor("gates", gates)
    wanted = [*q.shape[:3], 3]
    if list(gates.shape) != wanted:
        raise ArgumentError("gates", f"must be [B, S, H, 3] = {wanted}, got {list(gates.shape)}")
    if gates.dtype not in FLOAT_TYPES:
        raise ArgumentError("gates", f"must be a float tensor, got {gates.dtype}")
    check_device("gates", gates, q)


def check_ints(name: str, x: Tensor, form: str, wanted: list[int], q: Tensor) -> None:
    check_tensor(name, x)
    if list(x.shape) != wanted:
        raise ArgumentError(name, f"must be {form} = {wanted}, got {list(x.shape)}")
    if x.dtype != torch.int32:
        raise ArgumentError(name, f"must be int32, got {x.dtype}")
    check_device(name, x, q)


def check_float(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dim() != 4:
        raise ArgumentError(name, f"must be [B, S, heads, D], got {x.dim()} dimensions: {list(x.shape)}")
    if x.dtype not in FLOAT_TYPES:
        raise ArgumentError(name, f"must be a float tensor (16, 32 or 64 bits), got {x.dtype}")


def check_like(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    if x.dtype != other.dtype:
        raise ArgumentError(name, f"must have {other_name}'s type {other.dtype}, got {x.dtype}")
    check_device(name, x, other)


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ArgumentError(name, f"must be on the device of the other tensors, {q.device}, got {x.device}")


def check_head_size(name: str, x: Tensor) -> None:
    size = x.shape[3]
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"head size must be a multiple of 16 from 16 to 256, got {size}")
