"""The tensors that one attention layer keeps in a cache, and how a forward pass reads and writes them.

Legend: B rows of a forward pass, n tokens of a row, G key/value heads, D head size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.nn.cache import Pool
from nsa.nn.cache_step import CacheStep
from nsa.ops.dispatch import Backend
from nsa.ops.fused_step import Heads, Write


class LayerCache:
    """The pools of a layer, by their names in `KVCache.memory`; None is ignored. Most kinds have one pool."""

    def __init__(self, **pools: Pool | None):
        self.pools = pools
        rings = [pool.k.shape[1] for pool in pools.values() if pool and pool.is_ring]
        self.shortest_ring: int | None = min(rings, default=None)

    def parts(self) -> dict[str, list[Tensor]]:
        return {name: [pool.k, pool.v] if pool else [] for name, pool in self.pools.items()}

    def pool(self) -> Pool:
        """The pool of a layer that has one."""
        (pool,) = self.pools.values()
        assert pool is not None
        return pool

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """The writes of rotated keys and of values."""
        return self.pool().writes(keys[0], values[0])


def write(step: CacheStep, writes: Sequence[Write[Tensor]]) -> None:
    """Performs the writes of a layer, whose sources are tensors [B, n, G, .]; keys are rotated already."""
    for x, pool, is_ring, _ in writes:
        put(pool, step.token_index(pool.shape[1], is_ring), x)


def put(pool: Tensor, index: Tensor, x: Tensor) -> None:
    """Writes x [B, n, G, D] to the rows `index` [B*n] of a flattened pool [.., .., G, D]."""
    if x.dtype != pool.dtype:
        raise ArgumentError(
            "cache", f"holds {pool.dtype} and the layer computes in {x.dtype}; make it with dtype={x.dtype}"
        )
    pool.flatten(0, 1).index_copy_(0, index, x.detach().flatten(0, 1))


def take(pool: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of a flattened pool [.., .., G, D]: [*index.shape, G, D]."""
    return pool.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *pool.shape[2:])


def after_cached(step: CacheStep, new: Write[Tensor], length: int) -> Tensor:
    """The `length` cached items of every row, then the source [B, n, G, D] of a write that has not been performed:
    [B, length + n, G, D]. Of a ring only the newest items, which are all that the first new item needs."""
    x, pool, is_ring, _ = new
    size = pool.shape[1]
    first = max(0, length - (size - step.cache.slack) + 1) if is_ring else 0

    def places() -> Tensor:
        number = torch.arange(first, length, dtype=torch.int32, device=pool.device)
        return step.places(number.expand(x.shape[0], -1), size, is_ring)

    cached = take(pool, step.shared(("cached", size, is_ring, length), places))
    return torch.cat([cached, x], dim=1)


def decode_backend(backend: Backend) -> str | None:
    """The backend of the decoding operators, each of which replaces all operators of a layer."""
    if isinstance(backend, Mapping):
        return "reference" if "reference" in backend.values() else None
    return backend
