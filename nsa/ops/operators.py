"""The public operators on tensors. Each checks shapes, types and devices of its arguments once, for every backend;
the work is then a torch node of `library`. The checks read no values and cost no synchronization.
What shapes, `spec`, `cu_seqlens` and `backend` mean is said once, in `nsa.ops`."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.ops import joint, library, selection_cache
from nsa.ops.dispatch import OPERATORS
from nsa.ops.layout import num_slots, slot_layout, token_layout
from nsa.ops.spec import NSASpec

# One name for all operators, or a name by operator; operators that are not named choose for themselves.
Backend = str | Mapping[str, str] | None
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def positions(tokens: int, spec: NSASpec, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The position of every token [S] and every compressed token [N] in its document, for rotary tables."""
    if cu_seqlens is None:
        return token_layout(tokens, spec, None, device).position, slot_layout(tokens, spec, None, device).position
    in_document: tuple[Tensor, Tensor] = library.packed_positions(cu_seqlens, tokens, spec.as_ints())
    return in_document


def compress_mean(x: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None) -> Tensor:
    """The mean of every compressed block: x [B,S,G,D] -> [B,N,G,D].

    N is the number of whole blocks, (S - cmp_block) // cmp_stride + 1 and at least 0. Packed, N = S // cmp_stride for
    any borders: the blocks of the documents come first, one document after the other; what is left over is 0.
    """
    _check_sequence("x", x, cu_seqlens)
    library.refuse_tangents("mean_blocks", x)
    y: Tensor = library.mean_blocks(x, spec.as_ints(), cu_seqlens, backend)
    return y


