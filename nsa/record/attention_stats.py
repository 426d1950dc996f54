"""Statistics of sparse attention: how gates weight the branches, which blocks queries read, and how much of the
attention these blocks hold.

The statistics are computed from tensors of the forward pass, reduced on their device to one row of numbers per layer,
and copied to the host asynchronously: `ready` returns the samples that have arrived. Layers are identified by the order
in which they run.

A row of gates is the weights of one token and head, divided by their sum. It is collapsed when one branch has more than
COLLAPSED of the weight. Entropy is in nats; three equal shares have ln 3 = 1.0986.

A row of blocks is the blocks that one token and key/value head reads. Forced blocks are the first and the newest ones,
read regardless of the scores. The distance of a block is counted in blocks from the query's own. Agreement is the share
of a row's blocks that the previous token of the document also reads.

The mass of a query and head is the share of its attention weights over all visible tokens that the blocks it reads
hold. It is measured for at most SAMPLED queries, spread over those that do not read all blocks. Every sequence counts
by the number of these queries, so that any division of sequences into parts estimates the same mean.

An evaluation measures the mass for more queries, and with it the heaviest blocks: as many as are read, those with the
most attention of the heads that share a selection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.ops.layout import block_of, is_forced, num_blocks, token_layout
from nsa.ops.spec import SelectionSpec
from nsa.record.failures import reporting_bugs
from nsa.run_folder import ALL_LAYERS, DISTANCE_BINS, GateStats, SelectionStats

COLLAPSED = 0.95
MAX_PAIRS = 8192  # rows whose neighbours are compared: enough for a share, and cheap at any length
SAMPLED = 32  # queries whose mass is measured, in one report of a layer
EVALUATED = 256  # the same in an evaluation
MAX_ELEMENTS = 2**24  # of a tensor of scores or keys, while the mass is measured
# Of each kind of statistics, the numbers per row, and the columns that are maxima; all others are sums.
KINDS = {"gates": (8, slice(2, 4)), "selection": (7 + len(DISTANCE_BINS), slice(2, 3)), "mass": (2, slice(0))}

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Statistics of one step by layer; the last key is ALL_LAYERS. Empty if no layer has gates or a selection."""

    step: int
    gates: dict[str, GateStats]
    selection: dict[str, SelectionStats]


