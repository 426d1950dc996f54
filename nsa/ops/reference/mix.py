"""The gated mix of the three branches: sum_c gates[..., c] * o_c, summed in the accumulation dtype, rounded once."""

from torch import Tensor

from nsa.ops.reference.masked_attention import accumulation_dtype


def forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """o_c [B,S,H,E], gates [B,S,H,3] in the order (cmp, sel, win) -> [B,S,H,E]."""
    acc = accumulation_dtype(o_cmp.dtype)
    g_cmp, g_sel, g_win = gates.to(acc).unsqueeze(-1).unbind(-2)
    return (g_cmp * o_cmp.to(acc) + g_sel * o_sel.to(acc) + g_win * o_win.to(acc)).to(o_cmp.dtype).contiguous()


def backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of o_cmp, o_sel, o_win and gates for the gradient `do` of `forward`'s output."""
    acc = accumulation_dtype(o_cmp.dtype)
    do = do.to(acc)
    weights = gates.to(acc).unsqueeze(-1).unbind(-2)
    do_cmp, do_sel, do_win = ((w * do).to(o_cmp.dtype).contiguous() for w in weights)
    dgates = gates.new_empty(gates.shape)
    for branch, o in enumerate((o_cmp, o_sel, o_win)):
        dgates[..., branch] = (do * o.to(acc)).sum(-1)
    return do_cmp, do_sel, do_win, dgates
