"""A checkpoint that version 0.1 wrote before the rooms of the code were rearranged is still resumed."""

import tarfile
from pathlib import Path

import pytest

from nsa.config import load_config
from nsa.train import train
from tests.checkpoint.helpers import incidents_of, metrics_of, rows_of, saved_steps

RECORDED = Path(__file__).with_name("recorded_v1.tar.xz")  # saved at step 3 of 6
LOSSES = [5.639362335205078, 5.367832183837891, 5.2165422439575195]  # of the steps before it
# Of the run that was not interrupted, on the machine that recorded it; others round differently.
LATER_LOSSES = [4.9815897941589355, 5.0449113845825195, 4.792630672454834]


def test_a_checkpoint_of_the_version_before_is_resumed(tmp_path):
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "run"
    assert saved_steps(folder) == [3]
    train(load_config(folder / "config.yaml"), folder)
    assert metrics_of(folder)["status"] == "done"
    assert not incidents_of(folder)
    losses = [float(row["loss"]) for row in rows_of(folder)]
    assert losses[:3] == LOSSES
    assert losses[3:] == pytest.approx(LATER_LOSSES, rel=1e-4)
