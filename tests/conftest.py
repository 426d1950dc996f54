"""Settings for every test: one CPU thread each (six test processes share two cores), a fixed seed, and an order
that keeps all test processes busy to the end."""

import functools
import gc
import os
import re
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from nsa import files
from nsa.record import failures

# Folders of long tests and of tests that start processes. They run first: short tests even out the end, and tests
# that measure time run beside short ones.
FIRST = ("distributed", "checks", "faults", "scripts", "packaging", "docs", "hf", "train", "record")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process that a script starts with `&`

torch.set_num_threads(1)
# Examples are drawn the same way in every run, so that a red test is red again.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def recorder_bugs(monkeypatch):
    """A programming error in a recorder, which a run only counts, fails the test. A test that breaks a recorder takes
    the errors out of the list."""
    found: list[Exception] = []
    monkeypatch.setattr(failures, "report_bug", found.append)
    yield found
    if found:
        raise found[0]


@pytest.fixture
def no_room(monkeypatch):
    """`no_room("run.log")`: writes into files of that name, or into replacements of them, find the disk full, or
    whatever `instead` is."""

    def take(*names: str, instead: str = "/dev/full") -> None:
        real = files.regular

        def opened(path, flags):
            name = re.sub(r"\.(.+)\.[0-9a-f]{16}", r"\1", Path(path).name)  # of files.open_replacement
            written = flags & (os.O_WRONLY | os.O_RDWR) and name in names
            return os.open(instead, flags & ~os.O_EXCL) if written else real(path, flags)

        for module in [m for m in sys.modules.values() if getattr(m, "regular", None) is real]:
            monkeypatch.setattr(module, "regular", opened)

    return take


@pytest.fixture(autouse=True)
def _onednn_as_before():
    """PyTorch turns it off for the rest of the process after a bf16 product on a CPU without bf16 instructions."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


@pytest.fixture(autouse=True)
def _signals_as_before():
    """A command that is run inside the test process changes what signals do, as it would end with the process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_modifyitems(config, items):
    places = {name: place for place, name in enumerate(FIRST)}
    here = config.rootpath / "tests"
    items.sort(key=lambda item: places.get(item.path.relative_to(here).parts[0], len(FIRST)))


def pytest_collection_finish():
    """What is imported by now is no garbage: tests that collect it need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadscope`, a file whose fixtures are shared goes to one worker, other tests go one by one."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if _shares_fixtures(config.rootpath / file) else nodeid

    return Scheduling(config, log)


@functools.cache
def _shares_fixtures(file: Path) -> bool:
    return 'scope="module"' in file.read_text(encoding="utf-8")
