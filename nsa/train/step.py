"""One optimizer step, and one validation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nsa.data.loader import Batch, Loader
from nsa.errors import NumericsError
from nsa.nn.loss import loss_sum
from nsa.train.state import RunState


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float


def train_step(state: RunState, batches: Iterator[Batch], targets: int, lr: float) -> StepResult:
    """Forward and backward over the micro-batches, clip, finite?, optimizer.

    The loss is the sum over target tokens divided by `targets`, their count in the whole step, so that any
    split into micro-batches gives the same gradient.
    """
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=state.device)
    for batch in batches:
        with state.autocast():
            loss = loss_sum(state.model(batch.inputs, batch.cu_seqlens), batch.targets) / targets
        state.scaler.scale(loss).backward()
        total += loss.detach()
    state.scaler.unscale_(state.optimizer)
    limit = state.grad_clip or math.inf
    norm = nn.utils.clip_grad_norm_(state.trainable, limit, foreach=True)
    result = StepResult(float(total), float(norm))
    _check_finite(result, state)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return result


def _check_finite(result: StepResult, state: RunState) -> None:
    """Stops before the optimizer has moved. An overflow that fp16's scale caused is the scaler's to skip."""
    if not math.isfinite(result.loss):
        raise NumericsError(f"step {state.step + 1}: the loss is {result.loss}; the weights were not changed by it")
    if not math.isfinite(result.grad_norm) and not state.scaler.is_enabled():
        raise NumericsError(
            f"step {state.step + 1}: the gradient norm is {result.grad_norm}; the weights were not changed by it"
        )


@dataclass(frozen=True)
class Validation:
    """Loss in nats per token, and in bits per byte of text, whatever the tokenizer."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def validate(state: RunState, loader: Loader, sequences: int, micro_batch: int) -> Validation:
    """The mean loss over the first `sequences` validation sequences: the same ones every time."""
    if loader.num_sequences is not None:
        sequences = min(sequences, loader.num_sequences)
    state.model.eval()
    nats, tokens, text_bytes = 0.0, 0, 0
    byte_lengths = torch.from_numpy(state.tokenizer.byte_lengths)
    for first in range(0, sequences, micro_batch):
        batch = loader.batch(first, min(micro_batch, sequences - first))
        text_bytes += int(byte_lengths[batch.targets].sum())
        tokens += batch.targets.numel()
        batch = batch.to(state.device)
        with state.autocast():
            nats += float(loss_sum(state.model(batch.inputs, batch.cu_seqlens), batch.targets))
    state.model.train()
    return Validation(nats / tokens, nats / math.log(2) / max(1, text_bytes))
