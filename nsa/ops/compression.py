"""Compression of blocks of tokens: their mean, or a learned contraction. See `nsa.ops` for shapes, `spec`,
`cu_seqlens` and `backend`."""

from collections.abc import Sequence

from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import dispatch
from nsa.ops.checks import check_like, check_sequence, check_spec, check_tensor
from nsa.ops.layout import num_slots
from nsa.ops.library import check_border_values, define, differentiate, refuse_tangents, spec_of
from nsa.ops.spec import NSASpec


def compress_mean(x: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None) -> Tensor:
    """The mean of every compressed block: x [B,S,G,D] -> [B,N,G,D].

    N is the number of whole blocks, (S - cmp_block) // cmp_stride + 1 and at least 0. Packed, N = S // cmp_stride for
    any borders: the blocks of the documents come first, one document after the other; unused slots are 0.
    """
    check_spec(spec, NSASpec)
    check_sequence("x", x, cu_seqlens)
    refuse_tangents("mean_blocks", x)
    return mean_node(x, spec.as_ints(), cu_seqlens, backend)


def compress_contract(
    x: Tensor, weight: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Contracts every block: x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E], N as for `compress_mean`.

    Compressed token n is the sum over tokens i of its block of x[n * cmp_stride + i] @ weight[i].
    """
    check_spec(spec, NSASpec)
    check_sequence("x", x, cu_seqlens)
    check_tensor("weight", weight)
    if weight.dim() != 3 or weight.shape[0] != spec.cmp_block or weight.shape[1] != x.shape[3]:
        raise ArgumentError(
            "weight", f"must be [cmp_block={spec.cmp_block}, D={x.shape[3]}, E], got {list(weight.shape)}"
        )
    check_like("weight", weight, x, "x")
    refuse_tangents("contract_blocks", x, weight)
    return contract_node(x, weight, spec.as_ints(), cu_seqlens, backend)


def _mean(x: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None) -> Tensor:
    check_border_values(cu_seqlens, x.shape[1])
    return dispatch.choose("phi", backend, x, x, count=True).mean(x, spec_of(spec), cu_seqlens)


def _mean_backward(
    dy: Tensor, tokens: int, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> Tensor:
    return dispatch.choose("phi", backend, dy, dy, count=False).mean_backward(dy, tokens, spec_of(spec), cu_seqlens)


def _contract(x: Tensor, weight: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None) -> Tensor:
    check_border_values(cu_seqlens, x.shape[1])
    return dispatch.choose("phi", backend, x, x, count=True).contract(x, weight, spec_of(spec), cu_seqlens)


def _contract_backward(
    dy: Tensor, x: Tensor, weight: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    kernels = dispatch.choose("phi", backend, x, x, count=False)
    return kernels.contract_backward(dy, x, weight, spec_of(spec), cu_seqlens)


def _compressed(x: Tensor, width: int, spec: Sequence[int], cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty(
        x.shape[0], num_slots(x.shape[1], spec_of(spec), packed=cu_seqlens is not None), x.shape[2], width
    )


mean_node = define("mean_blocks", _mean, lambda x, spec, cu_seqlens, _: _compressed(x, x.shape[3], spec, cu_seqlens))
differentiate(
    mean_node,
    _mean_backward,
    lambda y, x, spec, cu_seqlens, backend: (x.shape[1], spec, cu_seqlens, backend),
    lambda dy, tokens, *_: dy.new_empty(dy.shape[0], tokens, *dy.shape[2:]),
)
contract_node = define(
    "contract_blocks",
    _contract,
    lambda x, weight, spec, cu_seqlens, _: _compressed(x, weight.shape[2], spec, cu_seqlens),
)
differentiate(contract_node, _contract_backward)
