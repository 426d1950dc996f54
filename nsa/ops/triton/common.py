"""What the Triton modules share on the host: launch parameters, planned launches, refusals.

Launch parameters are fixed tables, keyed by (kernel, architecture, head-size class, element size): nothing is
tuned at run time.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HERE: AbstractContextManager[None] = nullcontext()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """How one kernel is cut and scheduled.

    block_m     rows of a query tile (queries x heads of a group)
    block_n     keys of a tile
    num_warps   warps of a program
    num_stages  depth of the software pipeline over tiles
    mask        "split": separate loops for the masked edges and the unmasked inside; "branch": one loop, the
                mask computed only in tiles that need it; "always": one loop, always masked
    splits      programs that share the queries of one key tile (dK/dV only); 0: chosen by the card's size
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    mask: str = "split"
    splits: int = 0


# (kernel, architecture, head-size class), 16-bit types. Classes: both head sizes up to 64; up to 128; keys
# over 128 beside values up to 128 (192); up to 256. Two traps that the tests look for: a split loop that the
# assembler serializes on sm_90, and a branch that makes it spill on sm_80.
_LAUNCH_16: dict[tuple[str, int, int], Launch] = {
    ("cmp_forward", 90, 64): Launch(128, 64, 4, 3, "branch"),
    ("cmp_forward", 90, 128): Launch(128, 128, 8, 3, "branch"),
    ("cmp_forward", 90, 192): Launch(128, 64, 8, 2),
    ("cmp_forward", 90, 256): Launch(64, 64, 8, 2),
    ("cmp_dq", 90, 64): Launch(64, 32, 4, 4),
    ("cmp_dq", 90, 128): Launch(64, 64, 4, 2),
    ("cmp_dq", 90, 192): Launch(128, 32, 8, 2),
    ("cmp_dq", 90, 256): Launch(64, 32, 8, 2),
    ("cmp_dkv", 90, 64): Launch(64, 64, 4, 2, "branch"),
    ("cmp_dkv", 90, 128): Launch(64, 128, 8, 3),
    ("cmp_dkv", 90, 192): Launch(32, 64, 8, 2),
    ("cmp_dkv", 90, 256): Launch(32, 64, 8, 2),
    ("win_forward", 90, 64): Launch(128, 64, 4, 3, "branch"),
    ("win_forward", 90, 128): Launch(64, 64, 4, 3, "branch"),
    ("win_forward", 90, 192): Launch(128, 64, 8, 2, "branch"),
    ("win_forward", 90, 256): Launch(64, 64, 8, 2, "branch"),
    ("win_dq", 90, 64): Launch(128, 32, 8, 3, "branch"),
    ("win_dq", 90, 128): Launch(64, 64, 4, 2, "branch"),
    ("win_dq", 90, 192): Launch(128, 32, 8, 2, "branch"),
    ("win_dq", 90, 256): Launch(64, 32, 8, 2),
    ("win_dkv", 90, 64): Launch(64, 64, 4, 2, "branch"),
    ("win_dkv", 90, 128): Launch(64, 128, 8, 3, "branch"),
    ("win_dkv", 90, 192): Launch(32, 64, 8, 2, "always"),
    ("win_dkv", 90, 256): Launch(32, 64, 8, 2, "always"),
    ("cmp_forward", 80, 64): Launch(128, 64, 8, 3),
    ("cmp_forward", 80, 128): Launch(128, 64, 8, 2),
    ("cmp_forward", 80, 192): Launch(64, 32, 4, 2),
    ("cmp_forward", 80, 256): Launch(64, 32, 8, 2),
    ("cmp_dq", 80, 64): Launch(128, 64, 8, 2),
    ("cmp_dq", 80, 128): Launch(128, 32, 8, 2),
    ("cmp_dq", 80, 192): Launch(64, 32, 8, 1),
    ("cmp_dq", 80, 256): Launch(64, 32, 8, 1),
    ("cmp_dkv", 80, 64): Launch(64, 128, 8, 2),
    ("cmp_dkv", 80, 128): Launch(64, 64, 8, 2),
    ("cmp_dkv", 80, 192): Launch(32, 64, 8, 1),
    ("cmp_dkv", 80, 256): Launch(32, 64, 8, 1),
    ("win_forward", 80, 64): Launch(64, 64, 4, 3),
    ("win_forward", 80, 128): Launch(128, 64, 8, 2),
    ("win_forward", 80, 192): Launch(64, 32, 4, 2),
    ("win_forward", 80, 256): Launch(64, 32, 8, 2),
    ("win_dq", 80, 64): Launch(128, 64, 8, 2),
    ("win_dq", 80, 128): Launch(128, 32, 8, 2),
    ("win_dq", 80, 192): Launch(64, 32, 8, 1),
    ("win_dq", 80, 256): Launch(64, 32, 8, 1),
    ("win_dkv", 80, 64): Launch(32, 64, 4, 2),
    ("win_dkv", 80, 128): Launch(64, 64, 8, 2),
    ("win_dkv", 80, 192): Launch(32, 64, 8, 1),
    ("win_dkv", 80, 256): Launch(32, 64, 8, 1),
}

