"""Something is broken on purpose: `nsa ready` says NO-GO and names it. Real processes."""

import os
from pathlib import Path

import pytest
import torch

from tests.checks.helpers import QUICK, failed, ready, reason, write_config
from tests.data.hub_server import Fault, HubServer
from tests.data.mirror import write_mirror
from tests.distributed.launching import ROOT


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
from nsa.ops.reference.attention import selected
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
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert "1 process on CPU, " in page, "the machine is named although no run has told of it"
    assert f"torch {torch.__version__}" in page


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
