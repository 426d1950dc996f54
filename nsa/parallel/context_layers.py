"""Attention layers whose sequences are divided among ranks: queries stay, keys and values travel.

`apply_context` replaces the forward of every attention layer. Compressed keys and values are computed where their last
token is, with a halo from the chunk before, then gathered whole. The window takes its halo from the chunk before. Raw
keys and values, of the selected branch and of dense layers, are gathered one key/value head after the other while
others are computed, and again in backward, so that no rank keeps them.

Legend: B batch, S tokens of this rank, C channels, H query heads, G key/value heads, K/V head sizes, M slots: places
for the compressed tokens of a chunk, N compressed tokens of the sequence, T tokens of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa.errors import ArgumentError
from nsa.nn.attention import NSAAttention
from nsa.nn.dense import DenseAttention
from nsa.nn.projection import check_input
from nsa.nn.rope import rotary_tables, rotate
from nsa.ops import library, operators
from nsa.ops.layout import cached_with, num_slots, slot_layout, token_layout, visible_compressed
from nsa.ops.operators import backend_of, check_borders
from nsa.ops.spec import NSASpec
from nsa.parallel.context import Context, Pending, chunks_of, halo, slots_of, widened


@dataclass(frozen=True)
class Half:
    """One chunk of this rank: tokens first .. stop of the sequence, `rows` of the rank's tensors. Borders are those of
    documents in tokens 0 .. stop, and in the tokens from the halo of each kind on."""

    rows: slice
    first: int
    stop: int
    borders: Tensor | None
    win_borders: Tensor | None
    cmp_borders: Tensor | None
    cmp_skipped: int  # tokens of the halo before the first block that ends in this chunk, without documents


@dataclass(frozen=True)
class Plan:
    """Where this rank's tokens and compressed tokens stand in their sequence; the same for all layers of a pass.

    position        [S], of every token in its document
    slot_position   [2, M], of every compressed token of this rank's chunks
    slot_place      [N], where the compressed tokens of the sequence lie in what is gathered, [ranks * 2 * M]
    chunk_place     [2 * ranks], where the chunks of the sequence lie in what is gathered
    """

    halves: tuple[Half, Half]
    position: Tensor
    slot_position: Tensor
    slot_place: Tensor
    chunk_place: Tensor


def plan(x: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, context: Context) -> Plan:
    """For tensors like x [B, S, ...] of this rank, and the document borders of the whole sequence."""
    length = x.shape[1] // 2
    make = partial(_plan, length, spec, cu_seqlens, context, x.device)
    if cu_seqlens is None:
        return context.once((length, spec, x.device), make)
    return cached_with(cu_seqlens, ("context", context.rank, context.size, length, spec), make)


def _plan(length: int, spec: NSASpec, cu_seqlens: Tensor | None, context: Context, device: torch.device) -> Plan:
    size, slots = context.size, slots_of(length, spec)
    tokens = 2 * size * length
    layout = token_layout(tokens, spec, cu_seqlens, device)
    halves, rows = [], []
    for late, first in enumerate(context.starts(length)):
        rows.append(torch.arange(first, first + length, device=device))
        halves.append(_half(slice(late * length, (late + 1) * length), first, spec, cu_seqlens))
    # Compressed tokens that end before each chunk: chunk c has those from ended[c] on.
    ended = (layout.cmp_start + visible_compressed(layout.position, spec))[length - 1 :: length]
    ended = pad(ended, (1, 0))
    number = torch.arange(num_slots(tokens, spec, packed=cu_seqlens is not None), device=device)
    chunk = torch.searchsorted(ended[1:].contiguous(), number, right=True).clamp(max=2 * size - 1)
    chunks = torch.arange(2 * size, device=device)
    place = torch.minimum(2 * chunks, 4 * size - 1 - 2 * chunks)  # of rank r: 2r for chunk r, 2r + 1 for its late one
    within = (number - ended[chunk]).clamp(max=slots - 1)  # what no document uses goes anywhere
    position = slot_layout(tokens, spec, cu_seqlens, device).position
    own = ended[list(chunks_of(context.rank, size))][:, None] + torch.arange(slots, device=device)
    padded = pad(position, (0, 1))
    return Plan(
        (halves[0], halves[1]),
        layout.position[torch.cat(rows)],
        padded[own.clamp(max=position.shape[0])],
        place[chunk] * slots + within,
        place,
    )


def _half(rows: slice, first: int, spec: NSASpec, cu_seqlens: Tensor | None) -> Half:
    stop = first + rows.stop - rows.start
    cmp_first, win_first = max(0, first - spec.cmp_block + 1), max(0, first - spec.window + 1)
    if cu_seqlens is None:
        skipped = visible_compressed(first - 1, spec) * spec.cmp_stride - cmp_first
        return Half(rows, first, stop, None, None, None, skipped)
    border = cu_seqlens.to(torch.int64)
    # The document that is under way at `first`: its blocks go on in their own rhythm, so here it starts with the first
    # block that ends in this chunk. What lies before, shorter than a block, is a document by itself.
    current = torch.searchsorted(border, torch.full((1,), first, device=border.device), right=True) - 1
    blocks = -((border - cmp_first) // spec.cmp_stride)
    aligned = border + blocks.clamp(min=0) * spec.cmp_stride
    is_current = torch.arange(border.shape[0], device=border.device) == current
    local = torch.where(is_current, aligned, border)
    return Half(
        rows,
        first,
        stop,
        cu_seqlens.clamp(max=stop),
        (cu_seqlens - win_first).clamp(0, stop - win_first),
        pad((local - cmp_first).clamp(0, stop - cmp_first), (1, 0)).to(torch.int32),
        0,
    )


@dataclass(frozen=True)
class _Call:
    """Attention of one kind over the keys of a whole sequence: what it needs besides tensors."""

    kind: Literal["compressed", "selected", "window"]
    context: Context
    plan: Plan
    spec: NSASpec
    backend: str | None
    selects: bool = False  # whether compressed attention selects blocks as well, by the backend `select`
    select: str | None = None

    def settings(self, half: Half) -> tuple[Any, ...]:
        return self.spec.as_ints(), half.borders, half.first, self.backend

    def stop(self, half: Half) -> int:
        """How many keys of the sequence there are up to the end of a chunk."""
        is_packed = half.borders is not None
        return num_slots(half.stop, self.spec, packed=is_packed) if self.kind == "compressed" else half.stop

    @property
    def place(self) -> Tensor:
        """Where the pieces of the sequence lie among those that are gathered."""
        return self.plan.slot_place if self.kind == "compressed" else self.plan.chunk_place

    @property
    def pieces(self) -> tuple[int, int]:
        """Number and length of the pieces in which keys are gathered: single compressed tokens, or chunks."""
        return (-1, 1) if self.kind == "compressed" else (2 * self.context.size, -1)


class Gathered:
    """Keys and values of the whole sequence: compressed ones of all heads at once, raw ones of one key/value head after
    the other, each gathered while the one before is in use."""

    def __init__(self, k_BSGK: Tensor, v_BSGV: Tensor, call: _Call):
        self._k, self._v, self.call = k_BSGK.detach(), v_BSGV.detach(), call
        groups = k_BSGK.shape[2]
        together = groups if call.kind == "compressed" else 1
        self.parts = [slice(first, first + together) for first in range(0, groups, together)]
        self._next = self._start(0)

    def _start(self, number: int) -> Pending | None:
        if number == len(self.parts):
            return None
        part = self.parts[number]
        local = torch.cat([self._k[:, :, part], self._v[:, :, part]], dim=-1)
        return self.call.context.gather(local.transpose(0, 1))

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T or N, heads of the part, K or V] of part 0, 1, ... in turn."""
        assert self._next is not None
        gathered = self._next.wait()
        self._next = self._start(number + 1)
        whole = gathered.unflatten(0, self.call.pieces)[self.call.place].flatten(0, 1).transpose(0, 1)
        k, v = whole.split([self._k.shape[3], self._v.shape[3]], dim=-1)
        return k, v

    def send_back(self, grad: Tensor) -> Pending:
        """Starts to sum what every rank has of the gradient [T or N, B, ...]; each rank gets that of its own keys."""
        context, place = self.call.context, self.call.place
        if self.call.kind == "compressed":  # those that no document uses may have the place of another
            spread = grad.new_zeros(context.size * self._k.shape[1], *grad.shape[1:]).index_add_(0, place, grad)
        else:
            spread = grad.unflatten(0, (place.shape[0], -1))[place.argsort()].flatten(0, 1)
        return context.reduce_scatter(spread)


