"""The gradients of mixed branches in one operator, which decides when each branch runs.

On a GPU the selected branch runs on a stream of its own beside the other two: its lists leave the card partly idle. In
memory, a second dQ exists at most, or with two streams a third.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import token_layout
from nsa.ops.spec import NSASpec

Run = Callable[[], Any]
CONCURRENT_QUERIES = 1 << 26  # elements of q up to which branches run side by side; with more, each fills the card


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
    cmp_settings, sel_settings, win_settings = ((sizes, cu_seqlens, 0, backend) for backend in by_branch)
    do_cmp, do_sel, do_win, dgates = nodes.mix_branches_backward(do, o_cmp, o_sel, o_win, gates, by_mix)
    cmp: Run = partial(nodes.compressed_attention_backward, do_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp, *cmp_settings)
    sel: Run = partial(
        nodes.selected_attention_backward, do_sel, q, k_sel, v_sel, indices, o_sel, lse_sel, *sel_settings
    )
    beside = q.is_cuda and is_concurrent(q)
    if beside:
        if cu_seqlens is not None:  # both streams find what follows from the borders, and neither computes it
            token_layout(q.shape[1], NSASpec(*sizes), cu_seqlens, q.device)
        sel = _launch_beside(sel, q.device)
    dq, dk_win, dv_win = nodes.window_attention_backward(do_win, q, k_win, v_win, o_win, lse_win, *win_settings)
    del do_win, do_sel, do_cmp
    if beside:
        cmp = partial(lambda grads: grads, cmp())
    # The branch with the largest workspace comes last. dQ is added up in one order, so that its bits are the same.
    dq_sel, dk_sel, dv_sel = sel()
    dq += dq_sel
    del sel, dq_sel
    dq_cmp, dk_cmp, dv_cmp = cmp()
    dq += dq_cmp
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def backward_workspace(q: Tensor, do: Tensor, branches: Sequence[tuple[float, Tensor, Tensor]]) -> float:
    """Bytes that `backward` holds on a GPU on top of arguments and results. `branches`: the workspace, keys and values
    of cmp, sel and win."""
    cmp, sel, win = (workspace for workspace, _, _ in branches)
    cmp_grads, sel_grads, _ = (k.nbytes + v.nbytes for _, k, v in branches)
    if is_concurrent(q):  # while win runs, while cmp does
        return sel + q.nbytes + max(3 * do.nbytes + win - cmp_grads, 2 * do.nbytes + q.nbytes + cmp)
    # While win, sel and cmp run. Some results do not exist yet.
    first = 3 * do.nbytes + win - sel_grads - cmp_grads
    return max(first, 2 * do.nbytes + q.nbytes + sel - cmp_grads, do.nbytes + q.nbytes + cmp)


def is_concurrent(q: Tensor) -> bool:
    """Whether a GPU computes the gradients of the branches of such queries side by side."""
    return q.numel() <= CONCURRENT_QUERIES


def _launch_beside(run: Run, device: torch.device) -> Run:
    """Launches `run` on a second stream. The returned function makes the current stream wait for it.

    What `run` reads is kept until then. Memory that it allocates is reused on the second stream alone, which first
    waits for all that was launched before."""
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        results = run()

    def wait(_kept: Run = run) -> Any:
        main.wait_stream(side)
        return results

    return wait


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
