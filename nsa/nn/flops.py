"""Estimated floating-point operations per training token, as configured and with dense attention in every layer.

A multiplication and an addition count as two operations; backward costs twice the forward pass, except that frozen
weights have no gradient and scores that only select blocks have no backward. The index loss of MSA does not count. The
operations of attention are averaged over the queries of one sequence, which see different numbers of keys.
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
    lookup = decoder.embedding.weight if decoder.head.weight is not decoder.embedding.weight else None  # no arithmetic
    layers = [layer for _, layer in attention_layers(decoder)]
    index = {parameter for layer in layers for parameter in layer.index_parameters()}
    used = [parameter for parameter in decoder.parameters() if parameter is not lookup]
    trained = [parameter for parameter in used if parameter.requires_grad]
    # The gradient of the index ends at the input of its layer; any other passes through the whole model.
    passes_back = any(parameter.requires_grad and parameter not in index for parameter in decoder.parameters())
    matrices = 2.0 * sum(parameter.numel() for parameter in used)
    products = matrices + 2.0 * sum(parameter.numel() for parameter in trained) + (matrices if passes_back else 0.0)
    times = FORWARD_AND_BACKWARD if passes_back else 1
    sparse = products + times * sum(layer.forward_flops(seq_len) for layer in layers)
    sparse += sum(layer.selection_flops(seq_len) for layer in layers)
    return FlopsPerToken(sparse, products + times * sum(layer.dense_flops(seq_len) for layer in layers))
