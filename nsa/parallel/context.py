"""Context parallelism: divides the tokens of a sequence among the ranks of a group, and exchanges tensors between them.

For N ranks a sequence is divided into 2N chunks of equal length. Rank r has chunks r and 2N-1-r, an early and a late
one: late queries see more compressed tokens, so every rank has the same work. Tensors of a rank hold the tokens of the
early chunk, then those of the late one. Sequences are padded at the end to a multiple of 2N tokens; no token attends to
the padding.

Every exchange goes through `Context`: `gather`, `reduce_scatter` (always in float32) and `halo`. Attention layers call
them where they need keys and values of other ranks (`nsa.nn.attention`).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from nsa.errors import LaunchError

# torch 2.13 renamed these functions; the old names warn.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


T = TypeVar("T")


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def padded_length(tokens: int, size: int) -> int:
    return -(-tokens // (2 * size)) * 2 * size


def halo_sources(rank: int, size: int, length: int, width: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """For each of the last `width` tokens before the chunks of a rank (fewer at the start): the rank that has it, and
    its index among the tokens of that rank."""
    starts = [chunk * length for chunk in chunks_of(rank, size)]
    token = np.concatenate([np.arange(max(0, start - width), start) for start in starts])
    chunk = token // length
    is_late = chunk >= size
    return np.where(is_late, 2 * size - 1 - chunk, chunk), is_late * length + token % length


class Pending:
    """The result of an exchange that may still be running. Keeps the sent tensor alive until it ends."""

    def __init__(self, result: Tensor, sent: Tensor, work: Any):
        self._result, self._work = result, work
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._sent = self._work = None
        return self._result


@dataclass(frozen=True)
class HaloTables:
    """Index tables for the exchange of halos of one width.

    send      indices of this rank's tokens in the order they are sent, by receiver; `sends` are the counts
    place     indices of the two halos' tokens in the received tensor; `receives` are the counts by sender
    """

    send: Tensor
    sends: list[int]
    place: Tensor
    receives: list[int]


class Context:
    """This rank among the `size` ranks of its context-parallel group.

    Without a process group nothing is sent, and every rank is assumed to have the same tensors as this one: for
    estimates and measurements of one rank's share.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int = 1, rank: int = 0):
        self.group, self.size, self.rank = group, size, rank
        if group is not None:
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns `make()`, cached by key: for tables that do not change between steps."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def starts(self, length: int) -> tuple[int, int]:
        """The positions in the sequence at which this rank's two chunks of `length` tokens start."""
        early, late = chunks_of(self.rank, self.size)
        return early * length, late * length

    def rows(self, tokens: int) -> tuple[Tensor, int]:
        """The indices of this rank's tokens in a sequence, and the padded length of the sequence."""
        whole = padded_length(tokens, self.size)
        length = whole // (2 * self.size)
        return torch.cat([torch.arange(first, first + length) for first in self.starts(length)]), whole

    def gather(self, local: Tensor) -> Pending:
        """Starts an all-gather along the first dimension."""
        local = local.contiguous()
        whole = local.new_empty(self.size * local.shape[0], *local.shape[1:])
        if self.group is None:
            whole.unflatten(0, (self.size, -1)).copy_(local)
            return Pending(whole, local, None)
        return Pending(whole, local, getattr(dist, _ALL_GATHER)(whole, local, group=self.group, async_op=True))

    def reduce_scatter(self, whole: Tensor) -> Pending:
        """Starts a reduce-scatter in float32: sums a gathered tensor over ranks, of which each rank gets its part."""
        assert whole.dtype in (torch.float32, torch.float64)
        whole = whole.contiguous()
        local = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        if self.group is None:
            return Pending(local.copy_(whole[: local.shape[0]]), whole, None)
        return Pending(local, whole, getattr(dist, _REDUCE_SCATTER)(local, whole, group=self.group, async_op=True))

    def halo(self, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` tokens before the early and before the late chunk of x [B, S, ...], fewer at the start of the
        sequence."""
        length = x.shape[1] // 2
        tables = self.once((length, width, x.device), lambda: self.halo_tables(length, width, x.device))
        both: Tensor = _Halo.apply(x, self, tables)  # type: ignore[no-untyped-call]
        early, late = both.split([min(width, start) for start in self.starts(length)], dim=1)
        return early, late

    def halo_tables(self, length: int, width: int, device: torch.device) -> HaloTables:
        sources = [halo_sources(receiver, self.size, length, width) for receiver in range(self.size)]
        sent = [place[rank == self.rank] for rank, place in sources]
        senders, _ = sources[self.rank]
        arrival = np.argsort(senders, kind="stable")  # by sender, then in the order sent
        return HaloTables(
            torch.tensor(np.concatenate(sent), device=device),
            [len(part) for part in sent],
            torch.tensor(np.argsort(arrival), device=device),  # the inverse
            np.bincount(senders, minlength=self.size).tolist(),
        )

    def exchange(self, sent: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        """All-to-all of the rows of a tensor: `sends` and `receives` are the numbers of rows per rank."""
        received = sent.new_zeros(sum(receives), *sent.shape[1:])
        if self.group is not None:
            dist.all_to_all_single(received, sent.contiguous(), receives, sends, group=self.group)
        return received


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, tables: HaloTables) -> Tensor:
        ctx.context, ctx.tables, ctx.tokens, ctx.dtype = context, tables, x.shape[1], x.dtype
        received = context.exchange(x.transpose(0, 1)[tables.send], tables.receives, tables.sends)
        return received[tables.place].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        tables: HaloTables = ctx.tables
        wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32  # dtype in which gradients are sent
        grad = grads[0].to(wide).transpose(0, 1)
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format)
        sent[tables.place] = grad
        received = ctx.context.exchange(sent, tables.sends, tables.receives)
        whole = received.new_zeros(ctx.tokens, *received.shape[1:])
        whole.index_add_(0, tables.send, received)
        return whole.transpose(0, 1).to(ctx.dtype), None, None


def data_ranks(context: int, size: int) -> int:
    """The number of groups of `context` ranks, among which a batch is divided."""
    if size % context:
        ranks = "rank" if size == 1 else "ranks"
        raise LaunchError(
            f"parallel.context: {context} ranks share a sequence, and {size} {ranks} cannot be divided into such "
            f"groups; start a multiple of {context} (torchrun --nproc-per-node), or choose a divisor of {size}"
        )
    return size // context
