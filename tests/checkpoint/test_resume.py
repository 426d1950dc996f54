"""A run that was interrupted goes on as if nothing had been: to the last bit, and only with what it was told."""

import errno
import json
import random
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import nsa.parallel.numerics
import nsa.train.loop
from nsa.checkpoint import format
from nsa.checkpoint.format import BEST, FOLDER, INDEX_FILE, LATEST, MANIFEST_FILE, name_of, read_pointer, shard_file
from nsa.checkpoint.restore import fill, read_random, read_state, saved_shapes
from nsa.data.loader import Loader
from nsa.errors import CheckpointError, ConfigError, LaunchError
from nsa.train import checkpointing, train
from nsa.train.checkpointing import Checkpointing, _changed_rate, _check_changes
from tests.checkpoint.helpers import (
    KINDS,
    SHARD,
    assert_same_contents,
    assert_same_run,
    checkpoint_of,
    contents_of,
    faults_armed,
    forget_generators,
    incidents_of,
    metrics_of,
    rows_of,
    saved_steps,
    sign_again,
    small,
    train_until,
)

INTERRUPTIONS = {
    "before the first step": "step.begin:raise",
    "before anything was saved": "step.begin:raise:hit=2",
    "right after a save": "step.begin:raise:hit=3",
    "after two steps that were not saved": "step.begin:raise:hit=6",
    "in a forward pass": "step.forward:raise:hit=4",
    "between backward and optimizer": "step.backward:raise:hit=5",
    "with all gradients there": "step.optimizer:raise:hit=4",
    "when the weights have just moved": "step.end:raise:hit=6",
    "in a validation": "validate:raise",
    "in the last validation": "validate:raise:hit=2",
    "before a save": "save.begin:raise:hit=3",
    "with a save prepared": "save.staged:raise:hit=4",
}

# Those that tests/faults/test_kills.py also kills a process at.
INTERRUPTIONS_KILLED_TOO = {
    "before anything was saved",
    "after two steps that were not saved",
    "in a forward pass",
    "between backward and optimizer",
    "with all gradients there",
    "in the last validation",
}


def marked(cases, long):
    return [pytest.param(case, marks=pytest.mark.long) if case in long else case for case in cases]


def interrupt(fault, folder, *overrides, **options):
    with faults_armed(fault), pytest.raises(RuntimeError, match="fault at"):
        train(small(*overrides), folder, **options)
    forget_generators()  # the next process knows nothing of this one


@pytest.mark.parametrize("place", marked(INTERRUPTIONS, INTERRUPTIONS_KILLED_TOO))
def test_an_interrupted_run_ends_bit_equal_to_one_that_was_not(place, tmp_path, whole_run):
    interrupt(INTERRUPTIONS[place], tmp_path)
    assert metrics_of(tmp_path)["status"] == "failed"
    train(small(), tmp_path)
    assert_same_run(tmp_path, whole_run)
    assert metrics_of(tmp_path)["status"] == "done"
    assert metrics_of(tmp_path)["best_val_loss"] == metrics_of(whole_run)["best_val_loss"]


def test_a_run_may_be_interrupted_again_and_again(tmp_path, whole_run):
    for steps in (3, 1, 1, 0, 1):
        interrupt(f"step.begin:raise:hit={steps + 1}", tmp_path)
    train(small(), tmp_path)
    assert_same_run(tmp_path, whole_run)


def test_saving_in_the_background_resumes_to_the_same_bits(tmp_path, whole_run):
    options = ("checkpoint.background=true", "checkpoint.every=1")
    interrupt("step.begin:raise:hit=5", tmp_path, *options)
    train(small(*options), tmp_path)
    assert rows_of(tmp_path) == rows_of(whole_run)
    assert (tmp_path / "model.safetensors").read_bytes() == (whole_run / "model.safetensors").read_bytes()


