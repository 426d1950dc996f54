"""Next-token losses as sums, so that any split of a batch adds up to the same loss.

`next_token_loss` and `divergence_loss` take the input of the head. A short pass computes all logits at once. A pass
with LONG_PASS tokens or MANY_LOGITS logits computes them in chunks of tokens, each with its gradients: only the logits
of one chunk exist at a time, and the gradient of the head is summed over the chunks in float32.

With `compiled`, torch.compile joins the operations on logits: forward reads them once in the dtype of the products and
backward writes their gradient in it. Otherwise several float32 copies of them are written and read.

Legend: B batch, S tokens, T tokens of a batch or a chunk, C channels, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, kl_div

from nsa.nn.projection import compute_dtype, is_plain

LONG_PASS = 1 << 18  # tokens; from this length on, recomputed decoder blocks also run their MLP in chunks
MANY_LOGITS = 1 << 31
LOGITS_AT_ONCE = 1 << 26
FEWEST_AT_ONCE = 2048  # tokens: for fewer, adding up the gradient of the head moves more bytes than the logits

HeadLoss = Callable[[Tensor, nn.Linear], Tensor]  # arguments: the input of the head [B, S, C], and the head
RowsLoss = Callable[[Tensor, slice], Tensor]  # arguments: the logits [T, V] of some tokens, and which these are

_compiled = cache(torch.compile)


def cross_entropy_sum(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return cross_entropy(logits_TV.to(torch.float32), targets_T, reduction="sum")


def divergence_sum(logits_TV: Tensor, teacher_TV: Tensor, counted_T: Tensor) -> Tensor:
    """KL divergence in nats of the model's next-token distribution from a teacher's, summed where `counted_T`."""
    student, teacher = (x.to(torch.float32).log_softmax(-1) for x in (logits_TV, teacher_TV))
    divergence_T = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return torch.where(counted_T, divergence_T, 0.0).sum()


def next_token_loss(hidden_BSC: Tensor, head: nn.Linear, targets_BS: Tensor, *, compiled: bool = False) -> Tensor:
    """Cross-entropy in nats summed over all targets; divide by their global count for the loss."""
    targets_T, loss = targets_BS.flatten(), _compiled(cross_entropy_sum) if compiled else cross_entropy_sum
    return _summed(hidden_BSC, head, lambda logits_TV, rows: loss(logits_TV, targets_T[rows]))


def divergence_loss(
    hidden_BSC: Tensor,
    head: nn.Linear,
    taught_BSC: Tensor,
    teacher: nn.Linear,
    counted_BS: Tensor,
    *,
    compiled: bool = False,
) -> Tensor:
    """`divergence_sum` of the head's logits from the logits of the head `teacher` on `taught_BSC`."""
    taught_TC, counted_T = taught_BSC.flatten(0, 1), counted_BS.flatten()
    loss = _compiled(divergence_sum) if compiled else divergence_sum

    def of_rows(logits_TV: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            teacher_TV = teacher(taught_TC[rows])
        return loss(logits_TV, teacher_TV, counted_T[rows])

    return _summed(hidden_BSC, head, of_rows)


def logits_at_once(tokens: int, vocabulary: int) -> int:
    """How many logits of a pass exist at a time."""
    in_chunks = tokens >= LONG_PASS or tokens * vocabulary >= MANY_LOGITS
    return vocabulary * (min(tokens, _chunk(vocabulary)) if in_chunks else tokens)


def is_long(x_BSC: Tensor) -> bool:
    return x_BSC.shape[0] * x_BSC.shape[1] >= LONG_PASS


def _summed(hidden_BSC: Tensor, head: nn.Linear, loss: RowsLoss) -> Tensor:
    many = hidden_BSC.shape[0] * hidden_BSC.shape[1] * head.out_features >= MANY_LOGITS
    if not ((is_long(hidden_BSC) or many) and is_plain(head)):
        return loss(head(hidden_BSC).flatten(0, 1), slice(None))
    options = (loss, compute_dtype(hidden_BSC), torch.is_grad_enabled())
    value: Tensor = _ChunkedLoss.apply(*options, hidden_BSC.flatten(0, 1), head.weight)  # type: ignore[no-untyped-call]
    return value


class _ChunkedLoss(torch.autograd.Function):
    """The sum of a loss over all tokens, with products in `dtype`. If `trains`, forward computes the gradients while it
    has the logits of a chunk, and backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, loss: RowsLoss, dtype: torch.dtype, trains: bool, hidden_TC: Tensor, weight_VC: Tensor
    ) -> Tensor:
        needs_hidden, needs_weight = (trains and needed for needed in ctx.needs_input_grad[3:])
        total = hidden_TC.new_zeros((), dtype=torch.float32)
        dhidden = torch.empty_like(hidden_TC) if needs_hidden else None
        dweight = torch.zeros_like(weight_VC, dtype=torch.float32) if needs_weight else None
        weight = weight_VC.to(dtype)
        size = _chunk(len(weight))
        for start in range(0, len(hidden_TC), size):
            rows = slice(start, start + size)
            hidden = hidden_TC[rows].to(dtype)
            logits = (hidden @ weight.T).requires_grad_(needs_hidden or needs_weight)
            with torch.set_grad_enabled(logits.requires_grad):
                value = loss(logits, rows)
            total += value.detach()
            if not logits.requires_grad:
                continue
            (grad,) = torch.autograd.grad(value, logits)
            if dhidden is not None:
                dhidden[rows] = grad @ weight
            if dweight is not None:
                # The sum would overflow in fp16, whatever the loss scale. A power of two rounds nothing.
                part = min(1.0, 64 / 2 ** len(hidden).bit_length())
                dweight.add_(grad.T @ (hidden * part), alpha=1 / part)
            del logits, value, grad  # else they would exist beside those of the next chunk
        ctx.save_for_backward(dhidden, dweight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = (None if grad is None else grad.mul_(grads[0]) for grad in ctx.saved_tensors)
        return None, None, None, dhidden, dweight


def _chunk(vocabulary: int) -> int:
    return max(FEWEST_AT_ONCE, LOGITS_AT_ONCE // vocabulary)
