"""The process has no memory: a run's numbers depend on its configuration, not on what ran before it in the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import nsa.parallel.numerics
import nsa.train.loop
from nsa.config import parse_config
from nsa.errors import NSAError
from nsa.parallel.numerics import compute_precision, cpu_has_bf16, default_threads, numerics
from nsa.train import train
from tests import warm
from tests.checkpoint.helpers import rows_of, small
from tests.distributed.launching import environment, wait_all

REFERENCE = """
import sys
from pathlib import Path
import nsa.parallel.numerics
from nsa.train import train
from tests.checkpoint.helpers import small
nsa.parallel.numerics.cpu_has_bf16 = lambda: True
for precision in ("fp32", "bf16"):
    config = small("train.steps=3", "runtime.threads=null", f"runtime.precision={precision}")
    train(config, Path(sys.argv[1], precision))
"""


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Runs of a fresh process, by precision."""
    folder = tmp_path_factory.mktemp("clean")
    program = folder / "reference.py"
    program.write_text(REFERENCE)
    [ended] = wait_all([warm.start(str(program), str(folder), env=environment())])
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture
def has_bf16(monkeypatch):
    """Makes the CPU one with bf16 instructions, or one without; where it has none PyTorch emulates them."""
    return lambda answer: monkeypatch.setattr(nsa.parallel.numerics, "cpu_has_bf16", lambda: answer)


def attribute(module, name):
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


HAS_BF16 = nsa.parallel.numerics.cpu_has_bf16()  # of the CPU that runs the tests, whatever they pretend

# How to read a process-wide switch, how to set it, and a value that a fresh process does not have.
SWITCHES = {
    "oneDNN": (*attribute(torch.backends.mkldnn, "enabled"), False),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "precision of oneDNN's products": (*attribute(torch.backends.mkldnn.matmul, "fp32_precision"), "bf16"),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "flush denormals": (nsa.parallel.numerics._flushes_denormals, torch.set_flush_denormal, True),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
        True,
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled, False),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_switches_flipped_before_a_run_change_no_bit_and_stay_flipped_after(
    precision, clean, has_bf16, monkeypatch, tmp_path
):
    has_bf16(True)
    read = lambda: {name: get() for name, (get, _, _) in SWITCHES.items()}  # noqa: E731
    flipped = {name: value for name, (_, _, value) in SWITCHES.items()}
    fresh, seen = read(), []
    rate = nsa.train.loop.learning_rate
    monkeypatch.setattr(nsa.train.loop, "learning_rate", lambda *about: seen.append(read()) or rate(*about))
    try:
        for name, (_, set_to, value) in SWITCHES.items():
            assert fresh[name] != value, "the case needs a value that a fresh process does not have"
            set_to(value)
        train(small("train.steps=3", "runtime.threads=null", f"runtime.precision={precision}"), tmp_path)
        assert read() == flipped, "the run left the process as it found it"
    finally:
        for name, (_, set_to, _) in SWITCHES.items():
            set_to(fresh[name])
    for step, values in enumerate(seen):
        for name, value in values.items():
            if (name, precision, HAS_BF16) == ("oneDNN", "bf16", False) and step > 0:
                continue  # PyTorch turns it off by itself after the first product
            assert value != flipped[name], name
    assert rows_of(tmp_path) == rows_of(clean / precision)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path, clean / precision)]
    assert weights[0] == weights[1]


def test_settings_of_a_run_follow_its_configuration_and_the_callers_come_back():
    runtime = small("runtime.deterministic=true", "runtime.tf32=false", "runtime.threads=2").runtime
    before = {name: get() for name, (get, _, _) in SWITCHES.items()}

    def failing_run():
        with numerics(runtime):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == 2
            assert not torch.backends.cuda.matmul.allow_tf32
            raise KeyError

    with pytest.raises(KeyError):
        failing_run()
    assert {name: get() for name, (get, _, _) in SWITCHES.items()} == before


