"""Muon on matrices that FSDP shards: the run of one process, resumed to the bit, and on another number of ranks."""

import shutil

import pytest

from nsa.config import parse_config
from nsa.train import train
from tests.checkpoint.helpers import assert_same_run, checkpoint_of
from tests.distributed.test_same_numbers import assert_same, long, strategy, train_all, tree

STEPS = 4
# 3 heads: the rows of some matrices cannot be divided evenly, and of 4 ranks one has none of them.
MUON = {
    "model": {"n_heads": 3, "n_kv_heads": 1},
    "train": {"optimizer": "muon", "steps": STEPS, "schedule": "constant", "lr": 2e-3, "eval_every": 2},
    "checkpoint": {"every": 2},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "other"), [(2, 1), (4, 2), long(2, 4)])
def test_sharded_matrices_move_as_whole_ones_and_resume_anywhere(ranks, other, tmp_path):
    fsdp = tree(MUON, strategy("fsdp"))
    jobs = [("fsdp", fsdp), ("cut", tree(fsdp, {"train": {"steps": 2}})), ("cut", fsdp)]
    train_all(tmp_path, ranks, [{"name": name, "config": run, "accept_changes": True} for name, run in jobs])
    train(parse_config(tree(MUON), "test"), tmp_path / "one")
    shutil.copytree(tmp_path / "fsdp", tmp_path / "moved")
    shutil.rmtree(checkpoint_of(tmp_path / "moved", STEPS))
    if other == 1:
        train(parse_config(tree(MUON), "test"), tmp_path / "moved", accept_changes=True)
    else:
        train_all(tmp_path, other, [{"name": "moved", "config": fsdp, "accept_changes": True}])
    assert_same_run(tmp_path / "cut", tmp_path / "fsdp", STEPS)
    for name in ("fsdp", "moved"):
        assert_same(tmp_path / name, tmp_path / "one", loss=1e-6, norm=1e-5)
