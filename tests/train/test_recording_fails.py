"""Nothing that is only recorded ends a run, and rows that found no room are not forgotten (row 13)."""

import json
import resource
import threading
from dataclasses import asdict, replace

import pytest

from nsa import faults
from nsa.record import failures
from nsa.record.events import EventStream
from nsa.record.sinks import TableSink
from nsa.run_folder import TRAINING, TrainingRow, read_events
from nsa.train import loop, train
from nsa.train.monitor import Monitor
from tests.checkpoint.helpers import faults_armed, incidents_of, small
from tests.train.test_training import rows_of

REPORT_BUG = failures.report_bug  # which a fixture of every test replaces


def test_rows_that_found_no_room_are_kept_and_written_when_there_is_some(tmp_path):
    row = TrainingRow(1, 64, 2.5, 1e-3, 1.0, 100.0, 0.01, 0.0, 0.5)
    sink, path = TableSink(tmp_path, 0, TRAINING), tmp_path / "training.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 300):  # far more than a buffer of Python's own holds
        event = {"event": "step", **asdict(replace(row, step=step))}
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))  # a part of the row fits
        try:
            if 3 <= step < 299:
                with pytest.raises(OSError, match="File too large"):
                    sink.write(event)
                continue
        finally:
            if step == 298:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sink.write(event)
    sink.close()
    assert [int(row["step"]) for row in rows_of(tmp_path)] == list(range(1, 300))


def test_rows_in_the_queue_of_a_disk_that_hangs_are_written_when_it_answers(tmp_path, monkeypatch):
    row = TrainingRow(1, 64, 2.5, 1e-3, 1.0, 100.0, 0.01, 0.0, 0.5)
    sink, answers, real = TableSink(tmp_path, 0, TRAINING), threading.Event(), faults.point
    stream = EventStream(0, [sink])
    stream.emit("step", **asdict(row))
    stream.flush()
    monkeypatch.setattr(faults, "point", lambda name: answers.wait(30) and real(name))
    for step in (2, 3, 4):
        stream.emit("step", **asdict(replace(row, step=step)))
    stream.emit("boot", 5, pid=1, host="none")  # is in no row of this table
    stream.flush(0.05)
    assert (stream.failures.count, stream.failures.last) == (1, "training.csv does not answer")
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1]
    answers.set()
    stream.close()
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1, 2, 3, 4]


def test_rows_that_are_lost_with_the_process_are_an_incident_of_the_resumed_run(tmp_path):
    # After a while nothing can be written, until the process is gone after step 5.
    plan = "rows.write:enospc:hit=12:times=9999,step.begin:raise:hit=6"
    train(small("checkpoint.every=1"), tmp_path / "plain")
    folder = tmp_path / "killed"
    with faults_armed(plan), pytest.raises(RuntimeError, match="fault at step"):
        train(small("checkpoint.every=1"), folder)
    first = len(rows_of(folder)) + 1
    assert 1 < first < 5
    train(small("checkpoint.every=1"), folder)
    messages = [incident["message"] for incident in incidents_of(folder) if incident["kind"] == "missing_rows"]
    [message] = messages
    assert message.startswith(f"training.csv lacks the rows of steps {first} to 5: they were not written before")
    assert [int(row["step"]) for row in rows_of(folder)] == [*range(1, first), 6]
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()


def test_a_process_without_file_descriptors_trains_on(tmp_path, monkeypatch):
    """A real limit, from the second step to the fourth: no memory can be read; events go to a file that is open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    step = loop.train_step

    def starved(state, *args, **kwargs):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if 1 <= state.progress.step < 4 else before[0], before[1]))
        return step(state, *args, **kwargs)

    train(small(), tmp_path / "plain")
    monkeypatch.setattr(loop, "train_step", starved)
    try:
        train(small(), tmp_path / "starved")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    rows = [rows_of(tmp_path / name) for name in ("plain", "starved")]
    assert [row["mem_gib"] == "" for row in rows[1]] == [False, True, True, True, False, False]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    metrics = json.loads((tmp_path / "starved" / "metrics.json").read_text())
    assert (metrics["status"], metrics["telemetry_failures"] >= 3) == ("done", True)
    assert [e["step"] for e in read_events(tmp_path / "starved") if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("part", ["profiler", "watchdog", "console", "_observer"])
def test_whatever_only_records_can_fail_without_ending_the_run(tmp_path, monkeypatch, part, recorder_bugs):
    class Broken:
        failures = 0

        def __getattr__(self, name):
            raise ValueError("broken")

    opened = Monitor.open

    def broken(monitor, state):
        opened(monitor, state)
        if part == "watchdog":
            monkeypatch.setattr(monitor.watchdog, "step_done", Broken)  # called with an argument it does not take
        elif part == "console":
            monkeypatch.setattr(monitor.console, "log", Broken)
        else:
            monkeypatch.setattr(monitor, part, Broken())

    monkeypatch.setattr(Monitor, "open", broken)
    train(small("telemetry.every=1"), tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["status"], metrics["telemetry_failures"] >= 6) == ("done", True)
    assert len(recorder_bugs) >= 6, "each of them fails a test that does not ask for them"
    assert {type(error) for error in recorder_bugs} <= {TypeError, ValueError}
    recorder_bugs.clear()


def test_a_programming_error_in_a_recorder_is_counted_and_its_traceback_printed_once(monkeypatch, capsys):
    monkeypatch.setattr(failures, "report_bug", REPORT_BUG)
    found = failures.Failures()
    for error in (KeyError("rows"), KeyError("rows"), OSError(28, "No space left on device")):
        with found.counted():
            raise error
    assert (found.count, found.last) == (3, "[Errno 28] No space left on device")
    said = capsys.readouterr().err
    assert (said.count("Traceback"), said.count("KeyError: 'rows'"), "No space" in said) == (1, 1, False)
