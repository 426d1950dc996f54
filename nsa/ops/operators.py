"""The public operators, registered with torch so that autograd, torch.compile, checkpointing and meta tensors
all see one opaque node each.

A call checks shapes and types, then enters a custom operator; inside it values are checked and `dispatch`
picks the backend. Each backend module offers the same `forward` and `backward`.
(No `from __future__ import annotations` here: torch reads the operators' schemas from these annotations.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.ops import checks
from nsa.ops.dispatch import choose
from nsa.ops.spec import NSASpec

Grads = tuple[Tensor | None, ...]


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens.

    q [B,S,H,Dk], k_cmp [B,N,G,Dk], v_cmp [B,N,G,Dv] (packed: N = S // cmp_stride) -> o [B,S,H,Dv] and its
    natural-log log-sum-exp [B,S,H], which carries no gradient.
    """
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    length = checks.compressed_length(q, spec, cu_seqlens)
    checks.check_pair(("k_cmp", "v_cmp"), k_cmp, v_cmp, q, length=length)
    o, lse = _compressed(q, k_cmp, v_cmp, spec.as_ints(), cu_seqlens, backend)
    return o, lse.detach()


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The blocks each query reads: int32 [B,S,G,num_selected], ascending, padded with -1. No gradient."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_keys("k_cmp", k_cmp, q, length=checks.compressed_length(q, spec, cu_seqlens))
    checks.check_lse(lse, q)
    indices: Tensor = _select(q.detach(), k_cmp.detach(), lse.detach(), spec.as_ints(), cu_seqlens, backend)
    return indices


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own: [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_pair(("k", "v"), k, v, q, length=q.shape[1])
    checks.check_indices(indices, q, k.shape[2], spec)
    o: Tensor = _selected(q, k, v, indices, spec.as_ints(), cu_seqlens, backend)[0]
    return o


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over the last `window` tokens, the query's own included: [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_pair(("k", "v"), k, v, q, length=q.shape[1])
    o: Tensor = _window(q, k, v, spec.as_ints(), cu_seqlens, backend)[0]
    return o


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The three branches mixed by gates [B,S,H,3] in the order (cmp, sel, win): [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_gates(gates, q)
    checks.check_pair(("k_sel", "v_sel"), k_sel, v_sel, q, length=q.shape[1])
    checks.check_pair(("k_win", "v_win"), k_win, v_win, q, length=q.shape[1])
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, cu_seqlens=cu_seqlens, backend=backend)
    indices = select_blocks(q, k_cmp, lse, spec, cu_seqlens=cu_seqlens, backend=backend)
    o_sel = selected_attention(q, k_sel, v_sel, indices, spec, cu_seqlens=cu_seqlens, backend=backend)
    o_win = window_attention(q, k_win, v_win, spec, cu_seqlens=cu_seqlens, backend=backend)
    return mix_branches(o_cmp, o_sel, o_win, gates)


def mix_branches(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """sum_c gates[..., c] * o_c, summed in the accumulation type and rounded once."""
    acc = torch.float64 if o_cmp.dtype == torch.float64 else torch.float32
    weights = gates.to(acc).unsqueeze(-1).unbind(-2)
    mixed = sum(w * o.to(acc) for w, o in zip(weights, (o_cmp, o_sel, o_win), strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(o_cmp.dtype)


# What torch sees. The spec crosses as seven integers, the log-sum-exp as a second output kept for backward.


def _empty_like_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc)


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("nsa::compressed_attention", mutates_args=())
def _compressed(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    checks.check_border_values(cu_seqlens, q.shape[1])
    return choose("cmp", backend, q, count=True).forward(q, k, v, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::compressed_attention_backward", mutates_args=())
def _compressed_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = choose("cmp", backend, q, count=False)
    return module.backward(do, q, k, v, o, lse, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::window_attention", mutates_args=())
def _window(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    checks.check_border_values(cu_seqlens, q.shape[1])
    return choose("win", backend, q, count=True).forward(q, k, v, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::window_attention_backward", mutates_args=())
def _window_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = choose("win", backend, q, count=False)
    return module.backward(do, q, k, v, o, lse, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::selected_attention", mutates_args=())
def _selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    checks.check_border_values(cu_seqlens, q.shape[1])
    checks.check_index_values(indices, NSASpec(*spec))
    return choose("sel", backend, q, count=True).forward(q, k, v, indices, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::selected_attention_backward", mutates_args=())
def _selected_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = choose("sel", backend, q, count=False)
    return module.backward(do, q, k, v, indices, o, lse, NSASpec(*spec), cu_seqlens)


@torch.library.custom_op("nsa::select_blocks", mutates_args=())
def _select(
    q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> Tensor:
    checks.check_border_values(cu_seqlens, q.shape[1])
    return choose("select", backend, q, count=True).forward(q, k, lse, NSASpec(*spec), cu_seqlens)


@_compressed.register_fake
@_window.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_like_output(q, v)


@_selected.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_like_output(q, v)


@_compressed_backward.register_fake
@_window_backward.register_fake
@_selected_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_grads(q, k, v)


@_select.register_fake
def _(q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[2], spec[3], dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps every tensor argument, the output and its log-sum-exp; all the rest are constants."""
    *tensors, spec, cu_seqlens, backend = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.constants = (spec, backend)


def _gradient_of(backward: Any, num_undifferentiated: int) -> Any:
    """The backward rule of an operator whose gradient operator is `backward`."""

    def rule(ctx: Any, do: Tensor, dlse: Tensor | None) -> Grads:
        *tensors, cu_seqlens = ctx.saved_tensors
        spec, backend = ctx.constants
        grads = backward(do, *tensors, spec, cu_seqlens, backend)
        return (*grads, *[None] * num_undifferentiated)

    return rule


_compressed.register_autograd(_gradient_of(_compressed_backward, 3), setup_context=_save)
_window.register_autograd(_gradient_of(_window_backward, 3), setup_context=_save)
_selected.register_autograd(_gradient_of(_selected_backward, 4), setup_context=_save)
