"""The environment guard, which checks versions, GPUs, memory and disk for a run, and the GPU utilisation of a run."""

import contextlib
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import fmean

import psutil
import torch

from nsa.config import Config
from nsa.formatting import counted
from nsa.nn.model import build_model
from nsa.parallel.context import data_ranks
from nsa.train.state import describe_batch

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
OLDEST_GPU = (8, 0)
MIN_OPEN_FILES = 1024  # shards, logs, sockets between ranks
STATE_BYTES = 12  # per parameter: the weight and its two moments in fp32
MAX_FOREIGN_SHARE = 0.05  # share of a GPU's memory that other processes may use
SPARE_BYTES = 2**30


@dataclass(frozen=True)
class Finding:
    """One checked property of the machine; `advice` says what to do if it is not ok."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def inspect_machine(config: Config, nproc: int, folders: list[Path], vocab_size: int) -> list[Finding]:
    """Checks the machine for a run. Its checkpoints may be written into any of `folders`."""
    with torch.device("meta"):
        model = build_model(config, vocab_size, seed=0)
    state = STATE_BYTES * model.num_parameters()
    groups = data_ranks(config.parallel.context, nproc)
    batch = describe_batch(config, groups)  # raises ConfigError if the ranks cannot share the batch evenly
    return [
        *_versions(),
        *_gpus(config, nproc),
        Finding("batch", True, batch),
        *_room(folders, (config.checkpoint.keep + 2) * state + SPARE_BYTES, 2 * state),
    ]


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", sys.version_info >= OLDEST_PYTHON, python, "use Python 3.11 or newer")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield Finding("torch", found >= OLDEST_TORCH, torch.__version__, "install torch 2.11 or newer")
    yield _triton()


def _triton() -> Finding:
    """Checks for exactly the version that torch requires: another one may compile different code or fail."""
    on_gpu = torch.cuda.is_available()
    try:
        present = version("triton")
    except PackageNotFoundError:
        return Finding("triton", not on_gpu, "not installed", "pip install triton: every fast kernel needs it")
    wanted = next((r for r in requires("torch") or () if r.startswith("triton")), "")
    pinned = wanted.partition("==")[2].partition(";")[0].strip()
    fits = not pinned or not on_gpu or present == pinned
    return Finding("triton", fits, present, f"torch {torch.__version__} requires triton {pinned}")


def _gpus(config: Config, nproc: int) -> Iterator[Finding]:
    wanted, count = config.runtime.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        yield Finding("device", True, f"CPU, {os.cpu_count()} cores")
        return
    needed = counted(nproc, "process needs a GPU", "processes need a GPU each")
    other = f"use --nproc {count}" if count else "set runtime.device=cpu"
    advice = f"{needed}: check the driver and CUDA_VISIBLE_DEVICES, or {other}"
    yield Finding("GPUs", count >= nproc, f"{count} visible", advice)
    for index in range(min(count, nproc)):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        advice = "the kernels need an A100 or newer (sm_80): the slow reference would run"
        yield Finding(f"GPU {index}", capability >= OLDEST_GPU, f"{name}, sm_{capability[0]}{capability[1]}", advice)
        free, total = torch.cuda.mem_get_info(index)
        used = total - free  # includes the context of this process, which is far below the limit
        found, advice = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB in use", "another process uses it: nvidia-smi"
        yield Finding(f"GPU {index} memory", used < MAX_FOREIGN_SHARE * total, found, advice)


def _room(folders: list[Path], disk: int, memory: int) -> Iterator[Finding]:
    """Checks free space on the disks of the folders, free host memory and the limit of open files."""
    paths = [folder.absolute() for folder in folders]
    existing = [next(path for path in (folder, *folder.parents) if path.exists()) for folder in paths]
    advice = f"checkpoints need {disk / 2**30:.1f} GiB: free some, lower checkpoint.keep or choose another folder"
    for folder in {folder.stat().st_dev: folder for folder in reversed(existing)}.values():
        free = shutil.disk_usage(folder).free
        yield Finding("disk", free >= disk, f"{free / 2**30:.1f} GiB free at {folder}", advice)
    free = psutil.virtual_memory().available
    advice = f"saving copies the state to the host: {memory / 2**30:.1f} GiB are needed"
    yield Finding("host memory", free >= memory, f"{free / 2**30:.1f} GiB available", advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    advice = f"raise it: ulimit -n {4 * MIN_OPEN_FILES}"
    yield Finding("open files", unlimited or soft >= MIN_OPEN_FILES, "no limit" if unlimited else f"{soft}", advice)


class GpuUtilization:
    """Averages the utilisation of every GPU of a run. A single sample covers only a fraction of a second."""

    def __init__(self, nproc: int):
        self._samples: list[list[float]] = [[] for _ in range(nproc)]
        self._asked = False

    def sample(self) -> None:
        self._asked = True
        for index, samples in enumerate(self._samples):
            with contextlib.suppress(Exception):  # no driver, no NVML, or a GPU without this value
                samples.append(float(torch.cuda.utilization(index)))

    @property
    def percent(self) -> float | None:
        """The mean of the least busy GPU; None if a GPU has no value, NaN if there was no sample."""
        if not self._asked:
            return math.nan
        return min(map(fmean, self._samples)) if all(self._samples) else None
