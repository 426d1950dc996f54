"""The launch commands that people have in their notes run as they are written there, on two processes without a GPU.

Only sizes are reduced, by one more --override. Commands run in an empty folder with `scripts` in it: one of each
launcher in a shell, the others in processes that start at once, with the same script, arguments and variables.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.distributed.launching import ROOT, environment, free_port, metrics_of, ranks_environment, wait_all

TIMEOUT_S = 150
TINY = (
    "model.dim=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.head_dim_k=16 model.head_dim_v=16 "
    "model.mlp_dim=64 nsa.cmp_block=4 nsa.cmp_stride=2 nsa.sel_block=4 nsa.num_selected=4 nsa.window=8 "
    "train.seq_len=32 train.batch_size=4 train.micro_batch=auto train.eval_sequences=2 telemetry.tensorboard=false"
)


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return metrics_of(self.run)

    @property
    def recorded(self) -> dict[str, Any]:
        """env.json."""
        content: dict[str, Any] = json.loads((self.run / "env.json").read_text())
        return content

    @property
    def run(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run


def run_in_a_shell(command: str, folder: Path, **variables: str) -> Outcome:
    """The command in a shell, with the interpreter of the tests first in PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", command],  # which becomes the command
        cwd=folder,
        env=prepare(folder, PATH=path, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = process.communicate(timeout=TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        raise AssertionError(f"no end after {TIMEOUT_S} s:\n{process.communicate()[0]}") from None
    return Outcome(process.returncode, output, folder)


def run_warm(command: str, folder: Path, **variables: str) -> Outcome:
    """The same without shell, torchrun and imports: `[NAME=VALUE ...] python|torchrun [OPTION ...] SCRIPT ...`."""
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    launcher, script = words[0], next(place for place, word in enumerate(words) if word.endswith(".py"))
    assert launcher in ("python", "torchrun")
    size = 2 if "--nproc_per_node=2" in words[:script] else 1
    known = prepare(folder, **variables)
    ranks = [{**known, **rank} for rank in ranks_environment(size)]
    ended = wait_all([warm.start(*words[script:], env=rank, cwd=folder) for rank in ranks], TIMEOUT_S)
    return Outcome(max(e.code for e in ended), "".join(e.output for e in ended), folder)


def prepare(folder: Path, **variables: str) -> dict[str, str]:
    """Makes `scripts` a part of the folder; the environment of a command."""
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(ROOT / "scripts")
    known = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "CONFIG")}
    return {**known, "CUDA_VISIBLE_DEVICES": "", **variables}


def run_to_its_end(
    command: str, folder: Path, overrides: str = "train.steps=2", run=run_warm, **variables: str
) -> Outcome:
    outcome = run(f"{command} --override {shlex.quote(f'{TINY} {overrides}')}", folder, **variables)
    assert outcome.code == 0, outcome.output
    assert outcome.metrics["status"] == "done"
    return outcome


def launched(outcome: Outcome) -> tuple[Any, Any, Any]:
    return outcome.metrics["strategy"], outcome.metrics["world_size"], outcome.metrics["steps"]


def test_safe_mode_on_two_ranks(tmp_path):
    outcome = run_to_its_end(
        "NSA_DDP_SAFE_MODE=1 torchrun --nproc_per_node=2 scripts/train_showcase.py --dataset synthetic "
        '--override "train.steps=10 model.n_layers=2 train.seq_len=512"',
        tmp_path,
        "train.steps=10",
    )
    assert launched(outcome) == ("ddp", 2, 10)
    assert "safe_mode: reference kernels" in outcome.output
    assert outcome.recorded["variables"] == {"NSA_DDP_SAFE_MODE": "1"}
    assert outcome.recorded["config"]["parallel"]["ddp"]["safe_mode"] is True
    assert outcome.recorded["config"]["data"]["source"] == "synthetic"


def test_sharding_the_production_file_on_two_ranks_without_a_gpu(tmp_path):
    outcome = run_to_its_end(
        "CONFIG=configs/m7c_125m_2xa100_production.yaml torchrun --standalone --nproc_per_node=2 "
        "scripts/train_showcase_fsdp.py --dataset synthetic",
        tmp_path,
    )
    assert launched(outcome) == ("fsdp", 2, 2)
    assert outcome.output.count("warning: runtime.device: no GPU in use") == 1
    assert "runtime.device=cpu" in outcome.output
    assert outcome.run.name.startswith("m7c_125m_2xa100_production,")
    assert outcome.recorded["config"]["checkpoint"]["every"] == 500, "the rest is the file's"
    assert outcome.recorded["command"][:2] == ["nsa", "train"]


def test_sharding_works_in_one_process_too(tmp_path):
    outcome = run_to_its_end("python scripts/train_showcase_fsdp.py --dataset synthetic --steps 2", tmp_path, "")
    assert launched(outcome) == ("fsdp", 1, 2)


def test_one_branch_alone_in_safe_mode_on_two_ranks(tmp_path):
    outcome = run_to_its_end(
        "NSA_FORCE_BRANCH=cmp NSA_DDP_SAFE_MODE=1 torchrun --nproc_per_node=2 scripts/train_showcase.py "
        "--dataset synthetic",
        tmp_path,
    )
    assert launched(outcome) == ("ddp", 2, 2)
    assert "branch  only cmp" in outcome.output
    assert "safe_mode: reference kernels" in outcome.output
    assert outcome.recorded["config"]["nsa"]["force_branch"] == "cmp"
    assert set(outcome.recorded["variables"]) == {"NSA_FORCE_BRANCH", "NSA_DDP_SAFE_MODE"}


