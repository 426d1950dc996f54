"""Runs that are killed again and again, and their comparison with a run that is never killed."""

from dataclasses import dataclass
from pathlib import Path

import torch

from nsa.checkpoint.export import find_checkpoint
from nsa.checkpoint.restore import fill, read_random, read_state, saved_shapes
from tests.distributed.launching import numbers_of, start_ranks, wait_all, write_config

KILLED = -9
# Both kinds of sparse attention; the index warms up in the first steps, so that runs are killed before and after it.
LAYERS = {
    "model": {"layer_pattern": ["nsa", "msa"]},
    "msa": {"block": 16, "num_selected": 1, "num_local": 0},
}
STEP_POINTS = ("step.begin", "step.forward", "step.backward", "step.optimizer", "step.end")
SAVE_POINTS = (
    "save.begin",
    "save.staged",
    "save.prepare",
    "save.shard",
    "save.shard_written",
    "save.index",
    "save.own",
    "save.state",
    "save.manifest",
    "save.rename",
    "save.renamed",
    "save.latest",
    "save.best",
    "save.retention",
    "save.done",
)
END_POINTS = ("start.running", "end.weights", "end.metrics")  # passed once in a start
POINTS = (*STEP_POINTS, *SAVE_POINTS, "validate", *END_POINTS)
EVERY_RANK = {*STEP_POINTS, "save.begin", "save.staged", "save.shard", "save.shard_written", "save.own", "validate"}


@dataclass(frozen=True)
class Runs:
    """A configuration on some ranks, trained into folders beside each other."""

    folder: Path
    size: int
    config: str

    def train(self, name: str, faults: str = "", module: str = "nsa"):
        arguments = ("train", self.config, f"train.out_dir={self.folder / name}")
        return wait_all(start_ranks(self.size, *arguments, faults=faults, module=module))

    def finish(self, name: str) -> None:
        ended = self.train(name)
        assert [e.code for e in ended] == [0] * self.size, ended[0].output + ended[-1].output

    def kill(self, name: str, fault: str) -> None:
        """Ends in the kill that `fault` asks for; a survivor reports that a rank was lost."""
        ended = self.train(name, fault)
        codes = sorted(e.code for e in ended)
        assert codes[0] == KILLED, (fault, [e.output for e in ended])
        assert all(code in (KILLED, 8) for code in codes), (fault, codes, [e.output for e in ended])


def make_runs(
    folder: Path, strategy: str, *, recompute: str = "none", steps: int = 8, eval_every: int = 3, **more: dict
) -> Runs:
    parallel = {"strategy": strategy, "timeout_s": 60.0}
    train = {"steps": steps, "eval_every": eval_every}
    runtime = {"device": "cpu", "threads": 1, "deterministic": True, "gradient_checkpointing": recompute}
    layers = {**LAYERS, "msa": {**LAYERS["msa"], "warmup_steps": min(5, steps - 1)}}
    sections = {"parallel": parallel, "train": train, "runtime": runtime, **layers, **more}
    config = write_config(folder, **sections)
    return Runs(folder, 1 if strategy == "single" else 2, config)


def assert_prefix_equal(killed: Path, whole: Path) -> int:
    """Every whole row of the killed run is the unbroken run's row; returns how many there are."""
    if not (killed / "training.csv").exists():
        return 0
    rows, wanted = numbers_of(killed), numbers_of(whole)
    assert rows == wanted[: len(rows)]
    return len(rows)


def assert_equal_to_the_bit(run: Path, whole: Path, size: int) -> None:
    """Losses and norms of every step, each once; weights, optimizer, random state, data position."""
    assert numbers_of(run) == numbers_of(whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    a, b = find_checkpoint(run), find_checkpoint(whole)
    assert a.name == b.name
    assert read_state(a)["progress"] == read_state(b)["progress"]
    tensors = [read_all(a), read_all(b)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    for rank in range(size):
        assert read_random(a, rank) == read_random(b, rank)


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    shapes = saved_shapes(checkpoint)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill(tensors, checkpoint)
    return tensors
