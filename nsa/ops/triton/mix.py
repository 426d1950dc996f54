"""The gated mix of the three branches and its gradients, one pass over memory each; the sum of their dQ.

Computes `sum_c gates[..., c] * o_c`, summed in float32 and rounded once, for branch outputs of one dtype and gates of
any float dtype. Both kernels are memory-bound: every element is read once and written once.

Legend: B batch, S tokens, H heads, D head size (values); a row is one (token, head). The rows of a launch count
elements: a program mixes as many rows as have that many elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton import launch_table
from nsa.ops.triton.launch_table import Launch, LaunchTable, cdiv, launch_on, launcher, power_of_2, unit_last

LAUNCHES = LaunchTable({("forward", "sm80"): {256: Launch(4096, 1)}, ("backward", "sm80"): {256: Launch(2048, 1)}})

ADDED_AT_ONCE = 2048  # elements of a program

refusal = launch_table.refusal


def forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, params: Launch | None = None) -> Tensor:
    """o_c [B,S,H,D], gates [B,S,H,3] in the order (cmp, sel, win) -> o [B,S,H,D]."""
    batch, tokens, heads, dim = o_cmp.shape
    o = torch.empty(o_cmp.shape, dtype=o_cmp.dtype, device=o_cmp.device)
    if o.numel() == 0:
        return o
    o_cmp, o_sel, o_win = (unit_last(x) for x in (o_cmp, o_sel, o_win))
    params = params or LAUNCHES.find("forward", o, o)
    padded, rows = _tile(dim, params)
    with launch_on(o):
        launcher(_mix_kernel, (cdiv(tokens * heads, rows), batch), o)(
            o_cmp, o_sel, o_win, gates, o, tokens * heads, heads,
            *o_cmp.stride()[:3], *o_sel.stride()[:3], *o_win.stride()[:3], *gates.stride(),
            D=dim, DP=padded, ROWS=rows, num_warps=params.num_warps,
        )  # fmt: skip
    return o


def backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, params: Launch | None = None, *,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of o_cmp, o_sel, o_win and gates, each in its dtype, for the gradient `do` of `forward`. `sums`
    [3,B,S,H] float32, if given, receives what the backward pass of every branch needs first: the row sums of its output
    times its gradient."""
    batch, tokens, heads, dim = o_cmp.shape
    branches = (o_cmp, o_sel, o_win)
    do_cmp, do_sel, do_win = (torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in branches)
    dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    if do.numel() == 0:
        return do_cmp, do_sel, do_win, dgates.zero_()
    do, o_cmp, o_sel, o_win = (unit_last(x) for x in (do, o_cmp, o_sel, o_win))
    params = params or LAUNCHES.find("backward", do, do)
    padded, rows = _tile(dim, params)
    with launch_on(do):
        launcher(_mix_backward_kernel, (cdiv(tokens * heads, rows), batch), do)(
            do, o_cmp, o_sel, o_win, gates, do_cmp, do_sel, do_win, sums, dgates, tokens * heads, heads,
            *do.stride()[:3], *o_cmp.stride()[:3], *o_sel.stride()[:3], *o_win.stride()[:3], *gates.stride(),
            D=dim, DP=padded, ROWS=rows, num_warps=params.num_warps,
        )  # fmt: skip
    return do_cmp, do_sel, do_win, dgates


def add_into(total: Tensor, *others: Tensor) -> Tensor:
    """Adds two tensors of the same shape, all contiguous, to `total`: in float32, rounded once."""
    if total.numel():
        with launch_on(total):
            launcher(_add_kernel, (cdiv(total.numel(), ADDED_AT_ONCE),), total)(
                total, *others, total.numel(), SIZE=ADDED_AT_ONCE, num_warps=4
            )
    return total


