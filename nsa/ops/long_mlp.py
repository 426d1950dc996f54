"""A norm and a gated MLP over chunks of tokens: `out(gated(gate(n), up(n), activation))` of `n = rms_norm(x)`, with
`nsa.ops.reference.feed_forward.gated`.

Only the input and the result are kept after a chunk; backward recomputes the intermediates, chunk by chunk. So memory
is that of one chunk for any length. Gradients of weights are summed over the chunks in float32.

Legend: T tokens, C channels, M hidden width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.ops import dispatch
from nsa.ops.library import define, differentiate

CHUNK = 1 << 14  # tokens


def forward(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, out: Tensor, eps: float, activation: str) -> Tensor:
    """x [..., C], norm [C], gate and up [M, C], out [C, M] -> [..., C] in the dtype of `out`, which is also that of the
    products."""
    x_TC, joined = x.reshape(-1, x.shape[-1]), torch.cat([gate, up])
    y_TC = x_TC.new_empty(x_TC.shape, dtype=out.dtype)
    passes = dispatch.choose("mlp", None, x, out, count=True)  # everything except the products
    for rows in _rows(x_TC):
        hidden = passes.normalize(x_TC[rows], norm, eps, out.dtype) @ joined.T
        torch.matmul(passes.activate(hidden, activation), out.T, out=y_TC[rows])
    return y_TC.view(x.shape)


def backward(
    dy: Tensor, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, out: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, norm, gate, up and out, each in its dtype."""
    x_TC, dy_TC, joined = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1]), torch.cat([gate, up])
    dx = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    weights = (norm, joined, out)
    sums = [w.new_zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
    passes = dispatch.choose("mlp", None, x, out, count=False)
    for rows in _rows(x_TC):
        _backward_rows(passes, dx[rows], sums, dy_TC[rows].to(out.dtype), x_TC[rows], weights, eps, activation)
    dnorm, djoined, dout = (total.to(w.dtype) for total, w in zip(sums, weights, strict=True))
    dgate, dup = djoined.split(gate.shape[0])
    return dx.view(x.shape), dnorm, dgate.clone(), dup.clone(), dout


def _backward_rows(
    passes: Any, dx: Tensor, sums: list[Tensor], dy: Tensor, x: Tensor, weights: tuple[Tensor, ...], eps: float,
    activation: str,
) -> None:  # fmt: skip
    """Writes dx and adds to the gradients of norm, gate and up, and out."""
    norm, joined, out = weights
    dnorm, djoined, dout = sums
    read = passes.normalize(x, norm, eps, out.dtype)
    mixed, dhidden = passes.activate_backward(dy @ out, read @ joined.T, activation)
    dout += dy.T @ mixed
    djoined += dhidden.T @ read
    dx_rows, dnorm_rows = passes.normalize_backward(dhidden @ joined, x, norm, eps)
    dx.copy_(dx_rows)
    dnorm += dnorm_rows


def forward_workspace(
    x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, out: Tensor, eps: float, activation: str
) -> int:
    """Bytes that `forward` uses in addition to arguments and results: gate and up concatenated, and for one chunk the
    products, the activation, the products of the previous chunk, and the normed input. The reference holds one tensor
    more for swiglu_oai."""
    tokens, channels, width = min(CHUNK, x.numel() // x.shape[-1]), x.shape[-1], gate.shape[0]
    widths = 4 if activation == "swiglu" else 5
    return out.element_size() * (2 * gate.numel() + tokens * (channels + widths * width))


def backward_workspace(
    dy: Tensor, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, out: Tensor, eps: float, activation: str
) -> int:
    """Upper bound of the bytes that `backward` uses in addition to arguments and results: float32 sums instead of
    gradients in the dtype of the weights, and for one chunk the normed input and eight tensors as wide as the hidden
    layer (in the reference; the kernels need six). swiglu_oai also needs masks."""
    tokens, channels, width = min(CHUNK, x.numel() // x.shape[-1]), x.shape[-1], gate.shape[0]
    weights = gate.numel() * (3 * 4 - out.element_size())
    masks = 0 if activation == "swiglu" else tokens * width
    return masks + weights + tokens * (out.element_size() * (channels + 8 * width) + 4 * channels)


def _rows(x_TC: Tensor) -> Iterator[slice]:
    for start in range(0, x_TC.shape[0], CHUNK):
        yield slice(start, min(start + CHUNK, x_TC.shape[0]))


norm_mlp = define("norm_mlp", forward, lambda x, norm, gate, up, out, *_: x.new_empty(x.shape, dtype=out.dtype))
differentiate(norm_mlp, backward)
