"""The cache with which a model decodes: who owns which page, how long every sequence is, and one forward pass over it.

A cache serves one model and many sequences, which come and go. Every sequence has a number, a length, and pages of one
pool; all layers use the same page table, each with tensors of its own (`nsa.nn.layer_cache`). The host decides and
knows everything here; the device has copies, and nothing is ever read back from it.

Legend: B rows of a forward pass, n tokens of a row.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError, CacheFullError
from nsa.nn.projection import compute_dtype
from nsa.nn.rope import rotary_tables
from nsa.ops.decode import PagedKV, RingKV
from nsa.ops.layout import num_compressed
from nsa.ops.spec import NSASpec
from nsa.ops.step import Heads, Write

LEAST_PAGE = 64  # tokens

Found = TypeVar("Found")


class Pool(NamedTuple):
    """Keys and values of all sequences: pages [P, page, G, .], or rings [slots, ring, G, .]. Page 0 and the last ring
    take what is not to be kept."""

    k: Tensor
    v: Tensor
    is_ring: bool

    def writes(self, k: Heads, v: Heads, *, is_rotated: bool = True) -> list[Write[Heads]]:
        """Of keys, rotated or not, and values."""
        return [Write(k, self.k, self.is_ring, is_rotated), Write(v, self.v, self.is_ring, False)]

    def view(self, step: "CacheStep") -> PagedKV | RingKV:
        """The sequences of a pass, as the operators take them."""
        return RingKV(self.k, self.v, step.slots_B) if self.is_ring else PagedKV(self.k, self.v, step.table)


class KVCache:
    """Keys and values of up to `sequences` sequences of up to `max_length` tokens, for decoding with `model`.

    model        a Decoder, an attention layer, or any module that contains attention layers of nsa
    sequences    how many there may be at a time
    max_length   the most tokens of one sequence
    tokens       the most tokens of all sequences together; None holds `sequences` of full length
    slack        tokens by which rings exceed what a layer needs: `crop` can take back that many, and a forward pass
                 over a cache that holds tokens already is computed in pieces of that many
    dtype        of keys and values; None takes the type in which the model computes

    `model(tokens, cache=cache)` appends tokens to every sequence. The first call on a cache without sequences adds
    one for every row. For rows of different lengths, or only some of the sequences, pass `cache.append(counts,
    sequences)` instead. Where a forward pass fails half-way, `crop` or `free` its sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sequences: int,
        max_length: int,
        tokens: int | None = None,
        slack: int = 64,
        dtype: torch.dtype | None = None,
    ):
        given = {"sequences": sequences, "max_length": max_length, "slack": slack, "tokens": tokens}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ArgumentError(name, f"must be at least 1, got {value}")
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        layers: list[Any] = [m for m in self.model.modules() if hasattr(m, "build_cache")]
        if not layers:
            raise ArgumentError("model", f"has no attention layer of nsa: {type(model).__name__}")
        self.max_sequences, self.max_length, self.tokens, self.slack = sequences, max_length, tokens, slack
        self.specs = {layer.spec for layer in layers if hasattr(layer, "spec")}
        # Whole selection blocks of every layer, and enough of them to be read in one go.
        block = math.lcm(*(spec.sel_block for spec in self.specs))
        self.page_size = block * -(-LEAST_PAGE // block)
        self.width = -(-max_length // self.page_size)  # pages of the longest sequence
        pages = sequences * self.width
        if tokens is not None:  # every sequence may leave a page unfinished
            pages = min(pages, tokens // self.page_size + sequences)
        weight: Tensor = layers[0].q.weight
        devices = {str(layer.q.weight.device) for layer in layers}
        if len(devices) > 1:
            raise ArgumentError("model", f"must be on one device to use a cache; it is on {', '.join(sorted(devices))}")
        self.dtype, self.device = dtype or compute_dtype(weight), weight.device
        self._num_pages, self._free_pages = pages + 1, list(range(pages, 0, -1))
        self.layers = {layer: layer.build_cache(self) for layer in layers}
        self.shortest_ring = min((c.shortest_ring for c in self.layers.values() if c.shortest_ring), default=None)
        self._free_slots = list(range(sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}  # by sequence, in the order they were added
        self._length = [0] * sequences
        self._longest = [0] * sequences  # since the rings were last whole
        self._table = torch.zeros(sequences, self.width, dtype=torch.int32, device="cpu")
        self.table = torch.zeros_like(self._table, device=self.device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=self.device)
        self._stale_table = self._stale_lengths = False  # whether the device's are behind the host's

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of the same model that goes on by itself."""
        new = copy(self)
        new.__dict__ = deepcopy(self.__dict__, {id(module): module for module in self.model.modules()} | memo)
        return new

    def pool(self, size: int, heads: int, dim_k: int, dim_v: int, *, is_ring: bool = False) -> Pool:
        """For a layer: pages of `size` tokens, or rings that hold as many and the slack."""
        shape = (self.max_sequences + 1, size + self.slack) if is_ring else (self._num_pages, size)
        k, v = (torch.zeros(*shape, heads, dim, dtype=self.dtype, device=self.device) for dim in (dim_k, dim_v))
        return Pool(k, v, is_ring)

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences, in the order they were added."""
        return list(self._pages)

    @property
    def free_tokens(self) -> int:
        """Tokens of the pages that no sequence has."""
        return len(self._free_pages) * self.page_size

    def length(self, sequence: int) -> int:
        self._check(sequence)
        return self._length[sequence]

    def memory(self) -> dict[str, int]:
        """Bytes by part: sel, cmp, win and tail of NSA layers, dense, window, and the page table."""
        parts: dict[str, int] = {}
        for layer in self.layers.values():
            for part, tensors in layer.parts().items():
                parts[part] = parts.get(part, 0) + sum(x.nbytes for x in tensors)
        return parts | {"table": self.table.nbytes + self.lengths.nbytes}

    def add(self) -> int:
        """A new sequence without tokens: its number."""
        if not self._free_slots:
            raise CacheFullError(
                f"the cache holds {self.max_sequences} sequences already; free one, or make it with more `sequences`"
            )
        sequence = self._free_slots.pop()
        self._pages[sequence] = []
        return sequence

    def free(self, sequence: int) -> None:
        """Removes a sequence; its pages serve others."""
        self.crop(0, sequence)
        del self._pages[sequence]
        self._free_slots.append(sequence)

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Takes tokens back until `length` are left; None: of every sequence that is longer.

        Rings hold the newest tokens alone. Where they have wrapped around, at most `slack` tokens can be taken back,
        counted from the longest that the sequence has been, or all of them.
        """
        if sequence is None:
            chosen = [s for s in self._pages if self._length[s] > length]
        else:
            self._check(sequence)
            chosen = [sequence]
        for s in chosen:
            self._check_crop(length, s)
        for s in chosen:
            kept = -(-length // self.page_size)
            while len(self._pages[s]) > kept:
                self._free_pages.append(self._pages[s].pop())
            self._length[s] = length
            if length == 0:
                self._longest[s] = 0
            self._stale_lengths = True

    def grow(self, max_length: int) -> None:
        """Sequences of up to `max_length` tokens, within the same `tokens`; what the cache holds stays."""
        new = KVCache(
            self.model,
            sequences=self.max_sequences,
            max_length=max_length,
            tokens=self.tokens,
            slack=self.slack,
            dtype=self.dtype,
        )
        for module, kept in self.layers.items():
            for name, tensors in kept.parts().items():  # pages keep their numbers, rings their shape
                for old, larger in zip(tensors, new.layers[module].parts()[name], strict=True):
                    larger[: len(old)].copy_(old)
        used = {page for pages in self._pages.values() for page in pages}
        new._free_pages = [page for page in new._free_pages if page not in used]
        new._table[:, : self.width] = self._table
        new._pages, new._free_slots = self._pages, self._free_slots
        new._length, new._longest = self._length, self._longest
        new._stale_table = new._stale_lengths = True
        self.__dict__.update(new.__dict__)

    def _check_crop(self, length: int, sequence: int) -> None:
        current = self._length[sequence]
        if not 0 <= length <= current:
            raise ArgumentError("length", f"sequence {sequence} has {current} tokens; cannot crop it to {length}")
        longest, ring = self._longest[sequence], self.shortest_ring
        if length and ring is not None and longest > max(ring, length + self.slack + 1):
            raise ArgumentError(
                "length",
                f"sequence {sequence} has had {longest} tokens, of which the last {self.slack} can be taken back; "
                f"{length} would be {longest - length}. Crop to 0 and compute it again, or make the cache with more "
                "`slack`",
            )

    def append(self, counts: int | Sequence[int], sequences: Sequence[int] | None = None) -> "CacheStep":
        """Room for new tokens, and the forward pass that fills it: pass it to the model as `cache`.

        counts      how many tokens each row brings; a row that brings fewer than the longest is padded at the end. The
                    output at padding means nothing
        sequences   the sequence of each row; None takes all, in the order they were added

        Lengths count the new tokens from now on. Nothing is changed where it raises.
        """
        rows = self.sequences if sequences is None else list(sequences)
        new = [counts] * len(rows) if isinstance(counts, int) else list(counts)
        starts = self.reserve(new, rows)
        slots = torch.tensor(rows, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True)
        count_B = torch.tensor(new, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True)
        ends = [start + count for start, count in zip(starts, new, strict=True)]
        width = max(1, -(-max(ends) // self.page_size))
        is_fresh = not any(start for start, count in zip(starts, new, strict=True) if count)
        return CacheStep(self, slots, count_B, max(new), width, is_fresh, self.completes(starts, new))

    def reserve(self, counts: Sequence[int], sequences: Sequence[int]) -> list[int]:
        """The host's part of `append`: pages for the new tokens. Returns the lengths before them, which the device
        has until a `CacheStep` is made, or replayed as part of a CUDA graph."""
        if not sequences:
            raise ArgumentError("sequences", "there are none; call `add` once for every row first")
        if len(counts) != len(sequences):
            raise ArgumentError("counts", f"must be one for each of {len(sequences)} sequences, got {len(counts)}")
        if len(set(sequences)) != len(sequences):
            raise ArgumentError("sequences", f"names a sequence twice: {list(sequences)}")
        if min(counts) < 0 or max(counts) < 1:
            raise ArgumentError("counts", f"must be at least 0, and 1 in some row; got {list(counts)}")
        for sequence, count in zip(sequences, counts, strict=True):
            self._check(sequence)
            if self._length[sequence] + count > self.max_length:
                raise CacheFullError(
                    f"sequence {sequence} has {self._length[sequence]} tokens and {count} more would exceed the "
                    f"{self.max_length} of `max_length`; crop it, or make the cache with a larger one"
                )
        starts = [self._length[s] for s in sequences]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        needed = [-(-end // self.page_size) - len(self._pages[s]) for s, end in zip(sequences, ends, strict=True)]
        if sum(needed) > len(self._free_pages):
            raise CacheFullError(
                f"out of pages: {sum(counts)} new tokens need {sum(needed)} pages of {self.page_size} tokens and "
                f"{len(self._free_pages)} are free; free or crop sequences, or make the cache with more `tokens`"
            )
        if self._stale_lengths:
            self.lengths.copy_(torch.tensor(self._length, dtype=torch.int32, device="cpu"), non_blocking=True)
        for s, end, missing in zip(sequences, ends, needed, strict=True):
            pages = self._pages[s]
            for _ in range(missing):
                self._table[s, len(pages)] = self._free_pages[-1]
                pages.append(self._free_pages.pop())
                self._stale_table = True
            self._length[s] = end
            self._longest[s] = max(self._longest[s], end)
        if self._stale_table:
            self.table.copy_(self._table, non_blocking=True)
        self._stale_table = self._stale_lengths = False
        return starts

    def completes(self, starts: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether one of the new tokens completes a compressed block."""
        return any(
            num_compressed(start + count, spec) > num_compressed(start, spec)
            for spec in self.specs
            for start, count in zip(starts, counts, strict=True)
        )

    def _check(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise ArgumentError("sequence", f"there is no sequence {sequence}; there are {self.sequences}")


class CacheStep:
    """One forward pass over a cache: what its layers need to know, computed once for all of them.

    slots_B      int32, the sequence of each row
    positions    int32 [B, n], of every token in its sequence; -1 for padding
    table        int32 [B, width], the pages of each row
    is_fresh     whether the sequences had no tokens before: then the pass is that of the whole sequences
    completes    whether a compressed block may be completed

    Creating it advances the lengths on the device, by `count_B`. It reads no value from the device.
    """

    def __init__(
        self, cache: KVCache, slots_B: Tensor, count_B: Tensor, tokens: int, width: int, is_fresh: bool, completes: bool
    ):
        self.cache, self.slots_B, self.is_fresh, self.completes = cache, slots_B, is_fresh, completes
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
            raise _other_model(self.cache, module)
        return found

    def shared(self, key: Any, compute: Callable[[], Found]) -> Found:
        """`compute()`, once for all layers."""
        if key not in self._shared:
            self._shared[key] = compute()
        found: Found = self._shared[key]
        return found

    def pieces(self) -> list[tuple[slice, "CacheStep"]]:
        """The pass in pieces that fit into the slack of rings, each a pass of its own."""
        tokens, most = self.positions.shape[1], self.cache.slack
        if tokens <= most:
            return [(slice(None), self)]
        return self.shared("pieces", lambda: [self._piece(slice(a, a + most)) for a in range(0, tokens, most)])

    def _piece(self, tokens: slice) -> tuple[slice, "CacheStep"]:
        piece = copy(self)
        piece.positions, piece._shared = self.positions[:, tokens].contiguous(), {}
        return tokens, piece

    def rotary(self, *settings: Any) -> tuple[Tensor, Tensor]:
        """Rotary tables of the positions; `settings` as for `rotary_tables`."""
        return self.shared(("rotary", *settings), lambda: rotary_tables(self.positions, *settings))

    def token_index(self, size: int, is_ring: bool) -> Tensor:
        """[B*n] the place of every token in a pool with pages or rings of this size. A ring keeps only the newest."""

        def compute() -> Tensor:
            position = self.positions
            if is_ring:
                position = position.where(position > position.amax(1, keepdim=True) - size, -1)
            return self.places(position, size, is_ring).flatten()

        return self.shared(("tokens", size, is_ring), compute)

    def places(self, number: Tensor, size: int, is_ring: bool) -> Tensor:
        """Where what has this number [B, ...] in its sequence lies in a pool laid end to end, of which a page or a ring
        holds `size`; a negative number: where nothing is kept."""
        if is_ring:
            ring = self.slots_B.view(-1, *[1] * (number.dim() - 1)).to(torch.int64)
            return torch.where(number >= 0, ring * size + number % size, self.cache.max_sequences * size)
        page = self.table.gather(1, (number // size).clamp(0, self.table.shape[1] - 1).flatten(1).to(torch.int64))
        return torch.where(number >= 0, page.view(number.shape).to(torch.int64) * size + number % size, 0)

    def compressed(self, spec: NSASpec) -> "NewCompressed":
        return self.shared(spec, lambda: NewCompressed(self, spec))


class NewCompressed:
    """The compressed tokens that a pass may complete, m for every row, as many as its shape allows.

    first    [B, m] the position of its first token
    index    [B*m] its place in the pages of a layer, laid end to end; in page 0 where it is not complete
    """

    def __init__(self, step: CacheStep, spec: NSASpec):
        self.spec, position = spec, step.positions
        tokens = position.shape[1]
        most = num_compressed(tokens, spec) if step.is_fresh else -(-tokens // spec.cmp_stride)
        oldest_B = ((position[:, 0] - spec.cmp_block + spec.cmp_stride) // spec.cmp_stride).clamp(min=0)
        number = oldest_B[:, None] + torch.arange(most, dtype=torch.int32, device=position.device)
        last = number * spec.cmp_stride + spec.cmp_block - 1
        self.step, self.first = step, number * spec.cmp_stride
        number = torch.where(last <= position.amax(1, keepdim=True), number, -1)
        self.index = step.places(number, step.cache.page_size // spec.cmp_stride, is_ring=False).flatten()
        place = torch.arange(spec.cmp_block, dtype=torch.int32, device=position.device)
        self._tokens = self.first[..., None] + place

    def sources(self, size: int, is_ring: bool) -> Tensor:
        """[B, m, cmp_block] the places of its tokens in a pool with pages or rings of this size."""
        key = ("sources", self.spec, size, is_ring)
        return self.step.shared(key, lambda: self.step.places(self._tokens, size, is_ring))

    def rotary(self, *settings: Any) -> tuple[Tensor, Tensor]:
        """Rotary tables of its key; `settings` as for `rotary_tables`."""
        return self.step.shared(("compressed", self.spec, *settings), lambda: rotary_tables(self.first, *settings))


def begin(cache: KVCache | CacheStep, module: nn.Module, x: Tensor, cu_seqlens: Tensor | None = None) -> CacheStep:
    """The forward pass of `module` over a cache, for an input x [batch, tokens, ...]."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is not None:
        raise ArgumentError(
            "cu_seqlens", "packs documents into one row, and a cache has a row for each; pass one of them"
        )
    if isinstance(cache, CacheStep):
        wanted = list(cache.positions.shape)
        if [batch, tokens] != wanted:
            raise ArgumentError(
                "cache", f"was made for {wanted} tokens by `append`, and the input has {[batch, tokens]}"
            )
        return cache
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", f"must be a KVCache, or what its `append` returned; got {type(cache).__name__}")
    if cache.model is not module:
        raise _other_model(cache, module)
    added = []
    if not cache.sequences and batch <= cache.max_sequences:
        added = [cache.add() for _ in range(batch)]
    if batch != len(cache.sequences):
        held = f"holds {len(cache.sequences)} sequences, and the input has {batch} rows"
        raise ArgumentError("cache", f"{held}; it was made with sequences={cache.max_sequences}")
    try:
        return cache.append(tokens)
    except (ArgumentError, CacheFullError):  # nothing is changed where it raises
        for sequence in added:
            cache.free(sequence)
        raise


def _other_model(cache: KVCache, module: nn.Module) -> ArgumentError:
    kind = type(module).__name__
    if module in cache.layers:  # a layer would advance the lengths of all
        return ArgumentError("cache", f"is that of a whole model; pass to a {kind} in it what `append` returned")
    return ArgumentError("cache", f"was made for another model, not for this {kind}; make one with KVCache(model, ...)")
