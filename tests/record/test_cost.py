"""The benchmark of telemetry's cost compares what it says: everything on, and nothing of it."""

import csv
import json

import pytest

from bench.telemetry import Worker, measure, summary

TINY = [
    "--config",
    "configs/quickstart.yaml",
    "runtime.device=cpu",
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "model.head_dim_k=16",
    "model.head_dim_v=16",
    "model.mlp_dim=32",
    "train.seq_len=64",
    "train.batch_size=2",
    "train.steps=60",
    "telemetry.every=10",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two pairs of blocks of one run, and the run's folder."""
    folder = tmp_path_factory.mktemp("bench") / "run0"
    worker = Worker(folder, TINY)
    try:
        return measure([worker], pairs=2, steps=10), folder
    finally:
        worker.end()


def test_off_records_nothing_and_on_everything(measured):
    pairs, folder = measured
    assert [pair["first"] for pair in pairs] == ["on", "off"]
    # A turn ends in the middle between two samples: 5 steps, a block that is not counted, then on, off, off, on.
    silent = set(range(26, 46))
    with (folder / "training.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [step for step in range(1, 56) if step not in silent]
    events = [json.loads(line) for line in (folder / "heartbeat_rank0.jsonl").read_text().splitlines()]
    sampled = {event["step"] for event in events if event["event"] in ("gates", "selection")}
    assert sampled == {1, 10, 20, 50}


def test_the_summary_is_about_pairs(measured):
    pairs, _ = measured
    assert all(pair["on_step_s"] > pair["inside_step_s"] > 0 and pair["off_step_s"] > 0 for pair in pairs)
    told = summary([{"on_step_s": 1.02, "off_step_s": 1.0, "inside_step_s": 0.01}] * 2)
    assert told["cost_percent"] == pytest.approx(2.0)
    assert told["cost_percent_error"] == pytest.approx(0.0, abs=1e-9)
    assert told["inside_percent"] == pytest.approx(1.0)
