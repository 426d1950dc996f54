"""The sizes that define the kinds of sparse attention, and the rules between them.

Imports neither torch nor triton, so that configurations can be validated without loading either.
"""

from contextlib import suppress
from dataclasses import dataclass, fields
from operator import index
from typing import Protocol

from nsa.errors import SpecError

LARGEST = 2**48  # maximum of any size: sums and products with positions stay within 64 bits


class SelectionSpec(Protocol):
    """The sizes of a selection of blocks, for operators that any kind of sparse attention may call."""

    @property
    def sel_block(self) -> int:
        """Tokens in one selection block."""

    @property
    def num_selected(self) -> int:
        """Blocks each query reads, including forced ones."""

    @property
    def num_init(self) -> int:
        """First blocks, always read."""

    @property
    def num_local(self) -> int:
        """Newest blocks up to the query's own, always read."""


def _check_sizes(spec: object, ranges: dict[str, tuple[int, int]]) -> None:
    """Every size of a frozen spec is a whole number within its range. Stores integers of other types as int."""
    for name, (least, most) in ranges.items():
        value = getattr(spec, name)
        if not isinstance(value, int):
            with suppress(TypeError):  # an integer of numpy, for example
                value = index(value)
                object.__setattr__(spec, name, value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(name, f"must be a whole number, got {value!r}")
        if not least <= value <= most:
            raise SpecError(name, f"must be {f'at least {least}' if value < least else f'at most {most}'}, got {value}")


@dataclass(frozen=True)
class NSASpec:
    """Geometry of one NSA layer. All sizes count tokens unless they count blocks.

    cmp_block     tokens summarised by one compressed token
    cmp_stride    distance between the starts of neighbouring compressed blocks
    sel_block     tokens in one selection block
    num_selected  blocks each query reads, including forced ones
    num_init      first blocks, always read
    num_local     newest blocks up to the query's own, always read
    window        tokens of the sliding window, including the query's own
    """

    cmp_block: int = 32
    cmp_stride: int = 16
    sel_block: int = 64
    num_selected: int = 16
    num_init: int = 1
    num_local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        least = {"num_init": 0, "num_local": 0}
        _check_sizes(self, {f.name: (least.get(f.name, 1), LARGEST) for f in fields(self)})
        if self.cmp_block % self.cmp_stride:
            raise SpecError("cmp_stride", f"must divide cmp_block; {self.cmp_stride} does not divide {self.cmp_block}")
        if self.sel_block % self.cmp_stride:
            raise SpecError("cmp_stride", f"must divide sel_block; {self.cmp_stride} does not divide {self.sel_block}")
        if self.cmp_block > self.sel_block:
            raise SpecError("cmp_block", f"must not exceed sel_block; {self.cmp_block} is more than {self.sel_block}")
        forced = self.num_init + self.num_local
        if self.num_selected < forced:
            raise SpecError(
                "num_selected", f"must be at least num_init + num_local = {forced}, got {self.num_selected}"
            )

    def as_ints(self) -> tuple[int, ...]:
        """The sizes in field order: the form in which a spec crosses a torch operator's schema."""
        # By name: torch.compile of PyTorch 2.11 cannot trace a dictionary of fields.
        blocks = (self.cmp_block, self.cmp_stride, self.sel_block)
        return (*blocks, self.num_selected, self.num_init, self.num_local, self.window)


@dataclass(frozen=True)
class MSASpec:
    """Geometry of one MSA layer, in which a learned index chooses the blocks that a query reads.

    block         tokens in one block, a power of two from 16 to 256
    num_selected  blocks each query reads, forced ones included, at most 64
    num_local     newest blocks up to the query's own, always read
    num_init      first blocks, always read
    """

    block: int = 128
    num_selected: int = 16
    num_local: int = 1
    num_init: int = 0

    def __post_init__(self) -> None:
        ranges = {"block": (16, 256), "num_selected": (1, 64), "num_local": (0, 64), "num_init": (0, 64)}
        _check_sizes(self, ranges)
        if self.block & (self.block - 1):
            raise SpecError("block", f"must be a power of two from 16 to 256, got {self.block}")
        forced = self.num_local + self.num_init
        if self.num_selected < forced:
            raise SpecError(
                "num_selected", f"must be at least num_local + num_init = {forced}, got {self.num_selected}"
            )

    @property
    def dense_tokens(self) -> int:
        """Length up to which every query reads all that it sees."""
        return self.block * self.num_selected

    @property
    def sel_block(self) -> int:
        """`block`, under the name that every `SelectionSpec` has."""
        return self.block

    def as_ints(self) -> tuple[int, ...]:
        """The sizes in field order: the form in which a spec crosses a torch operator's schema."""
        return self.block, self.num_selected, self.num_local, self.num_init
