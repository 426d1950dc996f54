"""What the specification promises of the operators, shown on the reference."""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from nsa.errors import ArgumentError, BackendError, DerivativeError
from nsa.ops import (
    MSASpec,
    NSASpec,
    checks,
    compress_contract,
    compress_mean,
    compressed_attention,
    dispatch,
    mixing,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from tests.ops.cases import SMALL, make_inputs

PACKED = [0, 0, 3, 14, 14, 23]
LENGTHS = (1, 17, 63, 65, 1000)


def branch_outputs(x, spec):
    borders = {"cu_seqlens": x.cu_seqlens}
    o_cmp, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, spec, **borders)
    indices = select_blocks(x.q, x.k_cmp, lse, spec, **borders)
    o_sel = selected_attention(x.q, x.k_sel, x.v_sel, indices, spec, **borders)
    o_win = window_attention(x.q, x.k_win, x.v_win, spec, **borders)
    return {"cmp": o_cmp, "sel": o_sel, "win": o_win}, indices


def causal(q, k, v):
    o = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return o.transpose(1, 2)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", [1, 2, 4, 6])
def test_a_window_as_long_as_the_sequence_is_causal_attention(tokens, heads):
    spec = NSASpec(window=1000)
    x = make_inputs(tokens, spec=spec, heads=heads)
    gates = torch.zeros_like(x.gates)
    gates[..., 2] = 1.0
    o = nsa_attention(*x.tensors()[:-1], gates, spec)
    torch.testing.assert_close(o, causal(x.q, x.k_win, x.v_win))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", [1, 2, 4, 6])
def test_selecting_every_block_is_causal_attention(tokens, heads):
    spec = NSASpec(num_selected=16)
    x = make_inputs(tokens, spec=spec, heads=heads)
    gates = torch.zeros_like(x.gates)
    gates[..., 1] = 1.0
    o = nsa_attention(*x.tensors()[:-1], gates, spec)
    torch.testing.assert_close(o, causal(x.q, x.k_sel, x.v_sel))


