"""The tensors that an MSA layer keeps in a cache: keys and values of all tokens in pages, and the index keys, one head
for all groups, in pages of the same numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsa.nn.cache import KVCache
from nsa.nn.layer_cache import LayerCache
from nsa.ops.fused_step import Heads, Write

if TYPE_CHECKING:
    from nsa.nn.attention.msa import MSAAttention


class MSALayerCache(LayerCache):
    def __init__(self, cache: KVCache, layer: "MSAAttention"):
        self.msa = cache.pool(cache.page_size, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v)
        self.index = cache.pool(cache.page_size, 1, layer.index_dim, 0)
        super().__init__(msa=self.msa, index=self.index)

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """The writes of keys, values and index keys; `keys` are both kinds of keys."""
        k, index_k = keys
        return [*self.msa.writes(k, values[0]), Write(index_k, self.index.k, is_ring=False, is_rotated=True)]
