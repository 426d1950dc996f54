"""Next-token losses as sums, so that any split of a batch adds up to the same loss.

`next_token_loss` and `divergence_loss` take the input of the head. A short pass computes all logits at once. A pass
with LONG_PASS tokens or MANY_LOGITS logits computes them in chunks of tokens, in forward and again in backward: only
the logits of one chunk exist at a time, and the gradient of the head is summed over the chunks in float32.

Legend: B batch, S tokens, T tokens of a batch or a chunk, C channels, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, kl_div

from nsa.nn.projection import compute_dtype, is_plain

LONG_PASS = 1 << 18  # tokens; from this length on, recomputed decoder blocks also run their MLP in chunks
MANY_LOGITS = 1 << 31
LOGITS_AT_ONCE = 1 << 26

HeadLoss = Callable[[Tensor, nn.Linear], Tensor]  # arguments: the input of the head [B, S, C], and the head


def divergence_sum(logits_BSV: Tensor, teacher_BSV: Tensor, counted_BS: Tensor) -> Tensor:
    """KL divergence in nats of the model's next-token distribution from a teacher's, summed where `counted_BS`."""
    student, teacher = (x.to(torch.float32).log_softmax(-1) for x in (logits_BSV, teacher_BSV))
    divergence_BS = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return torch.where(counted_BS, divergence_BS, 0.0).sum()


def next_token_loss(hidden_BSC: Tensor, head: nn.Linear, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats summed over all targets; divide by their global count for the loss."""
    kind = _CrossEntropy(targets_BS.flatten())
    if _in_chunks(hidden_BSC, head):
        return _chunked(hidden_BSC, head, kind)
    return kind.value(head(hidden_BSC).flatten(0, 1).to(torch.float32), slice(None))


def divergence_loss(
    hidden_BSC: Tensor, head: nn.Linear, taught_BSC: Tensor, teacher: nn.Linear, counted_BS: Tensor
) -> Tensor:
    """`divergence_sum` of the head's logits from the logits of the head `teacher` on `taught_BSC`."""
    if not _in_chunks(hidden_BSC, head):
        with torch.no_grad():
            taught_BSV = teacher(taught_BSC)
        return divergence_sum(head(hidden_BSC), taught_BSV, counted_BS)
    return _chunked(hidden_BSC, head, _Divergence(taught_BSC.flatten(0, 1), teacher, counted_BS.flatten()))


def is_long(x_BSC: Tensor) -> bool:
    return x_BSC.shape[0] * x_BSC.shape[1] >= LONG_PASS


def _in_chunks(hidden_BSC: Tensor, head: nn.Linear) -> bool:
    logits = hidden_BSC.shape[0] * hidden_BSC.shape[1] * head.out_features
    return (is_long(hidden_BSC) or logits >= MANY_LOGITS) and is_plain(head)


def _chunked(hidden_BSC: Tensor, head: nn.Linear, kind: Any) -> Tensor:
    dtype = compute_dtype(hidden_BSC)
    loss: Tensor = _ChunkedLoss.apply(kind, dtype, hidden_BSC.flatten(0, 1), head.weight)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy:
    def __init__(self, targets_T: Tensor):
        self.targets_T = targets_T

    def value(self, logits_TV: Tensor, rows: slice) -> Tensor:
        return cross_entropy(logits_TV, self.targets_T[rows], reduction="sum")

    def gradient(self, probabilities_TV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The gradient of the logits, and a mask of the tokens that count. Overwrites the probabilities."""
        targets_T1 = self.targets_T[rows, None]
        place = targets_T1.clamp(min=0)
        probabilities_TV.scatter_(1, place, probabilities_TV.gather(1, place) - 1.0)
        return probabilities_TV, targets_T1 >= 0


class _Divergence:
    def __init__(self, taught_TC: Tensor, teacher: nn.Linear, counted_T: Tensor):
        self.taught_TC, self.teacher, self.counted_T = taught_TC, teacher, counted_T
        self.dtype = compute_dtype(taught_TC)

    def value(self, logits_TV: Tensor, rows: slice) -> Tensor:
        return divergence_sum(logits_TV, self._logits(rows), self.counted_T[rows])

    def gradient(self, probabilities_TV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return probabilities_TV.sub_(self._logits(rows).softmax(-1)), self.counted_T[rows, None]

    def _logits(self, rows: slice) -> Tensor:
        return _logits(self.taught_TC[rows].to(self.dtype), self.teacher.weight.detach().to(self.dtype))


def _logits(hidden_TC: Tensor, weight_VC: Tensor) -> Tensor:
    return (hidden_TC @ weight_VC.T).to(torch.float32)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of a loss of this kind over all tokens, with products in `dtype`."""

    @staticmethod
    def forward(ctx: Any, kind: Any, dtype: torch.dtype, hidden_TC: Tensor, weight_VC: Tensor) -> Tensor:
        ctx.kind, ctx.dtype = kind, dtype
        ctx.save_for_backward(hidden_TC, weight_VC)
        total = hidden_TC.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden_TC.device.type, enabled=False):
            weight = weight_VC.to(dtype)
            for rows in _rows(hidden_TC, weight):
                total += kind.value(_logits(hidden_TC[rows].to(dtype), weight), rows)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        hidden_TC, weight_VC = ctx.saved_tensors
        (scale,) = grads
        dhidden = torch.empty_like(hidden_TC)
        dweight = torch.zeros_like(weight_VC, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        with torch.autocast(hidden_TC.device.type, enabled=False):
            weight = weight_VC.to(ctx.dtype)
            for rows in _rows(hidden_TC, weight):
                hidden = hidden_TC[rows].to(ctx.dtype)
                grad, counted = ctx.kind.gradient(_logits(hidden, weight).softmax(-1), rows)
                grad = grad.mul_(torch.where(counted, scale, 0.0)).to(ctx.dtype)
                dhidden[rows] = grad @ weight
                if dweight is not None:
                    dweight += grad.T @ hidden
        return None, None, dhidden, None if dweight is None else dweight.to(weight_VC.dtype)


def _rows(hidden_TC: Tensor, weight_VC: Tensor) -> Iterator[slice]:
    size = max(1, LOGITS_AT_ONCE // weight_VC.shape[0])
    for start in range(0, hidden_TC.shape[0], size):
        yield slice(start, min(start + size, hidden_TC.shape[0]))
