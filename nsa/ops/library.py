"""The operators as torch sees them: opaque nodes with shapes, gradients and a backend chosen inside.

Autograd, torch.compile, checkpointing and meta tensors all meet one node per operator. The arguments of a node are the
backends': tensors, the spec as seven integers, cu_seqlens, q_offset where there are queries; then the backend's name.
An attention's log-sum-exp is a second output, kept for backward. When a node runs, it checks values (document borders,
block indices) and chooses the backend. `operators` has checked everything else.

Values are always checked on the CPU. On a GPU that would synchronize, so there it happens inside `checked_values()`
only; elsewhere the formulas mask bad values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from nsa.errors import ArgumentError, DerivativeError
from nsa.ops import feed_forward, joint
from nsa.ops.dispatch import choose
from nsa.ops.layout import num_blocks, num_slots, slot_layout, token_layout
from nsa.ops.observe import notify
from nsa.ops.spec import NSASpec

# torch.library.custom_op registers the same in one call, and costs every call of the operator 0.1 to 0.3 ms on the
# host, as long as the kernels of a short sequence run.
_LIBRARY = torch.library.Library("nsa", "DEF")
_SETTINGS = "SymInt[] spec, Tensor? cu_seqlens, str? backend"
_QUERY_SETTINGS = "SymInt[] spec, Tensor? cu_seqlens, SymInt q_offset, str? backend"  # of operators that have queries

_check_every_device: ContextVar[bool] = ContextVar("check_every_device", default=False)


@contextmanager
def checked_values() -> Iterator[None]:
    """Inside, values are checked on every device. For finding a fault: every operator synchronizes."""
    token = _check_every_device.set(True)
    try:
        yield
    finally:
        _check_every_device.reset(token)


def _check_border_values(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Borders start at 0, end at S and never decrease."""
    if cu_seqlens is None or (cu_seqlens.is_cuda and not _check_every_device.get()):
        return
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens:
        raise ArgumentError("cu_seqlens", f"must start at 0 and end at S={tokens}, got {borders[0]} and {borders[-1]}")
    for place, (left, right) in enumerate(pairwise(borders), start=1):
        if right < left:
            raise ArgumentError("cu_seqlens", f"must never decrease, but entry {place} goes from {left} to {right}")


def _check_index_values(indices: Tensor, tokens: int, spec: NSASpec) -> None:
    """Every index is -1 or a block of the sequence."""
    if indices.numel() == 0 or (indices.is_cuda and not _check_every_device.get()):
        return
    blocks = num_blocks(tokens, spec)
    low, high = int(indices.min()), int(indices.max())
    if low < -1 or high >= blocks:
        raise ArgumentError("indices", f"must be -1 or one of the {blocks} blocks, got values from {low} to {high}")


@lru_cache(maxsize=64)
def _spec(*sizes: int) -> NSASpec:
    return NSASpec(*sizes)


def _define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Registers `run` as an operator for CPU and CUDA tensors, and `shapes` as what tracing runs in its place."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run_in_own_types(*args: Any) -> Any:
        with torch._C._DisableAutocast():  # which would round the float32 products of the reference to 16 bits
            return run(*args)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run_in_own_types, key)
    operator = getattr(torch.ops.nsa, name).default
    torch.library.register_fake(operator, shapes, lib=_LIBRARY)
    return operator


def _node(operator: str, function: str, query: int = 0, value: int = 0, *, forward: bool = True) -> Callable[..., Any]:
    """What runs `function` of the backend chosen for the arguments number `query` and `value`. In backward they are
    those of forward, so that the same backend is chosen."""

    def run(*args: Any) -> Any:
        *given, backend = args
        offset = {} if operator == "phi" else {"q_offset": given.pop()}
        *given, sizes, cu_seqlens = given
        spec = _spec(*sizes)
        if forward:
            _check_border_values(cu_seqlens, given[0].shape[1] + offset.get("q_offset", 0))
        chosen = choose(operator, backend, given[query], given[value], spec, count=forward)
        return getattr(chosen, function)(*given, spec, cu_seqlens, **offset)

    return run


