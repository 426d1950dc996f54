"""What a run records about itself when something beside it fails: a tracker that hangs, data that does not come, an
earlier run in the same folder."""

import json
import math
import re
import sys
import threading
import time
import types
from dataclasses import asdict

import pytest
import torch

from nsa.errors import CheckpointError, ConfigError, DataError, LaunchError, NumericsError
from nsa.inspect.health import unhealthy
from nsa.inspect.reading import read_run
from nsa.parallel.world import World
from nsa.record import events
from nsa.record.attention_stats import Sample
from nsa.record.run_log import RunLog
from nsa.run_folder import GateStats
from nsa.train import train
from nsa.train.folder import Claim
from nsa.train.monitor import Monitor
from tests.checkpoint.helpers import small, train_until
from tests.distributed.launching import events_of, metrics_of, run_ranks, write_config
from tests.train.test_training import rows_of, tiny


@pytest.fixture(params=["init", "log"])
def hanging_tracker(monkeypatch, request):
    """Stands in for an installed package whose network never answers: from the start, or later."""
    released = threading.Event()
    package = types.ModuleType("wandb")
    package.init = lambda **_: released.wait(60) if request.param == "init" else None
    package.log = lambda *_, **__: released.wait(60)
    package.finish = lambda: released.wait(60)
    monkeypatch.setitem(sys.modules, "wandb", package)
    yield
    released.set()


def test_a_tracker_that_hangs_holds_up_neither_training_nor_files(tmp_path, monkeypatch, hanging_tracker):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(events, "TIMEOUT_S", 1.0)
    train(tiny(), tmp_path / "plain")
    began = time.monotonic()
    options = ("telemetry.tracker=wandb", "telemetry.tensorboard=true", "checkpoint.every=1")
    train(tiny(*options), tmp_path / "tracked")
    assert time.monotonic() - began < 30, "not a wait for every checkpoint and for the end"
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("plain", "tracked")]
    assert losses[0] == losses[1]
    curves = EventAccumulator(str(tmp_path / "tracked" / "tb")).Reload()
    assert [point.step for point in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in events_of(tmp_path / "tracked") if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert metrics_of(tmp_path / "tracked")["telemetry_failures"] >= 6, "every event it did not take"


CSV = ("training.csv", "gate_stats.csv", "k_stats.csv", "k_stats_layers.csv", "fallback_counters.csv")


@pytest.mark.parametrize(
    ("nowhere", "more"),
    [("/dev/full", CSV), ("/sys/nothing", ())],  # a CSV file that cannot even be opened ends the run at its start
    ids=["full disk", "read-only folder"],
)
def test_without_writable_records_the_same_weights_are_trained_and_losses_are_counted(tmp_path, nowhere, more, no_room):
    train(tiny(), tmp_path / "plain")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tb").write_text("a file where a folder should be")
    no_room("heartbeat_rank0.jsonl", "run.log", "trace_rank0.jsonl", *more, instead=nowhere)
    options = ("telemetry.trace_grads=true", "telemetry.tensorboard=true", "telemetry.every=2")
    train(tiny(*options), tmp_path / "run")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "run")]
    assert weights[0] == weights[1]
    metrics = metrics_of(tmp_path / "run")
    assert (metrics["status"], metrics["incidents"]) == ("done", 1)
    # The heartbeat lost 6 steps, 4 samples of three kinds, the start and the end.
    assert metrics["telemetry_failures"] > 6 + 4 * 3 + 2
    assert f"{metrics['telemetry_failures']} of rank 0" in "".join(unhealthy(read_run(tmp_path / "run")))


def test_a_run_that_is_started_fresh_does_not_show_the_incidents_of_the_one_before(tmp_path):
    with pytest.raises(NumericsError):
        train(tiny("train.lr=1e30", "train.grad_clip=0"), tmp_path)
    told = {"status": "failed", "rank": 0, "incidents": 1, "telemetry_failures": 0}
    assert metrics_of(tmp_path).items() >= told.items()
    assert "non_finite" in [h.kind for h in read_run(tmp_path).timeline]
    train(tiny("checkpoint.background=false"), tmp_path, fresh=True)
    view = read_run(tmp_path)
    assert [h.kind for h in view.timeline] == ["end", "start"]
    assert (view.attempts, unhealthy(view)) == (1, [])


def test_a_start_that_is_refused_is_not_counted_as_one(tmp_path, monkeypatch):
    heartbeat = tmp_path / "heartbeat_rank0.jsonl"
    with pytest.raises(CheckpointError, match="gone"):
        train(small("train.init_from=gone"), tmp_path)
    assert heartbeat.read_bytes() == b""
    train_until(3, tmp_path)
    before = heartbeat.read_bytes()
    mistakes = (
        ("train.lr=1.0", ConfigError),
        ("train.teacher=gone", CheckpointError),
        ("data.tokenizer=gone/tokenizer.json", DataError),
        ("data.mixture=[{source: text, paths: [gone]}]", DataError),
    )
    for mistake, kind in mistakes:
        with pytest.raises(kind):
            train(small(mistake), tmp_path, accept_changes=kind is DataError)
        assert heartbeat.read_bytes() == before, mistake
    monkeypatch.setattr(Monitor, "open", lambda *_: (_ for _ in ()).throw(LaunchError("no room for the tables")))
    with pytest.raises(LaunchError, match="no room"):
        train(small(), tmp_path)  # after its first batch
    monkeypatch.undo()
    assert heartbeat.read_bytes() == before
    view = read_run(tmp_path)
    assert (view.attempts, view.status.kind, view.status.reason) == (1, "failed", "no room for the tables")
    train(small(), tmp_path)
    assert read_run(tmp_path).attempts == 2