class _Attend(torch.autograd.Function):
    """Attention over gathered keys and values, of the blocks `indices` where it is of that kind; and the blocks that it
    selects, if it does."""

    @staticmethod
    def forward(
        ctx: Any, gathered: Gathered, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        call, per_group = gathered.call, q.shape[2] // k.shape[2]
        operator = getattr(library, f"{call.kind}_attention")
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=widened(q).dtype)
        selected = []
        for number, part in enumerate(gathered.parts):
            k_T, v_T = gathered.take(number)
            mine = slice(part.start * per_group, part.stop * per_group)
            for half in call.plan.halves:
                rows, stop = half.rows, call.stop(half)
                chosen = () if indices is None else (indices[:, rows, part],)
                given = (q[:, rows, mine], k_T[:, :stop], v_T[:, :stop], *chosen)
                o[:, rows, mine], lse_half = operator(*given, *call.settings(half))
                lse[:, rows, mine] = lse_half
                if call.selects:
                    where = (half.borders, half.first, call.select)
                    selected.append(operators._select_blocks(given[0], given[1], lse_half, call.spec, *where))
            del k_T, v_T, given  # before the next head is put together
        ctx.call = call
        ctx.save_for_backward(q, k, v, indices, o, lse)
        blocks = torch.cat(selected, dim=1) if selected else q.new_empty(0, dtype=torch.int32)
        ctx.mark_non_differentiable(blocks)
        return o, blocks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, indices, o, lse = ctx.saved_tensors
        do, call, per_group = grads[0], ctx.call, q.shape[2] // k.shape[2]
        operator = getattr(library, f"{call.kind}_attention_backward")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        gathered = Gathered(k, v, call)
        sums: list[tuple[slice, Pending]] = []
        for number, part in enumerate(gathered.parts):
            k_T, v_T = gathered.take(number)
            mine = slice(part.start * per_group, part.stop * per_group)
            sizes = (k_T.shape[1], q.shape[0], k_T.shape[2], k.shape[3] + v.shape[3])  # [T or N, B, heads, K + V]
            total = widened(q.new_empty(0)).new_zeros(sizes)
            for half in call.plan.halves:
                rows, stop = half.rows, call.stop(half)
                chosen = () if indices is None else (indices[:, rows, part],)
                given = (q[:, rows, mine], k_T[:, :stop], v_T[:, :stop], *chosen, o[:, rows, mine], lse[:, rows, mine])
                dq[:, rows, mine], dk_T, dv_T = operator(do[:, rows, mine], *given, *call.settings(half))
                total[:stop, ..., : k.shape[3]] += dk_T.transpose(0, 1)
                total[:stop, ..., k.shape[3] :] += dv_T.transpose(0, 1)
                del dk_T, dv_T
            del k_T, v_T, given
            if sums:  # the head before, which travelled meanwhile
                _set_heads(dk, dv, *sums.pop())
            sums.append((part, gathered.send_back(total)))
            del total
        _set_heads(dk, dv, *sums.pop())
        return None, dq, dk, dv, None


