"""Attention of new tokens over a cache of keys and values: `nsa_decode` for an NSA layer, `msa_decode` for an MSA
layer, `paged_attention` for a dense or a window layer.

A cache is either pages, which hold all tokens of a sequence in the order of its page table, or a ring, which holds the
newest tokens. Many sequences share a pool of pages or rings. The cache must already hold the keys and values of every
position up to and including a query's own. The results equal those of the operators on whole sequences. No gradient.

The functions read no value from the device, sizes depend only on shapes, and workspaces come from torch's allocator: a
call captured in a CUDA graph works for every length that the page table can hold.

Legend: B batch, n new tokens of each sequence, H query heads, G key/value heads, Dk and Dv head sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import dispatch
from nsa.ops.checks import check_float, check_gates, check_head_size, check_ints, check_like, check_pair
from nsa.ops.layout import compressed_per_block
from nsa.ops.library import define, msa_spec_of, spec_of, values_are_checked
from nsa.ops.spec import MSASpec, NSASpec


@dataclass(frozen=True)
class PagedKV:
    """Token s of sequence b is in page table[b, s // page] at index s % page.

    k [P, page, G, Dk], v [P, page, G, Dv]; table int32 [B, pages]. Table entries after the page of a sequence's last
    token are not used and may hold any value.
    """

    k: Tensor
    v: Tensor
    table: Tensor


@dataclass(frozen=True)
class RingKV:
    """Token s of sequence b is in ring slots[b] at index s % ring.

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
    sequence, -1 for padding, whose output is 0. A page of `sel` holds `page` tokens, a multiple of sel_block; a page of
    `cmp` holds page // cmp_stride compressed tokens. A ring must hold window + n - 1 tokens.
    """
    _check_queries(q, positions)
    check_gates(gates, q)
    for name, kv in (("cmp", cmp), ("sel", sel), ("win", win)):
        _check_cache(name, kv, q, spec.window if name == "win" else None)
    page = sel.k.shape[1]
    if page % spec.sel_block:
        raise ArgumentError("sel.k", f"a page must hold whole blocks of {spec.sel_block} tokens, got {page} tokens")
    if cmp.k.shape[1] * spec.cmp_stride != page:
        raise ArgumentError(
            "cmp.k",
            f"must hold {page // spec.cmp_stride} compressed tokens per page, one for each "
            f"cmp_stride={spec.cmp_stride} of sel's {page} tokens; got {cmp.k.shape[1]}",
        )
    for name, kv in (("cmp", cmp), ("win", win)):
        if kv.v.shape[2:] != sel.v.shape[2:]:
            raise ArgumentError(
                f"{name}.v",
                f"must have sel.v's heads and head size {list(sel.v.shape[2:])}, got {list(kv.v.shape[2:])}",
            )
    return nsa_decode_node(
        q.detach(), gates.detach(), *_tensors(cmp), *_tensors(sel), *_tensors(win), positions, spec.as_ints(), backend
    )[0]


def msa_decode(
    q: Tensor,
    index_q: Tensor,
    kv: PagedKV,
    index_keys: Tensor,
    positions: Tensor,
    spec: MSASpec,
    *,
    backend: str | None = None,
) -> Tensor:
    """Attention of new tokens over the blocks that the index chooses: [B,n,H,Dv].

    q [B,n,H,Dk] and index_q [B,n,G,E] as for `msa_attention`; index_keys [P,page,1,E] in the pages of kv, which hold a
    multiple of `spec.block` tokens; positions int32 [B,n], the position of every query in its sequence, -1 for padding,
    whose output is 0.
    """
    _check_queries(q, positions)
    _check_cache("kv", kv, q, None)
    check_float("index_q", index_q)
    check_head_size("index_q", index_q)
    check_like("index_q", index_q, q, "q")
    (pool, page, groups, _), size = kv.k.shape, index_q.shape[3]
    if index_q.shape[:3] != (*q.shape[:2], groups):
        wanted = [*q.shape[:2], groups]
        raise ArgumentError("index_q", f"must start with [B, n, G] = {wanted}, got {list(index_q.shape)}")
    if index_keys.shape != (pool, page, 1, size):
        wanted = [pool, page, 1, size]
        raise ArgumentError("index_keys", f"must be [P, page, 1, E] = {wanted}, got {list(index_keys.shape)}")
    check_like("index_keys", index_keys, q, "q")
    if page % spec.block:
        raise ArgumentError("kv.k", f"a page must hold whole blocks of {spec.block} tokens, got {page} tokens")
    k, v, table = _tensors(kv)
    return msa_decode_node(
        q.detach(), index_q.detach(), k, v, index_keys.detach(), table, positions, spec.as_ints(), backend
    )[0]


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
    return paged_node(q.detach(), *_tensors(kv), positions, window, backend)


def _tensors(kv: PagedKV | RingKV) -> tuple[Tensor, Tensor, Tensor]:
    return kv.k.detach(), kv.v.detach(), kv.table if isinstance(kv, PagedKV) else kv.slots


def _check_queries(q: Tensor, positions: Tensor) -> None:
    check_float("q", q)
    check_head_size("q", q)
    check_ints("positions", positions, "[B, n]", list(q.shape[:2]), q)


def _check_cache(name: str, kv: PagedKV | RingKV, q: Tensor, window: int | None) -> None:
    """Checks k and v against q, and the page table or the ring numbers."""
    check_pair(f"{name}.k", kv.k, f"{name}.v", kv.v, q, None)
    if isinstance(kv, PagedKV):
        pages = kv.table.shape[1] if kv.table.dim() == 2 else 1
        check_ints(f"{name}.table", kv.table, "[B, pages]", [q.shape[0], max(1, pages)], q)
        return
    check_ints(f"{name}.slots", kv.slots, "[B]", [q.shape[0]], q)
    if window is None:
        raise ArgumentError("window", "must be given for a ring, which does not keep all tokens")
    least = window + q.shape[1] - 1
    if kv.k.shape[1] < least:
        raise ArgumentError(
            f"{name}.k",
            f"a ring of {kv.k.shape[1]} tokens is too short for {q.shape[1]} new tokens with a window of {window}: it "
            f"must hold {least}",
        )


def _decode(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, cmp_table: Tensor, k_sel: Tensor, v_sel: Tensor,
    sel_table: Tensor, k_win: Tensor, v_win: Tensor, win_places: Tensor, positions: Tensor, spec: Sequence[int],
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`win_places` is a page table [B, pages] or the rings [B]. Also returns the blocks that the queries read."""
    sizes = spec_of(spec)
    if positions.numel() == 0:
        return _decode_shapes(q, v_sel, sizes.num_selected)
    if values_are_checked(positions):
        last = positions.amax(1).tolist()
        _check_places("cmp", k_cmp, cmp_table, last, sizes.cmp_stride)
        _check_places("sel", k_sel, sel_table, last)
        _check_places("win", k_win, win_places, last)
    kernels = dispatch.choose("decode", backend, q, v_sel, count=True, per_block=compressed_per_block(sizes))
    return kernels.nsa(
        q, gates, k_cmp, v_cmp, cmp_table, k_sel, v_sel, sel_table, k_win, v_win, win_places, positions, sizes
    )


def _decode_shapes(q: Tensor, v: Tensor, num_selected: int) -> tuple[Tensor, Tensor]:
    blocks = q.new_empty(*q.shape[:2], v.shape[2], num_selected, dtype=torch.int32)
    return q.new_empty(*q.shape[:3], v.shape[3]), blocks


def _decode_msa(
    q: Tensor, index_q: Tensor, k: Tensor, v: Tensor, index_keys: Tensor, table: Tensor, positions: Tensor,
    spec: Sequence[int], backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Also returns the blocks that the queries read."""
    if positions.numel() == 0:
        return _decode_shapes(q, v, spec[1])
    if values_are_checked(positions):
        _check_places("kv", k, table, positions.amax(1).tolist())
    kernels = dispatch.choose("msa_decode", backend, q, v, count=True)
    return kernels.msa(q, index_q, k, v, index_keys, table, positions, msa_spec_of(spec))


def _attend_pages(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, positions: Tensor, window: int | None, backend: str | None
) -> Tensor:
    """`places` is a page table [B, pages] or the rings [B]."""
    if positions.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    if values_are_checked(positions):
        _check_places("kv", k, places, positions.amax(1).tolist())
    o: Tensor = dispatch.choose("decode", backend, q, v, count=True).paged(q, k, v, places, positions, window)
    return o.contiguous()  # as compiled code expects


def _check_places(name: str, k: Tensor, places: Tensor, last: list[int], stride: int = 1) -> None:
    """Checks that every page or ring that a query needs exists. `last` is the last position of each sequence, `stride`
    the number of tokens per key."""
    used = places.tolist()
    if places.dim() == 2:
        page = k.shape[1] * stride
        room = page * places.shape[1]
        if max(last) >= room:
            raise ArgumentError("positions", f"{max(last)} is beyond the {room} tokens that {name}'s page table holds")
        used = [n for row, end in zip(used, last, strict=True) if end >= 0 for n in row[: end // page + 1]]
    else:
        used = [n for n, end in zip(used, last, strict=True) if end >= 0]
    if used and not 0 <= min(used) <= max(used) < k.shape[0]:
        raise ArgumentError(name, f"refers to {min(used)} .. {max(used)} of {k.shape[0]} pages or rings in its pool")


nsa_decode_node = define(
    "nsa_decode",
    _decode,
    lambda q, gates, k_cmp, v_cmp, cmp_table, k_sel, v_sel, sel_table, k_win, v_win, win_places, positions, spec, _: (
        _decode_shapes(q, v_sel, spec_of(spec).num_selected)
    ),
)
msa_decode_node = define(
    "msa_decode",
    _decode_msa,
    lambda q, index_q, k, v, index_keys, table, positions, spec, _: _decode_shapes(q, v, spec[1]),
)
paged_node = define("paged_attention", _attend_pages, lambda q, k, v, *_: q.new_empty(*q.shape[:3], v.shape[3]))
