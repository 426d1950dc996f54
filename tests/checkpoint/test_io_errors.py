"""A disk that is full or broken: training goes on, the save is tried again, and three failures end the run.

Retries follow at once here, except where a clock is injected.
"""

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nsa.checkpoint
from nsa.checkpoint.format import FOLDER, LATEST, committed, read_pointer, verify
from nsa.checkpoint.save import Saver
from nsa.errors import CheckpointError
from nsa.parallel.world import World
from nsa.train import checkpointing, train
from nsa.train.checkpointing import Checkpointing
from nsa.train.state import Progress
from tests import warm
from tests.checkpoint.helpers import (
    SHARD,
    SMALL,
    checkpoint_of,
    faults_armed,
    incidents_of,
    metrics_of,
    rows_of,
    saved_steps,
    small,
)
from tests.distributed.launching import environment, wait_all
from tests.faults.kills import SAVE_POINTS

NOT_WRITING = {"save.begin", "save.staged"}  # on the training thread, before anything is written
WRITES = [point for point in SAVE_POINTS if point not in NOT_WRITING]
ERRORS = {"enospc": "No space left on device", "eio": "Input/output error"}
ONE_VALIDATION = "train.eval_every=0"  # after the last step: saves are those of every second step


class Clock:
    """Moves when somebody waits."""

    def __init__(self):
        self.now, self.pauses = 1000.0, []

    def pause(self, seconds):
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(Checkpointing, "clock", staticmethod(lambda: made.now))
    monkeypatch.setattr(Checkpointing, "pause", staticmethod(made.pause))
    return made


@pytest.fixture(autouse=True)
def _retry_at_once(request, monkeypatch):
    if "clock" not in request.fixturenames:
        monkeypatch.setattr(checkpointing, "RETRY_S", (0.0, 0.0))
        monkeypatch.setattr(Checkpointing, "pause", staticmethod(lambda seconds: None))


def test_storage_that_is_full_for_a_moment_does_not_end_the_run(tmp_path, undisturbed, clock):
    with faults_armed("save.own:enospc:times=5"):
        train(small(ONE_VALIDATION, "checkpoint.every=1"), tmp_path)
    assert len(incidents_of(tmp_path)) == 5
    assert metrics_of(tmp_path)["status"] == "done"
    assert saved_steps(tmp_path)[-1] == 6, "the last one, which was saved when there was room again"
    assert rows_of(tmp_path) == rows_of(undisturbed)


