"""A kind of attention that is not part of the package, and the command `nsa` with it: each query reads its own block of
16 tokens and block 0."""

import torch
from torch import nn

from nsa.nn.attention import Attention, register
from nsa.nn.layer_cache import LayerCache, take, write
from nsa.nn.projection import project_heads
from nsa.nn.rope import rotary_tables, rotate
from nsa.ops import NSASpec, selected_attention
from nsa.ops.observe import notify
from nsa.ops.positions import token_positions

BLOCK = 16
SPEC = NSASpec(cmp_block=BLOCK, cmp_stride=BLOCK, sel_block=BLOCK, num_selected=2, num_init=1, num_local=1)


class TwoBlocks(Attention):
    page_multiple = BLOCK
    statistics = frozenset({"selection"})

    def __init__(self, *sizes, qk_norm=False, qkv_bias=False, norm_eps=1e-5, **settings):
        super().__init__(*sizes, **settings)
        heads = {"q": self.num_heads * self.head_dim_k, "k": self.num_kv_heads * self.head_dim_k}
        for name, width in {**heads, "v": self.num_kv_heads * self.head_dim_v}.items():
            setattr(self, name, nn.Linear(self.dim, width, bias=qkv_bias))
        for name in ("q_norm", "k_norm"):
            setattr(self, name, nn.RMSNorm(self.head_dim_k, eps=norm_eps) if qk_norm else nn.Identity())
        self.out = nn.Linear(self.num_heads * self.head_dim_v, self.dim, bias=False)

    @classmethod
    def from_config(cls, config, backend=None):
        return cls(**cls.settings(config, backend))

    def read_tokens(self, x, tables):
        q, keys, values = project_heads(self, x)
        return [rotate(q, tables)], [rotate(k, tables) for k in keys], values

    def attend_whole(self, x, cu_seqlens=None, max_seqlen=None, step=None):
        position = token_positions(x.shape[1], cu_seqlens, x.device)
        (q,), keys, values = self.read_tokens(x, rotary_tables(position, *self.rotary))
        if step is not None:
            write(step, step.layer(self).writes(keys, values))
        own = (position // BLOCK).to(torch.int32)
        chosen = torch.stack([torch.zeros_like(own), own.where(own > 0, -1)], dim=-1)
        indices = chosen.view(1, -1, 1, 2).expand(x.shape[0], -1, self.num_kv_heads, -1).contiguous()
        notify("selected", indices, SPEC, cu_seqlens, 0)
        return self.out(selected_attention(q, keys[0], values[0], indices, SPEC, cu_seqlens=cu_seqlens).flatten(2))

    def build_cache(self, cache):
        return LayerCache(two=cache.pool(cache.page_size, self.num_kv_heads, self.head_dim_k, self.head_dim_v))

    def attend_cached(self, queries, step):
        pool, position = step.layer(self).pool(), step.positions[..., None]
        token = torch.arange(BLOCK, device=position.device)
        own = position // BLOCK * BLOCK + token
        tokens = torch.cat([token.expand_as(own), own.where(own >= BLOCK, -1)], dim=-1)  # [B, n, 2 * BLOCK]
        tokens = tokens.where(tokens <= position, -1)
        k, v = (take(x, step.places(tokens, x.shape[1], is_ring=False)) for x in (pool.k, pool.v))
        q = queries[0].unflatten(2, (self.num_kv_heads, -1))
        score = torch.einsum("bnghd,bntgd->bnght", q, k) * self.head_dim_k**-0.5
        share = score.masked_fill((tokens < 0)[:, :, None, None], -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("bnght,bntgd->bnghd", share, v).flatten(2, 3)

    def forward_flops(self, seq_len):
        return self.flops_per_key * min((seq_len + 1) / 2, 1.5 * BLOCK)


if __name__ == "__main__":
    from nsa.cli.start import main

    register("two_blocks")(TwoBlocks)
    main()
