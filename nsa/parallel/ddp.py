"""Data parallel: every rank holds the model, gradients are summed in buckets."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.config.schema import DDPConfig
from nsa.parallel.launch import World

SAFE = DDPConfig(find_unused=True, broadcast_buffers=False, bucket_view=False, bucket_mb=2, safe_mode=True)


def effective(options: DDPConfig) -> DDPConfig:
    """What is used: `safe_mode` replaces all the others."""
    return SAFE if options.safe_mode else options


# Wraps a communication hook in one that also observes it.
HookWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap_ddp(
    model: nn.Module, options: DDPConfig, world: World, wrap_hook: HookWrapper = lambda hook: hook
) -> DistributedDataParallel:
    used = effective(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for broadcast_buffers
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
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return summed
