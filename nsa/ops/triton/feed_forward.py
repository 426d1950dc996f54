"""A norm and a gated MLP except their matrix products, one pass over memory each.

All kernels are memory-bound: every element is read once and written once, and computed in float32.

Legend: T tokens, C channels, M hidden width. `hidden` is the concatenation of the products of gate and up. The rows of
a launch are elements: a program takes as many tokens, or as wide a piece of one token, as have that many elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.reference.feed_forward import ALPHA, LIMIT
from nsa.ops.triton.launch_table import DTYPES, Launch, card_of, cdiv, launch_on, launcher, power_of_2

NORM, ACTIVATE = Launch(4096, 1), Launch(2048, 1)
WIDEST = 1 << 14  # channels, which a program holds in registers
_ALPHA, _LIMIT = tl.constexpr(ALPHA), tl.constexpr(LIMIT)


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these kernels cannot run on an input like q and weights like v, or None."""
    if q.dtype not in DTYPES or v.dtype not in DTYPES:
        return f"the Triton kernels compute float16, bfloat16 and float32, not {q.dtype} and {v.dtype}"
    return None if q.shape[-1] <= WIDEST else f"{q.shape[-1]} channels are more than {WIDEST}"


def normalize(x_TC: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of every row."""
    tokens, channels = x_TC.shape
    read = torch.empty(x_TC.shape, dtype=dtype, device=x_TC.device)
    width, rows, warps = _tile(channels)
    with launch_on(x_TC):
        launcher(_norm_kernel, (cdiv(tokens, rows),), x_TC)(
            x_TC, norm, read, eps, tokens, *x_TC.stride(), norm.stride(0),
            C=channels, CP=width, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return read


def normalize_backward(dread_TC: Tensor, x_TC: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of norm, in float32, whose parts are added in a fixed order."""
    tokens, channels = x_TC.shape
    width, rows, warps = _tile(channels)
    programs = min(cdiv(tokens, rows), 8 * card_of(x_TC).multiprocessors)
    dx = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    parts = torch.empty(programs, channels, dtype=torch.float32, device=x_TC.device)
    with launch_on(x_TC):
        launcher(_norm_backward_kernel, (programs,), x_TC)(
            dread_TC, x_TC, norm, dx, parts, eps, tokens, *dread_TC.stride(), *x_TC.stride(), norm.stride(0),
            C=channels, CP=width, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return dx, parts.sum(0)


def activate(hidden_TM: Tensor, activation: str) -> Tensor:
    """As in `nsa.ops.reference.feed_forward`."""
    tokens, width = hidden_TM.shape[0], hidden_TM.shape[1] // 2
    mixed = hidden_TM.new_empty(tokens, width)
    block = min(ACTIVATE.rows, power_of_2(width))
    with launch_on(mixed):
        launcher(_activate_kernel, (tokens, cdiv(width, block)), mixed)(
            hidden_TM, mixed, width, IS_OAI=activation == "swiglu_oai", M=block, num_warps=ACTIVATE.num_warps
        )
    return mixed


def activate_backward(dmixed_TM: Tensor, hidden_TM: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`activate(hidden)`, recomputed, and the gradient of hidden."""
    tokens, width = dmixed_TM.shape
    mixed, dhidden = torch.empty_like(dmixed_TM), torch.empty_like(hidden_TM)
    block = min(ACTIVATE.rows, power_of_2(width))
    with launch_on(mixed):
        launcher(_activate_backward_kernel, (tokens, cdiv(width, block)), mixed)(
            dmixed_TM, hidden_TM, mixed, dhidden, width,
            IS_OAI=activation == "swiglu_oai", M=block, num_warps=ACTIVATE.num_warps,
        )  # fmt: skip
    return mixed, dhidden


def _tile(channels: int) -> tuple[int, int, int]:
    """(padded channels, tokens of a program, its warps)."""
    width = power_of_2(channels)
    return width, max(1, NORM.rows // width), max(NORM.num_warps, width // 1024)


@triton.jit
def _normed(x, t, mask, eps, stride_t, stride_c, C: tl.constexpr, CP: tl.constexpr):
    """Rows t of x divided by their root mean square, [ROWS, CP], and its inverse [ROWS, 1], in float32."""
    c = tl.arange(0, CP)
    at = t.to(tl.int64)[:, None] * stride_t + c[None, :] * stride_c
    row = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(row * row, axis=1, keep_dims=True) / C + eps)
    return row * inverse, inverse


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    x, norm, read, eps, tokens, stride_t, stride_c, stride_n,
    C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CP)
    mask = (t < tokens)[:, None] & (c < C)[None, :]
    scale = tl.load(norm + c * stride_n, mask=c < C, other=0.0).to(tl.float32)
    normed, _ = _normed(x, t, mask, eps, stride_t, stride_c, C, CP)
    at = t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(read + at, (normed * scale[None, :]).to(read.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _norm_backward_kernel(
    dread, x, norm, dx, parts, eps, tokens, stride_dt, stride_dc, stride_t, stride_c, stride_n,
    C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, CP)
    scale = tl.load(norm + c * stride_n, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros([CP], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        t = first + tl.arange(0, ROWS)
        mask = (t < tokens)[:, None] & (c < C)[None, :]
        normed, inverse = _normed(x, t, mask, eps, stride_t, stride_c, C, CP)
        at = t.to(tl.int64)[:, None] * stride_dt + c[None, :] * stride_dc
        grad = tl.load(dread + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad * normed, axis=0)
        grad *= scale[None, :]
        grad = inverse * (grad - normed * (tl.sum(grad * normed, axis=1, keep_dims=True) / C))
        tl.store(dx + t.to(tl.int64)[:, None] * C + c[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    tl.store(parts + tl.program_id(0).to(tl.int64) * C + c, total, mask=c < C)


@triton.jit
def gate_parts(gate, up, IS_OAI: tl.constexpr):
    """The gate, its sigmoid and the factor of up, in float32: the activation is their product. A NaN stays a NaN."""
    if IS_OAI:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        opened = tl.sigmoid(gate * _ALPHA)
    else:
        opened = tl.sigmoid(gate)
    return gate, opened, up


@triton.jit
def _activate_kernel(hidden, mixed, width, IS_OAI: tl.constexpr, M: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * M + tl.arange(0, M)
    mask = m < width
    gate = tl.load(hidden + 2 * t * width + m, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + (2 * t + 1) * width + m, mask=mask, other=0.0).to(tl.float32)
    gate, opened, up = gate_parts(gate, up, IS_OAI)
    tl.store(mixed + t * width + m, (gate * opened * up).to(mixed.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward_kernel(dmixed, hidden, mixed, dhidden, width, IS_OAI: tl.constexpr, M: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * M + tl.arange(0, M)
    mask = m < width
    gate = tl.load(hidden + 2 * t * width + m, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + (2 * t + 1) * width + m, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dmixed + t * width + m, mask=mask, other=0.0).to(tl.float32)
    clamped, opened, shifted = gate_parts(gate, up, IS_OAI)
    activated = clamped * opened
    tl.store(mixed + t * width + m, (activated * shifted).to(mixed.dtype.element_ty), mask=mask)
    dup = grad * activated
    if IS_OAI:
        dgate = tl.where(gate > _LIMIT, 0.0, grad * shifted * (opened + activated * _ALPHA * (1.0 - opened)))
        dup = tl.where(tl.abs(up) > _LIMIT, 0.0, dup)
    else:
        dgate = grad * up * opened * (1.0 + gate * (1.0 - opened))
    tl.store(dhidden + 2 * t * width + m, dgate.to(dhidden.dtype.element_ty), mask=mask)
    tl.store(dhidden + (2 * t + 1) * width + m, dup.to(dhidden.dtype.element_ty), mask=mask)
