"""`nsa ckpt list`, `verify` and `export`, and starting a run from what they know."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nsa.checkpoint import format
from nsa.checkpoint.export import export_weights, find_weights, load_weights, read_tensors, read_weights, write_weights
from nsa.checkpoint.format import FOLDER, INDEX_FILE, MANIFEST_FILE, STATE_FILE
from nsa.checkpoint.save import Saver
from nsa.cli.main import main
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import CheckpointError
from nsa.nn.model import build_model
from nsa.train import train
from nsa.train.checkpointing import snapshot
from nsa.train.state import build_state
from tests import warm
from tests.checkpoint.helpers import (
    KINDS,
    RANDOM_FILE,
    SHARD,
    checkpoint_of,
    flip_byte,
    rows_of,
    sign_again,
    small,
    train_until,
)
from tests.distributed.launching import environment, wait_all


@pytest.fixture
def nsa(monkeypatch, capsys):
    """The command inside this process: its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nsa", *map(str, arguments)])
        monkeypatch.setattr("nsa.cli.main._waiting_threads", set)  # threads of other tests may wait for ever
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def without_weights(run, target):
    """A copy of a run that has its checkpoints only, as one that has not finished."""
    return Path(shutil.copytree(run, target, ignore=shutil.ignore_patterns("model.safetensors", "metrics.json")))


def test_the_weights_of_a_checkpoint_are_those_of_the_run_to_the_last_bit(whole_run, tmp_path, nsa):
    exit_code, out, err = nsa("ckpt", "export", whole_run, tmp_path / "out.safetensors")
    assert (exit_code, err) == (0, "")
    own = load_file(whole_run / "model.safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], own[name]) for name in own)
    assert (tmp_path / "out.safetensors").read_bytes() == (whole_run / "model.safetensors").read_bytes()
    assert out == f"{tmp_path / 'out.safetensors'}: {len(own)} tensors of {checkpoint_of(whole_run, 6)}\n"


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_tied_head_is_exported_once_as_the_run_does(tied, tmp_path, nsa):
    train(small(f"model.tied_head={tied}", "train.steps=2"), tmp_path / "run")
    assert nsa("ckpt", "export", tmp_path / "run", tmp_path / "out.safetensors")[0] == 0
    own = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert (tmp_path / "out.safetensors").read_bytes() == own
    assert ("head.weight" in load_file(tmp_path / "out.safetensors")) == (tied == "false")


def test_an_older_checkpoint_can_be_exported_by_its_folder_whatever_that_is_called(whole_run, tmp_path, nsa):
    older = checkpoint_of(whole_run, 3)
    renamed = shutil.copytree(older, tmp_path / "the good one")
    for source in (older, renamed):
        exit_code, _, err = nsa("ckpt", "export", source, tmp_path / "out.safetensors")
        assert (exit_code, err) == (0, "")
        exported = load_file(tmp_path / "out.safetensors")
        weights = read_weights(older)
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weights[name]) for name in weights)
        with safe_open(tmp_path / "out.safetensors", "pt") as file:
            carried = json.loads(file.metadata()["nsa"])
        saved = yaml.safe_load((whole_run / "config.yaml").read_text())
        sections = {name: saved[name] for name in ("model", "nsa", "msa")}
        data = {"tokenizer": "bytes", "separator": None}
        assert len(carried.pop("sha256")) == 64
        assert carried == {"step": 3, "config": {**sections, "data": data}}
    final = load_file(whole_run / "model.safetensors")
    assert not torch.equal(exported["embedding.weight"], final["embedding.weight"])