# float32 multiplies without tensor cores ("ieee"): small tiles, whatever the card.
_LAUNCH_32: dict[int, Launch] = {
    64: Launch(32, 32, 8, 1),
    128: Launch(32, 16, 8, 1),
    256: Launch(16, 16, 8, 1),
}

# Cards with 100 KiB of shared memory or less run the sm_80 tables with one pipeline stage less.
_SMALL_CARDS = (86, 87, 89, 120, 121)


@cache
def launch_params(kind: str, arch: int, dk: int, dv: int, dtype: torch.dtype) -> Launch:
    """The checked-in parameters of kernel `kind` on a card of compute capability `arch` (90 for 9.0)."""
    size = max(64, padded(dk), padded(dv))
    if dtype == torch.float32:
        return _LAUNCH_32[size]
    if size == 256 and dv <= 128:
        size = 192
    table = 90 if arch >= 90 and arch not in _SMALL_CARDS else 80
    launch = _LAUNCH_16[kind, table, size]
    if arch in _SMALL_CARDS:
        return replace(launch, num_stages=max(1, launch.num_stages - 1))
    return launch


# Triton's own two of these are for kernels: on the host each call costs as much as an allocation.


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def padded(size: int) -> int:
    """The power of two that holds a head size; products need at least 16."""
    return max(16, power_of_2(size))


def arch_of(x: Tensor) -> int:
    """Compute capability of x's card; the interpreter counts as sm_80."""
    return _card(x.get_device())[0] if x.is_cuda else 80


def multiprocessors(x: Tensor) -> int:
    """How many programs x's card runs side by side, at least."""
    return _card(x.get_device())[1] if x.is_cuda else 1


@cache
def _card(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, int(properties.multi_processor_count)


def unit_last(x: Tensor) -> Tensor:
    """x with its last dimension dense; the other strides stay as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why no kernel here can run tensors like q [B,S,H,Dk] and v [B,N,G,Dv]; None when they can."""
    if q.dtype not in DTYPES:
        name = str(q.dtype).removeprefix("torch.")
        return f"the Triton kernels compute float16, bfloat16 and float32, not {name}"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if max(q.shape[3], v.shape[3]) > 256 or q.shape[3] % 16 or v.shape[3] % 16:
        return f"head sizes must be multiples of 16 up to 256, got {q.shape[3]} and {v.shape[3]}"
    if q.shape[1] * q.shape[2] >= 2**31:
        return "more than 2^31 query rows in one sequence"
    return None


@dataclass(frozen=True)
class Call:
    """One kernel launch, planned; `run` starts it."""

    kernel: Any
    programs: int
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    where: Tensor | None = field(default=None, repr=False)


def run(calls: Iterable[Call]) -> None:
    for call in calls:
        if call.programs == 0:
            continue
        with launch_on(call.where):
            call.kernel[(call.programs,)](**call.args, num_warps=call.num_warps, num_stages=call.num_stages)


def launch_on(x: Tensor | None) -> AbstractContextManager[Any]:
    """Kernels start on the current device: makes it the tensor's."""
    if x is None or not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)
