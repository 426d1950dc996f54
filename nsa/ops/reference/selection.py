"""Selection of the blocks that each query reads: compressed probabilities are summed into block scores, then top-k.

Legend: B batch, G groups, h heads per group, R query rows of a chunk, K compressed tokens, J selection blocks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.ops.layout import (
    block_of,
    compressed_per_block,
    first_compressed,
    is_forced,
    num_blocks,
    overlap_weights,
    token_layout,
    visible_compressed,
)
from nsa.ops.reference import compressed
from nsa.ops.reference.masked_attention import chunk_scores, exp_minus, fold_heads, keys_first, shifted
from nsa.ops.spec import NSASpec, SelectionSpec


def forward(
    q: Tensor, k: Tensor, lse: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, *, q_offset: int = 0
) -> Tensor:
    """q [B,S,H,D], k [B,N,G,D], lse [B,S,H] -> indices [B,S,G,num_selected] int32."""
    batch, tokens, heads, _ = q.shape
    groups, per_group = k.shape[2], heads // k.shape[2]
    position = token_layout(q_offset + tokens, cu_seqlens, q.device).position
    indices = torch.empty(batch, tokens, groups, spec.num_selected, dtype=torch.int32, device=q.device)
    for chunk in compressed.chunks(q, k.shape[1], spec, cu_seqlens, q_offset):
        rows, at = chunk.rows, shifted(chunk.rows, q_offset)
        scores = chunk_scores(fold_heads(q[:, rows], groups), keys_first(k, chunk.keys), ~chunk.mask, per_group)
        row_lse = lse[:, rows].unflatten(2, (groups, per_group)).permute(0, 2, 3, 1)
        p = exp_minus(scores, row_lse).sum(2)  # [B, G, R, K]
        if cu_seqlens is not None:
            first = first_compressed(q_offset + tokens, spec, cu_seqlens, q.device)
            p = _count_from_document(p, first[at] - chunk.keys.start, position[at], spec)
        blocks = block_scores(p, num_blocks(at.stop, spec.sel_block), spec)
        indices[:, rows] = pick_blocks(blocks, position[at], spec).transpose(1, 2)
    return indices


forward_workspace = compressed.forward_workspace  # the same scores as in compressed attention


def _count_from_document(p: Tensor, shift: Tensor, position: Tensor, spec: NSASpec) -> Tensor:
    """Shifts each row so that its document's first compressed token comes first, and drops tokens it does not see."""
    place = torch.arange(p.shape[-1], device=p.device)
    source = (place + shift[:, None]).clamp(0, p.shape[-1] - 1)
    seen = place < visible_compressed(position, spec)[:, None]
    return p.gather(-1, source.expand(p.shape)).masked_fill(~seen, 0.0)


def block_scores(p: Tensor, blocks: int, spec: NSASpec) -> Tensor:
    """Eq. 9: p [..., K] over compressed tokens -> [..., blocks]. Terms are added in one order for every
    block, so that equal inputs give equal scores to the last bit."""
    first, weights = overlap_weights(spec)
    step = compressed_per_block(spec)
    width = (blocks - 1) * step + len(weights)
    padded = pad(p, (-first, max(0, width + first - p.shape[-1])))
    scores = p.new_zeros(*p.shape[:-1], blocks)
    for offset, weight in enumerate(weights):
        scores += weight * padded[..., offset : offset + (blocks - 1) * step + 1 : step]
    return scores


def pick_blocks(scores: Tensor, position: Tensor, spec: SelectionSpec) -> Tensor:
    """scores [B,G,R,J], position [R] or [B,1,R] -> the chosen blocks, ascending, padded with -1."""
    blocks = scores.shape[-1]
    block = torch.arange(blocks, device=scores.device)
    own = block_of(position, spec.sel_block).unsqueeze(-1)
    scores = scores.masked_fill(is_forced(block, own, spec), torch.inf).masked_fill(block > own, -torch.inf)
    # A stable sort keeps equal scores in index order: the lower index wins.
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    keep = min(spec.num_selected, blocks)
    chosen = best.indices[..., :keep].masked_fill(best.values[..., :keep] == -torch.inf, blocks)
    chosen = chosen.sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == blocks, -1).to(torch.int32)
    return pad(chosen, (0, spec.num_selected - keep), value=-1)
