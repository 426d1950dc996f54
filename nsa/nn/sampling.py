"""Sampling tokens from a model's logits."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nsa.errors import ArgumentError


def sample_tokens(
    model: nn.Module,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields up to `max_tokens` token ids after the prompt and stops early at `stop`. Runs a full forward per token."""
    if not prompt:
        raise ArgumentError("prompt", "must hold at least one token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = model(tokens)[0, -1].float().cpu()
        token = pick(logits, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        tokens = torch.cat([tokens, torch.tensor([[token]], device=device)], dim=1)


def pick(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> int:
    """Samples one token from logits [V]. Temperature 0 is greedy; top-k is applied before top-p."""
    if temperature < 0.0:
        raise ArgumentError("temperature", f"must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ArgumentError("top_k", f"must be at least 1, got {top_k}")
    if not 0.0 < top_p <= 1.0:
        raise ArgumentError("top_p", f"must be above 0 and at most 1, got {top_p}")
    if temperature < 1e-30:  # 0, or so small that dividing by it would overflow
        return int(logits.argmax())
    values, order = torch.sort(logits / temperature, descending=True, stable=True)
    if top_k is not None:
        values = values[:top_k]
    p = values.softmax(-1)
    # Keep the fewest most likely tokens that reach top_p: those whose predecessors sum to less than it.
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
    return int(order[torch.multinomial(p, 1, generator=generator)])
