"""Measures the cost of telemetry per step: `python -m bench.telemetry` on a CUDA GPU.

Several runs of the trainer take turns: each runs a block of steps with telemetry on or off, alternating inside every
run. So both modes use the same compiled code, the same memory and the same state of the machine. "On" is events, CSV
files, TensorBoard, statistics of attention, watchdog and console as configured; "off" skips every call to them.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.output import Results, add_dirty_option
from nsa.config import load_config
from nsa.ops.observe import Observer
from nsa.run_folder import EventKind, TrainingRow
from nsa.train import loop
from nsa.train.monitor import Monitor

ROOT = Path(__file__).parents[1]
CONFIG = "configs/m7c_125m_1xa100_production.yaml"
OVERRIDES = ["data.source=synthetic", "train.eval_every=0", "data.validation_fraction=0", "checkpoint.every=1000000"]
WAITING = ["telemetry.watchdog_floor_s=3600", "telemetry.watchdog_first_step_s=3600"]  # a run waits for its turn
ANSWER = "block: "


class SwitchedMonitor(Monitor):
    """Does nothing while it is off. After every block of steps it reports the duration and waits for its next turn.

    A block starts in the middle between two samples, so that it contains all work for one sample.
    """

    on = True
    began: float | None = None  # None before the first turn
    inside_s = 0.0

    def step_done(self, row: TrainingRow) -> None:
        if self.on:
            began = time.perf_counter()
            super().step_done(row)
            self.inside_s += time.perf_counter() - began
        every = self.config.telemetry.every
        if row.step % every == every // 2:
            self._take_turn(row.step)

    def _take_turn(self, step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = 0.0 if self.began is None else time.perf_counter() - self.began
        self.stream.flush()  # pending writes must not fall into another block
        print(ANSWER + json.dumps({"step": step, "seconds": seconds, "inside_s": self.inside_s}), flush=True)
        turn = sys.stdin.readline()
        if not turn:
            raise SystemExit("the measuring process has ended")
        self.on = turn.strip() == "on"
        self.inside_s = 0.0
        self.began = time.perf_counter()

    def observer(self, step: int) -> Observer | None:
        return super().observer(step) if self.on else None

    def beat(self, step: int, phase: str) -> None:
        if self.on:
            super().beat(step, phase)

    def extended_timeout(self) -> AbstractContextManager[None]:
        return super().extended_timeout() if self.on else nullcontext()

    def emit(self, event: EventKind, step: int, **values: Any) -> None:
        if self.on:
            super().emit(event, step, **values)


class Worker:
    """One run in a process of its own, which waits for its turn."""

    def __init__(self, folder: Path, arguments: list[str]):
        command = [sys.executable, "-m", "bench.telemetry", "--worker", str(folder), *arguments]
        self._log = (folder.parent / f"{folder.name}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT
        )

    def ready(self) -> dict[str, float]:
        """The report of the run at the end of its block."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, float] = json.loads(line.removeprefix(ANSWER))
                return answer
        raise SystemExit(f"a run ended with {self._process.wait()}: see {self._log.name}")

    def run(self, mode: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(mode + "\n")
        self._process.stdin.flush()
        return self.ready()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def measure(workers: list[Worker], pairs: int, steps: int) -> list[dict[str, Any]]:
    """`pairs` pairs of blocks of every worker, on and off in alternating order."""
    for worker in workers:  # compiles and warms up
        worker.ready()
    for worker in workers:
        worker.run("on")
    found = []
    for pair in range(pairs):
        for number, worker in enumerate(workers):
            modes = ("on", "off") if (pair + number) % 2 == 0 else ("off", "on")
            blocks = {mode: worker.run(mode) for mode in modes}
            found.append(
                {
                    "run": number,
                    "first": modes[0],
                    "on_step_s": blocks["on"]["seconds"] / steps,
                    "off_step_s": blocks["off"]["seconds"] / steps,
                    "inside_step_s": blocks["on"]["inside_s"] / steps,
                }
            )
    return found


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """The cost in percent of a step, with the standard error of its mean, and the part spent inside the call that ends
    a step. The rest is smaller calls, threads and the GPU."""
    costs = [100 * (pair["on_step_s"] / pair["off_step_s"] - 1) for pair in pairs]
    error = statistics.stdev(costs) / math.sqrt(len(costs)) if len(costs) > 1 else math.inf
    return {
        "pairs": len(pairs),
        "cost_percent": statistics.mean(costs),
        "cost_percent_error": error,
        "cost_percent_median": statistics.median(costs),
        "on_step_s": statistics.median(pair["on_step_s"] for pair in pairs),
        "off_step_s": statistics.median(pair["off_step_s"] for pair in pairs),
        "inside_percent": 100 * statistics.median(pair["inside_step_s"] / pair["off_step_s"] for pair in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12, help="of blocks, each run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    add_dirty_option(parser)
    given = parser.parse_args()
    overrides = [*OVERRIDES, *WAITING, *given.overrides]
    config = load_config(given.config, overrides)
    if given.worker:
        loop.Monitor = SwitchedMonitor  # type: ignore[attr-defined]
        loop.train(config, given.worker)
        return
    results = Results(given.out, given.allow_dirty) if given.out else None
    every = config.telemetry.every
    file, steps = Path(given.config).resolve(), every * (2 * given.pairs + 4)
    arguments = ["--config", str(file), *given.overrides, f"train.steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(Path(folder) / f"run{number}", arguments) for number in range(given.runs)]
        try:
            pairs = measure(workers, given.pairs, every)
        finally:
            for worker in workers:
                worker.end()
    told = summary(pairs)
    table = Table("telemetry", "s per step")
    table.add_row("on", f"{told['on_step_s']:.5f}")
    table.add_row("off", f"{told['off_step_s']:.5f}")
    Console().print(table)
    cost, error, median = (told[f"cost_percent{kind}"] for kind in ("", "_error", "_median"))
    print(f"cost {cost:+.2f} % +- {error:.2f} (median {median:+.2f}) over {told['pairs']} pairs of {every} steps")
    print(f"{told['inside_percent']:.2f} % of a step is spent in the call that ends it")
    if results:
        results.write(config=given.config, overrides=overrides, steps_a_block=every, **told, blocks=pairs)


if __name__ == "__main__":
    main()
