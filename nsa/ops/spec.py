"""The seven sizes that define Native Sparse Attention, and the rules between them.

Imports neither torch nor triton, so that configurations can be validated without loading either.
"""

from contextlib import suppress
from dataclasses import dataclass, fields
from operator import index
from typing import Protocol

from nsa.errors import SpecError

LARGEST = 2**48  # of any size: sums and products with positions stay within 64 bits


class SelectionSpec(Protocol):
    """What a spec says about the selection of blocks, for operators that any kind of sparse attention may call."""

    @property
    def sel_block(self) -> int:
        """Tokens in one selection block."""
        ...

    @property
    def num_selected(self) -> int:
        """Blocks each query reads, forced ones included."""
        ...

    @property
    def num_init(self) -> int:
        """First blocks, always read."""
        ...

    @property
    def num_local(self) -> int:
        """Newest blocks up to the query's own, always read."""
        ...


@dataclass(frozen=True)
class NSASpec:
    """Geometry of one NSA layer. All sizes count tokens unless they count blocks.

    cmp_block     tokens summarised by one compressed token
    cmp_stride    distance between the starts of neighbouring compressed blocks
    sel_block     tokens in one selection block
    num_selected  blocks each query reads, forced ones included
    num_init      first blocks, always read
    num_local     newest blocks up to the query's own, always read
    window        tokens of the sliding window, the query's own included
    """

    cmp_block: int = 32
    cmp_stride: int = 16
    sel_block: int = 64
    num_selected: int = 16
    num_init: int = 1
    num_local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int):
                with suppress(TypeError):  # an integer of numpy, for example
                    value = index(value)
                    object.__setattr__(self, f.name, value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f.name, f"must be a whole number, got {value!r}")
            least = 0 if f.name in ("num_init", "num_local") else 1
            if not least <= value <= LARGEST:
                bound = f"at least {least}" if value < least else f"at most {LARGEST}"
                raise SpecError(f.name, f"must be {bound}, got {value}")
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
        # Each by name: a compiled layer could not trace a dictionary of fields in PyTorch 2.11.
        blocks = (self.cmp_block, self.cmp_stride, self.sel_block)
        return (*blocks, self.num_selected, self.num_init, self.num_local, self.window)
