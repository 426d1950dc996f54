"""Samples the next tokens of a batch from a model's logits.

Every row has its own random generator, so its tokens do not depend on other rows. The generators are on the CPU for
every device.

Legend: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.errors import ArgumentError, whole_number

# In float32, division by a smaller temperature would overflow, and a smaller top_p could round to 0.
SMALLEST_TEMPERATURE = SMALLEST_TOP_P = 1e-30


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    temperature   0 always takes the most likely token
    top_k         samples from the k most likely tokens; None from all
    top_p         samples from the fewest most likely tokens whose probabilities sum to top_p, at least one; after top_k
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            try:
                object.__setattr__(self, name, math.fsum([getattr(self, name)]))  # accepts any number, but no text
            except (TypeError, OverflowError):
                raise ArgumentError(name, f"must be a number, got {getattr(self, name)!r:.80}") from None
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))
        if not self.temperature >= 0.0:
            raise ArgumentError("temperature", f"must be at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ArgumentError("top_p", f"must be above 0 and at most 1, got {self.top_p}")


def uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """A uniform random number from 0 to 1 for every row: [B, 1], float64, on the CPU."""
    numbers = [torch.rand(1, generator=generator, dtype=torch.float64, device="cpu") for generator in generators]
    return torch.stack(numbers)


def draw(logits_BV: Tensor, sampling: Sampling, uniform_B1: Tensor) -> Tensor:
    """One token for every row: [B], on the device of the logits; -1 if the logits of a row have no maximum."""
    if sampling.temperature < SMALLEST_TEMPERATURE:
        largest_B, token_B = logits_BV.max(-1)
        return token_B.masked_fill(~largest_B.isfinite(), -1)
    is_exact = torch.are_deterministic_algorithms_enabled()  # cumulative sums on a GPU are not deterministic
    if sampling.top_k is None and sampling.top_p == 1.0:
        logits = logits_BV.cpu() if is_exact else logits_BV
        return _draw_from_all((logits.float() / sampling.temperature).softmax(-1), uniform_B1).to(logits_BV.device)
    values, order = torch.sort(logits_BV, descending=True, stable=True)  # before the division: fewer bits to sort
    if is_exact:
        values, order = values.cpu(), order.cpu()
    values = values.float() / sampling.temperature
    p = values[:, : sampling.top_k].softmax(-1)
    # Keep the fewest most likely tokens that reach top_p: the tokens whose predecessors sum to less than top_p.
    p = p.masked_fill(p.cumsum(-1) - p >= max(sampling.top_p, SMALLEST_TOP_P), 0.0)
    # Inverse transform sampling: the token in whose interval of the cumulative sum the uniform number falls.
    ends = p.cumsum(-1)
    drawn = torch.searchsorted(ends, uniform_B1.to(ends) * ends[:, -1:], right=True)
    kept_B1 = (p > 0.0).sum(-1, keepdim=True)
    drawn = drawn.minimum(kept_B1 - 1).clamp(min=0)  # rounding may reach the end
    return order.gather(1, drawn).masked_fill(kept_B1 == 0, -1).squeeze(1).to(logits_BV.device)


def _draw_from_all(p_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """`draw` from all tokens, without sorting. Rounding in a parallel scan may make a cumulative sum decrease; a token
    of probability 0 is never drawn."""
    ends_BV, has_share_BV = p_BV.cumsum(-1), p_BV > 0.0
    total_B1 = ends_BV.masked_fill(~has_share_BV, 0.0).amax(-1, keepdim=True)
    number_B1 = uniform_B1.to(ends_BV).clamp(max=1.0 - 2.0**-24) * total_B1
    token_B = ((ends_BV > number_B1) & has_share_BV).int().argmax(-1)
    return token_B.masked_fill(~has_share_BV.any(-1), -1)
