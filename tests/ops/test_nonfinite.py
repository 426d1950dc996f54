"""How far a NaN or an infinity reaches in the reference: to the queries that read it, and from their gradients to the
keys that they read. Everything else keeps every bit."""

import math

import pytest
import torch

from nsa.ops import compressed_attention, nsa_attention, nsa_decode, select_blocks, selected_attention, window_attention
from nsa.ops.layout import slot_layout, token_layout
from tests.ops.cases import SMALL, make_inputs
from tests.ops.decode_cases import make_cache

TENSORS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
BORDERS, TOKENS = [0, 13, 31, 31, 48], 48
VALUES = pytest.mark.parametrize("value", [math.nan, math.inf])


def outside_document(tensors, document):
    """Per tensor, which of its tokens or compressed tokens do not belong to the document."""
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    slots = slot_layout(TOKENS, SMALL, borders, "cpu")
    of_token = token_layout(TOKENS, borders, "cpu").doc_start
    of_slot = of_token[slots.first_token].masked_fill(~slots.used, -1)
    return [(of_token if x.shape[1] == TOKENS else of_slot) != BORDERS[document] for x in tensors]


def run_packed(name=None, value=0.0):
    """The output and all gradients, where a number of the middle document's part of a tensor is replaced."""
    x = make_inputs(TOKENS, heads=4, groups=2, cu_seqlens=BORDERS)
    tensors = dict(zip((*TENSORS, "do"), (*x.tensors(), x.q.flip(1)), strict=True))
    if name:
        (outside,) = outside_document([tensors[name]], 1)
        tensors[name][0, (~outside).nonzero()[3], 0, 0] = value
    *inputs, do = tensors.values()
    o = nsa_attention(*(t.requires_grad_() for t in inputs), SMALL, cu_seqlens=x.cu_seqlens, backend="reference")
    return o.detach(), *torch.autograd.grad(o, inputs, do)


@VALUES
@pytest.mark.parametrize("name", [*TENSORS, "do"])
def test_no_other_document_changes(name, value):
    wanted, got = run_packed(), run_packed(name, value)
    for a, b, outside in zip(got, wanted, outside_document(wanted, 1), strict=True):
        assert b[0, outside].isfinite().all()
        assert torch.equal(a[0, outside], b[0, outside])
    assert not all(x.isfinite().all() for x in got)


@VALUES
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_no_earlier_token_changes(branch, name, value):
    x = make_inputs(40, heads=4, groups=2)
    indices = select_blocks(x.q, x.k_cmp, compressed_attention(x.q, x.k_cmp, x.v_cmp, SMALL)[1], SMALL)
    q, k, v = x.q, getattr(x, f"k_{branch}"), getattr(x, f"v_{branch}")
    token = 19
    place = 8 if branch == "cmp" and name != "q" else token  # compressed token 8 is tokens 16 to 19

    def run():
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        if branch == "cmp":
            o = compressed_attention(*inputs, SMALL, backend="reference")[0]
        elif branch == "sel":
            o = selected_attention(*inputs, indices, SMALL, backend="reference")
        else:
            o = window_attention(*inputs, SMALL, backend="reference")
        return o.detach(), torch.autograd.grad(o, inputs, torch.ones_like(o))[0]

    wanted = run()
    {"q": q, "k": k, "v": v}[name][0, place, 0] = value
    for a, b in zip(run(), wanted, strict=True):
        assert torch.equal(a[0, :token], b[0, :token])
        assert not a[0, token].isfinite().all()


@VALUES
def test_a_new_token_of_a_cache_changes_no_earlier_one(value):
    x = make_inputs(40, heads=4, groups=2)
    positions = torch.tensor([[37, 38, 39]], dtype=torch.int32)
    wanted = nsa_decode(*make_cache(x, positions, SMALL).arguments(), positions, SMALL, backend="reference")
    for v in (x.v_sel, x.v_win):
        v[0, 39] = value
    got = nsa_decode(*make_cache(x, positions, SMALL).arguments(), positions, SMALL, backend="reference")
    assert torch.equal(got[0, :2], wanted[0, :2])
    assert got[0, 2].isnan().all()
