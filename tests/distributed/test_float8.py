"""Layers in FP8 on two ranks, which emulate it: the numbers of one process, resumed to the bit."""

import pytest

from nsa.config import parse_config
from nsa.parallel import float8
from nsa.train import train
from tests.checkpoint.helpers import assert_same_run
from tests.distributed.test_same_numbers import assert_same, column, recompute, strategy, train_all, tree

STEPS = 4
FLOAT8 = {
    "train": {"steps": STEPS, "schedule": "constant", "lr": 2e-3, "eval_every": 2},
    "checkpoint": {"every": 2},
    "runtime": {"float8": "rowwise"},  # its scales do not depend on how a batch is divided
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_have_the_numbers_of_one_process_and_resume_to_the_bit(tmp_path, monkeypatch):
    pytest.importorskip("torchao", reason="torchao, of the extra float8, is not installed")
    monkeypatch.setattr(float8, "refusal", lambda *_: None)
    ddp, fsdp = (tree(FLOAT8, strategy(kind), recompute("block")) for kind in ("ddp", "fsdp"))
    jobs = [("ddp", ddp), ("fsdp", fsdp), ("cut", tree(fsdp, {"train": {"steps": 2}})), ("cut", fsdp)]
    train_all(tmp_path, 2, [{"name": name, "config": run, "accept_changes": True} for name, run in jobs])
    train(parse_config(tree(FLOAT8), "test"), tmp_path / "one")
    train(parse_config(tree(FLOAT8, {"runtime": {"float8": "none"}}), "test"), tmp_path / "plain")
    assert_same_run(tmp_path / "cut", tmp_path / "fsdp", STEPS)
    for name in ("ddp", "fsdp"):
        for key in ("loss", "grad_norm"):
            first, *_ = column(tmp_path / name, key)
            assert first == pytest.approx(column(tmp_path / "one", key)[0], rel=1e-6)
            assert first != pytest.approx(column(tmp_path / "plain", key)[0], rel=1e-5)
        # Another order of sums moves some values to the next number of FP8, from the second step on.
        assert_same(tmp_path / name, tmp_path / "one", loss=1e-3, norm=1e-2)
