"""Compressed attention as plain causal attention, which PyTorch's fused kernels compute: a candidate of `bench.tune`.

The `cmp_stride` tokens from i * cmp_stride + cmp_block - 1 on see the same compressed tokens, 0 .. i. With the r-th
token of each such run as position i of row r, compressed attention is causal attention over as many positions as there
are compressed tokens, for `cmp_stride` rows that share keys and values.

Legend: B batch, S tokens, N compressed tokens, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa.ops.spec import NSASpec


def attend(q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, backend: SDPBackend) -> Tensor:
    """q [B,S,H,D], k and v [B,N,G,D] -> o [B,S,H,D], with gradients. Tokens that see nothing get 0."""
    (batch, tokens, heads, _), positions = q.shape, k.shape[1]
    first = spec.cmp_block - 1
    runs = q[:, first : first + positions * spec.cmp_stride]
    runs = pad(runs, (0, 0, 0, 0, 0, positions * spec.cmp_stride - runs.shape[1]))
    rows = runs.view(batch, positions, spec.cmp_stride, heads, -1).permute(0, 2, 3, 1, 4).flatten(0, 1)
    keys, values = (
        x.transpose(1, 2)[:, None].expand(-1, spec.cmp_stride, -1, -1, -1).flatten(0, 1) for x in (k, v)
    )  # [B * stride, G, N, D], for one sequence without a copy
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)
    runs = o.unflatten(0, (batch, spec.cmp_stride)).permute(0, 3, 1, 2, 4).flatten(1, 2)
    return pad(runs[:, : tokens - first], (0, 0, 0, 0, first, 0))


class CausalCompressed:
    """Forward and backward passes of `attend` by cuDNN, apart, for queries that are not changed between them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION
    ):
        self._inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        self._spec, self._backend = spec, backend
        self._o: Tensor | None = None

    def forward(self) -> Tensor:
        with torch.enable_grad():
            return attend(*self._inputs, self._spec, self._backend)

    def backward(self, do: Tensor) -> tuple[Tensor, ...]:
        if self._o is None:
            self._o = self.forward()
        return torch.autograd.grad(self._o, self._inputs, do, retain_graph=True)