def test_selected_attention_takes_the_blocks_of_any_kind_of_spec():
    """Another kind of sparse attention has blocks of its own size, and no compressed tokens or window."""
    other = SimpleNamespace(sel_block=8, num_selected=2, num_init=0, num_local=1)
    x = make_inputs(30, spec=SMALL)
    own = torch.arange(30, dtype=torch.int32) // 8
    indices = torch.stack([own - 1, own], -1).view(1, 30, 1, 2).contiguous()
    o = selected_attention(x.q, x.k_sel, x.v_sel, indices, other)
    for t in (0, 7, 8, 29):
        seen = slice(max(0, t // 8 - 1) * 8, t + 1)
        scores = torch.einsum("hd,sd->hs", x.q[0, t], x.k_sel[0, seen, 0]) * x.q.shape[3] ** -0.5
        want = scores.softmax(-1) @ x.v_sel[0, seen, 0]
        torch.testing.assert_close(o[0, t], want)


@pytest.mark.parametrize(
    ("per_group", "cu_seqlens"),
    [
        pytest.param(heads, borders, marks=() if (heads, borders) in ((1, None), (4, PACKED)) else pytest.mark.long)
        for heads in (1, 2, 4)
        for borders in (None, PACKED)
    ],
)
def test_gradients_of_every_operator_pass_gradcheck(per_group, cu_seqlens):
    x = make_inputs(23, heads=per_group, dv=32, cu_seqlens=cu_seqlens, requires_grad=True)
    spec, borders = SMALL, {"cu_seqlens": x.cu_seqlens}
    _, indices = branch_outputs(x, spec)
    checks = [
        (lambda q, k, v: compressed_attention(q, k, v, spec, **borders)[0], (x.q, x.k_cmp, x.v_cmp)),
        (lambda q, k, v: selected_attention(q, k, v, indices, spec, **borders), (x.q, x.k_sel, x.v_sel)),
        (lambda q, k, v: window_attention(q, k, v, spec, **borders), (x.q, x.k_win, x.v_win)),
        (lambda *tensors: nsa_attention(*tensors, spec, **borders), x.tensors()),
    ]
    for function, inputs in checks:
        # Sizes for which every entry of the Jacobian would take minutes are checked along random directions.
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    small = make_inputs(7, heads=per_group, cu_seqlens=[0, 2, 7] if cu_seqlens else None, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v: window_attention(q, k, v, spec, cu_seqlens=small.cu_seqlens),
        (small.q, small.k_win, small.v_win),
    )


@pytest.mark.parametrize("longest", [0, 1 << 26], ids=["long", "short"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 9, 33]], ids=["one document", "packed"])
def test_fused_gradients_equal_those_of_the_single_operators(cu_seqlens, longest, monkeypatch):
    monkeypatch.setattr(mixing, "LONGEST", longest)
    x = make_inputs(33, heads=4, groups=2, cu_seqlens=cu_seqlens, requires_grad=True)
    whole = nsa_attention(*x.tensors(), SMALL, cu_seqlens=x.cu_seqlens)
    outputs, _ = branch_outputs(x, SMALL)
    parts = sum(gate.unsqueeze(-1) * outputs[name] for name, gate in zip(outputs, x.gates.unbind(-1), strict=True))
    do = torch.randn_like(whole)
    assert ("mix_branches" if longest == 0 else "mix_attention") in whole.grad_fn.name()
    torch.testing.assert_close(whole, parts)
    for got, want in zip(*(torch.autograd.grad(o, x.tensors(), do) for o in (whole, parts)), strict=True):
        torch.testing.assert_close(got, want)


def differentiable_operators():
    x = make_inputs(9, requires_grad=True)
    _, indices = branch_outputs(x, SMALL)
    weight = torch.randn(4, 16, 16, dtype=torch.float64, requires_grad=True)
    outputs = [torch.randn_like(x.q, requires_grad=True) for _ in range(3)]
    yield "mean_blocks", lambda k: compress_mean(k, SMALL), (x.k_sel,)
    yield "contract_blocks", lambda k, w: compress_contract(k, w, SMALL), (x.k_sel, weight)
    yield "compressed_attention", lambda *t: compressed_attention(*t, SMALL)[0], (x.q, x.k_cmp, x.v_cmp)
    yield "selected_attention", lambda *t: selected_attention(*t, indices, SMALL), (x.q, x.k_sel, x.v_sel)
    yield "window_attention", lambda *t: window_attention(*t, SMALL), (x.q, x.k_win, x.v_win)
    yield "mix_branches", lambda *t: mixing.mix_node(*t, None), (*outputs, x.gates)
    yield "mix_attention", lambda *t: nsa_attention(*t, SMALL), x.tensors()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "function", "inputs"), [pytest.param(*case, id=case[0]) for case in differentiable_operators()]
)
def test_a_second_derivative_is_an_error_that_names_the_operator(name, function, inputs):
    loss = function(*inputs).square().sum()
    ordinary = torch.autograd.grad(loss, inputs, retain_graph=True)
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(torch.equal(kept, grad) for kept, grad in zip(grads, ordinary, strict=True))
    for grad in grads:
        with pytest.raises(DerivativeError, match=r"detach.*difference of two gradients") as error:
            torch.autograd.grad(grad.sum(), inputs, allow_unused=True, retain_graph=True)
        assert error.value.operator == f"nsa::{name}"


