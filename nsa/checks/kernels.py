"""Are the kernels right on this machine? Checks every operator of a configuration.

Outputs and gradients of the backend that the run would use are compared with the reference in float64, and the
reference's own gradients with finite differences, so that the reference is checked too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.config import Config
from nsa.ops import (
    compress_contract,
    compress_mean,
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.dispatch import Backend, backend_name, backend_of
from nsa.ops.mixing import mix_node
from nsa.parallel.numerics import DTYPES, compute_precision
from nsa.train.state import chosen_kernels

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}  # relative, as in the kernels' own tests
ROWS_THAT_MAY_DIFFER = 1e-3  # of selection, where two blocks score the same to rounding
SLOPE_LIMIT, SLOPE_STEPS = 1e-5, (1e-4, -1e-4)  # of finite differences in float64
SLOPE_BLOCKS = 4  # selection blocks of the short sequence they use

Tensors = dict[str, Tensor]
Operator = Callable[[Tensors, str | None], Tensor]  # of its inputs by name, and a backend


@dataclass(frozen=True)
class KernelCheck:
    """One output or gradient: its error and the largest allowed one."""

    operator: str
    part: str  # "output", "gradient of k", ...
    backend: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for a NaN


def check_kernels(config: Config, device: torch.device) -> list[KernelCheck]:
    """All operators with the heads, sizes and dtypes of the configuration; empty where attention is dense."""
    if "nsa" not in config.model.layer_kinds():
        return []
    dtype = DTYPES[compute_precision(config.runtime.precision, device)]
    spec, wanted = config.nsa.spec(), chosen_kernels(config)
    long = _Inputs(config, (spec.num_selected + 4) * spec.sel_block, device, dtype)
    short = _Inputs(config, SLOPE_BLOCKS * spec.sel_block, device, torch.float64)
    found = [_check_selection(long, backend_of("select", wanted))]
    for operator in ("phi", "cmp", "sel", "win", "mix"):
        found += _against_reference(long, operator, wanted, LIMITS[dtype])
        found += _against_slopes(short, operator)
    return found


class _Inputs:
    """Random tensors of a layer, in two documents where the run isolates them, and each operator as a function."""

    def __init__(self, config: Config, tokens: int, device: torch.device, dtype: torch.dtype):
        model, spec = config.model, config.nsa.spec()
        # Two compressed tokens in each document at least: a query that sees only one has no gradient to compare.
        least = 3 * (spec.cmp_block + spec.cmp_stride)
        tokens = max(least, min(tokens, max(config.train.seq_len, spec.sel_block)))
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        self.spec, self.phi = spec, config.nsa.phi
        self.q = random(1, tokens, model.n_heads, model.head_dim_k)
        self.k = random(1, tokens, model.n_kv_heads, model.head_dim_k)
        self.v = random(1, tokens, model.n_kv_heads, model.head_dim_v)
        self.weight = random(spec.cmp_block, model.head_dim_k, model.head_dim_k) / spec.cmp_block
        self.mixed = {name: random(1, tokens, model.n_heads, model.head_dim_v) for name in ("cmp", "sel", "win")}
        self.mixed["gates"] = random(1, tokens, model.n_heads, 3).sigmoid()
        borders = [0, tokens // 3 + 1, tokens]
        isolated = config.data.isolate_documents
        self.borders = torch.tensor(borders, dtype=torch.int32, device=device) if isolated else None
        with torch.no_grad():
            more: dict[str, Any] = {"cu_seqlens": self.borders, "backend": "reference"}
            self.k_cmp, self.v_cmp = (compress_mean(t.double(), spec, **more).to(dtype) for t in (self.k, self.v))
            exact = self.q.double(), self.k_cmp.double(), self.v_cmp.double()
            _, self.lse = compressed_attention(*exact, spec, **more)
            self.indices = select_blocks(*exact[:2], self.lse, spec, **more)

    def case(self, operator: str) -> tuple[Tensors, Operator]:
        """The inputs with gradients, and the operator as a function of them."""
        if operator == "mix":
            return self.mixed, lambda t, by: mix_node(t["cmp"], t["sel"], t["win"], t["gates"], by)
        spec, more = self.spec, {"cu_seqlens": self.borders}
        qkv = {"q": self.q, "k": self.k, "v": self.v}
        compressed = {**qkv, "k": self.k_cmp, "v": self.v_cmp}
        cases: dict[str, tuple[Tensors, Callable[..., Any]]] = {
            "phi": ({"x": self.k}, compress_mean),
            "phi mlp": ({"x": self.k, "weight": self.weight}, compress_contract),
            "cmp": (compressed, lambda *args, **options: compressed_attention(*args, **options)[0]),
            "sel": (qkv, lambda q, k, v, *args, **options: selected_attention(q, k, v, self.indices, *args, **options)),
            "win": (qkv, window_attention),
        }
        inputs, function = cases["phi mlp" if operator == "phi" and self.phi == "mlp" else operator]
        return inputs, lambda t, by: function(*t.values(), spec, backend=by, **more)


def _against_reference(inputs: _Inputs, operator: str, wanted: Backend, limit: float) -> Iterator[KernelCheck]:
    tensors, compute = inputs.case(operator)
    by = backend_of(operator, wanted)
    got = _with_gradients(tensors, lambda t: compute(t, by))
    exact = _with_gradients({n: t.double() for n, t in tensors.items()}, lambda t: compute(t, "reference"))
    name = backend_name(operator, by, inputs.q, inputs.v)
    for part, value in got.items():
        error = (value.double() - exact[part]).norm() / exact[part].norm()
        yield KernelCheck(operator, part, name, float(error), limit)


def _against_slopes(inputs: _Inputs, operator: str) -> Iterator[KernelCheck]:
    """The reference's gradient along a random direction, against how the output changes in that direction."""
    tensors, compute = inputs.case(operator)
    draw = torch.Generator().manual_seed(1)
    gradients = _with_gradients(tensors, lambda t: compute(t, "reference"))
    for name, tensor in tensors.items():
        direction = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device)
        with torch.no_grad():
            ends = [compute({**tensors, name: tensor + step * direction}, "reference") for step in SLOPE_STEPS]
            high, low = ((end * _cotangent(end)).sum() for end in ends)
        slope = (high - low) / (SLOPE_STEPS[0] - SLOPE_STEPS[1])
        gradient = gradients[f"gradient of {name}"]
        scale = gradient.norm() * direction.norm() / direction.numel() ** 0.5
        error = float(((gradient * direction).sum() - slope).abs() / scale)
        yield KernelCheck(operator, f"gradient of {name} by differences", "reference", error, SLOPE_LIMIT)


def _check_selection(inputs: _Inputs, by: str | None) -> KernelCheck:
    given = inputs.q, inputs.k_cmp, inputs.lse.float(), inputs.spec
    got = select_blocks(*given, cu_seqlens=inputs.borders, backend=by)
    differ = float((got != inputs.indices).any(-1).double().mean())
    name = backend_name("select", by, inputs.q, inputs.k_cmp)
    return KernelCheck("select", "rows with other blocks", name, differ, ROWS_THAT_MAY_DIFFER)


def _with_gradients(tensors: Tensors, compute: Callable[[Tensors], Tensor]) -> Tensors:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    output = compute(leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), _cotangent(output))
    named = {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"output": output.detach(), **named}


def _cotangent(output: Tensor) -> Tensor:
    """The same random numbers for every backend and dtype, rounded in the same way."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return drawn.bfloat16().to(output.device, output.dtype)
