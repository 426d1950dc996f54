"""What a run leaves in its folder besides numbers: its environment, events, curves and profiles."""

import errno
import json
import sys
import time
import types

import pytest

from nsa.errors import LaunchError, NumericsError
from nsa.record.events import EventStream, HeartbeatSink
from nsa.record.sinks import TableSink, TensorBoard
from nsa.run_folder import TRAINING, make_event
from nsa.train import train
from tests.train.test_training import rows_of, tiny


def test_env_json_records_configuration_versions_and_hardware(tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_FORCE_BRANCH", "win")
    train(tiny(), tmp_path)
    told = json.loads((tmp_path / "env.json").read_text())
    assert told["config"]["train"]["steps"] == 6
    assert told["variables"]["NSA_FORCE_BRANCH"] == "win"
    assert told["packages"]["torch"]
    assert told["world_size"] == 1
    assert told["strategy"] == "single"
    assert isinstance(told["command"], list)
    assert f"cost    {told['flops_per_token']:.2e} FLOPs per token, " in (tmp_path / "run.log").read_text()
    assert f"model   {told['parameters']:,} parameters, " in (tmp_path / "run.log").read_text()


def test_profiled_steps_leave_a_trace_and_the_ten_costliest_operators(tmp_path):
    train(tiny("train.profile_steps=[2, 3]"), tmp_path)
    trace = json.loads((tmp_path / "profile_rank0.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2
    table = (tmp_path / "profile_rank0.txt").read_text()
    assert "Self CPU" in table
    operators = [line for line in table.splitlines() if line.strip() and not line.startswith(("-", "Self"))]
    assert len(operators) == 11  # the head and ten rows


def test_tensorboard_gets_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny("telemetry.tensorboard=true"), tmp_path)
    curves = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [e.step for e in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.value for e in curves.Scalars("train/loss")] == pytest.approx(
        [float(r["loss"]) for r in rows_of(tmp_path)]
    )
    assert [e.step for e in curves.Scalars("train/val_loss")] == [3, 6]


def test_a_tensorboard_that_cannot_write_changes_nothing(tmp_path):
    train(tiny(), tmp_path / "plain")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tb").write_text("a file where a folder should be")
    train(tiny("telemetry.tensorboard=true"), tmp_path / "broken")
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("plain", "broken")]
    assert losses[0] == losses[1]


def test_a_full_disk_under_training_csv_is_an_incident_and_changes_nothing(tmp_path, no_room):
    train(tiny(), tmp_path / "plain")
    no_room("training.csv")
    train(tiny(), tmp_path / "full")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "full")]
    assert weights[0] == weights[1]
    events = [json.loads(line) for line in (tmp_path / "full" / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [e["message"] for e in events if e["event"] == "incident"] == [
        "training.csv cannot be written: No space left on device"
    ]
    assert json.loads((tmp_path / "full" / "metrics.json").read_text())["telemetry_failures"] >= 6


def test_a_profile_that_cannot_be_written_is_counted_and_does_not_stop_training(tmp_path):
    (tmp_path / "profile_rank0.txt").mkdir()
    train(tiny("train.profile_steps=[2, 3]"), tmp_path)
    assert len(rows_of(tmp_path)) == 6
    assert json.loads((tmp_path / "metrics.json").read_text())["telemetry_failures"] == 1


def test_a_table_with_other_columns_is_renamed(tmp_path):
    (tmp_path / "training.csv").write_text("step,loss\n1,5.0\n")
    TableSink(tmp_path, 0, TRAINING, done_steps=1).close()
    assert (tmp_path / "training.old.csv").read_text() == "step,loss\n1,5.0\n"


def test_events_that_cannot_be_written_are_counted(tmp_path):
    stream = EventStream(0, [HeartbeatSink(tmp_path / "nowhere", rank=0)])
    stream.incident("save_failed", "no room", step=3)
    stream.close()
    assert (stream.failures.count, stream.incidents) == (1, 1)


def test_run_log_has_the_output_and_the_end_of_a_run(tmp_path, capsys):
    train(tiny(), tmp_path)
    printed = capsys.readouterr().out
    kept = (tmp_path / "run.log").read_text()
    assert printed
    assert printed in kept
    written = [tmp_path / name for name in ("samples.jsonl", "eval.json", "eval.html", "lm_eval.json")]
    for path in written:
        path.write_text("{}\n")
    with pytest.raises(NumericsError):
        train(tiny("train.lr=1e30", "train.grad_clip=0"), tmp_path, fresh=True)
    assert "ended by NumericsError: step" in (tmp_path / "run.log").read_text()
    assert not any(path.exists() for path in written), "they are of other weights"


def test_a_log_that_cannot_be_written_changes_nothing(tmp_path, capsys, no_room):
    train(tiny(), tmp_path / "plain")
    no_room("run.log")
    train(tiny(), tmp_path / "full")
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("plain", "full")]
    assert losses[0] == losses[1]
    assert "step 0006" in capsys.readouterr().out


def test_a_tracker_that_raises_is_removed_and_counted(tmp_path, monkeypatch):
    """Stands in for an installed package: it works for two steps, then its network is gone."""
    calls = []

    def log(scalars, step):
        calls.append((step, scalars))
        if step > 2:
            raise ConnectionResetError(104, "Connection reset by peer")

    package = types.ModuleType("trackio")
    package.init = lambda **options: calls.append(("init", options["project"]))
    package.log, package.finish = log, lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "trackio", package)
    train(tiny("train.steps=12"), tmp_path / "plain")
    train(tiny("train.steps=12", "telemetry.tracker=trackio"), tmp_path / "tracked")
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("plain", "tracked")]
    assert losses[0] == losses[1]
    assert calls[0] == ("init", "nsa")
    assert calls[-1] == "finish"
    first = next(scalars for step, scalars in calls[1:-1] if step == 1 and "train/loss" in scalars)
    assert first["train/loss"] == float(losses[0][0])
    metrics = json.loads((tmp_path / "tracked" / "metrics.json").read_text())
    assert metrics["telemetry_failures"] == 3, "it is not asked again for the other steps"
    assert metrics["incidents"] == 1


