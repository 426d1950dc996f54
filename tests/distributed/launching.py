"""Real processes for tests: the ranks of a run over gloo on this machine."""

import csv
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from nsa.run_folder import MACHINE_COLUMNS
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
TINY = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16},
    # Of up to 8 visible blocks 4 are read: selection has a choice.
    "nsa": {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 4, "window": 8},
    "data": {"source": "synthetic"},
    "train": {"steps": 8, "seq_len": 32, "batch_size": 4, "lr": 1e-2, "eval_every": 3, "eval_sequences": 5},
    "runtime": {"device": "cpu", "threads": 1, "deterministic": True},
    "parallel": {"timeout_s": 60.0},
    "checkpoint": {"every": 2},
    "telemetry": {"tensorboard": False},
}


@dataclass(frozen=True)
class Ended:
    code: int
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "RANK", "WORLD_", "LOCAL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def ranks_environment(size: int) -> list[dict[str, str]]:
    """What torchrun tells each rank; nothing for one rank, which needs no launcher."""
    if size == 1:
        return [{}]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def start_ranks(
    size: int, *arguments: str, faults: str = "", module: str = "nsa", console: int | None = None
) -> list[warm.Process]:
    """The command on `size` ranks, as torchrun would start it."""
    armed = {"NSA_FAULTS": faults} if faults else {}
    ranks = [environment(**rank, **armed) for rank in ranks_environment(size)]
    return [warm.start(module, *arguments, env=rank, console=console) for rank in ranks]


def wait_all(processes: list[warm.Process], timeout_s: float = TIMEOUT_S) -> list[Ended]:
    """How each rank ended. One that does not end in time is killed, and the test fails."""
    deadline = time.monotonic() + timeout_s
    try:
        outputs = [p.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for p in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        said = "\n".join(p.communicate()[0] for p in processes)
        raise AssertionError(f"no end after {timeout_s} s; the ranks said:\n{said}") from None
    return [Ended(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def run_ranks(size: int, *arguments: str, faults: str = "") -> list[Ended]:
    return wait_all(start_ranks(size, *arguments, faults=faults))


def write_config(folder: Path, **sections: dict[str, object]) -> str:
    """TINY with changes by section, as a file; its path."""
    tree = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))
    return str(path)


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "training.csv").open() as file:
        return list(csv.DictReader(file))


def numbers_of(run: Path) -> list[dict[str, str]]:
    """The rows without what depends on the machine."""
    return [{k: v for k, v in row.items() if k not in MACHINE_COLUMNS} for row in rows_of(run)]


def events_of(run: Path, rank: int = 0) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> dict[str, object]:
    metrics: dict[str, object] = json.loads((run / "metrics.json").read_text())
    return metrics
