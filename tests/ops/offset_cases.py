"""Queries that are the last tokens of a longer sequence give what the whole sequence gives at these tokens."""

import torch

from nsa.ops import compressed_attention, select_blocks, selected_attention, window_attention
from nsa.ops.layout import num_slots
from tests.ops.cases import SMALL, make_inputs

BORDERS = {75: [0, 1, 1, 22, 58, 61, 75], 40: [0, 1, 1, 7, 37, 40]}


def last_queries(x, start, stop, backend, device):
    """Outputs of the four operators for queries start .. stop, and the gradients of all tensors."""
    tensors = [t.detach().to(device).requires_grad_() for t in x.tensors()]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = tensors
    borders = None if x.cu_seqlens is None else x.cu_seqlens.clamp(max=stop).to(device)
    how = {"cu_seqlens": borders, "q_offset": start, "backend": backend}
    rows, slots = slice(start, stop), num_slots(stop, SMALL, packed=borders is not None)
    q, k_cmp, v_cmp = q[:, rows], k_cmp[:, :slots], v_cmp[:, :slots]
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, SMALL, **how)
    indices = select_blocks(q, k_cmp, lse, SMALL, **how)
    o_sel = selected_attention(q, k_sel[:, :stop], v_sel[:, :stop], indices, SMALL, **how)
    o_win = window_attention(q, k_win[:, :stop], v_win[:, :stop], SMALL, **how)
    weight = torch.arange(1.0, 17.0, device=device, dtype=q.dtype)
    rows_weight = torch.arange(start + 1.0, stop + 1.0, device=device, dtype=q.dtype).sin()[None, :, None, None]
    sum((o * weight * rows_weight).sum() for o in (o_cmp, o_sel, o_win)).backward()
    outputs = [o.detach().cpu() for o in (o_cmp, o_sel, o_win, indices)]
    return outputs, [t.grad.cpu() for t in tensors[:-1]]


def assert_pieces_make_the_whole(tokens, packed, cuts, backend, dtype, tolerance, device="cpu"):
    x = make_inputs(tokens, heads=4, groups=2, dtype=dtype, cu_seqlens=BORDERS[tokens] if packed else None)
    wanted, wanted_grads = last_queries(x, 0, tokens, "reference", "cpu")
    pieces = [last_queries(x, a, b, backend, device) for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    found = [torch.cat(parts, dim=1) for parts in zip(*(outputs for outputs, _ in pieces), strict=True)]
    assert torch.equal(found[3], wanted[3])
    for a, b in zip(found[:3], wanted[:3], strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    for grads, b in zip(zip(*(grads for _, grads in pieces), strict=True), wanted_grads, strict=True):
        assert torch.allclose(sum(grads), b, rtol=tolerance, atol=tolerance)
