"""MSA: grouped attention over blocks that a learned index chooses, and the loss that trains the index.

What shapes, `cu_seqlens`, `q_offset` and `backend` mean is said once, in `nsa.ops`. N = q_offset + S tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import dispatch, selection_cache
from nsa.ops.branches import selected_node, window_node
from nsa.ops.causal import causal_attention
from nsa.ops.checks import (
    check_device,
    check_head_size,
    check_like,
    check_pair,
    check_sequence,
    check_spec,
    check_tensor,
    sequence_length,
)
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.library import check_border_values, check_longest, define, differentiate, msa_spec_of, refuse_tangents
from nsa.ops.observe import notify
from nsa.ops.positions import token_positions
from nsa.ops.reference.masked_attention import accumulation_dtype
from nsa.ops.spec import MSASpec


def index_blocks(
    index_q: Tensor,
    index_k: Tensor,
    spec: MSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """The blocks each query reads: int32 [B,S,G,num_selected], ascending, padded with -1. No gradient.

    index_q [B,S,G,E] and index_k [B,N,E], one head for all groups; E is a multiple of 16 from 16 to 256. Blocks count
    from the start of the document. First come the newest `num_local` and the first `num_init` blocks, then those whose
    best visible token has the highest score index_q . index_k, of equal ones the lower block.
    """
    check_spec(spec, MSASpec)
    check_sequence("index_q", index_q, cu_seqlens)
    _check_index_keys(index_k, index_q, sequence_length(index_q, q_offset))
    arguments = (index_q.detach(), index_k.detach(), spec.as_ints(), cu_seqlens, q_offset, backend)
    return selection_cache.select(lambda: index_node(*arguments))


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    spec: MSASpec,
    *,
    counted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    q_offset: int = 0,
    is_dense: bool = False,
    backend: Backend = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the blocks of `index_blocks`, o [B,S,H,Dv]; the index loss, summed over groups and counted queries
    that choose; and how many these queries are (int64).

    q [B,S,H,Dk], k [B,N,G,Dk], v [B,N,G,Dv], index_q [B,S,G,E] and index_k [B,N,E] of one type. `counted` [B,S] bool:
    the queries whose loss counts, all unless given. The gradient of o reaches q, k and v alone, that of the loss
    index_q and index_k alone. A query that sees no more than `num_selected` blocks chooses nothing and has no loss.
    `max_seqlen` bounds the length of a packed document. Where it, or the sequence, is at most `spec.dense_tokens`, no
    query chooses: the operator is dense attention, and the loss and its gradient are 0. `is_dense` warms an index up:
    attention and loss run over all visible tokens; the queries whose loss counts are the same. `backend` may be a
    mapping from operators (index, index_loss, sel, win) to backends.
    """
    index, index_loss, sel, win = (backend_of(operator, backend) for operator in ("index", "index_loss", "sel", "win"))
    check_spec(spec, MSASpec)
    check_sequence("q", q, cu_seqlens)
    length = sequence_length(q, q_offset)
    check_pair("k", k, "v", v, q, length)
    check_sequence("index_q", index_q, cu_seqlens)
    check_like("index_q", index_q, q, "q")
    if index_q.shape[:3] != (*q.shape[:2], k.shape[2]):
        wanted = [*q.shape[:2], k.shape[2]]
        raise ArgumentError("index_q", f"must start with [B, S, G] = {wanted}, got {list(index_q.shape)}")
    _check_index_keys(index_k, index_q, length)
    if counted is not None:
        check_tensor("counted", counted)
        if counted.shape != q.shape[:2] or counted.dtype != torch.bool:
            given = f"{counted.dtype} {list(counted.shape)}"
            raise ArgumentError("counted", f"must be bool [B, S] = {list(q.shape[:2])}, got {given}")
        check_device("counted", counted, q)
    check_longest(max_seqlen, cu_seqlens, length)
    refuse_tangents("msa_attention", q, k, v, index_q, index_k)
    if min(length, length if max_seqlen is None else max_seqlen) <= spec.dense_tokens:
        o = causal_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, q_offset=q_offset, backend=win)
        # With a gradient of 0: DDP and FSDP need one on every rank, and other ranks may have longer sequences.
        nothing = (index_q[:, :0].sum() + index_k[:, :0].sum()).to(accumulation_dtype(q.dtype))
        return o, nothing, nothing.to(torch.int64)
    indices: Tensor | None = None
    if is_dense:
        o, lse = window_node(q, k, v, length, cu_seqlens, q_offset, win)
    else:
        indices = index_blocks(index_q, index_k, spec, cu_seqlens=cu_seqlens, q_offset=q_offset, backend=index)
        o, lse = selected_node(q, k, v, indices, spec.block, cu_seqlens, q_offset, sel)
    position = token_positions(length, cu_seqlens, q.device)[q_offset:]
    chooses = (position >= spec.dense_tokens).expand(q.shape[:2])
    counted = chooses if counted is None else chooses & counted
    has_grads = torch.is_grad_enabled() and (index_q.requires_grad or index_k.requires_grad)
    kl: Tensor = index_loss_node(
        index_q, index_k, q.detach(), k.detach(), lse.detach(), indices, counted, spec.block, cu_seqlens, q_offset,
        has_grads, index_loss,
    )[0]  # fmt: skip
    return o, kl, counted.sum()


