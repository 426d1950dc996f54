"""Attention under context parallelism: queries stay on their rank, keys and values are exchanged.

A rank has two chunks of a sequence, an early and a late one (`nsa.parallel.context`). Raw keys and values are gathered
one key/value head at a time, overlapped with computation, and again in backward, so that no rank keeps them. A window
needs only the tokens before each chunk, its halo. A kind of attention composes its `attend_context` from these parts.

Legend: B batch, S tokens of this rank, H query heads, G key/value heads, K/V head sizes, T tokens of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.nn.attention.layer import Exchange, Pending
from nsa.ops.branches import selected_backward_node, selected_node, window_backward_node, window_node
from nsa.ops.layout import cached_with, token_layout
from nsa.ops.reference.masked_attention import accumulation_dtype


@dataclass(frozen=True)
class Half:
    """One chunk of this rank: tokens first .. stop of the sequence, `rows` of the rank's tensors. `borders` are the
    borders of the documents in tokens 0 .. stop."""

    rows: slice
    first: int
    stop: int
    borders: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Where this rank's tokens are in their sequence; the same for all layers of a pass.

    position        [S], positions of the tokens in their documents
    chunk_place     [2 * ranks], indices of the chunks of the sequence in a gathered tensor
    """

    halves: tuple[Half, Half]
    position: Tensor
    chunk_place: Tensor


def plan(x: Tensor, cu_seqlens: Tensor | None, context: Exchange) -> Plan:
    """The plan for tensors like x [B, S, ...] of this rank and the document borders of the whole sequence."""
    length = x.shape[1] // 2
    make = partial(_plan, length, cu_seqlens, context, x.device)
    if cu_seqlens is None:
        return context.once(("plan", length, x.device), make)
    return cached_with(cu_seqlens, ("context", context.rank, context.size, length), make)


def _plan(length: int, cu_seqlens: Tensor | None, context: Exchange, device: torch.device) -> Plan:
    position = token_layout(2 * context.size * length, cu_seqlens, device).position
    halves, rows = [], []
    for late, first in enumerate(context.starts(length)):
        stop = first + length
        rows.append(torch.arange(first, stop, device=device))
        borders = None if cu_seqlens is None else cu_seqlens.clamp(max=stop)
        halves.append(Half(slice(late * length, (late + 1) * length), first, stop, borders))
    return Plan((halves[0], halves[1]), position[torch.cat(rows)], chunk_places(context.size, device))


def chunk_places(size: int, device: torch.device) -> Tensor:
    """Indices of all chunks of a sequence in a tensor gathered from `size` ranks: rank r has chunk r at 2r, and its
    late chunk at 2r + 1."""
    chunks = torch.arange(2 * size, device=device)
    return torch.minimum(2 * chunks, 4 * size - 1 - 2 * chunks)


@dataclass(frozen=True)
class GatheredCall:
    """One attention operator over the keys of whole sequences.

    nodes      the operator and its backward, such as SELECTED
    settings   their arguments besides tensors, documents and backend
    """

    nodes: tuple[Any, Any]
    settings: dict[str, Any]
    context: Exchange
    plan: Plan
    backend: str | None

    @property
    def place(self) -> Tensor:
        """Indices of the pieces of the sequence among the gathered pieces."""
        return self.plan.chunk_place

    @property
    def pieces(self) -> tuple[int, int]:
        """Number and length of the pieces in which keys are gathered."""
        return 2 * self.context.size, -1

    def heads_at_once(self, groups: int) -> int:
        return 1

    def num_keys(self, half: Half) -> int:
        """The number of keys of the sequence up to the end of a chunk."""
        return half.stop

    def options(self, half: Half, indices: Tensor | None) -> dict[str, Any]:
        """The arguments of both nodes for a chunk; `indices` [B, S, G, n] are the blocks that its queries read."""
        chosen = {} if indices is None else {"indices": indices[:, half.rows]}
        where = {"cu_seqlens": half.borders, "q_offset": half.first, "backend": self.backend}
        return {**self.settings, **chosen, **where}

    def select(self, half: Half, q: Tensor, k: Tensor, lse: Tensor) -> Tensor | None:
        """The blocks selected by the attention just computed; None if the operator does not select."""
        return None

    def scatter(self, grad: Tensor, local: int) -> Tensor:
        """Reorders the gradient [T, B, ...] of keys to the order in which they were gathered, `local` keys per rank."""
        place = self.place
        spread: Tensor = grad.unflatten(0, (place.shape[0], -1))[place.argsort()].flatten(0, 1)
        return spread


SELECTED = selected_node, selected_backward_node
WINDOW = window_node, window_backward_node  # a window as long as the sequence is causal attention


