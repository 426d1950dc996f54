"""How a process learns its place among the others: the launch guard, the device, the process group.

`torchrun` says rank and world size in the environment; without it a run is one process.
"""

import ipaddress
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from nsa.config.schema import ParallelConfig
from nsa.errors import ConfigError, LaunchError

Strategy = str  # "single", "ddp" or "fsdp"


@dataclass(frozen=True)
class World:
    """This process among all. `cpu_group` carries small host messages; None where there is one process."""

    device: torch.device
    strategy: Strategy = "single"
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    backend: str = "none"
    cpu_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def banner(self) -> str:
        return (
            f"rank {self.rank} of {self.size} | local rank {self.local_rank} | device {self.device} | "
            f"backend {self.backend} | strategy {self.strategy} | {socket.gethostname()}"
        )


@dataclass(frozen=True)
class Place:
    """What the launcher says of this process."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    attempt: int = 0


def read_place(environment: Mapping[str, str]) -> Place:
    if "WORLD_SIZE" not in environment:
        return Place()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing:
        raise LaunchError(f"{', '.join(missing)}: not set although WORLD_SIZE is; start the run with torchrun")
    try:
        rank, local_rank, size = (int(environment[name]) for name in names)
    except ValueError:
        given = ", ".join(f"{name}={environment[name]!r}" for name in names)
        raise LaunchError(f"{given}: must be whole numbers; start the run with torchrun") from None
    if not (0 <= rank < size and 0 <= local_rank <= rank):
        raise LaunchError(f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={size}: cannot be; use torchrun")
    return Place(rank, local_rank, size, int(environment.get("TORCHELASTIC_RESTART_COUNT", "0") or 0))


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("runtime.device: 'cuda' was asked for and PyTorch sees no GPU; use auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"LOCAL_RANK={local_rank}: this node has {torch.cuda.device_count()} GPUs; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def guard(place: Place, device: torch.device, parallel: ParallelConfig, environment: Mapping[str, str]) -> None:
    """Refuses one process on a node with several GPUs: the others would stand idle, and nobody would notice."""
    if device.type != "cuda" or place.size > 1 or parallel.allow_single_rank:
        return
    gpus = torch.cuda.device_count()
    if gpus <= 1:
        return
    command = shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(gpus), "-m", "nsa", *sys.argv[1:]])
    message = f"one process was started on a node with {gpus} GPUs, so {gpus - 1} would be idle"
    if environment.get("CI"):
        warnings.warn(f"{message}; all of them: {command}", stacklevel=2)
        return
    raise LaunchError(f"{message}; use\n{command}\nor set parallel.allow_single_rank=true to use one GPU on purpose")


def choose_strategy(wanted: str, size: int) -> Strategy:
    if wanted == "auto":
        return "single" if size == 1 else "ddp"
    if wanted == "single" and size > 1:
        raise ConfigError(f"parallel.strategy: 'single' and {size} processes do not fit; use auto, ddp or fsdp")
    return wanted


def meet(place: Place, environment: Mapping[str, str], timeout: timedelta) -> TCPStore:
    """A store of this attempt's own. torchrun's lives on over restarts and would hand out the addresses of ranks
    that are dead; in it rank 0 only leaves word where the new one is."""
    agent = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=timeout)
    if place.rank == 0:
        host = _address_towards(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        store = TCPStore(host, 0, place.size, is_master=True, wait_for_workers=False, timeout=timeout)
        agent.set("nsa/meeting", f"{host} {store.port}")
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        host, port = agent.get("nsa/meeting").decode().split()
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
        except dist.DistError:  # the word of an attempt before: nobody listens there any more
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            store.set_timeout(timeout)
            return store


def _address_towards(host: str, port: int) -> str:
    """This machine's address as seen from there; nothing is sent. A name that means this very machine, which may be a
    loopback address here and no other's business, is left to the others to resolve."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return host if ipaddress.ip_address(own.split("%")[0]).is_loopback else own


@contextmanager
def start_world(parallel: ParallelConfig, device: str, environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """The process group of a run, from the launcher's word to its end."""
    place = read_place(environment)
    chosen = pick_device(device, place.local_rank)
    guard(place, chosen, parallel, environment)
    strategy = choose_strategy(parallel.strategy, place.size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if strategy == "single":
        yield World(chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=parallel.timeout_s)
    # Tensors on the host always travel over gloo: checkpoints and small agreements need no GPU.
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    meeting: dict[str, Any] = {}
    if "WORLD_SIZE" not in environment:
        meeting = {"store": HashStore(), "rank": 0, "world_size": 1}
    elif environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meeting = {"store": meet(place, environment, timeout), "rank": place.rank, "world_size": place.size}
    on_device: dict[str, Any] = {"device_id": chosen} if backend == "nccl" else {}
    dist.init_process_group(both, timeout=timeout, **meeting, **on_device)
    group = dist.new_group(backend="gloo", timeout=timeout) if place.size > 1 else None
    yield World(chosen, strategy, place.rank, place.local_rank, place.size, backend, group)
    dist.destroy_process_group()  # not after an error: the others may be gone, and this would wait for them
