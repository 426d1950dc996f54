"""Streamed data under several ranks: the same run for any number of them, exact after a kill, over a hub that fails."""

import signal

import pytest

from tests import warm
from tests.data.hub_server import HubServer
from tests.data.mirror import write_mirror
from tests.distributed.launching import (
    environment,
    events_of,
    metrics_of,
    numbers_of,
    ranks_environment,
    rows_of,
    run_ranks,
    wait_all,
    write_config,
)

pytestmark = pytest.mark.timeout(600)
TRAIN = {"steps": 6, "seq_len": 64, "batch_size": 4, "lr": 2e-3, "eval_every": 3, "eval_sequences": 5}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirror")
    write_mirror(folder, files=2, row_groups=6, rows=20)
    return folder


@pytest.fixture(scope="module")
def runs(mirror, tmp_path_factory):
    """The same run on one rank and on two, undisturbed, by number of ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for size in (1, 2):
        config = write_config(folder, data=streamed(mirror), train={**TRAIN, "out_dir": str(folder / str(size))})
        for ended in run_ranks(size, "train", config):
            assert ended.code == 0, ended.output
    return {size: folder / str(size) for size in (1, 2)}


def streamed(mirror, **more):
    return {"source": "fineweb_edu", "paths": [str(mirror)], "validation_fraction": 0.1, **more}


def losses_of(run):
    return [float(row["loss"]) for row in rows_of(run)]


def test_one_rank_and_two_train_on_the_same_sequences(runs):
    one, two = losses_of(runs[1]), losses_of(runs[2])
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-5)
    assert metrics_of(runs[2])["val_loss"] == pytest.approx(metrics_of(runs[1])["val_loss"], rel=1e-5)
    assert metrics_of(runs[2])["data"]["sequences"] == {"fineweb_edu": 24}


def test_a_killed_run_resumes_to_the_same_bits(mirror, runs, tmp_path):
    config = write_config(tmp_path, data=streamed(mirror), train={**TRAIN, "out_dir": str(tmp_path / "killed")})
    killed = run_ranks(2, "train", config, faults="step.backward:kill:hit=5:rank=0")
    assert killed[0].code == -signal.SIGKILL
    for ended in run_ranks(2, "train", config):
        assert ended.code == 0, ended.output
    assert numbers_of(tmp_path / "killed") == numbers_of(runs[2])


def test_failures_of_the_hub_change_no_loss(mirror, runs, tmp_path, monkeypatch):
    """Through HTTP, with redirects and ranges; 503, 429, a cut connection and expired links on the way."""
    with HubServer(mirror) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        server.fault(side="hub", match="resolve", times=2, status=503)
        server.fault(side="cdn", match="parquet", times=2, status=429, retry_after=0)
        server.fault(side="cdn", match="parquet", times=2, cut=100)
        remote = write_config(
            tmp_path / "b", data=streamed(mirror, paths=[]), train={**TRAIN, "out_dir": str(tmp_path / "remote")}
        )
        (ended,) = run_ranks(1, "train", remote)
    assert ended.code == 0, ended.output
    assert losses_of(tmp_path / "remote") == losses_of(runs[1])


def test_when_one_of_two_ranks_falls_back_both_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    options = {"source": "fineweb_edu", "validation_fraction": 0.1, "first_batch_s": 1.0}
    config = write_config(tmp_path / "c", data=options, train={**TRAIN, "out_dir": str(tmp_path / "run")})
    refused = run_ranks(1, "train", config)[0]
    assert refused.code == 3
    assert "127.0.0.1:9" in refused.output
    for rank, ended in enumerate(run_ranks(2, "train", config, "--synthetic-on-fail")):
        assert ended.code == 0, ended.output
        (incident,) = [e for e in events_of(tmp_path / "run", rank) if e["event"] == "incident"]
        assert incident["kind"] == "data_fallback"
    metrics = metrics_of(tmp_path / "run")
    assert metrics["data"]["source"] == "synthetic"
    assert metrics["steps"] == 6


def test_ranks_that_read_different_files_are_refused(tmp_path):
    """Copies on two nodes, one of which is stale: under one cursor some documents would be read twice, some never."""
    config = write_config(
        tmp_path, data={"source": "text", "paths": ["~/texts"]}, train={**TRAIN, "out_dir": str(tmp_path / "run")}
    )
    ranks = []
    for place in ranks_environment(2):
        home = tmp_path / place["RANK"]
        (home / "texts").mkdir(parents=True)
        for number in range(20):
            (home / "texts" / f"{number}.txt").write_text(f"text {number} of rank {place['RANK']} " * 20)
        ranks.append(warm.start("nsa", "train", config, env=environment(**place, HOME=str(home))))
    for ended in wait_all(ranks):
        assert ended.code == 3, ended.output
        assert "data: ranks read different data; make the files of data.paths identical" in ended.output
