"""An exported folder as other models are loaded: compiled, with a device map, in half precision, with more tokens."""

import shutil

import pytest
import torch

from nsa.errors import ArgumentError, CheckpointError
from nsa.hf.exporter import export_model
from nsa.hf.importer import import_model
from tests.hf.runs import make_run

transformers = pytest.importorskip("transformers")
import nsa.hf  # noqa: E402, F401  (needs transformers)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    export_model(make_run(folder / "run", "mean"), folder / "model")
    return folder / "model"


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def padded():
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, 255, (2, 70)), torch.ones(2, 70, dtype=torch.int64)
    mask[0, :30] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def check_one_graph(model, **options):
    """Padding included, forward and backward."""
    torch.compiler.reset()
    inputs = padded()
    compiled = torch.compile(model, fullgraph=True, **options)
    got, want = (m(**inputs, labels=inputs["input_ids"]) for m in (compiled, model))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(loss, parameters) for loss in (got.loss, want.loss)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_model_becomes_one_graph(exported):
    config = transformers.AutoConfig.from_pretrained(exported)
    config.model["n_layers"] = 1
    check_one_graph(transformers.AutoModelForCausalLM.from_config(config), backend="eager")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_computes_the_same(exported, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ on a CPU")
    model = load(exported)
    check_one_graph(model, backend=backend, dynamic=True)
    model.gradient_checkpointing_enable()
    check_one_graph(model, backend=backend, dynamic=True)


def test_generation_with_a_cache_compiles_nothing_and_is_the_same(exported):
    torch.compiler.reset()
    model, inputs = load(exported), padded()
    want = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    model.forward = torch.compile(model.forward, backend=count)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), want)
    sizes = [sum(node.op.startswith("call") for node in graph.graph.nodes) for graph in graphs]
    assert max(sizes) < 20, sizes  # the decoder's layers are in none of them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates_as_it_predicts(exported, dtype):
    model, inputs = load(exported, dtype=dtype), padded()
    assert {p.dtype for p in model.parameters()} == {dtype}
    drawn = model.generate(
        **inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    tokens = drawn.sequences[:, :-1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 7, dtype=torch.int64)], 1)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits
    assert whole.dtype is dtype
    step, once = (x.float().log_softmax(-1) for x in (torch.stack(drawn.logits, 1), whole[:, 69:]))
    assert float((once.exp() * (once - step)).sum(-1).mean()) < 1e-3  # KL divergence
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_places_it(exported, device_map, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # "auto" then means the CPU
    plain, inputs = load(exported), padded()
    placed = load(exported, device_map=device_map)
    assert placed.device == torch.device("cpu")
    want, got = (model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in (plain, placed))
    assert torch.equal(got, want)


def test_layers_that_wait_on_disk_compute_the_same(exported, tmp_path):
    pytest.importorskip("accelerate")
    inputs, plain = padded(), load(exported)
    places = {"decoder.embedding": "cpu", "decoder.blocks.0": "cpu", "decoder.blocks.1": "disk"}
    places |= {"decoder.norm": "cpu", "decoder.head": "cpu"}
    placed = load(exported, device_map=places, offload_folder=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(placed(**inputs).logits, plain(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_a_vocabulary_can_grow(exported, tmp_path):
    with pytest.raises(CheckpointError, match=r"another shape of decoder\.embedding\.weight.* resize_token_embeddings"):
        load(exported, vocab_size=264, ignore_mismatched_sizes=True)
    model = load(exported)
    tokens = torch.randint(0, 255, (1, 40))
    with torch.no_grad():
        before = model(tokens).logits
        model.resize_token_embeddings(264)
        torch.testing.assert_close(model(tokens).logits[..., :256], before)
    model.save_pretrained(tmp_path / "more")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "more")(tokens).logits[..., :256], before)
    assert import_model(tmp_path / "more", tmp_path / "run").model.vocab_size == 264


def test_unsupported_outputs_are_refused(exported):
    model, inputs = load(exported), padded()
    with pytest.raises(ArgumentError, match="output_hidden_states"):
        model(**inputs, output_hidden_states=True)
    with pytest.raises(ArgumentError, match=r"must be \[2, 70\]"):  # without a cache there is nothing before
        model(inputs["input_ids"], attention_mask=torch.ones(2, 90))


def test_the_context_survives_a_round_trip(exported, tmp_path):
    assert import_model(exported, tmp_path / "run").train.seq_len == 256


def test_a_pipeline_writes_text(exported):
    write = transformers.pipeline("text-generation", model=str(exported), device="cpu")
    [written] = write("def main(", max_new_tokens=4, do_sample=False)
    assert written["generated_text"].startswith("def main(")