class AttentionObserver:
    """Observes one forward pass at a time. `layers` names the layers that report each of KINDS, in the order they run.
    A layer that reports "mass" may report nothing in a pass: while it computes dense attention, it selects no blocks.

    Under context parallelism a layer reports the blocks of its two chunks of queries one after the other, and the mass
    in any number of parts. `gather` stacks a tensor over the ranks of the group, so that each rank has the statistics
    of whole sequences.
    """

    def __init__(self, layers: Mapping[str, Sequence[str]], gather: Callable[[Tensor], Tensor] | None = None):
        self.layers, self._gather = layers, gather
        self.failures = 0
        self._rows: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        self._waiting: list[tuple[int, dict[str, Tensor], Any]] = []

    @reporting_bugs()
    @torch.no_grad()
    def mixed(self, gates: Tensor) -> None:
        self._rows["gates"].append(gate_numbers(gates))

    @reporting_bugs()
    @torch.no_grad()
    def selected(self, indices: Tensor, spec: SelectionSpec, cu_seqlens: Tensor | None, q_offset: int = 0) -> None:
        self._rows["selection"].append(selection_numbers(indices, spec, cu_seqlens, q_offset))

    @reporting_bugs()
    @torch.no_grad()
    def attended(
        self, q: Tensor, k: Tensor, lse: Tensor, counted: Tensor, cu_seqlens: Tensor | None, q_offset: int = 0
    ) -> None:
        self._rows["mass"].append(mass_numbers(q, k, lse, counted, cu_seqlens, q_offset))

    def finish(self, step: int) -> None:
        """Ends a pass: starts copying its statistics to the host."""
        rows, self._rows = self._rows, {kind: [] for kind in KINDS}
        merged = {kind: self._merge(kind, rows[kind]) for kind, names in self.layers.items() if names}
        if any(rows.values()):
            # A non-blocking copy to the host uses pinned memory.
            on_host = {kind: found.to("cpu", non_blocking=True) for kind, found in merged.items()}
            arrived = None
            if any(found.is_cuda for found in merged.values()):
                arrived = torch.cuda.Event()
                arrived.record()
            self._waiting.append((step, on_host, arrived))

    def _merge(self, kind: str, rows: list[Tensor]) -> Tensor:
        """Merges the parts of each layer over all ranks: [layers, numbers]. Zeros if a layer did not report, NaN if a
        rank did not observe all layers."""
        names, (width, maxima) = self.layers[kind], KINDS[kind]
        parts = 2 if self._gather is not None and kind == "selection" else 1
        if kind == "mass":
            parts = max(1, len(rows) // len(names))
        always = [name for name in names if name not in self.layers.get("mass", ())]
        reported = next((some for some in (names, always) if len(rows) == parts * len(some)), None)
        if reported is None:  # all ranks must gather the same shape, even if one of them failed
            own = torch.full((len(names), width), torch.nan, dtype=torch.float64)
        else:
            empty = rows[0].new_zeros(1, width) if rows else torch.zeros(1, width, dtype=torch.float64)
            each = iter(torch.stack(rows).split(parts)) if rows else iter(())
            own = torch.stack([_total(next(each) if name in reported else empty, maxima) for name in names])
        return own if self._gather is None else _total(self._gather(own), maxima)

    def ready(self, *, wait: bool = False) -> list[Sample]:
        """Samples that have arrived on the host; `wait` waits for all, at the end of a run."""
        done: list[Sample] = []
        while self._waiting:
            step, rows, arrived = self._waiting[0]
            if wait and arrived is not None:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                break
            self._waiting.pop(0)
            selection = self._by_layer("selection", rows, read_selection)
            mass = self._by_layer("mass", rows, read_mass)
            selection = {name: replace(found, mass=mass.get(name)) for name, found in selection.items()}
            done.append(Sample(step, self._by_layer("gates", rows, read_gates), selection))
        return done

    def _by_layer(self, kind: str, rows: Mapping[str, Tensor], read: Callable[[Tensor], T]) -> dict[str, T]:
        found = rows.get(kind)
        if found is None or not found.isfinite().all():  # NaN: a rank of the group has no statistics
            return {}
        layers = {name: read(row) for name, row in zip(self.layers[kind], found, strict=True) if row[0] > 0}
        return {**layers, ALL_LAYERS: read(_total(found, KINDS[kind][1]))} if layers else {}


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


def mass_numbers(
    q: Tensor, k: Tensor, lse: Tensor, counted: Tensor, cu_seqlens: Tensor | None, q_offset: int = 0
) -> Tensor:
    """Pairs of a counted query and a head, and the sum of their masses, estimated from a sample.

    q [B, S, H, D], k [B, N, G, D], lse [B, S, H] the log-sum-exp over the blocks that are read, counted [B, S] bool.
    """
    batch, _, heads, size = q.shape
    at, is_sampled, total = _sample(counted, SAMPLED)
    whole = lse.new_full((*at.shape, heads), -torch.inf)  # log-sum-exp over all visible tokens
    width = max(1, MAX_ELEMENTS // (batch * max(at.shape[1] * heads, k.shape[2] * size)))
    for start in range(0, k.shape[1], width):
        scores = _scores(q, k, at, slice(start, start + width), cu_seqlens, q_offset)
        whole = torch.logaddexp(whole, scores.logsumexp(-1).flatten(2))
    mass = (lse[torch.arange(batch, device=q.device)[:, None], at] - whole).exp().clamp(max=1.0)
    return _weighted_sums(is_sampled, total * heads, mass.mean(2))


def _sample(counted: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses queries, spread over the counted ones: their places [B, sample] and whether each is one of them, which
    may be fewer; and the number of counted queries [B, 1]."""
    batch, tokens = counted.shape
    sample = max(1, most // batch)
    count = counted.cumsum(1)
    total = count[:, -1:]
    number = torch.arange(1, 2 * sample, 2, device=counted.device) * total.clamp(min=sample) // (2 * sample) + 1
    return torch.searchsorted(count, number).clamp(max=tokens - 1), number <= total, total


def _scores(q: Tensor, k: Tensor, at: Tensor, keys: slice, cu_seqlens: Tensor | None, q_offset: int) -> Tensor:
    """The scores of queries at [B, n] and some keys, [B, n, G, h, K]: -inf where a query does not see a key."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    row, token = torch.arange(len(at), device=q.device)[:, None], (q_offset + at).unsqueeze(-1)
    first = token_layout(q_offset + q.shape[1], cu_seqlens, q.device).doc_start[token]
    place = torch.arange(k.shape[1], device=q.device)[keys]
    unseen = ((place < first) | (place > token))[:, :, None, None]
    queries = (q[row, at].to(dtype) * q.shape[3] ** -0.5).unflatten(2, (k.shape[2], -1))
    return torch.einsum("bnghd,bkgd->bnghk", queries, k[:, keys].to(dtype)).masked_fill_(unseen, -torch.inf)


def _weighted_sums(is_sampled: Tensor, weight: Tensor, *values: Tensor) -> Tensor:
    """The sum of the weights [B, 1] of sequences, and of the weighted means of each of `values` [B, sample]."""
    weight = weight.to(torch.float64)
    each = weight / is_sampled.sum(1, keepdim=True).clamp(min=1)
    return torch.stack([weight.sum(), *((each * value.where(is_sampled, 0.0)).sum() for value in values)])


def quality_numbers(
    q: Tensor, k: Tensor, indices: Tensor, block: int, cu_seqlens: Tensor | None, q_offset: int = 0
) -> Tensor:
    """Queries that see more blocks than they read, the sum of their masses, and of the shares of their heaviest blocks
    that they read; each a mean over heads or groups, estimated from a sample.

    q [B, S, H, D], k [B, N, G, D], indices [B, S, G, num_selected], blocks of `block` tokens.
    """
    layout, count = token_layout(q_offset + q.shape[1], cu_seqlens, q.device), indices.shape[3]
    counted = (layout.position[q_offset:] >= count * block).expand(q.shape[:2])
    at, is_sampled, total = _sample(counted, EVALUATED)
    blocks, found = num_blocks(k.shape[1], block), []
    for some in at.split(max(1, MAX_ELEMENTS // (len(q) * q.shape[2] * k.shape[1])), dim=1):
        share = _scores(q, k, some, slice(None), cu_seqlens, q_offset).softmax(-1)
        place = torch.arange(k.shape[1], device=q.device) - layout.doc_start[q_offset + some].unsqueeze(-1)
        number = block_of(place.clamp(min=0), block)[:, :, None, None].expand_as(share)
        by_block = share.new_zeros(*share.shape[:-1], blocks).scatter_add_(-1, number, share)  # [B, n, G, h, blocks]
        read = indices[torch.arange(len(q), device=q.device)[:, None], some].long()
        read = read.where(read >= 0, blocks)  # one more block, for rows that are not full
        is_read = share.new_zeros(*read.shape[:3], blocks + 1).scatter_(-1, read, 1.0)[..., :-1]
        heaviest = by_block.sum(3).topk(min(count, blocks), -1).indices
        mass = (by_block * is_read.unsqueeze(3)).sum(-1).mean((2, 3))
        found.append(torch.stack([mass, is_read.gather(-1, heaviest).mean((2, 3))]))
    return _weighted_sums(is_sampled, total, *torch.cat(found, dim=2))


def read_mass(row: Tensor) -> float:
    rows, mass = row.tolist()
    return float(mass / rows)
