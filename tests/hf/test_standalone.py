"""An exported model of every kind runs in transformers without this package, with the code in its folder."""

import json
import os
import subprocess
import sys

import pytest
import torch

from nsa import load_run
from nsa.config import parse_config
from nsa.hf.importer import import_model
from nsa.nn.model import build_model
from tests.hf.runs import SIZES, SPEC, save_run

pytest.importorskip("transformers")
from nsa.hf.exporter import export_model

PATTERN = {"layer_pattern": ["dense", "nsa", "window", "msa"], "n_layers": 4, "qk_norm": True, "head_dim_k": 32}
LLAMA3 = {"factor": 8.0, "original_length": 64}
MSA = {"block": 16, "num_selected": 3, "index_dim": 16}
VARIANTS = {
    "default": ({}, {}),
    "mlp": (
        {"tied_head": True, "qkv_bias": True, "rope_scaling": {"factor": 2.0}},
        {"phi": "mlp", "compress": "after_rotation", "gate": "softmax", "shared_kv": True, "num_init": 0},
    ),
    "pattern": (PATTERN | {"rotary_dim": 24, "activation": "swiglu_oai", "rope_scaling": LLAMA3}, {"phi": "mean_mlp"}),
    "cmp": ({"n_layers": 1}, {"force_branch": "cmp"}),
    "sel": ({"n_layers": 1, "n_kv_heads": 6}, {"force_branch": "sel", "cmp_block": 4}),
    "win": ({"n_layers": 1}, {"force_branch": "win"}),
}
LENGTHS = (1, 5, 47, 137)
THEIRS = """
import sys
sys.modules["nsa"] = None  # importing it raises ImportError
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
results = {}
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(f"{name}-hf", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(f"{name}-hf")
    assert type(model).__module__.startswith("transformers_modules.")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # not quantized by transformers
    assert embedding is model.decoder.embedding and head is model.decoder.head
    torch.manual_seed(0)
    tokens = torch.randint(0, 255, (1, 137))
    rows = [{"input_ids": row} for row in (tokens[0, :60].tolist(), tokens[0, :83].tolist())]
    greedy = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    result = results[name] = {}
    with torch.no_grad():
        result["logits"] = {n: model(tokens[:, :n]).logits for n in LENGTHS}
        first = model(tokens[:, :50], use_cache=True)
        later = [model(tokens[:, at], past_key_values=first.past_key_values).logits for at in (slice(50, 136), [136])]
        result["continued"] = torch.cat([first.logits, *later], 1)
        result["generated"] = model.generate(tokens[:, :61], **greedy)[0, 61:]
        for side in ("left", "right"):
            padded = tokenizer.pad(rows, padding_side=side, return_tensors="pt")
            result[side] = model(**padded).logits[0][padded["attention_mask"][0].bool()]
            result[f"generated {side}"] = model.generate(**padded, **greedy)[0, -10:]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    result["loss"] = loss.detach()
    model.save_pretrained(f"{name}-again")
    tokenizer.save_pretrained(f"{name}-again")
    restart = torch.tensor([[*range(2, 60), *range(2, 81)]])  # two packed documents, counted from 2
    padded = {"position_ids": restart, "attention_mask": (torch.arange(137) > 0).long()[None]}
    for argument in (
        {"inputs_embeds": tokens},
        {"attention_mask": tokens[:, 1:]},
        {"position_ids": tokens * 0},
        {"position_ids": restart},
        padded,
        {"seq_idx": tokens * 0},
        {"attention_mask": (torch.arange(137) < 50).long()[None], "prefill_chunk_size": 60},
    ):
        try:
            model.generate(tokens, **argument) if "prefill_chunk_size" in argument else model(tokens, **argument)
        except ValueError as error:
            assert str(error).startswith(next(iter(argument))), error
        else:
            raise AssertionError(f"{argument} was accepted")
torch.save(results, "results.pt")
"""


def make_run(folder, model, nsa):
    sections = {"model": SIZES | model, "nsa": SPEC | nsa, "train": {"seq_len": 256}}
    config = parse_config(sections | ({"msa": MSA} if "layer_pattern" in model else {}), "test")
    decoder = build_model(config, 256, seed=1)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    torch.manual_seed(2)
    for name, weight in weights.items():
        if name.endswith("bias") or ".gate.out." in name or ".phi_" in name:
            weight.add_(torch.randn_like(weight) * 0.3)
        elif "norm" in name:
            weight.uniform_(0.5, 1.5)
        elif ".mlp.gate." in name or ".mlp.up." in name:
            weight.mul_(4.0)  # some values exceed the limit of swiglu_oai
    return save_run(folder, config, weights)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs, their exports NAME-hf, and what a process without nsa computed with them, also saved as NAME-again."""
    root = tmp_path_factory.mktemp("standalone")
    for name, (model, nsa) in VARIANTS.items():
        export_model(make_run(root / name, model, nsa), root / f"{name}-hf")
    code = THEIRS.replace("LENGTHS", str(LENGTHS))
    own = os.environ | {"HF_MODULES_CACHE": str(root / "modules")}
    subprocess.run([sys.executable, "-c", code, *VARIANTS], cwd=root, env=own, check=True, timeout=300)
    return root, torch.load(root / "results.pt")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_code_in_the_folder_computes_the_same_model_without_this_package(folders, name):
    root, theirs = folders
    run, theirs = load_run(root / name), theirs[name]
    torch.manual_seed(0)
    tokens = torch.randint(0, 255, (1, 137))
    close = {"atol": 1e-4, "rtol": 0}

    def is_greedy(generated, length):
        whole = torch.cat([tokens[0, :length], generated]).unsqueeze(0)
        return torch.equal(run.model(whole)[0, length - 1 : -1].argmax(-1), generated)

    with torch.no_grad():
        ours = run.model(tokens)
        for n in LENGTHS:
            torch.testing.assert_close(theirs["logits"][n], run.model(tokens[:, :n]), **close)
        torch.testing.assert_close(theirs["continued"], ours, **close)
        assert is_greedy(theirs["generated"], 61)
        for side in ("left", "right"):
            torch.testing.assert_close(theirs[side], ours[0, :60], **close)
            assert is_greedy(theirs[f"generated {side}"], 60)
        loss = torch.nn.functional.cross_entropy(ours[0, :-1], tokens[0, 1:])
        torch.testing.assert_close(theirs["loss"], loss, **close)


@pytest.mark.parametrize("name", ["mlp", "pattern"])
def test_a_model_that_was_saved_without_this_package_is_imported_bit_by_bit(folders, tmp_path, name):
    root, _ = folders
    import_model(root / f"{name}-again", tmp_path / "run")
    before, after = load_run(root / name), load_run(tmp_path / "run")
    weights, found = before.model.state_dict(), after.model.state_dict()
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[key], found[key]) for key in weights)
    described, again = (json.loads((root / f"{name}-{end}" / "config.json").read_text()) for end in ("hf", "again"))
    assert again["auto_map"] == described["auto_map"]
    code = (root / f"{name}-hf" / "modeling_nsa.py").read_text()
    assert (root / f"{name}-again" / "modeling_nsa.py").read_text() == code
    assert len(code.splitlines()) <= 400
