"""The profile of some steps (train.profile_steps)."""

import json
from copy import deepcopy

import pytest
import torch

from nsa.config import parse_config
from nsa.errors import DataError, Preempted
from nsa.record.profile import StepProfiler
from nsa.train import train
from nsa.train.monitor import Monitor
from tests.checkpoint.helpers import faults_armed
from tests.record.runs import TINY


def profiled_steps(folder) -> int:
    events = json.loads((folder / "profile_rank0.json").read_text())["traceEvents"]
    assert "Self CPU" in (folder / "profile_rank0.txt").read_text()
    return [event.get("name") for event in events].count("Optimizer.step#AdamW.step")


def test_a_window_that_goes_beyond_the_last_step_leaves_the_steps_there_were(tmp_path):
    train(parse_config(deepcopy(TINY), "test", ["train.steps=6", "train.profile_steps=[5, 9]"]), tmp_path)
    assert profiled_steps(tmp_path) == 2
    assert f"profile in {tmp_path / 'profile_rank0.json'}" in (tmp_path / "run.log").read_text()


def test_a_run_that_ends_inside_the_window_leaves_the_steps_there_were(tmp_path, monkeypatch):
    from nsa.train import loop

    step = loop.step

    def step_or_fail(session):
        if session.step == 4:
            raise DataError("the source is gone")
        step(session)

    monkeypatch.setattr(loop, "step", step_or_fail)
    with pytest.raises(DataError, match="the source is gone"):
        train(parse_config(deepcopy(TINY), "test", ["train.steps=6", "train.profile_steps=[2, 5]"]), tmp_path)
    assert profiled_steps(tmp_path) == 3


def test_a_run_that_fails_records_why_before_it_writes_its_profile(tmp_path, monkeypatch):
    recorded = []

    def write(profiler):
        recorded.append(json.loads((tmp_path / "metrics.json").read_text()))

    monkeypatch.setattr(StepProfiler, "close", write)
    config = parse_config(deepcopy(TINY), "test", ["train.steps=6", "train.profile_steps=[2, 5]"])
    with faults_armed("step.begin:raise:hit=4"), pytest.raises(RuntimeError):
        train(config, tmp_path)
    assert (recorded[-1]["status"], recorded[-1]["steps"]) == ("failed", 3)


def test_a_run_that_is_asked_to_stop_does_not_take_the_time_to_write_its_profile(tmp_path):
    config = parse_config(deepcopy(TINY), "test", ["train.steps=4", "train.profile_steps=[2, 4]"])
    with faults_armed("step.begin:usr1:hit=2"), pytest.raises(Preempted):
        train(config, tmp_path)
    assert not list(tmp_path.glob("profile_*"))
    train(config, tmp_path)
    assert profiled_steps(tmp_path) == 2


def test_a_profile_may_take_longer_to_write_than_a_step(tmp_path, monkeypatch):
    limits = []

    def log(monitor, trace):
        limits.append(monitor.watchdog.limit_s)

    monkeypatch.setattr(Monitor, "_log_profile", log)
    changes = ["train.steps=3", "train.profile_steps=[2, 2]", "telemetry.watchdog_first_step_s=500"]
    train(parse_config(deepcopy(TINY), "test", changes), tmp_path)
    assert limits[:3] == [500.0] * 3


def test_a_window_outside_the_run_leaves_no_file(tmp_path):
    profiler = StepProfiler(tmp_path, 0, [7, 9], torch.device("cpu"))
    profiler.before(6)
    assert (profiler.after(6), profiler.close(), list(tmp_path.iterdir())) == (None, None, [])