def _check_index_keys(index_k: Tensor, index_q: Tensor, length: int) -> None:
    check_tensor("index_k", index_k)
    wanted = [index_q.shape[0], length, index_q.shape[3]]
    if list(index_k.shape) != wanted:
        raise ArgumentError("index_k", f"must be [B, N, E] = {wanted} to fit index_q, got {list(index_k.shape)}")
    check_like("index_k", index_k, index_q, "index_q")
    check_head_size("index_q", index_q)


def _choose(
    index_q: Tensor, index_k: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, q_offset: int,
    backend: str | None,
) -> Tensor:  # fmt: skip
    sizes = msa_spec_of(spec)
    check_border_values(cu_seqlens, index_k.shape[1])
    kernels = dispatch.choose("index", backend, index_q, index_q, count=True)
    indices: Tensor = kernels.choose(index_q, index_k, sizes, cu_seqlens, q_offset=q_offset)
    notify("selected", indices, sizes, cu_seqlens, q_offset)
    return indices


def _lose(
    index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, lse: Tensor, indices: Tensor | None, counted: Tensor,
    block: int, cu_seqlens: Tensor | None, q_offset: int, has_grads: bool, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = dispatch.choose("index_loss", backend, q, index_q, count=True)
    if indices is not None:
        notify("attended", q, k, lse, counted, cu_seqlens, q_offset)
    return kernels.loss(
        index_q, index_k, q, k, lse, indices, counted, block, cu_seqlens, q_offset=q_offset, has_grads=has_grads
    )


def _loss_shapes(
    index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, lse: Tensor, indices: Tensor | None, counted: Tensor,
    block: int, cu_seqlens: Tensor | None, q_offset: int, has_grads: bool, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulation_dtype(index_q.dtype)
    d_index_q, d_index_k = (index_q.shape, index_k.shape) if has_grads else ((0,), (0,))
    kl = index_q.new_empty((), dtype=acc)
    return kl, index_q.new_empty(d_index_q), index_q.new_empty(d_index_k, dtype=acc)


def _scale(d_kl: Tensor, d_index_q: Tensor, d_index_k: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a loss with weight 1, which the forward pass computed beside it, times that of the loss."""
    return d_index_q * d_kl, (d_index_k * d_kl).to(d_index_q.dtype)


index_node = define(
    "index_blocks", _choose, lambda q, k, spec, *_: q.new_empty(*q.shape[:3], spec[1], dtype=torch.int32)
)
index_loss_node = define("index_loss", _lose, _loss_shapes)
differentiate(
    index_loss_node,
    _scale,
    lambda output, *_: output[1:],
    lambda d_kl, d_q, d_k: (d_q.new_empty(d_q.shape), d_q.new_empty(d_k.shape)),
)
