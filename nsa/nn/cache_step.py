"""One forward pass over a cache, on the device: positions, pages and pool indices of its tokens.

Legend: B rows of a forward pass, n tokens of a row, m compressed tokens of a row.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.rope import Tables, rotary_tables
from nsa.ops.layout import num_compressed
from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.nn.cache import KVCache

Found = TypeVar("Found")

# Up to this many new tokens of a row run on the decoding kernels, which read keys from the cache for every query. More
# run on the training kernels, after a copy of the earlier keys and values: there many queries share one read of a key.
# On a CPU the training operators are faster from 65 tokens on.
FEW_TOKENS = 64


class CacheStep:
    """One forward pass over a cache: data that all its layers share, computed once.

    slots_B      int32, the sequence of each row
    positions    int32 [B, n], the position of every token in its sequence; -1 for padding
    table        int32 [B, width], the pages of each row
    is_fresh     whether the sequences had no tokens before, so that the pass covers whole sequences
    completes    whether a compressed block may be completed
    spans        by row, the number of earlier tokens and of new ones; None if the host does not know them, as in a CUDA
                 graph
    start        the number of earlier tokens of all rows; None if they differ or the host does not know it

    The constructor advances the lengths on the device by `count_B`. It reads no value from the device.
    """

    def __init__(
        self,
        cache: "KVCache",
        slots_B: Tensor,
        count_B: Tensor,
        tokens: int,
        width: int,
        is_fresh: bool,
        completes: bool,
        spans: Sequence[tuple[int, int]] | None = None,
    ):
        self.cache, self.slots_B, self.is_fresh, self.completes = cache, slots_B, is_fresh, completes
        self.spans = spans
        self.start: int | None = 0 if is_fresh else None
        place_n = torch.arange(tokens, dtype=torch.int32, device=slots_B.device)
        start_B = cache.lengths.index_select(0, slots_B)
        self.positions = torch.where(place_n < count_B[:, None], start_B[:, None] + place_n, -1)
        self.table = cache.table[:, :width].index_select(0, slots_B)
        cache.lengths.index_add_(0, slots_B, count_B)
        self._shared: dict[Any, Any] = {}

    def layer(self, module: nn.Module) -> Any:
        """The tensors of one attention layer."""
        found = self.cache.layers.get(module)
        if found is None:
            raise other_model(self.cache, module)
        return found

    def shared(self, key: Any, compute: Callable[[], Found]) -> Found:
        """Returns `compute()`, cached by key for all layers."""
        if key not in self._shared:
            self._shared[key] = compute()
        found: Found = self._shared[key]
        return found

    def parts(self) -> list[tuple[slice | list[int], "CacheStep"]]:
        """Splits the pass by rows: into one pass over all rows with few new tokens, and for each number of earlier
        tokens (`start`) one over the rows with many. Without such rows, the only part is the pass itself."""
        if self.spans is None or self.positions.shape[1] <= FEW_TOKENS:
            return [(slice(None), self)]
        return self.shared("parts", lambda: self._parts(self.spans or ()))

    def _parts(self, spans: Sequence[tuple[int, int]]) -> list[tuple[slice | list[int], "CacheStep"]]:
        rows_by_start: dict[int | None, list[int]] = {}
        for row, (start, count) in enumerate(spans):
            if count:
                rows_by_start.setdefault(start if count > FEW_TOKENS else None, []).append(row)
        parts: list[tuple[slice | list[int], CacheStep]] = []
        for earlier, numbers in rows_by_start.items():
            rows = slice(None) if len(numbers) == len(spans) else numbers
            part, tokens = copy(self), max(spans[row][1] for row in numbers)
            part.start, part.spans, part._shared = earlier, None, {}
            part.positions = self.positions[rows, :tokens].contiguous()
            part.slots_B, part.table = self.slots_B[rows], self.table[rows]
            parts.append((rows, part))
        return parts

    def pieces(self) -> list[tuple[slice, "CacheStep"]]:
        """Splits the pass into passes that fit into the slack of rings."""
        tokens, most = self.positions.shape[1], self.cache.slack
        if tokens <= most:
            return [(slice(None), self)]
        return self.shared("pieces", lambda: [self._piece(slice(a, a + most)) for a in range(0, tokens, most)])

    def _piece(self, tokens: slice) -> tuple[slice, "CacheStep"]:
        piece = copy(self)
        piece.positions, piece._shared = self.positions[:, tokens].contiguous(), {}
        return tokens, piece

    def rotary(self, *settings: Any) -> Tables:
        """Rotary tables of the positions; `settings` as for `rotary_tables`."""
        return self.shared(("rotary", *settings), lambda: rotary_tables(self.positions, *settings))

    def token_index(self, size: int, is_ring: bool) -> Tensor:
        """[B*n] the index of every token in a pool with pages or rings of this size. A ring keeps only the newest."""

        def compute() -> Tensor:
            position = self.positions
            if is_ring:
                position = position.where(position > position.amax(1, keepdim=True) - size, -1)
            return self.places(position, size, is_ring).flatten()

        return self.shared(("tokens", size, is_ring), compute)

    def places(self, number: Tensor, size: int, is_ring: bool) -> Tensor:
        """The indices, in a flattened pool with pages or rings of `size`, of the items with these numbers [B, ...] in
        their sequence; a negative number gives an index whose content is not used."""
        if is_ring:
            ring = self.slots_B.view(-1, *[1] * (number.dim() - 1)).to(torch.int64)
            return torch.where(number >= 0, ring * size + number % size, self.cache.max_sequences * size)
        page = self.table.gather(1, (number // size).clamp(0, self.table.shape[1] - 1).flatten(1).to(torch.int64))
        return torch.where(number >= 0, page.view(number.shape).to(torch.int64) * size + number % size, 0)

    def compressed(self, spec: NSASpec) -> "NewCompressed":
        return self.shared(spec, lambda: NewCompressed(self, spec))


class NewCompressed:
    """The compressed tokens that a pass may complete: m per row, an upper bound from shapes.

    first    [B, m] the position of the first token of each
    index    [B*m] the index of each in the flattened pages of a layer; in page 0 if it is not complete
    """

    def __init__(self, step: CacheStep, spec: NSASpec):
        self.spec, position = spec, step.positions
        tokens = position.shape[1]
        most = -(-tokens // spec.cmp_stride)
        if step.start is not None:
            most = num_compressed(step.start + tokens, spec) - num_compressed(step.start, spec)
        oldest_B = num_compressed(position[:, 0], spec)
        number = oldest_B[:, None] + torch.arange(most, dtype=torch.int32, device=position.device)
        last = number * spec.cmp_stride + spec.cmp_block - 1
        self.step, self.first = step, number * spec.cmp_stride
        number = torch.where(last <= position.amax(1, keepdim=True), number, -1)
        self.index = step.places(number, step.cache.page_size // spec.cmp_stride, is_ring=False).flatten()
        place = torch.arange(spec.cmp_block, dtype=torch.int32, device=position.device)
        self._tokens = self.first[..., None] + place

    def sources(self, size: int, is_ring: bool) -> Tensor:
        """[B, m, cmp_block] the indices of the raw tokens in a pool with pages or rings of this size."""
        key = ("sources", self.spec, size, is_ring)
        return self.step.shared(key, lambda: self.step.places(self._tokens, size, is_ring))

    def rotary(self, *settings: Any) -> Tables:
        """Rotary tables of the compressed keys; `settings` as for `rotary_tables`."""
        return self.step.shared(("compressed", self.spec, *settings), lambda: rotary_tables(self.first, *settings))


def other_model(cache: "KVCache", module: nn.Module) -> ArgumentError:
    kind = type(module).__name__
    if module in cache.layers:  # one layer would advance the lengths of all layers
        return ArgumentError("cache", f"belongs to a whole model; pass the result of `append` to a {kind} inside it")
    return ArgumentError("cache", f"was made for another model, not for this {kind}; make one with KVCache(model, ...)")
