"""The only definition of every block and mask formula.

The reference, the host code of the kernels, the layers and the tests use these functions. Kernels compute the same
formulas in registers, and tests compare them with the reference: `keys_seen` and `seen_by` in
`triton/flash_kernels.py`, `block_start` in `triton/selected_lists.py`, and the block of a query where it is needed.

Positions count from 0 inside a document; without `cu_seqlens` the whole sequence is one document. No function reads a
value of a device tensor back to the host. Layouts of a `cu_seqlens` are computed once and cached while that tensor is
alive, since every operator of every layer needs them.

Legend: S tokens, N compressed tokens (slots, when packed).
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from nsa.ops.spec import NSASpec, SelectionSpec

IntLike = TypeVar("IntLike", int, Tensor)
Cached = TypeVar("Cached")

_cache: Any = WeakTensorKeyDictionary()  # cu_seqlens -> (its version or values, results computed from it, by key)
_capture_cache: Any = None  # the same, for the CUDA graph that is being captured
_cache_lock = threading.Lock()


def num_compressed(length: IntLike, spec: NSASpec) -> IntLike:
    """The number of compressed tokens of one document of `length` tokens."""
    count = (length - spec.cmp_block) // spec.cmp_stride + 1
    return count.clamp(min=0) if isinstance(count, Tensor) else max(0, count)


def num_slots(tokens: int, spec: NSASpec, *, packed: bool) -> int:
    """Length of the compressed tensors. Packed, it depends only on S, so that no size depends on values."""
    return tokens // spec.cmp_stride if packed else num_compressed(tokens, spec)


def visible_compressed(position: IntLike, spec: NSASpec) -> IntLike:
    """How many compressed tokens a query at `position` sees: block i when i*stride + cmp_block - 1 <= position."""
    return num_compressed(position + 1, spec)


def num_blocks(length: int, block: int) -> int:
    """The number of blocks of `block` tokens, the last possibly shorter, of one document of `length` tokens."""
    return -(-length // block)


def block_of(position: IntLike, block: int) -> IntLike:
    """The number of the block of `block` tokens that holds `position`."""
    return position // block


def is_forced(number: Tensor, own: Tensor, spec: SelectionSpec) -> Tensor:
    """Whether a query in block `own` reads the visible block `number` regardless of the scores."""
    return (number < spec.num_init) | (number > own - spec.num_local)


def num_read(position: IntLike, spec: SelectionSpec) -> IntLike:
    """The number of tokens that a query at `position` reads in its selected blocks: its own block up to itself, and
    other blocks whole."""
    older = block_of(position, spec.sel_block)
    most = spec.num_selected - 1
    older = older.clamp(max=most) if isinstance(older, Tensor) else min(older, most)
    return position % spec.sel_block + 1 + older * spec.sel_block


def window_start(token: IntLike, window: int) -> IntLike:
    """The first token that the query `token` reads in a window, unless its document starts later."""
    return token - window + 1


def compressed_per_block(spec: NSASpec) -> int:
    """The number of compressed tokens that start in one selection block."""
    return spec.sel_block // spec.cmp_stride


def compressed_overlap(spec: NSASpec) -> int:
    """The number of compressed tokens that summarise a token, away from the ends of its document."""
    return spec.cmp_block // spec.cmp_stride


def overlap_weights(spec: NSASpec) -> tuple[int, list[int]]:
    """Eq. 9 as a stencil: `(first, weights)` such that block j takes compressed token `j*r + first + n`
    with `weights[n]`, where r = sel_block / cmp_stride. A weight is the number of stride-sized chunks
    that the two share; 32/16/64 gives (-1, [1, 2, 2, 2, 1])."""
    chunks_cmp, chunks_sel = compressed_overlap(spec), compressed_per_block(spec)
    first = 1 - chunks_cmp
    weights = [min(start + chunks_cmp, chunks_sel) - max(start, 0) for start in range(first, chunks_sel)]
    return first, weights


@dataclass(frozen=True)
class TokenLayout:
    """The position of every token of a sequence in its document. Both tensors are `[S]` int64.

    position   position inside the document
    doc_start  index of the document's first token
    """

    position: Tensor
    doc_start: Tensor


def token_layout(tokens: int, cu_seqlens: Tensor | None, device: torch.device | str) -> TokenLayout:
    if cu_seqlens is not None:
        return cached_with(cu_seqlens, ("tokens", tokens), lambda: _packed_tokens(tokens, cu_seqlens))
    index = torch.arange(tokens, device=device)
    return TokenLayout(index, torch.zeros_like(index))


def _packed_tokens(tokens: int, cu_seqlens: Tensor) -> TokenLayout:
    index = torch.arange(tokens, device=cu_seqlens.device)
    bounds = _safe_bounds(cu_seqlens, tokens)
    doc_start = bounds[_segment_of(index, bounds)]
    return TokenLayout(index - doc_start, doc_start)


def first_compressed(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device | str) -> Tensor:
    """Index of the first compressed token of every token's document: `[S]` int64."""
    if cu_seqlens is None:
        return torch.zeros(tokens, dtype=torch.int64, device=device)
    return cached_with(cu_seqlens, ("compressed", tokens, spec), lambda: _packed_compressed(tokens, spec, cu_seqlens))