def _set_heads(dk: Tensor, dv: Tensor, part: slice, summed: Pending) -> None:
    local = summed.wait().transpose(0, 1)
    dk[:, :, part], dv[:, :, part] = local.split([dk.shape[3], dv.shape[3]], dim=-1)


def _with_halos(k: Tensor, v: Tensor, width: int, context: Context) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the early and the late chunk, each with the `width` tokens before it."""
    joined = torch.cat([k, v], dim=-1)
    halves = []
    for before, own in zip(halo(joined, width, context), joined.chunk(2, dim=1), strict=True):
        k_half, v_half = torch.cat([before, own], dim=1).split([k.shape[3], v.shape[3]], dim=-1)
        halves.append((k_half, v_half))
    return halves


def _window(q: Tensor, pairs: list[tuple[Tensor, Tensor]], call: _Call) -> Tensor:
    """Attention of both chunks over keys and values with their halos."""
    outputs = []
    for half, (k_half, v_half) in zip(call.plan.halves, pairs, strict=True):
        before = k_half.shape[1] - (half.stop - half.first)
        settings = (call.spec.as_ints(), half.win_borders, before, call.backend)
        outputs.append(library.window_attention(q[:, half.rows], k_half, v_half, *settings)[0])
    return torch.cat(outputs, dim=1)


def _compress(phi: nn.Module, halves: Sequence[Tensor], plan: Plan, spec: NSASpec) -> Tensor:
    """Every chunk with its halo -> the compressed tokens that end in it, [B, 2 * M, G, D]."""
    slots = plan.slot_position.shape[1]
    compressed = []
    for half, x in zip(plan.halves, halves, strict=True):
        y: Tensor = phi(x[:, half.cmp_skipped :], half.cmp_borders)[:, :slots]
        compressed.append(pad(y, (0, 0, 0, 0, 0, slots - y.shape[1])))
    return torch.cat(compressed, dim=1)


def _nsa_forward(
    layer: NSAAttention, context: Context, x_BSC: Tensor, *, cache: Any = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """`NSAAttention.forward` of this rank's tokens; `cu_seqlens` has the borders of the whole sequence."""
    _check(x_BSC, layer, cache, cu_seqlens)
    spec, forced = layer.spec, layer.force_branch
    here = plan(x_BSC, spec, cu_seqlens, context)
    by = {name: backend_of(name, layer.backend) for name in ("cmp", "select", "sel", "win", "mix")}
    about = (context, here, spec)
    cmp = _Call("compressed", *about, by["cmp"], selects=forced != "cmp", select=by["select"])
    sel, win = _Call("selected", *about, by["sel"]), _Call("window", *about, by["win"])
    q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = layer.projections(
        x_BSC, rotary_tables(here.position, *layer.rotary)
    )
    o_cmp: Tensor | None = None
    o_sel: Tensor | None = None
    # First: exchanges of one group run one after the other, and the keys of the selected branch take long.
    near = _with_halos(k_win, v_win, spec.window - 1, context) if forced in (None, "win") else []
    if forced != "win":
        keys, values = zip(*_with_halos(k_cmp, v_cmp, spec.cmp_block - 1, context), strict=True)
        k_slots, v_slots = _compress(layer.phi_k, keys, here, spec), _compress(layer.phi_v, values, here, spec)
        if layer.compress == "before_rotation":
            k_slots = rotate(k_slots, rotary_tables(here.slot_position.flatten(), *layer.rotary))
        slots = Gathered(k_slots, v_slots, cmp)
        heads = Gathered(k_sel, v_sel, sel) if forced != "cmp" else None  # under way while the others are computed
        o_cmp, indices = _Attend.apply(slots, q, k_slots, v_slots, None)  # type: ignore[no-untyped-call]
    o_win = _window(q, near, win) if near else None
    if forced in (None, "sel"):
        o_sel, _ = _Attend.apply(heads, q, k_sel, v_sel, indices)  # type: ignore[no-untyped-call]
    if forced is None:
        o_BSHV = library.mix_branches(o_cmp, o_sel, o_win, layer.gate(x_BSC), by["mix"])
    else:
        o_BSHV = {"cmp": o_cmp, "sel": o_sel, "win": o_win}[forced]
    assert isinstance(o_BSHV, Tensor)
    out_BSC: Tensor = layer.out(o_BSHV.flatten(2))
    return out_BSC


