"""`nsa ready` with real processes: GO where all is well, and NO-GO that names the sabotage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.data.hub_server import Fault, HubServer
from tests.data.mirror import write_mirror
from tests.distributed.launching import ROOT, TINY, environment
from tests.telemetry.test_report import browse

LEARNS = {"steps": 1000, "seq_len": 64, "batch_size": 4, "lr": 3e-3, "eval_every": 50, "eval_sequences": 4}
QUICK = ("--quick",)


def write_config(folder: Path, **sections: dict[str, object]) -> Path:
    """A tiny model that learns, its files all written."""
    tree = {**TINY, "train": LEARNS, "telemetry": {"watchdog_floor_s": 60.0}}
    tree = {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}}
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))
    return path


def ready(folder: Path, config: Path, *arguments: str, **variables: str) -> tuple[int, str, dict]:
    """Exit code, output and readiness.json of the command."""
    ended = subprocess.run(
        [sys.executable, "-m", "nsa", "ready", str(config), "--out", str(folder / "ready"), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    result = folder / "ready" / "readiness.json"
    output = ended.stdout + ended.stderr
    return ended.returncode, output, json.loads(result.read_text()) if result.exists() else {}


def failed(result: dict) -> set[tuple[str, str]]:
    return {(c["phase"], c["name"]) for c in result["criteria"] if c["verdict"] == "fail"}


def reason(result: dict, about: str) -> str:
    return next(line for line in result["reasons"] if about in line)


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


def test_a_rank_that_hangs_in_backward(tmp_path):
    config = write_config(tmp_path, telemetry={"watchdog_floor_s": 4.0}, parallel={"timeout_s": 120.0})
    code, output, result = ready(
        tmp_path, config, *QUICK, "--nproc", "2", NSA_FAULTS="step.backward:sleep:hit=5:rank=1"
    )
    assert code == 1, output
    assert ("phase1", "stability") in failed(result)
    assert "exit code 6" in reason(result, "stability")
    assert "4 of 20 steps" in reason(result, "stability")
    assert list((tmp_path / "ready" / "phase1").glob("stackdump_*_rank1.txt"))
    assert [phase["was_run"] for phase in result["phases"]] == [True, True, False, False]
    assert "phase2 (the configured data) was not run" in result["reasons"]


WRONG_GRADIENT = """
from nsa.ops.reference import selected
right = selected.backward
def backward(*arguments):
    dq, dk, dv = right(*arguments)
    return dq, dk * 1.01, dv
selected.backward = backward
"""


def test_a_kernel_that_returns_a_wrong_gradient(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG_GRADIENT)
    config = write_config(tmp_path)
    code, output, result = ready(tmp_path, config, *QUICK, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert code == 1, output
    assert failed(result) == {("phase0", "kernels")}
    assert "sel (reference): gradient of k by differences is off by" in reason(result, "kernels")
    assert not any("gradient of v" in line for line in result["reasons"])


def test_everything_that_is_missed_is_named_with_target_and_value(tmp_path):
    """Too slow, too fat, not learning, without its statistics as the earlier system was, and on invented data."""
    diverges = {"lr": 6.0, "warmup_steps": 60, "grad_clip": 0.0}  # fine at first, far too fast at the end
    config = write_config(tmp_path, train=diverges, data={"source": "fineweb_edu", "first_batch_s": 5.0})
    limits = ("readiness.min_toks_per_s=1e9", "readiness.max_mem_gib=0.01", "readiness.max_step_s=1e-6")
    code, output, result = ready(
        tmp_path,
        config,
        *limits,
        *QUICK,
        "--synthetic-on-fail",
        NSA_DISABLE_AUX_STATS="1",
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path / "hf"),
    )
    assert code == 1, output
    trained = {"throughput", "memory per process", "step time", "loss", "artifacts"}
    assert failed(result) == {("phase1", name) for name in trained} | {("phase2", n) for n in {*trained, "data"}}
    assert "wanted >= 1G tokens/s" in reason(result, "throughput")
    assert "wanted < 0.01 GiB" in reason(result, "memory")
    assert "did not fall" in reason(result, "loss")
    assert "k_stats.csv: holds no sample" in reason(result, "artifacts")
    assert "gate_stats.csv: holds no sample" in reason(result, "artifacts")
    assert "trained on fallback data: " in reason(result, "phase2: data")
    assert all(phase["was_run"] for phase in result["phases"])  # nothing is broken: all of it is measured


def test_a_nan_at_step_150(tmp_path):
    code, output, result = ready(tmp_path, write_config(tmp_path), NSA_FAULTS="step.loss:nan:hit=150")
    assert code == 1, output
    assert failed(result) >= {("phase1", "stability")}
    said = reason(result, "stability")
    assert "149 of 200 steps" in said
    assert "exit code 5" in said
    assert "step 150: the loss is nan" in said


@pytest.fixture
def hub(tmp_path):
    write_mirror(tmp_path / "mirror")
    with HubServer(tmp_path / "mirror") as server:
        yield server


def hub_variables(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}


def test_data_that_stalls(tmp_path, hub):
    hub.faults.append(Fault(times=10**6, sleep=600.0))
    config = write_config(tmp_path, data={"source": "fineweb_edu", "first_batch_s": 6.0, "stall_s": 1.0})
    code, output, result = ready(tmp_path, config, *QUICK, **hub_variables(hub, tmp_path))
    assert code == 1, output
    assert ("phase2", "stability") in failed(result)
    assert not any(phase == "phase1" for phase, _ in failed(result))
    assert "exit code 3" in reason(result, "phase2: stability")


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
