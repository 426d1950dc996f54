"""The environment guard: does this machine hold what the run needs, before anything is started on it."""

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch

from nsa.config import Config
from nsa.nn.model import build_model
from nsa.train.state import micro_batch_size

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
OLDEST_GPU = (8, 0)
FEWEST_FILES = 1024  # open at once: shards, logs, sockets between ranks
STATE_BYTES = 12  # a parameter and its two moments, fp32
BUSY_SHARE = 0.05  # of a GPU's memory that others may hold
SPARE_BYTES = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `advice` is what to do where it is not ok."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def inspect_machine(config: Config, nproc: int, folder: Path, vocab_size: int) -> list[Finding]:
    """Everything that is looked at, the good as well as the bad."""
    with torch.device("meta"):
        model = build_model(config.model, config.nsa, vocab_size, seed=0)
    state = STATE_BYTES * model.num_parameters()
    return [
        *_versions(),
        *_gpus(config, nproc),
        _batch(config, nproc),
        _disk(folder, (config.checkpoint.keep + 2) * state),
        _host_memory(2 * state),
        _open_files(),
    ]


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", sys.version_info >= OLDEST_PYTHON, python, "use Python 3.11 or newer")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield Finding("torch", found >= OLDEST_TORCH, torch.__version__, "install torch 2.11 or newer")
    yield _triton()


def _triton() -> Finding:
    """The very version this torch asks for: another one compiles other code, or none."""
    try:
        present = version("triton")
    except PackageNotFoundError:
        needed = torch.cuda.is_available()
        return Finding("triton", not needed, "not installed", "pip install triton: every fast kernel needs it")
    wanted = next((r for r in requires("torch") or () if r.startswith("triton")), "")
    pinned = wanted.partition("==")[2].partition(";")[0].strip() if "==" in wanted else ""
    fits = not pinned or not torch.cuda.is_available() or present == pinned
    return Finding("triton", fits, present, f"torch {torch.__version__} asks for triton {pinned}")


def _gpus(config: Config, nproc: int) -> Iterator[Finding]:
    wanted = config.runtime.device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        yield Finding("device", True, f"CPU, {os.cpu_count()} cores")
        return
    advice = f"{nproc} processes want a GPU each: check the driver and CUDA_VISIBLE_DEVICES, or use --nproc {count}"
    yield Finding("GPUs", count >= nproc, f"{count} visible", advice)
    for index in range(min(count, nproc)):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        old = "kernels need an A100 or newer (sm_80): the slow reference would run"
        yield Finding(f"GPU {index}", capability >= OLDEST_GPU, f"{name}, sm_{capability[0]}{capability[1]}", old)
        free, total = torch.cuda.mem_get_info(index)
        taken = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB taken"
        # What this very process holds of it is a context, well under the share.
        yield Finding(
            f"GPU {index} memory", total - free < BUSY_SHARE * total, taken, "another process is on it: see nvidia-smi"
        )


def _batch(config: Config, nproc: int) -> Finding:
    micro = micro_batch_size(config, nproc)  # a ConfigError where it does not come out even
    passes = config.train.batch_size // nproc // micro
    return Finding("batch", True, f"{nproc} ranks x {passes} passes x {micro} sequences")


def _disk(folder: Path, needed: int) -> Finding:
    room = shutil.disk_usage(_existing(folder)).free
    wanted = needed + SPARE_BYTES
    advice = f"checkpoints need {wanted / 2**30:.1f} GiB: free some, lower checkpoint.keep or choose another folder"
    return Finding("disk", room >= wanted, f"{room / 2**30:.1f} GiB free at {_existing(folder)}", advice)


def _existing(folder: Path) -> Path:
    """The nearest folder above that is there already."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _host_memory(needed: int) -> Finding:
    free = psutil.virtual_memory().available
    advice = f"saving copies the state to the host: {needed / 2**30:.1f} GiB are needed"
    return Finding("host memory", free >= needed, f"{free / 2**30:.1f} GiB available", advice)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    advice = f"raise it: ulimit -n {4 * FEWEST_FILES}"
    return Finding("open files", unlimited or soft >= FEWEST_FILES, "no limit" if unlimited else f"{soft}", advice)
