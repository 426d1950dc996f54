"""One model under each strategy: how it is wrapped, when gradients are synchronized, what their true norm is.

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of targets.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config.schema import ParallelConfig
from nsa.parallel.ddp import HookWrapper, wrap_ddp
from nsa.parallel.fsdp import shard
from nsa.parallel.launch import World


def apply_strategy(
    model: nn.Module, parallel: ParallelConfig, world: World, precision: str, wrap_hook: HookWrapper = lambda hook: hook
) -> nn.Module:
    """The module to call in place of `model`. Weights must lie on the world's device already.

    `wrap_hook` gets DDP's communication hook and returns the one to use.
    """
    if world.strategy == "ddp":
        return wrap_ddp(model, parallel.ddp, world, wrap_hook)
    if world.strategy == "fsdp":
        return shard(model, parallel.fsdp, world, precision)
    return model


@contextmanager
def gradient_sync(module: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Forward and backward inside leave gradients on their rank unless `wanted`: an accumulation is sent once."""
    if isinstance(module, DistributedDataParallel) and not wanted:
        with module.no_sync():
            yield
    else:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(wanted)
        yield


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, over all parameters and all their shards, on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def gather_weights(parameters: Mapping[str, nn.Parameter], world: World) -> dict[str, Tensor]:
    """Every parameter whole, in host memory, on rank 0; nothing on the others. All ranks call it."""
    weights: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_first:
            weights[name] = whole.cpu()
    return weights


def settle(module: nn.Module) -> None:
    """Reshards after a forward pass without a backward, so that parameters are the optimizer's own."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()


def host_mesh(world: World) -> DeviceMesh | None:
    """The ranks as a mesh of host memory, on which copies of shards can be laid out; None without shards."""
    return init_device_mesh("cpu", (world.size,)) if world.strategy == "fsdp" else None
