"""A process that reads batches and writes down what it read, until somebody kills it."""

import hashlib
import os
import time
from pathlib import Path

import torch

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.loader import Loader, Prefetcher
from nsa.data.tokenizers import ByteTokenizer
from nsa.data.waiting import Activity, Waiter


def read_steps(data: dict, train: dict, rank: int, size: int, first_step: int, log: Path, folder: Path, pause_s: float):
    """One rank: step after step from `first_step` on, a line for each that is done."""
    options, steps = DataConfig.model_validate(data), TrainConfig.model_validate(train)
    activity = Activity()
    built = build_data(options, steps, ByteTokenizer(), folder, rank, activity)
    batch, count = steps.batch_size, steps.batch_size // size
    requests = [range(step * batch + rank, (step + 1) * batch, size) for step in range(first_step, steps.steps)]
    made = Prefetcher(
        built.train,
        requests,
        ahead=2,
        device=torch.device("cpu"),
        waiter=Waiter(activity, 10, lambda *_: None),
        first_batch_s=60,
        timeout_s=60,
    )
    with log.open("a") as file:
        for step in range(first_step, steps.steps):
            lines = digests(built.train, made.next().inputs, count)
            file.write(f"{step} {' '.join(lines)}\n")
            file.flush()
            os.fsync(file.fileno())
            time.sleep(pause_s)


def digests(loader: Loader, inputs: torch.Tensor, count: int) -> list[str]:
    rows = inputs.view(count, loader.seq_len)
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in rows]