class _Once(torch.autograd.Function):
    """Runs a backward operator for a graph that is kept (`create_graph=True`); differentiating it is an error."""

    @staticmethod
    def forward(ctx: Any, backward: Any, *args: Any) -> Any:
        ctx.operator = backward.name().removesuffix("_backward")
        return backward(*args)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise DerivativeError(ctx.operator)


_once: Callable[..., Any] = _Once.apply


def refuse_tangents(operator: str, *tensors: Tensor) -> None:
    """Raises where forward-mode differentiation reaches an operator: its node would lose the tangents unnoticed."""
    if forward_ad._current_level < 0:
        return
    top = _functorch.peek_interpreter_stack()
    for x in tensors:
        # The tangents of an outer jvp are not visible in what vmap or grad wraps.
        is_hidden = top and top.key() != _functorch.TransformType.Jvp and _functorch.is_functorch_wrapped_tensor(x)
        if is_hidden or forward_ad.unpack_dual(x).tangent is not None:
            raise DerivativeError(f"nsa::{operator}", is_forward_mode=True)


def _differentiate(
    forward: Any,
    schema: str,
    run: Callable[..., Any],
    grads: int,
    arguments: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda inputs, _: inputs,
    shapes: Callable[..., Any] | None = None,
) -> Any:
    """Registers the operator that gives the gradients of the first inputs of `forward`, `grads` of them, as
    `run(gradient, *arguments(inputs, outputs))`. `schema` is that of the arguments; the gradients have the shapes of
    the first ones, or else what `shapes` gives."""
    backward = _define(
        f"{forward.name().removeprefix('nsa::')}_backward(Tensor do, {schema}) -> ({', '.join(['Tensor'] * grads)})",
        run,
        shapes or (lambda do, *args: tuple(x.new_empty(x.shape) for x in args[:grads])),
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept = list(arguments(inputs, output))
        ctx.places = [place for place, x in enumerate(kept) if isinstance(x, Tensor)]
        ctx.save_for_backward(*[kept[place] for place in ctx.places])
        for place in ctx.places:
            kept[place] = None
        ctx.constants, ctx.num_inputs = kept, len(inputs)

    def gradient(ctx: Any, do: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.constants.copy()
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            kept[place] = tensor
        found = _once(backward, do, *kept) if torch.is_grad_enabled() else backward(do, *kept)
        found = found if isinstance(found, tuple) else (found,)
        return found + (None,) * (ctx.num_inputs - grads)

    torch.library.register_autograd(forward, gradient, setup_context=keep, lib=_LIBRARY)
    return backward


# Compression.


def _num_slots(x: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None) -> int:
    return num_slots(x.shape[1], _spec(*spec), packed=cu_seqlens is not None)


mean_blocks = _define(
    f"mean_blocks(Tensor x, {_SETTINGS}) -> Tensor",
    _node("phi", "mean"),
    lambda x, spec, cu_seqlens, _: x.new_empty(x.shape[0], _num_slots(x, spec, cu_seqlens), *x.shape[2:]),
)
_differentiate(
    mean_blocks,
    f"SymInt tokens, {_SETTINGS}",
    _node("phi", "mean_backward", forward=False),
    1,
    lambda inputs, _: (inputs[0].shape[1], *inputs[1:]),
    lambda dy, tokens, *_: dy.new_empty(dy.shape[0], tokens, *dy.shape[2:]),
)

_CONTRACT = f"Tensor x, Tensor weight, {_SETTINGS}"
contract_blocks = _define(
    f"contract_blocks({_CONTRACT}) -> Tensor",
    _node("phi", "contract"),
    lambda x, weight, spec, cu_seqlens, _: x.new_empty(
        x.shape[0], _num_slots(x, spec, cu_seqlens), x.shape[2], weight.shape[2]
    ),
)
_differentiate(contract_blocks, _CONTRACT, _node("phi", "contract_backward", 1, 1, forward=False), 2)


# Selection. It has no gradient.


def _select(*args: Any) -> Tensor:
    indices: Tensor = _run_selection(*args)
    notify("selected", indices, _spec(*args[3]), *args[4:6])
    return indices


_run_selection = _node("select", "forward", 0, 1)
select_blocks = _define(
    f"select_blocks(Tensor q, Tensor k, Tensor lse, {_QUERY_SETTINGS}) -> Tensor",
    _select,
    lambda q, k, lse, spec, *_: q.new_empty(q.shape[0], q.shape[1], k.shape[2], spec[3], dtype=torch.int32),
)


# Attention: output and log-sum-exp; the gradients of q, k and v.


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc)


def _define_attention(name: str, operator: str, indices: str = "", run: Any = None) -> tuple[Any, Any]:
    tensors, run = f"Tensor q, Tensor k, Tensor v{indices}", run or _node(operator, "forward", 0, 2)
    forward = _define(f"{name}({tensors}, {_QUERY_SETTINGS}) -> (Tensor, Tensor)", run, _attention_shapes)
    backward = _differentiate(
        forward,
        f"{tensors}, Tensor o, Tensor lse, {_QUERY_SETTINGS}",
        _node(operator, "backward", 1, 3, forward=False),
        3,
        lambda inputs, output: (*inputs[:-4], *output, *inputs[-4:]),
    )
    return forward, backward


def _attend_selected(*args: Any) -> tuple[Tensor, Tensor]:
    _check_index_values(args[3], args[1].shape[1], _spec(*args[4]))
    return _run_selected(*args)


_run_selected = _node("sel", "forward", 0, 2)
compressed_attention, compressed_attention_backward = _define_attention("compressed_attention", "cmp")
window_attention, window_attention_backward = _define_attention("window_attention", "win")
selected_attention, selected_attention_backward = _define_attention(
    "selected_attention", "sel", ", Tensor indices", _attend_selected
)


# The gated mix, whose backends take no spec.


def _mix(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str | None) -> Tensor:
    notify("mixed", gates)
    return choose("mix", backend, o_cmp, o_cmp, _spec(), count=True).forward(o_cmp, o_sel, o_win, gates)


def _mix_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *tensors, backend = args
    return choose("mix", backend, tensors[0], tensors[0], _spec(), count=False).backward(do, *tensors)


_BRANCHES = "Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates, str? backend"
mix_branches = _define(f"mix_branches({_BRANCHES}) -> Tensor", _mix, lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape))
_differentiate(mix_branches, _BRANCHES, _mix_backward, 4)


