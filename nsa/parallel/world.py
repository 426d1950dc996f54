"""The process group of a run: rank and world size, the device, and the start of the group.

`torchrun` sets rank and world size in the environment; without it a run is one process.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from nsa.config.schema import ParallelConfig
from nsa.errors import ConfigError, LaunchError, reworded
from nsa.parallel.context import Context, data_ranks


@dataclass(frozen=True)
class World:
    """This process among all ranks. Two groups exchange small messages between hosts, both None in a single process:
    `save_group` those of the thread that saves, `cpu_group` all others. Threads that shared a group would exchange in
    another order on each rank, and wait for each other."""

    device: torch.device
    strategy: str = "single"  # or "ddp", "fsdp"
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    backend: str = "none"
    cpu_group: dist.ProcessGroup | None = None
    save_group: dist.ProcessGroup | None = None
    local_size: int | None = None  # ranks of this node; None if the launcher does not say
    context: Context | None = None  # the context-parallel group; None without context parallelism

    @property
    def data_size(self) -> int:
        """The number of context-parallel groups, which read different sequences."""
        return self.size // (self.context.size if self.context else 1)

    @property
    def data_rank(self) -> int:
        """The index of this rank's context-parallel group."""
        return self.rank // (self.context.size if self.context else 1)

    @property
    def node_share(self) -> slice:
        """This rank's share of files that each node checks: nodes may have their own copies."""
        return slice(None) if self.local_size is None else slice(self.local_rank, None, self.local_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def banner(self) -> str:
        return (
            f"rank {self.rank} of {self.size} | local rank {self.local_rank} | device {self.device} | "
            f"backend {self.backend} | strategy {self.strategy} | {socket.gethostname()}"
        )


@dataclass(frozen=True)
class Launch:
    """This process as the environment variables of `torchrun` describe it."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    attempt: int = 0  # restarts before this one
    local_size: int | None = None  # ranks of this node; None if the launcher does not say
    max_restarts: int = 0


def read_launch(environment: Mapping[str, str]) -> Launch:
    if "WORLD_SIZE" not in environment:
        return Launch()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing:
        raise LaunchError(f"{', '.join(missing)}: not set although WORLD_SIZE is; start the run with torchrun")
    optional = ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    given = {name: environment[name] for name in (*names, *optional) if name in names or environment.get(name)}
    texts = ", ".join(f"{name}={value!r}" for name, value in given.items())
    with reworded(LaunchError, f"{texts}: must be whole numbers", "start the run with torchrun", caught=ValueError):
        found = {name: int(value) for name, value in given.items()}
    rank, local_rank, size = (found[name] for name in names)
    attempt, local_size, max_restarts = (found.get(name) for name in optional)
    if not (0 <= rank < size and 0 <= local_rank <= rank and (local_size is None or local_rank < local_size)):
        raise LaunchError(f"{texts}: do not fit together; start the run with torchrun")
    return Launch(rank, local_rank, size, attempt or 0, local_size, max_restarts or 0)


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("runtime.device: 'cuda' is configured and PyTorch finds no GPU; use auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"LOCAL_RANK={local_rank}: this node has {torch.cuda.device_count()} GPUs; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def choose_strategy(wanted: str, size: int) -> str:
    if wanted == "auto":
        return "single" if size == 1 else "ddp"
    if wanted == "single" and size > 1:
        raise ConfigError(f"parallel.strategy: 'single' does not work with {size} processes; use auto, ddp or fsdp")
    return wanted


def rendezvous(launch: Launch, environment: Mapping[str, str], timeout: timedelta) -> TCPStore:
    """Creates a store for this attempt only. torchrun's store survives restarts and would hand out the addresses of
    dead ranks; rank 0 uses it only to publish the address of the new store."""
    agent = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=timeout)
    if launch.rank == 0:
        host = _address_towards(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        store = TCPStore(host, 0, launch.size, is_master=True, wait_for_workers=False, timeout=timeout)
        agent.set("nsa/rendezvous", f"{host} {store.port}")
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        host, port = agent.get("nsa/rendezvous").decode().split()
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
        except dist.DistError:  # the address of an earlier attempt, whose store is gone
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            store.set_timeout(timeout)
            return store


def _address_towards(host: str, port: int) -> str:
    """This machine's address as seen from `host`; sends nothing. A host name that resolves to a loopback address here
    is returned unchanged, for the other machines to resolve."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return host if ipaddress.ip_address(own.split("%")[0]).is_loopback else own


@contextmanager
def start_world(parallel: ParallelConfig, device: str, environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """A context that starts and destroys the process group of a run."""
    launch = read_launch(environment)
    chosen = pick_device(device, launch.local_rank)
    data_ranks(parallel.context, launch.size)
    strategy = choose_strategy(parallel.strategy, launch.size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if strategy == "single":
        yield World(chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=parallel.timeout_s)
    # Host tensors always use gloo: checkpoints and small messages need no GPU.
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    store: dict[str, Any] = {}
    if "WORLD_SIZE" not in environment:
        store = {"store": HashStore(), "rank": 0, "world_size": 1}
    elif environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        joined = rendezvous(launch, environment, timeout)
        store = {"store": joined, "rank": launch.rank, "world_size": launch.size}
    elif missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise LaunchError(f"{', '.join(missing)}: not set although WORLD_SIZE is; start the run with torchrun")
    dist.init_process_group(both, timeout=timeout, device_id=chosen if backend == "nccl" else None, **store)
    cpu_group, save_group = (
        dist.new_group(backend="gloo", timeout=timeout) if launch.size > 1 else None for _ in range(2)
    )
    context = None
    if parallel.context > 1:  # consecutive ranks have the fastest connections
        own, _ = dist.new_subgroups(parallel.context, timeout=timeout)
        context = Context(own)
    ranks = (launch.rank, launch.local_rank, launch.size)
    try:
        yield World(chosen, strategy, *ranks, backend, cpu_group, save_group, launch.local_size, context)
    except BaseException:
        if launch.size == 1:  # else it would wait for ranks that may be gone
            with suppress(Exception):  # after an error on the GPU it may fail too
                dist.destroy_process_group()
        raise
    dist.destroy_process_group()
