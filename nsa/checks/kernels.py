"""Checks every operator of a configuration on this machine.

Compares outputs and gradients of the backend that the run would use with the reference in float64, and the gradients of
the reference with finite differences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.config import Config
from nsa.nn.attention import sample_layers
from nsa.nn.attention.layer import OperatorCase
from nsa.ops.dispatch import Backend, backend_name, backend_of
from nsa.parallel.numerics import DTYPES, compute_precision
from nsa.train.state import chosen_kernels

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}  # relative errors, as in the kernel tests
ROWS_THAT_MAY_DIFFER = 1e-3  # share of selection rows: two blocks may have equal scores up to rounding
SLOPE_LIMIT, SLOPE_STEPS = 1e-5, (1e-4, -1e-4)  # of finite differences in float64

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class KernelCheck:
    """The error of one output or gradient, and its limit."""

    operator: str
    part: str  # "output", "gradient of k", ...
    backend: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for a NaN


def check_kernels(config: Config, device: torch.device) -> list[KernelCheck]:
    """All operators of the attention layers with the heads, sizes and dtypes of the configuration."""
    dtype = DTYPES[compute_precision(config.runtime.precision, device)]
    wanted, found = chosen_kernels(config), list[KernelCheck]()
    for layer in sample_layers(config).values():
        cases = partial(layer.operator_cases, config.train.seq_len, packed=config.data.isolate_documents)
        for case in cases(dtype=dtype, device=device, is_short=False):
            found += _against_reference(case, wanted, LIMITS[dtype])
        for case in cases(dtype=torch.float64, device=device, is_short=True):
            found += () if case.selects else _against_slopes(case)
    return found


def _against_reference(case: OperatorCase, wanted: Backend, limit: float) -> Iterator[KernelCheck]:
    by = backend_of(case.operator, wanted)
    name = backend_name(case.operator, by, *case.like)
    double = {name: tensor.double() for name, tensor in case.inputs.items()}
    if case.selects:
        differ = _result(case, case.inputs, by) != _result(case, double, "reference")
        share = float(differ.any(-1).double().mean())
        yield KernelCheck(case.operator, "rows with other blocks", name, share, ROWS_THAT_MAY_DIFFER)
        return
    got = _with_gradients(case.inputs, lambda t: _result(case, t, by))
    exact = _with_gradients(double, lambda t: _result(case, t, "reference"))
    for part, value in got.items():
        error = (value.double() - exact[part]).norm() / exact[part].norm()
        yield KernelCheck(case.operator, part, name, float(error), limit)


def _against_slopes(case: OperatorCase) -> Iterator[KernelCheck]:
    """The reference's gradient along a random direction, against how the output changes in that direction."""
    draw = torch.Generator().manual_seed(1)
    gradients = _with_gradients(case.inputs, lambda t: _result(case, t, "reference"))
    for name, tensor in case.inputs.items():
        direction = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device)
        with torch.no_grad():
            moved = [{**case.inputs, name: tensor + step * direction} for step in SLOPE_STEPS]
            ends = [_result(case, inputs, "reference") for inputs in moved]
            high, low = ((end * _cotangent(end)).sum() for end in ends)
        slope = (high - low) / (SLOPE_STEPS[0] - SLOPE_STEPS[1])
        gradient = gradients[f"gradient of {name}"]
        scale = gradient.norm() * direction.norm() / direction.numel() ** 0.5
        error = float(((gradient * direction).sum() - slope).abs() / scale)
        yield KernelCheck(case.operator, f"gradient of {name} by differences", "reference", error, SLOPE_LIMIT)


def _result(case: OperatorCase, inputs: Tensors, backend: str | None) -> Tensor:
    found: Tensor | tuple[Tensor, ...] = case.compute(*inputs.values(), backend=backend)
    return found[0] if isinstance(found, tuple) else found


def _with_gradients(tensors: Tensors, compute: Callable[[Tensors], Tensor]) -> Tensors:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    output = compute(leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), _cotangent(output))
    named = {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"output": output.detach(), **named}


def _cotangent(output: Tensor) -> Tensor:
    """Returns the same random numbers, with the same rounding, for every backend and dtype."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return drawn.bfloat16().to(output.device, output.dtype)
