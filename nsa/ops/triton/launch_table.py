"""Host code that the Triton modules share: GPU classes, launch parameters, refusals.

Launch parameters are fixed: each kernel file has one table, by kernel, class of GPU and class of head size. Nothing is
tuned at run time.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HERE: AbstractContextManager[None] = nullcontext()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BATCH = 65_535  # programs of a grid's second and third dimension


@dataclass(frozen=True)
class Launch:
    """How one kernel is divided into programs and scheduled. Each kernel file defines its rows and columns.

    rows, columns  the tile that a program computes at a time
    num_warps      warps of a program
    num_stages     depth of the software pipeline over tiles
    depth          terms of a sum that one step of a product adds, if that is a choice. In msa_loss.py, channels of the
                   heads that one step loads
    mask           "always": every tile is masked; "branch": only tiles that need it, found at run time. In flash.py
    tma            the tensor memory accelerator (sm_90 and later) loads tiles, if strides allow it. In flash.py
    maxnreg        maximum registers of a thread, so that another program fits the multiprocessor. In dK and dV of
                   flash.py, block scores, and selected attention by tiles
    """

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 3
    mask: str = "always"
    depth: int = 64
    tma: bool = False
    maxnreg: int | None = None


class Card(NamedTuple):
    """The properties of a GPU that launches depend on: its class and its number of multiprocessors."""

    kind: str
    multiprocessors: int


H200 = Card("sm90", 132)  # used for meta tensors, to estimate memory: GPUs with fewer multiprocessors need less
INTERPRETER = Card("sm80", 1)

HEAD_CLASSES = (64, 128, 192, 256)
_SMALL_CARDS = (86, 87, 89, 120, 121)


def card_class(capability: int) -> str:
    """The class of a GPU by its compute capability (90 for 9.0). A program may use 227 KiB of shared memory on a GPU of
    class "sm90" (H100, B200), 163 on "sm80" (A100), 99 on "sm86" (RTX 3090, 4090, 5090, L40S)."""
    if capability in _SMALL_CARDS:
        return "sm86"
    return "sm90" if capability >= 90 else "sm80"


def card_of(x: Tensor) -> Card:
    return _card(x.get_device()) if x.is_cuda else H200 if x.is_meta else INTERPRETER


@cache
def _card(index: int) -> Card:
    properties = torch.cuda.get_device_properties(index)
    return Card(card_class(properties.major * 10 + properties.minor), int(properties.multi_processor_count))


class LaunchTable:
    """The launches of one kernel file, by kernel and class ("fp32" for float32 on any GPU, else the class of the GPU),
    then by class of head size. A missing launch is that of the next larger head size, or else that of "sm80"; for a
    small GPU, "sm86", that of "sm80" with one pipeline stage less."""

    def __init__(self, given: dict[tuple[str, str], dict[int, Launch]]):
        self._launches: dict[tuple[str, str, int], Launch] = {}
        for kernel, head in product({kernel for kernel, _ in given}, HEAD_CLASSES):
            for kind in ("sm90", "sm80", "fp32"):
                rows = [given.get((kernel, k), {}) for k in (kind, "sm80")]
                heads = [h for h in HEAD_CLASSES if h >= head]
                self._launches[kernel, kind, head] = next(row[h] for row in rows for h in heads if h in row)
            launch = self._launches[kernel, "sm80", head]
            small = replace(launch, num_stages=max(1, launch.num_stages - 1))
            self._launches[kernel, "sm86", head] = given.get((kernel, "sm86"), {}).get(head, small)

    def find(self, kernel: str, q: Tensor, v: Tensor, card: Card | None = None) -> Launch:
        """The launch for queries like q and values like v, on their GPU or on `card`."""
        kind = "fp32" if q.dtype == torch.float32 else (card or card_of(q)).kind
        return self._launches[kernel, kind, head_class(q.shape[3], v.shape[3])]


def head_class(dk: int, dv: int) -> int:
    """64 or 128 if both head sizes are at most that; 192 if only the keys exceed 128; else 256."""
    size = max(dk, dv)
    return 64 if size <= 64 else 128 if size <= 128 else 192 if dv <= 128 else 256


# Triton's own versions are for kernels: on the host each call costs as much as an allocation.


def cdiv(size: int, part: int) -> int:
    """Ceiling division."""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def padded(size: int) -> int:
    """A head size padded to a power of two; products need at least 16."""
    return max(16, power_of_2(size))


def unit_last(x: Tensor) -> Tensor:
    """x with a last stride of 1; copied only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why no kernel here can run tensors like q [B,S,H,Dk] and v [B,N,G,Dv]; None if they can. Every spec runs."""
    if q.dtype not in DTYPES:
        name = str(q.dtype).removeprefix("torch.")
        return f"the Triton kernels compute float16, bfloat16 and float32, not {name}"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if max(q.shape[3], v.shape[3]) > 256 or q.shape[3] % 16 or v.shape[3] % 16:
        return f"head sizes must be multiples of 16 up to 256, got {q.shape[3]} and {v.shape[3]}"
    if q.shape[1] * q.shape[2] >= 2**31:
        return "more than 2^31 query rows in one sequence"
    if q.shape[0] > MAX_BATCH:
        return f"more than {MAX_BATCH:,} sequences in one batch"
    return None


def group_refusal(q: Tensor, v: Tensor, what: str) -> str | None:
    """`refusal` of kernels whose programs hold all heads of a group."""
    is_large = max(q.shape[3], v.shape[3]) > 128
    most = 64 if is_large and card_of(q).kind == "sm86" else 128  # of a small GPU, by shared memory
    if v.shape[2] and q.shape[2] // v.shape[2] > most:
        return f"{what} takes at most {most} query heads per group with these head sizes on this GPU"
    return refusal(q, v)


def launch_on(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's device the current one, on which kernels are launched."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def launcher(kernel: Any, grid: tuple[int, ...], x: Tensor) -> Any:
    """A function that launches a kernel on tensors like x. On meta tensors it does nothing, so that host code only
    allocates."""
    return _do_nothing if x.is_meta else kernel[grid]


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
