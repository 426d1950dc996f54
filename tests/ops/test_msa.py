"""MSA's operators compute what the specification says: choice, attention and index loss, against plain loops."""

import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.errors import ArgumentError, SpecError
from nsa.ops import MSASpec, NSASpec, index_blocks, msa_attention, selected_attention
from nsa.ops.observe import observing
from nsa.ops.selection_cache import SelectionCache

SPEC = MSASpec(block=16, num_selected=3)
NAMES = ("q", "k", "v", "index_q", "index_k")


def make_inputs(tokens, heads=2, groups=1, *, batch=1, offset=0, dtype=torch.float64, seed=0, sizes=(16, 32, 16)):
    """q, k, v, index_q, index_k as leaves; `sizes` are those of keys, values and index heads."""
    generator = torch.Generator().manual_seed(seed)
    dk, dv, e = sizes

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        draw(batch, tokens, heads, dk),
        draw(batch, offset + tokens, groups, dk),
        draw(batch, offset + tokens, groups, dv),
        draw(batch, tokens, groups, e),
        draw(batch, offset + tokens, e),
    )


def loops(q, k, v, index_q, index_k, spec, *, counted=None, borders=None, offset=0, is_dense=False):
    """Blocks, o, the loss and the counted queries, token by token as the specification has them."""
    batch, tokens, heads, _ = q.shape
    groups, per_group = k.shape[2], heads // k.shape[2]
    blocks = torch.full((batch, tokens, groups, spec.num_selected), -1, dtype=torch.int32)
    o, kl, queries = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros((), dtype=q.dtype), 0
    borders = borders or [0, offset + tokens]
    for b in range(batch):
        for s in range(tokens):
            start = max(x for x in borders[:-1] if x <= offset + s)
            t = offset + s - start  # in its document
            own = t // spec.block
            chooses = own >= spec.num_selected and (counted is None or bool(counted[b, s]))
            queries += chooses
            for g in range(groups):
                scores = index_k[b, start : start + t + 1] @ index_q[b, s, g]
                best = [float(part.detach().max()) for part in scores.split(spec.block)]
                chosen = [c for c in range(own + 1) if c > own - spec.num_local or c < spec.num_init]
                free = sorted(set(range(own + 1)) - set(chosen), key=lambda c: (-best[c], c))
                chosen = sorted(chosen + free[: spec.num_selected - len(chosen)])
                blocks[b, s, g, : len(chosen)] = torch.tensor(chosen)
                read = [j for j in range(t + 1) if is_dense or j // spec.block in chosen]
                at = torch.tensor(read) + start
                p = 0.0
                for head in range(g * per_group, (g + 1) * per_group):
                    weights = (k[b, at, g] @ q[b, s, head] / math.sqrt(q.shape[3])).softmax(0)
                    o[b, s, head] = weights @ v[b, at, g]
                    p = p + weights.detach() / per_group
                if chooses:
                    log_r = (scores[read] / math.sqrt(index_q.shape[3])).log_softmax(0)
                    kl = kl + (p * (p.log() - log_r)).sum()
    return blocks, o, kl, queries


CASES = [
    pytest.param(SPEC, {"heads": 1}, 90, None, 0, id="one head"),
    pytest.param(SPEC, {"heads": 6, "groups": 2}, 83, None, 0, id="groups of 3"),
    pytest.param(SPEC, {"heads": 16, "sizes": (16, 16, 48)}, 77, None, 0, id="a group of 16"),
    pytest.param(SPEC, {"heads": 2, "batch": 2}, 70, None, 0, id="a batch"),
    pytest.param(SPEC, {"heads": 2}, 120, [0, 7, 88, 120], 0, id="packed"),
    pytest.param(SPEC, {"heads": 2, "offset": 45}, 40, None, 45, id="queries at the end"),
    pytest.param(SPEC, {"heads": 2, "offset": 70}, 55, [0, 30, 110, 125], 70, id="queries at the end, packed"),
    pytest.param(MSASpec(16, 4, 2, 1), {"heads": 2}, 110, None, 0, id="forced blocks"),
    pytest.param(MSASpec(16, 2, 0, 0), {"heads": 2}, 70, None, 0, id="nothing forced"),
    pytest.param(MSASpec(32, 1), {"heads": 2}, 75, None, 0, id="the own block alone"),
]


@pytest.mark.parametrize("is_dense", [False, True], ids=["chosen", "warm-up"])
@pytest.mark.parametrize(("spec", "shape", "tokens", "borders", "offset"), CASES)
def test_the_reference_equals_loops_over_tokens(spec, shape, tokens, borders, offset, is_dense):
    tensors = make_inputs(tokens, **shape)
    counted = torch.rand(tensors[0].shape[:2], generator=torch.Generator().manual_seed(1)) > 0.2
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    where = {"cu_seqlens": cu_seqlens, "q_offset": offset, "backend": "reference"}
    blocks, *wanted = loops(*tensors, spec, counted=counted, borders=borders, offset=offset, is_dense=is_dense)
    o, kl, queries = msa_attention(*tensors, spec, counted=counted, is_dense=is_dense, **where)
    assert torch.equal(index_blocks(*tensors[3:], spec, **where), blocks)
    assert queries.dtype == torch.int64
    assert int(queries) == wanted[2] > 0
    torch.testing.assert_close(o, wanted[0])
    torch.testing.assert_close(kl, wanted[1])
    do = torch.randn_like(o)
    for name, got, want in zip(
        NAMES,
        torch.autograd.grad((o, kl), tensors, (do, torch.tensor(3.0).double())),
        torch.autograd.grad((wanted[0], wanted[1]), tensors, (do, torch.tensor(3.0).double())),
        strict=True,
    ):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_the_gradient_of_the_loss_is_that_of_its_value():
    q, k, v, index_q, index_k = make_inputs(70, 2, 1, sizes=(16, 16, 16))
    attention = [x.detach() for x in (q, k, v)]
    for is_dense in (False, True):
        loss = lambda a, b, dense=is_dense: msa_attention(*attention, a, b, SPEC, is_dense=dense)[1]  # noqa: E731
        assert torch.autograd.gradcheck(loss, (index_q, index_k), fast_mode=True)


def test_attention_and_index_learn_apart():
    tensors = make_inputs(70)
    o, kl, _ = msa_attention(*tensors, SPEC)
    assert torch.autograd.grad(o.sum(), tensors[3:], allow_unused=True, retain_graph=True) == (None, None)
    assert torch.autograd.grad(kl, tensors[:3], allow_unused=True) == (None, None, None)


@pytest.mark.parametrize("is_dense", [False, True])
def test_an_index_that_agrees_with_the_attention_has_no_loss(is_dense):
    """One head whose keys and queries are those of the index: r equals p."""
    q, k, v, *_ = make_inputs(90, 1, 1, sizes=(16, 16, 16))
    index = (q.detach().clone().requires_grad_(), k.detach()[:, :, 0].clone().requires_grad_())
    _, kl, queries = msa_attention(q, k, v, *index, SPEC, is_dense=is_dense)
    assert int(queries) == 90 - 48
    assert abs(kl.item()) < 1e-12
    for grad in torch.autograd.grad(kl, index):
        assert grad.abs().max() < 1e-14


@pytest.mark.parametrize("borders", [None, [0, 20, 48]])
def test_short_sequences_are_dense_attention_without_an_index(borders):
    q, k, v, index_q, index_k = make_inputs(48, 4, 2)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    seen = Seen()
    with observing(seen):
        o, kl, queries = msa_attention(q, k, v, index_q, index_k, SPEC, cu_seqlens=cu_seqlens)
    assert seen.indices == []
    assert (float(kl), int(queries), kl.dtype) == (0.0, 0, torch.float64)
    for grad in torch.autograd.grad(kl, (index_q, index_k)):  # not None: other ranks may have longer sequences
        assert grad.count_nonzero() == 0
    for start, end in zip((borders or [0, 48])[:-1], (borders or [0, 48])[1:], strict=True):
        piece = (x[:, start:end].transpose(1, 2) for x in (q, k, v))
        dense = scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(o[:, start:end], dense.transpose(1, 2))
    indices = index_blocks(index_q, index_k, SPEC, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(selected_attention(q, k, v, indices, SPEC, cu_seqlens=cu_seqlens), o)


def test_short_documents_need_no_index_where_their_length_is_known():
    tensors = make_inputs(130, 4, 2)
    borders = torch.tensor([0, 20, 68, 100, 130], dtype=torch.int32)
    whole = msa_attention(*tensors, SPEC, cu_seqlens=borders)
    seen = Seen()
    with observing(seen):
        known = msa_attention(*tensors, SPEC, cu_seqlens=borders, max_seqlen=48)
    for wrong in ({"cu_seqlens": borders, "max_seqlen": 47}, {"max_seqlen": 48}):  # would be dense attention
        with pytest.raises(ArgumentError, match=r"max_seqlen: must be at least (48|130)"):
            msa_attention(*tensors, SPEC, **wrong)
    assert seen.indices == []
    for a, b in zip(whole, known, strict=True):
        torch.testing.assert_close(a, b)


class Seen:
    def __init__(self):
        self.failures, self.indices, self.attentions = 0, [], []

    def selected(self, indices, spec, cu_seqlens, q_offset):
        self.indices.append((indices, spec.sel_block, q_offset))

    def attended(self, q, k, lse, counted, cu_seqlens, q_offset):
        self.attentions.append((q, k, lse, counted, q_offset))


def test_the_choice_is_observed_and_kept_for_a_recomputation():
    tensors, cache, seen = make_inputs(70), SelectionCache(), Seen()
    with cache.record(), observing(seen):
        first = index_blocks(*tensors[3:], SPEC)
    assert [(size, offset) for _, size, offset in seen.indices] == [(16, 0)]
    assert torch.equal(seen.indices[0][0], first)
    with cache.replay():
        assert index_blocks(tensors[3] * -1, tensors[4], SPEC) is first


def test_equal_scores_choose_the_lower_block():
    index_q, index_k = torch.ones(1, 100, 1, 16), torch.ones(1, 100, 16)
    assert index_blocks(index_q, index_k, SPEC)[0, -1, 0].tolist() == [0, 1, 6]


def test_without_gradients_only_the_value_is_computed():
    tensors = make_inputs(70)
    with torch.no_grad():
        value = msa_attention(*tensors, SPEC)[1]
    assert not value.requires_grad
    torch.testing.assert_close(value, msa_attention(*tensors, SPEC)[1].detach())


def test_what_is_kept_for_backward_is_freed_with_it():
    """The gradients of the loss are computed in the forward pass; index queries and keys are not kept."""
    tensors = make_inputs(70)
    index = tensors[3] * 1.0
    kept = weakref.ref(index)
    kl = msa_attention(*tensors[:3], index, tensors[4], SPEC)[1]
    del index
    assert kept() is None
    kl.backward()
    assert tensors[3].grad is not None


@pytest.mark.parametrize("is_dense", [False, True])
def test_the_compiled_operator_is_the_eager_one(is_dense):
    tensors = make_inputs(70, 4, 2, dtype=torch.float32)

    def step(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, kl, queries = msa_attention(*tensors, SPEC, is_dense=is_dense)
        return o, kl / queries

    seen = Seen()
    outputs = step(*tensors)
    with observing(seen):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(*tensors)
    assert [len(seen.indices), len(seen.attentions), seen.failures] == ([0, 0, 0] if is_dense else [1, 1, 0])
    weights = [torch.ones_like(x) for x in outputs]
    for a, b in zip(outputs, compiled, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(torch.autograd.grad(x, tensors, weights) for x in (outputs, compiled)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_the_index_are_contiguous_as_compiled_code_expects():
    *attention, index_q, index_k = make_inputs(70, 4, 2, batch=2)
    index = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (index_q, index_k)]
    kl = msa_attention(*attention, *index, SPEC)[1]
    grads = torch.autograd.grad(kl, index)
    assert all(grad.is_contiguous() for grad in grads)
    same = torch.autograd.grad(msa_attention(*attention, index_q, index_k, SPEC)[1], (index_q, index_k))
    for a, b in zip(grads, same, strict=True):
        torch.testing.assert_close(a, b)


def test_shapes_are_known_without_data():
    tensors = [
        torch.empty(x.shape, dtype=torch.bfloat16, device="meta").requires_grad_() for x in make_inputs(70, 4, 2)
    ]
    o, kl, queries = msa_attention(*tensors, SPEC)
    assert (o.shape, o.dtype) == ((1, 70, 4, 32), torch.bfloat16)
    assert (kl.shape, kl.dtype, queries.dtype) == ((), torch.float32, torch.int64)
    assert index_blocks(*tensors[3:], SPEC).shape == (1, 70, 2, 3)
    for x, grad in zip(tensors, torch.autograd.grad(o.sum() + kl, tensors), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(
    ("sizes", "field", "rule"),
    [
        ({"block": 8}, "block", "at least 16"),
        ({"block": 48}, "block", "power of two"),
        ({"block": 512}, "block", "at most 256"),
        ({"block": 64.0}, "block", "whole number"),
        ({"num_selected": 0}, "num_selected", "at least 1"),
        ({"num_selected": 65}, "num_selected", "at most 64"),
        ({"num_selected": 2, "num_local": 2, "num_init": 1}, "num_selected", "num_local + num_init = 3"),
        ({"num_local": -1}, "num_local", "at least 0"),
        ({"num_init": True}, "num_init", "whole number"),
    ],
)
def test_a_geometry_that_breaks_a_rule_names_its_field(sizes, field, rule):
    with pytest.raises(SpecError, match=rule.replace("+", r"\+")) as error:
        MSASpec(**sizes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("argument", "change", "rule"),
    [
        ("q", lambda x: x.flatten(), "dimensions"),
        ("index_q", lambda x: x[:, :, :1], "G"),
        ("index_q", lambda x: x.float(), "type"),
        ("index_q", lambda x: x[..., :8], "head size"),
        ("index_k", lambda x: x[:, :-1], "N, E"),
        ("index_k", lambda x: x.float(), "type"),
        ("counted", lambda x: torch.ones(1, 69, dtype=torch.bool), "bool"),
        ("counted", lambda x: torch.ones(1, 70), "bool"),
        ("counted", lambda x: [True] * 70, "tensor, got list"),
        ("index_k", lambda x: None, "tensor, got NoneType"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(argument, change, rule):
    given = dict(zip(NAMES, make_inputs(70, 4, 2), strict=True)) | {"counted": None}
    given[argument] = change(given[argument])
    if argument == "index_q" and rule == "head size":
        given["index_k"] = given["index_k"][..., :8]
    with pytest.raises(ArgumentError, match=rule) as error:
        msa_attention(*(given[name] for name in NAMES), SPEC, counted=given["counted"])
    assert error.value.argument == argument


def test_the_spec_of_nsa_is_refused():
    with pytest.raises(ArgumentError, match="spec: must be an MSASpec, got NSASpec"):
        index_blocks(*make_inputs(70)[3:], NSASpec())
