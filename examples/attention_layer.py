"""NSAAttention by itself: forward, backward, and several documents packed into one sequence.

python examples/attention_layer.py
"""

import torch

from nsa.nn import NSAAttention
from nsa.ops import NSASpec

torch.manual_seed(0)

# Small blocks, so that 96 tokens offer a choice. Six query heads share two key/value heads.
spec = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=1, window=16)
layer = NSAAttention(dim=64, num_heads=6, num_kv_heads=2, head_dim_k=32, head_dim_v=16, spec=spec)
print(f"layer     {sum(p.numel() for p in layer.parameters()):,} parameters, {spec}")

x = torch.randn(2, 96, 64, requires_grad=True)
y = layer(x)
y.square().mean().backward()
missing = [name for name, p in layer.named_parameters() if p.grad is None]
print(f"forward   {list(x.shape)} -> {list(y.shape)}")
print(f"backward  gradient of x has norm {x.grad.norm():.3g}; parameters without a gradient: {missing or 'none'}")

changed = x.detach().clone()
changed[:, 60:] = 0.0
print(f"causal    output 0..59 changes by {(layer(changed) - y)[:, :60].abs().max():.1e} when tokens 60..95 change")

# Three documents in one sequence. cu_seqlens holds their boundaries; the batch size is 1.
documents = [torch.randn(1, length, 64) for length in (17, 50, 29)]
boundaries = torch.tensor([0, 17, 67, 96], dtype=torch.int32)
packed = layer(torch.cat(documents, dim=1), cu_seqlens=boundaries)
alone = torch.cat([layer(document) for document in documents], dim=1)
print(f"packed    three documents in one sequence and each alone differ by {(packed - alone).abs().max():.1e}")
