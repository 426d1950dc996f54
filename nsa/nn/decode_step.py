"""A decoding step of a few new tokens in few launches (`nsa.ops.triton.step_kernels`):

    norm, queries, keys, values, hidden layer of the gate | rotation, writing to the cache, gates | attention | out and
    residual | norm, gate, up, SwiGLU | down and residual

`fused_attention` and `fused_feed_forward` return None if the modules must be called instead: with gradients, many
tokens, autocast, an adapted, quantized, patched or hooked layer, a dtype or a device without kernels.

An attention layer has projections q, k, v and out, norms q_norm and k_norm (k, v and k_norm may be lists), and
optionally a gate, or an index: projections index_q and index_k with their norms.

Legend: B rows of a forward pass, n tokens of a row, T all of these tokens, C channels, H query heads, K/V head sizes.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from nsa.nn.cache_step import CacheStep
from nsa.nn.gate import BranchGate
from nsa.nn.layer_cache import decode_backend
from nsa.nn.projection import compute_dtype, is_bare, listed
from nsa.ops.dispatch import Backend
from nsa.ops.fused_step import MOST_TOKENS, Gate, Source, step_kernels


def fused_attention(layer: Any, x_BnC: Tensor, step: CacheStep, norm: nn.Module | None = None) -> Tensor | None:
    """layer(x) of an attention layer in few launches, or with a `norm`, x + layer(norm(x))."""
    is_expected = x_BnC.shape == (*step.positions.shape, layer.dim) and x_BnC.device == step.positions.device
    is_expected = is_expected and x_BnC.dtype == step.cache.dtype
    if not layer.has_fused_step or step.is_fresh or x_BnC.shape[1] > step.cache.slack:
        return None
    if not is_expected or not _is_short(x_BnC, layer.backend):
        return None
    keys, values, key_norms = (listed(modules) for modules in (layer.k, layer.v, layer.k_norm))
    linears, gate = [layer.q, *keys, *values], getattr(layer, "gate", None)
    head_norms = [layer.q_norm, *key_norms]
    has_index = hasattr(layer, "index_q")
    if has_index:
        linears += [layer.index_q, layer.index_k]
        head_norms += [layer.index_q_norm, layer.index_k_norm]
    if gate is not None:
        if layer.force_branch is not None or not is_bare(gate, BranchGate) or gate.out.bias is None:
            return None
        linears.append(gate.hidden)
    others = [layer.out] if gate is None else [layer.out, gate.out]
    kernels = _kernels(x_BnC, [*linears, *others], [] if norm is None else [norm])
    if kernels is None or layer.out.bias is not None or not _are_alike(x_BnC, head_norms):
        return None

    x_TC = x_BnC.contiguous().view(-1, x_BnC.shape[-1])
    read_TN = kernels.product(
        x_TC,
        [linear.weight for linear in linears],
        [linear.bias for linear in linears],
        activation="" if gate is None else "silu",
        **_norm_settings(norm),
    )
    columns = list(accumulate((linear.weight.shape[0] for linear in linears), initial=0))
    groups, dims = layer.num_kv_heads, (layer.head_dim_k, layer.head_dim_v)
    weights = [getattr(head_norm, "weight", None) for head_norm in head_norms]
    queries = [Source(0, layer.num_heads, dims[0], weights[0])]
    k = [Source(columns[1 + i], groups, dims[0], weights[1 + i]) for i in range(len(keys))]
    v = [Source(columns[1 + len(keys) + i], groups, dims[1], None) for i in range(len(values))]
    if has_index:
        at = 1 + len(keys) + len(values)
        queries.append(Source(columns[at], groups, layer.index_dim, weights[-2]))
        k.append(Source(columns[at + 1], 1, layer.index_dim, weights[-1]))
    last = None if gate is None else Gate(columns[-2], gate.out.weight, gate.out.bias, gate.kind == "softmax")
    read = kernels.place(
        read_TN, queries, step.layer(layer).writes(k, v), last, getattr(layer.q_norm, "eps", 0.0), step.positions,
        step.table, step.slots_B, step.rotary(*layer.rotary),
    )  # fmt: skip
    o_BnHV = layer.attend_cached(read, step)
    residual = None if norm is None else x_TC
    y_TC: Tensor = kernels.product(o_BnHV.reshape(len(x_TC), -1), [layer.out.weight], residual=residual)
    return y_TC.view(x_BnC.shape)


def fused_feed_forward(norm: nn.Module, mlp: Any, x_BnC: Tensor, backend: Backend) -> Tensor | None:
    """x + mlp(norm(x)) for an unmodified `nsa.nn.block.SwiGLU`."""
    if not _is_short(x_BnC, backend):
        return None
    linears = [mlp.gate, mlp.up, mlp.out]
    kernels = _kernels(x_BnC, linears, [norm])
    if kernels is None or mlp.gate.in_features != x_BnC.shape[-1] or any(x.bias is not None for x in linears):
        return None
    x_TC = x_BnC.contiguous().view(-1, x_BnC.shape[-1])
    gate_up = [mlp.gate.weight, mlp.up.weight]
    hidden_TM = kernels.product(x_TC, gate_up, activation=mlp.activation, **_norm_settings(norm))
    y_TC: Tensor = kernels.product(hidden_TM, [mlp.out.weight], residual=x_TC)
    return y_TC.view(x_BnC.shape)


def _is_short(x_BnC: Tensor, backend: Backend) -> bool:
    """Whether the kernels may run on this input, for any modules."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or decode_backend(backend) == "reference":
        return False
    is_few = 0 < x_BnC.shape[0] * x_BnC.shape[1] <= MOST_TOKENS
    is_plain = type(x_BnC) is Tensor and compute_dtype(x_BnC) == x_BnC.dtype
    return is_few and is_plain and step_kernels(x_BnC, x_BnC) is not None


def _kernels(x_BnC: Tensor, linears: Sequence[Any], norms: Sequence[nn.Module]) -> Any:
    """The kernels, or None if they cannot replace these modules."""
    if not all(is_bare(linear, nn.Linear) and _fits(linear, x_BnC) for linear in linears):
        return None
    if not all(is_bare(norm, nn.RMSNorm) for norm in norms) or not _are_alike(x_BnC, norms):
        return None
    return step_kernels(x_BnC, max((linear.weight for linear in linears), key=lambda weight: weight.shape[1]))


def _are_alike(x: Tensor, norms: Sequence[nn.Module]) -> bool:
    """Whether all are norms with a weight and the same epsilon, or all are identities."""
    if all(is_bare(norm, nn.Identity) for norm in norms):
        return True
    bare = all(is_bare(norm, nn.RMSNorm) and _fits(norm, x) for norm in norms)
    return bare and len({norm.eps for norm in norms}) == 1 and norms[0].eps is not None


def _fits(module: nn.Module, x: Tensor) -> bool:
    """Whether the parameters are plain dense tensors with the dtype and device of x."""
    return module._parameters.get("weight") is not None and all(
        type(p) in (nn.Parameter, Tensor)
        and p.layout == torch.strided  # other layouts do not implement is_contiguous
        and (p.dtype, p.device) == (x.dtype, x.device)
        and p.is_contiguous()
        for p in module._parameters.values()
        if p is not None
    )


def _norm_settings(norm: Any) -> dict[str, Any]:
    return {} if norm is None else {"norm": norm.weight, "eps": norm.eps}
