"""Reference of `nsa.ops.decoding`: attention of a few new tokens over a cache, from the parts of the other operators.

Unwritten parts of pages may hold any value, including NaN: tokens that a query does not see are read as 0.

Legend: B batch, n new tokens, H query heads, G key/value heads, h = H/G, D and E head sizes of keys and values,
T cached tokens that are read.
"""

import torch
from torch import Tensor

from nsa.ops.layout import num_blocks, visible_compressed
from nsa.ops.reference import mix
from nsa.ops.reference.masked_attention import (
    accumulation_dtype,
    chunk_scores,
    exp_minus,
    fold_heads,
    nan_or_zero,
    row_slices,
    unfold_heads,
    weigh,
)
from nsa.ops.reference.msa_index import block_maxima
from nsa.ops.reference.selection import block_scores, pick_blocks
from nsa.ops.spec import MSASpec, NSASpec

# Elements of keys and values gathered at once for the blocks that queries selected.
GATHERED = 1 << 24


def nsa(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, cmp_table: Tensor, k_sel: Tensor, v_sel: Tensor,
    sel_table: Tensor, k_win: Tensor, v_win: Tensor, win_places: Tensor, positions: Tensor, spec: NSASpec,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B,n,H,D], gates [B,n,H,3], positions [B,n]; pages and rings as `paged` takes them.

    Returns o [B,n,H,E] and the blocks that each query read, int32 [B,n,G,num_selected] as from `select_blocks`.
    """
    position = positions.to(torch.int64)
    reach = _reach(positions, k_sel.shape[1] * sel_table.shape[1])
    o_cmp, indices = _compressed(q, k_cmp, v_cmp, cmp_table, position, reach, spec)
    seen = indices[..., : num_blocks(reach, spec.sel_block)]
    o_sel = _selected(q, k_sel, v_sel, sel_table, seen, position, spec.sel_block)
    o_win = paged(q, k_win, v_win, win_places, positions, spec.window)
    return mix.forward(o_cmp, o_sel, o_win, gates), indices


def msa(
    q: Tensor, index_q: Tensor, k: Tensor, v: Tensor, index_keys: Tensor, table: Tensor, positions: Tensor,
    spec: MSASpec,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B,n,H,D], index_q [B,n,G,I], positions [B,n]; index_keys [P,page,1,I] in the pages of k and v.

    Returns o [B,n,H,E] and the blocks that each query read, int32 [B,n,G,num_selected] as from `index_blocks`.
    """
    position = positions.to(torch.int64)
    reach, groups = _reach(positions, k.shape[1] * table.shape[1]), k.shape[2]
    keys = _pages(index_keys, table, reach).transpose(1, 2).to(accumulation_dtype(q.dtype))  # [B, 1, T, I]
    indices = positions.new_empty(*positions.shape, groups, spec.num_selected)
    for rows in row_slices(index_q, keys.shape[2]):
        scores = fold_heads(index_q[:, rows], groups) @ keys.transpose(-1, -2)  # [B, G, n, T]
        at = position[:, None, rows]
        unseen = torch.arange(keys.shape[2], device=q.device) > at.unsqueeze(-1)
        indices[:, rows] = pick_blocks(block_maxima(scores, unseen, spec.block), at, spec).transpose(1, 2)
    seen = indices[..., : num_blocks(reach, spec.block)]
    return _selected(q, k, v, table, seen, position, spec.block), indices