def test_a_run_whose_newest_checkpoints_are_damaged_is_exported_from_the_one_before(whole_run, tmp_path, nsa):
    run = shutil.copytree(whole_run, tmp_path / "run")
    flip_byte(checkpoint_of(run, 6) / SHARD, 0.5)
    (checkpoint_of(run, 4) / SHARD).unlink()
    exit_code, out, err = nsa("ckpt", "export", run, tmp_path / "out.safetensors")
    assert exit_code == 0
    assert "step_00000003" in out
    assert err.splitlines() == [
        f"warning: {checkpoint_of(run, 6) / SHARD}: its content differs from the manifest's SHA-256; "
        "using step_00000003 instead",
        f"warning: {checkpoint_of(run, 4) / SHARD}: is missing; using step_00000003 instead",
    ]
    exit_code, _, err = nsa("ckpt", "export", checkpoint_of(run, 6), tmp_path / "none.safetensors")
    assert exit_code == 4
    assert f"{checkpoint_of(run, 6) / SHARD}: its content differs" in err
    assert not (tmp_path / "none.safetensors").exists()


def test_an_export_into_a_folder_that_is_not_there_is_refused(whole_run, tmp_path, nsa):
    exit_code, _, err = nsa("ckpt", "export", whole_run, tmp_path / "no" / "out.safetensors")
    assert exit_code == 4
    assert err == f"error: {tmp_path / 'no' / 'out.safetensors'}: cannot be written: No such file or directory\n"


def test_a_pointer_stands_for_the_checkpoint_that_it_names(whole_run, tmp_path, nsa):
    (pointers := tmp_path / FOLDER).mkdir()
    shutil.copytree(checkpoint_of(whole_run, 3), pointers / "step_00000003")
    (pointers / "best").write_text("step_00000003\n")
    (pointers / "latest").write_text("step_00000099\n")
    exit_code, out, _ = nsa("ckpt", "verify", pointers / "best")
    assert (exit_code, out.split(": ")[0]) == (0, str(pointers / "step_00000003"))
    assert nsa("ckpt", "export", pointers / "best", tmp_path / "out")[0] == 0
    assert load_file(tmp_path / "out").keys() == read_weights(pointers / "step_00000003").keys()
    for arguments in (("verify", pointers / "latest"), ("export", pointers / "latest", tmp_path / "none")):
        exit_code, _, err = nsa("ckpt", *arguments)
        assert exit_code == 4
        assert "step_00000099" in err


@pytest.mark.parametrize("target", ["/", ".", "/tmp"])
def test_an_export_onto_a_folder_is_refused(target, whole_run, nsa):
    exit_code, _, err = nsa("ckpt", "export", whole_run, target)
    assert (exit_code, err) == (4, f"error: {target}: cannot be written: Is a directory\n")


def test_the_list_says_what_each_checkpoint_is(whole_run, nsa):
    exit_code, out, err = nsa("ckpt", "list", whole_run)
    assert (exit_code, err) == (0, "")
    lines = [line.split(" | ") for line in out.splitlines()]
    assert [line[0] for line in lines] == ["step_00000006", "step_00000004", "step_00000003"]
    rows = {int(row["step"]): row for row in rows_of(whole_run)}
    for line, step in zip(lines, (6, 4, 3), strict=True):
        assert line[1] == f"{64 * step} tokens"
        assert line[2] == f"loss {float(rows[step]['loss']):.4f}"
        assert line[4] == "single x 1"
    assert lines[0][3] == f"validation {float(rows[6]['val_loss']):.4f}"
    assert lines[1][3] == f"validation {float(rows[3]['val_loss']):.4f}", "the last one before it"
    assert [line[6:] for line in lines] == [["latest, best"], [], []]


def test_the_list_shows_a_damaged_state_beside_the_others(crashed_run, nsa):
    (checkpoint_of(crashed_run, 3) / "state.json").write_text("[]")
    exit_code, out, _ = nsa("ckpt", "list", crashed_run)
    assert exit_code == 0
    newest, damaged, oldest = out.splitlines()
    assert newest.startswith("step_00000004 | 256 tokens | ")
    assert damaged.startswith("step_00000003 | cannot be read: ")
    assert damaged.endswith(" | best")
    assert oldest.startswith("step_00000002 | 128 tokens | ")


