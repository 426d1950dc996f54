"""A NaN in a step: the weights do not move, the step can be looked at again, and the run stops or leaves it out."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import nsa.train.loop
from nsa.checkpoint.export import read_weights
from nsa.checkpoint.format import BEST, FOLDER, read_pointer
from nsa.errors import CheckpointError, NumericsError
from nsa.train import train
from nsa.train.checkpointing import Checkpointing
from nsa.train.nonfinite import reproduce
from tests.checkpoint.helpers import (
    assert_same_run,
    checkpoint_of,
    contents_of,
    faults_armed,
    incidents_of,
    metrics_of,
    rows_of,
    same_weights,
    saved_steps,
    small,
    train_until,
)

TOO_FAST = ("train.lr=1e30", "checkpoint.every=1")  # the first step ruins the weights, the second finds out
SKIP = ("train.non_finite=skip", "checkpoint.every=1", "checkpoint.keep=9")


def test_a_run_that_blows_up_stops_before_the_weights_move_and_names_the_dump(tmp_path):
    with pytest.raises(NumericsError, match=r"step 2: the loss is nan") as raised:
        train(small(*TOO_FAST), tmp_path)
    assert raised.value.exit_code == 5
    place = tmp_path / "nonfinite" / "step_00000002"
    assert str(place) in str(raised.value)
    assert {path.name for path in place.iterdir()} == {"report.json", "weights.safetensors", "batch_rank0.safetensors"}
    report = json.loads((place / "report.json").read_text())
    assert (report["step"], report["loss"], report["world_size"]) == (2, "nan", 1)
    metrics = metrics_of(tmp_path)
    assert metrics.items() >= {"status": "failed", "exit_code": 5, "reason": str(raised.value), "steps": 1}.items()
    assert (metrics["incidents"], metrics["telemetry_failures"]) == (1, 0)
    assert [row["step"] for row in rows_of(tmp_path)] == ["1"]
    (incident,) = incidents_of(tmp_path)
    assert incident["kind"] == "non_finite"
    assert saved_steps(tmp_path) == [1]
    dumped, saved = load_file(place / "weights.safetensors"), read_weights(checkpoint_of(tmp_path, 1))
    assert dumped.keys() == saved.keys()
    assert all(torch.equal(dumped[name], saved[name]) for name in saved), "the weights before the step"


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_dumped_step_can_be_run_again_and_is_not_finite_again(micro_batch, tmp_path):
    with pytest.raises(NumericsError):
        train(small(*TOO_FAST, f"train.micro_batch={micro_batch}"), tmp_path)
    again = reproduce(tmp_path / "nonfinite" / "step_00000002")
    assert not again.updated
    assert not math.isfinite(again.loss)


def test_a_loss_that_is_not_finite_is_no_overflow_of_the_scale_of_fp16(tmp_path):
    with faults_armed("step.loss:nan:hit=3"), pytest.raises(NumericsError, match=r"step 3: the loss is nan"):
        train(small("runtime.precision=fp16"), tmp_path)
    assert [incident["kind"] for incident in incidents_of(tmp_path)] == ["non_finite"]


def test_an_index_loss_that_is_not_finite_is_no_overflow_either(tmp_path, monkeypatch):
    taken = nsa.train.loop.train_step

    def ruined(state, *arguments, **options):
        if state.progress.step == 2:
            torch.nn.init.constant_(state.index_parameters[0], math.nan)
        return taken(state, *arguments, **options)

    monkeypatch.setattr(nsa.train.loop, "train_step", ruined)
    msa = ("model.attention=msa", "msa.block=16", "msa.num_selected=1", "msa.warmup_steps=6")  # attention is dense
    with pytest.raises(NumericsError, match="step 3"):
        train(small(*msa, "runtime.precision=fp16"), tmp_path)


def test_the_dump_holds_the_step_and_not_another(tmp_path, whole_run):
    """A healthy step that is called a NaN: run again from its dump, it gives the very loss of the healthy run."""
    with faults_armed("step.loss:nan:hit=4"), pytest.raises(NumericsError):
        train(small(), tmp_path)
    again = reproduce(tmp_path / "nonfinite" / "step_00000004")
    row = rows_of(whole_run)[3]
    assert (repr(again.loss), repr(again.grad_norm)) == (row["loss"], row["grad_norm"])


def test_a_stopped_run_that_is_restarted_reaches_the_same_step(tmp_path):
    for _ in range(2):
        with pytest.raises(NumericsError, match="step 2: the loss is nan"):
            train(small(*TOO_FAST), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == ["1"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("report.json", r"report\.json"),
        ("batch_rank0.safetensors", r"batch_rank0\.safetensors"),
        ("weights.safetensors", "has no weights"),
    ],
)
def test_a_dump_that_is_not_whole_says_so(missing, message, tmp_path):
    with pytest.raises(NumericsError):
        train(small(*TOO_FAST), tmp_path)
    place = tmp_path / "nonfinite" / "step_00000002"
    (place / missing).unlink()
    with pytest.raises(CheckpointError, match=message):
        reproduce(place)


@pytest.mark.parametrize("report", [[], {"world_size": "two"}, {"world_size": 0}])
def test_a_report_of_another_form_says_so(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(CheckpointError, match="not a complete dump of a step"):
        reproduce(tmp_path)


def test_a_run_that_stops_has_as_long_as_other_runs_to_complete_its_save(tmp_path, monkeypatch):
    waited, limits = Checkpointing.wait, []

    def wait(checkpointing):
        limits.append(checkpointing.monitor.watchdog.limit_s)
        waited(checkpointing)

    monkeypatch.setattr(Checkpointing, "wait", wait)
    config = small("checkpoint.background=true", "telemetry.watchdog_floor_s=60", "telemetry.watchdog_first_step_s=500")
    with faults_armed("save.shard:sleep:seconds=1,step.loss:nan:hit=3"), pytest.raises(NumericsError):
        train(config, tmp_path)
    assert (limits, saved_steps(tmp_path)) == ([500.0], [2])


def test_skipping_leaves_out_exactly_the_step_that_was_not_finite(tmp_path, whole_run):
    with faults_armed("step.loss:nan:hit=3"):
        train(small(*SKIP), tmp_path)
    rows = rows_of(tmp_path)
    assert [row["skipped"] for row in rows] == ["0", "0", "1", "0", "0", "0"]
    assert [row["step"] for row in rows if not math.isfinite(float(row["loss"]))] == ["3"]
    assert rows[:2] == rows_of(whole_run)[:2]
    assert [row["lr"] for row in rows] == [row["lr"] for row in rows_of(whole_run)], "the schedule goes on"
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in rows_of(whole_run)], "so does the data"
    before, after = contents_of(checkpoint_of(tmp_path, 2)), contents_of(checkpoint_of(tmp_path, 3))
    moved = [name for name, value in before.items() if torch.is_tensor(value) and not torch.equal(value, after[name])]
    assert moved == [], "neither weights nor optimizer"
    assert not same_weights(checkpoint_of(tmp_path, 3), checkpoint_of(tmp_path, 4))
    assert metrics_of(tmp_path)["skipped_steps"] == 1
    assert [incident["kind"] for incident in incidents_of(tmp_path)] == ["non_finite"]


def test_a_run_with_a_step_left_out_resumes_to_the_same_bits(tmp_path):
    with faults_armed("step.loss:nan:hit=3"):
        train(small(*SKIP), tmp_path / "whole")
    train_until(4, tmp_path / "cut", *SKIP, also="step.loss:nan:hit=3")
    train(small(*SKIP), tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_more_steps_left_out_than_allowed_end_the_run(tmp_path):
    with faults_armed("step.loss:nan:hit=2:times=2"):
        train(small(*SKIP, "train.max_skips=2"), tmp_path / "two")
    assert metrics_of(tmp_path / "two")["skipped_steps"] == 2
    with (
        faults_armed("step.loss:nan:hit=2:times=3"),
        pytest.raises(NumericsError, match=r"step 4: .*3 steps were skipped, train\.max_skips"),
    ):
        train(small(*SKIP, "train.max_skips=2"), tmp_path / "three")
    assert metrics_of(tmp_path / "three")["exit_code"] == 5
    weights = [path.parent.name for path in sorted((tmp_path / "three").rglob("weights.safetensors"))]
    assert weights == ["step_00000002", "step_00000003", "step_00000004"]


def test_the_number_of_steps_left_out_is_remembered_over_an_interruption(tmp_path):
    train_until(3, tmp_path, *SKIP, "train.max_skips=1", also="step.loss:nan:hit=2")
    with faults_armed("step.loss:nan"), pytest.raises(NumericsError, match=r"step 4: .*2 steps were skipped"):
        train(small(*SKIP, "train.max_skips=1"), tmp_path)


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path):
    train(small(*TOO_FAST, "train.steps=1"), tmp_path)
    assert rows_of(tmp_path)[0]["val_loss"] == "nan"
    assert read_pointer(tmp_path / FOLDER, BEST) is None
    assert metrics_of(tmp_path)["best_val_loss"] is None