def test_every_step_counts_the_records_lost_so_far(tmp_path, no_room):
    no_room("gate_stats.csv")
    train(tiny("telemetry.every=1"), tmp_path)
    counts = [e["telemetry_failures"] for e in events_of(tmp_path) if e["event"] == "step"]
    assert counts[0] == 0
    assert counts[-1] >= 4
    assert counts == sorted(counts)
    assert read_run(tmp_path).telemetry_failures[0] >= counts[-1]


def test_a_run_that_fails_counts_lost_records(tmp_path, no_room):
    no_room("heartbeat_rank0.jsonl")
    with pytest.raises(NumericsError):
        train(tiny("train.lr=1e30", "train.grad_clip=0"), tmp_path)
    metrics = metrics_of(tmp_path)
    assert metrics["status"] == "failed"
    assert metrics["telemetry_failures"] >= 4, "boot, first batch, start and the incident at least"
    assert metrics["incidents"] >= 1
    assert f"{metrics['telemetry_failures']} of rank 0" in "".join(unhealthy(read_run(tmp_path)))


def stalled(tmp_path, timeout_s, **telemetry):
    """A real run of one process whose data thread never answers after a few batches."""
    config = write_config(
        tmp_path,
        train={"steps": 200, "eval_every": 0, "out_dir": str(tmp_path / "run")},
        telemetry={"tensorboard": False, "watchdog_first_step_s": 60.0, **telemetry},
        data={"source": "synthetic", "prefetch": 1, "stall_s": 0.5, "timeout_s": timeout_s},
    )
    (ended,) = run_ranks(1, "train", config, faults="data.batch:sleep:hit=6:seconds=1000")
    stalls = [e for e in events_of(tmp_path / "run") if e["event"] == "data_stall"]
    assert len(stalls) >= 2, "it is said, and again, before anything ends"
    assert re.search(r"data: waited \d+\.\d s for the next batch", ended.output)
    return ended, metrics_of(tmp_path / "run")


def test_data_that_does_not_come_within_its_time_is_an_error_of_the_data(tmp_path):
    ended, metrics = stalled(tmp_path, timeout_s=2.0, watchdog_floor_s=60.0)
    assert ended.code == 3, ended.output
    assert metrics["exit_code"] == 3
    assert re.search(r"waited 2\.\d s for the next batch", metrics["reason"])
    assert not list((tmp_path / "run").glob("stackdump_*"))
    assert (metrics["rank"], metrics["incidents"], metrics["telemetry_failures"]) == (0, 0, 0)


def test_data_that_does_not_come_within_the_watchdogs_time_is_a_hang_that_names_the_data(tmp_path):
    ended, metrics = stalled(tmp_path, timeout_s=30.0, watchdog_floor_s=2.0)
    assert ended.code == 6, ended.output
    assert metrics["exit_code"] == 6
    (dump,) = (tmp_path / "run").glob("stackdump_*_rank0.txt")
    assert "in _load" in dump.read_text(), "the stacks show the thread that reads"
    assert f"(phase data); stacks in {dump}; the same command resumes" in metrics["reason"]
    assert (metrics["rank"], metrics["incidents"], metrics["telemetry_failures"]) == (0, 0, 0)


def test_a_rank_that_waits_for_one_without_data_leaves_the_decision_to_it_and_both_end_as_a_hang(tmp_path):
    config = write_config(
        tmp_path,
        train={"steps": 200, "eval_every": 0, "out_dir": str(tmp_path / "run")},
        telemetry={"tensorboard": False, "watchdog_floor_s": 4.0, "watchdog_first_step_s": 60.0},
        data={"source": "synthetic", "prefetch": 1, "stall_s": 1.0},
    )
    ended = run_ranks(2, "train", config, faults="data.batch:sleep:hit=6:rank=1:seconds=1000")
    assert [e.code for e in ended] == [6, 6], [e.output for e in ended]
    hangs = [next(e for e in events_of(tmp_path / "run", rank) if e["event"] == "hang") for rank in (0, 1)]
    assert [hang["phase"] for hang in hangs] == ["step", "data"]
    assert hangs[1]["time"] < hangs[0]["time"], "the rank that has no data is the first to say so"


def test_the_summary_is_json_whatever_the_gates_are(tmp_path):
    world = World(torch.device("cpu"))
    monitor = Monitor(tiny(), Claim(tmp_path), world, RunLog(tmp_path, 0))
    stats = GateStats(10, math.nan, 0.0, math.inf, 0.0, 0.2, 0.3, 0.5)
    monitor._emit_sample(Sample(1, {"a": stats, "all": stats}, {}))
    monitor.close()
    told = json.loads(json.dumps(monitor.describe(), allow_nan=False))
    assert told["gates"] == {**asdict(stats), "mean_entropy": None, "largest_share": None}
    assert [e["mean_entropy"] for e in events_of(tmp_path)] == ["nan"]
