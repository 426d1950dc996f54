"""The launch guard refuses a job that would leave GPUs idle."""

import shlex
import sys
import warnings
from collections.abc import Mapping

import torch

from nsa.config.schema import ParallelConfig
from nsa.errors import LaunchError


def refuse_idle_gpus(
    world_size: int, device: torch.device, parallel: ParallelConfig, environment: Mapping[str, str]
) -> None:
    """Refuses a single process on a node with several GPUs: all but one would be idle, unnoticed."""
    if device.type != "cuda" or world_size > 1 or parallel.allow_single_rank:
        return
    gpus = torch.cuda.device_count()
    if gpus <= 1:
        return
    command = shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(gpus), "-m", "nsa", *sys.argv[1:]])
    message = f"one process was started on a node with {gpus} GPUs, so {gpus - 1} would be idle"
    if environment.get("CI"):
        warnings.warn(f"{message}; to use all of them: {command}", stacklevel=2)
        return
    raise LaunchError(f"{message}; use\n{command}\nor set parallel.allow_single_rank=true to use one GPU on purpose")
