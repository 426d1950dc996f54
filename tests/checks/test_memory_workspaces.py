"""The workspaces of an estimate against what host code allocates, run without launching anything."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.checks import memory_trace
from nsa.checks.memory_estimate import estimate
from nsa.checks.memory_trace import LiveBytes, peak_bytes
from nsa.checks.memory_workspaces import workspace_bytes
from nsa.config import load_config
from nsa.ops import dispatch, mixing
from nsa.ops.dispatch import REFERENCE, kernels_for
from nsa.ops.layout import num_slots
from nsa.ops.reference import compressed, masked_attention, windowed
from nsa.ops.spec import MSASpec, NSASpec

ROOT = Path(__file__).parents[2]
SPEC, MSA_SPEC = NSASpec(32, 16, 64, 16, 1, 2, 512), MSASpec(64, 16)
# batch, tokens, heads, groups, head size, packed
SHAPES = [
    (16, 2048, 12, 2, 64, False),
    (1, 32768, 12, 2, 64, True),
    (1, 65536, 12, 2, 64, False),
    (2, 8192, 32, 8, 128, False),
    (1, 131072, 64, 4, 128, True),
    (8, 131072, 4, 4, 64, False),  # so long that the gradients of selected attention come in turns
    (1, 1 << 20, 12, 2, 64, True),  # those of a key/value head, too, and those of compressed keys
]
CALLS = {
    "select_blocks": ("q", "k_cmp", "lse"),
    "selected_attention": ("q", "k", "v", "indices"),
    "selected_attention_backward": ("o", "q", "k", "v", "indices", "o", "lse"),
    "window_attention": ("q", "k", "v"),
    "window_attention_backward": ("o", "q", "k", "v", "o", "lse"),
    "compressed_attention": ("q", "k_cmp", "v_cmp"),
    "compressed_attention_backward": ("o", "q", "k_cmp", "v_cmp", "o", "lse"),
    "contract_blocks_backward": ("k_cmp", "k", "weight"),
    "index_blocks": ("index_q", "index_k"),
    "index_loss": ("index_q", "index_k", "q", "k", "lse", "indices", "counted"),
}
FUNCTIONS = {
    "select_blocks": ("select", "forward"),
    "contract_blocks_backward": ("phi", "contract_backward"),
    "index_blocks": ("index", "choose"),
    "index_loss": ("index_loss", "loss"),
    **{
        f"{branch}_attention{suffix}": (operator, suffix[1:] or "forward")
        for branch, operator in (("selected", "sel"), ("window", "win"), ("compressed", "cmp"))
        for suffix in ("", "_backward")
    },
}


@pytest.fixture
def _nothing_is_launched():
    """Kernels do nothing, and every card is an H200."""
    pytest.importorskip("triton")
    from tests.ops.triton.compiling import recording

    with recording(90, keep=False):  # kept arguments would count as memory
        yield


def tensors_of(batch, tokens, heads, groups, dim, packed, dtype=torch.bfloat16):
    slots = num_slots(tokens, SPEC, packed=packed)
    shapes = {
        "q": (tokens, heads, dim),
        "k": (tokens, groups, dim),
        "v": (tokens, groups, dim),
        "k_cmp": (slots, groups, dim),
        "v_cmp": (slots, groups, dim),
        "o": (tokens, heads, dim),
    }
    given = {name: torch.zeros(batch, *shape, dtype=dtype) for name, shape in shapes.items()}
    given["lse"] = torch.zeros(batch, tokens, heads)
    given["indices"] = torch.zeros(batch, tokens, groups, SPEC.num_selected, dtype=torch.int32)
    given["weight"] = torch.zeros(SPEC.cmp_block, dim, dim, dtype=dtype)
    given["index_q"] = torch.zeros(batch, tokens, groups, dim, dtype=dtype)
    given["index_k"] = torch.zeros(batch, tokens, dim, dtype=dtype)
    given["counted"] = torch.ones(batch, tokens, dtype=torch.bool)
    given["borders"] = torch.zeros(tokens // 512 + 1, dtype=torch.int32) if packed else None
    return given


def sizes_of(operator):
    """What a node takes of the spec, and what its backends take."""
    if "selected" in operator or operator == "index_loss":
        return SPEC.sel_block, SPEC.sel_block
    if operator == "index_blocks":
        return MSA_SPEC.as_ints(), MSA_SPEC
    return (SPEC.window, SPEC.window) if "window" in operator else (SPEC.as_ints(), SPEC)


def host_code(backend, operator):
    name, function = FUNCTIONS[operator]
    return getattr(kernels_for(name) if backend == "triton" else REFERENCE[name], function)


def allocated_and_estimated(backend, operator, given):
    """Bytes on top of arguments and results: what the host code allocated, and what the estimate says."""
    borders, tensors = given["borders"], [given[name] for name in CALLS[operator]]
    run, (of_node, of_backend) = host_code(backend, operator), sizes_of(operator)
    run(*tensors, of_backend, borders)  # borders are worked out once for all layers and kept: nobody's workspace
    live = LiveBytes([tensor for tensor in given.values() if tensor is not None])
    with live:
        result = run(*tensors, of_backend, borders)
    results = sum(t.untyped_storage().nbytes() for t in (result if isinstance(result, tuple) else (result,)))
    func = getattr(torch.ops.nsa, operator).default
    others = {"q_offset": 0, "has_grads": True, "backend": backend}
    others = [others[argument.name] for argument in func._schema.arguments if argument.name in others]
    estimated = workspace_bytes(func, (*tensors, of_node, borders, *others), peak_bytes)
    return live.phases["start"].total - results, estimated


@pytest.mark.usefixtures("_nothing_is_launched")
@pytest.mark.parametrize("operator", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_estimates_match_the_memory_that_kernels_allocate(operator, shape):
    with FakeTensorMode():
        allocated, estimated = allocated_and_estimated("triton", operator, tensors_of(*shape))
    assert 0.99 * allocated <= estimated <= 1.01 * allocated


@pytest.mark.parametrize("operator", CALLS)
def test_formulas_of_the_reference_are_near_what_it_allocates(operator, monkeypatch):
    monkeypatch.setitem(masked_attention.SCORES_PER_CHUNK, "cpu", masked_attention.SCORES_PER_CHUNK["cuda"])
    allocated, formula = allocated_and_estimated("reference", operator, tensors_of(1, 2048, 4, 2, 16, False))
    assert 0.7 * allocated <= formula <= 1.5 * allocated


@pytest.mark.usefixtures("_nothing_is_launched")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula_of_all_branches_matches_their_common_peak(shape, monkeypatch):
    monkeypatch.setattr(dispatch, "choose", lambda operator, *_, **__: kernels_for(operator))
    selected = kernels_for("sel").backward
    workspace = 0

    def measured(*args, **options):
        nonlocal workspace
        live = LiveBytes([x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)])
        with live:
            results = selected(*args, **options)
        workspace = live.phases["start"].total - sum(t.untyped_storage().nbytes() for t in results)
        return results

    @contextmanager
    def second_stream(q):
        """Memory of the second stream is not the first one's to use."""
        kept = []

        @contextmanager
        def stream():
            yield
            kept.append(q.new_empty(int(workspace) // q.element_size()))

        yield stream()
        kept.clear()

    monkeypatch.setattr(mixing, "_second_stream", second_stream)
    with FakeTensorMode():
        given = tensors_of(*shape)
        given["gates"] = torch.zeros(*given["lse"].shape, 3, dtype=torch.bfloat16)
        names = ("o", "q", "k_cmp", "v_cmp", "k", "v", "k", "v", "gates", *("o", "lse") * 3, "indices")
        args = (*(given[name] for name in names), SPEC.as_ints(), given["borders"], *[None] * 4)
        mixing.all_gradients(*args)  # works out the borders once
        formula = workspace_bytes(torch.ops.nsa.mix_attention_backward.default, args, peak_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(kernels_for("sel"), "backward", measured)
            live = LiveBytes([tensor for tensor in given.values() if tensor is not None])
            with live:
                results = mixing.all_gradients(*args)
    held = live.phases["start"].total - sum(t.untyped_storage().nbytes() for t in results)
    assert 0.99 * held <= formula <= 1.01 * held


def test_without_triton_the_reference_counts(monkeypatch):
    given = tensors_of(1, 2048, 4, 2, 16, False)
    func = torch.ops.nsa.window_attention_backward.default
    args = (*(given[name] for name in CALLS["window_attention_backward"]), SPEC.window, None, 0)
    kernels = workspace_bytes(func, (*args, None), peak_bytes)
    monkeypatch.setattr(dispatch, "triton_missing", lambda: "Triton cannot be imported")
    missing, wanted = (workspace_bytes(func, (*args, backend), peak_bytes) for backend in (None, "reference"))
    assert missing == wanted > kernels


@pytest.mark.parametrize("window", [8, 64, 512])
@pytest.mark.parametrize("budget", [1 << 10, 1 << 14, 1 << 30])
def test_the_reference_holds_no_more_scores_than_it_says(monkeypatch, window, budget):
    monkeypatch.setitem(masked_attention.SCORES_PER_CHUNK, "cuda", budget)
    spec, heads, tokens = NSASpec(32, 16, 64, 16, 1, 2, window), 4, 600
    q, k = torch.empty(1, tokens, heads, 8, device="meta"), torch.empty(1, tokens, 2, 8, device="meta")
    for branch, sizes in ((windowed, {"window": window}), (compressed, {"spec": spec})):
        chunks = branch.chunks(q, tokens, *sizes.values(), None, 0)
        held = max((c.rows.stop - c.rows.start) * (c.keys.stop - c.keys.start) for c in chunks)
        assert 2 * 4 * heads * held <= branch.forward_workspace(q, k, **sizes)


def test_the_estimate_of_msa_counts_its_index_where_queries_choose():
    def parts(kind, seq_len):
        sizes = ["model.n_layers=1", f"train.seq_len={seq_len}", "train.batch_size=4", "runtime.compile=false"]
        return estimate(load_config("m7c_125m", [*sizes, f"model.attention={kind}"])).parts

    tokens, groups, size, blocks = 4 * 4096, 2, 64, 16
    index = tokens * (4 * groups * blocks + 2 * groups * size + 4 * size)  # blocks, gradients of index queries and keys
    sparse, dense = (parts(kind, 4096)["activations"] for kind in ("msa", "dense"))
    assert sparse - dense > index
    short, dense = (parts(kind, 2048) for kind in ("msa", "dense"))
    assert short["activations"] == dense["activations"]
    assert short["optimizer"] == dense["optimizer"], "a run that short does not train the index"
    assert short["weights"] - dense["weights"] == 4 * 768 * (groups * size + size)


@pytest.mark.long
def test_the_estimate_of_msa_is_the_peak_that_was_measured(monkeypatch):
    monkeypatch.setattr(memory_trace, "NORMS_IN_FLOAT32", False)  # PyTorch 2.11
    recorded = json.loads((ROOT / "bench" / "results" / "train-msa-h200.json").read_text())
    rows = [row for run in recorded["runs"] for row in run["results"] if row["attention"] == "msa"]
    (plain,) = (row for row in rows if not row["compiled"])
    sizes = [f"train.seq_len={plain['seq_len']}", "train.batch_size=1", "data.isolate_documents=false"]
    recompute = f"runtime.gradient_checkpointing={plain['gradient_checkpointing']}"
    found = estimate(load_config("m7c_125m", [*sizes, "model.attention=msa", recompute]))
    assert found.peak_gib == pytest.approx(plain["peak_gib"], rel=0.01)