def test_undamaged_checkpoints_verify_one_by_one_and_all_together(whole_run, nsa):
    exit_code, out, err = nsa("ckpt", "verify", whole_run)
    assert (exit_code, err) == (0, "")
    assert [line.split(": ")[0] for line in out.splitlines()] == [str(checkpoint_of(whole_run, n)) for n in (6, 4, 3)]
    assert all(re.search(r": ok, 4 files, [\d,]+ bytes$", line) for line in out.splitlines())
    exit_code, one, _ = nsa("ckpt", "verify", checkpoint_of(whole_run, 4))
    assert exit_code == 0
    assert one == out.splitlines(keepends=True)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_verifying_a_damaged_checkpoint_names_the_file_and_exits_with_4(kind, crashed_run, nsa):
    damaged = checkpoint_of(crashed_run, 3) / kind
    flip_byte(damaged, 0.5)
    for source in (crashed_run, damaged.parent):
        exit_code, out, err = nsa("ckpt", "verify", source)
        assert exit_code == 4
        (line,) = err.splitlines()
        assert line.startswith(f"error: {damaged}: ")
        assert "step_00000003" not in out, "a damaged checkpoint is not reported as ok"
    assert nsa("ckpt", "verify", checkpoint_of(crashed_run, 4))[0] == 0


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_called_damaged(crashed_run, nsa, monkeypatch):
    real, deleted = format.verify, checkpoint_of(crashed_run, 2)

    def while_retention_deletes(path):
        if path == deleted:
            path.rename(path.with_name(f".writing-deleted-{path.name}"))
        return real(path)

    monkeypatch.setattr(format, "verify", while_retention_deletes)
    exit_code, out, err = nsa("ckpt", "verify", crashed_run)
    assert (exit_code, err) == (0, "")
    assert out.endswith(f"{deleted}: deleted by the run while it was read\n")


@pytest.mark.parametrize("place", [0.3, 0.9])
def test_weights_that_changed_after_they_were_written_are_not_loaded(place, whole_run, tmp_path):
    path = Path(shutil.copy(whole_run / "model.safetensors", tmp_path))
    config = small()
    model = build_model(config, 256, seed=0)
    load_weights(model, path)
    assert list(read_tensors(path))
    flip_byte(path, place)
    for use in (lambda: load_weights(model, path), lambda: export_weights(path, tmp_path / "out.safetensors")):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: (its content differs|is no whole)"):
            use()
    assert not (tmp_path / "out.safetensors").exists()


def test_weights_of_other_programs_and_of_earlier_versions_have_no_checksum_and_load(whole_run, tmp_path):
    save_file(load_file(whole_run / "model.safetensors"), tmp_path / "other.safetensors")
    assert read_tensors(tmp_path / "other.safetensors").keys() == read_tensors(whole_run / "model.safetensors").keys()


def test_every_damaged_checkpoint_is_named(crashed_run, nsa):
    (checkpoint_of(crashed_run, 2) / SHARD).unlink()
    (checkpoint_of(crashed_run, 4) / MANIFEST_FILE).unlink()
    exit_code, out, err = nsa("ckpt", "verify", crashed_run)
    assert exit_code == 4
    assert err.splitlines() == [
        f"error: {checkpoint_of(crashed_run, 4)}: has no manifest.json; the checkpoint is incomplete",
        f"error: {checkpoint_of(crashed_run, 2) / SHARD}: is missing",
    ]
    assert out.startswith(f"{checkpoint_of(crashed_run, 3)}: ok")


@pytest.mark.parametrize("command", ["list", "verify", "export"])
@pytest.mark.parametrize("folder", ["empty", "missing", "a file", "emptied"])
def test_a_folder_without_checkpoints_exits_with_4(command, folder, tmp_path, nsa):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("")
    (tmp_path / "emptied" / FOLDER).mkdir(parents=True)
    target = [tmp_path / "out.safetensors"] if command == "export" else []
    exit_code, out, err = nsa("ckpt", command, tmp_path / folder, *target)
    assert (exit_code, out) == (4, "")
    assert err.startswith(f"error: {tmp_path / folder}: {'cannot be read' if folder == 'missing' else 'contains no '}")
    assert "Traceback" not in err
    assert not (tmp_path / "out.safetensors").exists()