def test_a_failed_save_is_retried_after_a_minute_without_another_coming_due(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("nsa.train.loop.learning_rate", lambda step, config: clock.pause(30.0) or 1e-3)
    with faults_armed("save.own:enospc"):
        train(small(ONE_VALIDATION, "checkpoint.every=4", "train.steps=10", "checkpoint.keep=9"), tmp_path)
    assert saved_steps(tmp_path) == [6, 8, 10]
    assert len(incidents_of(tmp_path)) == 1


def test_three_failures_that_end_a_run_lie_minutes_apart(tmp_path, clock):
    began = clock.now
    with faults_armed("save.own:enospc:times=9999"), pytest.raises(CheckpointError, match="3 times in a row"):
        train(small(ONE_VALIDATION), tmp_path)
    assert len(rows_of(tmp_path)) == 6, "training went on"
    assert clock.now - began >= 180
    assert max(clock.pauses) <= 16, "meanwhile it tries often: a scheduler that asked it to stop does not wait long"


def test_a_save_that_failed_leaves_no_file_on_a_full_disk(tmp_path):
    """Else it would take the last room, and the summary could not say why the run ended."""
    with faults_armed("save.own:enospc:times=9999"), pytest.raises(CheckpointError, match="3 times in a row"):
        train(small(ONE_VALIDATION), tmp_path)
    assert not any((tmp_path / FOLDER).iterdir())
    assert "No space left" in metrics_of(tmp_path)["reason"]


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(tmp_path, undisturbed, monkeypatch):
    """As on NFS while somebody reads one, or in a folder of another user."""

    def refuse(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr("nsa.checkpoint.save.shutil", SimpleNamespace(rmtree=refuse))
    train(small(ONE_VALIDATION, "train.steps=12", "checkpoint.every=1"), tmp_path)
    assert metrics_of(tmp_path)["status"] == "done"
    assert saved_steps(tmp_path)[-2:] == [11, 12]
    incidents = incidents_of(tmp_path)
    assert {incident["kind"] for incident in incidents} == {"not_deleted"}
    assert "Directory not empty; delete it by hand" in incidents[0]["message"]
    monkeypatch.undo()
    train(small(ONE_VALIDATION, "train.steps=13", "checkpoint.every=1"), tmp_path, accept_changes=True)
    assert not list((tmp_path / FOLDER).glob(".writing-*")), "deleted by a later save"


@pytest.mark.parametrize("every", [4, *(pytest.param(steps, marks=pytest.mark.long) for steps in (1, 30))])
def test_failures_of_saves_in_the_background_lie_minutes_apart_too(every, tmp_path, clock, monkeypatch):
    """Each is under way for three steps: a vote that came meanwhile starts no other, and they end the run all the same
    where one is always under way."""
    began, ended, begin, finish = [], [], Saver.begin, Saver.finish
    monkeypatch.setattr(Saver, "begin", lambda *args, **more: began.append(clock.now) or begin(*args, **more))
    monkeypatch.setattr(Saver, "finish", lambda saver: ended.append(clock.now) or finish(saver))
    monkeypatch.setattr(Saver, "written", property(lambda saver: saver.busy and clock.now >= began[-1] + 15.0))
    monkeypatch.setattr("nsa.train.loop.learning_rate", lambda step, config: clock.pause(5.0) or 1e-3)
    options = ("checkpoint.background=true", f"checkpoint.every={every}", "train.steps=200")
    with faults_armed("save.own:enospc:times=9999"), pytest.raises(CheckpointError, match="3 times in a row"):
        train(small(ONE_VALIDATION, *options), tmp_path)
    assert len(rows_of(tmp_path)) < 100, "it did not come to the end"
    assert ended[-1] - ended[0] >= 180


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(small(ONE_VALIDATION), folder)
    return folder


def test_every_point_of_a_save_is_tried_here():
    sources = Path(nsa.checkpoint.__file__).parent.glob("*.py")
    points = {name for path in sources for name in re.findall(r'faults\.point\("(save\..+?)"\)', path.read_text())}
    assert points == {*WRITES, *NOT_WRITING}


# Every point with a full disk; what an I/O error makes of it at one of them, and at all in `make test-long`.
FAILURES = [(point, "enospc") for point in WRITES] + [("save.shard", "eio")]
FAILURES += [pytest.param(p, "eio", marks=pytest.mark.long) for p in WRITES if p != "save.shard"]


@pytest.mark.parametrize(("point", "error"), FAILURES)
def test_a_save_that_fails_is_an_incident_and_is_tried_again(point, error, tmp_path, undisturbed):
    with faults_armed(f"{point}:{error}"):
        train(small(ONE_VALIDATION), tmp_path)
    assert rows_of(tmp_path) == rows_of(undisturbed)
    (incident,) = incidents_of(tmp_path)
    failed = 6 if point == "save.best" else 2
    assert incident["kind"] == "save_failed"
    assert f"step {failed} could not be saved" in incident["message"]
    assert ERRORS[error] in incident["message"]
    assert metrics_of(tmp_path)["incidents"] == 1
    if point != "save.best":
        assert 3 in saved_steps(tmp_path), "tried again at the next step"
    for checkpoint in committed(tmp_path / FOLDER):
        verify(checkpoint)
    assert read_pointer(tmp_path / FOLDER, LATEST) == "step_00000006"
    assert not list((tmp_path / FOLDER).glob(".*")), "nothing is left of the failed one"
    assert (tmp_path / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_save_that_fails_in_the_background_does_not_touch_the_numbers(tmp_path, undisturbed):
    with faults_armed("save.shard:eio,save.manifest:enospc"):
        train(small(ONE_VALIDATION, "checkpoint.background=true"), tmp_path)
    assert rows_of(tmp_path) == rows_of(undisturbed)
    assert [incident["kind"] for incident in incidents_of(tmp_path)] == ["save_failed", "save_failed"]
    verify(checkpoint_of(tmp_path, 6))


@pytest.mark.parametrize(("error", "times"), [("enospc", 3), ("eio", 99)])
def test_the_disk_may_fail_twice_in_a_row_but_not_three_times(error, times, tmp_path, undisturbed):
    # The second fault counts from the first save that the first one let through.
    with faults_armed(f"save.own:{error}:times=2,save.own:{error}:hit=2:times=2"):
        train(small(ONE_VALIDATION), tmp_path / "twice")
    assert len(incidents_of(tmp_path / "twice")) == 4, "two failures, a good one, two more"
    assert rows_of(tmp_path / "twice") == rows_of(undisturbed)
    verify(checkpoint_of(tmp_path / "twice", 6))
    with faults_armed(f"save.own:{error}:times={times}"), pytest.raises(CheckpointError, match="3 times in a row"):
        train(small(ONE_VALIDATION), tmp_path / "thrice")


@pytest.mark.parametrize(
    "point",
    [p if p in ("save.shard", "save.rename", "save.best") else pytest.param(p, marks=pytest.mark.long) for p in WRITES],
)
def test_three_failures_in_a_row_end_the_run_and_name_the_last_good_checkpoint(point, tmp_path):
    every_save_is_best = ["train.eval_every=1"] if point == "save.best" else [ONE_VALIDATION]
    with faults_armed(f"{point}:enospc:hit=2:times=3"), pytest.raises(CheckpointError) as raised:
        train(small("train.steps=9", *every_save_is_best), tmp_path)
    message = str(raised.value)
    assert raised.value.exit_code == 4
    assert ERRORS["enospc"] in message
    named = re.search(r"the last good checkpoint: (step_\d{8})$", message)
    assert named is not None, message
    verify(tmp_path / FOLDER / named[1])
    assert [incident["kind"] for incident in incidents_of(tmp_path)] == ["save_failed"] * 3
    steps = 4 if point == "save.best" else 6
    metrics = metrics_of(tmp_path)
    assert metrics.items() >= {"status": "failed", "exit_code": 4, "reason": message, "steps": steps}.items()
    assert (metrics["incidents"], metrics["telemetry_failures"]) == (3, 0)
    assert len(rows_of(tmp_path)) == steps
    assert not (tmp_path / "model.safetensors").exists()


def test_the_same_command_resumes_when_the_disk_works_again(tmp_path, undisturbed):
    with faults_armed("save.shard:enospc:hit=2:times=3"), pytest.raises(CheckpointError, match="step_00000002"):
        train(small(ONE_VALIDATION), tmp_path)
    train(small(ONE_VALIDATION), tmp_path)
    assert rows_of(tmp_path) == rows_of(undisturbed)
    assert (tmp_path / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_run_whose_first_checkpoint_cannot_be_read_back_does_not_claim_that_it_was_saved(tmp_path, monkeypatch):
    """As with a library that reads another form than it writes."""
    index = b'{"version": 1, "tensors": {"x": 1}}'
    monkeypatch.setattr(nsa.checkpoint.storage, "serialize_index", lambda tensors: index)
    with pytest.raises(CheckpointError, match=r"saving failed 3 times.*index\.json: is not the index of a checkpoint"):
        train(small(), tmp_path)
    assert not saved_steps(tmp_path)


def test_only_the_first_checkpoint_of_a_process_is_read_back(tmp_path, monkeypatch):
    """Its index and one shard: a run does not read everything again at every save."""
    read = []
    monkeypatch.setattr(nsa.checkpoint.save, "read_back", lambda folder, shard: read.append((folder.name, shard)))
    train(small(), tmp_path)
    assert read == [(".writing-step_00000002", SHARD)]


def test_a_file_where_the_folder_of_checkpoints_should_be_ends_the_run_with_its_name(tmp_path):
    (tmp_path / FOLDER).write_text("not a folder")
    (tmp_path / ".lock").touch()  # a run was here
    with pytest.raises(CheckpointError, match=r"3 times in a row.*checkpoints.*the last good checkpoint: none"):
        train(small(), tmp_path)
    assert (tmp_path / FOLDER).read_text() == "not a folder"


def test_a_process_that_may_not_write_large_files_ends_with_the_cause_and_no_traceback(tmp_path):
    """A real limit: the shard has 300 kB and cannot be written, training.csv and the rest can."""
    config = tmp_path / "small.yaml"
    config.write_text(json.dumps(SMALL))
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, runpy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "runpy.run_module('tests.faults.impatient', run_name='__main__', alter_sys=True)"
    )
    started = warm.start(str(limited), "train", str(config), f"train.out_dir={tmp_path / 'run'}", env=environment())
    [ended] = wait_all([started], 120)
    assert ended.code == 4, ended.output
    (line,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: saving failed 3 times in a row")
    assert "File too large" in line
    assert "Traceback" not in ended.output
    assert [row["step"] for row in rows_of(tmp_path / "run")] == ["1", "2", "3", "4"]
    assert metrics_of(tmp_path / "run")["exit_code"] == 4
    assert committed(tmp_path / "run" / FOLDER) == []


def test_the_name_of_a_folder_does_not_make_a_failed_save_a_lost_rank(tmp_path):
    root, incidents = tmp_path / "nccl-2.27" / FOLDER, []
    monitor = SimpleNamespace(incident=lambda kind, *_: incidents.append(kind))
    state = SimpleNamespace(config=small(), world=World(torch.device("cpu"), "ddp", size=2), progress=Progress(step=4))
    saving = Checkpointing(state, root, monitor, "step_00000002")
    saving.saver.finish = lambda: f"rank 0: {root / LATEST}: cannot be written: {ERRORS['enospc']}"
    saving._complete()
    assert incidents == ["save_failed"]
