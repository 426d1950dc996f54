"""The operators as torch sees them: opaque nodes with shapes, gradients and a backend chosen inside.

Autograd, torch.compile, checkpointing and meta tensors all meet one node per operator. The spec crosses as seven
integers; an attention's log-sum-exp is a second output, kept for backward. Values are checked and the backend is
chosen when the node runs. Arguments were checked by `operators`, which is the only caller.
(No `from __future__ import annotations` here: torch reads the schemas from these annotations.)
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops import checks, observe
from nsa.ops.dispatch import choose
from nsa.ops.layout import num_slots, slot_layout, token_layout
from nsa.ops.spec import NSASpec

Grads = tuple[Tensor | None, ...]

# torch.library.custom_op registers the same in one call, and costs every call of the operator 0.1 to 0.3 ms on the
# host, as long as the kernels of a short sequence run.
_LIBRARY = torch.library.Library("nsa", "DEF")


def _operator(function: Callable[..., Any]) -> Any:
    """Registers `function` as torch.ops.nsa.<its name> for CPU and CUDA tensors."""
    name = function.__name__.lstrip("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)
    return getattr(torch.ops.nsa, name).default


def _shape_of(*operators: Any) -> Callable[[Callable[..., Any]], None]:
    """Registers the decorated function as what tracing runs in place of the operators."""

    def register(function: Callable[..., Any]) -> None:
        for operator in operators:
            torch.library.register_fake(operator, function, lib=_LIBRARY)

    return register


@lru_cache(maxsize=64)
def _spec(*sizes: int) -> NSASpec:
    return NSASpec(*sizes)


# Forward. The order of arguments is the backends': tensors, spec, cu_seqlens; then the backend's name.


@_operator
def mean_blocks(x: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None) -> Tensor:
    sizes = _checked(spec, cu_seqlens, x)
    return choose("phi", backend, x, x, sizes, count=True).mean(x, sizes, cu_seqlens)


@_operator
def contract_blocks(
    x: Tensor, weight: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> Tensor:
    sizes = _checked(spec, cu_seqlens, x)
    return choose("phi", backend, x, x, sizes, count=True).contract(x, weight, sizes, cu_seqlens)


@_operator
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    sizes = _checked(spec, cu_seqlens, q)
    return choose("cmp", backend, q, v, sizes, count=True).forward(q, k, v, sizes, cu_seqlens)


@_operator
def select_blocks(
    q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> Tensor:
    sizes = _checked(spec, cu_seqlens, q)
    indices: Tensor = choose("select", backend, q, k, sizes, count=True).forward(q, k, lse, sizes, cu_seqlens)
    observe.saw_selection(indices, sizes, cu_seqlens)
    return indices


@_operator
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    sizes = _checked(spec, cu_seqlens, q)
    checks.check_index_values(indices, sizes)
    return choose("sel", backend, q, v, sizes, count=True).forward(q, k, v, indices, sizes, cu_seqlens)


@_operator
def window_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    sizes = _checked(spec, cu_seqlens, q)
    return choose("win", backend, q, v, sizes, count=True).forward(q, k, v, sizes, cu_seqlens)


@_operator
def mix_branches(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str | None) -> Tensor:
    observe.saw_gates(gates)
    return choose("mix", backend, o_cmp, o_cmp, NSASpec(), count=True).forward(o_cmp, o_sel, o_win, gates)


@_operator
def packed_positions(cu_seqlens: Tensor, tokens: int, spec: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Places of tokens [S] and compressed tokens [N] inside their documents. Copies: a compiler may write over them."""
    sizes = _spec(*spec)
    token = token_layout(tokens, sizes, cu_seqlens, cu_seqlens.device).position
    slot = slot_layout(tokens, sizes, cu_seqlens, cu_seqlens.device).position
    return token.clone(), slot.clone()


def _checked(spec: Sequence[int], cu_seqlens: Tensor | None, x: Tensor) -> NSASpec:
    checks.check_border_values(cu_seqlens, x.shape[1])
    return _spec(*spec)


# Backward, by the backend that ran forward: the same arguments lead to the same choice.


