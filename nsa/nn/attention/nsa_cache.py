"""The tensors that an NSA layer keeps in a cache.

All keys and values of the selected branch are in pages, the compressed tokens in pages of the same numbers, the newest
keys and values of the window branch in a ring, and the raw tokens that the next compressed token needs in another ring.
With shared keys and values the window also reads the pages, and the second ring holds only keys.

Legend: B rows of a forward pass, m compressed tokens of a row, G key/value heads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.layer_cache import LayerCache, after_cached, put, take
from nsa.nn.rope import rotate
from nsa.ops.fused_step import Heads, Write
from nsa.ops.layout import num_compressed

if TYPE_CHECKING:
    from nsa.nn.attention.nsa import NSAAttention


class NSALayerCache(LayerCache):
    def __init__(self, cache: KVCache, layer: "NSAAttention"):
        self.layer, groups, dim_k, dim_v = layer, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v
        self.sel = cache.pool(cache.page_size, groups, dim_k, dim_v)
        self.cmp = cache.pool(cache.page_size // layer.spec.cmp_stride, groups, dim_k, dim_v)
        self.tail = cache.pool(layer.spec.cmp_block, groups, dim_k, 0 if layer.shared_kv else dim_v, is_ring=True)
        self.win = self.sel if layer.shared_kv else cache.pool(layer.spec.window, groups, dim_k, dim_v, is_ring=True)
        super().__init__(sel=self.sel, cmp=self.cmp, win=None if layer.shared_kv else self.win, tail=self.tail)

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """The writes of keys and values of cmp, sel and win, or of one shared pair."""
        k_raw, k_sel, k_win = keys if len(keys) == 3 else [*keys] * 3
        v_raw, v_sel, v_win = values if len(values) == 3 else [*values] * 3
        is_turned = self.layer.compress == "after_rotation"
        writes = self.sel.writes(k_sel, v_sel) + self.tail.writes(k_raw, v_raw, is_rotated=is_turned)
        # Shared values are not rotated: those of sel are also the raw values.
        return writes[:-1] if self.layer.shared_kv else writes + self.win.writes(k_win, v_win)

    def write_compressed(self, step: CacheStep, k_cmp: Tensor, v_cmp: Tensor) -> None:
        """Writes the compressed tokens [B, m, G, .] of the pass; keys are rotated."""
        index = step.compressed(self.layer.spec).index
        put(self.cmp.k, index, k_cmp)
        put(self.cmp.v, index, v_cmp)

    def compress(self, step: CacheStep) -> None:
        """Compresses the blocks that the pass completes, from tokens already in the cache."""
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

    def branches(self, cached: Sequence[Tensor], step: CacheStep) -> tuple[Tensor, ...]:
        """Keys and values of cmp, sel and win for a chunk; `cached` as for `attend_chunk`. Compresses the blocks that
        the chunk completes."""
        layer, start = self.layer, step.start
        assert start is not None
        k_sel, v_sel, k_raw, *others = cached
        v_raw, k_win, v_win = others or (v_sel[:, -k_raw.shape[1] :], k_sel, v_sel)
        known = num_compressed(start, layer.spec)
        # The raw tokens start with the last cmp_block - 1 earlier ones; the first block that is not complete, later.
        first = known * layer.spec.cmp_stride - start - step.positions.shape[1] + k_raw.shape[1]
        k_new, v_new = layer.phi_k(k_raw[:, first:]), layer.phi_v(v_raw[:, first:])
        if layer.compress == "before_rotation":
            k_new = rotate(k_new, step.compressed(layer.spec).rotary(*layer.rotary))
        k_cmp, v_cmp = (after_cached(step, each, known) for each in self.cmp.writes(k_new, v_new))
        self.write_compressed(step, k_new, v_new)
        return k_cmp, v_cmp, k_sel, v_sel, k_win, v_win

    def views(self, step: CacheStep) -> tuple[Any, Any, Any]:
        """The pools of cmp, sel and win, as `nsa_decode` takes them."""
        return self.cmp.view(step), self.sel.view(step), self.win.view(step)
