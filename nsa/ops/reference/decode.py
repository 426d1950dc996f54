"""Attention of a few new tokens over a cache: what `nsa.ops.decode` computes, from the parts of the other operators.

Pages may hold anything, NaN included, where no token was written yet: what a query does not see is read as 0.

Legend: B batch, n new tokens, H query heads, G key/value heads, h = H/G, D and E head sizes of keys and values,
T cached tokens that are looked at.
"""

import torch
from torch import Tensor

from nsa.ops.layout import num_blocks, visible_compressed
from nsa.ops.reference import mix
from nsa.ops.reference.attention import Chunk, attend, chunk_scores, exp_minus, fold_heads, keys_first, row_slices
from nsa.ops.reference.selection import block_scores, pick_blocks
from nsa.ops.spec import NSASpec

# Elements of keys and values gathered at once for the blocks that queries selected.
GATHERED = 1 << 24


def nsa(
    q: Tensor,
    gates: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    cmp_table: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    sel_table: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    win_places: Tensor,
    positions: Tensor,
    spec: NSASpec,
) -> tuple[Tensor, Tensor]:
    """q [B,n,H,D], gates [B,n,H,3], positions [B,n]; pages and rings as `paged` takes them.

    Gives o [B,n,H,E] and the blocks each query read: int32 [B,n,G,num_selected], as `select_blocks` gives them.
    """
    position = positions.to(torch.int64)
    o_cmp, indices = _compressed(q, k_cmp, v_cmp, cmp_table, position, k_sel.shape[1] * sel_table.shape[1], spec)
    o_sel = _selected(q, k_sel, v_sel, sel_table, indices, position, spec)
    o_win = paged(q, k_win, v_win, win_places, positions, spec.window)
    return mix.forward(o_cmp, o_sel, o_win, gates), indices


def paged(q: Tensor, k: Tensor, v: Tensor, places: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention over the last `window` tokens (None: all) up to the query's own position.

    `places` is a page table [B, pages] of k [P,page,G,D] and v [P,page,G,E], or the rings [B] of k [slots,ring,G,D] and
    v, in which the token at position s has place s % ring.
    """
    t = positions.to(torch.int64).unsqueeze(-1)  # [B, n, 1]
    if places.dim() == 2:
        k, v = (_pages(x, places, _reach(positions)) for x in (k, v))
        token = torch.arange(k.shape[1], device=q.device).expand(1, 1, -1)
    else:
        k, v = k[places], v[places]
        token = t - (t - torch.arange(k.shape[1], device=q.device)) % k.shape[1]  # the newest up to t at each place
    o = q.new_empty(*q.shape[:3], v.shape[3])
    for rows in row_slices(q, k.shape[1]):
        last = t[:, rows]
        held = token[:, rows] if token.shape[1] > 1 else token
        seen = (held >= 0) & (held <= last)
        if window is not None:
            seen &= held > last - window
        o[:, rows] = _attend(q[:, rows], k, v, seen.unsqueeze(1))[0]
    return o


def _reach(positions: Tensor) -> int | None:
    """Tokens of the longest sequence where reading them costs nothing (on the CPU); None stands for all."""
    return max(1, int(positions.max()) + 1) if positions.device.type == "cpu" else None


def _pages(x: Tensor, table: Tensor, tokens: int | None) -> Tensor:
    """[P, page, G, D] -> the first `tokens` tokens of every sequence, as whole pages [B, T, G, D]."""
    pages = table if tokens is None else table[:, : -(-tokens // x.shape[1])]
    return x[pages.clamp(0, x.shape[0] - 1)].flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q [B,n,H,D], k [B,T,G,D], v [B,T,G,E], seen [B, 1 or G, n, T] -> o, and k with 0 where nobody looks."""
    used = seen.any(2).transpose(1, 2).unsqueeze(-1)  # [B, T, 1 or G, 1]
    k, v = k.masked_fill(~used, 0.0), v.masked_fill(~used, 0.0)
    chunk = Chunk(slice(0, q.shape[1]), slice(0, k.shape[1]), seen.unsqueeze(2))
    return attend(q, k, v, iter([chunk]))[0], k


def _compressed(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position: Tensor, capacity: int, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens, and the blocks that it selects."""
    reach = _reach(position)
    blocks = num_blocks(capacity if reach is None else reach, spec)
    tokens = None if reach is None else visible_compressed(reach - 1, spec)
    k, v = (_pages(x, table, tokens) for x in (k, v))
    token = torch.arange(k.shape[1], device=q.device)
    seen = (token < visible_compressed(position, spec).unsqueeze(-1)).unsqueeze(1)  # [B, 1, n, T]
    o, k = _attend(q, k, v, seen)
    groups, per_group = k.shape[2], q.shape[2] // k.shape[2]
    scores = chunk_scores(fold_heads(q, groups), keys_first(k, slice(None)), seen.unsqueeze(2), per_group)
    p = exp_minus(scores, scores.logsumexp(-1)).sum(2)  # [B, G, n, T]
    indices = pick_blocks(block_scores(p, blocks, spec), position.unsqueeze(1), spec)
    return o, indices.transpose(1, 2).contiguous()


def _selected(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, indices: Tensor, position: Tensor, spec: NSASpec
) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own."""
    batch, new, heads, _ = q.shape
    groups, page = k.shape[2], k.shape[1]
    reach = _reach(position)
    if reach is not None:  # the rest of the places is empty
        indices = indices[..., : num_blocks(reach, spec)]
    token = (indices.to(torch.int64) * spec.sel_block).unsqueeze(-1) + torch.arange(spec.sel_block, device=q.device)
    seen = ((indices >= 0).unsqueeze(-1) & (token <= position[:, :, None, None, None])).flatten(3)  # [B, n, G, T]
    token = token.flatten(3).clamp(0, page * table.shape[1] - 1)
    pages = table.gather(1, (token // page).flatten(1)).view(token.shape).clamp(0, k.shape[0] - 1)
    group = torch.arange(groups, device=q.device)[:, None]
    o = q.new_empty(batch, new, heads, v.shape[3])
    step = max(1, GATHERED // max(1, batch * groups * token.shape[3] * (k.shape[3] + v.shape[3])))
    for rows in (slice(first, first + step) for first in range(0, new, step)):
        # Every query has keys of its own: it becomes a sequence of one token.
        own_k, own_v = (
            x[pages[:, rows], token[:, rows] % page, group].flatten(0, 1).transpose(1, 2) for x in (k, v)
        )  # [B*n, T, G, D]
        part, own_seen = q[:, rows], seen[:, rows].flatten(0, 1).unsqueeze(2)
        o[:, rows] = _attend(part.flatten(0, 1).unsqueeze(1), own_k, own_v, own_seen)[0].view(*part.shape[:3], -1)
    return o
