"""Dense attention over packed documents through PyTorch's variable-length kernels, on a GPU."""

import pytest
import torch

from nsa.nn.attention.dense import DenseAttention
from nsa.ops.causal import _runs_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("heads", [(4, 4), (12, 2)], ids=["one group a head", "groups"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_variable_length_kernels_equal_the_window_operator(heads: tuple[int, int], qk_norm: bool) -> None:
    layer = DenseAttention(96, *heads, 64, 64, qk_norm=qk_norm).cuda()
    borders = torch.tensor([0, 1, 130, 130, 900, 1024], dtype=torch.int32, device="cuda")
    x = torch.randn(1, 1024, 96, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            q = torch.zeros(1, 1, heads[0], 64, device="cuda", dtype=dtype)
            assert _runs_varlen(q, q) == (dtype == torch.bfloat16)
            y = layer(inputs, cu_seqlens=borders, max_seqlen=770)
        gradients = torch.autograd.grad(y.float().square().sum(), [inputs, *layer.parameters()])
        results.append([y.float(), *(g.float() for g in gradients)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()
