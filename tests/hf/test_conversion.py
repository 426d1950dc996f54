"""A dense model becomes NSA or MSA with the commands of docs/huggingface.md, and learns what it lost."""

import pytest
import torch
from typer.testing import CliRunner

from nsa import load_run
from nsa.cli.main import app
from nsa.config import load_config
from nsa.data.build import build_data
from nsa.data.tokenizers import ByteTokenizer
from nsa.nn.loss import divergence_sum
from nsa.train import train
from tests.checkpoint.helpers import rows_of, small

pytest.importorskip("transformers")
SPEC = ["nsa.cmp_block=4", "nsa.cmp_stride=2", "nsa.sel_block=4", "nsa.num_selected=4", "nsa.window=8"]
TINY = ["train.seq_len=64", "train.batch_size=4", "train.eval_sequences=4", "runtime.precision=fp32"]
TINY += ["data.source=synthetic", "telemetry.tensorboard=false", "runtime.device=cpu", "checkpoint.background=false"]


def nsa(*arguments):
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def divergence(teacher, student):
    """On text of the kind that both were trained on."""
    config = small("train.seq_len=64", "train.seed=5")
    tokens = build_data(config.data, config.train, ByteTokenizer()).train.batch(0, 16).inputs.view(-1, 64)
    with torch.no_grad():
        logits = [load_run(folder).model(tokens) for folder in (student, teacher)]
    return float(divergence_sum(*logits, torch.ones_like(tokens, dtype=torch.bool)))


@pytest.mark.long
def test_the_recipe_in_two_stages(tmp_path):
    dense = tmp_path / "dense"
    train(small("model.attention=dense", "train.seq_len=64", "train.steps=30", "model.n_layers=2"), dense)
    nsa("export", dense, tmp_path / "hf")
    output = nsa("import", tmp_path / "hf", tmp_path / "converted", "--attention", "nsa", "--config", "convert", *SPEC)
    assert "layers: 2 nsa; width: 16; vocabulary: 256 tokens; context: " in output
    recipe = tmp_path / "converted" / "config.yaml"
    first = [f"train.init_from={tmp_path / 'converted'}", f"train.teacher={dense}", "train.steps=80", "train.lr=0.02"]
    train(load_config(recipe, [*TINY, *first]), tmp_path / "stage1")
    assert divergence(dense, tmp_path / "stage1") < 0.8 * divergence(dense, tmp_path / "converted")
    before, after = (load_run(tmp_path / name).model.state_dict() for name in ("converted", "stage1"))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved
    assert all(".attention.gate." in name or ".phi_" in name for name in moved), moved
    second = [f"train.init_from={tmp_path / 'stage1'}", "train.freeze=[]", "train.steps=4", "train.eval_every=4"]
    train(load_config(recipe, [*TINY, *second]), tmp_path / "stage2")
    assert load_run(tmp_path / "stage2").config.nsa.shared_kv


def test_the_recipe_for_msa_trains_the_index_alone_and_then_all_weights(tmp_path):
    dense, converted = tmp_path / "dense", tmp_path / "converted"
    train(small("model.attention=dense", "train.seq_len=64", "train.steps=5", "model.n_layers=2"), dense)
    nsa("export", dense, tmp_path / "hf")
    spec = ["msa.block=16", "msa.num_selected=2", "msa.warmup_steps=20", "train.steps=20"]
    nsa("import", tmp_path / "hf", converted, "--attention", "msa", "--config", "convert_msa", *spec)
    start = [*TINY, "checkpoint.every=1000", f"train.init_from={converted}", "train.lr=0.01"]
    train(load_config(converted / "config.yaml", start), tmp_path / "stage1")
    before, after = (load_run(folder).model.state_dict() for folder in (converted, tmp_path / "stage1"))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {name for name in before if ".index_" in name}
    rows = rows_of(tmp_path / "stage1")
    divergences = [float(row["index_kl"]) for row in rows]
    assert sum(divergences[-5:]) < 0.7 * sum(divergences[:5])
    second = [f"train.init_from={tmp_path / 'stage1'}", "msa.warmup_steps=0", "train.freeze=[]", "train.steps=2"]
    train(load_config(converted / "config.yaml", [*start, *second]), tmp_path / "stage2")
    last = load_run(tmp_path / "stage2").model.state_dict()
    assert all(not last[name].equal(after[name]) for name in last)
    assert float(rows_of(tmp_path / "stage2")[0]["index_kl"]) < divergences[0]


def test_weights_alone_are_one_case_of_export(tmp_path):
    train(small("train.steps=2"), tmp_path / "run")
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000002"):
        nsa("export", source, tmp_path / "weights.safetensors", "--format", "safetensors")
        names = ("run", "weights.safetensors")
        left, right = (load_run(tmp_path / name).model.state_dict() for name in names)
        assert all(left[name].equal(right[name]) for name in left)
