"""Runs without a fault, to compare with."""

import fcntl
import os

import pytest

from tests.faults.kills import make_runs


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of a run that nothing happens to, trained once for the tests of all workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def get(strategy, recompute="none", steps=8):
        folder = shared / f"unbroken-{strategy}-{recompute}-{steps}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "finished").exists():
                make_runs(folder, strategy, recompute=recompute, steps=steps).finish("run")
                (folder / "finished").touch()
        return folder / "run"

    return get
