"""Ranks that die, disagree or cannot write: what the others do (rows 4, 5, 8, 14, 15 of reliability.md)."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.checkpoint.export import find_checkpoint
from nsa.errors import FirstRankFailedError, HangError
from nsa.train.folder import record_end, write_json
from nsa.train.nonfinite import reproduce
from tests import warm
from tests.distributed.launching import (
    environment,
    events_of,
    free_port,
    metrics_of,
    numbers_of,
    rows_of,
    run_ranks,
    start_ranks,
    wait_all,
    write_config,
)
from tests.faults.kills import assert_equal_to_the_bit, make_runs


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_survivors_of_a_lost_rank_end_with_code_8_and_the_reason(tmp_path, strategy):
    runs = make_runs(tmp_path, strategy)
    began = time.monotonic()
    ended = runs.train("run", "step.backward:kill:hit=3:rank=1")
    assert [e.code for e in ended] == [8, -9]
    assert time.monotonic() - began < 60
    assert "another rank is gone" in ended[0].output.splitlines()[-1]
    assert metrics_of(tmp_path / "run")["exit_code"] == 8


def test_what_fails_on_rank_0_alone_is_recorded_by_rank_0_alone(tmp_path):
    """The others hear of it before rank 0 has written why."""
    ended = make_runs(tmp_path, "ddp").train("run", "end.weights:enospc:rank=0")
    assert [e.code for e in ended] == [1, 8]
    assert "rank 0 failed: [Errno 28]" in ended[1].output
    metrics = metrics_of(tmp_path / "run")
    assert (metrics["exit_code"], metrics["rank"]) == (1, 0)
    write_json(tmp_path / "metrics.json", running := {"status": "running"})
    claim = SimpleNamespace(folder=tmp_path, is_lost=lambda: False)
    record_end(claim, FirstRankFailedError("rank 0 failed: "), 3, {})
    assert metrics_of(tmp_path) == running


def test_a_rank_that_was_frozen_until_the_run_was_finished_does_not_change_its_summary(tmp_path):
    write_json(tmp_path / "metrics.json", done := {"status": "done", "steps": 12})
    record_end(SimpleNamespace(folder=tmp_path, is_lost=lambda: False), HangError("no progress for 9000 s"), 5, {})
    assert metrics_of(tmp_path) == done


def test_ranks_agree_on_the_folder_while_a_save_is_being_written(tmp_path):
    """Before a memory dump. The threads of a rank would otherwise wait for those of another: rank 0 saves later."""
    config = write_config(
        tmp_path,
        parallel={"strategy": "ddp", "timeout_s": 15.0},
        train={"eval_every": 0},
        telemetry={"mem_dump_every": 1},
    )
    ended = run_ranks(
        2, "train", config, f"train.out_dir={tmp_path / 'run'}", faults="save.prepare:sleep:rank=0:seconds=3"
    )
    assert [e.code for e in ended] == [0, 0], ended[0].output
    assert (tmp_path / "run" / "mem_step8_rank1.txt").exists()


def test_a_stopped_rank_is_given_up_after_the_timeout(tmp_path):
    config = write_config(tmp_path, parallel={"strategy": "ddp", "timeout_s": 5.0}, train={"steps": 8})
    waiting, other = start_ranks(
        2, "train", config, f"train.out_dir={tmp_path / 'run'}", faults="step.backward:stop:hit=3:rank=1"
    )
    [ended] = wait_all([waiting], timeout_s=60)
    assert ended.code == 8, ended.output
    assert stopped(other.pid), "only its parent may end it: torchrun's agent, here this test"
    other.kill()
    assert other.wait(10) == -9
    assert len(rows_of(tmp_path / "run")) == 2


STATIC = "parallel.ddp.static_graph=true"


def torchrun(*arguments, module="torch.distributed.run", **more):
    """`torchrun`; its ranks start at once."""
    return warm.start(module, *arguments, env=environment(**more), starts_others=True)


def test_a_stopped_rank_is_found_and_torchruns_agent_ends_it(tmp_path):
    run, watched = tmp_path / "run", {"watchdog_floor_s": 3.0, "watchdog_first_step_s": 60.0}
    config = write_config(tmp_path, train={"steps": 200, "eval_every": 0, "out_dir": str(run)}, telemetry=watched)
    job = torchrun(
        *("--standalone", "--nproc-per-node", "2", "-m", "nsa", "train", config),
        module="tests.faults.impatient_torchrun",
        NSA_FAULTS="step.forward:stop:hit=4:rank=1",
    )
    [ended] = wait_all([job])
    assert ended.code == 1, ended.output
    assert "hang: rank 0: no progress for" in ended.output
    [hang] = [event for event in events_of(run) if event["event"] == "hang"]
    assert metrics_of(run)["exit_code"] == 6
    other = hang["ranks"][1]
    assert (other["step"], other["event"], other["state"]) == (3, "step", "stopped")
    [dump] = run.glob("stackdump_*_rank0.txt")
    assert "in train_step" in dump.read_text()
    assert f"process {other['pid']} on {other['host']}: stopped\n" in dump.read_text()
    assert not Path(f"/proc/{other['pid']}").exists(), "nobody is left"


def test_torchrun_restarts_a_job_that_lost_a_rank_and_it_resumes(tmp_path, unbroken):
    runs = make_runs(tmp_path, "ddp")
    job = torchrun(
        *("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "nsa", "train", runs.config),
        f"train.out_dir={tmp_path / 'run'}",
        NSA_FAULTS="step.optimizer:kill:hit=5:rank=1:attempt=0",
    )
    [ended] = wait_all([job])
    assert ended.code == 0, ended.output
    assert len([e for e in events_of(tmp_path / "run") if e["event"] == "start"]) == 2
    assert_equal_to_the_bit(tmp_path / "run", unbroken("ddp"), 2)


def test_two_nodes_of_torchrun_are_one_run(tmp_path, unbroken):
    runs = make_runs(tmp_path, "fsdp")
    port = free_port()
    nodes = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "nsa", "train", runs.config),
            f"train.out_dir={tmp_path / 'run'}",
        )
        for _ in range(2)
    ]
    ended = wait_all(nodes)
    assert [e.code for e in ended] == [0, 0], ended[0].output + ended[1].output
    assert any("rank 1 of 2 | local rank 0" in e.output for e in ended)
    assert_equal_to_the_bit(tmp_path / "run", unbroken("fsdp"), 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_stops_all_at_the_same_step_before_the_weights_change(tmp_path, unbroken, strategy):
    runs = make_runs(tmp_path, strategy)
    ended = runs.train("run", "step.loss:nan:hit=4:rank=1")
    assert [e.code for e in ended] == [5, 5], ended[0].output
    for one in ended:
        assert "step 4: the loss is nan" in one.output.splitlines()[-1]
    assert len(rows_of(tmp_path / "run")) == 3
    assert metrics_of(tmp_path / "run")["exit_code"] == 5
    place = tmp_path / "run" / "nonfinite" / "step_00000004"
    assert {p.name for p in place.iterdir()} == {
        *("report.json", "weights.safetensors", "batch_rank0.safetensors", "batch_rank1.safetensors")
    }
    again = reproduce(place)  # the NaN was injected: without it, the dumped step has the unbroken run's numbers
    wanted = rows_of(unbroken(strategy))[3]
    assert again.loss == pytest.approx(float(wanted["loss"]), rel=1e-6)
    assert again.grad_norm == pytest.approx(float(wanted["grad_norm"]), rel=1e-5)


def test_a_step_with_a_nan_is_skipped_on_all_ranks_if_configured(tmp_path):
    config = write_config(tmp_path, train={"steps": 8, "non_finite": "skip"}, parallel={"strategy": "fsdp"})
    ended = run_ranks(2, "train", config, f"train.out_dir={tmp_path / 'run'}", faults="step.loss:nan:hit=4:rank=1")
    assert [e.code for e in ended] == [0, 0], ended[0].output
    assert [row["skipped"] for row in rows_of(tmp_path / "run")] == list("00010000")
    assert metrics_of(tmp_path / "run")["skipped_steps"] == 1
    assert [e["kind"] for e in events_of(tmp_path / "run", 1) if e["event"] == "incident"] == ["non_finite"]


@pytest.mark.parametrize("point", ["save.shard", "save.own"])
def test_a_full_disk_on_one_rank_is_an_incident_and_the_save_is_retried(tmp_path, unbroken, point):
    runs = make_runs(tmp_path, "ddp")
    ended = runs.train("run", f"{point}:enospc:rank=1")
    assert [e.code for e in ended] == [0, 0], ended[0].output
    for rank in range(2):
        [incident] = [e for e in events_of(tmp_path / "run", rank) if e["event"] == "incident"]
        assert incident["kind"] == "save_failed"
        assert "No space left on device" in incident["message"]
    assert numbers_of(tmp_path / "run") == numbers_of(unbroken("ddp"))


def test_three_failed_saves_end_the_run_and_name_the_last_good_one(tmp_path, unbroken):
    runs = make_runs(tmp_path, "ddp")
    ended = runs.train("run", "save.own:eio:hit=2:times=9:rank=1", module="tests.faults.impatient")
    assert [e.code for e in ended] == [4, 4], ended[0].output
    last = find_checkpoint(tmp_path / "run")
    for one in ended:
        assert "saving failed 3 times in a row" in one.output.splitlines()[-1]
        assert f"the last good checkpoint: {last.name}" in one.output.splitlines()[-1]
    runs.finish("run")
    assert_equal_to_the_bit(tmp_path / "run", unbroken("ddp"), 2)


def test_a_mistake_ends_every_rank_with_its_own_code(tmp_path):
    config = write_config(tmp_path, train={"steps": 2, "batch_size": 3})
    for codes, text, overrides in [
        ([2, 2], "train.batch_size: 3 sequences cannot be divided among 2 ranks", []),
        ([2, 2], "parallel.strategy: 'single' does not work with 2 processes", ["parallel.strategy=single"]),
        ([2, 2], "train.micro_batch: 4 must divide the 6", ["train.batch_size=12", "train.micro_batch=4"]),
        ([2, 2], "static_graph: needs one pass", ["train.batch_size=4", "train.micro_batch=1", STATIC]),
        ([3, 3], "*.txt matches no", ["train.batch_size=4", "data.source=text", "data.paths=[/nowhere/*.txt]"]),
    ]:
        ended = run_ranks(2, "train", config, f"train.out_dir={tmp_path / 'run'}", *overrides)
        assert [e.code for e in ended] == codes, ended[0].output
        assert text in ended[0].output
        assert "Traceback" not in ended[0].output + ended[1].output
    assert metrics_of(tmp_path / "run")["exit_code"] == 3


def test_a_second_run_is_refused_on_every_rank_while_the_first_lives(tmp_path):
    runs = make_runs(tmp_path, "ddp")
    first = start_ranks(2, "train", runs.config, f"train.out_dir={tmp_path / 'run'}", faults="step.begin:stop:hit=3")
    try:
        deadline = time.monotonic() + 60
        while not all(stopped(process.pid) for process in first):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = runs.train("run")
    finally:
        for process in first:
            process.send_signal(signal.SIGCONT)
    assert [e.code for e in second] == [7, 7], second[0].output
    assert all("another run is writing into" in e.output for e in second)
    assert [e.code for e in wait_all(first)] == [0, 0]
    again = runs.train("run")
    assert [e.code for e in again] == [0, 0]
    assert "this run is done (8 steps)" in again[0].output


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_half_a_launch_is_refused(tmp_path):
    config = write_config(tmp_path)
    process = warm.start("nsa", "train", config, f"train.out_dir={tmp_path / 'run'}", env=environment(WORLD_SIZE="2"))
    [ended] = wait_all([process])
    assert ended.code == 7
    assert "start the run with torchrun" in ended.output
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