@pytest.mark.parametrize(
    ("name", "function", "inputs"),
    [pytest.param(*case, id=case[0]) for case in differentiable_operators() if case[0] != "mix_branches"],
)
def test_forward_mode_is_an_error_that_names_the_operator(name, function, inputs):
    """For a tangent of any argument, where without an error it would be zero."""
    inputs = [x.detach() for x in inputs]
    for place in range(len(inputs)):
        with forward_ad.dual_level(), pytest.raises(DerivativeError, match="no forward-mode") as error:
            function(*(forward_ad.make_dual(x, x) if i == place else x for i, x in enumerate(inputs)))
        assert error.value.operator == f"nsa::{name}"
    with forward_ad.dual_level():
        assert torch.equal(function(*inputs), function(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode_is_an_error_inside_transforms_too_and_constants_pass():
    x = make_inputs(9)
    tangent = torch.ones_like(x.q)

    def attend(q):
        return window_attention(q, x.k_win, x.v_win, SMALL)

    together = torch.vmap(lambda q: attend(q[None])[0])
    torch.testing.assert_close(together(x.q), attend(x.q))
    for transformed in (
        lambda: torch.func.jvp(attend, (x.q,), (tangent,)),
        lambda: torch.func.jvp(together, (x.q,), (tangent,)),
        lambda: torch.func.jacfwd(attend)(x.q),
        lambda: torch.func.hessian(lambda q: attend(q).sum())(x.q),
    ):
        with pytest.raises(DerivativeError):
            transformed()
    o, moved = torch.func.jvp(lambda z: attend(x.q) * z, (tangent,), (2 * tangent,))
    assert torch.equal(o, attend(x.q))
    assert torch.equal(moved, 2 * o)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_gradient_inside_torch_func_is_an_error_that_names_the_operator_and_constants_pass():
    x = make_inputs(9)

    def loss(q):
        return window_attention(q, x.k_win, x.v_win, SMALL).sum()

    for transformed in (
        torch.func.grad(lambda q: loss(q[0])),
        torch.func.jacrev(lambda q: loss(q[0])),
        torch.vmap(torch.func.grad(loss)),
    ):
        with pytest.raises(DerivativeError, match=r"nsa::window_attention: .*torch\.func .*torch\.autograd\.grad"):
            transformed(torch.stack([x.q, x.q]))
    assert torch.func.grad(lambda z: loss(x.q) * z)(torch.ones(()).double()) == loss(x.q)


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_later_tokens_never_change_an_output_or_its_gradients(branch):
    spec, cut, tokens = SMALL, 20, 41
    visible = (cut - spec.cmp_block) // spec.cmp_stride + 1

    def run(x):
        outputs, _ = branch_outputs(x, spec)
        early = outputs[branch][:, :cut]
        grads = torch.autograd.grad(early.square().sum(), list(x.tensors()[:-1]), allow_unused=True)
        return early.detach(), grads

    x = make_inputs(tokens, heads=4, groups=2, requires_grad=True)
    changed = make_inputs(tokens, heads=4, groups=2, requires_grad=True)
    with torch.no_grad():
        for tensor in (changed.q, changed.k_sel, changed.v_sel, changed.k_win, changed.v_win):
            tensor[:, cut:] += 100.0
        for tensor in (changed.k_cmp, changed.v_cmp):
            tensor[:, visible:] += 100.0
    before, grads_before = run(x)
    after, grads_after = run(changed)
    assert torch.equal(before, after)
    for first, second, limit in zip(
        grads_before, grads_after, (cut, visible, visible, cut, cut, cut, cut), strict=True
    ):
        if first is not None:
            assert torch.equal(first[:, :limit], second[:, :limit])
            assert not first[:, limit:].any()
            assert not second[:, limit:].any()


def test_every_row_holds_its_forced_blocks_in_ascending_order():
    spec = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=6, num_init=2, num_local=2, window=4)
    x = make_inputs(123, spec=spec, heads=6, groups=3)
    _, indices = branch_outputs(x, spec)
    for t, row in enumerate(indices[0].tolist()):
        own = t // 4
        for chosen in row:
            blocks = [j for j in chosen if j >= 0]
            assert blocks == sorted(set(blocks))
            assert chosen == blocks + [-1] * (6 - len(blocks))
            assert len(blocks) == min(6, own + 1)
            assert {j for j in (0, 1, own - 1, own) if 0 <= j <= own} <= set(blocks)


def test_scores_come_from_all_heads_of_the_group():
    """One head wants one block, the others want another: only their sum tells which is read."""
    spec = NSASpec(cmp_block=4, cmp_stride=4, sel_block=4, num_selected=2, num_init=0, num_local=1, window=4)
    x = make_inputs(32, spec=spec, heads=3, groups=1)
    x.q.zero_()
    x.k_cmp.zero_()
    x.k_cmp[0, 2, 0, 0] = x.k_cmp[0, 5, 0, 1] = 8.0
    x.q[0, -1, 0, 0] = 8.0
    x.q[0, -1, 1:, 1] = 8.0
    _, indices = branch_outputs(x, spec)
    assert indices[0, -1, 0].tolist() == [5, 7]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_packed_documents_equal_each_document_alone(tokens):
    spec = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=1, window=16)
    cuts = sorted({tokens // 7, tokens // 3, tokens // 3 + 1, 5 * tokens // 6})
    borders = [0, *cuts, cuts[-1], tokens]
    x = make_inputs(tokens, spec=spec, heads=4, groups=2, cu_seqlens=borders)
    packed, indices = branch_outputs(x, spec)
    slot = 0
    for start, end in pairwise(borders):
        if start == end:
            continue
        count = max(0, (end - start - 8) // 4 + 1)
        part = make_inputs(end - start, spec=spec, heads=4, groups=2)
        for name in ("q", "k_sel", "v_sel", "k_win", "v_win"):
            getattr(part, name)[:] = getattr(x, name)[:, start:end]
        for name in ("k_cmp", "v_cmp"):
            getattr(part, name)[:] = getattr(x, name)[:, slot : slot + count]
        slot += count
        alone, alone_indices = branch_outputs(part, spec)
        assert torch.equal(indices[:, start:end], alone_indices)
        for branch, o in alone.items():
            torch.testing.assert_close(packed[branch][:, start:end], o)


def test_rows_that_see_no_compressed_token_read_nothing():
    x = make_inputs(9)
    o, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, SMALL)
    assert not o[:, :3].any()
    assert (lse[:, :3] == -torch.inf).all()
    assert torch.isfinite(lse[:, 3:]).all()
    assert not lse.requires_grad


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_lower_precision_stays_close_to_float64(dtype, limit):
    x = make_inputs(200, heads=4, groups=2, requires_grad=True)
    low = make_inputs(200, heads=4, groups=2, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        for exact, rounded in zip(x.tensors(), low.tensors(), strict=True):
            exact.copy_(rounded)  # the same numbers in both types
    exact_o, indices = branch_outputs(x, SMALL)
    low_o, low_indices = branch_outputs(low, SMALL)
    assert (indices == low_indices).float().mean() > 0.999
    for branch in ("cmp", "win"):
        exact_grads = torch.autograd.grad(exact_o[branch].sum(), x.q)
        low_grads = torch.autograd.grad(low_o[branch].sum(), low.q)
        for a, b in ((exact_o[branch], low_o[branch]), (exact_grads[0], low_grads[0])):
            assert a.dtype == torch.float64
            assert b.dtype == dtype
            assert (a - b).norm() / a.norm() <= limit


def test_inputs_need_not_be_contiguous():
    x = make_inputs(37, heads=4, groups=2)
    plain = nsa_attention(*x.tensors(), SMALL)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x.tensors()]
    assert not turned[0].is_contiguous()
    assert torch.equal(plain, nsa_attention(*turned, SMALL))


def test_asking_for_a_backend_that_cannot_run_says_why():
    x = make_inputs(9)
    with pytest.raises(BackendError, match=r"'triton' cannot run operator 'win' here: .+"):
        window_attention(x.q, x.k_win, x.v_win, SMALL, backend="triton")
    with pytest.raises(ArgumentError, match="backend"):
        window_attention(x.q, x.k_win, x.v_win, SMALL, backend="cuda")


def test_a_fallback_to_a_slower_backend_is_counted_with_its_reason():
    x = make_inputs(9)
    window_attention(x.q, x.k_win, x.v_win, SMALL, backend="reference")
    before = dispatch.counters()
    window_attention(x.q, x.k_win, x.v_win, SMALL)
    window_attention(x.q, x.k_win, x.v_win, SMALL)
    after = dispatch.counters()
    grown = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    assert sum(grown.values()) == 2
    assert {operator for operator, _ in grown} == {"win"}
    assert all(reason for _, reason in grown)


def bad_arguments():
    x = make_inputs(9, heads=4, groups=2)
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, SMALL)
    indices = select_blocks(x.q, x.k_cmp, lse, SMALL)
    bent = torch.tensor([0, 6, 4, 9], dtype=torch.int32)
    short = torch.tensor([0, 4], dtype=torch.int32)
    far = indices.clone()
    far[0, 0, 0, 0] = 3
    yield "three heads for two groups", "k", lambda: window_attention(x.q[:, :, :3], x.k_win, x.v_win, SMALL)
    yield "head size 24", "q", lambda: window_attention(x.q.repeat(1, 1, 1, 2)[..., :24], x.k_win, x.v_win, SMALL)
    yield "other key size", "k", lambda: window_attention(x.q, x.k_win.repeat(1, 1, 1, 2), x.v_win, SMALL)
    yield "other value length", "v", lambda: window_attention(x.q, x.k_win, x.v_win[:, :5], SMALL)
    yield "float32 keys", "k", lambda: window_attention(x.q, x.k_win.float(), x.v_win, SMALL)
    yield "integer queries", "q", lambda: window_attention(x.q.long(), x.k_win, x.v_win, SMALL)
    yield "three dimensions", "q", lambda: window_attention(x.q[0], x.k_win, x.v_win, SMALL)
    yield "queries of numpy", "q", lambda: window_attention(x.q.numpy(), x.k_win, x.v_win, SMALL)
    yield "no keys", "k_win", lambda: nsa_attention(*x.tensors()[:5], None, *x.tensors()[6:], SMALL)
    yield "no gates", "gates", lambda: nsa_attention(*x.tensors()[:-1], None, SMALL)
    yield "no lse", "lse", lambda: select_blocks(x.q, x.k_cmp, None, SMALL)
    yield "a list of indices", "indices", lambda: selected_attention(x.q, x.k_sel, x.v_sel, [0], SMALL)
    yield "no weight", "weight", lambda: compress_contract(x.k_win, None, SMALL)
    yield "a window as spec", "spec", lambda: window_attention(x.q, x.k_win, x.v_win, 5)
    yield "the spec of MSA", "spec", lambda: compress_mean(x.k_win, MSASpec())
    yield "no spec", "spec", lambda: selected_attention(x.q, x.k_sel, x.v_sel, indices, None)
    for offset in (None, 1.0, -1):
        yield (
            f"an offset of {offset}",
            "q_offset",
            lambda offset=offset: window_attention(x.q, x.k_win, x.v_win, SMALL, q_offset=offset),
        )
    yield "other device", "k", lambda: window_attention(x.q, x.k_win.to("meta"), x.v_win, SMALL)
    yield "too few compressed", "k_cmp", lambda: compressed_attention(x.q, x.k_cmp[:, :2], x.v_cmp[:, :2], SMALL)
    yield "lse of another shape", "lse", lambda: select_blocks(x.q, x.k_cmp, lse[:, :4], SMALL)
    yield "lse in float16", "lse", lambda: select_blocks(x.q, x.k_cmp, lse.half(), SMALL)
    yield "int64 indices", "indices", lambda: selected_attention(x.q, x.k_sel, x.v_sel, indices.long(), SMALL)
    yield "too few indices", "indices", lambda: selected_attention(x.q, x.k_sel, x.v_sel, indices[..., :1], SMALL)
    yield "block that is not there", "indices", lambda: selected_attention(x.q, x.k_sel, x.v_sel, far, SMALL)
    yield "two gates", "gates", lambda: nsa_attention(*x.tensors()[:-1], x.gates[..., :2], SMALL)
    for name, value in (("falling borders", bent), ("borders that end early", short), ("int64 borders", bent.long())):
        yield name, "cu_seqlens", lambda value=value: window_attention(x.q, x.k_win, x.v_win, SMALL, cu_seqlens=value)
    two = make_inputs(9, batch=2)
    whole = torch.tensor([0, 9], dtype=torch.int32)
    yield (
        "packed batch of two",
        "cu_seqlens",
        lambda: window_attention(two.q, two.k_win, two.v_win, SMALL, cu_seqlens=whole),
    )


@pytest.mark.parametrize(("argument", "call"), [pytest.param(a, c, id=i) for i, a, c in bad_arguments()])
def test_a_bad_argument_is_named(argument, call):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.argument == argument


def test_one_call_checks_each_argument_once(monkeypatch):
    names = []
    check = checks.check_float
    monkeypatch.setattr(checks, "check_float", lambda name, x: (names.append(name), check(name, x)))
    nsa_attention(*make_inputs(9).tensors(), SMALL)
    assert names == ["q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"]


def test_memory_is_linear_in_the_sequence():
    """Forward and backward over 4,096 tokens with 4 heads. One matrix of scores would be 0.25 GiB."""
    script = """
import re, torch
from pathlib import Path
from nsa.ops import NSASpec, nsa_attention
torch.set_num_threads(1)
def draw(n, h): return torch.randn(1, n, h, 32, requires_grad=True)
def peak_gib(S):
    q, pairs = draw(S, 4), [draw(n, 2) for n in (S // 16 - 1, S // 16 - 1, S, S, S, S)]
    nsa_attention(q, *pairs, torch.rand(1, S, 4, 3), NSASpec()).sum().backward()
    assert q.grad.isfinite().all()
    status = Path('/proc/self/status').read_text()  # ru_maxrss would begin with that of the parent
    return int(re.search(r'VmHWM:\\s*(\\d+)', status)[1]) / 2**20
before = peak_gib(128)  # of the process and torch
print(peak_gib(4096) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.0 < float(done.stdout) < 0.2


@pytest.mark.parametrize("is_long", [False, True])
def test_autocast_changes_no_bit_of_16_bit_inputs(is_long, monkeypatch):
    """Scores, softmax and sums stay in float32, forward and backward, and the same blocks are selected."""
    monkeypatch.setattr(mixing, "is_short", lambda q: not is_long)
    x = make_inputs(150, spec=SMALL, dtype=torch.bfloat16, cu_seqlens=[0, 60, 150])
    leaves = [tensor.detach().mul(2).requires_grad_() for tensor in x.tensors()]
    weight = torch.randn(*x.q.shape[:3], x.v_win.shape[3]).bfloat16()

    def results():
        o = nsa_attention(*leaves, SMALL, cu_seqlens=x.cu_seqlens)
        k_raw = leaves[3]
        mean = compress_mean(k_raw, SMALL, cu_seqlens=x.cu_seqlens)
        contracted = compress_contract(
            k_raw, torch.ones(SMALL.cmp_block, k_raw.shape[3], 16).bfloat16(), SMALL, cu_seqlens=x.cu_seqlens
        )
        loss = (o * weight).sum() + mean.float().square().sum() + contracted.float().square().sum()
        return [o, mean, contracted, *torch.autograd.grad(loss, leaves)]

    plain = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = results()
    assert all(torch.equal(a, b) for a, b in zip(plain, under_autocast, strict=True))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)])
def test_compiled_code_takes_gates_in_any_memory_order(order):
    x = make_inputs(23, batch=2, spec=SMALL, requires_grad=True)
    *tensors, gates = x.tensors()
    laid_out = gates.detach().permute(order).contiguous().permute(order).requires_grad_()

    def loss(gates):
        return nsa_attention(*tensors, gates, SMALL).flatten(2).square().sum()

    (want,) = torch.autograd.grad(loss(gates), gates)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(laid_out), laid_out)
    torch.testing.assert_close(got, want)