def test_a_failed_run_with_a_process_group_leaves_the_process_able_to_train(tmp_path):
    """As in a notebook, where the next cell starts the corrected run."""
    wrong = small("parallel.strategy=ddp", "train.eval_sequences=2", "data.source=text", "data.paths=[/none]")
    with pytest.raises(NSAError):
        train(wrong, tmp_path / "wrong")
    assert not torch.distributed.is_initialized()
    train(small("parallel.strategy=ddp", "train.steps=2"), tmp_path / "right")
    assert len(rows_of(tmp_path / "right")) == 2


def test_a_caller_that_uses_pytorchs_newer_precision_settings_gets_them_back():
    """PyTorch refuses to read the older settings then."""
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = gpu.fp32_precision, cpu.fp32_precision
    gpu.fp32_precision, cpu.fp32_precision = "tf32", "bf16"
    try:
        with numerics(small("runtime.tf32=false").runtime):
            assert (torch.get_float32_matmul_precision(), cpu.fp32_precision) == ("highest", "ieee")
            assert not gpu.allow_tf32
        assert (gpu.fp32_precision, cpu.fp32_precision) == ("tf32", "bf16")
    finally:
        gpu.fp32_precision, cpu.fp32_precision = before


def test_a_cpu_without_bf16_instructions_computes_in_fp32_and_says_so_once(tmp_path, clean, has_bf16, capsys):
    has_bf16(False)
    config = small("train.steps=3", "runtime.precision=bf16")
    train(config, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "bf16 is" in line]
    assert lines == ["note    this CPU has no bf16 instructions: bf16 is computed in fp32"]
    assert rows_of(tmp_path) == rows_of(clean / "fp32"), "not merely close: these are the numbers of fp32"
    assert json.loads((tmp_path / "env.json").read_text())["precision"] == "fp32"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["runtime"]["precision"] == "bf16"
    has_bf16(True)  # another machine resumes it: the configuration is the same
    train(small("train.steps=4", "runtime.precision=bf16"), tmp_path, accept_changes=True)
    assert len(rows_of(tmp_path)) == 4
    assert json.loads((tmp_path / "env.json").read_text())["precision"] == "bf16"


def test_only_bf16_on_a_cpu_depends_on_its_instructions(has_bf16):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    has_bf16(False)
    assert [compute_precision(p, cpu) for p in ("auto", "fp32", "bf16", "fp16")] == ["fp32", "fp32", "fp32", "fp16"]
    assert [compute_precision(p, gpu) for p in ("auto", "fp32", "bf16", "fp16")] == ["bf16", "fp32", "bf16", "fp16"]
    has_bf16(True)
    assert compute_precision("bf16", cpu) == "bf16"


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "avx_ne_convert": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "avx512_fp16": True}, False),
        ({"architecture": "arm64", "i8mm": True, "bf16": True}, True),
        ({"architecture": "arm64", "fp16_arith": True, "bf16": False}, False),
        ({"architecture": "unknown"}, False),
    ],
)
def test_bf16_instructions_are_detected_like_torch_does(capabilities, has, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_has_bf16() is has


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own list is in /proc/cpuinfo")
def test_torch_finds_the_bf16_instructions_that_the_kernel_lists():
    listed = set(Path("/proc/cpuinfo").read_text().split())
    assert cpu_has_bf16() is not listed.isdisjoint({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def test_the_default_number_of_threads_is_that_of_a_fresh_process(monkeypatch):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    fresh = subprocess.run(command, capture_output=True, text=True, env=environment)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads() == int(fresh.stdout)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert default_threads() == 5


@pytest.mark.parametrize(("given", "means"), [("true", "block"), ("false", "none"), ("selective", "selective")])
def test_gradient_checkpointing_may_be_a_switch_as_in_older_files(given, means):
    in_file = parse_config(yaml.safe_load(f"runtime: {{gradient_checkpointing: {given}}}"), "test")
    overridden = small(f"runtime.gradient_checkpointing={given}")
    assert in_file.runtime.gradient_checkpointing == overridden.runtime.gradient_checkpointing == means
