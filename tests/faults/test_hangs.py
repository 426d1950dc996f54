"""Two ranks, one of which gets stuck: found in time, stacks of both, exit code 6, nobody left. A rank that is stopped:
test_ranks.py."""

import time

import pytest

from tests.distributed.launching import events_of, metrics_of, run_ranks, start_ranks, wait_all, write_config

FLOOR_S = 3.0
pytestmark = pytest.mark.timeout(240)


def config_of(tmp_path, **train):
    return write_config(
        tmp_path,
        train={"steps": 200, "eval_every": 0, "out_dir": str(tmp_path / "run"), **train},
        telemetry={"tensorboard": False, "watchdog_floor_s": FLOOR_S, "watchdog_first_step_s": 60.0},
        checkpoint={"every": 0},
        data={"source": "synthetic", "prefetch": 1},
    )


def dumps_of(run, rank):
    return "\n".join(path.read_text() for path in sorted(run.glob(f"stackdump_*_rank{rank}.txt")))


def run_stuck(tmp_path, faults):
    """Both ranks' ends, and how long the last step is ago when they are gone."""
    ended = run_ranks(2, "train", config_of(tmp_path), faults=faults)
    run = tmp_path / "run"
    stopped_at = max(e["time"] for e in events_of(run) if e["event"] == "step")
    assert time.time() - stopped_at < FLOOR_S + 25, "found in time"
    return ended, run


def assert_found(ended, run, line_of_stuck, line_of_waiting):
    assert ended[0].code == 6, ended[0].output
    assert "hang: rank 0: no progress for" in ended[0].output
    assert line_of_stuck in dumps_of(run, 1), "the stuck rank's stacks name the line"
    assert line_of_waiting in dumps_of(run, 0), "the waiting rank's stacks name the line"
    for rank in (0, 1):
        assert all(f"\nrank {other}: step " in dumps_of(run, rank) for other in (0, 1)), "where each rank stood"
    metrics = metrics_of(run)
    assert metrics["status"] == "failed"
    assert metrics["exit_code"] == 6
    (hang,) = [e for e in events_of(run) if e["event"] == "hang"]
    assert hang["step"] >= 4


def test_a_rank_that_sleeps(tmp_path):
    ended, run = run_stuck(tmp_path, "step.forward:sleep:hit=4:rank=1:seconds=1000")
    assert_found(ended, run, "in _trigger", "in train_step")
    assert ended[1].code == 6, ended[1].output
    assert 'faults.py", line' in dumps_of(run, 1)


def test_a_first_step_that_takes_too_long_names_the_limit_to_raise(tmp_path):
    """The same command would meet the same limit."""
    limit = "telemetry.watchdog_first_step_s=3"
    (ended,) = run_ranks(1, "train", config_of(tmp_path), limit, faults="step.forward:sleep:seconds=1000")
    assert ended.code == 6, ended.output
    assert "raise telemetry.watchdog_first_step_s" in metrics_of(tmp_path / "run")["reason"]


def test_a_rank_that_calls_another_collective(tmp_path):
    ended, run = run_stuck(tmp_path, "step.end:barrier:hit=4:rank=1")
    codes = {e.code for e in ended}
    assert 6 in codes, [e.output for e in ended]
    assert codes <= {6, 8}, "8: of a rank that saw the other one end"
    assert "in barrier" in dumps_of(run, 1), "the stacks of the rank that is elsewhere name the line"
    assert "in _forward_backward" in dumps_of(run, 0), "the waiting rank's stacks name the line"
    for rank in (0, 1):  # each waits for the other, so each finds itself stuck
        (hang,) = [e for e in events_of(run, rank) if e["event"] == "hang"]
        assert hang["step"] == 5 - rank


def test_a_data_worker_that_never_answers(tmp_path):
    ended, run = run_stuck(tmp_path, "data.batch:sleep:hit=5:rank=1:seconds=1000")
    assert_found(ended, run, "in _load", "in train_step")
    assert ended[1].code == 6, ended[1].output
    assert "phase data" in ended[1].output


def test_sigusr2_dumps_stacks_and_the_run_goes_on(tmp_path):
    import signal

    config, patient = config_of(tmp_path, steps=4), "telemetry.watchdog_floor_s=60"
    (process,) = start_ranks(1, "train", config, patient, faults="step.forward:sleep:hit=3:seconds=4")
    run = tmp_path / "run"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "heartbeat_rank0.jsonl").exists() and any(e["event"] == "step" for e in events_of(run)):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR2)
    (ended,) = wait_all([process])
    assert ended.code == 0, ended.output
    assert "nsa/train/loop.py" in dumps_of(run, 0)
    assert metrics_of(run)["steps"] == 4


def test_writing_the_weights_may_take_longer_than_a_step(tmp_path):
    config = config_of(tmp_path, steps=2)
    (ended,) = run_ranks(1, "train", config, faults=f"end.weights:sleep:seconds={FLOOR_S + 4:.0f}")
    assert ended.code == 0, ended.output
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_hang_before_the_first_step_of_a_resumed_run_records_the_steps_that_are_done(tmp_path):
    config = write_config(tmp_path, train={"out_dir": str(tmp_path / "run")}, checkpoint={"background": False})
    (crashed,) = run_ranks(1, "train", config, faults="step.begin:raise:hit=5")
    assert crashed.code == 1
    watched = ("telemetry.watchdog_first_step_s=3", "telemetry.watchdog_floor_s=3", "--accept-changes")
    (stuck,) = run_ranks(1, "train", config, *watched, faults="step.begin:sleep:seconds=1000")
    assert stuck.code == 6, stuck.output
    assert metrics_of(tmp_path / "run")["steps"] == 4
