"""The gradients of short sequences: those of all branches in one operator. In a CUDA graph the selected branch runs on
a stream of its own, since its lists leave the card partly idle; elsewhere the host would pay for it. Of long sequences
autograd computes branch after branch, and frees what each read.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import token_layout
from nsa.ops.spec import NSASpec

LONGEST = 1 << 26  # elements of q up to which a sequence is short; with more, every kernel fills the card


def is_short(q: Tensor) -> bool:
    return q.numel() <= LONGEST


def backward(
    do: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_sel: Tensor,
    lse_sel: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    indices: Tensor,
    sizes: Sequence[int],
    cu_seqlens: Tensor | None,
    *backends: str | None,
) -> tuple[Tensor, ...]:
    """The gradients of q, keys and values by branch, and gates. `backends` are those of cmp, sel, win and mix."""
    nodes: Any = torch.ops.nsa
    *by_branch, by_mix = backends
    cmp, sel, win = ((sizes, cu_seqlens, 0, backend) for backend in by_branch)
    do_cmp, do_sel, do_win, dgates = nodes.mix_branches_backward(do, o_cmp, o_sel, o_win, gates, by_mix)
    if cu_seqlens is not None:  # both streams find what follows from the borders, and neither computes it
        token_layout(q.shape[1], NSASpec(*sizes), cu_seqlens, q.device)
    with _second_stream(q) as stream:
        with stream:
            of_selected = nodes.selected_attention_backward(do_sel, q, k_sel, v_sel, indices, o_sel, lse_sel, *sel)
        dq, dk_win, dv_win = nodes.window_attention_backward(do_win, q, k_win, v_win, o_win, lse_win, *win)
        dq_cmp, dk_cmp, dv_cmp = nodes.compressed_attention_backward(do_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp, *cmp)
    dq_sel, dk_sel, dv_sel = of_selected
    dq += dq_sel
    dq += dq_cmp
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def backward_workspace(q: Tensor, do: Tensor, branches: Sequence[tuple[float, Tensor, Tensor]]) -> float:
    """Bytes that `backward` holds in a CUDA graph on top of arguments and results. `branches`: the workspace, keys and
    values of cmp, sel and win."""
    cmp, sel, win = (workspace for workspace, _, _ in branches)
    _, k_cmp, v_cmp = branches[0]
    # While win runs, and while cmp does.
    return sel + 3 * do.nbytes + q.nbytes + max(win - k_cmp.nbytes - v_cmp.nbytes, q.nbytes + cmp)


@contextmanager
def _second_stream(q: Tensor) -> Iterator[AbstractContextManager[Any]]:
    """A stream beside the current one, for what is launched inside it, in the capture of a CUDA graph; the current one
    waits for it at the end. A graph has its memory for itself, and every use of the second stream is ordered in it."""
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
