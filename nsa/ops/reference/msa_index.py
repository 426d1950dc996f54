"""The index of MSA: which blocks it chooses, and its loss, over chunks of queries.

The loss is the divergence of the index's softmax r from the mean p of the attention probabilities of a group's heads.
Memory is linear in S: scores exist for one chunk at a time. A NaN spreads as in `masked_attention`.

Legend: B batch, S tokens, G groups, h heads per group, R query rows of a chunk, K keys of a chunk, E index head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.ops.layout import num_blocks, token_layout
from nsa.ops.reference import selected, windowed
from nsa.ops.reference.masked_attention import (
    accumulation_dtype,
    chunk_scores,
    earliest,
    exp_minus,
    finite,
    fold_heads,
    keys_first,
    row_slices,
    scores_held,
    shifted,
)
from nsa.ops.reference.selection import pick_blocks
from nsa.ops.spec import MSASpec


def choose(index_q: Tensor, index_k: Tensor, spec: MSASpec, cu_seqlens: Tensor | None, q_offset: int = 0) -> Tensor:
    """index_q [B,S,G,E], index_k [B,N,E] -> indices [B,S,G,num_selected] int32, ascending, padded with -1."""
    batch, tokens, groups, _ = index_q.shape
    layout = token_layout(q_offset + tokens, cu_seqlens, index_q.device)
    indices = torch.empty(batch, tokens, groups, spec.num_selected, dtype=torch.int32, device=index_q.device)
    for rows in row_slices(index_q, index_k.shape[1]):
        at = shifted(rows, q_offset)
        keys = slice(earliest(layout.doc_start, at.start), at.stop)
        position = layout.position[at]
        scores = fold_heads(index_q[:, rows], groups) @ keys_first(index_k.unsqueeze(2), keys).transpose(-1, -2)
        place = torch.arange(scores.shape[-1], device=scores.device)
        if cu_seqlens is not None:  # every row begins with the first key of its document
            first = (layout.doc_start[at] - keys.start)[:, None]
            scores = scores.gather(-1, (place + first).clamp(max=len(place) - 1).expand(scores.shape))
        best = block_maxima(scores, place > position[:, None], spec.sel_block)
        indices[:, rows] = pick_blocks(best, position, spec).transpose(1, 2)
    return indices


def block_maxima(scores: Tensor, unseen: Tensor, block: int) -> Tensor:
    """scores [..., T] of tokens -> [..., J], the maximum over the tokens of each block that are not `unseen`."""
    # A NaN is never a maximum; a score that is not finite is neither forced (inf) nor out of sight (-inf).
    scores = scores.masked_fill(unseen | scores.isnan(), -torch.inf)
    blocks, limit = num_blocks(scores.shape[-1], block), torch.finfo(scores.dtype).max
    scores = pad(scores, (0, blocks * block - scores.shape[-1]), value=-torch.inf)
    return scores.unflatten(-1, (blocks, block)).amax(-1).clamp(-limit, limit)


def choose_workspace(index_q: Tensor, index_k: Tensor, **_: Any) -> int:
    """Scores, masked scores, and in packed documents scores in the order of a document."""
    return 3 * 4 * scores_held(index_q, index_q.shape[1], index_k.shape[1])


def loss(
    index_q: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    counted: Tensor,
    block: int,
    cu_seqlens: Tensor | None,
    *,
    q_offset: int = 0,
    has_grads: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the index loss over `counted` queries [B,S] and groups, and its gradients in index_q and, in float32,
    index_k; empty tensors unless `has_grads`. Queries read the blocks of `indices` [B,S,G,n], or without them all that
    they see. q [B,S,H,D], k [B,N,G,D] and the log-sum-exp lse [B,S,H] are those of the attention."""
    groups, heads, size = index_q.shape[2], q.shape[2], index_q.shape[3]
    acc, per_group = accumulation_dtype(q.dtype), heads // groups
    kl = torch.zeros((), dtype=acc, device=q.device)
    d_index_q, d_index_k = empty_grads(index_q)
    if has_grads:  # contiguous, as compiled code expects
        d_index_q = torch.zeros_like(index_q, memory_format=torch.contiguous_format)
        d_index_k = index_k.to(acc).contiguous() * 0.0
    if indices is None:
        chunks = windowed.chunks(q, k.shape[1], max(1, k.shape[1]), cu_seqlens, q_offset)
    else:
        chunks = selected.chunks(q, k.shape[1], indices, block, cu_seqlens, q_offset)
    for chunk in chunks:
        rows, keys, unseen = chunk.rows, chunk.keys, ~chunk.mask
        scores = chunk_scores(fold_heads(q[:, rows], groups), keys_first(k, keys), unseen, per_group)
        row_lse = lse[:, rows].unflatten(2, (groups, per_group)).permute(0, 2, 3, 1)
        p = exp_minus(scores, row_lse).mean(2)  # [B, G, R, K]
        q_rows, k_keys = fold_heads(index_q[:, rows], groups), keys_first(index_k.unsqueeze(2), keys)
        unseen = unseen.expand(*p.shape[:2], 1, *p.shape[2:]).squeeze(2)
        log_r = (q_rows * size**-0.5 @ k_keys.transpose(-1, -2)).masked_fill_(unseen, -torch.inf).log_softmax(-1)
        skipped = unseen | ~counted[:, None, rows, None]
        kl += (torch.xlogy(p, p) - p * log_r).masked_fill(skipped, 0.0).sum()
        if has_grads:
            d_scores = (log_r.exp() - p).mul_(size**-0.5).masked_fill_(skipped, 0.0)
            d_index_q[:, rows] = (d_scores @ finite(k_keys)).transpose(1, 2).to(index_q.dtype)
            d_index_k[:, keys] += (d_scores.transpose(-1, -2) @ finite(q_rows)).sum(1)
    return kl, d_index_q, d_index_k


def loss_workspace(index_q: Tensor, q: Tensor, k: Tensor, indices: Tensor | None, **_: Any) -> int:
    """Scores of all heads, and either their exponentials or six tensors of the size of p."""
    held = 4 * scores_held(q, q.shape[1] if indices is None else selected.most_rows(q), k.shape[1])
    return held + max(held, 6 * held * index_q.shape[2] // q.shape[2])


def empty_grads(index_q: Tensor) -> tuple[Tensor, Tensor]:
    """What a loss without gradients gives in their place."""
    return index_q.new_empty(0), index_q.new_empty(0, dtype=accumulation_dtype(index_q.dtype))
