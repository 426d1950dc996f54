"""What one attention layer keeps of a sequence, and how a forward pass reads and writes it.

An NSA layer keeps all keys and values of the selected branch in pages, the compressed tokens in pages of the same
numbers, the newest of the window branch in a ring, and in another the raw tokens that the next compressed token needs.
With shared keys and values the pages serve the window too, and the second ring holds keys alone. A dense layer keeps
pages, a window layer a ring.

Legend: B rows of a forward pass, n tokens of a row, m compressed tokens of a row, G key/value heads, K/V head sizes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.cache import CacheSizes, CacheStep
from nsa.nn.rope import rotate
from nsa.ops.decode import PagedKV, RingKV
from nsa.ops.operators import Backend
from nsa.ops.spec import NSASpec
from nsa.ops.step import Heads, Write


class NSALayerCache:
    def __init__(self, sizes: CacheSizes, spec: NSASpec, groups: int, dim_k: int, dim_v: int, shared_kv: bool):
        self.spec = spec
        compressed = sizes.page_size // spec.cmp_stride
        self.k_sel, self.v_sel = (sizes.paged(sizes.page_size, groups, dim) for dim in (dim_k, dim_v))
        self.k_cmp, self.v_cmp = (sizes.paged(compressed, groups, dim) for dim in (dim_k, dim_v))
        self.k_tail = sizes.ring(spec.cmp_block, groups, dim_k)
        self.v_tail = self.k_win = self.v_win = None
        if not shared_kv:
            self.v_tail = sizes.ring(spec.cmp_block, groups, dim_v)
            self.k_win, self.v_win = (sizes.ring(spec.window, groups, dim) for dim in (dim_k, dim_v))
        rings = [x for x in (self.k_tail, self.k_win) if x is not None]
        self.shortest_ring: int | None = min(x.shape[1] for x in rings)

    def parts(self) -> dict[str, list[Tensor]]:
        parts: dict[str, list[Tensor | None]] = {
            "sel": [self.k_sel, self.v_sel],
            "cmp": [self.k_cmp, self.v_cmp],
            "win": [self.k_win, self.v_win],
            "tail": [self.k_tail, self.v_tail],
        }
        return {name: [x for x in tensors if x is not None] for name, tensors in parts.items()}

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads], *, is_turned: bool = False) -> list[Write[Heads]]:
        """Where keys and values of cmp, sel and win are kept. Keys of sel and win are rotated, those of cmp where
        `is_turned`."""
        k_raw, k_sel, k_win = keys if len(keys) == 3 else [*keys] * 3
        v_raw, v_sel, v_win = values if len(values) == 3 else [*values] * 3
        writes = [Write(k_sel, self.k_sel, False, True), Write(v_sel, self.v_sel, False, False)]
        writes.append(Write(k_raw, self.k_tail, True, is_turned))
        if self.v_tail is not None and self.k_win is not None and self.v_win is not None:
            writes.append(Write(v_raw, self.v_tail, True, False))
            writes += [Write(k_win, self.k_win, True, True), Write(v_win, self.v_win, True, False)]
        return writes

    def write_compressed(self, step: CacheStep, k_cmp: Tensor, v_cmp: Tensor) -> None:
        """Compressed tokens [B, m, G, .] of the pass, keys rotated."""
        index = step.compressed(self.spec).index
        put(self.k_cmp, index, k_cmp)
        put(self.v_cmp, index, v_cmp)

    def compress(self, step: CacheStep, phi_k: nn.Module, phi_v: nn.Module, rotary: tuple[Any, ...] | None) -> None:
        """Compresses the blocks that the pass completes, from the tokens that have been written. Compressed keys are
        rotated as `rotary_tables(position, *rotary)` says, unless their tokens were."""
        if not step.completes:
            return
        new = step.compressed(self.spec)
        places = new.tail_index(self.k_tail.shape[1])
        k = take(self.k_tail, places)
        v = take(self.v_sel, new.page_index()) if self.v_tail is None else take(self.v_tail, places)
        rows = new.first.shape
        k_cmp, v_cmp = (phi(x.flatten(0, 1)).view(*rows, *x.shape[3:]) for phi, x in ((phi_k, k), (phi_v, v)))
        self.write_compressed(step, rotate(k_cmp, new.rotary(*rotary)) if rotary else k_cmp, v_cmp)

    def views(self, step: CacheStep) -> tuple[PagedKV, PagedKV, PagedKV | RingKV]:
        """The cache of each branch, as `nsa_decode` takes them."""
        sel = PagedKV(self.k_sel, self.v_sel, step.table)
        win: PagedKV | RingKV = sel
        if self.k_win is not None and self.v_win is not None:
            win = RingKV(self.k_win, self.v_win, step.slots_B)
        return PagedKV(self.k_cmp, self.v_cmp, step.table), sel, win


class DenseLayerCache:
    """Of a dense layer (`window` None) or a window layer."""

    def __init__(self, sizes: CacheSizes, window: int | None, groups: int, dim_k: int, dim_v: int):
        self.is_ring = window is not None
        if window is None:
            self.k, self.v = (sizes.paged(sizes.page_size, groups, dim) for dim in (dim_k, dim_v))
        else:
            self.k, self.v = (sizes.ring(window, groups, dim) for dim in (dim_k, dim_v))
        self.shortest_ring = self.k.shape[1] if self.is_ring else None

    def parts(self) -> dict[str, list[Tensor]]:
        return {"window" if self.is_ring else "dense": [self.k, self.v]}

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        return [Write(keys[0], self.k, self.is_ring, True), Write(values[0], self.v, self.is_ring, False)]

    def view(self, step: CacheStep) -> PagedKV | RingKV:
        return RingKV(self.k, self.v, step.slots_B) if self.is_ring else PagedKV(self.k, self.v, step.table)


def write(step: CacheStep, writes: Sequence[Write[Tensor]]) -> None:
    """Does the writes of a layer whose sources are keys and values [B, n, G, .] themselves, rotated already."""
    for x, pool, is_ring, _ in writes:
        put(pool, step.ring_index(pool.shape[1]) if is_ring else step.token_index(), x)


def put(pool: Tensor, index: Tensor, x: Tensor) -> None:
    """Writes x [B, n, G, D] to places `index` [B*n] of a pool [.., .., G, D] laid end to end."""
    if x.dtype != pool.dtype:
        raise ArgumentError(
            "cache", f"holds {pool.dtype} and the layer computes in {x.dtype}; make it with dtype={x.dtype}"
        )
    pool.flatten(0, 1).index_copy_(0, index, x.detach().flatten(0, 1))


def take(pool: Tensor, index: Tensor) -> Tensor:
    """The places `index` of a pool [.., .., G, D] laid end to end: [*index.shape, G, D]."""
    return pool.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *pool.shape[2:])


def decode_backend(backend: Backend) -> str | None:
    """The backend of the decoding operators, which are all operators of a layer in one."""
    if isinstance(backend, Mapping):
        return "reference" if "reference" in backend.values() else None
    return backend
