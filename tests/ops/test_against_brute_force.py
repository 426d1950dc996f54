"""The vectorised reference equals loops written straight from the specification, for any shape it allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.ops import NSASpec, compressed_attention, nsa_attention, select_blocks, selected_attention, window_attention
from tests.ops import brute_force
from tests.ops.cases import make_inputs


@st.composite
def specs(draw):
    stride = draw(st.sampled_from([1, 2, 3, 4]))
    cmp_block = stride * draw(st.integers(1, 3))
    sel_block = stride * draw(st.integers(cmp_block // stride, 5))
    num_init, num_local = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return NSASpec(
        cmp_block=cmp_block,
        cmp_stride=stride,
        sel_block=sel_block,
        num_selected=max(1, num_init + num_local) + draw(st.integers(0, 3)),
        num_init=num_init,
        num_local=num_local,
        window=draw(st.integers(1, 12)),
    )


@st.composite
def cases(draw):
    spec = draw(specs())
    tokens = draw(st.integers(1, 28))
    groups = draw(st.sampled_from([1, 2]))
    borders = None
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, tokens), max_size=4))
        borders = [0, *sorted(cuts), tokens]
    inputs = make_inputs(
        tokens,
        spec=spec,
        batch=1 if borders else draw(st.sampled_from([1, 2])),
        heads=groups * draw(st.sampled_from([1, 2, 3])),
        groups=groups,
        dk=16,
        dv=draw(st.sampled_from([16, 32])),
        cu_seqlens=borders,
        seed=draw(st.integers(0, 10_000)),
    )
    if draw(st.booleans()):  # small whole numbers: many equal scores, each computed exactly
        for x in (inputs.q, inputs.k_cmp):
            x.round_().clamp_(-1, 1).mul_(draw(st.sampled_from([0, 1])))
    return spec, inputs


@settings(max_examples=60)
@given(cases())
def test_every_branch_equals_the_loops(case):
    spec, x = case
    borders = {"cu_seqlens": x.cu_seqlens}
    o_cmp, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, spec, **borders)
    brute_o, brute_lse = brute_force.compressed(x.q, x.k_cmp, x.v_cmp, spec, x.cu_seqlens)
    torch.testing.assert_close(o_cmp, brute_o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, brute_lse, rtol=1e-9, atol=1e-9)

    indices = select_blocks(x.q, x.k_cmp, lse, spec, **borders)
    assert_same_selection(indices, x, spec)

    o_sel = selected_attention(x.q, x.k_sel, x.v_sel, indices, spec, **borders)
    brute_sel = brute_force.selected(x.q, x.k_sel, x.v_sel, indices, spec, x.cu_seqlens)
    torch.testing.assert_close(o_sel, brute_sel, rtol=1e-9, atol=1e-9)

    o_win = window_attention(x.q, x.k_win, x.v_win, spec, **borders)
    brute_win = brute_force.window(x.q, x.k_win, x.v_win, spec, x.cu_seqlens)
    torch.testing.assert_close(o_win, brute_win, rtol=1e-9, atol=1e-9)

    mixed = nsa_attention(*x.tensors(), spec, **borders)
    by_hand = sum(x.gates[..., c, None] * o for c, o in enumerate((brute_o, brute_sel, brute_win)))
    torch.testing.assert_close(mixed, by_hand, rtol=1e-9, atol=1e-9)


def assert_same_selection(indices, x, spec):
    """Equal rows, but where the loops' own scores of the differing blocks agree to rounding: there the two
    orders of summation may part, and only there."""
    expected = brute_force.select(x.q, x.k_cmp, spec, x.cu_seqlens)
    if torch.equal(indices, expected):
        return
    scores = brute_force.block_scores(x.q, x.k_cmp, spec, x.cu_seqlens)
    for b, token, g in (indices != expected).any(-1).nonzero().tolist():
        ours = set(indices[b, token, g].tolist()) - {-1}
        theirs = set(expected[b, token, g].tolist()) - {-1}
        assert len(ours) == len(theirs)
        row = scores[b, token, g]
        for mine, other in zip(sorted(ours - theirs), sorted(theirs - ours), strict=True):
            assert row[mine] == pytest.approx(row[other], rel=1e-12, abs=0.0)
            assert row[mine] != row[other], "an exact tie must go to the lower index"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", ["zero_queries", "equal_keys"])
def test_ties_go_to_the_lower_block(tied, packed):
    spec = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, num_init=1, num_local=1, window=4)
    x = make_inputs(61, spec=spec, heads=6, groups=2, cu_seqlens=[0, 9, 61] if packed else None, dtype=torch.float32)
    if tied == "zero_queries":
        x.q.zero_()
    else:
        x.k_cmp[:] = x.k_cmp[:, :1].clone()
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, spec, cu_seqlens=x.cu_seqlens)
    indices = select_blocks(x.q, x.k_cmp, lse, spec, cu_seqlens=x.cu_seqlens)
    position = 51 if packed else 60  # of the last token
    blocks = position // 4 + 1
    # Block 0 has one neighbour fewer than the others, and so a lower score; it is forced. Then the tie: 1, 2.
    assert indices[0, -1].tolist() == [[0, 1, 2, blocks - 1]] * 2
