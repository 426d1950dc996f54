"""The environment guard finds what does not fit the run, and utilisation is that of the least busy GPU."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.checks import machine
from nsa.checks.machine import GpuUtilization, inspect_machine
from nsa.config import parse_config
from nsa.errors import ConfigError
from tests.record.runs import TINY

Usage = namedtuple("Usage", "total used free")


def found(tmp_path, nproc: int = 1, **sections: dict) -> dict[str, machine.Finding]:
    config = parse_config({**TINY, **sections}, "test")
    return {finding.what: finding for finding in inspect_machine(config, nproc, [tmp_path / "not" / "yet"], 300)}


def test_a_machine_that_fits_the_run_has_no_bad_finding(tmp_path):
    findings = found(tmp_path)
    assert {"python", "torch", "triton", "device", "batch", "disk", "host memory", "open files"} <= set(findings)
    assert [finding for finding in findings.values() if not finding.ok] == []
    assert findings["batch"].found == "1 rank x 1 pass x 4 sequences"
    assert str(tmp_path) in findings["disk"].found, "the folder is created later: its parent counts"


def test_too_little_of_anything_is_found_with_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "OLDEST_TORCH", (99, 0))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (256, 256))
    bad = {name: finding for name, finding in found(tmp_path).items() if not finding.ok}
    assert set(bad) == {"torch", "disk", "host memory", "open files"}
    assert "checkpoint.keep" in bad["disk"].advice
    assert bad["open files"].advice == "raise it: ulimit -n 4096"


def test_the_disk_of_the_run_is_checked_too(tmp_path, monkeypatch):
    """`nsa ready` writes its results into one folder, and the run its checkpoints into another."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(0, 0, 10 if path == other else 10**15))
    findings = inspect_machine(parse_config(TINY, "test"), 1, [tmp_path, tmp_path / "run", other / "no" / "run"], 300)
    disks = {finding.found: finding.ok for finding in findings if finding.what == "disk"}
    assert disks == {f"931322.6 GiB free at {tmp_path}": True, f"0.0 GiB free at {other}": False}


@pytest.mark.parametrize(
    ("visible", "nproc", "needed", "other"),
    [
        (0, 1, "1 process needs a GPU:", "or set runtime.device=cpu"),
        (2, 4, "4 processes need a GPU each:", "or use --nproc 2"),
    ],
)
def test_missing_gpus_are_found(tmp_path, monkeypatch, visible, nproc, needed, other):
    for name, value in {
        "device_count": visible,
        "get_device_name": "H200",
        "get_device_capability": (9, 0),
        "mem_get_info": (100, 100),
    }.items():
        monkeypatch.setattr(machine.torch.cuda, name, lambda *_, value=value: value)
    finding = found(tmp_path, nproc=nproc, runtime={"device": "cuda"})["GPUs"]
    assert (finding.ok, finding.found) == (False, f"{visible} visible")
    assert finding.advice.startswith(needed)
    assert finding.advice.endswith(other)


def test_a_batch_that_the_ranks_cannot_share_is_a_mistake_in_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        found(tmp_path, nproc=3)


def utilization(monkeypatch, samples: list[list[float]], nproc: int) -> float | None:
    """What is measured where torch gives these values for the GPUs, one after the other."""
    values = [iter(series) for series in samples]
    monkeypatch.setattr("torch.cuda.utilization", lambda index: next(values[index]))
    measured = GpuUtilization(nproc)
    for _ in range(2):
        measured.sample()
    return measured.percent


def test_utilization_is_the_mean_of_the_least_busy_gpu(monkeypatch):
    assert utilization(monkeypatch, [[90, 100], [60, 80], [0, 0]], nproc=2) == 70.0


def test_utilization_is_unknown_where_a_gpu_gives_no_value(monkeypatch):
    assert utilization(monkeypatch, [[90, 100], []], nproc=2) is None


def test_utilization_is_unknown_without_nvml(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "_HAS_PYNVML", False)
    measured = GpuUtilization(1)
    measured.sample()
    assert measured.percent is None
