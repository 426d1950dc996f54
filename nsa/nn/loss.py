"""Losses over next tokens as a sum, so that any split of a batch adds up to the same loss."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats summed over all targets; divide by their global count for the loss."""
    return cross_entropy(logits_BSV.flatten(0, 1).to(torch.float32), targets_BS.flatten(), reduction="sum")


def divergence_sum(logits_BSV: Tensor, teacher_BSV: Tensor, counted_BS: Tensor) -> Tensor:
    """KL divergence in nats of the model's next-token distribution from a teacher's, summed where `counted_BS`."""
    student, teacher = (x.to(torch.float32).log_softmax(-1) for x in (logits_BSV, teacher_BSV))
    divergence_BS = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return torch.where(counted_BS, divergence_BS, 0.0).sum()
