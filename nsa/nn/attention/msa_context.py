"""An MSA layer under context parallelism.

Index keys of all groups are small: they are gathered at once. Keys and values are gathered one key/value head after the
other (`nsa.nn.attention.gathered`); the index loss of a head is computed while its keys are there.

Legend: B batch, S tokens of this rank, T tokens of the sequence, G key/value heads, E index head size.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.nn.attention.gathered import SELECTED, WINDOW, Gathered, GatheredCall, Half, attend_gathered, plan
from nsa.nn.attention.layer import Exchange
from nsa.nn.rope import rotary_tables
from nsa.ops import index_blocks
from nsa.ops.block_index import index_loss_node
from nsa.ops.dispatch import backend_of

if TYPE_CHECKING:
    from nsa.nn.attention.msa import MSAAttention


def attend_context(
    layer: "MSAAttention", x_BSC: Tensor, context: Exchange, cu_seqlens: Tensor | None, counted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`MSAAttention` on this rank's tokens; `cu_seqlens` has the borders of the whole sequence. The index loss and the
    number of queries are those of this rank; the loss is 0 without `counted`."""
    spec, here = layer.spec, plan(x_BSC, cu_seqlens, context)
    length = context.size * x_BSC.shape[1]
    tables = rotary_tables(here.position, *layer.rotary)
    by = {name: backend_of(name, layer.backend) for name in ("index", "index_loss", "sel", "win")}
    chooses = length > spec.dense_tokens
    indices: Tensor | None = None
    if chooses:
        index_q, index_k = layer.project_index(x_BSC, tables)
        index_k_T = _gather(index_k.detach(), here.chunk_place, context)
    q, (k,), (v,) = layer.projections(x_BSC, tables)
    if chooses and not layer.is_dense:
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
    return layer.out(o_BSHV.flatten(2)), kl, queries


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
