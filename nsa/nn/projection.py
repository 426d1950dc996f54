"""Several linear layers with the same input as one matrix product.

A narrow product takes the host as long to launch as a wide one, and the GPU reads the whole input for it.

Legend: B batch, S tokens, C channels.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn


def project(x_BSC: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The output of each of `layers`. Plain linear layers are computed in one product; if any layer is adapted,
    quantized, patched or has hooks, each layer is called separately."""
    plain = [layer for layer in layers if _is_plain(layer)]
    if len(plain) != len(layers) or len(layers) == 1:
        return [layer(x_BSC) for layer in layers]
    joined = nn.functional.linear(x_BSC, torch.cat([layer.weight for layer in plain]))
    return torch.split(joined, [layer.out_features for layer in plain], dim=-1)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the layer multiplies by its weight and does nothing else."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and layer.bias is None and not any(hooks)
