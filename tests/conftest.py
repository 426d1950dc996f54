"""Settings for every test: one CPU thread each (two test processes share two cores), a fixed seed, and an order that
keeps both test processes busy to the end."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# Folders of long tests and of tests that start processes. They run first: short tests even out the end, and tests
# that measure time run beside short ones.
FIRST = ("distributed", "checks", "faults", "scripts", "train", "record")

torch.set_num_threads(1)
# Examples are drawn the same way in every run, so that a red test is red again.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Sorts by FIRST. With `--dist loadgroup`, tests that share a fixture of their module stay on one worker."""
    places = {name: place for place, name in enumerate(FIRST)}
    here = config.rootpath / "tests"
    items.sort(key=lambda item: places.get(item.path.relative_to(here).parts[0], len(FIRST)))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            fixtures = item._fixtureinfo.name2fixturedefs.values()
            if any(definitions[-1].scope == "module" for definitions in fixtures):
                item.add_marker(pytest.mark.xdist_group(item.path.relative_to(here).as_posix()))
