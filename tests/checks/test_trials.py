"""A trial that exceeds its time limit leaves its stacks and no process; the outcome is the run's own."""

import json
import os
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from nsa.checks.probe import run_probe
from nsa.checks.trials import Outcome, Trial, changed, hold_results, outcome_of, run_trial
from nsa.cli.main import app
from nsa.config import load_config, parse_config
from nsa.errors import LaunchError
from nsa.inspect.reading import read_run
from tests import warm
from tests.checks.helpers import write_config
from tests.record.runs import HEADER, training_row


@pytest.fixture
def warm_starts(monkeypatch):
    """Processes start at once. Their command line is not their own: `processes_that_name` does not find them."""
    monkeypatch.setattr(warm, "_own", warm._starter(os.getpid()))
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


def processes_that_name(folder) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def test_a_run_over_its_limit_leaves_its_stacks_and_is_ended(tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path))
    fault = "step.backward:sleep:hit=2:rank=1"  # the run's own watchdog allows 60 s
    skipped_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s[0], sleep=time.sleep)
    monkeypatch.setattr("nsa.checks.trials.time", clock)

    polls_after_step = []

    def on_progress(view, seconds):
        if view is not None and view.step == 1:
            polls_after_step.append(seconds)
            if len(polls_after_step) == 6:  # the ranks are in the next step
                skipped_s[0] = 1000.0

    trial = Trial(config, tmp_path / "run", nproc=2, limit_s=900.0, faults=fault)
    outcome = run_trial(trial, on_progress)
    assert (outcome.timed_out, outcome.passed, outcome.exit_code) == (True, False, 6)
    assert outcome.reason == "did not end within 900 s: it stopped after step 1"
    stacks = list((tmp_path / "run").glob("stackdump_*.txt"))
    assert len(stacks) == 2
    assert any("in train_step" in dump.read_text() for dump in stacks)
    assert processes_that_name(tmp_path) == []


def test_an_interrupt_while_the_run_is_started_leaves_no_process(tmp_path, monkeypatch):
    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            raise KeyboardInterrupt

    monkeypatch.setattr("nsa.checks.trials.subprocess.Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        run_trial(Trial(load_config(write_config(tmp_path)), tmp_path / "run", nproc=1, limit_s=60.0))
    assert processes_that_name(tmp_path) == []


def recorded(tmp_path, metrics: dict, log: str = "", dump: str = "") -> Outcome:
    """The outcome of a run of two steps with exit code 1, by what it left."""
    config = load_config(write_config(tmp_path, train={"steps": 2}))
    trial = Trial(config, tmp_path / "run", nproc=2, limit_s=60.0)
    trial.folder.mkdir()
    trial.log_file.write_text(log)
    (trial.folder / "metrics.json").write_text(json.dumps(metrics))
    (trial.folder / "training.csv").write_text(HEADER + "\n" + training_row(1))
    (trial.folder / "stackdump_20260101T000000_rank1.txt").write_text(dump)
    return outcome_of(trial, read_run(trial.folder), 1, 1.0)


def test_the_exit_code_and_reason_of_the_run_count_not_those_of_its_launcher(tmp_path):
    outcome = recorded(tmp_path, {"status": "failed", "exit_code": 6, "reason": "no progress for 60 s"})
    assert (outcome.exit_code, outcome.reason) == (6, "exit code 6: no progress for 60 s")


def test_a_run_that_left_no_reason_gives_the_last_line_it_printed(tmp_path):
    launcher = "E1115 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)"
    outcome = recorded(tmp_path, {"status": "running"}, f"step 1\nerror: no room\n\n{launcher}\nTraceback\n")
    assert outcome.reason == "exit code 1: error: no room"


TIMER = 'Timeout (0:00:08)!\nThread 0x00007f01 (most recent call first):\n  File "step.py", line 63 in train_step\n'


@pytest.mark.parametrize("metrics", [{"status": "running"}, {"exit_code": 8, "reason": "rank 1 is gone"}])
def test_a_run_that_the_c_timer_of_the_watchdog_ended_is_a_hang(tmp_path, metrics):
    outcome = recorded(tmp_path, metrics, dump=TIMER)
    assert (outcome.exit_code, outcome.passed) == (6, False)
    assert outcome.reason == "exit code 1: hang in C code that held the GIL; stackdump_20260101T000000_rank1.txt"


def test_a_crash_that_wrote_stacks_is_a_crash(tmp_path):
    outcome = recorded(
        tmp_path, {"status": "running"}, "error: no room\n", TIMER.replace("Timeout", "Fatal Python error")
    )
    assert (outcome.exit_code, outcome.reason) == (1, "exit code 1: error: no room")


def test_the_output_of_a_trial_is_not_that_of_its_second_start(tmp_path, warm_starts):
    """`nsa ready` kills a run and starts it again in the same folder."""
    trial = Trial(load_config(write_config(tmp_path)), tmp_path / "run", nproc=1, limit_s=60.0)
    killed = run_trial(replace(trial, faults="step.begin:kill:hit=1"))
    resumed = run_trial(replace(trial, arguments=("--no-such-option",)))
    assert (killed.exit_code, resumed.exit_code) == (-9, 2)
    assert killed.last_lines
    assert "--no-such-option" in resumed.reason
    assert "--no-such-option" not in "".join(killed.last_lines)
    assert trial.log_file.read_text().startswith("\n".join(killed.last_lines[:3]))


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    notes = tmp_path / "mine" / "trials" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("precious")
    config, out = str(write_config(tmp_path)), str(tmp_path / "mine")
    for command in ("doctor", "ready"):
        ended = CliRunner().invoke(app, [command, config, "--out", out])
        assert isinstance(ended.exception, LaunchError)
        assert "--out: " in str(ended.exception)
        assert "holds files that are not of a check" in str(ended.exception)
    assert notes.read_text() == "precious"
    for _ in range(2):
        with hold_results(tmp_path / "new"):
            (tmp_path / "new" / "trials").mkdir(exist_ok=True)
    with pytest.raises(LaunchError, match=r"--out: .* cannot be used"), hold_results(notes):
        pass


def test_a_probe_that_does_not_answer_in_time_says_so(tmp_path):
    config = load_config(write_config(tmp_path))
    probed = run_probe("kernels", Trial(config, tmp_path / "probe", nproc=1, limit_s=0.5))
    assert (probed.findings, probed.problem) == ([], "no answer after 0.5 s")
    assert processes_that_name(tmp_path) == []


def test_a_probe_that_fails_gives_its_last_line(tmp_path, warm_starts):
    config = load_config(write_config(tmp_path, runtime={"kernels": {"sel": "triton"}}))
    probed = run_probe("kernels", Trial(config, tmp_path / "probe", nproc=1, limit_s=60.0))
    assert "backend 'triton' cannot run operator 'sel' here" in probed.problem


@pytest.mark.parametrize(("warmup_steps", "wanted"), [(0, 0), (100, 1), (500, 5), (1000, 10)])
def test_a_short_trial_keeps_the_share_of_the_warmup_of_an_index(warmup_steps, wanted):
    config = parse_config({"model": {"attention": "msa"}, "msa": {"warmup_steps": warmup_steps}}, "test")
    short = changed(config, {"train.steps": 10})
    assert (short.train.steps, short.msa.warmup_steps) == (10, wanted)
    assert changed(config, {"train.seed": 1}).msa.warmup_steps == warmup_steps