def damage_index(checkpoint):
    content = json.loads((checkpoint / INDEX_FILE).read_text())
    content["tensors"]["model/norm.weight"]["dtype"] = "bfloat16"
    (checkpoint / INDEX_FILE).write_text(json.dumps(content))


def damage_state(checkpoint):
    (checkpoint / STATE_FILE).write_text("{}")


def damage_random_state(checkpoint):
    (checkpoint / RANDOM_FILE).write_text("[")


@pytest.mark.parametrize("damage", [damage_index, damage_state, damage_random_state])
def test_a_checkpoint_whose_manifest_fits_but_that_cannot_be_loaded_is_named(damage, crashed_run, nsa):
    checkpoint = checkpoint_of(crashed_run, 4)
    damage(checkpoint)
    sign_again(checkpoint)
    exit_code, out, err = nsa("ckpt", "verify", crashed_run)
    assert exit_code == 4
    assert err.startswith(f"error: {checkpoint}")
    assert len(out.splitlines()) == 2, "the others are undamaged"


@pytest.mark.parametrize("source", ["checkpoint", "run with checkpoints only", "finished run", "file", "exported"])
def test_a_run_starts_from_the_weights_of(source, whole_run, tmp_path, nsa):
    paths = {
        "checkpoint": checkpoint_of(whole_run, 6),
        "run with checkpoints only": without_weights(whole_run, tmp_path / "unfinished"),
        "finished run": whole_run,
        "file": whole_run / "model.safetensors",
        "exported": tmp_path / "exported.safetensors",
    }
    nsa("ckpt", "export", whole_run, paths["exported"])
    train(small(f"train.init_from={paths[source]}", "train.lr=1e-30", "train.steps=1"), tmp_path / "run")
    own = load_file(whole_run / "model.safetensors")
    begun = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(begun[name], own[name]) for name in own), "a rate of 1e-30 moves nothing"
    assert rows_of(tmp_path / "run")[-1]["val_loss"] == rows_of(whole_run)[-1]["val_loss"]


def test_a_run_starts_from_a_checkpoint_with_a_tied_head(tmp_path):
    train(small("model.tied_head=true", "train.steps=2"), tmp_path / "first")
    train(
        small("model.tied_head=true", "train.lr=1e-30", f"train.init_from={checkpoint_of(tmp_path / 'first', 2)}"),
        tmp_path / "second",
    )
    own = load_file(tmp_path / "first" / "model.safetensors")
    begun = load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.equal(begun[name], own[name]) for name in own)


def test_a_head_of_its_own_is_not_loaded_into_a_tied_one(whole_run):
    """It would replace the embedding."""
    model = build_model(small("model.tied_head=true"), 256, seed=0)
    before = model.embedding.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"does not fit this model: it also has head\.weight;"):
        load_weights(model, whole_run / "model.safetensors")
    assert torch.equal(model.embedding.weight, before)


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    train(small("model.attention=dense", "model.n_layers=2", "train.steps=2"), folder)
    return folder


@pytest.mark.parametrize("source", [".", "checkpoints/step_00000002"])
@pytest.mark.parametrize("kind", ["msa", "nsa"])
def test_a_sparse_model_starts_from_a_dense_run(kind, source, dense_run):
    layers = ["model.n_layers=2", f"model.layer_pattern=[dense,{kind}]"]
    sizes = ["msa.block=16", "msa.num_selected=2"] if kind == "msa" else ["nsa.shared_kv=true"]
    fresh = build_model(small(*layers, *sizes), 256, seed=0)
    model = build_state(small(*layers, *sizes, f"train.init_from={dense_run / source}"), ByteTokenizer()).model
    dense = build_model(small("model.attention=dense", "model.n_layers=2"), 256, seed=0)
    load_weights(dense, dense_run / "model.safetensors")
    tokens = torch.randint(0, 256, (1, 32))
    with torch.no_grad():
        got, want, other = (some(tokens).log_softmax(-1) for some in (model, dense, fresh))
    far = (other - want).abs().max()
    assert (got - want).abs().max() < (1e-5 if kind == "msa" else 0.5 * far)
    own = {name: p for name, p in model.named_parameters() if ".index_" in name}
    assert all(p.equal(fresh.get_parameter(name)) for name, p in own.items()), "the index starts as in a new model"


