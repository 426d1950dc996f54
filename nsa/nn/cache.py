"""The key/value cache of a model: the pages and the length of every sequence.

A cache serves one model and many sequences, which can be added and freed. Every sequence has a number, a length, and
pages of one pool; all layers use the same page table, each with its own tensors (`nsa.nn.layer_cache`). The host owns
this state; the device has copies, which are never read back.
"""

import math
import os
from collections.abc import Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError, CacheFullError, whole_number, whole_numbers
from nsa.nn.cache_step import CacheStep, other_model
from nsa.nn.projection import compute_dtype
from nsa.ops.checks import FLOAT_TYPES
from nsa.ops.decoding import PagedKV, RingKV
from nsa.ops.fused_step import Heads, Write

LEAST_PAGE = 64  # tokens
LONGEST = 2**31 - 1  # tokens of a sequence: positions and numbers of sequences are int32


class Pool(NamedTuple):
    """Keys and values of all sequences: pages [P, page, G, .], or rings [slots, ring, G, .]. Page 0 and the last ring
    receive writes that are to be discarded."""

    k: Tensor
    v: Tensor
    is_ring: bool

    def writes(self, k: Heads, v: Heads, *, is_rotated: bool = True) -> list[Write[Heads]]:
        """The writes of keys, rotated or not, and values."""
        return [Write(k, self.k, self.is_ring, is_rotated), Write(v, self.v, self.is_ring, False)]

    def view(self, step: CacheStep) -> PagedKV | RingKV:
        """The sequences of a pass, in the form that the operators take."""
        return RingKV(self.k, self.v, step.slots_B) if self.is_ring else PagedKV(self.k, self.v, step.table)


