"""Fully sharded: every rank holds a slice of each parameter, gathered for its block just in time."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nsa.config.schema import FSDPConfig
from nsa.nn.block import DecoderBlock
from nsa.parallel.launch import World
from nsa.parallel.numerics import compute_precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, options: FSDPConfig, world: World, precision: str) -> nn.Module:
    """Shards in place, `blocks_per_unit` decoder blocks at a time and the rest as one unit.

    Only parameters change type on their way: buffers such as rotary tables stay float32.
    """
    if options.param_dtype != "auto":
        precision = compute_precision(options.param_dtype, world.device)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "reshard_after_forward": options.sharding == "full",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[precision], reduce_dtype=_DTYPES[options.reduce_dtype], cast_forward_inputs=False
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
