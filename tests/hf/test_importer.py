"""Hugging Face models of the Llama family become run folders that compute the same."""

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nsa import load_run
from nsa.cli.main import app
from nsa.config import Config
from nsa.errors import CheckpointError, ConfigError
from nsa.hf.exporter import export_model
from nsa.hf.importer import import_model
from tests.hf.runs import VARIANTS, make_run

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 6}),
}


def make(folder, kind="Llama", seed=0, **options):
    torch.manual_seed(seed)
    sizes = {**SIZES, **options}
    if kind == "Qwen2":
        sizes.pop("head_dim")
        sizes["hidden_size"] = 96
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # these start as constants
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, make(folder)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path, name):
    kind, options = MODELS[name]
    theirs = make(tmp_path / "hf", kind, **options)
    import_model(tmp_path / "hf", tmp_path / "run")
    run = load_run(tmp_path / "run", overrides=["runtime.device=cpu"])
    tokens = torch.randint(0, 256, (2, 130))
    with torch.no_grad():
        torch.testing.assert_close(run.model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_part_of_a_head_is_rotated_where_the_folder_says_so(tmp_path, llama):
    """transformers ignores `partial_rotary_factor` in Llama; as a Llama model that rotates everything, the second half
    of each head has frequency 0 and lies next to the pairs of the first half."""
    folder, theirs = shutil.copytree(llama[0], tmp_path / "hf"), copy.deepcopy(llama[1])
    described = json.loads((folder / "config.json").read_text())
    described["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    (folder / "config.json").write_text(json.dumps(described))
    assert import_model(folder, tmp_path / "run").model.rotary_dim == 8
    theirs.model.rotary_emb.inv_freq = torch.tensor([10_000.0 ** (-i / 4) for i in range(4)] + [0.0] * 4)
    order = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15])
    for layer in theirs.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.weight.data = linear.weight.data.unflatten(0, (-1, 16))[:, order].flatten(0, 1)
    tokens = torch.randint(0, 256, (2, 130))
    with torch.no_grad():
        got = load_run(tmp_path / "run", overrides=["runtime.device=cpu"]).model(tokens)
        torch.testing.assert_close(got, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_rope_scaling_that_was_added_to_a_folder_counts_as_in_transformers(tmp_path, llama):
    folder = shutil.copytree(llama[0], tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    assert described["rope_parameters"]["rope_type"] == "default"
    scaling = {"rope_type": "linear", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(described | {"rope_scaling": scaling}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    import_model(folder, tmp_path / "run")
    tokens = torch.randint(0, 256, (2, 130))
    with torch.no_grad():
        got = load_run(tmp_path / "run", overrides=["runtime.device=cpu"]).model(tokens)
        torch.testing.assert_close(got, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_sharded_weights_are_read(tmp_path, llama):
    folder, theirs = llama
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    import_model(tmp_path / "hf", tmp_path / "sharded")
    import_model(folder, tmp_path / "whole")
    a, b = (load_run(tmp_path / name).model.state_dict() for name in ("sharded", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_converted_model_starts_as_the_dense_one_within_its_window(tmp_path, llama):
    folder, theirs = llama
    tokens = torch.randint(0, 256, (2, 130))
    with torch.no_grad():
        want = theirs(tokens).logits.log_softmax(-1)
    found = {}
    for name, options in {
        "shared": {},
        "copies": {"shared_kv": False},
        "pattern": {"overrides": ["model.layer_pattern=[dense,nsa]"]},
    }.items():
        import_model(folder, tmp_path / name, attention="nsa", **options)
        run = load_run(tmp_path / name)
        with torch.no_grad():
            got = run.model(tokens).log_softmax(-1)
        found[name] = float((want.exp() * (want - got)).sum(-1).mean())
    untrained = float((want.exp() * (want + torch.log(torch.tensor(256.0)))).sum(-1).mean())
    assert max(found.values()) < 0.01 * untrained, (found, untrained)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_model_converted_to_msa_equals_the_dense_one_up_to_the_tokens_that_a_query_reads(tmp_path, name):
    kind, options = MODELS[name]
    theirs = make(tmp_path / "hf", kind, **options)
    pattern = ["model.layer_pattern=[dense,msa]"] if name == "qwen2" else []
    sizes = ["msa.block=16", "msa.num_selected=4", *pattern]
    made = import_model(tmp_path / "hf", tmp_path / "run", attention="msa", overrides=sizes)
    assert made.model.layer_kinds() == (["dense", "msa"] if pattern else ["msa", "msa"])
    model = load_run(tmp_path / "run", overrides=["runtime.device=cpu"]).model
    index = {name: p for name, p in model.named_parameters() if ".index_" in name}
    assert all(p.std() > 0 for name, p in index.items() if name.endswith(("q.weight", "k.weight")))
    tokens = torch.randint(0, 256, (2, 70))
    with torch.no_grad():
        got, want = model(tokens[:, :64]), theirs(tokens).logits
        torch.testing.assert_close(got, want[:, :64], atol=1e-5, rtol=1e-5)
        assert (model(tokens)[:, 64:] - want[:, 64:]).abs().max() > 1e-4, "later tokens read the chosen blocks"


def test_a_base_for_msa_gives_its_sizes_to_a_converted_model_and_none_to_a_dense_one(tmp_path, llama):
    base = tmp_path / "base.yaml"
    base.write_text("model: {attention: msa}\nmsa: {block: 32, warmup_steps: 5}\ntrain: {steps: 5}")
    converted = import_model(llama[0], tmp_path / "msa", attention="msa", base=base)
    assert (converted.msa.block, converted.model.layer_kinds()) == (32, ["msa", "msa"])
    dense = import_model(llama[0], tmp_path / "dense", base=base)
    assert (dense.msa, dense.model.layer_kinds(), dense.train.steps) == (Config().msa, ["dense", "dense"], 5)


@pytest.mark.parametrize("kind", ["nsa", "msa"])
def test_a_sparse_model_is_not_converted_again(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(VARIANTS, "msa", {"model": {"attention": "msa"}})
    export_model(make_run(tmp_path / "run", {"nsa": "mean"}.get(kind, kind)), tmp_path / "hf")
    with pytest.raises(ConfigError, match=f"hf: has {kind} layers already; leave --attention out"):
        import_model(tmp_path / "hf", tmp_path / "converted", attention="msa")
    assert import_model(tmp_path / "hf", tmp_path / "same").model.layer_kinds() == [kind, kind]


@pytest.mark.parametrize(
    ("attention", "override", "message"),
    [
        (None, "model.attention=msa", "override 'model.attention=msa': layers keep their kind; --attention nsa or msa"),
        ("msa", "model.attention=nsa", "override 'model.attention=nsa': layers keep their kind"),
        (None, "model.layer_pattern=[dense,nsa]", r"override 'model.layer_pattern=\[dense,nsa\]': layers keep"),
        ("msa", "model.layer_pattern=[dense,nsa]", "--attention msa: model.layer_pattern has no such layer"),
    ],
)
def test_only_the_option_converts_layers(tmp_path, llama, attention, override, message):
    with pytest.raises(ConfigError, match=message):
        import_model(llama[0], tmp_path / "run", attention=attention, overrides=[override])
    assert not (tmp_path / "run").exists()


def test_the_pattern_of_an_own_export_is_kept_and_not_overridden(tmp_path):
    export_model(make_run(tmp_path / "run", "pattern"), tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"override 'model.attention=dense': layers keep their kind"):
        import_model(tmp_path / "hf", tmp_path / "imported", overrides=["model.attention=dense"])
    assert import_model(tmp_path / "hf", tmp_path / "imported").model.layer_pattern == ["nsa", "dense"]


def test_window_layers_of_an_own_export_keep_their_window(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "no nsa", {"model": {"layer_pattern": ["dense", "window"]}})
    export_model(make_run(tmp_path / "run", "no nsa"), tmp_path / "hf")
    converted = import_model(
        tmp_path / "hf", tmp_path / "converted", attention="nsa", overrides=["model.layer_pattern=[nsa,window]"]
    )
    assert (converted.nsa.window, converted.nsa.shared_kv) == (24, True)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_a_converted_gate_starts_with_the_selected_branch(tmp_path, llama, kind):
    import_model(llama[0], tmp_path / "run", attention="nsa", overrides=[f"nsa.gate={kind}"])
    gate = load_run(tmp_path / "run").model.blocks[1].attention.gate
    weights = gate(torch.randn(1, 5, 48)).detach()
    assert weights[..., 0].max() < 0.02
    torch.testing.assert_close(weights[..., 1], torch.full((1, 5, 6), 0.88), atol=0.02, rtol=0)
    torch.testing.assert_close(weights[..., 1:].sum(-1), torch.ones(1, 5, 6), atol=0.02, rtol=0)


REFUSED = {
    "another architecture": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    "its own code": ({"auto_map": {"AutoModel": "evil.Model"}}, "never executed"),
    "a window": ({"model_type": "mistral", "sliding_window": 64}, "sliding_window is not supported"),
    "a rope it lacks": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    "a rope that was added": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    "less than a pair": ({"partial_rotary_factor": 0.1}, "model.rotary_dim"),
    "more than a head": ({"partial_rotary_factor": 1.5}, "model.rotary_dim"),
    "an activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "a bias": ({"attention_bias": True}, "attention_bias is not supported"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "sizes of another model": ({"intermediate_size": 96}, r"mlp.*is \[48, 80\].*\[48, 96\]"),
    "more layers than weights": ({"num_hidden_layers": 3}, "no tensor for"),
    "a head size without kernels": ({"head_dim": 20, "num_attention_heads": 6}, "head_dim_k"),
    "no sizes": ({"hidden_size": None}, "cannot be read"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "cannot be read"),
    "an endless width": ({"hidden_size": 1e999}, "cannot be read"),
    "layers that slide": ({"layer_types": ["chunked_attention"]}, "sliding_window is not supported"),
    "a window by default": ({"model_type": "mistral"}, "sliding_window is not supported"),
    "a head that is not tied": ({"tie_word_embeddings": True}, "differs from the embedding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused_by_name(tmp_path, llama, name):
    changes, message = REFUSED[name]
    folder = shutil.copytree(llama[0], tmp_path / "hf")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _traversal(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _long_name(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "a" * 5000 + ".safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _deep(folder):
    (folder / "config.json").write_text("[" * 100_000)


def _no_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pickle, "is a pickle, which can execute code"),
        (_traversal, "the folder has no shard"),
        (_missing_shard, "the folder has no shard .model-00001-of-00002.safetensors"),
        (_long_name, "the folder has no shard"),
        (_cut, "is not a complete safetensors file"),
        (_deep, "cannot be read"),
        (_no_config, "no such file"),
    ],
)
def test_a_hostile_folder_is_refused(tmp_path, llama, damage, message):
    folder = shutil.copytree(llama[0], tmp_path / "hf")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("added", "original"),
    [
        ("norm.weight", "model.norm.weight"),
        ("decoder.norm.weight", "model.norm.weight"),
        ("model.layers.00.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.layers.\u0660.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.layers.0.mlp.out.weight", "model.layers.0.mlp.down_proj.weight"),
        ("decoder.blocks.0.mlp.out.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_a_tensor_whose_name_transformers_does_not_know_is_refused(tmp_path, llama, added, original):
    folder = shutil.copytree(llama[0], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {added: torch.zeros_like(tensors[original])}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(added)} has no place"):
        import_model(folder, tmp_path / "run")


@pytest.mark.parametrize("tied", [False, True])
def test_a_tensor_in_two_shards_is_refused(tmp_path, tied):
    make(tmp_path, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": head}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"two tensors .* lm_head.weight in a.* and lm_head.weight in b"):
        import_model(tmp_path, tmp_path / "run")


def test_a_bad_section_of_an_own_export_is_refused_by_its_key(tmp_path):
    export_model(make_run(tmp_path / "run", "mean"), tmp_path / "hf")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    described["model"]["layer_pattern"] = 5
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"config\.json: model\.layer_pattern: must be a valid list"):
        import_model(tmp_path / "hf", tmp_path / "imported")


def test_a_tensor_of_another_kind_of_layer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "dense", {"model": {"attention": "dense"}})
    export_model(make_run(tmp_path / "run", "dense"), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["decoder.blocks.0.attention.k.0.weight"] = tensors["decoder.blocks.0.attention.k.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k\.0\.weight has no place in the model of config\.json"):
        import_model(tmp_path / "hf", tmp_path / "converted", attention="nsa")


def test_the_command_says_which_number_is_the_vocabulary_and_which_the_context(tmp_path, llama):
    done = CliRunner().invoke(app, ["import", str(llama[0]), str(tmp_path / "run")], catch_exceptions=False)
    assert f"{tmp_path / 'run'}: layers: 2 dense; width: 48; vocabulary: 256 tokens; context: 256 tokens" in done.output


@pytest.mark.parametrize("name", ["a" * 300, "config.json/run"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, llama, name):
    (tmp_path / "config.json").touch()
    with pytest.raises((ConfigError, CheckpointError), match=f"{name}: cannot be"):
        import_model(llama[0], tmp_path / name)


def test_a_folder_with_content_is_left_alone(tmp_path, llama):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        import_model(llama[0], tmp_path / "run")
