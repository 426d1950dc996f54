"""How far a NaN reaches in the kernels, which compute tiles of neighbouring queries and keys."""

from dataclasses import replace

import torch

from nsa.ops.triton import selected, selected_backward
from nsa.ops.triton.selected_tiles import TilePlan
from tests.ops.triton.test_selected import DEVICE, NARROW, SMALL, inputs


def test_selected_attention_keeps_documents_apart_where_a_tile_is_one_query():
    tensors = inputs(1, 12, 16, 1, 16, 16, torch.float32)
    first, second = slice(0, 5), slice(5, 12)  # blocks have 8 tokens: the first document's would reach into the second
    indices = torch.zeros(1, 12, 1, 1, dtype=torch.int32, device=DEVICE)
    borders = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    plan = TilePlan("query", NARROW, NARROW)

    def run():
        q, k, v, do = tensors
        o, lse = selected.forward(q, k, v, indices, SMALL.sel_block, borders, plan)
        back = selected_backward.default_params(q, k, v, SMALL.sel_block, SMALL.num_selected)
        back = replace(back, dq="separate", query=plan)
        return o, *selected.backward(do, q, k, v, indices, o, lse, SMALL.sel_block, borders, back)

    wanted = run()
    for x in tensors:
        x[0, second] = torch.nan
    for got, want in zip(run(), wanted, strict=True):
        assert torch.equal(got[0, first], want[0, first])
        assert got[0, second].isnan().all()