def _tile(dim: int, params: Launch) -> tuple[int, int]:
    """(padded head size, rows of a program)."""
    padded = power_of_2(dim)
    return padded, max(1, params.rows // padded)


@triton.jit
def _offset(b, s, h, stride_b, stride_s, stride_h):
    """Offsets of rows (b, s, h), in 64 bits."""
    return b * stride_b + s.to(tl.int64) * stride_s + h.to(tl.int64) * stride_h


@triton.jit(do_not_specialize=["num_rows"])
def _mix_kernel(
    o_cmp, o_sel, o_win, gates, o, num_rows, heads,
    stride_cb, stride_cs, stride_ch, stride_sb, stride_ss, stride_sh, stride_wb, stride_ws, stride_wh,
    stride_gb, stride_gs, stride_gh, stride_gc,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.arange(0, DP)
    live = row < num_rows
    mask = live[:, None] & (d < D)[None, :]
    s = row // heads
    h = row % heads

    gate = gates + _offset(b, s, h, stride_gb, stride_gs, stride_gh)
    g_cmp = tl.load(gate, mask=live, other=0.0).to(tl.float32)
    g_sel = tl.load(gate + stride_gc, mask=live, other=0.0).to(tl.float32)
    g_win = tl.load(gate + 2 * stride_gc, mask=live, other=0.0).to(tl.float32)

    at_cmp = o_cmp + _offset(b, s, h, stride_cb, stride_cs, stride_ch)
    at_sel = o_sel + _offset(b, s, h, stride_sb, stride_ss, stride_sh)
    at_win = o_win + _offset(b, s, h, stride_wb, stride_ws, stride_wh)
    x_cmp = tl.load(at_cmp[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)  # [ROWS, DP]
    x_sel = tl.load(at_sel[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_win = tl.load(at_win[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    mixed = g_cmp[:, None] * x_cmp + g_sel[:, None] * x_sel + g_win[:, None] * x_win
    at = o + (b * num_rows + row) * D
    tl.store(at[:, None] + d[None, :], mixed.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _mix_backward_kernel(
    do, o_cmp, o_sel, o_win, gates, do_cmp, do_sel, do_win, sums, dgates, num_rows, heads,
    stride_db, stride_ds, stride_dh,
    stride_cb, stride_cs, stride_ch, stride_sb, stride_ss, stride_sh, stride_wb, stride_ws, stride_wh,
    stride_gb, stride_gs, stride_gh, stride_gc,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.arange(0, DP)
    live = row < num_rows
    mask = live[:, None] & (d < D)[None, :]
    s = row // heads
    h = row % heads

    gate = gates + _offset(b, s, h, stride_gb, stride_gs, stride_gh)
    g_cmp = tl.load(gate, mask=live, other=0.0).to(tl.float32)
    g_sel = tl.load(gate + stride_gc, mask=live, other=0.0).to(tl.float32)
    g_win = tl.load(gate + 2 * stride_gc, mask=live, other=0.0).to(tl.float32)

    at_do = do + _offset(b, s, h, stride_db, stride_ds, stride_dh)
    at_cmp = o_cmp + _offset(b, s, h, stride_cb, stride_cs, stride_ch)
    at_sel = o_sel + _offset(b, s, h, stride_sb, stride_ss, stride_sh)
    at_win = o_win + _offset(b, s, h, stride_wb, stride_ws, stride_wh)
    grad = tl.load(at_do[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)  # [ROWS, DP]
    x_cmp = tl.load(at_cmp[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_sel = tl.load(at_sel[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_win = tl.load(at_win[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)

    flat = b * num_rows + row
    place = (flat * D)[:, None] + d[None, :]
    kind = do_cmp.dtype.element_ty
    y_cmp = (g_cmp[:, None] * grad).to(kind)
    y_sel = (g_sel[:, None] * grad).to(kind)
    y_win = (g_win[:, None] * grad).to(kind)
    tl.store(do_cmp + place, y_cmp, mask=mask)
    tl.store(do_sel + place, y_sel, mask=mask)
    tl.store(do_win + place, y_win, mask=mask)
    if sums is not None:  # of the rounded gradients, which the branches read
        of_branch = tl.num_programs(1).to(tl.int64) * num_rows
        tl.store(sums + flat, tl.sum(y_cmp.to(tl.float32) * x_cmp, axis=1), mask=live)
        tl.store(sums + of_branch + flat, tl.sum(y_sel.to(tl.float32) * x_sel, axis=1), mask=live)
        tl.store(sums + 2 * of_branch + flat, tl.sum(y_win.to(tl.float32) * x_win, axis=1), mask=live)
    at_gate = dgates + flat * 3
    out = dgates.dtype.element_ty
    tl.store(at_gate, tl.sum(grad * x_cmp, axis=1).to(out), mask=live)
    tl.store(at_gate + 1, tl.sum(grad * x_sel, axis=1).to(out), mask=live)
    tl.store(at_gate + 2, tl.sum(grad * x_win, axis=1).to(out), mask=live)


@triton.jit(do_not_specialize=["numel"])
def _add_kernel(total_ptr, a_ptr, b_ptr, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = at < numel
    total = tl.load(total_ptr + at, mask=ok).to(tl.float32) + tl.load(a_ptr + at, mask=ok).to(tl.float32)
    total += tl.load(b_ptr + at, mask=ok).to(tl.float32)
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), mask=ok)
