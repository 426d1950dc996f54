"""The learning rate of every step, a pure function of the step."""

import math

from nsa.config.schema import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of optimizer step `step`, counted from 0: linear warm-up, then the chosen schedule.

    cosine    half a cosine from lr down to lr * min_lr_ratio at the last step
    wsd       lr until the last `decay_fraction` of the steps, then a straight line down
    constant  lr
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    floor = train.lr * train.min_lr_ratio
    if train.schedule == "constant":
        return train.lr
    last = train.steps - 1
    if train.schedule == "cosine":
        done = _share(step, train.warmup_steps, last)
        return floor + (train.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
    decay_start = max(train.warmup_steps, round(train.steps * (1.0 - train.decay_fraction)))
    return train.lr + (floor - train.lr) * _share(step, decay_start, last)


def _share(step: int, first: int, last: int) -> float:
    """The position of `step` between `first` and `last`, clamped to 0 .. 1."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))
