"""Runs that several tests look at or take copies of. Nobody writes into the originals."""

import logging
import os
import shutil
from pathlib import Path

import pytest

import nsa.train.loop
from nsa.train import train
from tests.checkpoint.helpers import small, train_until


@pytest.fixture(autouse=True, scope="package")
def _quick_runs():
    """Nobody pulls the plug here, and waiting for the disk would be most of the time: that a save asks for it has its
    own test. What a run writes about the machine is not looked at, nor torch's remarks about every tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(nsa.train.loop, "describe_environment", lambda *about: {})
        patch.setattr(logging.getLogger("c10d-NullHandler-dcp_logger"), "disabled", True)
        yield


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory):
    """Six steps without a disturbance, saved after steps 2, 3 (the validation was best), 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small(), folder)
    return folder


@pytest.fixture(scope="package")
def crashed_original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crashed") / "run"
    train_until(5, folder)
    return folder


@pytest.fixture
def crashed_run(crashed_original, tmp_path) -> Path:
    """A copy of the run that crashed after step 5, with checkpoints of steps 2, 3 and 4."""
    return shutil.copytree(crashed_original, tmp_path / "crashed")
