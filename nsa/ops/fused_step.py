"""What surrounds attention in a step of a few new tokens, as `nsa.ops.triton.step_kernels` takes it.

There is no reference of it: where the kernels cannot run, the modules of `nsa.nn` do.

Legend: P pages, H heads, D head size.
"""

from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from nsa.ops.dispatch import choose

MOST_TOKENS = 32  # of all rows together


class Source(NamedTuple):
    """Where heads lie in the columns of a product, and the weight of their norm."""

    column: int
    heads: int
    dim: int
    norm: Tensor | None


Heads = TypeVar("Heads")


class Write(NamedTuple, Generic[Heads]):
    """Heads that a cache keeps, a `Source` or a tensor: in pages [P, page, H, D], or in a ring [slots, ring, H, D]."""

    source: Heads
    pool: Tensor
    is_ring: bool
    is_rotated: bool


class Gate(NamedTuple):
    """The last layer of the gates: its input lies in a product from `column` on."""

    column: int
    weight: Tensor
    bias: Tensor
    is_softmax: bool


def step_kernels(x: Tensor, weight: Tensor) -> Any:
    """The kernels for an input like x [..., C] and products with weights like `weight`, or None."""
    return choose("step", None, x, weight, count=False)
