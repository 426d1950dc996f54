"""The launch guard (F6): a job that would leave GPUs idle is stopped with the command to use instead."""

import sys

import pytest
import torch

from nsa.config.schema import ParallelConfig
from nsa.errors import LaunchError
from nsa.supervise.launch_guard import refuse_idle_gpus
from nsa.train import train
from tests.checkpoint.helpers import small

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["nsa", "train", "run.yaml", "train.steps=3"])


def test_one_process_on_a_node_with_four_gpus_is_refused_with_the_right_command(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(LaunchError) as refused:
        train(small("runtime.device=cuda"), tmp_path / "run")
    assert "torchrun --standalone --nproc-per-node 4 -m nsa train run.yaml train.steps=3" in str(refused.value)
    assert "parallel.allow_single_rank=true" in str(refused.value)
    assert refused.value.exit_code == 7
    assert not (tmp_path / "run").exists()


def test_intended_launches_run():
    refuse_idle_gpus(1, CUDA, ParallelConfig(allow_single_rank=True), {})
    refuse_idle_gpus(1, torch.device("cpu"), ParallelConfig(), {})
    refuse_idle_gpus(4, CUDA, ParallelConfig(), {})
    with pytest.warns(UserWarning, match="3 would be idle"):
        refuse_idle_gpus(1, CUDA, ParallelConfig(), {"CI": "true"})
