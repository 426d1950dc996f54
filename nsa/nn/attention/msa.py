"""The MSAAttention layer: grouped attention over blocks that a learned index chooses, and its cache.

Legend: B batch, S tokens, n new tokens, N tokens of a sequence so far, T all tokens of a sequence, C channels, H query
heads, G key/value heads, K/V head sizes, E index head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.attention.dense import DenseAttention
from nsa.nn.attention.gathered import SELECTED, WINDOW, Gathered, GatheredCall, Half, attend_gathered, plan
from nsa.nn.attention.layer import MORE_BLOCKS, SHORT_BLOCKS, Exchange, OperatorCase, check_chunks, head_size
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.layer_cache import LayerCache, decode_backend, write
from nsa.nn.projection import check_input, project
from nsa.nn.rope import Tables, rotary_tables, rotate
from nsa.ops import MSASpec, index_blocks, msa_attention, selected_attention
from nsa.ops.block_index import index_loss_node
from nsa.ops.branches import selected_node, window_node
from nsa.ops.checks import check_borders
from nsa.ops.decoding import msa_decode, paged_attention
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.fused_step import Heads, Write
from nsa.ops.layout import num_read
from nsa.ops.positions import token_positions

if TYPE_CHECKING:
    from nsa.config.architecture import Architecture


class MSAAttention(DenseAttention, has_fused_step=True):
    """`DenseAttention` in which a learned index chooses the blocks that every query and group reads.

    spec           the sizes of blocks and selection (`MSASpec`); None: those of the published model, MSASpec()
    index_dim      size of an index head, of which every key/value head has one query; None: head_dim_k

    qk_norm and qkv_bias apply to the index too. Its heads are rotated in rotary_dim channels, or in all if they have
    fewer.

    Up to spec.dense_tokens tokens the layer is dense attention. The index reads the input detached and learns only from
    its own loss:

        y, kl_sum, queries = layer(x, counted=has_target)
        loss = cross_entropy + weight * kl_sum / (layer.num_kv_heads * queries.clamp(min=1))

    Pass `counted` in every training step: without it the index has no gradient, keeps choosing what it chose at first,
    and DDP fails on its unused parameters. With micro-batches or ranks, divide by the queries of all of them together.

    `is_dense` warms the index up: attention and index loss run over all visible tokens.
    """

    statistics = frozenset({"selection", "mass"})
    is_dense = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int | None = None,
        spec: MSASpec | None = None,
        *,
        index_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        **settings: Any,
    ):
        shared: dict[str, Any] = {"qk_norm": qk_norm, "qkv_bias": qkv_bias, "norm_eps": norm_eps, **settings}
        super().__init__(dim, num_heads, num_kv_heads, head_dim_k, head_dim_v, **shared)
        if not isinstance(spec, MSASpec | None):
            raise ArgumentError("spec", f"must be an MSASpec or None, got {type(spec).__name__}")
        self.spec = spec or MSASpec()
        self.index_dim = head_size("index_dim", head_dim_k if index_dim is None else index_dim)
        self.page_multiple = self.spec.block
        self.warmup_steps = 0
        self.index_q = nn.Linear(dim, num_kv_heads * self.index_dim, bias=qkv_bias)
        self.index_k = nn.Linear(dim, self.index_dim, bias=qkv_bias)
        self.index_q_norm = nn.RMSNorm(self.index_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.index_k_norm = nn.RMSNorm(self.index_dim, eps=norm_eps) if qk_norm else nn.Identity()

    @classmethod
    def from_config(cls, config: Architecture, backend: Backend = None) -> Self:
        layer = cls(spec=config.msa.spec(), index_dim=config.msa.index_dim, **cls.settings(config, backend))
        layer.warmup_steps = config.msa.warmup_steps
        return layer

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        cache: KVCache | CacheStep | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        counted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """As `Attention.forward`. With `counted` [B, S] bool, the tokens that have a target, the result is the output,
        the index loss summed over groups and the counted queries that choose, and the number of these queries."""
        if counted is None:
            return super().forward(x, cache=cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if cache is not None:
            raise ArgumentError("counted", "the index loss needs whole sequences; pass either counted or cache")
        check_input(x, self.dim, self.q)
        check_borders(cu_seqlens, x)
        if self.context is not None:
            check_chunks(x)
            return self._attend_divided(x, self.context, cu_seqlens, counted)
        tables = rotary_tables(token_positions(x.shape[1], cu_seqlens, x.device), *self.rotary)
        q, (k,), (v,) = self.projections(x, tables)
        index_q, index_k = self.project_index(x, tables)
        o_BSHV, kl_sum, queries = msa_attention(
            q, k, v, index_q, index_k, self.spec, counted=counted, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            is_dense=self.is_dense, backend=self.backend,
        )  # fmt: skip
        return self.out(o_BSHV.flatten(2)), kl_sum, queries

    def attend_whole(
        self, x_BSC: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, step: CacheStep | None = None
    ) -> Tensor:
        tables = rotary_tables(token_positions(x_BSC.shape[1], cu_seqlens, x_BSC.device), *self.rotary)
        q, (k,), (v,) = self.projections(x_BSC, tables)
        index = None
        if step is not None or not self._reads_all(x_BSC.shape[1], max_seqlen):
            index = self.project_index(x_BSC, tables)
            if step is not None:
                write(step, step.layer(self).writes([k, index[1].unsqueeze(2)], [v]))
        out_BSC: Tensor = self.out(self._attend(q, k, v, index, cu_seqlens, max_seqlen).flatten(2))
        return out_BSC

    def _reads_all(self, length: int, max_seqlen: int | None) -> bool:
        """Whether no query of such sequences chooses blocks."""
        longest = length if max_seqlen is None else min(length, max_seqlen)
        return self.is_dense or longest <= self.spec.dense_tokens

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention of whole sequences, or of the last tokens of the keys' sequences: [B, S, H, V]. `index`, the result
        of `project_index`, may be None if no query chooses blocks."""
        if index is None or self._reads_all(k.shape[1], max_seqlen):
            return self.attend(q, k, v, cu_seqlens, max_seqlen)
        settings: dict[str, Any] = {"cu_seqlens": cu_seqlens, "q_offset": k.shape[1] - q.shape[1]}
        indices = index_blocks(*index, self.spec, backend=backend_of("index", self.backend), **settings)
        return selected_attention(q, k, v, indices, self.spec, backend=backend_of("sel", self.backend), **settings)

    def project_index(self, x_BSC: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Index queries [B, S, G, E] and index keys [B, S, E], rotated by `tables`. Their gradient ends here."""
        q, k = project(x_BSC.detach(), [self.index_q, self.index_k])
        index_q = self.index_q_norm(q.unflatten(-1, (self.num_kv_heads, self.index_dim))).to(q.dtype)
        index_k = self.index_k_norm(k.unflatten(-1, (1, self.index_dim))).to(k.dtype)
        cos, sin = (table[..., : self.index_dim // 2] for table in tables)  # an index head may be the smaller one
        return rotate(index_q, (cos, sin)), rotate(index_k, (cos, sin)).squeeze(2)

    def build_cache(self, cache: KVCache) -> MSALayerCache:
        return MSALayerCache(cache, self)

    def read_tokens(self, x_BnC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        q_BnHK, keys, values = self.projections(x_BnC, tables)
        index_q_BnGE, index_k_BnE = self.project_index(x_BnC, tables)
        return [q_BnHK, index_q_BnGE], [*keys, index_k_BnE.unsqueeze(2)], values

    def attend_cached(self, queries: Sequence[Tensor], step: CacheStep) -> Tensor:
        q_BnHK, index_q_BnGE = queries
        kept, backend = step.layer(self), decode_backend(self.backend)
        kv = kept.msa.view(step)
        if self.is_dense:
            return paged_attention(q_BnHK, kv, step.positions, backend=backend)
        return msa_decode(q_BnHK, index_q_BnGE, kv, kept.index.k, step.positions, self.spec, backend=backend)

    def attend_chunk(self, queries: Sequence[Tensor], cached: Sequence[Tensor], step: CacheStep) -> Tensor:
        q_BnHK, index_q_BnGE = queries
        k_BNGK, v_BNGV, index_k_BN1E = cached
        return self._attend(q_BnHK, k_BNGK, v_BNGV, (index_q_BnGE, index_k_BN1E.squeeze(2)))

    def attend_context(self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
        return self._attend_divided(x_BSC, context, cu_seqlens, None)[0]

    def _attend_divided(
        self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None, counted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, index loss and number of queries of this rank's tokens; the loss is 0 without `counted`.

        The index keys of all groups are small: they are gathered at once. Keys and values are gathered one key/value
        head after the other, and the index loss of a head is computed while its keys are there."""
        spec, here = self.spec, plan(x_BSC, cu_seqlens, context)
        length = context.size * x_BSC.shape[1]
        tables = rotary_tables(here.position, *self.rotary)
        by = {name: backend_of(name, self.backend) for name in ("index", "index_loss", "sel", "win")}
        chooses = length > spec.dense_tokens
        indices: Tensor | None = None
        if chooses:
            index_q, index_k = self.project_index(x_BSC, tables)
            index_k_T = _gather(index_k.detach(), here.chunk_place, context)
        q, (k,), (v,) = self.projections(x_BSC, tables)
        if chooses and not self.is_dense:
            call = GatheredCall(SELECTED, {"block": spec.block}, context, here, by["sel"])
            gathered = Gathered(k, v, call)  # while blocks are chosen
            chosen = []
            for half in here.halves:
                options: dict[str, Any] = {"cu_seqlens": half.borders, "q_offset": half.first, "backend": by["index"]}
                chosen.append(index_blocks(index_q[:, half.rows], index_k_T[:, : half.stop], spec, **options))
            indices = torch.cat(chosen, dim=1)
        else:
            call = GatheredCall(WINDOW, {"window": length}, context, here, by["win"])
            gathered = Gathered(k, v, call)
        if chooses and counted is not None:
            counted = counted & (here.position >= spec.dense_tokens)
            has_grads = torch.is_grad_enabled() and (index_q.requires_grad or index_k.requires_grad)
            losses = _IndexLosses(index_q, index_k_T, counted, indices, spec.block, has_grads, by["index_loss"])
            o_BSHV, _ = attend_gathered(gathered, q, k, v, indices, attended=losses.add)
            kl: Tensor = _IndexLoss.apply(losses, call, index_q, index_k)  # type: ignore[no-untyped-call]
            queries = counted.sum()
        else:
            o_BSHV, _ = attend_gathered(gathered, q, k, v, indices)
            kl = torch.zeros((), dtype=torch.float32, device=q.device)
            queries = kl.to(torch.int64)
        return self.out(o_BSHV.flatten(2)), kl, queries

    def index_parameters(self) -> list[nn.Parameter]:
        parts = (self.index_q, self.index_k, self.index_q_norm, self.index_k_norm)
        return [parameter for part in parts for parameter in part.parameters()]

    @property
    def is_warming_up(self) -> bool:
        return self.is_dense

    def prepare(self, seq_len: int) -> None:
        """Freezes the index if sequences are so short that no query chooses."""
        if seq_len <= self.spec.dense_tokens:
            self.statistics = frozenset()
            for parameter in self.index_parameters():
                parameter.requires_grad_(False)

    def start_step(self, step: int) -> str | None:
        was_dense, self.is_dense = self.is_dense, self.has_index_loss and step <= self.warmup_steps
        if self.is_dense:
            return None if was_dense else f"dense attention until step {self.warmup_steps}, while the index warms up"
        # A run that resumes at the end of the warm-up never was dense in this process.
        ends = self.has_index_loss and 1 < step == self.warmup_steps + 1
        return f"sparse attention from step {step} on" if was_dense or ends else None

    def forward_flops(self, seq_len: int) -> float:
        return self.flops_per_key * mean_keys_read(self.spec, seq_len)

    def selection_flops(self, seq_len: int) -> float:
        return 0.0 if seq_len <= self.spec.dense_tokens else self.num_kv_heads * self.index_dim * (seq_len + 1.0)

    def saved_operators(self) -> list[Any]:
        """Also those of dense attention, in the warm-up and for short sequences."""
        ops = torch.ops.nsa
        sparse = [ops.selected_attention.default, ops.index_loss.default]
        return [*self.fixed_operators(), *super().saved_operators(), *sparse]

    def fixed_operators(self) -> list[Any]:
        return [torch.ops.nsa.index_blocks.default]

    def operator_cases(
        self, seq_len: int, dtype: torch.dtype, device: torch.device, *, packed: bool, is_short: bool
    ) -> list[OperatorCase]:
        spec, groups = self.spec, self.num_kv_heads
        blocks = SHORT_BLOCKS if is_short else spec.num_selected + MORE_BLOCKS
        tokens = min(blocks * spec.block, max(seq_len, spec.block))
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(1, tokens, *shape, generator=draw).to(device, dtype)

        q, k = random(self.num_heads, self.head_dim_k), random(groups, self.head_dim_k)
        v, index_q, index_k = random(groups, self.head_dim_v), random(groups, self.index_dim), random(self.index_dim)
        borders = torch.tensor([0, tokens // 3 + 1, tokens], dtype=torch.int32, device=device) if packed else None
        sizes: dict[str, Any] = {"spec": spec, "cu_seqlens": borders}
        counted = torch.ones(1, tokens, dtype=torch.bool, device=device)  # also queries that do not choose
        indices = index_blocks(index_q.double(), index_k.double(), backend="reference", **sizes)
        _, lse = selected_node(q.double(), k.double(), v.double(), indices, spec.block, borders, 0, "reference")

        def index_loss(index_q: Tensor, index_k: Tensor, *, backend: str | None) -> Tensor:
            own = index_q.dtype
            fixed = (q.to(own), k.to(own), lse.to(torch.float64 if own == torch.float64 else torch.float32))
            settings = (indices, counted, spec.block, borders, 0, torch.is_grad_enabled(), backend)
            kl: Tensor = index_loss_node(index_q, index_k, *fixed, *settings)[0]
            return kl

        # Dense attention, while the index warms up.
        win = partial(window_node, window=tokens, cu_seqlens=borders, q_offset=0)
        qkv, of_index = {"q": q, "k": k, "v": v}, {"index_q": index_q, "index_k": index_k}
        return [
            OperatorCase("index", of_index, partial(index_blocks, **sizes), (index_q, index_q), selects=True),
            OperatorCase("index_loss", of_index, index_loss, (q, index_q)),
            OperatorCase("sel", qkv, partial(selected_attention, indices=indices, **sizes), (q, v)),
            OperatorCase("win", qkv, win, (q, v)),
        ]

    def notes(self) -> list[str]:
        if self.has_index_loss:
            return []
        if not self.statistics:
            return [f"index   not trained: no sequence exceeds {self.spec.dense_tokens} tokens"]
        return ["index   not trained where train.freeze names it"]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, index_dim={self.index_dim}, spec={self.spec}"


class MSALayerCache(LayerCache):
    """Keys and values of all tokens in pages, and the index keys, one head for all groups, in pages of the same
    numbers."""

    def __init__(self, cache: KVCache, layer: MSAAttention):
        self.msa = cache.pool(cache.page_size, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v)
        self.index = cache.pool(cache.page_size, 1, layer.index_dim, 0)
        super().__init__(msa=self.msa, index=self.index)

    def writes(self, keys: Sequence[Heads], values: Sequence[Heads]) -> list[Write[Heads]]:
        """The writes of keys, values and index keys; `keys` are both kinds of keys."""
        k, index_k = keys
        return [*self.msa.writes(k, values[0]), Write(index_k, self.index.k, is_ring=False, is_rotated=True)]


def _gather(index_k: Tensor, chunk_place: Tensor, context: Exchange) -> Tensor:
    """[B, S, E] of this rank -> [B, T, E] of the sequence."""
    gathered = context.gather(index_k.transpose(0, 1)).wait()
    whole: Tensor = gathered.unflatten(0, (2 * context.size, -1))[chunk_place].flatten(0, 1)
    return whole.transpose(0, 1)


class _IndexLosses:
    """The index loss of this rank's queries with its gradients, summed over chunks and heads."""

    def __init__(
        self,
        index_q: Tensor,
        index_k_T: Tensor,
        counted: Tensor,
        indices: Tensor | None,
        block: int,
        has_grads: bool,
        backend: str | None,
    ):
        self.index_q, self.index_k_T, self.counted, self.indices = index_q.detach(), index_k_T, counted, indices
        self.block, self.has_grads, self.backend = block, has_grads, backend
        sums = torch.float64 if index_q.dtype == torch.float64 else torch.float32
        self.kl = index_q.new_zeros((), dtype=sums)
        self.d_index_q = torch.zeros_like(self.index_q)
        self.d_index_k_T = torch.zeros_like(index_k_T, dtype=sums)

    def add(self, half: Half, part: slice, q: Tensor, k: Tensor, lse: Tensor) -> None:
        """Adds the loss of the queries of a chunk in the key/value heads `part`, whose attention was just computed."""
        rows, stop = half.rows, half.stop
        indices = None if self.indices is None else self.indices[:, rows, part]
        kl, d_index_q, d_index_k = index_loss_node(
            self.index_q[:, rows, part], self.index_k_T[:, :stop], q, k, lse, indices, self.counted[:, rows],
            self.block, half.borders, half.first, self.has_grads, self.backend,
        )  # fmt: skip
        self.kl = self.kl + kl
        if self.has_grads:
            self.d_index_q[:, rows, part] = d_index_q
            self.d_index_k_T[:, :stop] += d_index_k


class _IndexLoss(torch.autograd.Function):
    """The sum of `_IndexLosses` with its gradient; that of the index keys is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, losses: _IndexLosses, call: GatheredCall, index_q: Tensor, index_k: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(losses.d_index_q, losses.d_index_k_T)
        ctx.local = index_k.shape[1]
        return losses.kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_index_q, d_index_k_T = ctx.saved_tensors
        sent = ctx.call.scatter((d_index_k_T * grads[0]).transpose(0, 1), ctx.local)
        d_index_k = ctx.call.context.reduce_scatter(sent).wait().transpose(0, 1).to(d_index_q.dtype)
        return None, None, d_index_q * grads[0], d_index_k


@lru_cache
def mean_keys_read(spec: MSASpec, seq_len: int) -> float:
    """The mean number of keys that a query reads."""
    return int(num_read(torch.arange(seq_len), spec).sum()) / seq_len