def paged(q: Tensor, k: Tensor, v: Tensor, places: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention over the last `window` tokens (None: all) up to the query's own position.

    `places` is a page table [B, pages] of k [P,page,G,D] and v [P,page,G,E], or the rings [B] of k [slots,ring,G,D] and
    v, in which the token at position s has index s % ring.
    """
    t = positions.to(torch.int64).unsqueeze(-1)  # [B, n, 1]
    if places.dim() == 2:
        reach = _reach(positions, k.shape[1] * places.shape[1])
        k, v = _pages(k, places, reach), _pages(v, places, reach)
        age = t - torch.arange(k.shape[1], device=q.device)
    else:
        k, v = k.index_select(0, places), v.index_select(0, places)
        age = (t - torch.arange(k.shape[1], device=q.device)) % k.shape[1]  # of the newest token up to t in each place
    unseen = (age < 0) | (age > (t if window is None else t.clamp(max=window - 1)))
    k, v, unseen = k.transpose(1, 2), v.transpose(1, 2), unseen.unsqueeze(1)
    parts = [_attend(q[:, rows], k, v, unseen[:, :, rows])[0] for rows in row_slices(q, k.shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _reach(positions: Tensor, capacity: int) -> int:
    """The length of the longest sequence on the CPU; elsewhere the capacity, to avoid a synchronization."""
    return max(1, int(positions.max()) + 1) if positions.device.type == "cpu" else capacity


def _pages(x: Tensor, table: Tensor, tokens: int) -> Tensor:
    """[P, page, G, D] -> the first `tokens` tokens of every sequence, as whole pages [B, T, G, D]."""
    pages = table[:, : -(-tokens // x.shape[1])].clamp(0, x.shape[0] - 1)
    # Equals indexing by `pages`, which starts threads even for tiny tensors.
    return x.index_select(0, pages.flatten()).view(pages.shape[0], -1, *x.shape[2:])


def _attend(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,n,H,D], k [B,G,T,D], v [B,G,T,E], unseen [B, 1 or G, n, T] -> o [B,n,H,E], scores [B,G,h,n,T] and their
    log-sum-exp [B,G,h,n]."""
    groups, acc = k.shape[1], accumulation_dtype(q.dtype)
    k, v = k.to(acc), v.to(acc)
    scores = chunk_scores(fold_heads(q, groups), k + nan_or_zero(v), unseen.unsqueeze(2), q.shape[2] // groups)
    mixed, lse = weigh(scores.clone(), v)
    return unfold_heads(mixed, q.shape[2]).to(q.dtype), scores, lse


def _compressed(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position: Tensor, reach: int, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens, and the blocks that it selects among `reach` tokens."""
    k, v = (_pages(x, table, visible_compressed(reach - 1, spec)) for x in (k, v))
    visible = visible_compressed(position, spec).unsqueeze(-1)
    unseen = (torch.arange(k.shape[1], device=q.device) >= visible).unsqueeze(1)  # [B, 1, n, T]
    o, scores, lse = _attend(q, k.transpose(1, 2), v.transpose(1, 2), unseen)
    p = exp_minus(scores, lse).sum(2)  # [B, G, n, T]
    indices = pick_blocks(block_scores(p, num_blocks(reach, spec.sel_block), spec), position.unsqueeze(1), spec)
    return o, indices.transpose(1, 2).contiguous()


def _selected(q: Tensor, k: Tensor, v: Tensor, table: Tensor, indices: Tensor, position: Tensor, block: int) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own."""
    (batch, new, heads, _), (pool, page, groups, _) = q.shape, k.shape
    token = (indices.to(torch.int64) * block).unsqueeze(-1) + torch.arange(block, device=q.device)
    token = token.flatten(3)  # [B, n, G, T], negative for padding
    unseen = (token < 0) | (token > position[:, :, None, None])
    token = token.clamp(min=0)
    pages = table.gather(1, (token // page).flatten(1)).view(token.shape).clamp(0, pool - 1)
    place = (pages * page + token % page) * groups + torch.arange(groups, device=q.device)[:, None]
    o = q.new_empty(batch, new, heads, v.shape[3])
    step = max(1, GATHERED // max(1, batch * groups * token.shape[3] * (k.shape[3] + v.shape[3])))
    for rows in (slice(first, first + step) for first in range(0, new, step)):
        # Queries read different keys: each becomes a sequence of one token.
        own = place[:, rows].flatten(0, 1)
        own_k, own_v = (x.flatten(0, 2).index_select(0, own.flatten()).view(*own.shape, -1) for x in (k, v))
        part, own_unseen = q[:, rows], unseen[:, rows].flatten(0, 1).unsqueeze(2)
        o[:, rows] = _attend(part.flatten(0, 1).unsqueeze(1), own_k, own_v, own_unseen)[0].view(*part.shape[:3], -1)
    return o
