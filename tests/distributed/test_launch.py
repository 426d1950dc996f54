"""How a process joins a run: its rank, its device, its strategy, and the loss of another rank."""

import re
from types import SimpleNamespace

import pytest
import torch

from nsa.checkpoint.restore import read_state
from nsa.config.schema import ParallelConfig
from nsa.errors import ConfigError, LaunchError
from nsa.parallel.collectives import lost_rank
from nsa.parallel.strategy import _sum
from nsa.parallel.world import Launch, choose_strategy, pick_device, read_launch, start_world
from tests import warm
from tests.distributed.launching import environment, ranks_environment, run_ranks, wait_all, write_config


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("cuda", 3) == torch.device("cuda", 3)
    with pytest.raises(LaunchError, match="--nproc-per-node 4"):
        pick_device("cuda", 4)


def test_the_launch_is_read_from_the_environment():
    assert read_launch({}) == Launch()
    launched = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_launch(launched) == Launch(5, 1, 8, 2)
    assert read_launch({**launched, "TORCHELASTIC_MAX_RESTARTS": "3", "LOCAL_WORLD_SIZE": ""}).max_restarts == 3
    for wrong in (
        {"RANK": "8"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "many"},
        {"LOCAL_RANK": "7"},
        {"LOCAL_WORLD_SIZE": "1"},
    ):
        with pytest.raises(LaunchError, match="torchrun"):
            read_launch({**launched, **wrong})
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        with pytest.raises(LaunchError, match=f"{name}='many'.*whole numbers"):
            read_launch({**launched, name: "many"})


def test_auto_is_single_for_one_rank_and_ddp_for_more():
    assert [choose_strategy("auto", size) for size in (1, 2)] == ["single", "ddp"]
    assert [choose_strategy(name, 1) for name in ("ddp", "fsdp")] == ["ddp", "fsdp"]
    with pytest.raises(ConfigError, match=r"parallel\.strategy"):
        choose_strategy("single", 2)


def test_ranks_without_an_address_are_refused():
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with (
        pytest.raises(LaunchError, match=r"MASTER_PORT: not set .* torchrun"),
        start_world(ParallelConfig(), "cpu", environment),
    ):
        raise AssertionError("never reached")


def test_ranks_with_different_settings_are_refused(tmp_path):
    """A command that was typed on each machine: with another rate, one copy of the model would move otherwise."""
    config = write_config(tmp_path, train={"steps": 1, "out_dir": str(tmp_path / "run")})
    ranks = [
        warm.start("nsa", "train", config, *differing, env=environment(**place))
        for differing, place in zip(
            (["train.lr=0.01"], ["train.lr=0.02", "--fresh"]), ranks_environment(2), strict=True
        )
    ]
    for ended in wait_all(ranks):
        assert ended.code == 2, ended.output
        told = "different settings: train.lr (0.01 on rank 0, 0.02 on rank 1), fresh (False on rank 0, True on rank 1);"
        assert told in ended.output
    assert not (tmp_path / "run").exists()


def test_ranks_without_a_shared_folder_are_refused(tmp_path):
    """As on machines with local disks: no checkpoint would be complete, which the first save would find."""
    config = write_config(tmp_path, train={"steps": 1}, parallel={"timeout_s": 4.0})
    ranks = [
        warm.start("nsa", "train", config, f"train.out_dir={tmp_path / place['RANK']}", env=environment(**place))
        for place in ranks_environment(2)
    ]
    for ended in wait_all(ranks):
        assert ended.code == 7, ended.output
        assert re.search(rf"rank 1 on \S+ \({tmp_path / '1'}\) and rank 0 do not share a folder", ended.output)
    assert [path.name for path in tmp_path.glob("*/*")] == [".lock"]


def test_a_path_does_not_make_a_full_disk_a_lost_rank():
    for lost in ("[gloo/transport/tcp/pair.cc:533] Connection closed by peer", "NCCL error: remote process exited"):
        assert lost_rank(RuntimeError(lost), 0, 2) is not None
    assert lost_rank("[Errno 28] No space left on device: '/data/nccl_runs/a/.writing-step_00000002'", 0, 2) is None


@pytest.mark.parametrize("lost", [0, 1])
def test_gradients_that_another_rank_did_not_add_to_are_an_error(monkeypatch, lost):
    """Else a step continues with the gradients of this rank alone."""
    reductions = [torch.futures.Future(), torch.futures.Future()]
    for place, reduction in enumerate(reductions):
        reduction.set_exception(RuntimeError("gloo")) if place == lost else reduction.set_result([torch.ones(1)])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    works = iter(SimpleNamespace(get_future=lambda found=found: found) for found in reductions)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda part, async_op: next(works))
    bucket = SimpleNamespace(buffer=lambda: torch.ones(2), gradients=lambda: [torch.ones(1), torch.ones(1)])
    with pytest.raises(RuntimeError, match="gloo"):
        _sum(None, bucket).wait()


def test_fp16_parameters_of_fsdp_have_a_loss_scale(tmp_path):
    sharded = {"strategy": "fsdp", "fsdp": {"param_dtype": "fp16"}}
    config = write_config(tmp_path, train={"steps": 2, "out_dir": str(tmp_path / "run")}, parallel=sharded)
    (ended,) = run_ranks(1, "train", config)
    assert ended.code == 0, ended.output
    assert read_state(tmp_path / "run" / "checkpoints" / "step_00000002")["loss_scale"]["enabled"]