def test_a_tracker_that_cannot_begin_is_removed_and_counted(tmp_path, monkeypatch):
    def refuse(**_):
        raise ConnectionRefusedError(111, "Connection refused")

    package = types.ModuleType("wandb")
    package.init, package.log = refuse, lambda *_, **__: pytest.fail("there is nothing to log to")
    package.finish = lambda: pytest.fail("there is nothing to finish")
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(tiny("train.steps=12", "telemetry.tracker=wandb"), tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["status"], metrics["incidents"]) == ("done", 1)
    assert metrics["telemetry_failures"] in (3, 4, 5)


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, monkeypatch):
    starts = []
    package = types.ModuleType("wandb")
    package.init = lambda **options: starts.append((options["id"], options["resume"]))
    package.log, package.finish = lambda *_, **__: None, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(tiny("train.steps=2", "telemetry.tracker=wandb"), tmp_path)
    train(tiny("train.steps=3", "telemetry.tracker=wandb"), tmp_path, accept_changes=True)
    assert json.loads((tmp_path / "metrics.json").read_text())["steps"] == 3
    train(tiny("train.steps=2", "telemetry.tracker=wandb"), tmp_path, fresh=True)
    first, resumed, fresh = starts
    assert first == resumed
    assert first[0] != fresh[0]
    assert first[1] == fresh[1] == "allow"


def test_a_tracker_that_is_not_installed_changes_nothing(tmp_path):
    train(tiny("telemetry.tracker=wandb"), tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["telemetry_failures"] == 1


def test_fresh_under_a_restarting_torchrun_is_refused(tmp_path, monkeypatch):
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_MAX_RESTARTS": 2}  # as torchrun does
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(LaunchError, match="--fresh"):
        train(tiny(), tmp_path, fresh=True)
    train(tiny(), tmp_path)


def test_an_event_after_one_truncated_by_a_full_disk_can_be_read(tmp_path):
    stream = EventStream(0, [HeartbeatSink(tmp_path, rank=0)])
    path = tmp_path / "heartbeat_rank0.jsonl"
    stream.incident("save_failed", "first", step=1)
    stream.flush(10.0)
    with path.open("ab") as file:
        file.write(b'{"event": "incid')
    stream.incident("save_failed", "second", step=2)
    stream.close()
    first, cut, second = path.read_text().splitlines()
    assert (json.loads(first)["message"], json.loads(second)["message"]) == ("first", "second")
    assert cut == '{"event": "incid'


def test_tensorboard_goes_on_when_there_is_room_again(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(steps):
        for step in steps:
            sink.write(make_event("step", 0, step, **dict.fromkeys(TRAINING.columns[1:], 1.0)))
            time.sleep(0.01)

    sink, steps = TensorBoard(tmp_path), iter(range(1, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", no_space)
        with pytest.raises(OSError, match="No space"):  # its thread writes: at one of the next events
            write(steps)
    with pytest.raises(OSError, match="No space"):
        write([next(steps)])
    assert len(list((tmp_path / "tb").iterdir())) == 1, "no file for every attempt"
    sink._reopen_at = 0.0  # a minute later
    later = [next(steps) for _ in range(5)]
    write(later)
    sink.close()
    shown = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [point.step for point in shown.Scalars("train/loss")] == later
