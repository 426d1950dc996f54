"""Estimated floating-point operations per training token, with NSA and with dense attention in its place.

A multiplication and an addition count as two operations; backward costs twice the forward. The attention part is
averaged over the queries of one sequence, each of which reads the keys that the specification makes visible to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nsa.nn.model import Decoder
from nsa.ops.layout import visible_compressed
from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.config.schema import ModelConfig, NSAConfig

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per training token: as configured (`sparse`), and with dense attention in every layer."""

    sparse: float
    dense_equivalent: float


def flops_per_token(decoder: Decoder, model: ModelConfig, nsa: NSAConfig, seq_len: int) -> FlopsPerToken:
    matrices = decoder.num_parameters()
    if not model.tied_head:
        matrices -= decoder.embedding.weight.numel()  # a lookup, no arithmetic
    projections = 2.0 * matrices
    per_key = 2.0 * model.n_heads * (model.head_dim_k + model.head_dim_v)
    per_score = 2.0 * model.n_heads * model.head_dim_k
    cmp_keys, sel_keys, win_keys, causal_keys = mean_keys_read(nsa.spec(), seq_len)
    layer = {
        "nsa": per_key * (cmp_keys + sel_keys + win_keys) + per_score * cmp_keys,
        "dense": per_key * causal_keys,
        "window": per_key * win_keys,
    }
    sparse = projections + sum(layer[kind] for kind in model.layer_kinds())
    dense = projections + layer["dense"] * model.n_layers
    return FlopsPerToken(FORWARD_AND_BACKWARD * sparse, FORWARD_AND_BACKWARD * dense)


def mean_keys_read(spec: NSASpec, seq_len: int) -> tuple[float, float, float, float]:
    """Mean number of keys that a query reads in cmp, sel and win, and with causal dense attention."""
    t = torch.arange(seq_len)
    cmp_keys = int(visible_compressed(t, spec).sum())
    in_own_block, older = t % spec.sel_block + 1, (t // spec.sel_block).clamp(max=spec.num_selected - 1)
    sel_keys = int((in_own_block + older * spec.sel_block).sum())
    win_keys = int((t + 1).clamp(max=spec.window).sum())
    causal = (seq_len + 1) / 2
    return cmp_keys / seq_len, sel_keys / seq_len, win_keys / seq_len, causal