def _dense_forward(
    layer: DenseAttention,
    context: Context,
    x_BSC: Tensor,
    *,
    cache: Any = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`DenseAttention.forward` of this rank's tokens. A window as long as the sequence is causal attention."""
    _check(x_BSC, layer, cache, cu_seqlens)
    spec = NSASpec(window=layer.window or context.size * x_BSC.shape[1])
    call = _Call("window", context, plan(x_BSC, spec, cu_seqlens, context), spec, backend_of("win", layer.backend))
    q_BSHK, (k_BSGK,), (v_BSGV,) = layer.projections(x_BSC, rotary_tables(call.plan.position, *layer.rotary))
    if layer.window is not None:
        o_BSHV = _window(q_BSHK, _with_halos(k_BSGK, v_BSGV, spec.window - 1, context), call)
    else:
        heads = Gathered(k_BSGK, v_BSGV, call)
        o_BSHV, _ = _Attend.apply(heads, q_BSHK, k_BSGK, v_BSGV, None)  # type: ignore[no-untyped-call]
    out_BSC: Tensor = layer.out(o_BSHV.flatten(2))
    return out_BSC


def _check(x_BSC: Tensor, layer: NSAAttention | DenseAttention, cache: Any, cu_seqlens: Tensor | None) -> None:
    check_input(x_BSC, layer.dim, layer.q)
    check_borders(cu_seqlens, x_BSC)
    if cache is not None:
        raise ArgumentError("cache", "a model divided by parallel.context does not decode; load the run with load_run")
    if x_BSC.shape[1] % 2:
        raise ArgumentError("x_BSC", f"must hold two chunks of equal length, got {x_BSC.shape[1]} tokens")


def apply_context(model: nn.Module, context: Context) -> None:
    """The attention layers of a model then take this rank's tokens of each sequence (`Context.rows`). Weights, names
    and types of modules stay. A compiled block calls them as they are: what ranks exchange is under way meanwhile."""
    for module in model.modules():
        if isinstance(module, NSAAttention):
            module.forward = torch.compiler.disable(partial(_nsa_forward, module, context))  # type: ignore[method-assign]
        elif isinstance(module, DenseAttention):
            module.forward = torch.compiler.disable(partial(_dense_forward, module, context))  # type: ignore[method-assign]
