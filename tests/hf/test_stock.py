"""A model of msa and dense layers runs as MiniMax-M3 in transformers, in a process without this package."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nsa import load_run
from nsa.cli.main import app
from nsa.config import parse_config
from nsa.errors import CheckpointError, ConfigError
from nsa.hf.importer import import_model
from nsa.nn.attention import attention_layers
from nsa.nn.model import build_model
from nsa.train import train
from tests.checkpoint.helpers import small
from tests.hf.runs import save_run

pytest.importorskip("transformers")
from nsa.hf.exporter import export_model

MODEL = {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim_k": 32, "head_dim_v": 32, "mlp_dim": 80}
MODEL |= {"attention": "msa", "qk_norm": True, "activation": "swiglu_oai"}
MSA = {"block": 16, "num_selected": 3}
LLAMA3 = {"factor": 8.0, "original_length": 64}
VARIANTS = {
    "msa": ({}, {"num_local": 2}),
    "mixed": ({"layer_pattern": ["msa", "dense"], "rotary_dim": 16, "rope_base": 500.0}, {"index_dim": 16}),
    "tied": ({"tied_head": True, "rope_scaling": {"factor": 2.0}, "norm_eps": 1e-3}, {"num_local": 0}),
    "llama3": ({"rotary_dim": 16, "rope_scaling": LLAMA3, "n_layers": 1}, {}),
    "dense": (
        {"layer_pattern": ["dense", "msa"], "head_dim_k": 176, "head_dim_v": 176, "rotary_dim": 30, "n_layers": 1},
        {},
    ),
}
LENGTHS = (5, 49, 137)  # from 49 tokens on, queries choose blocks
THEIRS = """
import sys
sys.modules["nsa"] = None  # importing it raises ImportError
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
results = {}
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(f"{name}-hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(f"{name}-hf")
    assert type(model).__module__.startswith("transformers.models.minimax_m3_vl.")
    assert model.config.router_aux_loss_coef == 0.0  # TRL computes a loss of routers otherwise
    torch.manual_seed(0)
    tokens = torch.randint(0, 255, (1, 137))
    rows = [{"input_ids": row} for row in (tokens[0, :60].tolist(), tokens[0].tolist())]
    with torch.no_grad():
        results[name] = {
            "logits": {n: model(tokens[:, :n]).logits for n in LENGTHS},
            "padded": model(**tokenizer.pad(rows, return_tensors="pt")).logits[:1, :60],
            "generated": model.generate(tokens[:, :61], max_new_tokens=20, do_sample=False, eos_token_id=None),
            "ids": tokenizer("x = 1")["input_ids"],
            "ends": model.generation_config.eos_token_id,
        }
    model(tokens, labels=tokens).loss.backward()
    untrained = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert all(".indexer." in key for key in untrained), untrained  # only this project trains it
    model.save_pretrained(f"{name}-again")
    tokenizer.save_pretrained(f"{name}-again")
torch.save(results, "results.pt")
"""


def make_run(folder, model, msa, norms=(0.5, 1.5)):
    config = parse_config({"model": MODEL | model, "msa": MSA | msa, "train": {"seq_len": 256}}, "test")
    decoder = build_model(config, 256, seed=1)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.uniform_(*norms, generator=torch.Generator().manual_seed(2))
        elif ".mlp.gate." in name or ".mlp.up." in name:
            weight.mul_(8.0)  # some values exceed the limit of the activation
    return save_run(folder, config, weights)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs, their exports NAME-hf, and what a process without nsa computed with them, also saved as NAME-again."""
    root = tmp_path_factory.mktemp("stock")
    for name, (model, msa) in VARIANTS.items():
        export_model(make_run(root / name, model, msa), root / f"{name}-hf")
    settings = {"attention": "msa", "qk_norm": True, "activation": "swiglu_oai", "head_dim_k": 16, "head_dim_v": 16}
    overrides = [f"model.{key}={value}" for key, value in settings.items()]
    train(
        small(*overrides, "msa.block=16", "msa.num_selected=2", "train.seq_len=64", "train.steps=3"), root / "trained"
    )
    done = CliRunner().invoke(app, ["export", str(root / "trained"), str(root / "trained-hf")], catch_exceptions=False)
    assert "for transformers 5.12 and later, without the package nsa" in done.output
    card = (root / "trained-hf" / "README.md").read_text()
    assert "MiniMax Sparse Attention" in card
    assert "package nsa" not in card
    names = [*VARIANTS, "trained"]
    code = THEIRS.replace("LENGTHS", str(LENGTHS))
    subprocess.run([sys.executable, "-c", code, *names], cwd=root, check=True, timeout=300)
    return root, torch.load(root / "results.pt")


@pytest.mark.parametrize("name", [*VARIANTS, "trained"])
def test_transformers_without_this_package_computes_the_same_model(folders, name):
    root, theirs = folders
    run, theirs = load_run(root / name), theirs[name]
    torch.manual_seed(0)
    tokens = torch.randint(0, 255, (1, 137))
    with torch.no_grad():
        ours = {n: run.model(tokens[:, :n]) for n in LENGTHS}
        for n in LENGTHS:
            torch.testing.assert_close(theirs["logits"][n], ours[n], atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs["padded"], ours[137][:, :60], atol=1e-4, rtol=0)
        generated = tokens[:, :61]
        for _ in range(20):
            generated = torch.cat([generated, run.model(generated)[:, -1:].argmax(-1)], 1)
        assert torch.equal(theirs["generated"], generated)
        for _, layer in attention_layers(run.model):
            layer.is_dense = True
        if name != "dense":  # the selection matters at this length
            assert (run.model(tokens) - ours[137]).abs().max() > 1e-2
    assert theirs["ids"] == [run.tokenizer.separator, *run.tokenizer.encode("x = 1")]
    assert theirs["ends"] == run.tokenizer.separator


@pytest.mark.parametrize("saved_by", ["hf", "again"])
@pytest.mark.parametrize("name", [*VARIANTS, "trained"])
def test_an_export_that_transformers_saved_again_is_imported_bit_by_bit(folders, tmp_path, name, saved_by):
    root, _ = folders
    import_model(root / f"{name}-{saved_by}", tmp_path / "run")
    before, after = load_run(root / name), load_run(tmp_path / "run")
    weights, found = before.model.state_dict(), after.model.state_dict()
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[key], found[key]) for key in weights)
    assert after.config.model.layer_kinds() == before.config.model.layer_kinds()
    assert after.config.train.seq_len == before.config.train.seq_len
    texts = [list(run.tokenizer.encode("def f(x):\n")) for run in (before, after)]
    assert texts[0] == texts[1]
    assert (after.tokenizer.separator, after.tokenizer.ends) == (before.tokenizer.separator, before.tokenizer.ends)