def test_a_sparse_layer_that_lost_a_tensor_is_not_taken_for_a_dense_one(tmp_path):
    config = small("model.attention=msa", "msa.block=16", "msa.num_selected=1")
    tensors = dict(build_model(config, 256, seed=0).named_parameters())
    del tensors["blocks.0.attention.index_k.weight"]
    write_weights(tmp_path / "weights.safetensors", tensors, step=1)
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*it lacks blocks\.0\.attention\.index_k\.weight;"):
        build_state(
            small("model.attention=msa", f"train.init_from={tmp_path / 'weights.safetensors'}"), ByteTokenizer()
        )


def test_starting_from_a_damaged_checkpoint_is_refused(crashed_run, tmp_path):
    damaged = checkpoint_of(crashed_run, 4)
    flip_byte(damaged / SHARD, 0.5)
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*shard_rank0\.safetensors: its content differs"):
        train(small(f"train.init_from={damaged}"), tmp_path / "run")


WRONG_MODELS = {
    "model.mlp_dim=48": r"model/blocks\.0\.mlp\.\w+\.weight is \[",
    "model.n_layers=2": r"it lacks model/blocks\.1\.",
    "model.tied_head=true": r"it also has model/head\.weight;",
}


@pytest.mark.parametrize("change", WRONG_MODELS)
def test_starting_from_a_checkpoint_of_another_model_names_the_tensor(change, whole_run, tmp_path):
    with pytest.raises(CheckpointError, match=rf"train\.init_from: .*{WRONG_MODELS[change]}"):
        train(small(change, f"train.init_from={checkpoint_of(whole_run, 6)}"), tmp_path / "run")
    assert not (tmp_path / "run" / "training.csv").exists()


def test_of_a_run_that_was_resumed_after_its_end_the_newest_checkpoint_counts(whole_run, tmp_path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    assert find_weights(run) == run / "model.safetensors"
    train_until(2, run, "train.steps=12", accept_changes=True)
    assert (run / "model.safetensors").exists()
    assert find_weights(run) == checkpoint_of(run, 8)
    damaged = shutil.copytree(run, tmp_path / "damaged")
    flip_byte(checkpoint_of(damaged, 8) / SHARD, 0.5)
    with pytest.warns(UserWarning, match=r"step_00000008.*its content differs"):
        found = find_weights(damaged)
    assert found == damaged / "model.safetensors", "an older checkpoint is not newer than it"
    train(small("train.steps=12"), run)
    assert find_weights(run) == run / "model.safetensors"


def test_the_list_shows_a_checkpoint_from_before_the_first_step(tmp_path, nsa):
    state = build_state(small(), ByteTokenizer())
    saver = Saver(tmp_path / FOLDER, 2, None)
    saver.begin(snapshot(state, is_best=False))
    assert saver.finish() is None
    _, out, _ = nsa("ckpt", "list", tmp_path)
    assert out.startswith("step_00000000 | 0 tokens | loss - | validation - | single x 1 | ")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc/self/status")
def test_weights_are_written_without_a_second_copy_in_memory(tmp_path):
    writer = warm.start("tests.checkpoint.writer", str(tmp_path / "model.safetensors"), env=environment())
    (ended,) = wait_all([writer])
    size, more = map(int, ended.output.split())
    assert more < 0.5 * size
    assert len(read_tensors(tmp_path / "model.safetensors")) == 16
