"""Attention over selected blocks of tokens, for every kind of selection. See `nsa.ops` for shapes, `cu_seqlens`,
`q_offset` and `backend`."""

from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import dispatch
from nsa.ops.checks import check_ints, check_pair, check_sequence, sequence_length
from nsa.ops.library import (
    attention_shapes,
    check_border_values,
    check_index_values,
    define,
    differentiate,
    refuse_tangents,
)
from nsa.ops.observe import notify
from nsa.ops.spec import SelectionSpec


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: SelectionSpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own: [B,S,H,Dv].

    q [B,S,H,Dk], k [B,S,G,Dk], v [B,S,G,Dv]; indices int32 [B,S,G,num_selected] as `select_blocks` returns them: no
    block twice in a row, padded with -1. A block has `spec.sel_block` tokens.
    """
    if not hasattr(spec, "num_selected"):
        raise ArgumentError("spec", f"must be an NSASpec, MSASpec or other SelectionSpec, got {type(spec).__name__}")
    check_sequence("q", q, cu_seqlens)
    check_pair("k", k, "v", v, q, sequence_length(q, q_offset))
    wanted = [q.shape[0], q.shape[1], k.shape[2], spec.num_selected]
    check_ints("indices", indices, "[B, S, G, num_selected]", wanted, q)
    refuse_tangents("selected_attention", q, k, v)
    return selected_node(q, k, v, indices, spec.sel_block, cu_seqlens, q_offset, backend)[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, cu_seqlens: Tensor | None, q_offset: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_index_values(indices, k.shape[1], block)
    check_border_values(cu_seqlens, k.shape[1])
    kernels = dispatch.choose("sel", backend, q, v, count=True)
    notify("read", q, k, indices, block, cu_seqlens, q_offset)
    return kernels.forward(q, k, v, indices, block, cu_seqlens, q_offset=q_offset)


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, o: Tensor, lse: Tensor, block: int,
    cu_seqlens: Tensor | None, q_offset: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = dispatch.choose("sel", backend, q, v, count=False)
    return kernels.backward(do, q, k, v, indices, o, lse, block, cu_seqlens, q_offset=q_offset)


# Forward returns the output and its log-sum-exp, backward the gradients of q, k and v.
selected_node = define("selected_attention", _attend, attention_shapes)
selected_backward_node = differentiate(
    selected_node, _attend_backward, lambda output, q, k, v, indices, *settings: (q, k, v, indices, *output, *settings)
)
