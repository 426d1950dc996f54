"""Two traced ranks over gloo: `python -m tests.record.traced FOLDER`, started as tests.distributed.launching does;
with `cuda` after it, one rank over NCCL.

FOLDER/ddp: two sound steps of two passes each, with gradient checkpointing; FOLDER/differs: in its second step rank 1
changes one gradient in its last bit; FOLDER/fsdp: two steps of a sharded model with a layer that nobody calls.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.config import parse_config
from nsa.nn.model import build_model
from nsa.parallel.strategy import _sum, shard
from nsa.parallel.transform import recompute
from nsa.parallel.world import World
from nsa.record.tracer import Tracer
from tests.distributed.launching import TINY

CONFIG = parse_config(TINY, "tiny")
SPOILED = "blocks.1.mlp.up.weight"


DEVICE = torch.device("cuda", 0) if "cuda" in sys.argv[2:] else torch.device("cpu")


def train(tracer: Tracer, model: nn.Module, module: nn.Module, rank: int, *, passes: int, spoiled: bool = False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in (1, 2):
        tracer.step_begin(step)
        optimizer.zero_grad()
        for number in range(passes):
            tokens = torch.randint(0, 64, (1, 33), generator=generator).to(DEVICE)
            with nullcontext() if number == passes - 1 else module.no_sync():
                logits = module(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits[0], tokens[0, 1:])
                loss.backward()
        if spoiled and step == 2 and rank == 1:
            gradient = model.get_parameter(SPOILED).grad
            gradient.view(torch.int32)[0, 0] ^= 1
        optimizer.step()
        dist.all_reduce(loss.detach())
        tracer.step_end(step, loss.item())
    tracer.close()
    assert tracer.failures.count == 0, tracer.failures.last


def ddp(folder: Path, rank: int, *, spoiled: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tracer = Tracer(folder, rank, grads=True, modules=not spoiled, buckets=True)
    model = build_model(CONFIG, 64, 0)
    recompute(model, "block")
    model.to(DEVICE)
    module = DistributedDataParallel(model, bucket_cap_mb=0.05)
    module.register_comm_hook(None, tracer.traced_hook(_sum))
    tracer.attach(model, module)
    train(tracer, model, module, rank, passes=1 if spoiled else 2, spoiled=spoiled)


def fsdp(folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tracer = Tracer(folder, rank, grads=True, modules=True, buckets=True)
    model = build_model(CONFIG, 64, 0)
    model.aside = nn.Linear(4, 4)
    recompute(model, "branch")
    module = shard(model, CONFIG.parallel.fsdp, World(DEVICE, "fsdp", rank, rank, dist.get_world_size()), "fp32")
    tracer.attach(model, module)
    train(tracer, model, module, rank, passes=1)


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    ddp(folder / "ddp", rank, spoiled=False)
    ddp(folder / "differs", rank, spoiled=True)
    fsdp(folder / "fsdp", rank)
    dist.barrier()
    print("done")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # network threads do not always survive an interpreter that is taken down around them
