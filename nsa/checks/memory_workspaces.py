"""The memory that kernels allocate internally while they run.

Tracing sees the results of an operator, not the workspace of its kernel. To measure the workspace of our kernels, their
host code runs on meta tensors, as on an H200, without launching anything. The reference, whose loops would be slow, and
cuDNN have a formula next to their code, the reference as an upper bound. The formula for PyTorch's own attention, also
an upper bound, is in this module. If Triton cannot be imported, the reference runs and its workspace counts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa.ops import MSASpec, dispatch, long_mlp, mixing
from nsa.ops.library import spec_of

# On Hopper, cuBLAS keeps 32 MiB each for the forward thread, the backward thread and cuBLASLt. In all recorded runs,
# tensors leave 80 to 110 MiB unexplained. Older cards keep 8 MiB each.
BLAS_BYTES = 3 * (32 << 20)

# The operator in `dispatch` and its function for each torch operator; the mix needs no workspace.
_NODES = {
    "nsa::mean_blocks": ("phi", "mean"),
    "nsa::mean_blocks_backward": ("phi", "mean_backward"),
    "nsa::contract_blocks": ("phi", "contract"),
    "nsa::contract_blocks_backward": ("phi", "contract_backward"),
    "nsa::select_blocks": ("select", "forward"),
    "nsa::compressed_attention": ("cmp", "forward"),
    "nsa::compressed_attention_backward": ("cmp", "backward"),
    "nsa::selected_attention": ("sel", "forward"),
    "nsa::selected_attention_backward": ("sel", "backward"),
    "nsa::window_attention": ("win", "forward"),
    "nsa::window_attention_backward": ("win", "backward"),
    "nsa::index_blocks": ("index", "choose"),
    "nsa::index_loss": ("index_loss", "loss"),
}
_ALL_GRADIENTS = "nsa::mix_attention_backward"
_DENSE_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


# Returns the peak of bytes that a function allocates, besides its named arguments and its results.
Measure = Callable[[Callable[..., Any], Mapping[str, Any]], float]


def workspace_bytes(func: Any, args: Sequence[Any], measure: Measure) -> float:
    """Returns the bytes that operator `func` allocates besides its arguments and results; 0 if it needs none."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else None
    if name == _DENSE_BACKWARD:
        return _dense_backward(*args)
    if name == "nsa::norm_mlp":
        return float(long_mlp.forward_workspace(*args))
    if name == "nsa::norm_mlp_backward":
        return float(long_mlp.backward_workspace(*args))
    if name not in _NODES and name != _ALL_GRADIENTS:
        return 0.0
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=True))
    return _all_gradients(measure, named) if name == _ALL_GRADIENTS else _of_backend(measure, *_NODES[name], **named)


def _of_backend(measure: Measure, operator: str, function: str, backend: str | None, **named: Any) -> float:
    """Returns the workspace of a function of the backend of `operator`. Its parameters are named as the operator's."""
    reference = backend == "reference" or dispatch.triton_missing() is not None
    runs = dispatch.REFERENCE[operator] if reference else dispatch.kernels_for(operator)
    if "spec" in named:
        named["spec"] = MSASpec(*named["spec"]) if operator == "index" else spec_of(named["spec"])
    formula = getattr(runs, f"{function}_workspace", None)
    stated = None if formula is None else formula(**named)
    if stated is not None:
        return float(stated)
    return _measured(measure, operator, function, **{name: _Strided.of(x) for name, x in named.items()})


class _Strided(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Any) -> Any:
        return cls(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


@lru_cache
def _measured(measure: Measure, operator: str, function: str, **described: Any) -> float:
    """Measures the workspace of the kernels' host code, once for layers with equal shapes."""
    host_code = getattr(dispatch.kernels_for(operator), function)
    with unset_fake_temporarily():
        make = partial(torch.empty_strided, device="meta")
        arguments = {
            name: make(x.shape, x.stride, dtype=x.dtype) if isinstance(x, _Strided) else x
            for name, x in described.items()
        }
        if described["cu_seqlens"] is not None:
            host_code(**arguments)  # fills the cache of tables of borders, which all layers share: not a workspace
        return measure(host_code, arguments)


def _all_gradients(measure: Measure, named: dict[str, Any]) -> float:
    do, q, spec = named["do"], named["q"], spec_of(named["spec"])
    sizes = {"cmp": {"spec": named["spec"]}, "sel": {"block": spec.sel_block}, "win": {"window": spec.window}}
    sizes["sel"]["indices"] = named["indices"]
    backends = [named[operator] for operator in ("cmp", "sel", "win", "mix")]
    shares, dq_sel, workspaces = dispatch.triton_missing() is None and "reference" not in backends, q.nbytes, []
    if shares:
        for taken in sizes.values():
            taken["sums"] = do.new_empty(do.shape[:3], dtype=torch.float32)
        sizes["sel"]["keep_float32"] = True
        dq_sel = 4 * q.numel() if dispatch.kernels_for("sel").adds_dq(q, named["k_sel"], named["v_sel"]) else q.nbytes
    for branch in ("cmp", "sel", "win"):
        tensors = {name: named[f"{name}_{branch}"] for name in ("k", "v", "o", "lse")}
        settings = {"cu_seqlens": named["cu_seqlens"], "backend": named[branch]}
        workspaces.append(_of_backend(measure, branch, "backward", do=do, q=q, **tensors, **sizes[branch], **settings))
    cmp_keys = named["k_cmp"], named["v_cmp"]
    return mixing.all_gradients_workspace(do, q, *cmp_keys, *workspaces, shares=shares, dq_sel=dq_sel)


def _dense_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> float:
    """dQ in float32, one number per row, and dK and dV per query head before the sum over a group. [B, H, S, D]."""
    per_group = q.shape[1] // k.shape[1]
    grouped = per_group * (k.numel() + v.numel()) * k.element_size() if per_group > 1 else 0
    return 4 * (q.numel() + q.numel() // q.shape[3]) + grouped
