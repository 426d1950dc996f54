"""Several linear layers of one input as one product.

A product of few columns costs the host as much to start as a large one, and the GPU reads the whole input for it.

Legend: B batch, S tokens, C channels.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn


def project(x_BSC: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """What each of `layers` makes of x. Plain layers are multiplied at once; if one of them is anything else, adapted,
    quantised, patched or watched by a hook, each is called by itself."""
    plain = [layer for layer in layers if _is_plain(layer)]
    if len(plain) != len(layers) or len(layers) == 1:
        return [layer(x_BSC) for layer in layers]
    joined = nn.functional.linear(x_BSC, torch.cat([layer.weight for layer in plain]))
    return torch.split(joined, [layer.out_features for layer in plain], dim=-1)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the layer multiplies with its weight and does nothing else."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and layer.bias is None and not any(hooks)
