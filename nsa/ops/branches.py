"""The three branches of Native Sparse Attention, and the selection of blocks; the selected branch is that of every kind
of selection. See `nsa.ops` for shapes, `spec`, `cu_seqlens`, `q_offset` and `backend`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import dispatch, selection_cache
from nsa.ops.checks import (
    check_device,
    check_ints,
    check_keys,
    check_pair,
    check_sequence,
    check_spec,
    check_tensor,
    sequence_length,
)
from nsa.ops.layout import num_slots
from nsa.ops.library import (
    attention_shapes,
    check_border_values,
    check_index_values,
    define,
    differentiate,
    refuse_tangents,
    spec_of,
)
from nsa.ops.observe import notify
from nsa.ops.spec import NSASpec, SelectionSpec


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens.

    q [B,S,H,Dk], k_cmp [B,N,G,Dk], v_cmp [B,N,G,Dv] (packed: N = S // cmp_stride) -> o [B,S,H,Dv] and its
    natural-log log-sum-exp [B,S,H], which carries no gradient.
    """
    check_spec(spec, NSASpec)
    check_sequence("q", q, cu_seqlens)
    check_pair("k_cmp", k_cmp, "v_cmp", v_cmp, q, num_cmp_keys(q, spec, cu_seqlens, q_offset))
    refuse_tangents("compressed_attention", q, k_cmp, v_cmp)
    o, lse = compressed_node(q, k_cmp, v_cmp, spec.as_ints(), cu_seqlens, q_offset, backend)
    return o, lse.detach()


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """The blocks each query reads: int32 [B,S,G,num_selected], ascending, padded with -1. No gradient.

    q [B,S,H,Dk] and k_cmp [B,N,G,Dk] as given to `compressed_attention`, and the log-sum-exp lse [B,S,H] it returned.
    Blocks are numbered from the start of the document. All heads of a group share a selection, which always includes
    the first `num_init` blocks and the newest `num_local`.
    """
    check_spec(spec, NSASpec)
    check_sequence("q", q, cu_seqlens)
    check_keys("k_cmp", k_cmp, q, num_cmp_keys(q, spec, cu_seqlens, q_offset))
    check_tensor("lse", lse)
    if lse.shape != q.shape[:3]:
        raise ArgumentError("lse", f"must be [B, S, H] = {list(q.shape[:3])}, got {list(lse.shape)}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != wanted:
        raise ArgumentError("lse", f"must be {wanted} for {q.dtype} queries, got {lse.dtype}")
    check_device("lse", lse, q)
    return cached_selection(q, k_cmp, lse, spec, cu_seqlens=cu_seqlens, q_offset=q_offset, backend=backend)


def cached_selection(
    q: Tensor, k_cmp: Tensor, lse: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`select_blocks` without checks; a recomputation returns the blocks of the forward pass."""
    arguments = (q.detach(), k_cmp.detach(), lse.detach(), spec.as_ints(), cu_seqlens, q_offset, backend)
    return selection_cache.select(lambda: select_node(*arguments))


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


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention over the last `window` tokens, including the query's own: [B,S,H,Dv].

    q [B,S,H,Dk], k [B,S,G,Dk], v [B,S,G,Dv].
    """
    check_spec(spec, NSASpec)
    check_sequence("q", q, cu_seqlens)
    check_pair("k", k, "v", v, q, sequence_length(q, q_offset))
    refuse_tangents("window_attention", q, k, v)
    return window_node(q, k, v, spec.window, cu_seqlens, q_offset, backend)[0]


def num_cmp_keys(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int) -> int:
    """The number of compressed tokens of the sequence whose last tokens are the queries q."""
    return num_slots(sequence_length(q, q_offset), spec, packed=cu_seqlens is not None)


def _attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, q_offset: int, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_border_values(cu_seqlens, q_offset + q.shape[1])
    kernels = dispatch.choose("cmp", backend, q, v, count=True)
    return kernels.forward(q, k, v, spec_of(spec), cu_seqlens, q_offset=q_offset)


def _attend_compressed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None,
    q_offset: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = dispatch.choose("cmp", backend, q, v, count=False)
    return kernels.backward(do, q, k, v, o, lse, spec_of(spec), cu_seqlens, q_offset=q_offset)


def _select(
    q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, q_offset: int,
    backend: str | None,
) -> Tensor:  # fmt: skip
    check_border_values(cu_seqlens, q_offset + q.shape[1])
    sizes = spec_of(spec)
    kernels = dispatch.choose("select", backend, q, k, count=True)
    indices = kernels.forward(q, k, lse, sizes, cu_seqlens, q_offset=q_offset)
    notify("selected", indices, sizes, cu_seqlens, q_offset)
    return indices


def _attend_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, cu_seqlens: Tensor | None, q_offset: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_index_values(indices, k.shape[1], block)
    check_border_values(cu_seqlens, k.shape[1])
    kernels = dispatch.choose("sel", backend, q, v, count=True)
    notify("read", q, k, indices, block, cu_seqlens, q_offset)
    return kernels.forward(q, k, v, indices, block, cu_seqlens, q_offset=q_offset)


def _attend_selected_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, o: Tensor, lse: Tensor, block: int,
    cu_seqlens: Tensor | None, q_offset: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = dispatch.choose("sel", backend, q, v, count=False)
    return kernels.backward(do, q, k, v, indices, o, lse, block, cu_seqlens, q_offset=q_offset)


def _attend_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, q_offset: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    check_border_values(cu_seqlens, q_offset + q.shape[1])
    return dispatch.choose("win", backend, q, v, count=True).forward(q, k, v, window, cu_seqlens, q_offset=q_offset)


def _attend_window_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, cu_seqlens: Tensor | None,
    q_offset: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = dispatch.choose("win", backend, q, v, count=False)
    return kernels.backward(do, q, k, v, o, lse, window, cu_seqlens, q_offset=q_offset)


def _backward_arguments(
    output: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, *settings: object
) -> tuple[object, ...]:
    return (q, k, v, *output, *settings)


# Attention returns output and log-sum-exp, its backward the gradients of q, k and v. Selection has no gradient.
compressed_node = define("compressed_attention", _attend_compressed, attention_shapes)
compressed_backward_node = differentiate(compressed_node, _attend_compressed_backward, _backward_arguments)
selected_node = define("selected_attention", _attend_selected, attention_shapes)
selected_backward_node = differentiate(
    selected_node,
    _attend_selected_backward,
    lambda output, q, k, v, indices, *settings: (q, k, v, indices, *output, *settings),
)
window_node = define("window_attention", _attend_window, attention_shapes)
window_backward_node = differentiate(window_node, _attend_window_backward, _backward_arguments)
select_node = define(
    "select_blocks",
    _select,
    lambda q, k, lse, spec, *_: q.new_empty(*q.shape[:2], k.shape[2], spec_of(spec).num_selected, dtype=torch.int32),
)
