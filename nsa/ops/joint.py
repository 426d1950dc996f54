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
    cmp, sel, win, mix = ((sizes, cu_seqlens, 0, backend) for backend in backends)
    do_cmp, do_sel, do_win, dgates = nodes.mix_branches_backward(do, o_cmp, o_sel, o_win, gates, mix[-1])
    selected: Callable[[], Any] = partial(
        nodes.selected_attention_backward, do_sel, q, k_sel, v_sel, indices, o_sel, lse_sel, *sel
    )
    if cu_seqlens is not None:
        token_layout(q.shape[1], NSASpec(*sizes), cu_seqlens, q.device)  # found by both streams, computed by neither
    selected = _start(selected, q)
    dq, dk_cmp, dv_cmp = nodes.compressed_attention_backward(do_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp, *cmp)
    del do_cmp
    dq_win, dk_win, dv_win = nodes.window_attention_backward(do_win, q, k_win, v_win, o_win, lse_win, *win)
    dq += dq_win
    del do_win, dq_win
    dq_sel, dk_sel, dv_sel = selected()
    dq += dq_sel
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def backward_workspace(q: Tensor, do: Tensor, branches: Sequence[tuple[float, Tensor, Tensor]]) -> float:
    """Bytes that `backward` holds on a GPU on top of arguments and results. `branches`: the workspace, keys and values
    of cmp, sel and win."""
    cmp, sel, win = (workspace for workspace, _, _ in branches)
    _, sel_grads, win_grads = (k.nbytes + v.nbytes for _, k, v in branches)
    # While cmp, win and sel run, in this order. Some results do not exist yet.
    during = (3 * do.nbytes + cmp - win_grads - sel_grads, 2 * do.nbytes + q.nbytes + win - sel_grads)
    if is_concurrent(q):
        return max(during) + q.nbytes + sel_grads + sel
    return max(*during, do.nbytes + q.nbytes + sel)


def is_concurrent(q: Tensor) -> bool:
    """Whether a GPU computes the gradients of the branches of such queries side by side."""
    return q.numel() <= CONCURRENT_QUERIES


def _start(run: Callable[[], Any], q: Tensor) -> Callable[[], Any]:
    """Launches `run` on a second stream; the returned function makes the current one wait for it. Or returns `run`.

    The caller keeps what `run` reads until then. Memory that `run` allocates is reused on the second stream alone,
    which first waits for all that was launched before."""
    if not (q.is_cuda and is_concurrent(q)):
        return run
    main, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        results = run()

    def wait() -> Any:
        main.wait_stream(side)
        return results

    return wait


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
