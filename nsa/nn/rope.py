"""Rotary position embedding of the first R channels of a head, in half-split pairs: channel c is rotated together with
channel c + R/2.

Tables are computed in float32 in each call: a buffer would be rounded when the module is cast.

Legend: B batch, L positions, H heads, D head size, R rotated channels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.positions import cos_sin

Tables = tuple[Tensor, Tensor]  # cos and sin of rotary angles


class RopeScaling(NamedTuple):
    """Lowers rotary frequencies for a context longer than the one a model was first trained with.

    Frequencies with fewer than `low_freq_factor` rotations in `original_length` tokens are divided by `factor`,
    frequencies with more than `high_freq_factor` rotations are unchanged, and those between are interpolated (Llama
    3.1). Without `original_length` all frequencies are divided (linear scaling).
    """

    factor: float
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def is_valid(self) -> bool:
        return self.factor >= 1.0 and self.high_freq_factor > self.low_freq_factor

    def apply(self, frequency: Tensor) -> Tensor:
        if self.original_length is None:
            return frequency / self.factor
        turns = frequency * self.original_length / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


def rotary_tables(position: Tensor, rotary_dim: int, base: float, scaling: RopeScaling | None = None) -> Tables:
    """cos and sin [L, R/2] in float32 for integer positions [L]; [B, L, R/2] for positions [B, L]."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=position.device) / rotary_dim
    frequency = base**-exponent
    if scaling is not None:
        frequency = scaling.apply(frequency)
    angle = position.to(torch.float32)[..., None] * frequency
    cos, sin = cos_sin(angle) if torch.compiler.is_compiling() else (angle.cos(), angle.sin())
    return cos, sin


def rotate(x_BLHD: Tensor, tables: Tables) -> Tensor:
    """Rotates channel pairs by the angles of `tables`, which determine R; the other channels of a head are unchanged.
    Computes in float32 (float64 for float64), returns the dtype of x."""
    acc = torch.float64 if x_BLHD.dtype == torch.float64 else torch.float32
    cos, sin = (table.to(acc).unsqueeze(-2) for table in tables)  # [L, 1, R/2]
    half, unchanged = cos.shape[-1], x_BLHD.shape[-1] - 2 * cos.shape[-1]
    low, high, *rest = x_BLHD.to(acc).split([half, half] + [unchanged] * (unchanged > 0), dim=-1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, *rest], dim=-1)
    return rotated.to(x_BLHD.dtype)
