"""A run whose data does not come: it reports that, stops when asked to, and ends with the exit code of the cause."""

import json
import os
import re
import signal
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.config import parse_config
from nsa.data import build
from nsa.data.sources import hub as hub_client
from nsa.errors import DataUnavailableError, Preempted
from nsa.run_folder import TRAINING, read_rows
from nsa.train import train
from tests.data.hub_server import REPO, HubServer, download
from tests.data.mirror import write_mirror
from tests.distributed.launching import events_of, metrics_of, run_ranks, start_ranks, wait_all, write_config
from tests.faults.kills import assert_equal_to_the_bit, assert_prefix_equal
from tests.train.test_feed import TINY, config_of, losses_of, texts  # noqa: F401
from tests.waiting import wait_until

STALL = 3600  # seconds that no test waits for


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose files are larger than what is read of them for their footers."""
    write_mirror(tmp_path / "repository", files=2, row_groups=4, rows=40, fat=2500)
    with HubServer(tmp_path / "repository") as server:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        for name, value in {**settings, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        # huggingface_hub reads HF_HOME when it is imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        yield server


def streamed(*more):
    return parse_config({}, "test", [*TINY, "data.source=fineweb_edu", "data.stall_s=0.2", *more])


def stalls_of(run):
    return [event for event in events_of(run) if event["event"] == "data_stall"]


def wait_for(found, process):
    deadline = time.monotonic() + 60
    while not found():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.05)


def has_event(run, kind):
    path = run / "heartbeat_rank0.jsonl"
    return path.exists() and f'"{kind}"' in path.read_text()


@pytest.mark.parametrize(
    ("fault", "known"),
    [
        ({"side": "hub", "match": "/tree/"}, "fineweb_edu: files are being listed; "),
        ({"side": "cdn", "match": "001_00000"}, "fineweb_edu: 1 of 2 footers read; "),
    ],
)
def test_a_hub_that_is_slow_while_the_source_is_opened_is_reported(hub, tmp_path, monkeypatch, capsys, fault, known):
    monkeypatch.setattr(hub_client, "SLOW_S", 0.1)
    hub.fault(sleep=0.9, **fault)
    train(streamed(), tmp_path / "run")
    messages = [event["message"] for event in stalls_of(tmp_path / "run")]
    opening = [message for message in messages if "s for the source to open; " in message]
    assert len(opening) >= 3
    what = f"{REPO}, listing" if fault["side"] == "hub" else "001_00000.parquet, footer"
    assert any(known in message and f"{what}: no answer from" in message for message in opening), opening
    assert opening[0] in capsys.readouterr().out


def test_a_hub_that_is_silent_while_the_source_is_opened_ends_the_run_in_time(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_client, "SLOW_S", 0.1)
    hub.fault(side="hub", match="/tree/", times=10**9, sleep=STALL)
    began = time.monotonic()
    with pytest.raises(DataUnavailableError, match=rf"{REPO}, listing: no answer .*more time with data\.first_batch_s"):
        train(streamed("data.first_batch_s=1.0", "data.timeout_s=1.0"), tmp_path / "run")
    assert time.monotonic() - began < 8, "long before the request times out"


def test_text_that_takes_long_to_tokenise_is_reported_with_how_far_it_is(texts, tmp_path, monkeypatch):  # noqa: F811
    real = build.tokenise_unit
    monkeypatch.setattr(build, "tokenise_unit", lambda *unit, **more: time.sleep(0.25) or real(*unit, **more))
    (texts / "b.jsonl").write_text((texts / "a.jsonl").read_text())
    train(config_of(texts, "data.stall_s=0.1", "data.workers=1"), tmp_path / "run")
    messages = [event["message"] for event in stalls_of(tmp_path / "run")]
    assert any(message.endswith("; text: 1 of 2 parts tokenised") for message in messages), messages


def test_validation_documents_that_take_long_are_reported(hub, tmp_path, monkeypatch):
    real = build.collect_validation
    monkeypatch.setattr(build, "collect_validation", lambda *given: time.sleep(2.0) or real(*given))
    train(streamed(), tmp_path / "run")
    assert max(float(row["step_s"]) for row in read_rows(tmp_path / "run", TRAINING)) < 2.0, "no part of a step"
    messages = [event["message"] for event in stalls_of(tmp_path / "run")]
    assert any("s for validation documents" in message for message in messages), messages
    assert metrics_of(tmp_path / "run")["val_loss"] > 0


def test_a_request_to_stop_ends_the_wait_for_validation_documents(hub, tmp_path, monkeypatch):
    is_over = threading.Event()

    def collect(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        is_over.wait(60)

    monkeypatch.setattr(build, "collect_validation", collect)
    began = time.monotonic()
    with pytest.raises(Preempted, match="step 1 is saved"):
        train(streamed("train.eval_every=2"), tmp_path / "run")
    is_over.set()
    assert time.monotonic() - began < 30
    assert metrics_of(tmp_path / "run")["status"] == "preempted"


def test_a_run_without_threads_reports_its_waits_too(hub, tmp_path):
    hub.fault(side="cdn", skip=2, sleep=0.6)  # after the two footers
    train(streamed("data.workers=0"), tmp_path / "run")
    messages = [event["message"] for event in stalls_of(tmp_path / "run")]
    assert any(re.match(r"data: waited \d+\.\d s for the first batch", message) for message in messages), messages


def test_the_commit_that_is_read_is_recorded(hub, tmp_path, capsys):
    train(streamed(), tmp_path / "run")
    commit = hub.branches["main"]
    assert metrics_of(tmp_path / "run")["data"]["commits"] == [commit]
    assert f", streamed, commit {commit}\n" in capsys.readouterr().out
    (event,) = [event for event in events_of(tmp_path / "run") if event["event"] == "first_batch"]
    assert commit in event["data"]
    part = {"source": "fineweb_edu", "paths": [str(hub.folder)]}
    mixed = parse_config({"data": {"mixture": [part, {"source": "fineweb_edu"}]}}, "test", TINY)
    train(mixed, tmp_path / "mixed")
    assert metrics_of(tmp_path / "mixed")["data"]["commits"] == [commit], "a mirror has none"


def test_documents_that_a_stream_skips_are_counted(tmp_path):
    rows = ["", None, *("a text that is long enough for this " * 20 for _ in range(60))]
    (tmp_path / "mirror").mkdir()
    pq.write_table(pa.table({"text": rows}), tmp_path / "mirror" / "a.parquet")
    train(streamed(f"data.paths=[{tmp_path / 'mirror'}]", "data.validation_fraction=0"), tmp_path / "run")
    assert metrics_of(tmp_path / "run")["data"]["skipped"] == {"empty": 1, "no text": 1}


def test_a_run_that_began_at_the_hub_goes_on_offline(hub, tmp_path, monkeypatch):
    before = set(threading.enumerate())
    config = streamed("checkpoint.every=2", "checkpoint.background=false", "train.steps=6")
    train(config, tmp_path / "whole")
    monkeypatch.setenv("NSA_FAULTS", "step.end:raise:hit=4")
    with pytest.raises(RuntimeError, match=r"step\.end"):
        train(config, tmp_path / "run")
    monkeypatch.delenv("NSA_FAULTS")
    download(hub, tmp_path / "home")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The run that failed may have left a thread in the middle of a request.
    wait_until(lambda: not any(thread.name.startswith("data-") for thread in set(threading.enumerate()) - before))
    asked = len(hub.log)
    train(config, tmp_path / "run")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert len(hub.log) == asked


def test_a_run_whose_hub_stalls_ends_with_the_code_for_data(hub, tmp_path):
    """Threads that wait for the server, inside arrow, must not turn the end of the process into an abort."""
    hub.fault(side="cdn", skip=2, times=10**9, sleep=STALL)  # the footers come
    data = {"source": "fineweb_edu", "validation_fraction": 0.1, "first_batch_s": 1.0, "stall_s": 0.5, "workers": 4}
    config = write_config(tmp_path, data=data, train={"out_dir": str(tmp_path / "run")})
    (ended,) = run_ranks(1, "train", config)
    assert ended.code == 3, ended.output
    # One error. With Triton 3.9, leaks that Triton's own bindings report may follow it.
    (last,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert "row group" in last
    assert "data.first_batch_s" in last
    assert re.search(r"data: waited \d+\.\d s for the first batch", ended.output)
    assert metrics_of(tmp_path / "run")["exit_code"] == 3


def stop_while_stalled(tmp_path, data, faults="", number=signal.SIGTERM, **train):
    """One process, sent the signal when it has reported a stall; how it ended, and how long that took."""
    config = write_config(
        tmp_path,
        data={"stall_s": 0.5, **data},
        train={"steps": 5, "micro_batch": 1, "out_dir": str(tmp_path / "run"), **train},
        checkpoint={"every": 0},
    )
    (process,) = start_ranks(1, "train", config, faults=faults)
    wait_for(lambda: has_event(tmp_path / "run", "data_stall"), process)
    asked = time.monotonic()
    process.send_signal(number)
    (ended,) = wait_all([process], timeout_s=60)
    return config, ended, time.monotonic() - asked


def test_a_process_asked_to_stop_in_a_stall_saves_the_last_step_and_goes_on_to_the_bit(tmp_path):
    # The third of the fourth step's four parts does not come: what was computed of the step must leave no trace.
    data = {"source": "synthetic", "workers": 1, "prefetch": 1}
    config, ended, seconds = stop_while_stalled(tmp_path, data, f"data.batch:sleep:hit=15:seconds={STALL}")
    assert ended.code == 75, ended.output
    assert seconds < 20, "long before the batch comes, or the timeout ends the wait"
    assert "asked to stop: step 3 is saved" in ended.output.splitlines()[-1]
    assert metrics_of(tmp_path / "run")["status"] == "preempted"
    assert metrics_of(tmp_path / "run")["steps"] == 3
    both = [start_ranks(1, "train", config, f"train.out_dir={tmp_path / name}")[0] for name in ("run", "whole")]
    for again in wait_all(both, timeout_s=60):
        assert again.code == 0, again.output
    started = [event for event in events_of(tmp_path / "run") if event["event"] == "start"]
    assert started[-1]["from_checkpoint"] == "step_00000003"
    assert assert_prefix_equal(tmp_path / "run", tmp_path / "whole") == 5
    assert_equal_to_the_bit(tmp_path / "run", tmp_path / "whole", 1)


def test_ctrl_c_in_a_stall_of_the_first_step_saves_the_start(tmp_path):
    data = {"source": "synthetic", "workers": 1, "prefetch": 1}
    fault = f"data.batch:sleep:hit=3:seconds={STALL}"
    config, ended, _ = stop_while_stalled(tmp_path, data, fault, signal.SIGINT)
    assert ended.code == 130, ended.output
    assert "asked to stop: step 0 is saved" in ended.output.splitlines()[-1]
    (again,) = run_ranks(1, "train", config)
    assert again.code == 0, again.output
    assert metrics_of(tmp_path / "run")["steps"] == 5


def test_a_process_asked_to_stop_before_its_first_batch_stops(hub, tmp_path):
    hub.fault(side="hub", match="/tree/", times=10**9, sleep=STALL)
    data = {"source": "fineweb_edu", "validation_fraction": 0.1}
    _, ended, seconds = stop_while_stalled(tmp_path, data)
    assert ended.code == 75, ended.output
    assert seconds < 20
    assert ended.output.splitlines()[-1].startswith(
        "stopped: asked to stop at step 0 while the run waited for its first batch"
    )
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["status"] == "preempted"


@pytest.mark.timeout(180)
def test_when_one_of_two_ranks_is_asked_to_stop_before_the_first_batch_both_stop(hub, tmp_path):
    hub.fault(side="cdn", times=10**9, sleep=STALL)
    data = {"source": "fineweb_edu", "validation_fraction": 0.1, "stall_s": 0.5, "first_batch_s": 5.0}
    config = write_config(tmp_path, data=data, train={"steps": 5, "out_dir": str(tmp_path / "run")})
    processes = start_ranks(2, "train", config)
    wait_for(lambda: has_event(tmp_path / "run", "data_stall"), processes[0])
    processes[1].send_signal(signal.SIGTERM)
    for ended in wait_all(processes, timeout_s=90):  # rank 0 waits for as long as the configuration says
        assert ended.code == 75, ended.output
        assert "while the run waited for its first batch" in ended.output
