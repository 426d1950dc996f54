"""Preemption (row 9): a signal to any rank saves and stops all of them at the end of the step, exactly resumable."""

import os
import signal
import time
from pathlib import Path

import pytest

from nsa.checkpoint.export import find_checkpoint
from tests.distributed.launching import events_of, metrics_of, rows_of, start_ranks, wait_all
from tests.faults.kills import assert_equal_to_the_bit, assert_prefix_equal, make_runs

LONG = 100_000  # steps that no test waits for


def start(runs, name, steps=LONG, faults="", console=None):
    arguments = ["train", runs.config, f"train.out_dir={runs.folder / name}", f"train.steps={steps}"]
    return start_ranks(runs.size, *arguments, faults=faults, console=console)


def wait_for_rows(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (run / "training.csv").exists() or len(rows_of(run)) < count:
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("strategy", "action", "rank"),
    [pytest.param("single", "terminate", 0, marks=pytest.mark.long), ("ddp", "usr1", 1), ("fsdp", "terminate", 0)],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_same_command_resumes(tmp_path, unbroken, strategy, action, rank):
    runs, whole = make_runs(tmp_path, strategy, recompute="block"), unbroken(strategy, "block")
    # In step 4, before its end; the save at the end of the step is the one that the signal asks for.
    ended = runs.train("stopped", f"step.forward:{action}:hit=4:rank={rank}")
    assert [e.code for e in ended] == [75] * runs.size, ended[0].output
    assert "asked to stop" in ended[0].output.splitlines()[-1]
    assert metrics_of(tmp_path / "stopped")["status"] == "preempted"
    assert metrics_of(tmp_path / "stopped")["exit_code"] == 75
    steps = assert_prefix_equal(tmp_path / "stopped", whole)
    assert steps == 4
    runs.finish("stopped")
    resumed = [e for e in events_of(tmp_path / "stopped") if e["event"] == "start"][-1]
    assert resumed["from_checkpoint"] == f"step_{steps:08d}"
    assert_equal_to_the_bit(tmp_path / "stopped", whole, runs.size)


def test_a_signal_during_a_validation_saves_and_stops_after_it(tmp_path):
    """Without another step, which may take longer than the process has left."""
    ended = make_runs(tmp_path, "ddp").train("run", "validate:terminate:rank=1")
    assert [e.code for e in ended] == [75, 75], ended[0].output
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows if row["val_loss"]] == [rows[-1]["step"]]
    assert find_checkpoint(tmp_path / "run").name == f"step_{len(rows):08d}"


def test_ctrl_c_once_saves_and_exits_with_130(tmp_path):
    runs = make_runs(tmp_path, "single")
    processes = start(runs, "run")
    wait_for_rows(tmp_path / "run", 3)
    processes[0].send_signal(signal.SIGINT)
    [ended] = wait_all(processes)
    assert ended.code == 130
    steps = len(rows_of(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps:08d}" / "manifest.json").exists()


def test_ctrl_c_twice_stops_at_once_with_the_last_checkpoint_intact(tmp_path):
    runs = make_runs(tmp_path, "single")
    # Asleep inside a step, which would not end for an hour, while step 6 is being saved.
    processes = start(runs, "run", faults="step.forward:sleep:hit=7")
    wait_for_rows(tmp_path / "run", 6)
    time.sleep(0.5)
    processes[0].send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert processes[0].poll() is None
    processes[0].send_signal(signal.SIGINT)
    [ended] = wait_all(processes, timeout_s=10)
    assert ended.code == 130
    assert find_checkpoint(tmp_path / "run").name == "step_00000004"
    again = start(runs, "run", steps=8)
    assert wait_all(again)[0].code == 2  # train.steps differs: refused, nothing is changed
    assert find_checkpoint(tmp_path / "run").name == "step_00000004"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_repeated_signals_change_neither_the_exit_code_nor_the_records(tmp_path, number, code):
    runs = make_runs(tmp_path, "single")
    processes = start(runs, "run")
    wait_for_rows(tmp_path / "run", 3)
    processes[0].send_signal(number)
    while number == signal.SIGINT and not any(e["event"] == "preempted" for e in events_of(tmp_path / "run")):
        time.sleep(0.005)  # before it has saved, a second Ctrl-C ends it at once
    while processes[0].poll() is None:
        processes[0].send_signal(number)
        time.sleep(0.002)
    [ended] = wait_all(processes)
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output
    assert metrics_of(tmp_path / "run")["exit_code"] == code
    assert find_checkpoint(tmp_path / "run").name == f"step_{len(rows_of(tmp_path / 'run')):08d}"


def test_a_terminal_that_closes_saves_and_stops_the_run(tmp_path):
    runs = make_runs(tmp_path, "single")
    ours, theirs = os.openpty()
    processes = start(runs, "run", console=theirs)
    os.close(theirs)
    wait_for_rows(tmp_path / "run", 3)
    os.close(ours)  # from here on, what it prints is an I/O error
    time.sleep(0.2)
    assert processes[0].poll() is None
    processes[0].send_signal(signal.SIGHUP)
    [ended] = wait_all(processes)
    assert ended.code == 75
    metrics = metrics_of(tmp_path / "run")
    assert (metrics["status"], metrics["exit_code"]) == ("preempted", 75)
    assert find_checkpoint(tmp_path / "run").name == f"step_{len(rows_of(tmp_path / 'run')):08d}"
