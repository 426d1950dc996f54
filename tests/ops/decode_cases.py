"""Caches for the tests of the decode operators, filled from the tensors of whole sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops import MSASpec, NSASpec, PagedKV, RingKV
from nsa.ops.layout import visible_compressed
from nsa.ops.spec import SelectionSpec
from tests.ops.cases import Inputs

GARBAGE = 1 << 30  # in a page table behind the last token


@dataclass
class Cached:
    """The arguments of `nsa_decode` in order, without positions and spec."""

    q: Tensor
    gates: Tensor
    cmp: PagedKV
    sel: PagedKV
    win: PagedKV | RingKV

    def arguments(self) -> tuple[Tensor, Tensor, PagedKV, PagedKV, PagedKV | RingKV]:
        return self.q, self.gates, self.cmp, self.sel, self.win


def page_size(spec: SelectionSpec) -> int:
    return spec.sel_block * -(-64 // spec.sel_block)


def page_table(batch: int, pages: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """A table of shuffled pages, none of them page 0, and the pages of the pool."""
    total = batch * pages + 3
    return 1 + torch.randperm(total - 1, generator=generator)[: batch * pages].view(batch, pages), total


def fill_pages(x: Tensor, lengths: list[int], page: int, table: Tensor, total: int) -> Tensor:
    """[B, S, G, D] -> [P, page, G, D] that holds the first tokens of every sequence and NaN elsewhere."""
    pool = x.new_full((total, page, *x.shape[2:]), torch.nan)
    for b, length in enumerate(lengths):
        s = torch.arange(length)
        pool[table[b, s // page], s % page] = x[b, :length]
    return pool


def without_unused(table: Tensor, lengths: list[int], page: int) -> Tensor:
    """The table as int32, with garbage behind the last page of every sequence."""
    used = table.to(torch.int32)
    for b, length in enumerate(lengths):
        used[b, -(-length // page) :] = GARBAGE * (-1) ** b
    return used


def fill_rings(x: Tensor, lengths: list[int], ring: int, slots: Tensor) -> Tensor:
    pool = x.new_full((len(lengths) + 2, ring, *x.shape[2:]), torch.nan)
    for b, length in enumerate(lengths):
        for s in range(max(0, length - ring), length):
            pool[slots[b], s % ring] = x[b, s]
    return pool


def make_cache(x: Inputs, positions: Tensor, spec: NSASpec, *, ring: int | None = None, spare: int = 1) -> Cached:
    """The cache of sequences `x` after the last of `positions` [B, n] of each, and the queries and gates at those
    positions. A window ring of `ring` tokens, or pages; `spare` pages of the table are not used."""
    generator = torch.Generator().manual_seed(7)
    batch, tokens = x.q.shape[:2]
    lengths = [int(last) + 1 for last in positions.amax(1)]
    page = page_size(spec)
    table, total = page_table(batch, -(-tokens // page) + spare, generator)
    slots = torch.randperm(batch + 2, generator=generator)[:batch].to(torch.int32)
    compressed = [int(visible_compressed(length - 1, spec)) for length in lengths]
    in_cmp = [fill_pages(t, compressed, page // spec.cmp_stride, table, total) for t in (x.k_cmp, x.v_cmp)]
    in_sel = [fill_pages(t, lengths, page, table, total) for t in (x.k_sel, x.v_sel)]
    used = without_unused(table, lengths, page)
    win: PagedKV | RingKV
    if ring is None:
        win = PagedKV(*(fill_pages(t, lengths, page, table, total) for t in (x.k_win, x.v_win)), used)
    else:
        win = RingKV(*(fill_rings(t, lengths, ring, slots) for t in (x.k_win, x.v_win)), slots)
    at = positions.clamp(min=0).to(torch.int64)
    row = torch.arange(batch)[:, None]
    return Cached(x.q[row, at], x.gates[row, at], PagedKV(*in_cmp, used), PagedKV(*in_sel, used), win)


def make_msa_cache(
    tensors: tuple[Tensor, ...], positions: Tensor, spec: MSASpec, *, page: int | None = None
) -> tuple[Tensor, Tensor, PagedKV, Tensor]:
    """The arguments of `msa_decode` without positions and spec: the cache of sequences q, k, v, index_q and index_k
    after the last of `positions` [B, n] of each, and the queries at those positions."""
    q, k, v, index_q, index_k = (x.detach() for x in tensors)
    lengths, page = [int(last) + 1 for last in positions.amax(1)], page or page_size(spec)
    table, total = page_table(q.shape[0], -(-q.shape[1] // page) + 1, torch.Generator().manual_seed(7))
    pools = [fill_pages(x, lengths, page, table, total) for x in (k, v, index_k.unsqueeze(2))]
    row, at = torch.arange(q.shape[0])[:, None], positions.clamp(min=0).to(torch.int64)
    return q[row, at], index_q[row, at], PagedKV(*pools[:2], without_unused(table, lengths, page)), pools[2]