def _packed_compressed(tokens: int, spec: NSASpec, cu_seqlens: Tensor) -> Tensor:
    bounds = _safe_bounds(cu_seqlens, tokens)
    doc = _segment_of(torch.arange(tokens, device=cu_seqlens.device), bounds)
    return _compressed_bounds(bounds, spec)[doc]


@dataclass(frozen=True)
class SlotLayout:
    """The tokens that every compressed token summarises. All tensors are `[N]`.

    first_token  index of its first token in the sequence (0 for an unused slot)
    position     rotary position of its key: `i * cmp_stride` inside its document
    used         False for unused slots at the end of a packed tensor
    """

    first_token: Tensor
    position: Tensor
    used: Tensor


def slot_layout(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device | str) -> SlotLayout:
    if cu_seqlens is not None:
        return cached_with(cu_seqlens, ("slots", tokens, spec), lambda: _packed_slots(tokens, spec, cu_seqlens))
    index = torch.arange(num_slots(tokens, spec, packed=False), device=device)
    start = index * spec.cmp_stride
    return SlotLayout(start, start, torch.ones_like(index, dtype=torch.bool))


def _packed_slots(tokens: int, spec: NSASpec, cu_seqlens: Tensor) -> SlotLayout:
    index = torch.arange(num_slots(tokens, spec, packed=True), device=cu_seqlens.device)
    bounds = _safe_bounds(cu_seqlens, tokens)
    cmp_bounds = _compressed_bounds(bounds, spec)
    doc = _segment_of(index, cmp_bounds)
    used = index < cmp_bounds[-1]
    position = torch.where(used, (index - cmp_bounds[doc]) * spec.cmp_stride, 0)
    first_token = torch.where(used, bounds[doc] + position, 0)
    return SlotLayout(first_token, position, used)


def cached_with(cu_seqlens: Tensor | None, key: Hashable, compute: Callable[[], Cached]) -> Cached:
    """`compute()`, cached under `key` until `cu_seqlens` is written to or freed; not cached without documents. Callers
    must not modify the result. On the CPU the cache compares values, since collectives and code outside torch write to
    a tensor without changing its version.

    A CUDA graph recomputes the result in every replay, from the current borders: no result computed outside a capture
    is used inside it, or the other way round. Inside, results are cached while `layouts_of_capture` is active.
    """
    if cu_seqlens is None:
        return compute()
    capturing = _is_capturing(cu_seqlens)
    cache = _capture_cache if capturing else _cache
    if cu_seqlens.is_inference() or cache is None:
        return compute()
    is_readable = type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu"  # not a fake tensor
    version = cu_seqlens.tolist() if is_readable else cu_seqlens._version
    with _cache_lock:
        found = cache.get(cu_seqlens)
        if found is None or found[0] != version:
            found = cache[cu_seqlens] = (version, {})
    values = found[1]
    if key not in values:
        values[key] = compute()
    return cast(Cached, values[key])


@contextmanager
def layouts_of_capture() -> Iterator[None]:
    """Use it around the whole capture of one CUDA graph, on one thread and those of its backward: layouts are computed
    once in the graph instead of in every operator of every layer."""
    global _capture_cache
    _capture_cache = WeakTensorKeyDictionary()
    try:
        yield
    finally:
        _capture_cache = None


def _is_capturing(cu_seqlens: Tensor) -> bool:
    return cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()


def _safe_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Document borders that start at 0, end at S and never decrease.

    Valid borders are unchanged. Values on a device are not read back, so invalid ones are clamped.
    """
    inner = cu_seqlens[1:-1].to(torch.int64).clamp(0, tokens).cummax(0).values
    return pad(pad(inner, (1, 0), value=0), (0, 1), value=tokens)


def _compressed_bounds(bounds: Tensor, spec: NSASpec) -> Tensor:
    return pad(num_compressed(bounds.diff(), spec).cumsum(0), (1, 0), value=0)


def _segment_of(index: Tensor, bounds: Tensor) -> Tensor:
    """The segment of `bounds` that contains each index; empty segments contain none."""
    segment = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return segment.clamp(max=bounds.shape[0] - 2)
