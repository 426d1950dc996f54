"""Attention of new tokens over a cache of keys and values: `nsa_decode` for an NSA layer, `paged_attention` for a dense
or a window layer.

A cache is either pages, which hold all tokens of a sequence in the order of its page table, or a ring, which holds the
newest. Both are pools that many sequences share. Keys and values of every position up to a query's own must be in
the cache already, the query's own included. A step gives for every position what the operators on whole sequences give
there. No gradient.

Nothing here reads a value from the device, sizes follow from shapes alone, and workspaces come from torch's allocator:
a call captured in a CUDA graph serves every length up to what the page table holds.

Legend: B batch, n new tokens of each sequence, H query heads, G key/value heads, Dk and Dv head sizes.
"""

from dataclasses import dataclass

from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import library, operators
from nsa.ops.spec import NSASpec


@dataclass(frozen=True)
class PagedKV:
    """Token s of sequence b lies in page table[b, s // page] at place s % page.

    k [P, page, G, Dk], v [P, page, G, Dv]; table int32 [B, pages]. Pages that lie behind a sequence's last token are
    not read: the table may hold anything there.
    """

    k: Tensor
    v: Tensor
    table: Tensor


@dataclass(frozen=True)
class RingKV:
    """Token s of sequence b lies in ring slots[b] at place s % ring.

    k [slots, ring, G, Dk], v [slots, ring, G, Dv]; slots int32 [B].
    """

    k: Tensor
    v: Tensor
    slots: Tensor


def nsa_decode(
    q: Tensor,
    gates: Tensor,
    cmp: PagedKV,
    sel: PagedKV,
    win: PagedKV | RingKV,
    positions: Tensor,
    spec: NSASpec,
    *,
    backend: str | None = None,
) -> Tensor:
    """The three branches for new tokens, mixed by gates: [B,n,H,Dv].

    q [B,n,H,Dk] and gates [B,n,H,3] as for `nsa_attention`; positions int32 [B,n], the position of every query in its
    sequence, -1 for padding, whose output is 0. The pages of `cmp` hold compressed tokens, page // cmp_stride of them
    where those of `sel` hold page tokens; page is a multiple of sel_block. A ring must hold window + n - 1 tokens.
    """
    _check_queries(q, positions)
    operators._check_gates(gates, q)
    for name, kv in (("cmp", cmp), ("sel", sel), ("win", win)):
        _check_cache(name, kv, q, spec.window if name == "win" else None)
    page = sel.k.shape[1]
    if page % spec.sel_block:
        raise ArgumentError("sel.k", f"a page must hold whole blocks of {spec.sel_block} tokens, got {page} tokens")
    if cmp.k.shape[1] * spec.cmp_stride != page:
        raise ArgumentError(
            "cmp.k",
            f"must hold {page // spec.cmp_stride} compressed tokens a page, one for each cmp_stride={spec.cmp_stride} "
            f"of sel's {page} tokens; got {cmp.k.shape[1]}",
        )
    for name, kv in (("cmp", cmp), ("win", win)):
        if kv.v.shape[2:] != sel.v.shape[2:]:
            raise ArgumentError(
                f"{name}.v",
                f"must have sel.v's heads and head size {list(sel.v.shape[2:])}, got {list(kv.v.shape[2:])}",
            )
    o: Tensor
    o, _ = library.nsa_decode(
        q.detach(), gates.detach(), *_tensors(cmp), *_tensors(sel), *_tensors(win), positions, spec.as_ints(), backend
    )
    return o


def paged_attention(
    q: Tensor, kv: PagedKV | RingKV, positions: Tensor, *, window: int | None = None, backend: str | None = None
) -> Tensor:
    """Attention of new tokens over the last `window` tokens (None: all) up to their own position: [B,n,H,Dv].

    q [B,n,H,Dk]; positions int32 [B,n], -1 for padding, whose output is 0. A ring needs a window, and must hold
    window + n - 1 tokens.
    """
    _check_queries(q, positions)
    if window is not None and window < 1:
        raise ArgumentError("window", f"must be None or at least 1, got {window}")
    _check_cache("kv", kv, q, window)
    o: Tensor = library.paged_attention(q.detach(), *_tensors(kv), positions, window, backend)
    return o


def _tensors(kv: PagedKV | RingKV) -> tuple[Tensor, Tensor, Tensor]:
    return kv.k.detach(), kv.v.detach(), kv.table if isinstance(kv, PagedKV) else kv.slots


def _check_queries(q: Tensor, positions: Tensor) -> None:
    operators._check_float("q", q)
    operators._check_head_size("q", q)
    operators._check_ints("positions", positions, "[B, n]", list(q.shape[:2]), q)


def _check_cache(name: str, kv: PagedKV | RingKV, q: Tensor, window: int | None) -> None:
    """k and v against q, and the tensor that finds a sequence's tokens."""
    operators._check_pair(f"{name}.k", kv.k, f"{name}.v", kv.v, q, None)
    if isinstance(kv, PagedKV):
        pages = kv.table.shape[1] if kv.table.dim() == 2 else 1
        operators._check_ints(f"{name}.table", kv.table, "[B, pages]", [q.shape[0], max(1, pages)], q)
        return
    operators._check_ints(f"{name}.slots", kv.slots, "[B]", [q.shape[0]], q)
    if window is None:
        raise ArgumentError("window", "must be given for a ring, which does not keep all tokens")
    least = window + q.shape[1] - 1
    if kv.k.shape[1] < least:
        raise ArgumentError(
            f"{name}.k",
            f"a ring of {kv.k.shape[1]} tokens is too short for {q.shape[1]} new tokens with a window of {window}: it "
            f"must hold {least}",
        )
