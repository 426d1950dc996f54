"""Compressed attention: the kernels of `flash.py`, and cuDNN for long sequences.

The `cmp_stride` tokens from i * cmp_stride + cmp_block - 1 on, a run, see the same compressed tokens, 0 .. i. With the
r-th token of every run as position i of row r, this is causal attention over as many positions as there are whole runs,
for `cmp_stride` rows that share keys and values. For one sequence these are views. Tokens before the first run see
nothing; the kernels of `flash.py` compute those after the last whole run.

Legend: S tokens, N compressed tokens, M whole runs, R tokens of a run, H query heads, G key/value heads, D head size.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import cached_with, first_compressed, token_layout, visible_compressed
from nsa.ops.spec import NSASpec
from nsa.ops.triton.flash import IntervalAttention, KeyRange
from nsa.ops.triton.launch_table import H200, Card, card_of

# Tokens from which cuDNN is faster on an H200, by pass and head size.
FEWEST_TOKENS = {
    ("forward", 64): 1 << 18,
    ("backward", 64): 1 << 17,
    ("forward", 128): 1 << 16,
    ("backward", 128): 1 << 15,
}
MOST_ELEMENTS = 1 << 31  # of the queries; with more, cuDNN's dQ and dK are wrong (by 2 % at 1.1 times as many)


class Compressed(IntervalAttention):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, *, q_offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        is_whole = cu_seqlens is None and not q_offset and not self.tuned
        if is_whole and _has_cudnn() and cudnn_is_faster("forward", q, v, spec, card_of(q)):
            return self.forward_by_runs(q, k, v, spec)
        return self.attend(q, k, v, key_range(q, spec, cu_seqlens, q_offset))

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: NSASpec,
        cu_seqlens: Tensor | None, *, q_offset: int = 0, sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        is_whole = cu_seqlens is None and not q_offset and not self.tuned
        if is_whole and _has_cudnn() and cudnn_is_faster("backward", q, v, spec, card_of(q)):
            return self.backward_by_runs(do, q, k, v, o, lse, spec)
        return self.attend_backward(do, q, k, v, o, lse, key_range(q, spec, cu_seqlens, q_offset), sums)

    def forward_by_runs(self, q: Tensor, k: Tensor, v: Tensor, spec: NSASpec) -> tuple[Tensor, Tensor]:
        """`forward` of one sequence by cuDNN."""
        first, end = _runs(q, spec)
        o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
        o[:, :first], lse[:, :first] = 0.0, -torch.inf
        o_rows, lse_rows = causal_forward(_rows(q, spec), _shared(k, q, spec), _shared(v, q, spec))
        o[:, first:end], lse[:, first:end] = _tokens(o_rows), _tokens(lse_rows).squeeze(3)
        if end < q.shape[1]:
            rest = q[:, end:]
            o[:, end:], lse[:, end:] = self.attend(rest, k, v, key_range(rest, spec, None, end))
        return o, lse

    def backward_by_runs(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: NSASpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of one sequence by cuDNN."""
        first, end = _runs(q, spec)
        q_rows, o_rows, do_rows = (_rows(x, spec) for x in (q, o, do))
        lse_rows = _rows(lse[..., None], spec).contiguous()
        dq_rows, *dkv_rows = causal_backward(
            do_rows, q_rows, _shared(k, q, spec), _shared(v, q, spec), o_rows, lse_rows
        )
        dq = q.new_empty(q.shape)
        dq[:, :first], dq[:, first:end] = 0.0, _tokens(dq_rows)
        grads = [x.sum(0, dtype=torch.float32).transpose(0, 1)[None] for x in dkv_rows]  # for M compressed tokens
        if end < q.shape[1]:
            rest = q[:, end:]
            dq[:, end:], *of_rest = self.attend_backward(
                do[:, end:], rest, k, v, o[:, end:], lse[:, end:], key_range(rest, spec, None, end)
            )
            for grad, more in zip(grads, of_rest, strict=True):
                more[:, : grad.shape[1]] += grad
            grads = of_rest
        dk, dv = (x.to(q.dtype).contiguous() for x in grads)
        return dq, dk, dv

    def forward_workspace(
        self, q: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int = 0, **_: Any
    ) -> int | None:
        """Bytes that cuDNN needs on an H200 in addition to arguments and results: output and log-sum-exp by rows. None
        if it does not run."""
        if cu_seqlens is not None or q_offset or not cudnn_is_faster("forward", q, v, spec, H200):
            return None
        return q.shape[1] * q.shape[2] * (v.shape[3] * v.element_size() + 4)

    def backward_workspace(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int = 0,
        **_: Any,
    ) -> int | None:  # fmt: skip
        """Likewise: dQ by rows and, inside cuDNN, in float32; a copy of dO; dK and dV of every row; two numbers per
        query."""
        if cu_seqlens is not None or q_offset or not cudnn_is_faster("backward", q, v, spec, H200):
            return None
        rows: int = q.numel() + do.numel() + spec.cmp_stride * (k.numel() + v.numel())
        return rows * q.element_size() + 4 * q.numel() + 8 * q.shape[1] * q.shape[2]