@_operator
def mean_blocks_backward(
    dy: Tensor, tokens: int, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> Tensor:
    sizes = _spec(*spec)
    return choose("phi", backend, dy, dy, sizes, count=False).mean_backward(dy, tokens, sizes, cu_seqlens)


@_operator
def contract_blocks_backward(
    dy: Tensor, x: Tensor, weight: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    sizes = _spec(*spec)
    return choose("phi", backend, x, x, sizes, count=False).contract_backward(dy, x, weight, sizes, cu_seqlens)


@_operator
def compressed_attention_backward(
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
    sizes = _spec(*spec)
    return choose("cmp", backend, q, v, sizes, count=False).backward(do, q, k, v, o, lse, sizes, cu_seqlens)


@_operator
def selected_attention_backward(
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
    sizes = _spec(*spec)
    return choose("sel", backend, q, v, sizes, count=False).backward(do, q, k, v, indices, o, lse, sizes, cu_seqlens)


@_operator
def window_attention_backward(
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
    sizes = _spec(*spec)
    return choose("win", backend, q, v, sizes, count=False).backward(do, q, k, v, o, lse, sizes, cu_seqlens)


@_operator
def mix_branches_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module = choose("mix", backend, o_cmp, o_cmp, NSASpec(), count=False)
    return module.backward(do, o_cmp, o_sel, o_win, gates)


# Shapes of the results, for tracing.


def _slots(x: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None) -> int:
    return num_slots(x.shape[1], _spec(*spec), packed=cu_seqlens is not None)


@_shape_of(packed_positions)
def _(cu_seqlens: Tensor, tokens: int, spec: Sequence[int]) -> tuple[Tensor, Tensor]:
    slots = num_slots(tokens, _spec(*spec), packed=True)
    return tuple(cu_seqlens.new_empty(length, dtype=torch.int64) for length in (tokens, slots))  # type: ignore[return-value]


@_shape_of(mean_blocks)
def _(x: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None) -> Tensor:
    return x.new_empty(x.shape[0], _slots(x, spec, cu_seqlens), *x.shape[2:])


@_shape_of(contract_blocks)
def _(x: Tensor, weight: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None) -> Tensor:
    return x.new_empty(x.shape[0], _slots(x, spec, cu_seqlens), x.shape[2], weight.shape[2])


@_shape_of(compressed_attention, window_attention, selected_attention)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc)


@_shape_of(select_blocks)
def _(q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[2], spec[3], dtype=torch.int32)


@_shape_of(mix_branches)
def _(o_cmp: Tensor, *_: Any) -> Tensor:
    return o_cmp.new_empty(o_cmp.shape)


@_shape_of(mean_blocks_backward)
def _(dy: Tensor, tokens: int, *_: Any) -> Tensor:
    return dy.new_empty(dy.shape[0], tokens, *dy.shape[2:])


@_shape_of(contract_blocks_backward)
def _(dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@_shape_of(compressed_attention_backward, window_attention_backward, selected_attention_backward)
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_shape_of(mix_branches_backward)
def _(do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (*(o.new_empty(o.shape) for o in (o_cmp, o_sel, o_win)), gates.new_empty(gates.shape))


# Gradients. What a rule needs is kept: tensors through autograd, the rest as constants.


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, spec, cu_seqlens, backend = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.constants = (x.shape[1], spec, backend)


def _gradient_of_mean(ctx: Any, dy: Tensor) -> Grads:
    (cu_seqlens,) = ctx.saved_tensors
    tokens, spec, backend = ctx.constants
    return mean_blocks_backward(dy, tokens, spec, cu_seqlens, backend), None, None, None


def _keep_contract(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, spec, cu_seqlens, backend = inputs
    ctx.save_for_backward(x, weight, cu_seqlens)
    ctx.constants = (spec, backend)


def _gradient_of_contract(ctx: Any, dy: Tensor) -> Grads:
    x, weight, cu_seqlens = ctx.saved_tensors
    spec, backend = ctx.constants
    return (*contract_blocks_backward(dy, x, weight, spec, cu_seqlens, backend), None, None, None)


def _keep_mix(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _gradient_of_mix(ctx: Any, do: Tensor) -> Grads:
    return (*mix_branches_backward(do, *ctx.saved_tensors, ctx.backend), None)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, spec, cu_seqlens, backend = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.constants = (spec, backend)


def _gradient_of_attention(backward: Any, num_undifferentiated: int) -> Any:
    def rule(ctx: Any, do: Tensor, dlse: Tensor | None) -> Grads:
        *tensors, cu_seqlens = ctx.saved_tensors
        spec, backend = ctx.constants
        grads = backward(do, *tensors, spec, cu_seqlens, backend)
        return (*grads, *[None] * num_undifferentiated)

    return rule


torch.library.register_autograd(mean_blocks, _gradient_of_mean, setup_context=_keep_mean, lib=_LIBRARY)
torch.library.register_autograd(contract_blocks, _gradient_of_contract, setup_context=_keep_contract, lib=_LIBRARY)
torch.library.register_autograd(mix_branches, _gradient_of_mix, setup_context=_keep_mix, lib=_LIBRARY)
torch.library.register_autograd(
    compressed_attention,
    _gradient_of_attention(compressed_attention_backward, 3),
    setup_context=_keep_attention,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    window_attention, _gradient_of_attention(window_attention_backward, 3), setup_context=_keep_attention, lib=_LIBRARY
)
torch.library.register_autograd(
    selected_attention,
    _gradient_of_attention(selected_attention_backward, 4),
    setup_context=_keep_attention,
    lib=_LIBRARY,
)
