"""`nsa ready` as tests call it: a tiny model that learns, and what the check says of it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed.launching import ROOT, TINY, environment

LEARNS = {"steps": 1000, "seq_len": 64, "batch_size": 4, "lr": 3e-3, "eval_every": 50, "eval_sequences": 4}
QUICK = ("--quick",)


def write_config(folder: Path, **sections: dict[str, object]) -> Path:
    """A tiny model that learns, its files all written."""
    tree = {**TINY, "train": LEARNS, "telemetry": {"watchdog_floor_s": 60.0}}
    tree = {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}}
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))
    return path


def ready(folder: Path, config: Path, *arguments: str, **variables: str) -> tuple[int, str, dict]:
    """Exit code, output and readiness.json of the command."""
    ended = subprocess.run(
        [sys.executable, "-m", "nsa", "ready", str(config), "--out", str(folder / "ready"), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    result = folder / "ready" / "readiness.json"
    output = ended.stdout + ended.stderr
    return ended.returncode, output, json.loads(result.read_text()) if result.exists() else {}


def failed(result: dict) -> set[tuple[str, str]]:
    return {(c["phase"], c["name"]) for c in result["criteria"] if c["verdict"] == "fail"}


def reason(result: dict, about: str) -> str:
    return next(line for line in result["reasons"] if about in line)