def test_rows_of_steps_that_were_lost_are_cut_and_every_step_is_there_once(tmp_path):
    interrupt("step.begin:raise:hit=6", tmp_path)
    lost = rows_of(tmp_path)
    assert [row["step"] for row in lost] == ["1", "2", "3", "4", "5"]
    with (tmp_path / "training.csv").open("a") as file:
        file.write("6,1234,0.5")  # a row that was being written when the machine went down
    interrupt("step.begin:raise", tmp_path)
    assert rows_of(tmp_path) == lost[:4]
    train(small(), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2", "3", "4", "5", "6"]


VARIANTS = {
    "tied head": ["model.tied_head=true"],
    "one branch, the others frozen": ["nsa.force_branch=cmp"],
    "dense twin": ["model.attention=dense"],
    "Muon": ["train.optimizer=muon"],
    "a pattern of layers with norms, recomputed": [
        "model.n_layers=3",
        "model.layer_pattern=[dense,nsa,window]",
        "model.qk_norm=true",
        "runtime.gradient_checkpointing=selective",
    ],
    "bf16, recomputed, in small pieces": [
        "runtime.precision=bf16",
        "runtime.gradient_checkpointing=block",
        "train.micro_batch=1",
    ],
    "no validation": ["data.validation_fraction=0"],
    "every step saved": ["checkpoint.every=1"],
}


@pytest.mark.parametrize("variant", marked(VARIANTS, {"no validation", "every step saved"}))
def test_every_kind_of_run_resumes_to_the_same_bits(variant, tmp_path, whole_run, monkeypatch):
    # A CPU without bf16 instructions would compute in fp32; so few products may be emulated.
    monkeypatch.setattr(nsa.parallel.numerics, "cpu_has_bf16", lambda: True)
    train(small(*VARIANTS[variant]), tmp_path / "whole")
    interrupt("step.begin:raise:hit=6", tmp_path / "cut", *VARIANTS[variant])
    train(small(*VARIANTS[variant]), tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    if variant.startswith("bf16"):
        rounded, exact = (float(rows_of(run)[0]["loss"]) for run in (tmp_path / "whole", whole_run))
        assert 1e-5 < abs(rounded / exact - 1) < 1e-2, "it was bf16, and not only another order of sums"


def test_frozen_parameters_have_no_optimizer_state_before_and_after(tmp_path):
    train(small("nsa.force_branch=cmp", "train.steps=2"), tmp_path / "cmp")
    train(small("train.steps=2"), tmp_path / "all")
    names, every = (set(saved_shapes(checkpoint_of(tmp_path / run, 2))) for run in ("cmp", "all"))
    assert {n for n in names if n.startswith("model/")} == {n for n in every if n.startswith("model/")}
    frozen = {n for n in every - names if n.startswith("optimizer/")}
    assert frozen, "the case needs a parameter that does not move"
    assert all(n.startswith("optimizer/") for n in every - names)


SCALE = {"enabled": True, "value": 32768.0}


@pytest.mark.parametrize(("before", "after", "value"), [("fp16", "fp32", 1.0), ("fp32", "fp16", 65536.0)])
def test_a_resume_in_another_precision_has_the_scale_of_the_new_one(before, after, value, tmp_path):
    train_until(4, tmp_path, f"runtime.precision={before}")
    train(small(f"runtime.precision={after}"), tmp_path, accept_changes=True)
    assert read_state(checkpoint_of(tmp_path, 6))["loss_scale"]["value"] == value
    norms = [float(row["grad_norm"]) for row in rows_of(tmp_path)]
    assert max(norms) < 10 * min(norms), norms


def test_the_loss_scale_of_fp16_survives(tmp_path):
    overflow = "step.scaled:nan:hit=2"  # the scale halves, and counts its clean steps anew
    with faults_armed(overflow):
        train(small("runtime.precision=fp16"), tmp_path / "whole")
    train_until(5, tmp_path / "cut", "runtime.precision=fp16", also=overflow)
    forget_generators()
    assert read_state(checkpoint_of(tmp_path / "cut", 4))["loss_scale"] == SCALE | {"clean_steps": 2}
    train(small("runtime.precision=fp16"), tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert read_state(checkpoint_of(tmp_path / "cut", 6))["loss_scale"] == SCALE | {"clean_steps": 4}
    assert [row["skipped"] for row in rows_of(tmp_path / "cut")] == ["0", "1", "0", "0", "0", "0"]


def test_all_random_generators_continue_where_they_were(tmp_path, monkeypatch):
    """Nothing in a step draws by chance today, so the rate does here, from each of them."""
    plain = nsa.train.loop.learning_rate

    def drawn(step, config):
        return plain(step, config) * (0.5 + (random.random() + np.random.rand() + torch.rand(()).item()) / 6)

    monkeypatch.setattr(nsa.train.loop, "learning_rate", drawn)
    train(small(), tmp_path / "whole")
    interrupt("step.begin:raise:hit=6", tmp_path / "cut")
    train(small(), tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    early, late = (read_random(checkpoint_of(tmp_path / "cut", step), 0) for step in (4, 6))
    assert all(early[name] != late[name] for name in ("torch", "python", "numpy")), "all of them were drawn"


# What a run was told: the configuration of its checkpoints.


def test_another_configuration_is_refused_and_every_changed_key_is_named(crashed_run):
    before = rows_of(crashed_run), (crashed_run / "config.yaml").read_bytes(), saved_steps(crashed_run)
    changes = {
        "train.lr": ("0.01", "0.005"),
        "train.schedule": ("'cosine'", "'constant'"),
        "nsa.window": ("8", "4"),
        "runtime.precision": ("'auto'", "'bf16'"),
        "parallel.ddp.bucket_mb": ("25", "7"),
        "checkpoint.keep": ("3", "9"),
    }
    with pytest.raises(ConfigError) as raised:
        train(small(*(f"{key}={new}".replace("'", "") for key, (_, new) in changes.items())), crashed_run)
    first, *lines, last = str(raised.value).splitlines()
    assert first == f"{checkpoint_of(crashed_run, 4)}: was saved with another configuration:"
    told = dict(line.strip().split(": ", 1) for line in lines)
    assert told == {key: f"{old} then, {new} now" for key, (old, new) in changes.items()}
    assert "--accept-changes" in last
    assert "--fresh" in last
    assert (rows_of(crashed_run), (crashed_run / "config.yaml").read_bytes(), saved_steps(crashed_run)) == before
    train(small(), crashed_run)  # and the right one still goes on


def test_accepted_changes_are_reported_and_used_from_the_checkpoint_on(crashed_run, whole_run, capsys):
    changes = ("train.lr=5e-3", "train.schedule=constant")
    train(small(*changes), crashed_run, accept_changes=True)
    said = capsys.readouterr().out
    assert "changed train.lr: 0.01 then, 0.005 now" in said
    assert "changed train.schedule: 'cosine' then, 'constant' now" in said
    assert "changed learning rate of step 5: 1.86e-03 then, 5.00e-03 now" in said
    rows = rows_of(crashed_run)
    assert rows[:4] == rows_of(whole_run)[:4]
    assert [row["lr"] for row in rows[4:]] == ["0.005", "0.005"]
    assert yaml.safe_load((crashed_run / "config.yaml").read_text())["train"]["lr"] == 0.005
    assert read_state(checkpoint_of(crashed_run, 6))["config"]["train"]["lr"] == 0.005
    train(small(*changes), crashed_run)
    assert "this run is done (6 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=9", "learning rate of step 5: 1.86e-03 then, 5.50e-03 now"),
        ("train.lr=5e-3", "learning rate of step 5: 1.86e-03 then, 9.30e-04 now"),
        ("train.log_every=3", None),
    ],
)
def test_a_change_that_moves_the_schedule_says_the_old_and_the_new_rate(override, line, crashed_run):
    changes = _check_changes(checkpoint_of(crashed_run, 4), small(override), accept_changes=True)
    assert changes[1:] == ([line] if line else [])


def test_a_rate_that_stays_the_same_is_not_called_changed():
    saved = {"config": small("train.schedule=constant").to_dict()}
    assert _changed_rate(saved, 4, small("train.schedule=constant", "train.steps=9").train) == []
    assert _changed_rate(saved, 4, small("train.schedule=constant", "train.lr=5e-3").train)


def test_a_run_that_was_shortened_below_its_last_step_is_done(tmp_path, capsys):
    train(small(), tmp_path)
    train(small("train.steps=4"), tmp_path, accept_changes=True)
    rows = rows_of(tmp_path)
    capsys.readouterr()
    train(small("train.steps=4"), tmp_path)
    assert "this run is done" in capsys.readouterr().out
    assert rows_of(tmp_path) == rows


def test_a_finished_run_continues_when_more_steps_are_accepted(tmp_path):
    constant = "train.schedule=constant"
    train(small(constant, "train.steps=9"), tmp_path / "nine")
    train(small(constant), tmp_path / "six")
    six = rows_of(tmp_path / "six")
    forget_generators()
    with pytest.raises(ConfigError, match=r"train\.steps: .* holds a finished run"):
        train(small(constant, "train.steps=9"), tmp_path / "six")
    train(small(constant, "train.steps=9"), tmp_path / "six", accept_changes=True)
    assert rows_of(tmp_path / "six")[:6] == six
    assert rows_of(tmp_path / "six") == rows_of(tmp_path / "nine")
    assert (tmp_path / "six" / "model.safetensors").read_bytes() == (
        tmp_path / "nine" / "model.safetensors"
    ).read_bytes()
    assert metrics_of(tmp_path / "six")["steps"] == 9
    one, other = (contents_of(checkpoint_of(tmp_path / run, 9)) for run in ("six", "nine"))
    assert_same_contents(one, other)


def test_another_batch_size_continues_at_the_unread_data(tmp_path, monkeypatch):
    read = []
    plain = Loader.batch
    monkeypatch.setattr(
        Loader,
        "batch",
        lambda self, first, count, stride: read.extend(range(first, first + count)) or plain(self, first, count),
    )
    only_training = ("data.validation_fraction=0", "data.workers=0")  # nothing is read ahead
    train_until(3, tmp_path, *only_training, "checkpoint.every=1")
    assert read == list(range(6))
    read.clear()
    with pytest.raises(ConfigError, match=r"train\.batch_size: 2 then, 5 now"):
        train(small(*only_training, "checkpoint.every=1", "train.batch_size=5"), tmp_path)
    train(small(*only_training, "checkpoint.every=1", "train.batch_size=5"), tmp_path, accept_changes=True)
    assert read == list(range(6, 21)), "three steps of five, none twice and none left out"
    assert [int(row["tokens"]) for row in rows_of(tmp_path)] == [64, 128, 192, 352, 512, 672]
    assert read_state(checkpoint_of(tmp_path, 6))["progress"]["sequences"] == 21


@pytest.mark.parametrize(
    ("before", "after", "tensor"),
    [
        ("model.mlp_dim=64", "model.mlp_dim=48", r"model/blocks\.0\.mlp\.\w+\.weight is \[.*64.*\] in the checkpoint"),
        ("model.n_layers=1", "model.n_layers=2", r"it lacks model/blocks\.1\."),
        ("model.n_layers=2", "model.n_layers=1", r"it also has model/blocks\.1\."),
        ("model.tied_head=false", "model.tied_head=true", r"it also has model/head\.weight;"),
        ("model.tied_head=true", "model.tied_head=false", r"it lacks model/head\.weight;"),
    ],
)
def test_a_model_of_another_size_cannot_be_accepted_and_the_tensor_is_named(before, after, tensor, tmp_path):
    train_until(3, tmp_path, before)
    with pytest.raises(CheckpointError, match=tensor) as raised:
        train(small(after), tmp_path, accept_changes=True)
    assert raised.value.exit_code == 4
    assert len(rows_of(tmp_path)) == 3, "nothing was cut"
    train(small(before), tmp_path)
    assert metrics_of(tmp_path)["status"] == "done"


def test_fresh_starts_over_and_the_old_checkpoints_are_gone(crashed_run, whole_run):
    train_until(1, crashed_run, fresh=True)
    assert saved_steps(crashed_run) == []
    assert not (crashed_run / FOLDER / LATEST).exists()
    assert not (crashed_run / FOLDER / BEST).exists()
    assert rows_of(crashed_run) == rows_of(whole_run)[:1]
    train(small(), crashed_run)
    assert_same_run(crashed_run, whole_run)


def test_fresh_takes_any_configuration(crashed_run):
    train(small("model.n_layers=2", "train.steps=2"), crashed_run, fresh=True)
    assert saved_steps(crashed_run) == [2]
    assert len(rows_of(crashed_run)) == 2


def test_a_finished_run_started_again_says_so_and_touches_nothing(whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    for options in ({}, {"accept_changes": True}):
        train(small(), folder, **options)
        assert f"{folder}: this run is done (6 steps)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_may_be_moved_as_a_whole(finished, tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    if finished:
        train(small(f"train.out_dir={old}"), old)
    else:
        train_until(5, old, f"train.out_dir={old}")
    shutil.move(old, new)
    train(small(f"train.out_dir={new}"), new)
    said = capsys.readouterr().out
    assert ("this run is done (6 steps)" if finished else f"resume  {name_of(4)}: step 4 of 6 is done") in said
    assert metrics_of(new)["status"] == "done"


def test_a_kill_before_the_mark_of_the_best_does_not_lose_it(tmp_path):
    train_until(3, tmp_path)
    assert read_pointer(tmp_path / FOLDER, BEST) == name_of(3)
    (tmp_path / FOLDER / BEST).write_text(f"{name_of(2)}\n")  # as a kill leaves it when the checkpoint has its name
    train_until(1, tmp_path)  # one more
    assert read_pointer(tmp_path / FOLDER, BEST) == name_of(3)


def test_the_best_is_marked_when_its_save_is_tried_again(whole_run, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointing, "pause", staticmethod(lambda seconds: None))
    with faults_armed("save.own:enospc:hit=4"):
        train(small(), tmp_path)
    (incident,) = incidents_of(tmp_path)
    assert "step 6 could not be saved" in incident["message"]
    assert read_pointer(tmp_path / FOLDER, BEST) == read_pointer(whole_run / FOLDER, BEST) == name_of(6)


def test_a_run_resumes_without_the_weights_it_started_from(whole_run, tmp_path):
    source = shutil.copytree(whole_run, tmp_path / "source")
    train_until(3, tmp_path / "run", f"train.init_from={source}")
    shutil.rmtree(source)
    train(small(f"train.init_from={source}"), tmp_path / "run")
    assert metrics_of(tmp_path / "run")["status"] == "done"
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*No such file"):
        train(small(f"train.init_from={source}"), tmp_path / "run", fresh=True)


def test_fresh_says_what_it_cannot_remove_and_the_old_run_does_not_come_back(crashed_run, monkeypatch):
    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path / "state.json"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(LaunchError, match=r"checkpoints: cannot be moved to .*Operation not permitted; look"):
            train(small(), crashed_run, fresh=True)
    assert saved_steps(crashed_run) == []
    train_until(1, crashed_run)
    assert rows_of(crashed_run)[0]["step"] == "1"
    assert not (crashed_run / ".removed").exists()


@pytest.fixture
def hashed(monkeypatch):
    """The files that are hashed, each with whether the other ranks wait for this one meanwhile."""
    found, waiting, entry_of, first = [], [], format.entry_of, checkpointing.on_first_rank

    def on_first_rank(*call):
        waiting.append(call)
        try:
            return first(*call)
        finally:
            waiting.pop()

    monkeypatch.setattr(format, "entry_of", lambda path: found.append((path.name, bool(waiting))) or entry_of(path))
    monkeypatch.setattr(checkpointing, "on_first_rank", on_first_rank)
    return found


def test_no_rank_waits_while_another_hashes_the_checkpoint(crashed_run, hashed):
    train(small(), crashed_run)
    assert sorted(hashed[:4]) == [(name, False) for name in sorted(KINDS) if name != MANIFEST_FILE]


def test_a_rank_hashes_the_shards_that_it_reads(crashed_run):
    """The checkpoint becomes one of two ranks: the first wrote the model, the second wrote the optimizer."""
    checkpoint = checkpoint_of(crashed_run, 4)
    # Copies: safetensors 0.5 maps the file, which is overwritten below.
    tensors = {name: tensor.clone() for name, tensor in load_file(checkpoint / SHARD).items()}
    index = json.loads((checkpoint / INDEX_FILE).read_text())
    model = {name: tensor for name, tensor in tensors.items() if name.startswith(format.MODEL)}
    optimizer = {name: tensor for name, tensor in tensors.items() if name not in model}
    for file, part in ((SHARD, model), (shard_file(1), optimizer)):
        save_file(part, checkpoint / file)
        for name in part:
            index["tensors"][name]["chunks"][0]["file"] = file
    (checkpoint / INDEX_FILE).write_text(json.dumps(index))
    sign_again(checkpoint)
    read = []
    fill(dict(model), checkpoint, check_files=read.append)
    fill(dict(tensors), checkpoint, check_files=read.append)
    assert read == [{SHARD}, {SHARD, shard_file(1)}]