# The mix of branches that were computed without gradients: its gradients are those of everything.

_ATTENTION = (
    "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win, Tensor v_win, Tensor gates, "
    "Tensor o_cmp, Tensor lse_cmp, Tensor o_sel, Tensor lse_sel, Tensor o_win, Tensor lse_win, Tensor indices, "
    "SymInt[] spec, Tensor? cu_seqlens, str? cmp, str? sel, str? win, str? mix"
)
mix_attention = _define(
    f"mix_attention({_ATTENTION}) -> Tensor",
    lambda *args: _mix(args[8], args[10], args[12], args[7], args[-1]),
    lambda *args: args[8].new_empty(args[8].shape),
)
_differentiate(mix_attention, _ATTENTION, joint.backward, 8)


# The norm and MLP of a decoder block in chunks of tokens, one implementation for every device.

_MLP = "Tensor x, Tensor norm, Tensor gate, Tensor up, Tensor out, float eps"
norm_mlp = _define(
    f"norm_mlp({_MLP}) -> Tensor",
    feed_forward.forward,
    lambda x, norm, gate, up, out, eps: x.new_empty(x.shape, dtype=out.dtype),
)
_differentiate(norm_mlp, _MLP, feed_forward.backward, 5)


# Attention over a cache. `places` is a page table [B, pages] or the rings [B]. No gradient.


