"""Strategies (single, DDP, FSDP): wrapping the model, synchronizing gradients, and their global norm.

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of targets.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config.schema import DDPConfig, FSDPConfig
from nsa.nn.block import DecoderBlock
from nsa.parallel.numerics import DTYPES, compute_precision
from nsa.parallel.world import World

SAFE = DDPConfig(find_unused=True, broadcast_buffers=False, bucket_view=False, bucket_mb=2, safe_mode=True)

# Wraps a communication hook in one that also records it.
HookWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def effective(options: DDPConfig) -> DDPConfig:
    """The options in use: `safe_mode` overrides all others."""
    return SAFE if options.safe_mode else options


def wrap_ddp(model: nn.Module, options: DDPConfig, world: World, wrap_hook: HookWrapper) -> DistributedDataParallel:
    """DDP: every rank holds the whole model, which is on its device already, and gradients are summed in buckets."""
    used = effective(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions renamed broadcast_buffers
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            static_graph=used.static_graph,
            find_unused_parameters=used.find_unused,
            bucket_cap_mb=used.bucket_mb,
            gradient_as_bucket_view=used.bucket_view,
            broadcast_buffers=used.broadcast_buffers,
        )
    wrapped.register_comm_hook(None, wrap_hook(_sum))
    return wrapped


def _sum(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sums a bucket over the ranks; in deterministic mode each gradient by itself.

    The order in which three or more ranks are added depends on the place in the reduced tensor, and DDP rearranges its
    buckets after the first step of a process: the step after a resume would round differently.
    """
    whole: Tensor = bucket.buffer()
    parts = bucket.gradients() if torch.are_deterministic_algorithms_enabled() else [whole]
    futures = [dist.all_reduce(part, async_op=True).get_future() for part in parts]

    def finish(last: torch.futures.Future[Any]) -> Tensor:
        last.value()  # raises if another rank is lost
        for future in futures[:-1]:  # over gloo, the last one may end before others
            future.wait()
        return whole

    summed: torch.futures.Future[Tensor] = futures[-1].then(finish)
    return summed


def shard(model: nn.Module, options: FSDPConfig, world: World, precision: str) -> nn.Module:
    """FSDP: every rank holds a shard of each parameter; a unit is gathered just before it is used.

    Shards the model in place, with `blocks_per_unit` decoder blocks per unit and the other parameters as one unit. Only
    gathered parameters are cast: buffers stay float32.
    """
    if options.param_dtype != "auto":
        precision = compute_precision(options.param_dtype, world.device)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "reshard_after_forward": options.sharding == "full",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[precision], reduce_dtype=DTYPES[options.reduce_dtype], cast_forward_inputs=False
        ),
    }
    blocks = [module for module in model.modules() if isinstance(module, DecoderBlock)]
    units = [blocks[i : i + options.blocks_per_unit] for i in range(0, len(blocks), options.blocks_per_unit)]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], **settings)  # type: ignore[arg-type]
    fully_shard(model, **settings)
    if options.forward_prefetch:
        for unit, following in pairwise(units):
            first, then = unit[0], following[0]
            assert isinstance(first, FSDPModule)
            assert isinstance(then, FSDPModule)
            first.set_modules_to_forward_prefetch([then])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


@contextmanager
def gradient_sync(module: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Inside, backward synchronizes gradients only if `wanted`, so that accumulated gradients are sent once."""
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
    """The unsharded parameters in host memory on rank 0; empty on other ranks. All ranks call it."""
    weights: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_first:
            weights[name] = whole.cpu()
    return weights


def reshard(module: nn.Module) -> None:
    """Reshards after a forward pass without a backward, so that the parameters are those of the optimizer."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()
