"""`nsa ready` for tests: a tiny model that learns, checked as a command or, without processes, in this one."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from nsa.checks.probe import ProbeResult, find
from nsa.checks.progress import Progress
from nsa.checks.readiness import QUICK_ON_CPU, ReadinessCheck
from nsa.checks.ready_report import build_result, write_pages
from nsa.checks.trials import Outcome, Trial, outcome_of
from nsa.config import load_config
from nsa.errors import NSAError
from nsa.inspect.reading import read_run
from nsa.train import train
from tests import warm
from tests.distributed.launching import TINY, environment, wait_all

LEARNS = {"steps": 1000, "seq_len": 32, "batch_size": 4, "lr": 3e-3, "eval_every": 50, "eval_sequences": 4}


def write_config(folder: Path, **sections: dict[str, object]) -> Path:
    """A tiny model that learns, with all its files."""
    tree = {**TINY, "train": LEARNS, "telemetry": {"watchdog_floor_s": 60.0}}
    tree["model"] = {**TINY["model"], "n_layers": 1}
    tree = {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}}
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))
    return path


def ready(folder: Path, config: Path, *arguments: str, **variables: str) -> tuple[int, str, dict]:
    """Exit code, output and readiness.json of the command. Its processes are warm, too, unless PYTHONPATH has a module
    for them to start with."""
    command = ("nsa", "ready", str(config), "--out", str(folder / "ready"), *arguments)
    started = warm.start(*command, env=environment(**variables), starts_others="PYTHONPATH" not in variables)
    [ended] = wait_all([started], 840)
    result = folder / "ready" / "readiness.json"
    return ended.code, ended.output, json.loads(result.read_text()) if result.exists() else {}


def ready_here(
    folder: Path,
    config_file: Path,
    *overrides: str,
    faults: Callable[[str], str] = lambda trial: "",
    leave: Callable[[Path], None] = lambda run: None,
) -> dict:
    """The quick check with runs and probes in this process: a kill is an exception. `faults` gives those of a trial by
    its name; `leave` may damage what a run leaves."""
    config = load_config(config_file, overrides)
    check = ReadinessCheck(config, folder / "ready", 1, QUICK_ON_CPU, Progress(Console(quiet=True)))
    check.folder.mkdir(exist_ok=True)

    def run_trial(trial: Trial, on_progress: Callable) -> Outcome:
        armed = ",".join(filter(None, (faults(trial.folder.name), trial.faults.replace(":kill:", ":raise:"))))
        return trial_here(trial, on_progress, armed, leave)

    def run_probe(kind: str, trial: Trial) -> ProbeResult:
        return ProbeResult(find(kind, trial.config, trial.nproc, [trial.folder.parent]))

    with patch.multiple("nsa.checks.readiness", run_trial=run_trial, run_probe=run_probe):
        phases = check.run()
    result = build_result(check, phases, config_file, overrides)
    write_pages(result, check.folder)
    return json.loads((check.folder / "readiness.json").read_text())


def trial_here(
    trial: Trial, on_progress: Callable, faults: str = "", leave: Callable[[Path], None] = lambda run: None
) -> Outcome:
    """The run of a trial in this process."""
    code, began = 0, time.monotonic()
    trial.folder.parent.mkdir(exist_ok=True)
    with trial.log_file.open("w") as log, patch.dict(os.environ, NSA_FAULTS=faults):
        try:
            train(trial.config, trial.folder)
        except (NSAError, RuntimeError) as error:
            code = getattr(error, "exit_code", 1)
            print(f"error: {error}", file=log)
    leave(trial.folder)
    view = read_run(trial.folder)
    on_progress(view, 1.0)
    return outcome_of(trial, view, code, time.monotonic() - began)


def failed(result: dict) -> set[tuple[str, str]]:
    return {(c["phase"], c["name"]) for c in result["criteria"] if c["verdict"] == "fail"}


def reason(result: dict, about: str) -> str:
    return next(line for line in result["reasons"] if about in line)
