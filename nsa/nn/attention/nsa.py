"""The NSAAttention layer: projections, rotary positions, compression, the three branches, gates, and its cache.

Legend: B batch, S tokens, n new tokens, C channels, H query heads, G key/value heads, N compressed tokens, m compressed
tokens that new tokens complete, K/V head sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.attention import nsa_context
from nsa.nn.attention.layer import MORE_BLOCKS, SHORT_BLOCKS, Attention, Exchange, OperatorCase
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.compressor import MeanCompressor, MeanMLPCompressor, MLPCompressor
from nsa.nn.gate import BranchGate
from nsa.nn.layer_cache import LayerCache, after_cached, decode_backend, put, take, write
from nsa.nn.projection import project_heads
from nsa.nn.rope import RopeScaling, Tables, rotary_tables, rotate
from nsa.ops import (
    NSASpec,
    compress_contract,
    compress_mean,
    compressed_attention,
    nsa_attention,
    nsa_decode,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.fused_step import Heads, Write
from nsa.ops.layout import num_compressed, num_read, visible_compressed
from nsa.ops.mixing import mix_node
from nsa.ops.positions import positions

if TYPE_CHECKING:
    from nsa.config.architecture import Architecture

Branch = Literal["cmp", "sel", "win"]
BRANCHES: tuple[Branch, ...] = ("cmp", "sel", "win")
CHOICES = {
    "phi": ("mean", "mlp", "mean_mlp"),
    "compress": ("before_rotation", "after_rotation"),
    "gate": ("sigmoid", "softmax"),
    "force_branch": (*BRANCHES, None),
}
# Initial gates of a converted layer: weights of less than 1 % for cmp, 88 % for sel and 12 % for win. The selected
# branch equals dense attention up to num_selected * sel_block tokens, and is close to it for longer sequences.
DENSE_GATES = {"sigmoid": (-5.0, 2.0, -2.0), "softmax": (-5.0, 1.0, -1.0)}


class NSAAttention(Attention, has_fused_step=True):
    """Causal Native Sparse Attention on [B, S, dim], a drop-in replacement for a decoder's self-attention.

    dim            width of input and output; need not equal num_heads * head size
    num_heads      query heads, a multiple of num_kv_heads
    num_kv_heads   key/value heads; each is shared by num_heads / num_kv_heads query heads
    head_dim_k     size of a query and key head, a multiple of 16 from 16 to 256
    head_dim_v     size of a value head, likewise; None: head_dim_k
    spec           the sizes of blocks, selection and window (`NSASpec`); None: those of the paper, NSASpec()
    phi            "mean", "mlp", or "mean_mlp" (their sum, where the MLP starts at zero): how a block becomes a
                   compressed token
    compress       "before_rotation": keys are compressed, then rotated by the position of the block's first token.
                   "after_rotation": keys are rotated by their own positions, then compressed
    gate           "sigmoid" or "softmax"
    shared_kv      one key/value pair for the three branches instead of three
    force_branch   the output is only this branch; unused parameters are frozen
    rotary_dim     rotary positions rotate the first `rotary_dim` channels of a query and key head, an even number;
                   the others are unchanged. None: all
    rope_base      base of the rotary frequencies, which are base**(-2i / rotary_dim) for channel pair i; larger for
                   longer sequences
    rope_scaling   `nsa.nn.rope.RopeScaling` of the rotary frequencies, or None
    qk_norm        RMSNorm on the queries and keys of every head, before compression and rotary positions
    qkv_bias       the projections of queries, keys and values have a bias
    norm_eps       epsilon of these norms
    backend        passed to nsa.ops: None for the fastest that can run; a name, or names by operator

    Projections and norms of keys and values are lists in the order cmp, sel, win: k.0 and v.0 are the compressed
    branch's, k.1 and v.1 the selected branch's, k.2 and v.2 the window's. With shared_kv there are only k.0 and v.0.
    The layer keeps no state between calls.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int | None = None,
        spec: NSASpec | None = None,
        *,
        phi: Literal["mean", "mlp", "mean_mlp"] = "mean",
        compress: Literal["before_rotation", "after_rotation"] = "before_rotation",
        gate: Literal["sigmoid", "softmax"] = "sigmoid",
        shared_kv: bool = False,
        force_branch: Branch | None = None,
        rotary_dim: int | None = None,
        rope_base: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: Backend = None,
    ):
        rotary: dict[str, Any] = {"rotary_dim": rotary_dim, "rope_base": rope_base, "rope_scaling": rope_scaling}
        super().__init__(dim, num_heads, num_kv_heads, head_dim_k, head_dim_v, **rotary, backend=backend)
        if not isinstance(spec, NSASpec | None):
            raise ArgumentError("spec", f"must be an NSASpec or None, got {type(spec).__name__}")
        _check_choices(phi=phi, compress=compress, gate=gate, force_branch=force_branch)
        self.spec = spec or NSASpec()
        self.shared_kv, self.force_branch, self.compress = shared_kv, force_branch, compress
        self.page_multiple = self.spec.sel_block
        # A forced branch runs only some of the operators that report statistics.
        reported = {None: ("gates", "selection"), "sel": ("selection",)}.get(force_branch, ())
        self.statistics = frozenset(reported)

        pairs = 1 if shared_kv else len(BRANCHES)
        self.q = nn.Linear(dim, num_heads * self.head_dim_k, bias=qkv_bias)
        self.k = nn.ModuleList(nn.Linear(dim, num_kv_heads * self.head_dim_k, bias=qkv_bias) for _ in range(pairs))
        self.v = nn.ModuleList(nn.Linear(dim, num_kv_heads * self.head_dim_v, bias=qkv_bias) for _ in range(pairs))
        self.q_norm = nn.RMSNorm(self.head_dim_k, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.ModuleList(
            nn.RMSNorm(self.head_dim_k, eps=norm_eps) if qk_norm else nn.Identity() for _ in range(pairs)
        )
        self.phi_k = self._build_phi(phi, self.head_dim_k)
        self.phi_v = self._build_phi(phi, self.head_dim_v)
        self.gate = BranchGate(dim, num_heads, gate)
        self.out = nn.Linear(num_heads * self.head_dim_v, dim, bias=False)
        self._freeze_unused()

    @classmethod
    def from_config(cls, config: Architecture, backend: Backend = None) -> Self:
        own = {name: getattr(config.nsa, name) for name in ("phi", "compress", "gate", "shared_kv", "force_branch")}
        return cls(spec=config.nsa.spec(), **own, **cls.settings(config, backend))

    def _build_phi(self, phi: str, head_dim: int) -> MeanCompressor | MLPCompressor:
        backend = backend_of("phi", self.backend)
        if phi == "mean":
            return MeanCompressor(self.spec, backend)
        return (MLPCompressor if phi == "mlp" else MeanMLPCompressor)(self.spec, head_dim, backend)

    def build_cache(self, cache: KVCache) -> NSALayerCache:
        """The tensors that this layer keeps in a `KVCache`."""
        return NSALayerCache(cache, self)

    def attend_whole(
        self, x_BSC: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, step: CacheStep | None = None
    ) -> Tensor:
        position_S, position_N = positions(x_BSC.shape[1], self.spec, cu_seqlens, x_BSC.device)
        q_BSHK, keys, values = self.projections(x_BSC, rotary_tables(position_S, *self.rotary))
        k_cmp_BNGK, v_cmp_BNGV = self.phi_k(keys[0], cu_seqlens), self.phi_v(values[0], cu_seqlens)
        if self.compress == "before_rotation":  # rotate the compressed keys
            k_cmp_BNGK = rotate(k_cmp_BNGK, rotary_tables(position_N, *self.rotary))
        if step is not None:
            kept: NSALayerCache = step.layer(self)
            write(step, kept.writes(keys, values))
            kept.write_compressed(step, k_cmp_BNGK, v_cmp_BNGV)
        (_, k_sel, k_win), (_, v_sel, v_win) = keys, values
        arguments = (q_BSHK, k_cmp_BNGK, v_cmp_BNGV, k_sel, v_sel, k_win, v_win)
        gates_BSH3 = self.gate(x_BSC) if self.force_branch is None else None
        o_BSHV = self._attend(arguments, gates_BSH3, cu_seqlens)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def read_tokens(self, x_BnC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        q_BnHK, keys, values = self.projections(x_BnC, tables)
        return [q_BnHK, self.gate(x_BnC)], keys, values

    def attend_cached(self, queries: Sequence[Tensor], step: CacheStep) -> Tensor:
        """Compresses the blocks that new tokens complete, then attends."""
        q_BnHK, gates_BnH3 = queries
        kept: NSALayerCache = step.layer(self)
        kept.compress(step)
        if self.force_branch is not None:
            gates_BnH3 = torch.zeros_like(gates_BnH3)
            gates_BnH3[..., BRANCHES.index(self.force_branch)] = 1.0
        backend = decode_backend(self.backend)
        return nsa_decode(q_BnHK, gates_BnH3, *kept.views(step), step.positions, self.spec, backend=backend)

    def attend_chunk(self, queries: Sequence[Tensor], cached: Sequence[Tensor], step: CacheStep) -> Tensor:
        q_BnHK, gates_BnH3 = queries
        kept: NSALayerCache = step.layer(self)
        assert step.start is not None
        return self._attend((q_BnHK, *kept.branches(cached, step)), gates_BnH3, q_offset=step.start)

    def completes(self, start: int, stop: int) -> bool:
        """Whether a compressed block ends among these tokens."""
        return num_compressed(stop, self.spec) > num_compressed(start, self.spec)

    def attend_context(self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
        return nsa_context.attend_context(self, x_BSC, context, cu_seqlens)

    def forward_flops(self, seq_len: int) -> float:
        return self.flops_per_key * sum(mean_keys_read(self.spec, seq_len))

    def selection_flops(self, seq_len: int) -> float:
        return 2.0 * self.num_heads * self.head_dim_k * mean_keys_read(self.spec, seq_len)[0]

    def saved_operators(self) -> list[Any]:
        ops = torch.ops.nsa
        attention = (ops.compressed_attention, ops.selected_attention, ops.window_attention)
        return [*self.fixed_operators(), *(operator.default for operator in attention)]

    def fixed_operators(self) -> list[Any]:
        return [torch.ops.nsa.select_blocks.default]

    def operator_cases(
        self, seq_len: int, dtype: torch.dtype, device: torch.device, *, packed: bool, is_short: bool
    ) -> list[OperatorCase]:
        spec = self.spec
        # Two compressed tokens in each document at least: a query that sees only one has no gradient to compare.
        least = 3 * (spec.cmp_block + spec.cmp_stride)
        blocks = SHORT_BLOCKS if is_short else spec.num_selected + MORE_BLOCKS
        tokens = max(least, min(blocks * spec.sel_block, max(seq_len, spec.sel_block)))
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        q = random(1, tokens, self.num_heads, self.head_dim_k)
        k, v = (random(1, tokens, self.num_kv_heads, size) for size in (self.head_dim_k, self.head_dim_v))
        weight = random(spec.cmp_block, self.head_dim_k, self.head_dim_k) / spec.cmp_block
        mixed = {name: random(1, tokens, self.num_heads, self.head_dim_v) for name in ("cmp", "sel", "win")}
        mixed["gates"] = random(1, tokens, self.num_heads, 3).sigmoid()
        borders = torch.tensor([0, tokens // 3 + 1, tokens], dtype=torch.int32, device=device) if packed else None
        sizes: dict[str, Any] = {"spec": spec, "cu_seqlens": borders}
        with torch.no_grad():
            exact = {**sizes, "backend": "reference"}
            k_cmp, v_cmp = (compress_mean(x.double(), **exact).to(dtype) for x in (k, v))
            _, lse = compressed_attention(q.double(), k_cmp.double(), v_cmp.double(), **exact)
            indices = select_blocks(q.double(), k_cmp.double(), lse, **exact)

        def select(q: Tensor, k: Tensor, *, backend: str | None) -> Tensor:
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            return select_blocks(q, k, lse.to(wide), backend=backend, **sizes)

        # "mean_mlp" is the sum of both, and the mean is the part with a kernel of its own.
        contracts = type(self.phi_k) is MLPCompressor
        phi = partial(compress_contract if contracts else compress_mean, **sizes)
        qkv = {"q": q, "k": k, "v": v}
        return [
            OperatorCase("select", {"q": q, "k": k_cmp}, select, (q, k_cmp), selects=True),
            OperatorCase("phi", {"x": k, "weight": weight} if contracts else {"x": k}, phi, (q, v)),
            OperatorCase("cmp", {"q": q, "k": k_cmp, "v": v_cmp}, partial(compressed_attention, **sizes), (q, v)),
            OperatorCase("sel", qkv, partial(selected_attention, indices=indices, **sizes), (q, v)),
            OperatorCase("win", qkv, partial(window_attention, **sizes), (q, v)),
            OperatorCase("mix", mixed, mix_node, (q, v)),
        ]

    def dense_targets(self, name: str) -> list[str]:
        part, _, rest = name.partition(".")
        return [f"{part}.{pair}.{rest}" for pair in range(len(self.k))] if part in ("k", "v", "k_norm") else [name]

    def start_from_dense(self) -> None:
        with torch.no_grad():
            self.gate.out.bias.view(-1, 3)[:] = torch.tensor(DENSE_GATES[self.gate.kind])

    @classmethod
    def parts(cls, config: Architecture) -> Mapping[str, dict[str, Any]]:
        alone = BRANCHES if config.nsa.force_branch is None else ()
        return {branch: {"nsa.force_branch": branch} for branch in alone}

    def notes(self) -> list[str]:
        return [f"branch  only {self.force_branch}"] if self.force_branch else []

    def extra_repr(self) -> str:
        sizes = super().extra_repr()
        sizes += ", shared_kv=True" if self.shared_kv else ""
        sizes += f", compress={self.compress!r}" if self.compress != "before_rotation" else ""
        sizes += f", force_branch={self.force_branch!r}" if self.force_branch else ""
        return f"{sizes}, spec={self.spec}"

    def projections(self, x_BSC: Tensor, tables: Tables) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Queries [B, S, H, .]; keys and values [B, S, G, .] for cmp, sel, win. Queries and keys are rotated by
        `tables` from `rotary_tables`, except keys that are compressed first."""
        q_BSHK, raw, values = project_heads(self, x_BSC)
        k_cmp = rotate(raw[0], tables) if self.compress == "after_rotation" else raw[0]
        others = [rotate(k, tables) for k in (raw if self.shared_kv else raw[1:])]
        if self.shared_kv:
            others, values = others * 2, values * 3
        return rotate(q_BSHK, tables), [k_cmp, *others], values

    def _attend(
        self, arguments: tuple[Tensor, ...], gates: Tensor | None, cu_seqlens: Tensor | None = None, q_offset: int = 0
    ) -> Tensor:
        """The branches mixed by gates, or the forced branch; `arguments` are those of `nsa_attention` before the
        gates."""
        spec, (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win) = self.spec, arguments
        where: dict[str, Any] = {"cu_seqlens": cu_seqlens, "q_offset": q_offset}
        if gates is not None and self.force_branch is None:
            return nsa_attention(
                q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec, **where, backend=self.backend
            )
        by = {operator: backend_of(operator, self.backend) for operator in ("cmp", "select", "sel", "win")}
        if self.force_branch == "win":
            near = k_win.shape[1] - q.shape[1]  # the keys may start later than the sequence
            return window_attention(q, k_win, v_win, spec, cu_seqlens=cu_seqlens, q_offset=near, backend=by["win"])
        if self.force_branch == "cmp":
            return compressed_attention(q, k_cmp, v_cmp, spec, **where, backend=by["cmp"])[0]
        with torch.no_grad():  # only selection needs the log-sum-exp, and it has no gradient
            _, lse = compressed_attention(q, k_cmp, v_cmp, spec, **where, backend=by["cmp"])
            indices = select_blocks(q, k_cmp, lse, spec, **where, backend=by["select"])
        return selected_attention(q, k_sel, v_sel, indices, spec, **where, backend=by["sel"])

    def _freeze_unused(self) -> None:
        """Freezes the parameters that a forced branch does not use: the gate, and compressors and projections of the
        other branches."""
        if self.force_branch is None:
            return
        unused: list[nn.Module] = [self.gate]
        if self.force_branch != "cmp":
            unused += [self.phi_k, self.phi_v]
        if not self.shared_kv:
            others = [i for i, branch in enumerate(BRANCHES) if branch != self.force_branch]
            unused += [part[i] for part in (self.k, self.v, self.k_norm) for i in others]
        for module in unused:
            module.requires_grad_(False)


class NSALayerCache(LayerCache):
    """The tensors that an NSA layer keeps in a cache.

    All keys and values of the selected branch are in pages, the compressed tokens in pages of the same numbers, the
    newest keys and values of the window branch in a ring, and the raw tokens that the next compressed token needs in
    another ring. With shared keys and values the window also reads the pages, and the second ring holds only keys.
    """

    def __init__(self, cache: KVCache, layer: NSAAttention):
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


@lru_cache
def mean_keys_read(spec: NSASpec, seq_len: int) -> tuple[float, float, float]:
    """The mean number of keys that a query reads in cmp, sel and win."""
    t = torch.arange(seq_len)
    cmp_keys = int(visible_compressed(t, spec).sum())
    sel_keys = int(num_read(t, spec).sum())
    win_keys = int((t + 1).clamp(max=spec.window).sum())
    return cmp_keys / seq_len, sel_keys / seq_len, win_keys / seq_len


def _check_choices(**given: str | None) -> None:
    for name, choice in given.items():
        if choice not in CHOICES[name]:
            allowed = ", ".join(repr(known) for known in CHOICES[name])
            raise ArgumentError(name, f"must be one of {allowed}, got {choice!r}")