def _check_cache_values(positions: Tensor, *caches: tuple[str, Tensor, Tensor, int]) -> None:
    """Every page or ring that a query needs exists. A cache is its name, keys, places, and the tokens of a key."""
    if positions.is_cuda and not _check_every_device.get():
        return
    last = positions.amax(1).tolist()
    for name, k, places, stride in caches:
        used = places.tolist()
        if places.dim() == 2:
            page = k.shape[1] * stride
            room = page * places.shape[1]
            if max(last) >= room:
                raise ArgumentError(
                    "positions", f"{max(last)} lies behind the {room} tokens that {name}'s page table holds"
                )
            used = [n for row, end in zip(used, last, strict=True) if end >= 0 for n in row[: end // page + 1]]
        else:
            used = [n for n, end in zip(used, last, strict=True) if end >= 0]
        if used and not 0 <= min(used) <= max(used) < k.shape[0]:
            raise ArgumentError(
                name, f"refers to {min(used)} .. {max(used)} of {k.shape[0]} pages or rings in its pool"
            )


def _decode_shapes(q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    blocks = q.new_empty(*q.shape[:2], k_cmp.shape[2], rest[-2][3], dtype=torch.int32)
    return q.new_empty(*q.shape[:3], v_cmp.shape[3]), blocks


def _decode_nsa(q: Tensor, gates: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *caches, positions, sizes, backend = args  # k, v and places of cmp, sel and win
    spec = _spec(*sizes)
    if positions.numel() == 0:
        return _decode_shapes(q, gates, *args)
    named = (("cmp", 0, spec.cmp_stride), ("sel", 3, 1), ("win", 6, 1))
    _check_cache_values(positions, *((name, caches[at], caches[at + 2], stride) for name, at, stride in named))
    return choose("decode", backend, q, caches[4], spec, count=True).nsa(q, gates, *caches, positions, spec)


def _attend_pages(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, positions: Tensor, window: int | None, backend: str | None
) -> Tensor:
    if positions.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    _check_cache_values(positions, ("kv", k, places, 1))
    return choose("decode", backend, q, v, _spec(), count=True).paged(q, k, v, places, positions, window)


nsa_decode = _define(
    "nsa_decode(Tensor q, Tensor gates, Tensor k_cmp, Tensor v_cmp, Tensor cmp_table, Tensor k_sel, Tensor v_sel, "
    "Tensor sel_table, Tensor k_win, Tensor v_win, Tensor win_places, Tensor positions, SymInt[] spec, str? backend) "
    "-> (Tensor, Tensor)",
    _decode_nsa,
    _decode_shapes,
)
paged_attention = _define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor places, Tensor positions, SymInt? window, str? backend) "
    "-> Tensor",
    _attend_pages,
    lambda q, k, v, *_: q.new_empty(*q.shape[:3], v.shape[3]),
)


# Positions of packed documents.


def _packed_positions(cu_seqlens: Tensor, tokens: int, spec: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes = _spec(*spec)
    token = token_layout(tokens, sizes, cu_seqlens, cu_seqlens.device).position
    slot = slot_layout(tokens, sizes, cu_seqlens, cu_seqlens.device).position
    return token.clone(), slot.clone()  # what the layout keeps must not be written to, and a compiler may do that


packed_positions = _define(
    "packed_positions(Tensor cu_seqlens, SymInt tokens, SymInt[] spec) -> (Tensor, Tensor)",
    _packed_positions,
    lambda cu_seqlens, tokens, spec: tuple(
        cu_seqlens.new_empty(length, dtype=torch.int64)
        for length in (tokens, num_slots(tokens, _spec(*spec), packed=True))
    ),
)

# For compiled code, which otherwise computes both anew for every head that reads them. Angles have no gradient.
cos_sin = _define(
    "cos_sin(Tensor angle) -> (Tensor, Tensor)",
    lambda angle: (angle.cos(), angle.sin()),
    lambda angle: (torch.empty_like(angle), torch.empty_like(angle)),
)
