"""Masked attention over chunks of queries, forward and backward.

Each kind of attention defines the keys that a chunk of queries reads: `chunks` in `compressed.py`, `selected.py` and
`windowed.py`. Probabilities exist for one chunk at a time and are recomputed in backward, so memory is linear in S. A
row that reads nothing gives 0 and a log-sum-exp of -inf.

A NaN or an infinity reaches the queries that read it, and in backward the keys that these queries read: no earlier
token and no other document. A weight of 0 does not keep it out of a product, since 0 times NaN is NaN. Products
therefore replace it by 0 in their second factor (`finite`), and the weights of tokens that are read become NaN.

Legend: B batch, R query rows of a chunk, K keys of a chunk, G key/value heads, h query heads per group,
H = G*h, D head size (keys), E head size (values).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores of one chunk, over batch and heads. Small enough to stay in a CPU's cache, large enough for a GPU.
SCORES_PER_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}
FEWEST_ROWS = 16  # per chunk, even if it exceeds the number of scores
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Chunk:
    """Queries `rows` read the keys among `keys` where `mask` (broadcastable to [B, G, h, R, K]) is true."""

    rows: slice
    keys: slice
    mask: Tensor


def row_slices(q: Tensor, num_keys: int, most: int | None = None) -> Iterator[slice]:
    """Splits the queries so that one chunk against `num_keys` keys stays within the budget, at most `most` rows."""
    batch, tokens, heads, _ = q.shape
    budget = SCORES_PER_CHUNK.get(q.device.type, SCORES_PER_CHUNK["cuda"])
    size = max(FEWEST_ROWS, budget // max(1, batch * heads * num_keys))
    size = min(size, most or size)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def earliest(starts: Tensor, row: int) -> int:
    """A lower bound for the keys that a chunk needs: `starts[row]` on the CPU, else 0 to avoid a synchronization."""
    return int(starts[row]) if starts.device.type == "cpu" else 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def fold_heads(x: Tensor, groups: int) -> Tensor:
    """[B, R, H, D] -> [B, G, h*R, D] in the accumulation dtype, with the heads of a group stacked as rows."""
    batch, rows, heads, dim = x.shape
    x = x.to(accumulation_dtype(x.dtype)).view(batch, rows, groups, heads // groups, dim)
    return x.permute(0, 2, 3, 1, 4).reshape(batch, groups, heads // groups * rows, dim)


def unfold_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, h*R, D] -> [B, R, H, D], the inverse of fold_heads."""
    batch, groups, folded, dim = x.shape
    per_group = heads // groups
    x = x.view(batch, groups, per_group, folded // per_group, dim)
    return x.permute(0, 3, 1, 2, 4).reshape(batch, folded // per_group, heads, dim)


def keys_first(x: Tensor, keys: slice) -> Tensor:
    """[B, S, G, D] -> [B, G, K, D] in the accumulation dtype."""
    return x[:, keys].transpose(1, 2).to(accumulation_dtype(x.dtype))


def finite(x: Tensor) -> Tensor:
    """x with 0 in place of NaN and infinities."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def nan_or_zero(x: Tensor) -> Tensor:
    """[..., D] -> [..., 1]: NaN for vectors with a NaN or an infinity, else 0."""
    return (x * 0.0).sum(-1, keepdim=True)


def chunk_scores(q_rows: Tensor, k_keys: Tensor, unseen: Tensor, per_group: int) -> Tensor:
    """Scaled scores [B, G, h, R, K], -inf where a key is unseen."""
    scores: Tensor = (q_rows * q_rows.shape[-1] ** -0.5) @ k_keys.transpose(-1, -2)
    batch, groups, folded, num_keys = scores.shape
    scores = scores.view(batch, groups, per_group, folded // per_group, num_keys)
    return scores.masked_fill_(unseen, -torch.inf)


def exp_minus(scores: Tensor, row: Tensor) -> Tensor:
    """exp(scores - row), in place. `row` is the maximum or the log-sum-exp of each row; -inf if it reads nothing."""
    # A power of two, because `exp` of MKL takes 20 times as long for infinities and for results of 0.
    return scores.sub_(row.clamp(min=torch.finfo(row.dtype).min).unsqueeze(-1)).mul_(LOG2_E).exp2_()


def weigh(scores: Tensor, v_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [B,G,h,R,K], overwritten, and values [B,G,K,E] -> softmax(scores) @ values [B,G,h*R,E] and the log-sum-exp
    [B,G,h,R]; 0 and -inf in rows that read nothing. The scores of values that are not finite must be NaN."""
    if scores.shape[-1] == 0:
        return scores.flatten(2, 3) @ v_keys, scores.logsumexp(-1)
    top = scores.amax(dim=-1)
    p = exp_minus(scores, top)
    total = p.sum(dim=-1)  # at least 1, the term of the maximum
    mixed = p.flatten(2, 3) @ finite(v_keys)
    mixed /= total.clamp(min=1.0).flatten(2).unsqueeze(-1)
    return mixed, top + total.log()


def attend(q: Tensor, k: Tensor, v: Tensor, chunks: Iterator[Chunk]) -> tuple[Tensor, Tensor]:
    """q [B,S,H,D], k [B,N,G,D], v [B,N,G,E] -> o [B,S,H,E] in q's type, lse [B,S,H] (natural log)."""
    batch, tokens, heads, _ = q.shape
    groups, per_group = k.shape[2], heads // k.shape[2]
    o = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, tokens, heads, dtype=accumulation_dtype(q.dtype))
    for chunk in chunks:
        k_keys, v_keys = keys_first(k, chunk.keys), keys_first(v, chunk.keys)
        k_keys = k_keys + nan_or_zero(v_keys)
        scores = chunk_scores(fold_heads(q[:, chunk.rows], groups), k_keys, ~chunk.mask, per_group)
        mixed, row_lse = weigh(scores, v_keys)
        o[:, chunk.rows] = unfold_heads(mixed, heads).to(o.dtype)
        lse[:, chunk.rows] = row_lse.permute(0, 3, 1, 2).flatten(2)
    return o, lse


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, chunks: Iterator[Chunk]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for the gradient `do` of `attend`'s output."""
    heads, groups = q.shape[2], k.shape[2]
    per_group = heads // groups
    acc = accumulation_dtype(q.dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros(k.transpose(1, 2).shape, dtype=acc, device=k.device)  # [B, G, N, D]
    dv = torch.zeros(v.transpose(1, 2).shape, dtype=acc, device=v.device)
    for chunk in chunks:
        q_rows, do_rows = fold_heads(q[:, chunk.rows], groups), fold_heads(do[:, chunk.rows], groups)
        k_keys, v_keys = keys_first(k, chunk.keys), keys_first(v, chunk.keys)
        row_lse = lse[:, chunk.rows].unflatten(2, (groups, per_group)).permute(0, 2, 3, 1)
        delta = (do_rows * fold_heads(o[:, chunk.rows], groups)).sum(-1, keepdim=True)
        # If do or o is not finite, the scores of all keys that the row reads are NaN, whatever its log-sum-exp.
        scores = chunk_scores(q_rows + nan_or_zero(delta), k_keys, ~chunk.mask, per_group)
        p = exp_minus(scores, finite(row_lse)).flatten(2, 3)  # [B, G, h*R, K]
        q_rows, k_keys, v_keys, do_rows, delta = map(finite, (q_rows, k_keys, v_keys, do_rows, delta))
        ds = (do_rows @ v_keys.transpose(-1, -2)).sub_(delta).mul_(p).mul_(q.shape[3] ** -0.5)
        dq[:, chunk.rows] = unfold_heads(ds @ k_keys, heads).to(q.dtype)
        dk[:, :, chunk.keys] += ds.transpose(-1, -2) @ q_rows
        dv[:, :, chunk.keys] += p.transpose(-1, -2) @ do_rows
    return dq, dk.transpose(1, 2).to(k.dtype).contiguous(), dv.transpose(1, 2).to(v.dtype).contiguous()


def shifted(rows: slice, offset: int) -> slice:
    """The positions of queries `rows` in the sequence: `offset` tokens come before the first query."""
    return slice(rows.start + offset, rows.stop + offset)


def scores_held(q: Tensor, rows: int, num_keys: int) -> int:
    """Upper bound of the scores of a chunk on a GPU, with at most `rows` rows against `num_keys` keys."""
    by_row = q.shape[0] * q.shape[2] * num_keys
    return min(max(SCORES_PER_CHUNK["cuda"], FEWEST_ROWS * by_row), rows * by_row)


def forward_bytes(scores: int) -> int:
    """Bytes in addition to arguments and results for this many scores: the scores, their mask and exponentials."""
    return 2 * 4 * scores


def backward_bytes(scores: int) -> int:
    return 3 * 4 * scores  # with the gradients of the scores
