"""The public operators on tensors: arguments are checked, then the work is torch's node of `library`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import checks, library, memory
from nsa.ops.dispatch import OPERATORS
from nsa.ops.layout import slot_layout, token_layout
from nsa.ops.spec import NSASpec

# One name for all operators, or a name by operator; operators that are not named choose for themselves.
Backend = str | Mapping[str, str] | None


def positions(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where every token [S] and every compressed token [N] stands in its document, for rotary tables."""
    if cu_seqlens is None:
        return token_layout(tokens, spec, None, device).position, slot_layout(tokens, spec, None, device).position
    in_document: tuple[Tensor, Tensor] = library.packed_positions(cu_seqlens, tokens, spec.as_ints())
    return in_document


def compress_mean(x: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None) -> Tensor:
    """The mean of every compressed block: x [B,S,G,D] -> [B,N,G,D] (packed: N = S // cmp_stride)."""
    checks.check_sequence("x", x)
    checks.check_borders(cu_seqlens, x)
    y: Tensor = library.mean_blocks(x, spec.as_ints(), cu_seqlens, backend)
    return y


def compress_contract(
    x: Tensor, weight: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Every compressed block contracted: x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E]."""
    checks.check_sequence("x", x)
    checks.check_borders(cu_seqlens, x)
    checks.check_weight(weight, x, spec)
    y: Tensor = library.contract_blocks(x, weight, spec.as_ints(), cu_seqlens, backend)
    return y


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens.

    q [B,S,H,Dk], k_cmp [B,N,G,Dk], v_cmp [B,N,G,Dv] (packed: N = S // cmp_stride) -> o [B,S,H,Dv] and its
    natural-log log-sum-exp [B,S,H], which carries no gradient.
    """
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    length = checks.compressed_length(q, spec, cu_seqlens)
    checks.check_pair(("k_cmp", "v_cmp"), k_cmp, v_cmp, q, length=length)
    o, lse = library.compressed_attention(q, k_cmp, v_cmp, spec.as_ints(), cu_seqlens, backend)
    return o, lse.detach()


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The blocks each query reads: int32 [B,S,G,num_selected], ascending, padded with -1. No gradient."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_keys("k_cmp", k_cmp, q, length=checks.compressed_length(q, spec, cu_seqlens))
    checks.check_lse(lse, q)

    def compute() -> Tensor:
        indices: Tensor = library.select_blocks(
            q.detach(), k_cmp.detach(), lse.detach(), spec.as_ints(), cu_seqlens, backend
        )
        return indices

    # A compiler sees the operator itself and keeps its output where it is told to.
    kept = None if torch.compiler.is_compiling() else memory.active()
    return compute() if kept is None else kept.select(compute)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own: [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_pair(("k", "v"), k, v, q, length=q.shape[1])
    checks.check_indices(indices, q, k.shape[2], spec)
    o: Tensor = library.selected_attention(q, k, v, indices, spec.as_ints(), cu_seqlens, backend)[0]
    return o


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over the last `window` tokens, the query's own included: [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_borders(cu_seqlens, q)
    checks.check_pair(("k", "v"), k, v, q, length=q.shape[1])
    o: Tensor = library.window_attention(q, k, v, spec.as_ints(), cu_seqlens, backend)[0]
    return o


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """The three branches mixed by gates [B,S,H,3] in the order (cmp, sel, win): [B,S,H,Dv]."""
    checks.check_query(q)
    checks.check_gates(gates, q)
    checks.check_pair(("k_sel", "v_sel"), k_sel, v_sel, q, length=q.shape[1])
    checks.check_pair(("k_win", "v_win"), k_win, v_win, q, length=q.shape[1])
    by = {operator: backend_of(operator, backend) for operator in OPERATORS}
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, cu_seqlens=cu_seqlens, backend=by["cmp"])
    indices = select_blocks(q, k_cmp, lse, spec, cu_seqlens=cu_seqlens, backend=by["select"])
    o_sel = selected_attention(q, k_sel, v_sel, indices, spec, cu_seqlens=cu_seqlens, backend=by["sel"])
    o_win = window_attention(q, k_win, v_win, spec, cu_seqlens=cu_seqlens, backend=by["win"])
    mixed: Tensor = library.mix_branches(o_cmp, o_sel, o_win, gates, by["mix"])
    return mixed


def backend_of(operator: str, backend: Backend) -> str | None:
    """The backend wanted for one of `dispatch.OPERATORS`."""
    if backend is None or isinstance(backend, str):
        return backend
    unknown = sorted(set(backend) - set(OPERATORS))
    if unknown:
        raise ArgumentError("backend", f"names the operator {unknown[0]!r}; there are {', '.join(OPERATORS)}")
    return backend.get(operator)
