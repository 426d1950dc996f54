"""The base class of all kinds of attention layers: the interface that the rest of the package uses.

Legend: B batch, S tokens, n new tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError, whole_number
from nsa.nn.cache import KVCache, begin
from nsa.nn.cache_step import CacheStep
from nsa.nn.decode_step import fused_attention
from nsa.nn.layer_cache import LayerCache, after_cached, write
from nsa.nn.projection import check_input, reset_parts
from nsa.nn.rope import RopeScaling, Tables
from nsa.ops.checks import check_borders
from nsa.ops.dispatch import Backend, check_backend
from nsa.ops.library import check_longest

if TYPE_CHECKING:  # layers need only torch; the configuration needs pydantic, of the extra `train`
    from nsa.config.architecture import Architecture

T = TypeVar("T")
_DENSE_PARTS = ("q", "k", "v", "out", "q_norm", "k_norm")
DENSE_PARAMETERS = frozenset(f"{part}.{kind}" for part in _DENSE_PARTS for kind in ("weight", "bias"))


class Pending(Protocol):
    """The result of an exchange that may still be running."""

    def wait(self) -> Tensor: ...


class Exchange(Protocol):
    """Exchanges tensors within a context-parallel group; `nsa.parallel.context.Context` implements it."""

    size: int
    rank: int

    def once(self, key: Hashable, make: Callable[[], T]) -> T: ...

    def starts(self, length: int) -> tuple[int, int]: ...

    def gather(self, local: Tensor) -> Pending: ...

    def reduce_scatter(self, whole: Tensor) -> Pending: ...

    def halo(self, x: Tensor, width: int) -> tuple[Tensor, Tensor]: ...


# Selection blocks of a short sequence in a check of kernels, and of a long one beyond those that a query reads.
SHORT_BLOCKS, MORE_BLOCKS = 4, 4


class OperatorCase(NamedTuple):
    """One operator of a layer with random inputs, for a check of its kernels.

    operator   its name in `nsa.ops.dispatch`
    inputs     by name
    compute    takes the inputs in this order, and `backend`; the result, or a tuple that begins with it
    like       queries and values for which a backend is chosen
    selects    the result is block indices; otherwise it has a gradient in every input
    """

    operator: str
    inputs: dict[str, Tensor]
    compute: Callable[..., Any]
    like: tuple[Tensor, Tensor]
    selects: bool = False


class Attention(nn.Module):
    """Causal self-attention on [B, S, dim]: the base of all kinds.

    A kind is a subclass with a name (`nsa.nn.attention.register`). It has linear layers `q` and `out`, and implements

        from_config        builds the layer from a configuration
        attend_whole       attention over whole sequences; with `step` it also fills an empty cache
        build_cache        the tensors that the layer keeps in a `KVCache`
        read_tokens        queries, keys and values of new tokens; keys and values go into the cache
        attend_cached      attention of queries over the cached tokens
        forward_flops      operations of the attention itself

    and optionally

        selection_flops    operations without a backward pass
        attend_context     attention under context parallelism, which is refused unless a kind implements it
        attend_chunk       attention of many new tokens by the operators of whole sequences; without it, `attend_cached`
                           computes them
        has_fused_step     whether `nsa.nn.decode_step` computes a step of the layer; subclasses do not inherit it
        page_multiple      a page of the cache holds a multiple of this many tokens
        completes          whether new tokens cause work besides writing and attending
        statistics         which of "gates", "selection" and "mass" the operators of the layer report to an observer; a
                           layer with "mass" may report nothing in some passes
        saved_operators    operators whose results selective recomputation keeps
        fixed_operators    operators whose results every recomputation keeps: a second call might differ
        operator_cases     operators with inputs, for a check of their kernels
        dense_targets      parameters that replace those of a dense layer
        start_from_dense   initialises the other parameters so that the layer starts close to the dense one
        parts              configurations by name, in each of which only one part of the layer runs
        index_parameters   parameters that learn only from an index loss, which `forward` returns if given `counted`
        prepare            what the length of the training sequences decides
        start_step         what the number of the training step decides
        is_warming_up      whether steps compute something else than the trained model will
        notes              lines for the start of a run
    """

    q: nn.Module
    out: nn.Module
    page_multiple = 1
    statistics: frozenset[str] = frozenset()
    has_fused_step = False
    context: Exchange | None = None  # set under context parallelism

    def __init_subclass__(cls, *, has_fused_step: bool = False, **options: Any):
        super().__init_subclass__(**options)
        cls.has_fused_step = has_fused_step

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int | None,
        *,
        rotary_dim: int | None = None,
        rope_base: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        backend: Backend = None,
    ):
        super().__init__()
        self.dim, self.num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        self.num_kv_heads = whole_number("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ArgumentError("num_kv_heads", f"must divide num_heads; {num_kv_heads} does not divide {num_heads}")
        self.head_dim_k = head_size("head_dim_k", head_dim_k)
        self.head_dim_v = head_size("head_dim_v", head_dim_k if head_dim_v is None else head_dim_v)
        if isinstance(rope_base, str | None) or not rope_base > 0.0:
            raise ArgumentError("rope_base", f"must be a number above 0, got {rope_base!r}")
        if not isinstance(rope_scaling, RopeScaling | None):
            raise ArgumentError("rope_scaling", f"must be a RopeScaling or None, got {type(rope_scaling).__name__}")
        if rope_scaling and not rope_scaling.is_valid():
            wanted = "must have a factor of at least 1, and high_freq_factor above low_freq_factor"
            raise ArgumentError("rope_scaling", f"{wanted}, got {rope_scaling}")
        check_backend(backend)
        self.rope_base, self.backend = rope_base, backend
        turned = self.head_dim_k if rotary_dim is None else rotary_dim
        self.rotary_dim = whole_number("rotary_dim", turned, 2, self.head_dim_k)
        if self.rotary_dim % 2:
            raise ArgumentError("rotary_dim", f"must be even, got {rotary_dim}")
        self.rotary = (self.rotary_dim, rope_base, rope_scaling)  # arguments of `rotary_tables` after the positions

    @classmethod
    def from_config(cls, config: Architecture, backend: Backend = None) -> Self:
        raise NotImplementedError

    @staticmethod
    def settings(config: Architecture, backend: Backend) -> dict[str, Any]:
        """The arguments that layers of all kinds share."""
        model = config.model
        sizes = {"dim": model.dim, "num_heads": model.n_heads, "num_kv_heads": model.n_kv_heads}
        heads = {"head_dim_k": model.head_dim_k, "head_dim_v": model.head_dim_v}
        scaling = RopeScaling(**model.rope_scaling.model_dump()) if model.rope_scaling else None
        names = ("rotary_dim", "rope_base", "qk_norm", "qkv_bias", "norm_eps")
        same = {name: getattr(model, name) for name in names}
        return {**sizes, **heads, **same, "rope_scaling": scaling, "backend": backend}

    def reset_parameters(self) -> None:
        """Initialises all parameters as the constructor does, also after `to_empty`. For a model that contains the
        layer use `model.apply`, which calls a module after its submodules: resetting a submodule later would undo this.
        """
        reset_parts(self)

    def forward(
        self,
        x: Tensor,
        *,
        cache: KVCache | CacheStep | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x [batch, tokens, dim], of the dtype of the weights unless autocast is on -> the same shape. Token t of
        the output depends only on tokens 0 to t of the input. The number of tokens must be at least 1.

        cu_seqlens   borders of documents packed into one sequence, for a batch of 1: an int32 tensor on the device of
                     x that starts with 0, ends with the number of tokens and never decreases. [0, 400, 1000] is
                     a document of 400 tokens, then one of 600. No document attends to another; positions and blocks
                     restart in each. On a GPU, pass `.clone()` of a buffer that a collective or code outside torch
                     fills: such a write is not detected there
        max_seqlen   an upper bound of the length of packed documents; the whole row if not given
        cache        keys and values of earlier tokens (`nsa.nn.KVCache`), to which those of x are appended; the
                     output is that of the whole sequence at these tokens, without a gradient

        A NaN or an infinity in x makes the output NaN for the tokens that attend to it, and in backward the
        gradients of the tokens that these attend to; parameters are shared by all tokens, so their gradients become NaN
        too. The reference, which runs on a CPU, leaves every bit of earlier tokens and of other documents as it is. The
        Triton kernels compute neighbouring tokens together, in tiles of up to 128 queries and 128 keys (in NSA's
        compressed branch 128 blocks): on a GPU a NaN also reaches other tokens of a tile, earlier ones and those of
        documents next to its own. PyTorch's kernels, which compute dense attention without `cu_seqlens`, carry a NaN
        to earlier tokens on a CPU too.

        Raises ArgumentError, which names the argument. The values of cu_seqlens are checked on the CPU, and on a GPU
        inside `nsa.ops.checked_values()`; max_seqlen likewise, except in compiled code.
        """
        check_input(x, self.dim, self.q)
        check_borders(cu_seqlens, x)
        if self.context is not None:
            if cache is not None:
                remedy = "a model divided by parallel.context does not decode; load the run with load_run"
                raise ArgumentError("cache", remedy)
            check_chunks(x)
            return self.attend_context(x, self.context, cu_seqlens)
        if cache is not None:
            return self._append(x, cache, cu_seqlens)
        check_longest(max_seqlen, cu_seqlens, x.shape[1])
        return self.attend_whole(x, cu_seqlens, max_seqlen)

    def attend_whole(
        self, x_BSC: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, step: CacheStep | None = None
    ) -> Tensor:
        raise NotImplementedError

    def build_cache(self, cache: KVCache) -> LayerCache:
        raise NotImplementedError

    def read_tokens(self, x_BnC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries (all tensors [B, n, ...] that attention takes per query), keys and values, rotated."""
        raise NotImplementedError

    def attend_cached(self, queries: Sequence[Tensor], step: CacheStep) -> Tensor:
        """Attention of queries over the cached tokens, including the new ones: [B, n, H, V]."""
        raise NotImplementedError

    def attend_chunk(self, queries: Sequence[Tensor], cached: Sequence[Tensor], step: CacheStep) -> Tensor:
        """Attention of many new tokens, by the operators of whole sequences with `q_offset`: [B, n, H, V].

        cached   the tensors of `LayerCache.writes`, with the earlier tokens (from a ring only the newest, all that the
                 first new token reads) before the new ones
        step     `step.start` is the number of earlier tokens, the same in all rows; rows may end with padding

        The new tokens are in the cache already."""
        raise NotImplementedError

    def completes(self, start: int, stop: int) -> bool:
        """Whether tokens start .. stop of a sequence cause work besides writing and attending."""
        return False

    def attend_context(self, x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None) -> Tensor:
        """The layer on this rank's tokens of each sequence; `cu_seqlens` has the borders of the whole sequence."""
        raise NotImplementedError

    def forward_flops(self, seq_len: int) -> float:
        """Floating-point operations of the attention itself per token of such a sequence, in the forward pass."""
        raise NotImplementedError

    def selection_flops(self, seq_len: int) -> float:
        """Operations per token of scores that only select blocks."""
        return 0.0

    def dense_flops(self, seq_len: int) -> float:
        """`forward_flops` of causal dense attention with the same heads."""
        return self.flops_per_key * (seq_len + 1) / 2

    @property
    def flops_per_key(self) -> float:
        return 2.0 * self.num_heads * (self.head_dim_k + self.head_dim_v)

    def saved_operators(self) -> list[Any]:
        return []

    def fixed_operators(self) -> list[Any]:
        return []

    def operator_cases(
        self, seq_len: int, dtype: torch.dtype, device: torch.device, *, packed: bool, is_short: bool
    ) -> list[OperatorCase]:
        """For sequences of up to `seq_len` tokens, `is_short` for a check that takes many passes, in several documents
        if `packed`."""
        return []

    def dense_targets(self, name: str) -> list[str]:
        """The parameters of this layer that start as the parameter `name` of a dense layer."""
        return [name]

    def new_parameters(self) -> set[str]:
        """The parameters that do not start as one of a dense layer."""
        filled = {target for name in DENSE_PARAMETERS for target in self.dense_targets(name)}
        return {name for name, _ in self.named_parameters()} - filled

    def start_from_dense(self) -> None:
        """Initialises the parameters that a dense layer does not have."""

    @classmethod
    def parts(cls, config: Architecture) -> Mapping[str, dict[str, Any]]:
        return {}

    def index_parameters(self) -> list[nn.Parameter]:
        return []

    @property
    def has_index_loss(self) -> bool:
        return any(parameter.requires_grad for parameter in self.index_parameters())

    @property
    def is_warming_up(self) -> bool:
        return False

    def prepare(self, seq_len: int) -> None:
        """Called once before training with sequences of `seq_len` tokens."""

    def start_step(self, step: int) -> str | None:
        """Called before every training step, the first of which is 1. If the layer computes something else from now on,
        it returns a line that says so."""
        return None

    def notes(self) -> list[str]:
        return []

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        sizes += f", head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}"
        sizes += f", rotary_dim={self.rotary_dim}" if self.rotary_dim != self.head_dim_k else ""
        return f"{sizes}, rope_base={self.rope_base:g}"

    @torch.no_grad()
    def _append(self, x_BnC: Tensor, cache: KVCache | CacheStep, cu_seqlens: Tensor | None) -> Tensor:
        """The output for tokens that are appended to a cache."""
        step = begin(cache, self, x_BnC, cu_seqlens)
        if step.is_fresh:
            return self.attend_whole(x_BnC, None, None, step)
        fused_BnC = fused_attention(self, x_BnC, step)
        if fused_BnC is not None:
            return fused_BnC
        queries, keys, values = self.read_tokens(x_BnC, step.rotary(*self.rotary))
        has_chunks = type(self).attend_chunk is not Attention.attend_chunk
        parts = step.parts() if has_chunks else [(slice(None), step)]
        outputs = []
        for rows, part in parts:
            q, k, v = ([x[rows, : part.positions.shape[1]] for x in tensors] for tensors in (queries, keys, values))
            outputs.append(self._attend_part(q, k, v, part))
        o_BnHV = outputs[0]
        if o_BnHV.shape[:2] != x_BnC.shape[:2]:  # the output at padding remains 0
            o_BnHV = o_BnHV.new_zeros(*x_BnC.shape[:2], *o_BnHV.shape[2:])
            for (rows, part), o in zip(parts, outputs, strict=True):
                o_BnHV[rows, : part.positions.shape[1]] = o
        out_BnC: Tensor = self.out(o_BnHV.flatten(2))
        return out_BnC

    def _attend_part(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], step: CacheStep) -> Tensor:
        """Writes new tokens to the cache and attends: [B, n, H, V]."""
        kept: LayerCache = step.layer(self)
        if step.start is not None:
            writes = kept.writes(keys, values)
            cached = [after_cached(step, each, step.start) for each in writes]  # before a ring overwrites old tokens
            write(step, writes)
            return self.attend_chunk(queries, cached, step)
        outputs = []
        # Pages take any number of tokens per pass, a ring as many as its slack.
        for rows, piece in step.pieces() if kept.shortest_ring else [(slice(None), step)]:
            write(piece, kept.writes([k[:, rows] for k in keys], [v[:, rows] for v in values]))
            outputs.append(self.attend_cached([q[:, rows] for q in queries], piece))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def check_chunks(x_BSC: Tensor) -> None:
    """Checks the tokens of a rank under context parallelism: an early and a late chunk of a sequence."""
    if x_BSC.shape[1] % 2:
        raise ArgumentError("x", f"must hold two chunks of equal length, got {x_BSC.shape[1]} tokens")


def head_size(name: str, size: int) -> int:
    size = whole_number(name, size)
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"must be a multiple of 16 from 16 to 256, got {size}")
    return size