class KVCache:
    """Keys and values of up to `sequences` sequences of up to `max_length` tokens, for decoding with `model`.

    model        a Decoder, an attention layer, or any module that contains attention layers of nsa
    sequences    the maximum number of sequences at a time
    max_length   the maximum number of tokens of one sequence
    tokens       the maximum number of tokens of all sequences together; None: `sequences` of full length
    slack        tokens by which rings exceed the need of a layer: `crop` can remove that many, and the decoding kernels
                 process that many new tokens of a sequence at a time
    dtype        dtype of keys and values; None: the dtype in which the model computes

    `model(tokens, cache=cache)` appends tokens to every sequence. The first call on a cache without sequences adds
    one for every row. For rows of different lengths, or only some of the sequences, pass `cache.append(counts,
    sequences)` instead. A model of your own calls `add` for every row, then `append` once per forward pass, and passes
    the result to all its attention layers. If a forward pass fails half-way, `crop` or `free` its sequences.

    A prompt may come in chunks, one call for each. Chunks of more than `nsa.nn.cache_step.FEW_TOKENS` tokens run on the
    training kernels, on a copy of the earlier keys and values of one layer at a time: for a layer with 2 heads of 64
    channels in bf16, 0.5 GiB after a million tokens. Rows with equal numbers of earlier tokens are computed together.
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
        self.max_sequences = whole_number("sequences", sequences, most=LONGEST)
        self.slack = whole_number("slack", slack)
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        # By class: the wrappers of torch.compile and of checkpointing have the attributes of what they wrap.
        layers: list[Any] = [m for m in modules if hasattr(type(m), "build_cache")]
        if not layers:
            raise ArgumentError("model", f"has no attention layer of nsa: {type(model).__name__}")
        # One layer of each kind and spec: layers with the same spec complete blocks at the same tokens.
        self._completing = {(type(layer), getattr(layer, "spec", None)): layer for layer in layers}
        # A page holds whole blocks of every layer, and at least LEAST_PAGE tokens.
        block = math.lcm(*(layer.page_multiple for layer in layers))
        self.page_size = block * -(-LEAST_PAGE // block)
        weight: Tensor = layers[0].q.weight
        devices = {str(layer.q.weight.device) for layer in layers}
        if len(devices) > 1:
            raise ArgumentError("model", f"must be on one device to use a cache; it is on {', '.join(sorted(devices))}")
        self.dtype, self.device = dtype or compute_dtype(weight), weight.device
        if self.dtype not in FLOAT_TYPES:
            raise ArgumentError("dtype", f"must be a float type of 16, 32 or 64 bits, got {self.dtype}")
        self.layers: dict[Any, Any] = dict.fromkeys(layers)  # the LayerCache of each layer
        self._num_pages, self._free_pages = 1, list[int]()
        self._table = torch.zeros(0, 0, dtype=torch.int32, device="cpu")
        self._allocate(max_length, tokens)
        self.shortest_ring = min((c.shortest_ring for c in self.layers.values() if c.shortest_ring), default=None)
        self._free_slots = list(range(self.max_sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}  # by sequence, in the order they were added
        self._length = [0] * self.max_sequences
        self._longest = [0] * self.max_sequences  # since the rings were last complete
        self.lengths = torch.zeros(self.max_sequences, dtype=torch.int32, device=self.device)
        self._stale_lengths = False  # whether the copy on the device is out of date

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """An independent copy for the same model."""
        new = copy(self)
        new.__dict__ = deepcopy(self.__dict__, {id(module): module for module in self.model.modules()} | memo)
        return new

    def pool(self, size: int, heads: int, dim_k: int, dim_v: int, *, is_ring: bool = False) -> Pool:
        """Creates a pool for a layer: pages of `size` tokens, or rings of `size` tokens plus the slack."""
        shape = (self.max_sequences + 1, size + self.slack) if is_ring else (self._num_pages, size)
        k, v = (torch.zeros(*shape, heads, dim, dtype=self.dtype, device=self.device) for dim in (dim_k, dim_v))
        return Pool(k, v, is_ring)

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences, in the order they were added."""
        return list(self._pages)

    @property
    def free_tokens(self) -> int:
        """The number of tokens that fit into unused pages."""
        return len(self._free_pages) * self.page_size

    def length(self, sequence: int) -> int:
        self._check(sequence)
        return self._length[sequence]

    def memory(self) -> dict[str, int]:
        """Bytes by part: the pools that layers name, such as sel, cmp, win and tail of NSA, and the page table."""
        parts: dict[str, int] = {}
        for layer in self.layers.values():
            for part, tensors in layer.parts().items():
                parts[part] = parts.get(part, 0) + sum(x.nbytes for x in tensors)
        return parts | {"table": self.table.nbytes + self.lengths.nbytes}

    def add(self) -> int:
        """Adds an empty sequence and returns its number."""
        if not self._free_slots:
            raise CacheFullError(
                f"the cache holds {self.max_sequences} sequences already; free one, or make it with more `sequences`"
            )
        sequence = self._free_slots.pop()
        self._pages[sequence] = []
        return sequence

    def free(self, sequence: int) -> None:
        """Removes a sequence and frees its pages."""
        self.crop(0, sequence)
        del self._pages[sequence]
        self._free_slots.append(sequence)

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Removes the last tokens of a sequence until `length` are left; None: of every sequence that is longer.

        Rings hold only the newest tokens. After they have wrapped around, at most `slack` tokens can be removed,
        counted from the longest that the sequence has been, or all of them.
        """
        length = whole_number("length", length, least=0)
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

    def grow(self, max_length: int, tokens: int | None = None) -> None:
        """Raises the limits to sequences of `max_length` tokens, and `tokens` of all together; None keeps that limit.
        The content is copied to new tensors: a CUDA graph over the cache must be captured again."""
        max_length = whole_number("max_length", max_length, least=self.max_length)
        if tokens is not None:
            tokens = whole_number("tokens", tokens, least=self.tokens or self.max_sequences * self.max_length)
        self._allocate(max_length, tokens or self.tokens)

    def _allocate(self, max_length: int, tokens: int | None) -> None:
        """Allocates pools and the page table for these limits, and copies the content. Replaces the pools layer by
        layer, so that only those of one layer exist twice. If memory runs out, the cache is unchanged."""
        max_length = whole_number("max_length", max_length, most=LONGEST)
        width = -(-max_length // self.page_size)  # pages of the longest sequence
        pages = self.max_sequences * width
        if tokens is not None:  # the last page of every sequence may be partly filled
            tokens = whole_number("tokens", tokens)
            pages = min(pages, tokens // self.page_size + self.max_sequences)
        self._check_memory(max_length, width, pages)
        larger = copy(self)
        larger._num_pages = pages + 1
        for layer, kept in self.layers.items():
            built = layer.build_cache(larger)
            if kept is not None:  # pages keep their numbers, rings their shape
                for old, new in zip(*(chain(*each.parts().values()) for each in (kept, built)), strict=True):
                    new[: len(old)].copy_(old[: len(new)])
            self.layers[layer] = built
        table = torch.zeros(self.max_sequences, width, dtype=torch.int32, device="cpu")
        table[: len(self._table), : self._table.shape[1]] = self._table
        self._table, self.table = table, table.to(self.device, copy=True)
        self._stale_table = False  # whether the copy on the device is out of date
        self._free_pages = [*range(pages, self._num_pages - 1, -1), *self._free_pages]
        self.max_length, self.tokens, self.width, self._num_pages = max_length, tokens, width, pages + 1

    def _check_memory(self, max_length: int, width: int, pages: int) -> None:
        """Refuses a cache larger than the memory of the device: otherwise the operating system may kill the process."""
        one = copy(self)
        one.device, one.max_sequences, one._num_pages = torch.device("meta"), 0, 1
        pools = [pool for layer in self.layers for pool in layer.build_cache(one).pools.values() if pool is not None]
        needed = 4 * self.max_sequences * width
        needed += sum((p.k.nbytes + p.v.nbytes) * (1 + (self.max_sequences if p.is_ring else pages)) for p in pools)
        memory = device_memory(self.device)
        if needed > memory:
            problem = f"a cache of sequences={self.max_sequences} and max_length={max_length} needs {needed >> 30} GiB"
            remedy = "use fewer or shorter sequences, or limit `tokens`"
            raise ArgumentError("sequences", f"{problem}, and {self.device} has {memory / 2**30:.0f}; {remedy}")

    def _check_crop(self, length: int, sequence: int) -> None:
        current = self._length[sequence]
        if length > current:
            raise ArgumentError("length", f"sequence {sequence} has {current} tokens; cannot crop it to {length}")
        longest, ring = self._longest[sequence], self.shortest_ring
        if length and ring is not None and longest > max(ring, length + self.slack + 1):
            raise ArgumentError(
                "length",
                f"sequence {sequence} has had {longest} tokens, of which the last {self.slack} can be taken back; "
                f"{length} would be {longest - length}. Crop to 0 and compute it again, or make the cache with more "
                "`slack`",
            )

    def append(self, counts: SupportsIndex | Sequence[int], sequences: Sequence[int] | None = None) -> CacheStep:
        """Reserves room for new tokens and returns the forward pass that fills it: pass it to the model as `cache`.

        counts      the number of new tokens of each row; shorter rows are padded at the end. The output at padding is
                    undefined
        sequences   the sequence of each row; None: all, in the order they were added

        Lengths include the new tokens from now on. If it raises, nothing is changed.
        """
        rows = self.sequences if sequences is None else whole_numbers("sequences", sequences, 1)
        new = whole_numbers("counts", counts, len(rows))
        starts = self.reserve(new, rows)
        slots = torch.tensor(rows, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True)
        count_B = torch.tensor(new, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True)
        ends = [start + count for start, count in zip(starts, new, strict=True)]
        width = max(1, -(-max(ends) // self.page_size))
        is_fresh = not any(start for start, count in zip(starts, new, strict=True) if count)
        spans = list(zip(starts, new, strict=True))
        return CacheStep(self, slots, count_B, max(new), width, is_fresh, self.completes(starts, new), spans)

    def reserve(self, counts: Sequence[int], sequences: Sequence[int]) -> list[int]:
        """The host's part of `append`: reserves pages for the new tokens. Returns the lengths before them, which are
        those on the device until a `CacheStep` is created, or replayed in a CUDA graph."""
        if not sequences:
            raise ArgumentError("sequences", "the cache has none; call `add` once for every row first")
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
        """Whether one of the new tokens completes a block, which some layer must compress."""
        return any(
            layer.completes(start, start + count)
            for layer in self._completing.values()
            for start, count in zip(starts, counts, strict=True)
        )

    def _check(self, sequence: int) -> None:
        if whole_number("sequence", sequence, least=0) not in self._pages:
            raise ArgumentError("sequence", f"sequence {sequence} does not exist; the cache has {self.sequences}")


def device_memory(device: torch.device) -> float:
    """Total bytes of memory; infinity if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def begin(cache: KVCache | CacheStep, module: nn.Module, x: Tensor, cu_seqlens: Tensor | None = None) -> CacheStep:
    """The forward pass of `module` over a cache, for an input x [batch, tokens, ...]."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is not None:
        raise ArgumentError(
            "cu_seqlens", "packs documents into one row, but a cache needs one row per document; pass one of them"
        )
    if isinstance(cache, CacheStep):
        wanted = list(cache.positions.shape)
        if [batch, tokens] != wanted:
            raise ArgumentError(
                "cache", f"was made for {wanted} tokens by `append`, and the input has {[batch, tokens]}"
            )
        return cache
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", f"must be a KVCache or the result of its `append`; got {type(cache).__name__}")
    if cache.model is not module:
        raise other_model(cache, module)
    added = []
    if not cache.sequences and batch <= cache.max_sequences:
        added = [cache.add() for _ in range(batch)]
    if batch != len(cache.sequences):
        problem = f"holds {len(cache.sequences)} sequences, and the input has {batch} rows"
        raise ArgumentError("cache", f"{problem}; it was made with sequences={cache.max_sequences}")
    try:
        return cache.append(tokens)
    except (ArgumentError, CacheFullError):  # restore the cache
        for sequence in added:
            cache.free(sequence)
        raise
