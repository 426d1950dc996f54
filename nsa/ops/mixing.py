"""Native Sparse Attention as a whole: three branches, mixed by gates.

For short sequences one operator computes the gradients of all branches. In a CUDA graph it runs the selected branch on
a second stream, since building its lists leaves the GPU partly idle; elsewhere this would cost host time. For long
sequences autograd computes branch after branch, and frees the inputs of each.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops import dispatch
from nsa.ops.branches import cached_selection, compressed_node, num_cmp_keys, selected_node, window_node
from nsa.ops.checks import check_gates, check_pair, check_sequence, check_spec, check_tensor, sequence_length
from nsa.ops.dispatch import Backend, backend_of
from nsa.ops.layout import token_layout
from nsa.ops.library import define, differentiate, refuse_tangents, spec_of
from nsa.ops.observe import notify
from nsa.ops.spec import NSASpec

LONGEST = 1 << 26  # elements of q up to which a sequence is short; with more, every kernel fills the GPU


def is_short(q: Tensor) -> bool:
    return q.numel() <= LONGEST


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
    q_offset: int = 0,
    backend: Backend = None,
) -> Tensor:
    """The three branches mixed by gates [B,S,H,3] in the order (cmp, sel, win): [B,S,H,Dv].

    q [B,S,H,Dk]; k_cmp [B,N,G,Dk] and v_cmp [B,N,G,Dv], compressed, N as for `compress_mean`; the keys [B,S,G,Dk] and
    values [B,S,G,Dv] of selection and window. The caller applies rotary positions before. With `q_offset` and without
    `cu_seqlens`, the window's may start later than the sequence, with the first token that the first query reads.
    `backend` may be a mapping from operators (`nsa.ops.dispatch.OPERATORS`) to names.
    """
    check_spec(spec, NSASpec)
    check_sequence("q", q, cu_seqlens)
    check_pair("k_cmp", k_cmp, "v_cmp", v_cmp, q, num_cmp_keys(q, spec, cu_seqlens, q_offset))
    check_pair("k_sel", k_sel, "v_sel", v_sel, q, sequence_length(q, q_offset))
    near = q_offset  # tokens before the first query whose window keys are given
    check_tensor("k_win", k_win)
    if cu_seqlens is None and k_win.dim() == 4:
        near = min(q_offset, max(spec.window - 1, k_win.shape[1] - q.shape[1]))
    check_pair("k_win", k_win, "v_win", v_win, q, near + q.shape[1])
    check_gates(gates, q)
    refuse_tangents("mix_attention", q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    cmp, select, sel, win, mix = (backend_of(operator, backend) for operator in ("cmp", "select", "sel", "win", "mix"))
    sizes = spec.as_ints()
    together = is_short(q) and not q_offset
    with torch.no_grad() if together else nullcontext():  # mix_attention_node computes all gradients
        o_cmp, lse_cmp = compressed_node(q, k_cmp, v_cmp, sizes, cu_seqlens, q_offset, cmp)
        indices = cached_selection(q, k_cmp, lse_cmp, spec, cu_seqlens=cu_seqlens, q_offset=q_offset, backend=select)
        o_sel, lse_sel = selected_node(q, k_sel, v_sel, indices, spec.sel_block, cu_seqlens, q_offset, sel)
        o_win, lse_win = window_node(q, k_win, v_win, spec.window, cu_seqlens, near, win)
    if together:
        return mix_attention_node(
            q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, indices,
            sizes, cu_seqlens, cmp, sel, win, mix,
        )  # fmt: skip
    return mix_node(o_cmp, o_sel, o_win, gates, mix)


def _mix(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str | None) -> Tensor:
    notify("mixed", gates)
    return dispatch.choose("mix", backend, o_cmp, o_cmp, count=True).forward(o_cmp, o_sel, o_win, gates)


def _mix_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.choose("mix", backend, o_cmp, o_cmp, count=False).backward(do, o_cmp, o_sel, o_win, gates)


def _mix_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor,
    o_cmp: Tensor, lse_cmp: Tensor, o_sel: Tensor, lse_sel: Tensor, o_win: Tensor, lse_win: Tensor, indices: Tensor,
    spec: Sequence[int], cu_seqlens: Tensor | None, cmp: str | None, sel: str | None, win: str | None, mix: str | None,
) -> Tensor:  # fmt: skip
    """Mixes branches that were computed without gradients. The last four arguments are backends."""
    return _mix(o_cmp, o_sel, o_win, gates, mix)


def all_gradients(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor,
    gates: Tensor, o_cmp: Tensor, lse_cmp: Tensor, o_sel: Tensor, lse_sel: Tensor, o_win: Tensor, lse_win: Tensor,
    indices: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, cmp: str | None, sel: str | None, win: str | None,
    mix: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, keys and values by branch, and gates. The last four arguments are backends."""
    sizes = spec_of(spec)
    cmp_run, sel_run, win_run, mix_run = runs = [
        dispatch.choose(operator, backend, q, v, count=False)
        for operator, backend, v in (("cmp", cmp, v_cmp), ("sel", sel, v_sel), ("win", win, v_win), ("mix", mix, o_cmp))
    ]
    # Kernels share passes: that of the gates also reads what each branch needs of its output, and one adds dQ.
    shares = not any(run in dispatch.REFERENCE.values() for run in runs)
    of_mix, of_cmp, of_sel, of_win = {}, {}, {}, {}
    if shares:
        sums = torch.empty(3, *do.shape[:3], dtype=torch.float32, device=do.device)
        of_mix, of_cmp, of_sel, of_win = ({"sums": x} for x in (sums, *sums))
        of_sel["keep_float32"] = True
    do_cmp, do_sel, do_win, dgates = mix_run.backward(do, o_cmp, o_sel, o_win, gates, **of_mix)
    if cu_seqlens is not None:  # cached before the streams fork, so that neither computes it
        token_layout(q.shape[1], cu_seqlens, q.device)
    with _second_stream(q) as stream:
        with stream:
            dq_sel, dk_sel, dv_sel = sel_run.backward(
                do_sel, q, k_sel, v_sel, indices, o_sel, lse_sel, sizes.sel_block, cu_seqlens, **of_sel
            )
        dq, dk_win, dv_win = win_run.backward(
            do_win, q, k_win, v_win, o_win, lse_win, sizes.window, cu_seqlens, **of_win
        )
        dq_cmp, dk_cmp, dv_cmp = cmp_run.backward(do_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp, sizes, cu_seqlens, **of_cmp)
    dq = mix_run.add_into(dq, dq_sel, dq_cmp) if shares else dq.add_(dq_sel).add_(dq_cmp)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def all_gradients_workspace(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, cmp: float, sel: float, win: float, *, shares: bool,
    dq_sel: int,
) -> float:  # fmt: skip
    """Bytes that `all_gradients` uses in a CUDA graph in addition to arguments and results. `cmp`, `sel` and `win` are
    the workspaces of the branches, `dq_sel` the bytes of a gradient of q, `shares` as in `all_gradients`."""
    before = 3 * do.nbytes + (3 * 4 * (do.numel() // do.shape[3]) if shares else 0)
    # The larger of the peaks during win and during cmp.
    return before + sel + dq_sel + max(win - k_cmp.nbytes - v_cmp.nbytes, q.nbytes + cmp)


@contextmanager
def _second_stream(q: Tensor) -> Iterator[AbstractContextManager[Any]]:
    """Yields a context that launches on a second stream during the capture of a CUDA graph; the current stream waits
    for it at the end. Memory is safe: a graph has its own pool, and orders every use of the second stream."""
    if not q.is_cuda or not torch.cuda.is_current_stream_capturing():
        yield nullcontext()
        return
    main, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


mix_node = define("mix_branches", _mix, lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape))
differentiate(mix_node, _mix_backward)
mix_attention_node = define(
    "mix_attention", _mix_attention, lambda q, k_cmp, v_cmp, *_: q.new_empty(*q.shape[:3], v_cmp.shape[3])
)
differentiate(mix_attention_node, all_gradients)
