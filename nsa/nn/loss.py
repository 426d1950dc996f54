"""Next-token cross-entropy as a sum and a count, so that any split of a batch adds up to the same loss."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats summed over all targets; divide by their global count for the loss."""
    return cross_entropy(logits_BSV.flatten(0, 1).to(torch.float32), targets_BS.flatten(), reduction="sum")
