"""`nsa ready` with real processes: GO where all is well, and an end that leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.checks.helpers import ready, write_config
from tests.distributed.launching import ROOT, environment
from tests.inspect.test_report import browse


def earlier_result(folder: Path) -> Path:
    """What another machine measured, in a quick check: half the memory, a thousand times the speed."""
    measured = {"memory per process": (0.1, "lower"), "throughput": (1e7, "higher"), "step time": (1e-5, "lower")}
    rows = [{"phase": "phase1", "name": n, "value": v, "better": better} for n, (v, better) in measured.items()]
    path = folder / "before.json"
    path.write_text(
        json.dumps({"schema": 1, "scope": "quick", "nproc": 1, "machine": {"gpu": ["H200"]}, "criteria": rows})
    )
    return path


def test_a_healthy_run_is_cleared_in_full_and_compared_with_another_time(tmp_path):
    config = write_config(tmp_path)
    code, output, result = ready(tmp_path, config, "--baseline", str(earlier_result(tmp_path)))
    assert code == 0, output
    assert (result["schema"], result["outcome"], result["scope"], result["reasons"]) == (1, "GO", "full", [])
    steps = {run["name"]: run["steps"] for phase in result["phases"] for run in phase["runs"]}
    assert steps == {
        "phase0-one": 1, "phase0-deep": 1, "phase1": 200, "phase2": 300, "phase3-whole": 20, "phase3-killed": 20,
    }  # fmt: skip
    criteria = {(c["phase"], c["name"]): c for c in result["criteria"]}
    assert criteria["phase1", "GPU utilisation"]["verdict"] == "n/a"  # no GPU: decides nothing
    assert criteria["phase0", "deep step"]["target"] == "12 layers, 2048 tokens, checkpointing block"
    assert criteria["phase0", "deep step"]["verdict"] == "pass"
    assert criteria["phase3", "resume"]["verdict"] == "pass"
    assert criteria["phase3", "resume"]["measured"] == "equal, from step_00000012"
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert page.startswith("# GO\n")
    assert f"nsa train {config}" in page

    changes = {row["name"]: row for row in result["changes"]["rows"]}
    assert {row["verdict"] for row in changes.values()} == {"worse"}
    memory = criteria["phase1", "memory per process"]["value"]
    assert changes["memory per process"]["change"] == pytest.approx(memory / 0.1 - 1)
    assert result["changes"]["unlike"] == ["scope: quick then, full now", "GPU: H200 then, none now"]

    shown, complaints = browse(tmp_path / "ready" / "readiness.html", tmp_path / "profile")
    assert complaints == []
    for identity in ("verdict", "criteria", "against-the-baseline", "phases", "artifacts", "environment", "kernels"):
        assert f'id="{identity}"' in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_check_that_is_stopped_leaves_no_process_behind(tmp_path, number, code):
    config = write_config(tmp_path)
    checking = subprocess.Popen(
        [sys.executable, "-m", "nsa", "ready", str(config), "--out", str(tmp_path / "ready"), "--nproc", "2"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "ready").glob("phase0-one/heartbeat_rank1*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = psutil.Process(checking.pid).children(recursive=True)
    assert len(started) >= 3  # a launcher and two ranks
    checking.send_signal(number)
    assert checking.wait(60) == code
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--baseline", "absent.json"), "--baseline: absent.json: no such file"),
        (("readiness.max_mem_gib=lots",), "readiness.max_mem_gib"),
        (("--nproc", "0"), "--nproc"),
    ],
)
def test_bad_input_is_an_error_before_anything_starts(tmp_path, arguments, words):
    code, output, _ = ready(tmp_path, write_config(tmp_path), *arguments)
    assert code == 2
    assert words in output
    assert not (tmp_path / "ready").exists()


def test_it_starts_its_processes_itself(tmp_path):
    code, output, _ = ready(tmp_path, write_config(tmp_path), WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    assert code == 7
    assert "--nproc N" in output
