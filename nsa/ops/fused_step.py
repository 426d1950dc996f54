"""The arguments of `nsa.ops.triton.step_kernels`: a decoding step of a few new tokens except its attention.

There is no reference implementation: if the kernels cannot run, the modules of `nsa.nn` are called.

Legend: P pages, H heads, D head size.
"""

from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from nsa.ops.dispatch import choose

MOST_TOKENS = 32  # over all rows


class Source(NamedTuple):
    """The columns of a product that hold some heads, and the weight of their norm."""

    column: int
    heads: int
    dim: int
    norm: Tensor | None


Heads = TypeVar("Heads")


class Write(NamedTuple, Generic[Heads]):
    """A write of heads (a `Source` or a tensor) to a cache: pages [P, page, H, D], or rings [slots, ring, H, D]."""

    source: Heads
    pool: Tensor
    is_ring: bool
    is_rotated: bool


class Gate(NamedTuple):
    """The last layer of the gates: its input is in a product from `column` on."""

    column: int
    weight: Tensor
    bias: Tensor
    is_softmax: bool


def step_kernels(x: Tensor, weight: Tensor) -> Any:
    """The kernels for an input like x [..., C] and products with weights like `weight`, or None."""
    return choose("step", None, x, weight, count=False)
