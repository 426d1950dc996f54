"""Replaces the attention of a plain PyTorch transformer by NSAAttention, and trains it.

python examples/in_your_model.py
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from nsa.nn import NSAAttention
from nsa.ops import NSASpec

VOCAB, DIM, HEADS, LENGTH, PERIOD = 16, 64, 4, 64, 24


# The given model: plain PyTorch, causal attention, residual connections.
class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CausalSelfAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(Block(DIM, HEADS), Block(DIM, HEADS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def copy_batch(size: int) -> Tensor:
    """Random tokens that repeat after PERIOD tokens: from there on the next token can be copied."""
    return torch.randint(VOCAB, (size, PERIOD)).repeat(1, LENGTH // PERIOD + 1)[:, :LENGTH]


def main() -> None:
    torch.manual_seed(0)
    model = Transformer()

    # The only change. NSAAttention applies rotary positions itself and takes [batch, tokens, dim] as before.
    # The window is shorter than PERIOD, so only the other two branches can read the token to copy.
    spec = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=1, window=16)
    for block in model.blocks:
        block.attention = NSAAttention(DIM, num_heads=HEADS, num_kv_heads=2, head_dim_k=32, spec=spec)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        tokens = copy_batch(16)
        logits = model(tokens)[:, PERIOD - 1 : -1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 5 == 0:
            print(f"step {step:2d} | loss {loss.item():.3f}  (guessing: {math.log(VOCAB):.3f})")


if __name__ == "__main__":
    main()
