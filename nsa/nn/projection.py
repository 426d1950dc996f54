"""Computes several linear layers with the same input in one matrix product.

A narrow product takes as long to launch as a wide one, and each product reads the whole input.

Legend: B batch, S tokens, C channels, H query heads, G key/value heads, K/V head sizes.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.func import functional_call

from nsa.errors import ArgumentError

FEW_TOKENS = 64
# Evaluated once at import: a compiled layer could not.
AUTOCAST_DEVICES = frozenset(x for x in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(x))

Kind = TypeVar("Kind", bound=nn.Module)


def project(x_BSC: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The output of each of `layers`. Plain linear layers are computed in one product, and so are those that multiply
    in FP8. The layers are called separately if any of them is adapted, quantized, patched or hooked, and for a few
    tokens without gradients, where concatenating the weights would cost more memory traffic than the products."""
    is_short = not torch.is_grad_enabled() and x_BSC.shape[0] * x_BSC.shape[1] <= FEW_TOKENS
    kind = is_float8 if is_float8(layers[0]) else is_plain
    alike = [] if is_short else [layer for layer in layers if kind(layer)]
    if len(alike) != len(layers) or len(layers) == 1:
        return [layer(x_BSC) for layer in layers]
    weight = torch.cat([layer.weight for layer in alike])
    if kind is is_plain:
        joined = nn.functional.linear(x_BSC, weight)
    else:
        joined = functional_call(alike[0], {"weight": weight}, x_BSC)
    return torch.split(joined, [layer.out_features for layer in alike], dim=-1)


def project_heads(layer: Any, x_BSC: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries [B, S, H, K] and keys [B, S, G, K], normed, and values [B, S, G, V] of an attention layer."""
    # Two products rather than one: autograd keeps the values, which as views would keep the unrotated queries and keys
    # alive too.
    q, *keys = project(x_BSC, [layer.q, *listed(layer.k)])
    values = project(x_BSC, listed(layer.v))
    groups = layer.num_kv_heads
    return (
        layer.q_norm(q.unflatten(-1, (layer.num_heads, layer.head_dim_k))).to(q.dtype),
        [
            norm(k.unflatten(-1, (groups, layer.head_dim_k))).to(k.dtype)
            for norm, k in zip(listed(layer.k_norm), keys, strict=True)
        ],
        [v.unflatten(-1, (groups, layer.head_dim_v)) for v in values],
    )


def listed(modules: nn.Module) -> list[Any]:
    return list(modules) if isinstance(modules, nn.ModuleList) else [modules]


def reset_parts(module: nn.Module) -> None:
    """Calls `reset_parameters` of all submodules that have it."""
    for part in module.children():
        reset: Any = getattr(part, "reset_parameters", None)
        reset_parts(part) if reset is None else reset()


def check_input(x_BSC: Tensor, dim: int, layer: nn.Module) -> None:
    """Checks the input of an attention layer of width `dim`, whose first projection is `layer`."""
    if not isinstance(x_BSC, Tensor):
        raise ArgumentError("x", f"must be a tensor, got {type(x_BSC).__name__}")
    if x_BSC.dim() != 3 or x_BSC.shape[2] != dim:
        raise ArgumentError("x", f"must be [batch, tokens, dim={dim}], got {list(x_BSC.shape)}")
    if not x_BSC.is_floating_point():
        raise ArgumentError("x", f"must be a float tensor, got {x_BSC.dtype}")
    if not _has_plain_weight(layer):
        return
    weight = layer.weight
    if weight.device != x_BSC.device:  # a product with meta weights would return memory that was never written
        wanted = f"must be on the device of the layer's weights, {weight.device}, got {x_BSC.device}"
        raise ArgumentError("x", f"{wanted}; move one of them with .to(), or a layer on meta with to_empty()")
    if weight.dtype != x_BSC.dtype and not _casts(x_BSC, weight):
        wanted = f"must have the dtype of the layer's weights, {weight.dtype}, got {x_BSC.dtype}"
        raise ArgumentError("x", f"{wanted}; cast one of them, or run under torch.autocast")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's if it is on, else that of x."""
    return torch.get_autocast_dtype(x.device.type) if _casts(x) else x.dtype


def _casts(*tensors: Tensor) -> bool:
    """Whether autocast casts all these tensors to one dtype. It does not cast float64."""
    device = tensors[0].device.type
    is_on = device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device)
    return is_on and all(x.dtype != torch.float64 for x in tensors)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the layer only computes F.linear with its weight."""
    return _has_plain_weight(layer) and layer.bias is None


def _has_plain_weight(layer: nn.Module) -> TypeGuard[nn.Linear]:
    # A fake tensor stands for a plain one; other subclasses, such as quantized weights, cannot be concatenated.
    return is_bare(layer, nn.Linear) and type(layer.weight) in (nn.Parameter, Tensor, FakeTensor)


def is_float8(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the layer only multiplies with its weight in FP8 (`nsa.parallel.float8`)."""
    return getattr(layer, "is_float8", False) and layer.bias is None and not has_hooks(layer)


def is_bare(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether calling the module runs only the `forward` of this class."""
    return type(module) is kind and "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, or global ones exist (`nn.modules.module.register_module_forward_hook`)."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or bool(nn.modules.module._has_any_global_hook())
