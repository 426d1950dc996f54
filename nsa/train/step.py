"""One optimizer step, and one validation. All ranks call them together."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nsa import faults
from nsa.data.loader import Batch, Loader
from nsa.data.sequences import IGNORED
from nsa.errors import DataError
from nsa.nn.loss import HeadLoss, divergence_loss, next_token_loss
from nsa.ops.observe import Observer, observing
from nsa.parallel.collectives import sum_over_ranks
from nsa.parallel.strategy import gradient_norm, gradient_sync, reshard
from nsa.train.state import RunState, own_tokens


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. `votes` are the sums over ranks of each rank's votes."""

    loss: float
    grad_norm: float
    index_kl: float | None = None  # mean index loss; None if no query has one
    votes: tuple[int, ...] = ()
    updated: bool = True  # False: something was not finite, and the weights are unchanged


def train_step(
    state: RunState,
    batches: Iterable[Batch],
    targets: int,
    lr: float,
    votes: Callable[[], tuple[int, ...]] = tuple,
    observer: Observer | None = None,
) -> StepResult:
    """Forward and backward over this rank's micro-batches, gradient clipping, and the optimizer step if all is finite.

    The loss is the sum over target tokens divided by `targets`, their count in the whole step over all ranks, so
    that any split into ranks and micro-batches gives the same gradient. Gradients are reduced in the last micro-batch.
    The index loss has fewer queries than there are targets, and their number is known only after the step's batches: it
    is divided by `targets` too, and the gradients of the index, which learns from nothing else, are scaled afterwards.
    The index is clipped by a norm of its own, so that its loss does not change how far other parameters move.
    `votes` is called after backward, so that it includes events during the step. `observer` sees the attention of the
    first forward pass; a step without an observer replays `state.graphs`, if there are any.
    """
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(3 if state.index_terms else 1, device=state.device)  # the loss; the index loss, its queries
    # On the device, where a graph reads it. A step of conversations without an answer has no targets.
    divisor = torch.full_like(total[0], max(1, targets))
    graphs = state.graphs if observer is None else None
    loss: Tensor | None = None
    for number, (batch, following) in enumerate(pairwise(chain(batches, [None]))):
        assert batch is not None
        loss = None
        if graphs is not None:
            work = partial(_forward_backward, state)
            loss = graphs.run(work, state.trainable, batch, divisor, state.scale.value, is_first=number == 0)
        if loss is None:
            with gradient_sync(state.module, wanted=following is None):
                loss = _forward_backward(state, batch, divisor, state.scale.value, observer)
            graphs = None if number == 0 else graphs  # a replay adds only to gradients of other replays
        observer = None
        total += loss
    assert loss is not None, "a step needs a batch"
    faults.point("step.backward")
    # The losses and all votes in one small all-reduce.
    summed = sum_over_ranks(torch.cat([total, total.new_tensor(votes())]), state.world)
    if state.index_terms:
        gradients = [p.grad for p in state.index_parameters if p.grad is not None]
        torch._foreach_mul_(gradients, targets / summed[2].clamp(min=1.0))
    if state.scale.enabled:
        torch._foreach_mul_([p.grad for p in state.trainable if p.grad is not None], 1.0 / state.scale.value)
    norms = [gradient_norm(clipped) for clipped in state.clipped]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    agreed = summed.tolist()
    loss_sum, counts = agreed[0], agreed[len(total) :]
    index_kl = agreed[1] / (state.index_terms * agreed[2]) if state.index_terms and agreed[2] else None
    result = StepResult(loss_sum, float(norm), index_kl, tuple(int(v) for v in counts))
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        state.optimizer.zero_grad(set_to_none=True)
        return replace(result, updated=False)
    if clip := state.config.train.grad_clip:
        for clipped, own_norm in zip(state.clipped, norms, strict=True):
            nn.utils.clip_grads_with_norm_(clipped, clip, own_norm, foreach=True)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    faults.point("step.optimizer")
    state.optimizer.step()
    state.scale.succeeded()
    faults.point("step.end")
    return result


def _loss_of(state: RunState, batch: Batch) -> HeadLoss:
    """Cross-entropy over the targets of a batch, or the divergence from `train.teacher`."""
    compiled = state.config.runtime.compile
    if state.teacher is None:
        return partial(next_token_loss, targets_BS=batch.targets, compiled=compiled)
    with torch.no_grad():
        taught = state.teacher.hidden(batch.inputs, batch.cu_seqlens, batch.max_seqlen)
    counted = batch.targets != IGNORED
    head = state.teacher.head
    return partial(divergence_loss, taught_BSC=taught, teacher=head, counted_BS=counted, compiled=compiled)


def _forward_backward(
    state: RunState, batch: Batch, divisor: Tensor, scale: Tensor | float, observer: Observer | None = None
) -> Tensor:
    """The detached loss of one micro-batch, [1], or with the index loss and its queries, [3]. Reads no value from the
    device, so that a CUDA graph can capture it."""
    with state.autocast():
        loss_of = _loss_of(state, batch)
        with observing(observer):
            options: dict[str, Any] = {"counted": batch.targets != IGNORED} if state.index_terms else {}
            losses: Tensor = state.module(batch.inputs, batch.cu_seqlens, batch.max_seqlen, loss=loss_of, **options)
    losses = losses.view(-1)
    if faults.makes_nan("step.loss"):
        losses = losses * math.nan
    faults.point("step.forward")
    if faults.makes_nan("step.scaled"):  # as if the scaled loss overflowed in backward
        scale = math.inf
    loss = losses[0] / divisor
    total = loss
    if state.index_terms:
        total = loss + losses[1] / divisor * (state.config.msa.loss_weight / state.index_terms)
    (total * scale).backward()
    return torch.cat([loss[None], losses[1:]]).detach()


@dataclass(frozen=True)
class Validation:
    """Loss in nats per token, and in bits per byte of text, which does not depend on the tokenizer."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def validate(
    state: RunState, loader: Loader, sequences: int, micro_batch: int, progressed: Callable[[], None] = lambda: None
) -> Validation:
    """The mean loss over the first `sequences` validation sequences, which are divided among the ranks.

    Every rank runs the same number of passes, as a sharded model requires; surplus results are dropped.
    """
    if loader.sequences.count is not None:
        sequences = min(sequences, loader.sequences.count)
    world = state.world
    state.module.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    byte_lengths = torch.from_numpy(state.tokenizer.byte_lengths)
    for start in range(0, sequences, micro_batch * world.data_size):
        faults.point("validate")
        progressed()
        first = start + world.data_rank * micro_batch
        count = max(0, min(micro_batch, sequences - first))
        batch = own_tokens(loader.batch(first if count else 0, count or 1), world)
        counted = batch.targets[batch.targets != IGNORED]
        text_bytes = int(byte_lengths[counted].sum())
        on_device = batch.to(state.device)
        with state.autocast():
            loss_of = partial(next_token_loss, targets_BS=on_device.targets, compiled=state.config.runtime.compile)
            nats = float(state.module(on_device.inputs, on_device.cu_seqlens, on_device.max_seqlen, loss=loss_of))
        if count:
            totals += torch.tensor([nats, counted.numel(), text_bytes], dtype=torch.float64)
    state.module.train()
    reshard(state.module)
    nats, tokens, text_bytes = sum_over_ranks(totals.to(state.device), world).tolist()
    if not tokens:
        problem = f"none of the {sequences} validation sequences has a token that counts"
        raise DataError(f"train.eval_sequences: {problem}; raise it or data.validation_fraction")
    return Validation(nats / tokens, nats / math.log(2) / max(1, text_bytes))
