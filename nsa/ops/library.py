"""Registers operators with torch: nodes that are opaque to autograd, torch.compile, checkpointing and meta tensors.

A node is a plain function; its annotated parameters are the schema of `torch.ops.nsa`. When it runs, it checks values
(document borders, block indices) and chooses a backend. The file of an operator defines its nodes next to its public
function, which checks all other properties of the arguments (`nsa.ops.checks`).

Values are always checked on the CPU. On a GPU the check would synchronize, so it runs only inside `checked_values()`;
otherwise the formulas mask invalid values.
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

from nsa.errors import ArgumentError, DerivativeError, whole_number
from nsa.ops.layout import num_blocks
from nsa.ops.spec import MSASpec, NSASpec

# torch.library.custom_op does the same in one call, but costs every call of the operator 0.1 to 0.3 ms on the host, as
# long as the kernels of a short sequence take.
_LIBRARY = torch.library.Library("nsa", "DEF")

_check_every_device: ContextVar[bool] = ContextVar("check_every_device", default=False)


@contextmanager
def checked_values() -> Iterator[None]:
    """Inside, values are checked on every device. For debugging: every operator synchronizes."""
    token = _check_every_device.set(True)
    try:
        yield
    finally:
        _check_every_device.reset(token)


def values_are_checked(x: Tensor) -> bool:
    """Whether an operator may read the values of x to check them."""
    return not x.is_cuda or _check_every_device.get()


def check_border_values(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Checks that borders start at 0, end at S and never decrease."""
    if cu_seqlens is None or not values_are_checked(cu_seqlens):
        return
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens:
        raise ArgumentError("cu_seqlens", f"must start at 0 and end at S={tokens}, got {borders[0]} and {borders[-1]}")
    for place, (left, right) in enumerate(pairwise(borders), start=1):
        if right < left:
            raise ArgumentError("cu_seqlens", f"must never decrease, but entry {place} goes from {left} to {right}")


def check_longest(max_seqlen: int | None, cu_seqlens: Tensor | None, tokens: int) -> None:
    """Checks that `max_seqlen` is at least the length of every document. Compiled code does not check it."""
    if max_seqlen is None or torch.compiler.is_compiling():
        return
    longest = tokens
    if cu_seqlens is not None:
        is_readable = type(cu_seqlens) is Tensor and not cu_seqlens.is_meta  # not a fake tensor
        longest = int(cu_seqlens.diff().max()) if is_readable and values_are_checked(cu_seqlens) else 0
    if whole_number("max_seqlen", max_seqlen, 0) < longest:
        raise ArgumentError(
            "max_seqlen", f"must be at least {longest}, the length of the longest document, got {max_seqlen}"
        )


def check_index_values(indices: Tensor, tokens: int, block: int) -> None:
    """Checks that every index is -1 or a block of the sequence."""
    if indices.numel() == 0 or not values_are_checked(indices):
        return
    blocks = num_blocks(tokens, block)
    low, high = int(indices.min()), int(indices.max())
    if low < -1 or high >= blocks:
        raise ArgumentError("indices", f"must be -1 or one of the {blocks} blocks, got values from {low} to {high}")


def spec_of(sizes: Sequence[int]) -> NSASpec:
    """The spec of these sizes, which `NSASpec.as_ints` passed to a node."""
    return _nsa_spec(*sizes)


def msa_spec_of(sizes: Sequence[int]) -> MSASpec:
    """The spec of these sizes, which `MSASpec.as_ints` passed to a node."""
    return _msa_spec(*sizes)


_nsa_spec, _msa_spec = lru_cache(maxsize=64)(NSASpec), lru_cache(maxsize=64)(MSASpec)


def define(name: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Registers `run` as operator `nsa::name` for CPU and CUDA tensors, and `shapes` with the same arguments as its
    fake implementation for tracing. Torch passes all arguments by position."""
    _LIBRARY.define(torch.library.infer_schema(run, mutates_args=(), op_name=name), tags=(torch.Tag.pt2_compliant_tag,))

    def run_in_own_types(*args: Any) -> Any:
        with torch._C._DisableAutocast():  # autocast would round the float32 products of the reference to 16 bits
            return run(*args)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run_in_own_types, key)
    operator = getattr(torch.ops.nsa, name).default
    torch.library.register_fake(operator, shapes, lib=_LIBRARY)
    return operator


def differentiate(
    forward: Any,
    run: Callable[..., Any],
    arguments: Callable[..., tuple[Any, ...]] = lambda output, *inputs: inputs,
    shapes: Callable[..., Any] | None = None,
) -> Any:
    """Registers `run` as the operator that computes the gradients of `forward`: `nsa::{forward}_backward`.

    run         takes the gradient of the first output, then `arguments`; returns the gradients of the first inputs
    arguments   the function `(output, *inputs) -> arguments`; by default the inputs
    shapes      the fake implementation of `run`; by default gradients have the shapes of the first arguments
    """
    backward = define(
        f"{forward._schema.name.removeprefix('nsa::')}_backward",
        run,
        shapes or (lambda do, *kept: tuple(x.new_empty(x.shape) for x in kept[:grads])),
    )
    grads = len(backward._schema.returns)
    not_differentiated = (None,) * (len(forward._schema.arguments) - grads)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # no zeros for the outputs after the first, whose gradients are not used
        kept = list(arguments(output, *inputs))
        ctx.places = [place for place, x in enumerate(kept) if isinstance(x, Tensor)]
        ctx.save_for_backward(*[kept[place] for place in ctx.places])
        for place in ctx.places:
            kept[place] = None
        ctx.constants = kept

    def gradient(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(forward._schema.arguments)
        kept = ctx.constants.copy()
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            kept[place] = tensor
        found = _once(backward, do, *kept) if torch.is_grad_enabled() else backward(do, *kept)
        found = found if isinstance(found, tuple) else (found,)
        return found + not_differentiated

    torch.library.register_autograd(forward, gradient, setup_context=keep, lib=_LIBRARY)
    return backward


class _FirstDerivative(torch.autograd.Function):
    """Runs a backward operator under `create_graph=True`; differentiating it again is an error."""

    @staticmethod
    def forward(ctx: Any, backward: Any, *args: Any) -> Any:
        ctx.operator = backward.name().removesuffix("_backward")
        return backward(*args)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise DerivativeError(ctx.operator)


_once: Callable[..., Any] = _FirstDerivative.apply


def refuse_tangents(operator: str, *tensors: Tensor) -> None:
    """Raises if forward-mode differentiation reaches an operator: its node would silently drop the tangents. And if
    `torch.func.grad` does: torch would fail without naming the operator."""
    levels = () if torch.compiler.is_compiling() else _functorch.get_interpreter_stack() or ()
    if any(level.key() == _functorch.TransformType.Grad for level in levels) and any(
        _functorch.is_functorch_wrapped_tensor(x) and x.requires_grad for x in tensors
    ):
        raise DerivativeError(f"nsa::{operator}", is_transform=True)
    if forward_ad._current_level < 0:
        return
    top = _functorch.peek_interpreter_stack()
    for x in tensors:
        # The tangents of an outer jvp are not visible in tensors wrapped by vmap or grad.
        is_hidden = top and top.key() != _functorch.TransformType.Jvp and _functorch.is_functorch_wrapped_tensor(x)
        if is_hidden or forward_ad.unpack_dual(x).tangent is not None:
            raise DerivativeError(f"nsa::{operator}", is_forward_mode=True)


def attention_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of an attention operator, for tracing."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=acc)