compressed = Compressed("cmp")


def key_range(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int) -> KeyRange:
    """The keys seen by queries like q with `q_offset` tokens before them."""
    if cu_seqlens is None and not q_offset:
        return KeyRange(spec.cmp_block, spec.cmp_stride, 0)
    tokens = q_offset + q.shape[1]

    def tables() -> KeyRange:
        position = token_layout(tokens, cu_seqlens, q.device).position[q_offset:]
        lo = first_compressed(tokens, spec, cu_seqlens, q.device)[q_offset:]
        hi = lo + visible_compressed(position, spec)
        return KeyRange(spec.cmp_block, spec.cmp_stride, 0, lo.to(torch.int32), hi.to(torch.int32))

    return cached_with(cu_seqlens, ("cmp", tokens, q_offset, spec), tables)


@cache
def _has_cudnn() -> bool:
    """Whether this PyTorch was built with cuDNN."""
    return bool(torch.backends.cudnn.is_available())


def cudnn_is_faster(kernel: str, q: Tensor, v: Tensor, spec: NSASpec, card: Card) -> bool:
    """Whether cuDNN can compute the pass "forward" or "backward" of queries like q and values like v on such a GPU, and
    faster. False if results must be deterministic: cuDNN adds dQ in any order."""
    sizes = {q.shape[3], v.shape[3]}
    return (
        card.kind == "sm90"
        and q.shape[0] == 1
        and q.dtype in (torch.float16, torch.bfloat16)
        and sizes in ({64}, {128})
        and q.numel() <= MOST_ELEMENTS
        and q.shape[1] >= max(FEWEST_TOKENS[kernel, q.shape[3]], spec.cmp_block + spec.cmp_stride)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def causal_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of q [R,H,M,D], k and v [R,G,M,D]: the output and, [R,H,M,1], the log-sum-exp."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    return o, lse.view(*o.shape[:3], 1)


def causal_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Any:
    """The gradients of q, k and v."""
    unused, positions = torch.zeros((), dtype=torch.int64, device=q.device), q.shape[2]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, unused, unused, None, None, None, positions, positions, 0.0, True
    )


def _runs(q: Tensor, spec: NSASpec) -> tuple[int, int]:
    """The first token of the first run, and the token after the last whole run."""
    first = spec.cmp_block - 1
    return first, first + (q.shape[1] - first) // spec.cmp_stride * spec.cmp_stride


def _rows(x: Tensor, spec: NSASpec) -> Tensor:
    """The runs of x [1,S,H,D] as rows [R,H,M,D]."""
    first, end = _runs(x, spec)
    rows: Tensor = x.contiguous()[0, first:end].unflatten(0, (-1, spec.cmp_stride))
    return rows.permute(1, 2, 0, 3)


def _tokens(rows: Tensor) -> Tensor:
    """The inverse of `_rows`, for the tokens of all runs: [1,M*R,H,D]."""
    return rows.permute(2, 0, 1, 3).flatten(0, 1)[None]


def _shared(x: Tensor, q: Tensor, spec: NSASpec) -> Tensor:
    """The compressed tokens x [1,N,G,D] that whole runs see, the same for every row: [R,G,M,D]."""
    first, end = _runs(q, spec)
    return x.contiguous()[:, : (end - first) // spec.cmp_stride].transpose(1, 2).expand(spec.cmp_stride, -1, -1, -1)
