"""Estimated floating-point operations per training token, as configured and with dense attention in every layer.

A multiplication and an addition count as two operations; backward costs twice the forward pass, except that of scores
that only select blocks, which have none. The operations of attention are averaged over the queries of one sequence,
which see different numbers of keys.
"""

from dataclasses import dataclass

from nsa.nn.attention import attention_layers
from nsa.nn.model import Decoder

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per training token: as configured (`sparse`), and with dense attention in every layer."""

    sparse: float
    dense_equivalent: float


def flops_per_token(decoder: Decoder, seq_len: int) -> FlopsPerToken:
    matrices = decoder.num_parameters()
    if decoder.head.weight is not decoder.embedding.weight:
        matrices -= decoder.embedding.weight.numel()  # a lookup without arithmetic
    layers = [layer for _, layer in attention_layers(decoder)]
    sparse = 2.0 * matrices + sum(layer.forward_flops(seq_len) for layer in layers)
    dense = 2.0 * matrices + sum(layer.dense_flops(seq_len) for layer in layers)
    selection = sum(layer.selection_flops(seq_len) for layer in layers)
    return FlopsPerToken(FORWARD_AND_BACKWARD * sparse + selection, FORWARD_AND_BACKWARD * dense)
