"""A run that takes a third of a second, and ways to interrupt it, to damage what it saved and to look into it."""

import csv
import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa import faults
from nsa.checkpoint.export import read_weights
from nsa.checkpoint.format import (
    FOLDER,
    INDEX_FILE,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    STATE_FILE,
    _serialize_manifest,
    entry_of,
    name_of,
    random_file,
    shard_file,
)
from nsa.checkpoint.restore import fill, saved_shapes
from nsa.config import Config, parse_config
from nsa.run_folder import MACHINE_COLUMNS
from nsa.train import train

SMALL = {
    "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16},
    "nsa": {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 4, "window": 8},
    "data": {"source": "synthetic"},
    "train": {"steps": 6, "seq_len": 32, "batch_size": 2, "lr": 1e-2, "eval_every": 3, "eval_sequences": 2},
    "checkpoint": {"every": 2, "background": False},
    "runtime": {"device": "cpu", "threads": 1},
    "telemetry": {"tensorboard": False},
}
SHARD = shard_file(0)
RANDOM_FILE = random_file(0)
KINDS = (SHARD, INDEX_FILE, STATE_FILE, RANDOM_FILE, MANIFEST_FILE)  # every kind of file in a checkpoint


def forget_generators() -> None:
    """As in a new process, which knows nothing of what the last one drew."""
    torch.seed()
    random.seed()
    np.random.seed()


def small(*overrides: str) -> Config:
    return parse_config(json.loads(json.dumps(SMALL)), "test", overrides)


@contextmanager
def faults_armed(text: str) -> Iterator[None]:
    """While inside, `train` arms what `text` says; afterwards nothing is armed and no save is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_FAULTS", text)
        try:
            yield
        finally:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            faults.arm("")


def train_until(step: int, folder: Path, *overrides: str, also: str = "", **options: bool) -> None:
    """A run that crashes after `step` steps; `also` names further faults."""
    text = f"step.begin:raise:hit={step + 1}" + (f",{also}" if also else "")
    with faults_armed(text), pytest.raises(RuntimeError, match=r"fault at step\.begin"):
        train(small(*overrides), folder, **options)


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Every row of training.csv, without what depends on the machine."""
    with (folder / "training.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in MACHINE_COLUMNS} for row in csv.DictReader(file)]


def incidents_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "heartbeat_rank0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "incident"]


def metrics_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / FOLDER / name_of(step)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / FOLDER).glob("step_*"))


def contents_of(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint: every tensor, the state, the random state."""
    shapes = saved_shapes(checkpoint)
    tensors = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    fill(tensors, checkpoint)
    plain = {name: json.loads((checkpoint / name).read_text()) for name in (STATE_FILE, RANDOM_FILE)}
    return {**tensors, **plain}


def assert_same_contents(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, f"{name} differs"


def assert_same_run(folder: Path, other: Path, step: int = 6) -> None:
    """Numbers, weights, optimizer, generators and progress, to the last bit."""
    assert rows_of(folder) == rows_of(other)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert_same_contents(contents_of(checkpoint_of(folder, step)), contents_of(checkpoint_of(other, step)))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same model."""
    first, second = read_weights(one), read_weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sign_again(checkpoint: Path, version: int = MANIFEST_VERSION) -> None:
    """Writes a manifest that fits the files as they are now, as an attacker would."""
    files = {p.name: vars(entry_of(p)) for p in sorted(checkpoint.iterdir()) if p.name != MANIFEST_FILE}
    (checkpoint / MANIFEST_FILE).write_bytes(_serialize_manifest(files, version))


def flip_byte(path: Path, share: float) -> None:
    """Changes the byte that lies that far into the file, from 0 (the first) to 1 (the last)."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 0x01
    path.write_bytes(content)
