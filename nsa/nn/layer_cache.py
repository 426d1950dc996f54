"""What one attention layer keeps of a sequence, and how a forward pass reads and writes it.

An NSA layer keeps all keys and values of the selected branch in pages, the compressed tokens in pages of the same
numbers, the newest of the window branch in a ring, and in another the raw tokens that the next compressed token needs.
With shared keys and values the pages serve the window too, and the second ring holds keys alone. A dense layer keeps
pages, a window layer a ring.

Legend: B rows of a forward pass, n tokens of a row, m compressed tokens of a row, G key/value heads, K/V head sizes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nsa.errors import ArgumentError
from nsa.nn.cache import KVCache, Pool
from nsa.nn.cache_step import CacheStep
from nsa.nn.rope import rotate
from nsa.ops.operators import Backend
from nsa.ops.step import Heads, Write

if TYPE_CHECKING:
    from nsa.nn.attention import NSAAttention


class LayerCache:
    """The pools of a layer by what they are called in `KVCache.memory`; None has no memory. A dense or a window layer
    has one."""

    def __init__(self, **pools: Pool | None):
        self.pools = pools
        rings = [pool.k.shape[1] for pool in pools.values() if pool and pool.is_ring]
        self.shortest_ring: int | None = min(rings, default=None)

    def parts(self) -> dict[str, list[Tensor]]:
        return {name: [pool.k, pool.v] if pool else [] for name, pool in self.pools.items()}

    def pool(self) -> Pool:
        """Of a layer that has one."""
        (pool,) = self.pools.values()
        assert pool is not None
        return pool

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """Where keys, rotated, and values are kept."""
        return self.pool().writes(keys[0], values[0])


class NSALayerCache(LayerCache):
    def __init__(self, cache: KVCache, layer: "NSAAttention"):
        self.layer, groups, dim_k, dim_v = layer, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v
        self.sel = cache.pool(cache.page_size, groups, dim_k, dim_v)
        self.cmp = cache.pool(cache.page_size // layer.spec.cmp_stride, groups, dim_k, dim_v)
        self.tail = cache.pool(layer.spec.cmp_block, groups, dim_k, 0 if layer.shared_kv else dim_v, is_ring=True)
        self.win = self.sel if layer.shared_kv else cache.pool(layer.spec.window, groups, dim_k, dim_v, is_ring=True)
        super().__init__(sel=self.sel, cmp=self.cmp, win=None if layer.shared_kv else self.win, tail=self.tail)

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """Where keys and values of cmp, sel and win are kept, or of all three in one."""
        k_raw, k_sel, k_win = keys if len(keys) == 3 else [*keys] * 3
        v_raw, v_sel, v_win = values if len(values) == 3 else [*values] * 3
        is_turned = self.layer.compress == "after_rotation"
        writes = self.sel.writes(k_sel, v_sel) + self.tail.writes(k_raw, v_raw, is_rotated=is_turned)
        # With shared values, those of sel are the raw ones too.
        return writes[:-1] if self.layer.shared_kv else writes + self.win.writes(k_win, v_win)

    def write_compressed(self, step: CacheStep, k_cmp: Tensor, v_cmp: Tensor) -> None:
        """Compressed tokens [B, m, G, .] of the pass, keys rotated."""
        index = step.compressed(self.layer.spec).index
        put(self.cmp.k, index, k_cmp)
        put(self.cmp.v, index, v_cmp)

    def compress(self, step: CacheStep) -> None:
        """Compresses the blocks that the pass completes, from the tokens that have been written."""
        if not step.completes:
            return
        layer, new = self.layer, step.compressed(self.layer.spec)
        raw_v = self.sel if layer.shared_kv else self.tail
        k = take(self.tail.k, new.sources(self.tail.k.shape[1], self.tail.is_ring))
        v = take(raw_v.v, new.sources(raw_v.v.shape[1], raw_v.is_ring))
        rows = new.first.shape
        phis = ((layer.phi_k, k), (layer.phi_v, v))
        k_cmp, v_cmp = (phi(x.flatten(0, 1)).view(*rows, *x.shape[3:]) for phi, x in phis)
        if layer.compress == "before_rotation":
            k_cmp = rotate(k_cmp, new.rotary(*layer.rotary))
        self.write_compressed(step, k_cmp, v_cmp)

    def views(self, step: CacheStep) -> tuple[Any, Any, Any]:
        """The pools of cmp, sel and win, as `nsa_decode` takes them."""
        return self.cmp.view(step), self.sel.view(step), self.win.view(step)


def write(step: CacheStep, writes: Sequence[Write[Tensor]]) -> None:
    """Does the writes of a layer whose sources are keys and values [B, n, G, .] themselves, rotated already."""
    for x, pool, is_ring, _ in writes:
        put(pool, step.token_index(pool.shape[1], is_ring), x)


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
