"""`nsa ready` with real processes: GO where all is well, and no process left behind when it is stopped."""

import json
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.checks.helpers import ready, ready_here, write_config
from tests.distributed.launching import environment
from tests.inspect.test_report import browse

pytestmark = pytest.mark.timeout(900)


def earlier_result(folder: Path) -> Path:
    """What a full check on another machine measured: half the memory, a thousand times the speed."""
    measured = {"memory per process": (0.1, "lower"), "throughput": (1e7, "higher"), "step time": (1e-5, "lower")}
    rows = [{"phase": "phase1", "name": n, "value": v, "better": better} for n, (v, better) in measured.items()]
    path = folder / "before.json"
    path.write_text(
        json.dumps({"schema": 1, "scope": "full", "nproc": 1, "machine": {"gpu": ["H200"]}, "criteria": rows})
    )
    return path


def test_a_healthy_run_passes_the_quick_check_and_is_compared_with_a_baseline(tmp_path):
    config = write_config(tmp_path)
    code, output, result = ready(tmp_path, config, "--quick", "--baseline", str(earlier_result(tmp_path)))
    assert code == 0, output
    assert output.startswith("quick check: about 30 steps\n"), "the effort is stated first"
    assert (result["schema"], result["outcome"], result["scope"], result["reasons"]) == (1, "GO", "quick", [])
    steps = {run["name"]: run["steps"] for phase in result["phases"] for run in phase["runs"]}
    assert steps == {"phase0-one": 1, "phase1": 10, "phase2": 10, "phase3-whole": 4, "phase3-killed": 4}
    criteria = {(c["phase"], c["name"]): c for c in result["criteria"]}
    assert criteria["phase1", "GPU utilisation"]["verdict"] == "n/a"  # no GPU: decides nothing
    assert criteria["phase3", "resume"]["verdict"] == "pass"
    assert criteria["phase3", "resume"]["measured"] == "equal, from step_00000002"
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert page.startswith("# GO (quick check only")
    assert f"nsa ready {config}" in page

    changes = {row["name"]: row for row in result["changes"]["rows"]}
    assert {row["verdict"] for row in changes.values()} == {"worse"}
    memory = criteria["phase1", "memory per process"]["value"]
    assert changes["memory per process"]["change"] == pytest.approx(memory / 0.1 - 1)
    assert result["changes"]["unlike"] == ["scope: full then, quick now", "GPU: H200 then, none now"]

    shown, complaints = browse(tmp_path / "ready" / "readiness.html", tmp_path / "profile")
    assert complaints == []
    for identity in ("verdict", "criteria", "against-the-baseline", "phases", "artifacts", "environment", "kernels"):
        assert f'id="{identity}"' in shown


def test_only_the_run_with_the_configured_data_reaches_the_tracker(tmp_path, monkeypatch):
    package, names = types.ModuleType("wandb"), []
    package.init = lambda **options: names.append(options["name"])
    package.log = package.finish = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "wandb", package)
    result = ready_here(tmp_path, write_config(tmp_path), "telemetry.tracker=wandb")
    assert (result["outcome"], names) == ("GO", ["phase2"])


@pytest.mark.long
def test_a_healthy_run_passes_the_full_check(tmp_path):
    config = write_config(tmp_path)
    code, output, result = ready(tmp_path, config)
    assert code == 0, output
    assert (result["outcome"], result["scope"], result["reasons"]) == ("GO", "full", [])
    steps = {run["name"]: run["steps"] for phase in result["phases"] for run in phase["runs"]}
    assert steps == {
        "phase0-one": 1, "phase0-deep": 1, "phase1": 200, "phase2": 300, "phase3-whole": 20, "phase3-killed": 20,
    }  # fmt: skip
    criteria = {(c["phase"], c["name"]): c for c in result["criteria"]}
    assert criteria["phase0", "deep step"]["target"] == "12 layers, 2048 tokens, checkpointing block"
    assert criteria["phase0", "deep step"]["verdict"] == "pass"
    assert criteria["phase3", "resume"]["measured"] == "equal, from step_00000012"
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert page.startswith("# GO\n")
    assert f"nsa train {config}" in page


def start_check(tmp_path: Path, *arguments: str) -> warm.Process:
    command = ("nsa", "ready", str(write_config(tmp_path)), "--out", str(tmp_path / "ready"), *arguments)
    return warm.start(*command, env=environment())


def stop_check(checking: warm.Process, number: int, until: Callable[[list[psutil.Process]], bool]) -> int:
    """Sends the signal once the check's processes are as awaited; its exit code, when none of them is left."""
    deadline, started = time.monotonic() + 120, list[psutil.Process]()
    while not until(started) and time.monotonic() < deadline:
        time.sleep(0.05)
        started = psutil.Process(checking.pid).children(recursive=True)
    assert until(started)
    checking.send_signal(number)
    code = checking.wait(60)
    _, left = psutil.wait_procs(started, timeout=10)
    # One that ended and that the first process of the machine has not reaped yet is not left behind.
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_check_that_is_stopped_in_a_probe_leaves_no_process(tmp_path, number, code):
    assert stop_check(start_check(tmp_path), number, lambda started: len(started) > 0) == code


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_check_that_is_stopped_in_a_run_leaves_no_process(tmp_path, number, code):
    def both_ranks_run(started: list[psutil.Process]) -> bool:
        return len(started) >= 3 and any((tmp_path / "ready").glob("phase0-one/heartbeat_rank1*"))

    assert stop_check(start_check(tmp_path, "--nproc", "2"), number, both_ranks_run) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--baseline", "absent.json"),
            "--baseline: absent.json: cannot be read: No such file or directory; give",
        ),
        (("readiness.max_mem_gib=lots",), "readiness.max_mem_gib"),
        (("--nproc", "0"), "--nproc"),
        (("--nproc", "3"), "train.batch_size: 4 sequences cannot be divided among 3 ranks"),
        (("--nproc", "2", "parallel.strategy=single"), "parallel.strategy: 'single' does not work with 2 processes"),
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