def test_one_process_and_the_same_command_again_finds_its_run_done(tmp_path):
    command = "python scripts/train_showcase.py --dataset synthetic --ddp 0 --steps 1"
    outcome = run_to_its_end(command, tmp_path, "")
    assert launched(outcome) == ("single", 1, 1)
    assert outcome.recorded["config"]["parallel"]["allow_single_rank"] is True
    again = run_to_its_end(command, tmp_path, "")
    assert "this run is done (1 steps)" in again.output
    assert launched(again) == ("single", 1, 1), "in the same folder"


def test_the_production_command_trains_on_synthetic_text_when_the_hub_is_away(tmp_path):
    outcome = run_to_its_end(
        "NSA_PREFILL_BATCHED=1 NSA_DISABLE_AUX_STATS=1 NSA_DDP_STATIC_GRAPH=1 NSA_DDP_FIND_UNUSED=0 "
        "NSA_DDP_BUCKET_MB=25 CONFIG=configs/m7c_125m.yaml torchrun --nproc_per_node=2 scripts/train_showcase.py "
        "--dataset fineweb_edu --precision bf16 --steps 1000 --synthetic-on-fail",
        tmp_path,
        "train.steps=2 data.first_batch_s=2",
        HF_ENDPOINT=f"http://127.0.0.1:{free_port()}",
        HF_HOME=str(tmp_path / "hub"),
        NO_PROXY="127.0.0.1",
    )
    assert launched(outcome) == ("ddp", 2, 2)
    assert "THIS RUN TRAINS ON SYNTHETIC TEXT" in outcome.output
    assert outcome.metrics["data"]["source"] == "synthetic"
    assert outcome.metrics["data"]["fallback"]
    assert outcome.output.count("NSA_PREFILL_BATCHED: has no effect") == 2, "once by each rank"
    config = outcome.recorded["config"]
    assert config["parallel"]["ddp"]["static_graph"] is True
    assert config["telemetry"]["attention"] is False
    assert config["runtime"]["precision"] == "bf16"
    assert config["data"]["source"] == "fineweb_edu"
    assert len(outcome.recorded["variables"]) == 5


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("run_m7c_1xa100_production", ""),
        ("run_m7c_2xa100_production", "-m torch.distributed.run --standalone --nproc_per_node=2 "),
    ],
)
def test_a_script_for_a100_launches_its_production_file(tmp_path, script, launcher):
    printer = tmp_path / "python"
    printer.write_text('#!/bin/sh\necho "$CONFIG" "$@"\n')
    printer.chmod(0o755)
    outcome = run_in_a_shell(f"scripts/{script}.sh --steps 3", tmp_path, PYTHON=str(printer))
    config = script.replace("run_m7c", "configs/m7c_125m")
    assert outcome.output == f"{config}.yaml {launcher}{tmp_path}/scripts/train_showcase.py --steps 3\n"


@pytest.mark.long
def test_the_script_for_two_a100_starts_two_ranks_of_the_production_file(tmp_path):
    command = "scripts/run_m7c_2xa100_production.sh --dataset synthetic"
    outcome = run_to_its_end(command, tmp_path, run=run_in_a_shell, PYTHON=sys.executable)
    assert launched(outcome) == ("ddp", 2, 2)
    assert outcome.run.name.startswith("m7c_125m_2xa100_production,")


@pytest.mark.long
def test_the_script_for_one_a100_starts_one_process_of_its_production_file(tmp_path):
    command = "scripts/run_m7c_1xa100_production.sh --dataset synthetic"
    outcome = run_to_its_end(command, tmp_path, run=run_in_a_shell, PYTHON=sys.executable)
    assert launched(outcome) == ("single", 1, 2)
    assert outcome.run.name.startswith("m7c_125m_1xa100_production,")
    assert outcome.recorded["config"]["runtime"]["gradient_checkpointing"] == "selective"
    assert not outcome.recorded["config"]["runtime"]["compile"], "there may be no C++ compiler beside a CPU"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("python scripts/train_showcase.py --datset synthetic", "--dataset"),
        ("python scripts/train_showcase.py --ddp 2", "--ddp"),
        ("python scripts/train_showcase.py --dataset sinthetic", "must be 'synthetic', 'recall'"),
        ("python scripts/train_showcase.py --override train.step=5", "did you mean 'train.steps'?"),
        ("CONFIG=configs/m7c_125.yaml python scripts/train_showcase.py", "configs/m7c_125m.yaml"),
        ("python scripts/train_showcase_fsdp.py --ddp 1", "scripts/train_showcase.py runs DDP"),
        ("scripts/run_m7c_1xa100_production.sh --step 5", "--steps"),
    ],
)
def test_a_wrong_option_is_named_with_a_suggestion_and_starts_nothing(tmp_path, command, hint):
    outcome = run_in_a_shell(command, tmp_path, PYTHON=sys.executable)
    assert outcome.code == 2, outcome.output
    assert hint in outcome.output
    assert not (tmp_path / "runs").exists()
