"""Something is broken on purpose: `nsa ready` answers NO-GO and names it.

In this process, on run folders as they are left; and in `make test-long` the same as a command with real processes.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from nsa.ops.reference import selected
from tests.checks.helpers import failed, ready, ready_here, reason, write_config
from tests.data.hub_server import Fault, HubServer
from tests.data.mirror import write_mirror
from tests.distributed.launching import ROOT

pytestmark = pytest.mark.timeout(900)
QUICK = ("--quick",)
DIVERGES = {"lr": 6.0, "warmup_steps": 20, "grad_clip": 0.0}  # fine at first, far too fast at the end
LIMITS = ("readiness.min_toks_per_s=1e9", "readiness.max_mem_gib=0.01", "readiness.max_step_s=1e-6")
TRAINED = {"throughput", "memory per process", "step time", "loss", "artifacts"}


def damage_metrics(**values: object):
    def leave(run: Path) -> None:
        path = run / "metrics.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return leave


def test_a_run_that_ends_early_is_named_and_nothing_after_it_runs(tmp_path):
    hang = damage_metrics(exit_code=6, reason="no progress for 4 s in step 5 (phase backward)")
    result = ready_here(
        tmp_path,
        write_config(tmp_path),
        faults=lambda trial: "step.backward:raise:hit=5" if trial == "phase1" else "",
        leave=lambda run: hang(run) if run.name == "phase1" else None,
    )
    assert ("phase1", "stability") in failed(result)
    assert "4 of 10 steps" in reason(result, "stability")
    assert "exit code 6: no progress for 4 s in step 5" in reason(result, "stability")
    assert [phase["was_run"] for phase in result["phases"]] == [True, True, False, False]
    assert "phase2 (the configured data) was not run" in result["reasons"]
    assert "error: fault at step.backward" in (tmp_path / "ready" / "readiness.md").read_text()


def test_a_wrong_gradient_of_a_kernel_is_named(tmp_path, monkeypatch):
    right = selected.backward

    def wrong(*args, **options):
        dq, dk, dv = right(*args, **options)
        return dq, dk * 1.01, dv

    monkeypatch.setattr(selected, "backward", wrong)
    result = ready_here(tmp_path, write_config(tmp_path))
    assert failed(result) == {("phase0", "kernels")}
    assert "sel (reference): gradient of k by differences is off by" in reason(result, "kernels")
    assert not any("gradient of v" in line for line in result["reasons"])
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert "1 process on CPU, " in page, "the probe names the machine although no run has"
    assert f"torch {torch.__version__}" in page


def test_every_missed_target_is_named_with_target_and_value(tmp_path):
    """Too slow, too much memory, not learning, without its statistics, and on synthetic instead of configured data."""
    fallback = damage_metrics(data={"source": "synthetic", "fallback": "no answer"})
    config = write_config(tmp_path, train=DIVERGES, telemetry={"attention": False})
    result = ready_here(tmp_path, config, *LIMITS, leave=lambda run: fallback(run) if run.name == "phase2" else None)
    assert failed(result) == {("phase1", name) for name in TRAINED} | {("phase2", n) for n in {*TRAINED, "data"}}
    assert "wanted >= 1G tokens/s" in reason(result, "throughput")
    assert "wanted < 0.01 GiB" in reason(result, "memory")
    assert "did not fall" in reason(result, "loss")
    assert "k_stats.csv: 0 rows" in reason(result, "artifacts")
    assert "gate_stats.csv: 0 rows" in reason(result, "artifacts")
    assert "trained on fallback data: no answer" in reason(result, "phase2: data")
    assert all(phase["was_run"] for phase in result["phases"])  # nothing is fatal: everything is measured
    resume = next(c for c in result["criteria"] if c["name"] == "resume")
    assert (resume["verdict"], resume["measured"]) == ("pass", "equal, from step_00000002")


def test_a_resumed_run_with_other_numbers_is_named(tmp_path):
    def leave(run: Path) -> None:
        if run.name == "phase3-killed" and "done" in (run / "metrics.json").read_text():
            path = run / "training.csv"
            lines = path.read_text().splitlines()
            cells = lines[4].split(",")
            cells[2] = str(float(cells[2]) + 1e-15)
            path.write_text("\n".join([*lines[:4], ",".join(cells), *lines[5:], ""]))

    result = ready_here(tmp_path, write_config(tmp_path), leave=leave)
    assert failed(result) == {("phase3", "resume")}
    assert "step 4: loss is" in reason(result, "resume")


def test_a_nan_is_named_with_its_step(tmp_path):
    faults = {"phase1": "step.loss:nan:hit=8"}
    result = ready_here(tmp_path, write_config(tmp_path), faults=lambda trial: faults.get(trial, ""))
    assert failed(result) >= {("phase1", "stability")}
    assert "7 of 10 steps" in reason(result, "stability")
    assert "exit code 5: step 8: the loss is nan" in reason(result, "stability")


def test_data_that_cannot_be_read_is_named(tmp_path):
    result = ready_here(tmp_path, write_config(tmp_path, data={"source": "text", "paths": [str(tmp_path / "absent")]}))
    assert ("phase2", "stability") in failed(result)
    assert not any(phase == "phase1" for phase, _ in failed(result))
    assert "exit code 3" in reason(result, "phase2: stability")
    assert "absent" in reason(result, "phase2: stability")


# The same as a command, with real processes.


@pytest.mark.long
def test_a_rank_that_hangs_in_backward(tmp_path):
    config = write_config(tmp_path, telemetry={"watchdog_floor_s": 4.0}, parallel={"timeout_s": 120.0})
    code, output, result = ready(
        tmp_path, config, *QUICK, "--nproc", "2", NSA_FAULTS="step.backward:sleep:hit=5:rank=1"
    )
    assert code == 1, output
    assert ("phase1", "stability") in failed(result)
    assert "exit code 6" in reason(result, "stability")
    assert "4 of 10 steps" in reason(result, "stability")
    assert list((tmp_path / "ready" / "phase1").glob("stackdump_*_rank1.txt"))
    assert [phase["was_run"] for phase in result["phases"]] == [True, True, False, False]
    assert "phase2 (the configured data) was not run" in result["reasons"]


WRONG_GRADIENT = """
from nsa.ops.{module} import selected
right = selected.backward
def backward(*arguments, **options):
    dq, dk, dv = right(*arguments, **options)
    return dq, dk * 1.05, dv
