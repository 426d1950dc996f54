"""A checkpoint is there whole or not at all, damage is found, and the last undamaged ones are never deleted."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import nsa.checkpoint.save
from nsa.checkpoint.format import (
    BEST,
    FOLDER,
    LATEST,
    MANIFEST_FILE,
    committed,
    entry_of,
    name_of,
    newest_verified,
    read_manifest,
    read_pointer,
    step_of,
    verify,
)
from nsa.checkpoint.save import NEVER_DELETED, Saver, Snapshot
from nsa.errors import CheckpointError
from nsa.train import train
from tests.checkpoint.helpers import (
    KINDS,
    SHARD,
    assert_same_run,
    checkpoint_of,
    contents_of,
    faults_armed,
    flip_byte,
    incidents_of,
    rows_of,
    saved_steps,
    small,
    train_until,
)


def save(root, step, *, keep=2, is_best=False, saver=None, value=None):
    """One checkpoint, as a process of its own saves it unless a saver is given."""
    tensors = {"model/weight": torch.full((3,), float(step if value is None else value))}
    state = {"version": 1, "progress": {"step": step}}
    saver = saver or Saver(root, keep)
    saver.begin(Snapshot(step, tensors, state, {}, is_best))
    assert saver.finish() is None
    return root / name_of(step)


def steps_in(root):
    return [step_of(path) for path in reversed(committed(root))]


def verifies(checkpoint):
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "first byte flipped": lambda path: flip_byte(path, 0.0),
    "byte in the middle flipped": lambda path: flip_byte(path, 0.5),
    "last byte flipped": lambda path: flip_byte(path, 1.0),
    "cut in half": cut,
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "gone": lambda path: path.unlink(),
}


def test_a_run_leaves_verified_checkpoints_in_the_documented_layout(whole_run):
    root = whole_run / FOLDER
    assert saved_steps(whole_run) == [3, 4, 6]
    assert {path.name for path in root.iterdir()} == {
        "step_00000003",
        "step_00000004",
        "step_00000006",
        "latest",
        "best",
    }
    for checkpoint in committed(root):
        assert {path.name for path in checkpoint.iterdir()} == set(KINDS)
        assert verify(checkpoint) == {name: entry_of(checkpoint / name) for name in KINDS if name != MANIFEST_FILE}
    assert (root / LATEST).read_text() == "step_00000006\n"
    assert (root / BEST).read_text() == "step_00000006\n"


def test_every_file_is_on_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    happened = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: happened.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    monkeypatch.setattr(os, "rename", lambda old, new: (happened.append(f"to {Path(new).name}"), rename(old, new)))
    save(tmp_path, 1)
    named = happened.index("to step_00000001")
    assert set(happened[:named]) >= {*KINDS, ".writing-step_00000001"}
    assert happened[named - 2 : named] == [MANIFEST_FILE, ".writing-step_00000001"], (
        "first the manifest, then the names"
    )
    assert happened[named + 1] == tmp_path.name, "and the new name, before `latest` moves"


def test_latest_and_best_are_the_newest_and_the_one_with_the_lowest_validation_loss(tmp_path):
    too_fast = ("train.lr=1.0", "train.schedule=constant")
    train(small(*too_fast, "train.eval_every=1", "train.steps=4", "checkpoint.every=1"), tmp_path)
    losses = {int(row["step"]): float(row["val_loss"]) for row in rows_of(tmp_path)}
    best = min(losses, key=losses.__getitem__)
    assert best < 4, "the case needs a best that is not the last"
    assert read_pointer(tmp_path / FOLDER, BEST) == name_of(best)
    assert read_pointer(tmp_path / FOLDER, LATEST) == "step_00000004"


@pytest.fixture
def slow_saves(monkeypatch):
    """No save ends before somebody waits for it."""
    prepare = Saver._prepare

    def wait_first(saver, aside):
        assert saver._is_awaited.wait(60)
        prepare(saver, aside)

    monkeypatch.setattr(Saver, "_prepare", wait_first)


def test_every_due_checkpoint_is_written_although_the_one_before_is_not_done(tmp_path, slow_saves, capsys):
    options = ("train.steps=4", "train.eval_every=0", "checkpoint.every=1", "checkpoint.keep=9")
    train(small("checkpoint.background=true", *options), tmp_path)
    assert saved_steps(tmp_path) == [1, 2, 3, 4]
    events = [json.loads(line) for line in (tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()]
    waits = [event for event in events if event["event"] == "save_wait"]
    assert [(wait["step"], wait["writing"]) for wait in waits] == [(2, 1), (3, 2), (4, 3)]
    with (tmp_path / "training.csv").open() as file:
        waited = [float(row["save_wait_s"]) for row in csv.DictReader(file)]
    assert waited[2] >= waits[0]["seconds"] > 0, "the row after the step that waited"
    assert "waited" in capsys.readouterr().out
    assert incidents_of(tmp_path) == []


def test_the_best_is_marked_although_another_save_is_under_way(tmp_path, slow_saves):
    train(small("checkpoint.background=true", "train.steps=3"), tmp_path)  # step 3 is the best, step 2 is being saved
    assert saved_steps(tmp_path) == [2, 3]
    assert read_pointer(tmp_path / FOLDER, BEST) == "step_00000003"


def test_a_run_that_fails_completes_the_save_in_progress(tmp_path, slow_saves):
    config = small("checkpoint.background=true", "train.eval_every=0")
    with faults_armed("step.end:raise:hit=3"), pytest.raises(RuntimeError, match="fault at step"):
        train(config, tmp_path)
    assert saved_steps(tmp_path) == [2]
    train(config, tmp_path)
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2, is_best=step == 2)
    assert steps_in(tmp_path) == [2, 4, 5]
    save(tmp_path, 6, keep=2, is_best=True)
    assert steps_in(tmp_path) == [5, 6], "the old best has no privilege any more"


def test_as_many_as_asked_for_are_kept(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep=4)
    assert steps_in(tmp_path) == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_two_undamaged_ones_stay_when_newer_ones_are_damaged(kind, tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=4)
    for step in (3, 4):
        flip_byte(tmp_path / name_of(step) / kind, 0.5)
    save(tmp_path, 5, keep=2)
    assert steps_in(tmp_path) == [2, 4, 5], "5 and 2 verify, 5 and 4 are the newest"
    assert newest_verified(tmp_path) == (tmp_path / "step_00000005", [])
    flip_byte(tmp_path / "step_00000005" / kind, 0.5)
    save(tmp_path, 6, keep=2)
    undamaged = [step for step in steps_in(tmp_path) if verifies(tmp_path / name_of(step))]
    assert undamaged == [2, 6]
    assert len(undamaged) == NEVER_DELETED


def test_a_resumed_run_does_not_hash_its_checkpoint_again_alone(tmp_path, monkeypatch):
    """All ranks have hashed it together; rank 0 alone could take longer than the others wait."""
    train_until(2, tmp_path)
    hashed = []
    monkeypatch.setattr(nsa.checkpoint.save, "verify", lambda path: hashed.append(path.name) or verify(path))
    train(small(), tmp_path)
    assert hashed == []


def test_leftovers_of_an_interrupted_save_or_deletion_are_removed(tmp_path):
    save(tmp_path, 1)
    for name in (".writing-step_00000002", ".writing-deleted-step_00000000", ".writing-damaged-step_00000001"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    for end in ("0123456789abcdef", "77"):  # as this version and version 0.1 name a pointer that is being written
        (tmp_path / f".{LATEST}.{end}").write_text("step_00000001\n")
    assert steps_in(tmp_path) == [1], "leftovers are no checkpoints"
    save(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000003", LATEST}


def test_saving_a_step_twice_leaves_an_undamaged_checkpoint(tmp_path):
    saver = Saver(tmp_path, 2)
    for _ in range(2):
        save(tmp_path, 1, saver=saver)
    save(tmp_path, 1)
    verify(tmp_path / "step_00000001")
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", LATEST}


@pytest.mark.parametrize("kind", KINDS)
def test_saving_a_step_again_replaces_a_damaged_one(kind, tmp_path):
    checkpoint = save(tmp_path, 1)
    cut(checkpoint / kind)
    save(tmp_path, 1, value=7)
    verify(checkpoint)
    assert torch.equal(contents_of(checkpoint)["model/weight"], torch.full((3,), 7.0))
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", LATEST}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_named_and_passed_over(kind, damage, crashed_run):
    DAMAGE[damage](checkpoint_of(crashed_run, 4) / kind)
    newest, [problem] = newest_verified(crashed_run / FOLDER)
    assert newest == checkpoint_of(crashed_run, 3)
    assert "step_00000004" in problem
    assert kind in problem


def test_no_change_of_a_byte_of_the_manifest_goes_unnoticed(whole_run, tmp_path):
    """It is the one file that nothing else vouches for. The letter e makes a number endless: 18361 to 1e361."""
    checkpoint = shutil.copytree(checkpoint_of(whole_run, 6), tmp_path / "step_00000006")
    path = checkpoint / MANIFEST_FILE
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for changed in {byte ^ 0x01, ord("e")} - {byte}:
            path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            with pytest.raises(CheckpointError):
                read_manifest(checkpoint)
    path.write_bytes(whole)
    verify(checkpoint)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "damage",
    ["byte in the middle flipped", *(pytest.param(d, marks=pytest.mark.long) for d in ("cut in half", "gone"))],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(kind, damage, crashed_run, whole_run):
    DAMAGE[damage](checkpoint_of(crashed_run, 4) / kind)
    train(small(), crashed_run)
    assert_same_run(crashed_run, whole_run)
    (incident,) = incidents_of(crashed_run)
    assert incident["kind"] == "damaged_checkpoint"
    assert "step_00000004" in incident["message"]
    assert kind in incident["message"]
    starts = [json.loads(line) for line in (crashed_run / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [event["from_checkpoint"] for event in starts if event["event"] == "start"] == [None, "step_00000003"]
    assert saved_steps(crashed_run) == [3, 4, 6]
    verify(checkpoint_of(crashed_run, 4))


@pytest.mark.parametrize("pointer", [LATEST, BEST])
@pytest.mark.parametrize("damage", ["byte in the middle flipped", "cut in half", "gone", "points outside"])
def test_a_damaged_pointer_has_no_effect(pointer, damage, crashed_run, whole_run):
    path = crashed_run / FOLDER / pointer
    if damage == "points outside":
        path.write_text("../../elsewhere\n")
    else:
        DAMAGE[damage](path)
    train(small(), crashed_run)
    assert_same_run(crashed_run, whole_run)
    assert incidents_of(crashed_run) == []
    assert read_pointer(crashed_run / FOLDER, pointer) == "step_00000006"


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_deletes_nothing(crashed_run):
    for step in (2, 3, 4):
        cut(checkpoint_of(crashed_run, step) / SHARD)
    before = {path: path.read_bytes() for path in (crashed_run / FOLDER).rglob("*") if path.is_file()}
    rows = rows_of(crashed_run)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole: .*shard_rank0\.s.*--fresh") as raised:
        train(small(), crashed_run)
    assert raised.value.exit_code == 4
    assert {path: path.read_bytes() for path in (crashed_run / FOLDER).rglob("*") if path.is_file()} == before
    assert rows_of(crashed_run) == rows


def test_fresh_trains_anew_over_damaged_checkpoints(crashed_run, whole_run):
    for step in (2, 3, 4):
        cut(checkpoint_of(crashed_run, step) / SHARD)
    train(small(), crashed_run, fresh=True)
    assert_same_run(crashed_run, whole_run)
