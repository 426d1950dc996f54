"""Settings for every test: one CPU thread each (two test processes share two cores), and a fixed seed."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Examples are drawn the same way in every run, so that a red test is red again.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