selected.backward = backward
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "interpreted", "wrong"),
    [
        ("reference", "0", "sel (reference): gradient of k by differences is off by"),
        ("triton", "1", "sel (triton): gradient of k is off by"),
    ],
)
def test_a_kernel_that_returns_a_wrong_gradient(tmp_path, module, interpreted, wrong):
    (tmp_path / "sitecustomize.py").write_text(WRONG_GRADIENT.format(module=module))
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TRITON_INTERPRET": interpreted}
    code, output, result = ready(tmp_path, write_config(tmp_path), *QUICK, **variables)
    assert code == 1, output
    assert failed(result) == {("phase0", "kernels")}
    assert wrong in reason(result, "kernels")
    assert not any("gradient of v" in line for line in result["reasons"])
    page = (tmp_path / "ready" / "readiness.md").read_text()
    assert "1 process on CPU, " in page, "the probe names the machine although no run has"
    assert f"torch {torch.__version__}" in page


@pytest.mark.long
def test_everything_that_is_missed_is_named_with_target_and_value(tmp_path):
    """The same, without the statistics as the earlier system was, and on synthetic data because the hub is away."""
    config = write_config(tmp_path, train=DIVERGES, data={"source": "fineweb_edu", "first_batch_s": 5.0})
    code, output, result = ready(
        tmp_path,
        config,
        *LIMITS,
        *QUICK,
        "--synthetic-on-fail",
        NSA_DISABLE_AUX_STATS="1",
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path / "hf"),
    )
    assert code == 1, output
    assert failed(result) == {("phase1", name) for name in TRAINED} | {("phase2", n) for n in {*TRAINED, "data"}}
    assert "k_stats.csv: 0 rows" in reason(result, "artifacts")
    assert "trained on fallback data: " in reason(result, "phase2: data")
    assert all(phase["was_run"] for phase in result["phases"])


@pytest.mark.long
def test_a_nan_at_step_150(tmp_path):
    code, output, result = ready(tmp_path, write_config(tmp_path), NSA_FAULTS="step.loss:nan:hit=150")
    assert code == 1, output
    assert failed(result) >= {("phase1", "stability")}
    stated = reason(result, "stability")
    assert "149 of 200 steps" in stated
    assert "exit code 5" in stated
    assert "step 150: the loss is nan" in stated


@pytest.fixture
def hub(tmp_path):
    write_mirror(tmp_path / "mirror")
    with HubServer(tmp_path / "mirror") as server:
        yield server


def hub_variables(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}


@pytest.mark.long
def test_data_that_stalls(tmp_path, hub):
    hub.faults.append(Fault(times=10**6, sleep=600.0))
    config = write_config(tmp_path, data={"source": "fineweb_edu", "first_batch_s": 6.0, "stall_s": 1.0})
    code, output, result = ready(tmp_path, config, *QUICK, **hub_variables(hub, tmp_path))
    assert code == 1, output
    assert ("phase2", "stability") in failed(result)
    assert not any(phase == "phase1" for phase, _ in failed(result))
    assert "exit code 3" in reason(result, "phase2: stability")