class Gathered:
    """Keys and values of whole sequences, some key/value heads at a time; the next part is gathered while the current
    one is in use. The first exchange starts in the constructor."""

    def __init__(self, k_BSGK: Tensor, v_BSGV: Tensor, call: GatheredCall):
        self._k, self._v, self.call = k_BSGK.detach(), v_BSGV.detach(), call
        groups = k_BSGK.shape[2]
        together = call.heads_at_once(groups)
        self.parts = [slice(first, first + together) for first in range(0, groups, together)]
        self._next = self._start(0)

    def _start(self, number: int) -> Pending | None:
        if number == len(self.parts):
            return None
        part = self.parts[number]
        local = torch.cat([self._k[:, :, part], self._v[:, :, part]], dim=-1)
        return self.call.context.gather(local.transpose(0, 1))

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, heads of the part, K or V] of part 0, 1, ... in turn."""
        assert self._next is not None
        gathered = self._next.wait()
        self._next = self._start(number + 1)
        whole = gathered.unflatten(0, self.call.pieces)[self.call.place].flatten(0, 1).transpose(0, 1)
        k, v = whole.split([self._k.shape[3], self._v.shape[3]], dim=-1)
        return k, v

    def send_back(self, grad: Tensor) -> Pending:
        """Starts to sum the gradient [T, B, ...] over ranks; each rank gets the gradient of its own keys."""
        return self.call.context.reduce_scatter(self.call.scatter(grad, self._k.shape[1]))


# Arguments: a chunk, key/value heads, and the queries, keys and log-sum-exps of both.
Attended = Callable[[Half, slice, Tensor, Tensor, Tensor], None]


def attend_gathered(
    gathered: Gathered, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None = None, attended: Attended | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over gathered keys and values (of the blocks `indices`, for selected attention), and the blocks that
    the operator selects, or None. `attended` is called in the forward pass after the attention of each chunk and each
    part of the heads."""
    o, blocks = _AttendGathered.apply(gathered, q, k, v, indices, attended)  # type: ignore[no-untyped-call]
    return o, blocks


class _AttendGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gathered: Gathered, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, attended: Attended | None
    ) -> tuple[Tensor, Tensor]:
        call, per_group = gathered.call, q.shape[2] // k.shape[2]
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        selected = []
        for number, part in enumerate(gathered.parts):
            k_T, v_T = gathered.take(number)
            mine = slice(part.start * per_group, part.stop * per_group)
            for half in call.plan.halves:
                rows, stop = half.rows, call.num_keys(half)
                given = q[:, rows, mine], k_T[:, :stop]
                options = call.options(half, None if indices is None else indices[:, :, part])
                o[:, rows, mine], lse_half = call.nodes[0](*given, v_T[:, :stop], **options)
                lse[:, rows, mine] = lse_half
                if attended is not None:
                    attended(half, part, *given, lse_half)
                blocks = call.select(half, *given, lse_half)
                if blocks is not None:
                    selected.append(blocks)
            del k_T, v_T, given  # before the next head is assembled
        ctx.call = call
        ctx.save_for_backward(q, k, v, indices, o, lse)
        blocks = torch.cat(selected, dim=1) if selected else q.new_empty(0, dtype=torch.int32)
        ctx.mark_non_differentiable(blocks)
        return o, blocks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, indices, o, lse = ctx.saved_tensors
        do, call, per_group = grads[0], ctx.call, q.shape[2] // k.shape[2]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        gathered = Gathered(k, v, call)
        sums: list[tuple[slice, Pending]] = []
        for number, part in enumerate(gathered.parts):
            k_T, v_T = gathered.take(number)
            mine = slice(part.start * per_group, part.stop * per_group)
            sizes = (k_T.shape[1], q.shape[0], k_T.shape[2], k.shape[3] + v.shape[3])  # [T, B, heads, K + V]
            total = q.new_zeros(sizes, dtype=accumulation_dtype(q.dtype))
            for half in call.plan.halves:
                rows, stop = half.rows, call.num_keys(half)
                given = do[:, rows, mine], q[:, rows, mine], k_T[:, :stop], v_T[:, :stop]
                options = call.options(half, None if indices is None else indices[:, :, part])
                options |= {"o": o[:, rows, mine], "lse": lse[:, rows, mine]}
                dq[:, rows, mine], dk_T, dv_T = call.nodes[1](*given, **options)
                total[:stop, ..., : k.shape[3]] += dk_T.transpose(0, 1)
                total[:stop, ..., k.shape[3] :] += dv_T.transpose(0, 1)
                del dk_T, dv_T
            del k_T, v_T, given
            if sums:  # the previous head, whose gradient was summed meanwhile
                _set_heads(dk, dv, *sums.pop())
            sums.append((part, gathered.send_back(total)))
            del total
        _set_heads(dk, dv, *sums.pop())
        return None, dq, dk, dv, None, None


def _set_heads(dk: Tensor, dv: Tensor, part: slice, summed: Pending) -> None:
    local = summed.wait().transpose(0, 1)
    dk[:, :, part], dv[:, :, part] = local.split([dk.shape[3], dv.shape[3]], dim=-1)


def with_halos(k: Tensor, v: Tensor, width: int, context: Exchange) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the early and the late chunk, each with the `width` tokens before it."""
    joined = torch.cat([k, v], dim=-1)
    halves = []
    for before, own in zip(context.halo(joined, width), joined.chunk(2, dim=1), strict=True):
        k_half, v_half = torch.cat([before, own], dim=1).split([k.shape[3], v.shape[3]], dim=-1)
        halves.append((k_half, v_half))
    return halves


def attend_halos(q: Tensor, pairs: list[tuple[Tensor, Tensor]], call: GatheredCall) -> Tensor:
    """Window attention of both chunks over keys and values with their halos."""
    outputs = []
    for half, (k_half, v_half) in zip(call.plan.halves, pairs, strict=True):
        before = k_half.shape[1] - (half.stop - half.first)
        borders = None if half.borders is None else _borders_from(half, half.first - before)
        options = {**call.settings, "cu_seqlens": borders, "q_offset": before, "backend": call.backend}
        outputs.append(call.nodes[0](q[:, half.rows], k_half, v_half, **options)[0])
    return torch.cat(outputs, dim=1)


def _borders_from(half: Half, first: int) -> Tensor:
    """Borders of the documents in tokens first .. half.stop."""
    borders = half.borders
    assert borders is not None
    return cached_with(borders, ("from", first), lambda: (borders - first).clamp(min=0))
