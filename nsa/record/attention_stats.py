"""Statistics of sparse attention: how gates weight the branches, and which blocks queries read.

The statistics are computed from tensors of the forward pass, reduced on their device to one row of numbers per layer,
and copied to the host asynchronously: `ready` returns the samples that have arrived. Layers are identified by the order
in which they run.

A row of gates is the weights of one token and head, divided by their sum. It is collapsed when one branch has more than
COLLAPSED of the weight. Entropy is in nats; three equal shares have ln 3 = 1.0986.

A row of blocks is the blocks that one token and key/value head reads. Forced blocks are the first and the newest ones,
read regardless of the scores. The distance of a block is counted in blocks from the query's own. Agreement is the share
of a row's blocks that the previous token of the document also reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.ops.layout import block_of, is_forced, token_layout
from nsa.ops.spec import SelectionSpec
from nsa.record.failures import reporting_bugs
from nsa.run_folder import ALL_LAYERS, DISTANCE_BINS, GateStats, SelectionStats

COLLAPSED = 0.95
MAX_PAIRS = 8192  # rows whose neighbours are compared: enough for a share, and cheap at any length
GATE_NUMBERS, SELECTION_NUMBERS = 8, 7 + len(DISTANCE_BINS)  # per row
GATE_MAXIMA, SELECTION_MAXIMA = slice(2, 4), slice(2, 3)  # columns that are maxima; all others are sums

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Statistics of one step by layer; the last key is ALL_LAYERS. Empty if no layer has gates or a selection."""

    step: int
    gates: dict[str, GateStats]
    selection: dict[str, SelectionStats]


class AttentionObserver:
    """Observes one forward pass at a time. `layers` names the layers with "gates" and the layers with a "selection", in
    the order they run.

    Under context parallelism a layer reports the blocks of its two chunks of queries one after the other. `gather`
    stacks a tensor over the ranks of the group, so that each rank has the statistics of whole sequences.
    """

    def __init__(self, layers: Mapping[str, Sequence[str]], gather: Callable[[Tensor], Tensor] | None = None):
        self.layers, self._gather = layers, gather
        self.failures = 0
        self._gates: list[Tensor] = []
        self._selection: list[Tensor] = []
        self._waiting: list[tuple[int, Tensor | None, Tensor | None, Any]] = []

    @reporting_bugs()
    @torch.no_grad()
    def mixed(self, gates: Tensor) -> None:
        self._gates.append(gate_numbers(gates))

    @reporting_bugs()
    @torch.no_grad()
    def selected(self, indices: Tensor, spec: SelectionSpec, cu_seqlens: Tensor | None, q_offset: int = 0) -> None:
        self._selection.append(selection_numbers(indices, spec, cu_seqlens, q_offset))

    def finish(self, step: int) -> None:
        """Ends a pass: starts copying its statistics to the host."""
        gates, selection = self._gates, self._selection
        self._gates, self._selection = [], []
        if self._gather is not None:
            gates = self._merge_ranks("gates", gates, 1, GATE_NUMBERS, GATE_MAXIMA)
            selection = self._merge_ranks("selection", selection, 2, SELECTION_NUMBERS, SELECTION_MAXIMA)
        if gates or selection:
            # A non-blocking copy to the host uses pinned memory.
            on_host = [torch.stack(p).to("cpu", non_blocking=True) if p else None for p in (gates, selection)]
            arrived = None
            if any(part and part[0].is_cuda for part in (gates, selection)):
                arrived = torch.cuda.Event()
                arrived.record()
            self._waiting.append((step, on_host[0], on_host[1], arrived))

    def _merge_ranks(self, kind: str, rows: list[Tensor], parts: int, width: int, maxima: slice) -> list[Tensor]:
        """Merges the parts of each layer over all ranks into one row; NaN if a rank did not observe all layers."""
        assert self._gather is not None
        layers = len(self.layers[kind])
        if len(rows) == parts * layers:
            own = torch.stack(rows).unflatten(0, (layers, -1)).transpose(0, 1)
        else:  # all ranks must gather the same shape, even if one of them failed
            own = torch.full((parts, layers, width), torch.nan, dtype=torch.float64)
        everywhere = self._gather(own.contiguous()).flatten(0, 1)
        return list(_total(everywhere, maxima)) if rows else []

    def ready(self, *, wait: bool = False) -> list[Sample]:
        """Samples that have arrived on the host; `wait` waits for all, at the end of a run."""
        done: list[Sample] = []
        while self._waiting:
            step, gates, selection, arrived = self._waiting[0]
            if wait and arrived is not None:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                break
            self._waiting.pop(0)
            of_gates = self._by_layer("gates", gates, read_gates, GATE_MAXIMA)
            done.append(
                Sample(step, of_gates, self._by_layer("selection", selection, read_selection, SELECTION_MAXIMA))
            )
        return done

    def _by_layer(self, kind: str, rows: Tensor | None, read: Callable[[Tensor], T], maxima: slice) -> dict[str, T]:
        if rows is None or not rows.isfinite().all():  # NaN: a rank of the group has no statistics
            return {}
        names = self.layers[kind] if len(rows) == len(self.layers[kind]) else [str(n) for n in range(len(rows))]
        return dict(zip([*names, ALL_LAYERS], map(read, [*rows, _total(rows, maxima)]), strict=True))