def compress_contract(
    x: Tensor, weight: Tensor, spec: NSASpec, *, cu_seqlens: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Every compressed block contracted: x [B,S,G,D], weight [cmp_block,D,E] -> [B,N,G,E], N as for `compress_mean`.

    Compressed token n is the sum over tokens i of its block of x[n * cmp_stride + i] @ weight[i].
    """
    _check_sequence("x", x, cu_seqlens)
    if weight.dim() != 3 or weight.shape[0] != spec.cmp_block or weight.shape[1] != x.shape[3]:
        raise ArgumentError(
            "weight", f"must be [cmp_block={spec.cmp_block}, D={x.shape[3]}, E], got {list(weight.shape)}"
        )
    _check_like("weight", weight, x, "x")
    library.refuse_tangents("contract_blocks", x, weight)
    y: Tensor = library.contract_blocks(x, weight, spec.as_ints(), cu_seqlens, backend)
    return y


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed tokens.

    q [B,S,H,Dk], k_cmp [B,N,G,Dk], v_cmp [B,N,G,Dv] (packed: N = S // cmp_stride) -> o [B,S,H,Dv] and its
    natural-log log-sum-exp [B,S,H], which carries no gradient.
    """
    _check_sequence("q", q, cu_seqlens)
    _check_pair("k_cmp", k_cmp, "v_cmp", v_cmp, q, _num_slots(q, spec, cu_seqlens, q_offset))
    library.refuse_tangents("compressed_attention", q, k_cmp, v_cmp)
    o, lse = library.compressed_attention(q, k_cmp, v_cmp, spec.as_ints(), cu_seqlens, q_offset, backend)
    return o, lse.detach()


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """The blocks each query reads: int32 [B,S,G,num_selected], ascending, padded with -1. No gradient.

    q [B,S,H,Dk] and k_cmp [B,N,G,Dk] as given to `compressed_attention`, and the log-sum-exp lse [B,S,H] it returned.
    Blocks count from the start of the document. The heads of a group choose together. The first `num_init` blocks and
    the newest `num_local` are always among them.
    """
    _check_sequence("q", q, cu_seqlens)
    _check_keys("k_cmp", k_cmp, q, _num_slots(q, spec, cu_seqlens, q_offset))
    if lse.shape != q.shape[:3]:
        raise ArgumentError("lse", f"must be [B, S, H] = {list(q.shape[:3])}, got {list(lse.shape)}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != wanted:
        raise ArgumentError("lse", f"must be {wanted} for {q.dtype} queries, got {lse.dtype}")
    _check_device("lse", lse, q)
    return _select_blocks(q, k_cmp, lse, spec, cu_seqlens, q_offset, backend)


def _select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int, backend: str | None
) -> Tensor:
    def compute() -> Tensor:
        indices: Tensor = library.select_blocks(
            q.detach(), k_cmp.detach(), lse.detach(), spec.as_ints(), cu_seqlens, q_offset, backend
        )
        return indices

    # A compiler sees the operator itself: selective checkpointing keeps its output.
    cache = None if torch.compiler.is_compiling() else selection_cache.active.get()
    return compute() if cache is None else cache.select(compute)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention over the tokens of the selected blocks at positions up to the query's own: [B,S,H,Dv].

    q [B,S,H,Dk], k [B,S,G,Dk], v [B,S,G,Dv]; indices int32 [B,S,G,num_selected] as `select_blocks` returns them: no
    block twice in a row, -1 for none.
    """
    _check_sequence("q", q, cu_seqlens)
    _check_pair("k", k, "v", v, q, _length(q, q_offset))
    wanted = [q.shape[0], q.shape[1], k.shape[2], spec.num_selected]
    _check_ints("indices", indices, "[B, S, G, num_selected]", wanted, q)
    library.refuse_tangents("selected_attention", q, k, v)
    o: Tensor = library.selected_attention(q, k, v, indices, spec.as_ints(), cu_seqlens, q_offset, backend)[0]
    return o


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention over the last `window` tokens, the query's own included: [B,S,H,Dv].

    q [B,S,H,Dk], k [B,S,G,Dk], v [B,S,G,Dv].
    """
    _check_sequence("q", q, cu_seqlens)
    _check_pair("k", k, "v", v, q, _length(q, q_offset))
    library.refuse_tangents("window_attention", q, k, v)
    o: Tensor = library.window_attention(q, k, v, spec.as_ints(), cu_seqlens, q_offset, backend)[0]
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
    """The three branches mixed by gates [B,S,H,3] in the order (cmp, sel, win): [B,S,H,Dv].

    q [B,S,H,Dk]; k_cmp [B,N,G,Dk] and v_cmp [B,N,G,Dv], compressed, N as for `compress_mean`; the keys [B,S,G,Dk] and
    values [B,S,G,Dv] of selection and window. Rotary positions are applied by the caller, before. `backend` may be a
    mapping from operators (`nsa.ops.dispatch.OPERATORS`) to names.
    """
    _check_sequence("q", q, cu_seqlens)
    _check_pair("k_cmp", k_cmp, "v_cmp", v_cmp, q, _num_slots(q, spec, cu_seqlens, 0))
    _check_pair("k_sel", k_sel, "v_sel", v_sel, q, q.shape[1])
    _check_pair("k_win", k_win, "v_win", v_win, q, q.shape[1])
    _check_gates(gates, q)
    library.refuse_tangents("mix_attention", q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    cmp, select, sel, win, mix = (backend_of(operator, backend) for operator in ("cmp", "select", "sel", "win", "mix"))
    sizes = spec.as_ints()
    together = joint.is_short(q)
    with torch.no_grad() if together else nullcontext():  # the mix then computes all gradients
        o_cmp, lse = library.compressed_attention(q, k_cmp, v_cmp, sizes, cu_seqlens, 0, cmp)
        indices = _select_blocks(q, k_cmp, lse, spec, cu_seqlens, 0, select)
        o_sel, lse_sel = library.selected_attention(q, k_sel, v_sel, indices, sizes, cu_seqlens, 0, sel)
        o_win, lse_win = library.window_attention(q, k_win, v_win, sizes, cu_seqlens, 0, win)
    if together:
        outputs = (o_cmp, lse, o_sel, lse_sel, o_win, lse_win, indices)
        inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *outputs, sizes, cu_seqlens)
        mixed: Tensor = library.mix_attention(*inputs, cmp, sel, win, mix)
    else:
        mixed = library.mix_branches(o_cmp, o_sel, o_win, gates, mix)
    return mixed


def backend_of(operator: str, backend: Backend) -> str | None:
    """The backend wanted for one of `dispatch.OPERATORS`."""
    if backend is None or isinstance(backend, str):
        return backend
    unknown = sorted(set(backend) - set(OPERATORS))
    if unknown:
        raise ArgumentError("backend", f"names the operator {unknown[0]!r}; there are {', '.join(OPERATORS)}")
    return backend.get(operator)


def check_borders(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """The shape and type of `cu_seqlens` for a sequence tensor x [B, S, ...]."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        wanted = "an int32 tensor such as torch.tensor([0, 400, 1000], dtype=torch.int32)"
        raise ArgumentError("cu_seqlens", f"must be {wanted}, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise ArgumentError("cu_seqlens", f"must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ArgumentError("cu_seqlens", f"must be one row of at least 2 borders, got shape {list(cu_seqlens.shape)}")
    if x.shape[0] != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one sequence, so B must be 1, got B={x.shape[0]}")
    _check_device("cu_seqlens", cu_seqlens, x)


def _length(q: Tensor, q_offset: int) -> int:
    """Tokens of the sequence whose last ones are the queries."""
    if q_offset < 0:
        raise ArgumentError("q_offset", f"must be at least 0 tokens before the first query, got {q_offset}")
    return q_offset + q.shape[1]


def _num_slots(q: Tensor, spec: NSASpec, cu_seqlens: Tensor | None, q_offset: int) -> int:
    return num_slots(_length(q, q_offset), spec, packed=cu_seqlens is not None)


def _check_sequence(name: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    _check_float(name, x)
    _check_head_size(name, x)
    check_borders(cu_seqlens, x)


def _check_pair(name_k: str, k: Tensor, name_v: str, v: Tensor, q: Tensor, length: int | None) -> None:
    """k and v against q: same type, device, batch and `length`, unless that is None as in a cache; H a multiple of G;
    head sizes allowed."""
    _check_keys(name_k, k, q, length)
    _check_float(name_v, v)
    _check_like(name_v, v, q, "q")
    _check_head_size(name_v, v)
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            name_v, f"must have the shape of {name_k} up to the head size; got {list(v.shape)} beside {list(k.shape)}"
        )


def _check_keys(name: str, k: Tensor, q: Tensor, length: int | None) -> None:
    _check_float(name, k)
    _check_like(name, k, q, "q")
    if length is not None and (k.shape[0] != q.shape[0] or k.shape[1] != length):
        raise ArgumentError(
            name, f"must start with [B={q.shape[0]}, {length}] to fit q {list(q.shape)}; got {list(k.shape)}"
        )
    if k.shape[3] != q.shape[3]:
        raise ArgumentError(name, f"head size {k.shape[3]} differs from q's {q.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            name,
            f"q's {q.shape[2]} heads are not a multiple of {k.shape[2]} key/value heads; "
            "each group needs the same whole number of query heads",
        )


def _check_gates(gates: Tensor, q: Tensor) -> None:
    wanted = [*q.shape[:3], 3]
    if list(gates.shape) != wanted:
        raise ArgumentError("gates", f"must be [B, S, H, 3] = {wanted}, got {list(gates.shape)}")
    if gates.dtype not in FLOAT_TYPES:
        raise ArgumentError("gates", f"must be a float tensor, got {gates.dtype}")
    _check_device("gates", gates, q)


def _check_ints(name: str, x: Tensor, form: str, wanted: list[int], q: Tensor) -> None:
    if list(x.shape) != wanted:
        raise ArgumentError(name, f"must be {form} = {wanted}, got {list(x.shape)}")
    if x.dtype != torch.int32:
        raise ArgumentError(name, f"must be int32, got {x.dtype}")
    _check_device(name, x, q)


def _check_float(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ArgumentError(name, f"must be [B, S, heads, D], got {x.dim()} dimensions: {list(x.shape)}")
    if x.dtype not in FLOAT_TYPES:
        raise ArgumentError(name, f"must be a float tensor (16, 32 or 64 bits), got {x.dtype}")


def _check_like(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    if x.dtype != other.dtype:
        raise ArgumentError(name, f"must have {other_name}'s type {other.dtype}, got {x.dtype}")
    _check_device(name, x, other)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ArgumentError(name, f"must be on the device of the other tensors, {q.device}, got {x.device}")


def _check_head_size(name: str, x: Tensor) -> None:
    size = x.shape[3]
    if size < 16 or size > 256 or size % 16:
        raise ArgumentError(name, f"head size must be a multiple of 16 from 16 to 256, got {size}")
