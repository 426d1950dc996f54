"""NSAAttention, the layer: projections, rotary positions, compression, the three branches, gates.

Legend: B batch, S tokens, C channels, H query heads, G key/value heads, N compressed tokens, K/V head sizes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError
from nsa.nn.cache import CacheSizes, CacheStep, KVCache, begin
from nsa.nn.compressor import MeanCompressor, MeanMLPCompressor, MLPCompressor
from nsa.nn.gate import BranchGate
from nsa.nn.layer_cache import NSALayerCache, decode_backend, write
from nsa.nn.projection import check_input, project
from nsa.nn.rope import RopeScaling, rotary_tables, rotate
from nsa.nn.step import attend_new
from nsa.ops import (
    NSASpec,
    compressed_attention,
    nsa_attention,
    nsa_decode,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.operators import Backend, backend_of, check_borders, positions

Branch = Literal["cmp", "sel", "win"]
BRANCHES: tuple[Branch, ...] = ("cmp", "sel", "win")


class NSAAttention(nn.Module):
    """Causal Native Sparse Attention on [B, S, dim], a drop-in for a decoder's self-attention.

    dim            width of input and output; need not equal num_heads * head size
    num_heads      query heads, a multiple of num_kv_heads
    num_kv_heads   key/value heads; each is shared by num_heads / num_kv_heads query heads
    head_dim_k     size of a query and key head, a multiple of 16 from 16 to 256
    head_dim_v     size of a value head, likewise; None makes it head_dim_k
    spec           the sizes of blocks, selection and window (`NSASpec`); None takes the paper's, NSASpec()
    phi            "mean", "mlp", or "mean_mlp" (their sum, where the MLP starts at zero): how a block becomes a
                   compressed token
    compress       "before_rotation": keys are compressed, then a compressed key is turned at its block's start.
                   "after_rotation": keys are turned at their own positions, then compressed
    gate           "sigmoid" or "softmax"
    shared_kv      one key/value pair for the three branches instead of three
    force_branch   the output is that branch alone; parameters that are then unused are frozen
    rope_base      base of the rotary frequencies, which are base**(-2i / head_dim_k) for channel pair i; larger for
                   longer sequences
    rope_scaling   `RopeScaling` of the rotary frequencies, or None
    qk_norm        RMSNorm on the queries and keys of every head, before compression and rotary positions
    qkv_bias       the projections of queries, keys and values have a bias
    norm_eps       epsilon of these norms
    backend        passed to nsa.ops: None takes the fastest that can run; a name, or names by operator

    Projections and norms of keys and values are lists in the order cmp, sel, win: k.0 and v.0 are the compressed
    branch's, k.1 and v.1 the selected branch's, k.2 and v.2 the window's. With shared_kv there is k.0 and v.0 alone.
    No call leaves anything behind in the layer.
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
        rope_base: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: Backend = None,
    ):
        super().__init__()
        _check_layer_arguments(dim, num_heads, num_kv_heads, phi, compress, gate, force_branch)
        self.spec = spec or NSASpec()
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim_k = _head_size("head_dim_k", head_dim_k)
        self.head_dim_v = _head_size("head_dim_v", head_dim_v or head_dim_k)
        self.shared_kv, self.force_branch, self.compress = shared_kv, force_branch, compress
        self.rope_base, self.rope_scaling, self.backend = rope_base, rope_scaling, backend

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

    def _build_phi(self, phi: str, head_dim: int) -> MeanCompressor | MLPCompressor:
        backend = backend_of("phi", self.backend)
        if phi == "mean":
            return MeanCompressor(self.spec, backend)
        return (MLPCompressor if phi == "mlp" else MeanMLPCompressor)(self.spec, head_dim, backend)

    def build_cache(self, sizes: CacheSizes) -> NSALayerCache:
        """What this layer keeps in a `KVCache`."""
        groups, dims = self.num_kv_heads, (self.head_dim_k, self.head_dim_v)
        return NSALayerCache(sizes, self.spec, groups, *dims, shared_kv=self.shared_kv)

    def forward(
        self, x_BSC: Tensor, *, cache: KVCache | CacheStep | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """x_BSC [batch, tokens, dim], of the type of the weights unless autocast is on -> the same shape. Token t of
        the output depends on tokens 0 to t of the input alone. Any number of tokens from 1 on is accepted.

        cu_seqlens   borders of documents packed into one sequence, for a batch of 1: an int32 tensor on the device of
                     x_BSC that starts with 0, ends with the number of tokens and never decreases. [0, 400, 1000] is
                     a document of 400 tokens, then one of 600. No document attends to another; positions and blocks
                     start anew in each.
        cache        keys and values of earlier tokens (`nsa.nn.KVCache`), to which those of x_BSC are appended; the
                     output is that of the whole sequence at these tokens, without a gradient

        Raises ArgumentError, which names the argument. The values of cu_seqlens are checked on the CPU, and on a GPU
        inside `nsa.ops.checked_values()`.
        """
        check_input(x_BSC, self.dim, self.q)
        check_borders(cu_seqlens, x_BSC)
        if cache is None:
            return self._whole(x_BSC, cu_seqlens)
        step = begin(cache, self, x_BSC, cu_seqlens)
        with torch.no_grad():
            return self._whole(x_BSC, None, step) if step.is_fresh else self._continued(x_BSC, step)

    def _whole(self, x_BSC: Tensor, cu_seqlens: Tensor | None, step: CacheStep | None = None) -> Tensor:
        """Whole sequences, which also fill an empty cache."""
        spec, tokens = self.spec, x_BSC.shape[1]
        q_BSHK, pairs = self._projections(x_BSC)
        position_S, position_N = positions(tokens, spec, cu_seqlens, x_BSC.device)
        token_tables = rotary_tables(position_S, self.head_dim_k, self.rope_base, self.rope_scaling)
        slot_tables = rotary_tables(position_N, self.head_dim_k, self.rope_base, self.rope_scaling)

        q_BSHK = rotate(q_BSHK, token_tables)
        (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = pairs
        if self.compress == "after_rotation":
            k_cmp = rotate(k_cmp, token_tables)
            k_cmp_BNGK = self.phi_k(k_cmp, cu_seqlens)
        else:  # each compressed key is turned as one
            k_cmp_BNGK = rotate(self.phi_k(k_cmp, cu_seqlens), slot_tables)
        v_cmp_BNGV = self.phi_v(v_cmp, cu_seqlens)
        k_sel = rotate(k_sel, token_tables)
        k_win = k_sel if self.shared_kv else rotate(k_win, token_tables)

        if step is not None:
            kept: NSALayerCache = step.layer(self)
            write(step, kept.writes((k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win)))
            kept.write_compressed(step, k_cmp_BNGK, v_cmp_BNGV)
        arguments = (q_BSHK, k_cmp_BNGK, v_cmp_BNGV, k_sel, v_sel, k_win, v_win)
        if self.force_branch is None:
            gates_BSH3 = self.gate(x_BSC)
            o_BSHV = nsa_attention(*arguments, gates_BSH3, spec, cu_seqlens=cu_seqlens, backend=self.backend)
        else:
            o_BSHV = self._one_branch(arguments, cu_seqlens)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def _continued(self, x_BSC: Tensor, step: CacheStep) -> Tensor:
        """New tokens of sequences that the cache holds already."""
        fused_BSC = self.fused(x_BSC, step)
        if fused_BSC is not None:
            return fused_BSC
        kept: NSALayerCache = step.layer(self)
        q_BSHK, pairs = self._projections(x_BSC)
        (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = pairs
        rotary = (self.head_dim_k, self.rope_base, self.rope_scaling)
        # All heads are rotated at once: a step takes the time of its launches.
        turned = [q_BSHK, k_sel] if self.shared_kv else [q_BSHK, k_sel, k_win]
        rotated = rotate(torch.cat(turned, dim=2), step.rotary(*rotary))
        q_BSHK, k_sel, *rest = rotated.split([x.shape[2] for x in turned], dim=2)
        k_win = k_sel if self.shared_kv else rest[0]
        is_turned = self.compress == "after_rotation"
        if is_turned:
            k_cmp = rotate(k_cmp, step.rotary(*rotary))
        gates_BSH3 = self._forced_gates(q_BSHK) if self.force_branch else self.gate(x_BSC)
        outputs = []
        for rows, piece in step.pieces():
            keys, values = ([x[:, rows] for x in three] for three in ((k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win)))
            write(piece, kept.writes(keys, values))
            kept.compress(piece, self.phi_k, self.phi_v, None if is_turned else rotary)
            attended = (q_BSHK[:, rows], gates_BSH3[:, rows], *kept.views(piece), piece.positions, self.spec)
            outputs.append(nsa_decode(*attended, backend=decode_backend(self.backend)))
        o_BSHV = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def fused(self, x_BSC: Tensor, step: CacheStep, norm: nn.Module | None = None) -> Tensor | None:
        """`_continued` in few launches, or with the `norm` before the layer x + layer(norm(x)); None where that would
        not be the same (`nsa.nn.step`)."""
        if type(self) is not NSAAttention or self.force_branch is not None:
            return None
        kept: NSALayerCache = step.layer(self)
        is_turned = self.compress == "after_rotation"
        rotary = None if is_turned else (self.head_dim_k, self.rope_base, self.rope_scaling)

        def attend(q_BSHK: Tensor, gates_BSH3: Tensor | None) -> Tensor:
            assert gates_BSH3 is not None
            kept.compress(step, self.phi_k, self.phi_v, rotary)
            caches, backend = kept.views(step), decode_backend(self.backend)
            return nsa_decode(q_BSHK, gates_BSH3, *caches, step.positions, self.spec, backend=backend)

        return attend_new(self, x_BSC, step, norm, partial(kept.writes, is_turned=is_turned), attend, self.gate)

    def _forced_gates(self, q_BSHK: Tensor) -> Tensor:
        """1 for the forced branch, 0 for the others."""
        gates = q_BSHK.new_zeros(*q_BSHK.shape[:3], len(BRANCHES))
        gates[..., BRANCHES.index(self.force_branch or "cmp")] = 1.0
        return gates

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        sizes += f", head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, rope_base={self.rope_base:g}"
        sizes += ", shared_kv=True" if self.shared_kv else ""
        sizes += f", compress={self.compress!r}" if self.compress != "before_rotation" else ""
        sizes += f", force_branch={self.force_branch!r}" if self.force_branch else ""
        return f"{sizes}, spec={self.spec}"

    def _projections(self, x_BSC: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Queries [B, S, H, .]; keys and values [B, S, G, .] for cmp, sel, win."""
        # Two products rather than one: values are kept for backward as they are, queries and keys are turned first.
        q, *keys = project(x_BSC, [self.q, *self.k])
        values = project(x_BSC, list(self.v))
        groups = self.num_kv_heads
        pairs = [
            (norm(k.unflatten(-1, (groups, self.head_dim_k))).to(k.dtype), v.unflatten(-1, (groups, self.head_dim_v)))
            for norm, k, v in zip(self.k_norm, keys, values, strict=True)
        ]
        q_BSHK = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim_k))).to(q.dtype)
        return q_BSHK, pairs * len(BRANCHES) if self.shared_kv else pairs

    def _one_branch(self, arguments: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> Tensor:
        """The forced branch of what `nsa_attention` takes up to the gates."""
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = arguments
        spec = self.spec
        by = {operator: backend_of(operator, self.backend) for operator in ("cmp", "select", "sel", "win")}
        if self.force_branch == "win":
            return window_attention(q, k_win, v_win, spec, cu_seqlens=cu_seqlens, backend=by["win"])
        if self.force_branch == "cmp":
            return compressed_attention(q, k_cmp, v_cmp, spec, cu_seqlens=cu_seqlens, backend=by["cmp"])[0]
        with torch.no_grad():  # selection needs the log-sum-exp and has no gradient
            _, lse = compressed_attention(q, k_cmp, v_cmp, spec, cu_seqlens=cu_seqlens, backend=by["cmp"])
            indices = select_blocks(q, k_cmp, lse, spec, cu_seqlens=cu_seqlens, backend=by["select"])
        return selected_attention(q, k_sel, v_sel, indices, spec, cu_seqlens=cu_seqlens, backend=by["sel"])

    def _freeze_unused(self) -> None:
        """With one branch forced: no gradient for the gate, the compressors of another branch, its projections."""
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


def attention_layers(model: nn.Module) -> Iterator[tuple[str, NSAAttention]]:
    """Every NSAAttention of a model with its name, whatever wraps it: found by type, never by path."""
    for name, module in model.named_modules():
        if isinstance(module, NSAAttention):
            yield name, module


def _check_layer_arguments(
    dim: int, num_heads: int, num_kv_heads: int, phi: str, compress: str, gate: str, force_branch: str | None
) -> None:
    for name, value in (("dim", dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if value < 1:
            raise ArgumentError(name, f"must be at least 1, got {value}")
    if num_heads % num_kv_heads:
        raise ArgumentError("num_kv_heads", f"must divide num_heads; {num_kv_heads} does not divide {num_heads}")
    if phi not in ("mean", "mlp", "mean_mlp"):
        raise ArgumentError("phi", f"must be 'mean', 'mlp' or 'mean_mlp', got {phi!r}")
    if compress not in ("before_rotation", "after_rotation"):
        raise ArgumentError("compress", f"must be 'before_rotation' or 'after_rotation', got {compress!r}")
    if gate not in ("sigmoid", "softmax"):
        raise ArgumentError("gate", f"must be 'sigmoid' or 'softmax', got {gate!r}")
    if force_branch not in (None, *BRANCHES):
        raise ArgumentError("force_branch", f"must be one of {', '.join(BRANCHES)}, got {force_branch!r}")


def _head_size(name: str, size: int) -> int:
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"must be a multiple of 16 from 16 to 256, got {size}")
    return size
