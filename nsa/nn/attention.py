"""NSAAttention, the layer: projections, rotary positions, compression, the three branches, gates.

Legend: B batch, S tokens, C channels, H query heads, G key/value heads, N compressed tokens, K/V head sizes.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError, whole_number
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.compressor import MeanCompressor, MeanMLPCompressor, MLPCompressor
from nsa.nn.gate import BranchGate
from nsa.nn.layer_cache import NSALayerCache, decode_backend, write
from nsa.nn.projection import check_input, project_heads, reset_parts
from nsa.nn.rope import RopeScaling, rotary_tables, rotate
from nsa.nn.step import attend, attend_new
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
        if not isinstance(spec, NSASpec | None):
            raise ArgumentError("spec", f"must be an NSASpec or None, got {type(spec).__name__}")
        dim, num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        num_kv_heads = whole_number("num_kv_heads", num_kv_heads)
        _check_layer_arguments(num_heads, num_kv_heads, phi, compress, gate, force_branch)
        self.spec = spec or NSASpec()
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim_k = _head_size("head_dim_k", head_dim_k)
        self.head_dim_v = _head_size("head_dim_v", head_dim_k if head_dim_v is None else head_dim_v)
        self.shared_kv, self.force_branch, self.compress = shared_kv, force_branch, compress
        self.rope_base, self.backend = rope_base, backend
        self.rotary = (self.head_dim_k, rope_base, rope_scaling)  # what `rotary_tables` takes besides positions

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

    def reset_parameters(self) -> None:
        """Initialises all parameters as the constructor does, also after `to_empty`. For a model around the layer use
        `model.apply`, which comes to a module after its parts: reset after the gate, its last layer would not be zero.
        """
        reset_parts(self)

    def _build_phi(self, phi: str, head_dim: int) -> MeanCompressor | MLPCompressor:
        backend = backend_of("phi", self.backend)
        if phi == "mean":
            return MeanCompressor(self.spec, backend)
        return (MLPCompressor if phi == "mlp" else MeanMLPCompressor)(self.spec, head_dim, backend)

    def build_cache(self, cache: KVCache) -> NSALayerCache:
        """What this layer keeps in a `KVCache`."""
        return NSALayerCache(cache, self)

    def forward(
        self, x_BSC: Tensor, *, cache: KVCache | CacheStep | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """x_BSC [batch, tokens, dim], of the type of the weights unless autocast is on -> the same shape. Token t of
        the output depends on tokens 0 to t of the input alone. Any number of tokens from 1 on is accepted.

        cu_seqlens   borders of documents packed into one sequence, for a batch of 1: an int32 tensor on the device of
                     x_BSC that starts with 0, ends with the number of tokens and never decreases. [0, 400, 1000] is
                     a document of 400 tokens, then one of 600. No document attends to another; positions and blocks
                     start anew in each. On a GPU, pass `.clone()` of a buffer that a collective or code outside
                     torch fills: such a write is not noticed there
        cache        keys and values of earlier tokens (`nsa.nn.KVCache`), to which those of x_BSC are appended; the
                     output is that of the whole sequence at these tokens, without a gradient

        A NaN or an infinity in x_BSC makes the output NaN for the tokens that attend to it, and in backward the
        gradients of the tokens that these attend to; parameters are shared by all tokens, so their gradients become NaN
        too. The reference, which runs on a CPU, leaves every bit of earlier tokens and of other documents as it is. The
        Triton kernels compute neighbouring tokens together, in tiles of up to 128 queries and 128 keys (in the
        compressed branch 128 blocks): on a GPU a NaN also reaches other tokens of a tile, earlier ones and those of
        documents next to its own.

        Raises ArgumentError, which names the argument. The values of cu_seqlens are checked on the CPU, and on a GPU
        inside `nsa.ops.checked_values()`.
        """
        check_input(x_BSC, self.dim, self.q)
        check_borders(cu_seqlens, x_BSC)
        return self.whole(x_BSC, cu_seqlens) if cache is None else attend(self, x_BSC, cache, cu_seqlens)

    def whole(self, x_BSC: Tensor, cu_seqlens: Tensor | None = None, step: CacheStep | None = None) -> Tensor:
        """Whole sequences, which also fill an empty cache."""
        position_S, position_N = positions(x_BSC.shape[1], self.spec, cu_seqlens, x_BSC.device)
        q_BSHK, keys, values = self.projections(x_BSC, rotary_tables(position_S, *self.rotary))
        k_cmp_BNGK, v_cmp_BNGV = self.phi_k(keys[0], cu_seqlens), self.phi_v(values[0], cu_seqlens)
        if self.compress == "before_rotation":  # each compressed key is turned as one
            k_cmp_BNGK = rotate(k_cmp_BNGK, rotary_tables(position_N, *self.rotary))
        if step is not None:
            kept: NSALayerCache = step.layer(self)
            write(step, kept.writes(keys, values))
            kept.write_compressed(step, k_cmp_BNGK, v_cmp_BNGV)
        (_, k_sel, k_win), (_, v_sel, v_win) = keys, values
        arguments = (q_BSHK, k_cmp_BNGK, v_cmp_BNGV, k_sel, v_sel, k_win, v_win)
        if self.force_branch is None:
            gates_BSH3 = self.gate(x_BSC)
            o_BSHV = nsa_attention(*arguments, gates_BSH3, self.spec, cu_seqlens=cu_seqlens, backend=self.backend)
        else:
            o_BSHV = self._one_branch(arguments, cu_seqlens)
        out_BSC: Tensor = self.out(o_BSHV.flatten(2))
        return out_BSC

    def fused(self, x_BSC: Tensor, step: CacheStep, norm: nn.Module | None = None) -> Tensor | None:
        """New tokens in few launches, or with the `norm` before the layer x + layer(norm(x)); None where that would
        not be the same (`nsa.nn.step`)."""
        is_ours = type(self) is NSAAttention and self.force_branch is None
        return attend_new(self, x_BSC, step, norm) if is_ours else None

    def attend_cached(self, q_BSHK: Tensor, gates_BSH3: Tensor, step: CacheStep) -> Tensor:
        """Queries over what the cache holds, in which blocks that new tokens complete are compressed first."""
        kept: NSALayerCache = step.layer(self)
        kept.compress(step)
        if self.force_branch is not None:
            gates_BSH3 = torch.zeros_like(gates_BSH3)
            gates_BSH3[..., BRANCHES.index(self.force_branch)] = 1.0
        backend = decode_backend(self.backend)
        return nsa_decode(q_BSHK, gates_BSH3, *kept.views(step), step.positions, self.spec, backend=backend)

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        sizes += f", head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, rope_base={self.rope_base:g}"
        sizes += ", shared_kv=True" if self.shared_kv else ""
        sizes += f", compress={self.compress!r}" if self.compress != "before_rotation" else ""
        sizes += f", force_branch={self.force_branch!r}" if self.force_branch else ""
        return f"{sizes}, spec={self.spec}"

    def projections(self, x_BSC: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Queries [B, S, H, .]; keys and values [B, S, G, .] for cmp, sel, win. Queries and keys are rotated as
        `rotary_tables` says, but for those that are compressed first."""
        q_BSHK, raw, values = project_heads(self, x_BSC)
        k_cmp = rotate(raw[0], tables) if self.compress == "after_rotation" else raw[0]
        others = [rotate(k, tables) for k in (raw if self.shared_kv else raw[1:])]
        if self.shared_kv:
            others, values = others * 2, values * 3
        return rotate(q_BSHK, tables), [k_cmp, *others], values

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
    num_heads: int, num_kv_heads: int, phi: str, compress: str, gate: str, force_branch: str | None
) -> None:
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
    size = whole_number(name, size)
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"must be a multiple of 16 from 16 to 256, got {size}")
    return size