def _total(rows: Tensor, maxima: slice) -> Tensor:
    """Merges the rows of N layers or ranks: [N, ..., numbers] -> [..., numbers]."""
    total = rows.sum(0)
    total[..., maxima] = rows[..., maxima].amax(0)
    return total


def gate_numbers(gates: Tensor) -> Tensor:
    """[B, S, H, 3] -> rows, sum and negative minimum of entropy, largest share, rows collapsed, sum of each share."""
    share = gates.detach().flatten(0, -2).to(torch.float32)
    share = share / share.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
    largest = share.amax(-1)
    wide = torch.float64
    return torch.stack(
        [
            torch.full((), share.shape[0], dtype=wide, device=share.device),
            entropy.sum(dtype=wide),
            -entropy.amin().to(wide),
            largest.amax().to(wide),
            (largest > COLLAPSED).sum(dtype=wide),
            *share.sum(0, dtype=wide),
        ]
    )


def read_gates(row: Tensor) -> GateStats:
    rows, entropy, lowest, largest, collapsed, *shares = row.tolist()
    return GateStats(int(rows), entropy / rows, -lowest, largest, collapsed / rows, *(share / rows for share in shares))


def selection_numbers(indices: Tensor, spec: SelectionSpec, cu_seqlens: Tensor | None, q_offset: int = 0) -> Tensor:
    """[B, S, G, n] -> rows, blocks, most blocks in a row, full rows, forced blocks, agreeing and compared blocks, and
    blocks by distance."""
    batch, tokens, groups, width = indices.shape
    position = token_layout(q_offset + tokens, cu_seqlens, indices.device).position[q_offset:]
    own = block_of(position, spec.sel_block).view(1, tokens, 1, 1)
    used = indices >= 0
    distinct = used.sum(-1)
    distance = (own - indices).clamp(min=0)
    forced = used & is_forced(indices, own, spec)
    bounds = 2 ** torch.arange(len(DISTANCE_BINS) - 1, device=own.device)  # created on the device: a copy would block
    bins = torch.bucketize(distance, bounds, right=True)
    histogram = torch.zeros(len(DISTANCE_BINS), dtype=torch.float64, device=own.device)
    histogram.index_add_(0, bins.flatten(), used.flatten().to(torch.float64))
    agreeing, compared = _agreement(indices, position)
    wide = torch.float64
    numbers = [
        torch.full((), batch * tokens * groups, dtype=wide, device=own.device),
        distinct.sum(dtype=wide),
        distinct.amax().to(wide),
        (distinct == width).sum(dtype=wide),
        forced.sum(dtype=wide),
        agreeing,
        compared,
    ]
    return torch.cat([torch.stack(numbers), histogram])


def _agreement(indices: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks that a row shares with the row before it, and number of blocks in the compared rows."""
    step = -(-indices.shape[1] // MAX_PAIRS)
    later = torch.arange(1, indices.shape[1], step, device=indices.device)
    mine, before = indices[:, later], indices[:, later - 1]
    used = (mine >= 0) & (position[later] > 0).view(1, -1, 1, 1)  # the first token of a document has no predecessor
    shared = (mine.unsqueeze(-1) == before.unsqueeze(-2)).any(-1) & used
    wide = torch.float64
    return shared.sum(dtype=wide), used.sum(dtype=wide)


def read_selection(row: Tensor) -> SelectionStats:
    rows, blocks, most, full, forced, agreeing, compared, *histogram = row.tolist()
    return SelectionStats(
        int(rows),
        blocks / rows,
        int(most),
        full / rows,
        forced / max(1.0, blocks),
        agreeing / max(1.0, compared),
        tuple(count / max(1.0, blocks) for count in histogram),
    )