def test_small_norm_weights_are_rounded_to_the_precision_of_the_form(tmp_path):
    export_model(make_run(tmp_path / "run", {}, {}, norms=(0.0, 0.5)), tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "back")
    before, after = (load_run(tmp_path / name).model.state_dict() for name in ("run", "back"))
    differences = [(before[name] - after[name]).abs().max() for name in before]
    assert 0 < max(differences) <= 2**-25


SETTINGS = {
    "msa and dense layers only": {"model": {"layer_pattern": ["msa", "window"]}},
    "model.qk_norm=true": {"model": {"qk_norm": False}},
    "model.activation=swiglu_oai": {"model": {"activation": "swiglu"}},
    "model.qkv_bias=false": {"model": {"qkv_bias": True}},
    "model.head_dim_v equal to model.head_dim_k": {"model": {"head_dim_v": 16}},
    "msa.num_init=0": {"msa": {"num_init": 1}},
    "model.rotary_dim at most msa.index_dim": {"msa": {"index_dim": 16}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_model_needs_code_and_the_export_says_which_setting_is_why(tmp_path, setting):
    change = SETTINGS[setting]
    run = make_run(tmp_path / "run", change.get("model", {}), change.get("msa", {}))
    (note,) = export_model(run, tmp_path / "hf")
    use, form = note.split("; ")
    assert use == "for transformers with trust_remote_code=True, faster with the package nsa"
    assert form.startswith(f"the form that needs neither requires {setting}")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "nsa"
    with pytest.raises(ConfigError, match=f"vLLM has no class for this model; it needs {setting}"):
        export_model(run, tmp_path / "vllm", form="vllm")
    assert not (tmp_path / "vllm").exists()


def test_a_model_of_the_form_is_exported_with_code_on_request(tmp_path):
    """The class of this package trains the index of MSA, and packs documents."""
    from transformers import AutoModelForCausalLM

    run = make_run(tmp_path / "run", {}, {})
    command = ["export", str(tmp_path / "run"), str(tmp_path / "own"), "--for", "nsa"]
    printed = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert printed.strip().endswith("\nfor transformers with trust_remote_code=True, faster with the package nsa")
    assert "trust_remote_code=True" in (tmp_path / "own" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    tokens = torch.randint(0, 256, (1, 100))
    torch.testing.assert_close(model(tokens).logits, run.model(tokens))
    assert model.train()(tokens, labels=tokens).aux_loss > 0


def test_rope_scaling_is_for_transformers_only(tmp_path, folders):
    with pytest.raises(ConfigError, match=r"vLLM has no class for this model; it needs model.rope_scaling=null"):
        export_model(load_run(folders[0] / "llama3"), tmp_path / "vllm", form="vllm")


def test_the_export_warns_of_sizes_without_kernels_in_serving_engines(tmp_path):
    heads = {"head_dim_k": 128, "head_dim_v": 128, "n_layers": 1}
    notes = export_model(make_run(tmp_path / "other", heads, {}), tmp_path / "other-hf")
    assert notes[1:] == [
        "warning: kernels of vLLM and SGLang need heads and blocks of 128; this model has msa.block=16"
    ]
    assert len(export_model(make_run(tmp_path / "run", heads, {"block": 128}), tmp_path / "hf")) == 1


def test_the_form_for_vllm_has_its_names_and_both_places_of_its_configuration(tmp_path):
    model = {"layer_pattern": ["dense", "msa"], "tied_head": True, "rotary_dim": 16}
    run = make_run(tmp_path / "run", model, {})
    command = ["export", str(tmp_path / "run"), str(tmp_path / "vllm"), "--for", "vllm"]
    assert "for vLLM and SGLang" in CliRunner().invoke(app, command, catch_exceptions=False).output
    card = (tmp_path / "vllm" / "README.md").read_text()
    assert "**Warning:** kernels of vLLM and SGLang need heads and blocks of 128; this model has" in card
    assert "vllm serve vllm" in card
    assert "library_name: vllm" in card, "transformers cannot load this form"
    described = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert (described["model_type"], described["architectures"]) == ("minimax_m3_vl", ["MiniMaxM3SparseForCausalLM"])
    for fields in (described, described["text_config"]):
        assert fields["hidden_act"] == "swigluoai"
        assert fields["moe_layer_freq"] == [0, 0]
        assert fields["sparse_attention_config"]["sparse_attention_freq"] == [0, 1]
        assert (fields["rope_theta"], fields["partial_rotary_factor"], fields["rotary_dim"]) == (10_000.0, 0.5, 16)
        assert fields["tie_word_embeddings"] is False
    tensors, weights = load_file(tmp_path / "vllm" / "model.safetensors"), run.model.state_dict()
    parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    index = [f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")]
    names = {f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in (parts + index if i else parts)}
    assert tensors.keys() == names | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], weights["embedding.weight"])
    norm, own = tensors["model.layers.1.self_attn.index_q_norm.weight"], "blocks.1.attention.index_q_norm.weight"
    assert torch.equal(norm + 1, weights[own])


REFUSED = {
    "experts": ({"mlp_layer_types": ["dense", "sparse"]}, "has experts; only dense MLPs"),
    "experts by default": ({"mlp_layer_types": None}, "has experts; only dense MLPs"),
    "a vision part": ({"model_type": "minimax_m3_vl"}, "model_type 'minimax_m3_vl' is not supported"),
    "another kind of layer": (
        {"layer_types": ["minimax_m3_sparse", "sliding_attention"]},
        "layer_types must be a list",
    ),
    "too few layers": ({"num_hidden_layers": 3}, "must have num_hidden_layers entries"),
    "index heads": ({"index_n_heads": 1}, "index_n_heads must be 2, got 1"),
    "an activation": ({"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702, got 1.0"),
    "a block size": ({"index_block_size": 24, "sparse_attention_config": {}}, "msa.block: must be a power of two"),
    "a block size that is no number": ({"index_block_size": "16"}, "msa.block"),
    "two block sizes": ({"index_block_size": 32}, "sparse_attention_config does not agree"),
    "its own code": ({"auto_map": {"AutoModel": "evil.Model"}}, "never executed"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "another width of the MLP": ({"dense_intermediate_size": 96}, r"mlp.*is \[48, 80\].*\[48, 96\]"),
    "no head size": ({"head_dim": None}, "model.head_dim_k: must be a multiple of 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_the_decoder_cannot_express_is_refused(folders, tmp_path, name):
    changes, message = REFUSED[name]
    folder = shutil.copytree(folders[0] / "msa-hf", tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "key", ["layer_types", "index_head_dim", "swiglu_limit", "head_dim", "dense_intermediate_size"]
)
def test_a_field_that_is_missing_is_named(folders, tmp_path, key):
    folder = shutil.copytree(folders[0] / "msa-hf", tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    described.pop(key)
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=f"has no '{key}'"):
        import_model(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mlp.gate_proj", (80, 48), "has no place"),  # the name of vLLM
        ("self_attn.index_q_proj", (64, 48), "has no place"),
        ("mlp.experts.gate_up_proj", (2, 160, 48), "has no place"),
        ("mlp.gate_up_proj", (159, 48), r"mlp.gate.weight is \[159, 48\] in its file and \[80, 48\]"),
        ("mlp.gate_up_proj", (), r"mlp.gate.weight is \[\] in its file"),
    ],
)
def test_a_tensor_of_another_name_or_shape_is_refused(folders, tmp_path, name, shape, message):
    folder = shutil.copytree(folders[0] / "msa-hf", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        import_model(folder, tmp_path / "run")
