"""Are the kernels right on this machine: every operator of a configuration against what it should compute.

Outputs and gradients of the backend that the run would take are compared with the reference in float64, and the
reference's own gradients with finite differences, so that not even the reference is taken at its word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import Config
from nsa.ops import (
    NSASpec,
    compress_contract,
    compress_mean,
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.dispatch import choose
from nsa.ops.library import mix_branches
from nsa.ops.operators import Backend, backend_of
from nsa.parallel.numerics import compute_precision
from nsa.train.state import chosen_kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}  # relative, as in the kernels' own tests
ROWS_THAT_MAY_DIFFER = 1e-3  # of selection, where two blocks score the same to rounding
SLOPE_LIMIT, SLOPE_STEP = 1e-5, 1e-4  # of finite differences in float64
SLOPE_BLOCKS = 4  # selection blocks of the short sequence they are taken on

Tensors = dict[str, Tensor]
Compute = Callable[[Tensors, str | None], Tensor]


@dataclass(frozen=True)
class KernelCheck:
    """One output or gradient: how far it is off, and by how much it may be."""

    operator: str
    part: str  # "output", "gradient of k", ...
    backend: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # a NaN is not


def check_kernels(config: Config, device: torch.device) -> list[KernelCheck]:
    """All operators with the heads, sizes and types of the configuration; nothing where attention is dense."""
    if config.model.attention != "nsa":
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
        model, self.spec = config.model, config.nsa.spec()
        # Two compressed tokens in each document at least: a query that sees only one has no gradient to compare.
        least = 3 * (self.spec.cmp_block + self.spec.cmp_stride)
        self.tokens = tokens = max(least, min(tokens, max(config.train.seq_len, self.spec.sel_block)))
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        keys, values = (tokens, model.n_kv_heads, model.head_dim_k), (tokens, model.n_kv_heads, model.head_dim_v)
        self.q = random(1, tokens, model.n_heads, model.head_dim_k)
        self.k, self.v = random(1, *keys), random(1, *values)
        self.weight = random(self.spec.cmp_block, model.head_dim_k, model.head_dim_k) / self.spec.cmp_block
        self.outputs = [random(1, tokens, model.n_heads, model.head_dim_v) for _ in range(3)]
        self.gates = random(1, tokens, model.n_heads, 3).sigmoid()
        self.borders = None
        if config.data.isolate_documents:
            places = [0, tokens // 3 + 1, tokens]
            self.borders = torch.tensor(places, dtype=torch.int32, device=device)
        self.phi = config.nsa.phi
        with torch.no_grad():
            self.k_cmp, self.v_cmp = (self._mean(t) for t in (self.k, self.v))
            exact = self.q.double(), self.k_cmp.double(), self.v_cmp.double()
            _, self.lse = self._attend(compressed_attention, *exact)
            self.indices = select_blocks(*exact[:2], self.lse, self.spec, cu_seqlens=self.borders, backend="reference")

    def _mean(self, x: Tensor) -> Tensor:
        return compress_mean(x.double(), self.spec, cu_seqlens=self.borders, backend="reference").to(x.dtype)

    def _attend(self, attention: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*tensors, self.spec, cu_seqlens=self.borders, backend="reference")

    def case(self, operator: str) -> tuple[Tensors, Compute]:
        """What the operator has gradients for, and the operator as a function of it."""
        spec, more = self.spec, {"cu_seqlens": self.borders}
        pair = {"q": self.q, "k": self.k, "v": self.v}
        cases: dict[str, tuple[Tensors, Compute]] = {
            "phi": ({"x": self.k}, lambda t, by: compress_mean(t["x"], spec, backend=by, **more)),
            "cmp": (
                {"q": self.q, "k": self.k_cmp, "v": self.v_cmp},
                lambda t, by: compressed_attention(t["q"], t["k"], t["v"], spec, backend=by, **more)[0],
            ),
            "sel": (
                pair,
                lambda t, by: selected_attention(t["q"], t["k"], t["v"], self.indices, spec, backend=by, **more),
            ),
            "win": (pair, lambda t, by: window_attention(t["q"], t["k"], t["v"], spec, backend=by, **more)),
            "mix": (
                dict(zip(("cmp", "sel", "win", "gates"), (*self.outputs, self.gates), strict=True)),
                lambda t, by: mix_branches(t["cmp"], t["sel"], t["win"], t["gates"], by),
            ),
        }
        if operator == "phi" and self.phi == "mlp":
            return (
                {"x": self.k, "weight": self.weight},
                lambda t, by: compress_contract(t["x"], t["weight"], spec, backend=by, **more),
            )
        return cases[operator]


def _against_reference(inputs: _Inputs, operator: str, wanted: Backend, limit: float) -> Iterator[KernelCheck]:
    tensors, compute = inputs.case(operator)
    by = backend_of(operator, wanted)
    got = _with_gradients(tensors, lambda t: compute(t, by))
    exact = _with_gradients({n: t.double() for n, t in tensors.items()}, lambda t: compute(t, "reference"))
    name = backend_name(operator, by, inputs.q, inputs.v, inputs.spec)
    for part, value in got.items():
        yield KernelCheck(operator, part, name, _distance(value, exact[part]), limit)


def _against_slopes(inputs: _Inputs, operator: str) -> Iterator[KernelCheck]:
    """The reference's gradient along a random direction, against how the output changes in that direction."""
    tensors, compute = inputs.case(operator)
    draw = torch.Generator().manual_seed(1)
    gradients = _with_gradients(tensors, lambda t: compute(t, "reference"))
    for name, tensor in tensors.items():
        direction = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device)

        def output_at(step: float, name: str = name, direction: Tensor = direction) -> Tensor:
            moved = {**tensors, name: tensors[name] + step * direction}
            with torch.no_grad():
                value = compute(moved, "reference")
                return (value * _cotangent(value)).sum()

        slope = (output_at(SLOPE_STEP) - output_at(-SLOPE_STEP)) / (2 * SLOPE_STEP)
        gradient = gradients[f"gradient of {name}"]
        scale = gradient.norm() * direction.norm() / direction.numel() ** 0.5
        error = float(((gradient * direction).sum() - slope).abs() / scale)
        yield KernelCheck(operator, f"gradient of {name} by differences", "reference", error, SLOPE_LIMIT)


def _check_selection(inputs: _Inputs, by: str | None) -> KernelCheck:
    lse = inputs.lse.float() if inputs.q.dtype != torch.float64 else inputs.lse
    got = select_blocks(inputs.q, inputs.k_cmp, lse, inputs.spec, cu_seqlens=inputs.borders, backend=by)
    differ = float((got != inputs.indices).any(-1).double().mean())
    name = backend_name("select", by, inputs.q, inputs.k_cmp, inputs.spec)
    return KernelCheck("select", "rows with other blocks", name, differ, ROWS_THAT_MAY_DIFFER)


def _with_gradients(tensors: Tensors, compute: Callable[[Tensors], Tensor]) -> Tensors:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    output = compute(leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), _cotangent(output))
    named = {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"output": output.detach(), **named}


def _cotangent(output: Tensor) -> Tensor:
    """The same random numbers for every backend and type, rounded alike."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return drawn.bfloat16().to(output.device, output.dtype)


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def backend_name(operator: str, by: str | None, q: Tensor, v: Tensor, spec: NSASpec) -> str:
    """Who computes the operator for such tensors."""
    return choose(operator, by, q, v, spec, count=False).__name__.split(".")[-2]
