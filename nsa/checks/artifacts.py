"""Did a finished run leave everything it should, and is it what it claims to be: content, not only presence."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from nsa.checkpoint import layout
from nsa.checkpoint.weights import WEIGHTS_FILE
from nsa.config import Config
from nsa.errors import CheckpointError
from nsa.record.training_csv import COLUMNS

SHARES_OFF = 1e-3  # by how much the branches' shares may miss 1


class Unsound(Exception):  # noqa: N818  (what is wrong with a file, in words)
    """Why a file does not count."""


@dataclass(frozen=True)
class Artifact:
    """One file or family of files of a run. `found` says what is in it, or what is wrong."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True)
class _Run:
    folder: Path
    config: Config
    ranks: int

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def layers(self) -> int:
        """Layers with gates and selection."""
        return self.config.model.layer_kinds().count("nsa")

    @property
    def selects(self) -> bool:
        return "nsa" in self.config.model.layer_kinds() and self.config.nsa.force_branch in (None, "sel")

    @property
    def mixes(self) -> bool:
        return "nsa" in self.config.model.layer_kinds() and self.config.nsa.force_branch is None

    def each(self, stem: str, suffix: str) -> list[str]:
        """A name per rank, as telemetry gives them."""
        return [f"{stem}.{suffix}", *(f"{stem}_rank{r}.{suffix}" for r in range(1, self.ranks))]


def check_artifacts(folder: Path, config: Config, ranks: int) -> list[Artifact]:
    """Every artifact that a run of this configuration on that many ranks owes."""
    run = _Run(folder, config, ranks)
    checks: dict[str, Callable[[_Run], str]] = {
        "metrics.json": _metrics,
        "env.json": _environment,
        "config.yaml": lambda run: _lines(run, "config.yaml"),
        "run.log": lambda run: _of_each(run, run.each("run", "log"), _lines),
        "training.csv": _training,
        "heartbeat_rank{r}.jsonl": _heartbeats,
        "fallback_counters.csv": _fallbacks,
        "dtypes_report.txt": _dtypes,
        "mem_boot.*": lambda run: _memory(run, "mem_boot"),
        "mem_step1.*": lambda run: _memory(run, "mem_step1"),
        "opt_state_mb.txt": _optimizer_state,
        "checkpoints/": _checkpoints,
        "model.safetensors": _weights,
    }
    if run.selects:
        checks["k_stats.csv"] = _selection
    if run.mixes:
        checks["gate_stats.csv"] = _gates
    if config.telemetry.tensorboard:
        checks["tb/"] = _tensorboard
    return [_check(name, check, run) for name, check in checks.items()]


def _check(name: str, check: Callable[[_Run], str], run: _Run) -> Artifact:
    try:
        return Artifact(name, True, check(run))
    except FileNotFoundError as error:
        return Artifact(name, False, f"{Path(str(error.filename)).name} is missing")
    except (Unsound, OSError) as error:
        return Artifact(name, False, str(error))
    except (ValueError, KeyError, TypeError) as error:  # damaged in a way nobody thought of
        return Artifact(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unsound(otherwise)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Unsound(f"{path.name}: no valid JSON: {error}") from None
    _demand(isinstance(content, dict), f"{path.name}: holds no table of values")
    return dict(content)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _lines(run: _Run, name: str) -> str:
    lines = (run.folder / name).read_text(encoding="utf-8", errors="replace").count("\n")
    _demand(lines > 0, f"{name}: is empty")
    return f"{lines} lines"


def _of_each(run: _Run, names: list[str], check: Callable[[_Run, str], str]) -> str:
    return ", ".join([check(run, name) for name in names])


def _metrics(run: _Run) -> str:
    metrics = _json(run.folder / "metrics.json")
    _demand(metrics.get("status") == "done", f"status is {metrics.get('status')!r}, not 'done'")
    _demand(metrics.get("steps") == run.steps, f"counts {metrics.get('steps')} steps of {run.steps}")
    lost = metrics.get("telemetry_failures")
    _demand(lost == 0, f"telemetry_failures is {lost}: something could not be written")
    return f"done, {run.steps} steps, {metrics.get('incidents')} incidents"


def _environment(run: _Run) -> str:
    env = _json(run.folder / "env.json")
    missing = [name for name in ("nsa", "command", "python", "packages", "config", "variables") if name not in env]
    _demand(not missing, f"lacks {', '.join(missing)}")
    _demand(env.get("world_size") == run.ranks, f"says {env.get('world_size')} ranks, {run.ranks} were started")
    _demand(env["config"]["train"]["steps"] == run.steps, "holds another configuration")
    return f"{env.get('strategy')} on {run.ranks} ranks, torch {env['packages'].get('torch')}"


def _training(run: _Run) -> str:
    rows = _rows(run.folder / "training.csv")
    _demand(bool(rows), "holds no row")
    missing = [name for name in COLUMNS if name not in rows[0]]
    _demand(not missing, f"lacks the columns {', '.join(missing)}")
    steps = [int(row["step"]) for row in rows]
    _demand(steps == list(range(1, run.steps + 1)), f"{len(steps)} rows do not show each of {run.steps} steps once")
    for row in rows:
        wrong = [name for name in ("loss", "grad_norm", "lr") if not math.isfinite(float(row[name]))]
        _demand(not wrong or row["skipped"] == "1", f"step {row['step']}: {', '.join(wrong)} is not finite")
    _demand(any(float(row["grad_norm"]) > 0 for row in rows), "grad_norm is 0 in every step")
    _demand(all(float(row["toks_per_s"]) > 0 for row in rows), "toks_per_s is 0")
    return f"{len(rows)} rows"


def _heartbeats(run: _Run) -> str:
    for rank in range(run.ranks):
        name = f"heartbeat_rank{rank}.jsonl"
        events = [json.loads(line) for line in (run.folder / name).read_text(encoding="utf-8").splitlines()]
        kinds = {event["event"] for event in events}
        missing = [kind for kind in ("boot", "start", "step", "end") if kind not in kinds]
        _demand(not missing, f"{name}: has no event {', '.join(missing)}")
        _demand(all(event["rank"] == rank for event in events), f"{name}: holds events of another rank")
        last = max(event["step"] for event in events if event["event"] == "step")
        _demand(last == run.steps, f"{name}: ends at step {last} of {run.steps}")
    return f"{run.ranks} files, all to the end"


def _selection(run: _Run) -> str:
    rows = _rows(run.folder / "k_stats.csv")
    _demand(bool(rows), "holds no sample; telemetry.attention must be on")
    for row in rows:
        most = float(row["max_distinct"])
        _demand(1 <= most <= run.config.nsa.num_selected, f"step {row['step']}: max_distinct is {most:g}")
        spread = sum(float(value) for name, value in row.items() if name.startswith("distance_"))
        _demand(abs(spread - 1) < SHARES_OFF, f"step {row['step']}: distances add up to {spread:.3f}")
    return f"{len(rows)} samples"


def _gates(run: _Run) -> str:
    rows = _rows(run.folder / "gate_stats.csv")
    _demand(bool(rows), "holds no sample; telemetry.attention must be on")
    layers = {row["layer"] for row in rows} - {"all"}
    _demand(len(layers) == run.layers, f"shows {len(layers)} of {run.layers} layers")
    for row in rows:
        shares = [float(row[f"share_{branch}"]) for branch in ("cmp", "sel", "win")]
        _demand(
            abs(sum(shares) - 1) < SHARES_OFF, f"step {row['step']}, {row['layer']}: shares add up to {sum(shares)}"
        )
    return f"{len(rows) // (run.layers + 1)} samples of {run.layers} layers"


def _fallbacks(run: _Run) -> str:
    with (run.folder / "fallback_counters.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        _demand(reader.fieldnames == ["step", "branch", "reason", "count"], "has other columns than it should")
    kinds = {(row["branch"], row["reason"]) for row in rows}
    return f"{len(kinds)} kinds of fallback" if kinds else "no fallback"


def _dtypes(run: _Run) -> str:
    text = (run.folder / "dtypes_report.txt").read_text(encoding="utf-8")
    missing = [kind for kind in ("parameters", "gradients", "optimizer state") if kind not in text]
    _demand(not missing, f"says nothing of {', '.join(missing)}")
    first = text.splitlines()[0]
    _demand(first.startswith("unexpected types:"), "does not begin with what is unexpected")
    _demand(first.endswith("none"), first)
    return first


def _memory(run: _Run, stem: str) -> str:
    for name in run.each(stem, "json"):
        content = _json(run.folder / name)
        _demand(content.get("owners", {}).get("parameters", {}).get("bytes", 0) > 0, f"{name}: knows no parameters")
    for name in run.each(stem, "txt"):
        _lines(run, name)
    return f"{2 * run.ranks} files"


def _optimizer_state(run: _Run) -> str:
    text = (run.folder / "opt_state_mb.txt").read_text(encoding="utf-8")
    said = {line.split(":")[0]: float(line.split(":")[1].split()[0]) for line in text.splitlines() if ":" in line}
    for rank in range(run.ranks):
        _demand(f"rank {rank}" in said, f"has no line of rank {rank}")
        _demand(said[f"rank {rank}"] > 0, f"rank {rank} holds no optimizer state")
    return f"{said['rank 0']:g} MB on rank 0"


def _checkpoints(run: _Run) -> str:
    damage: list[CheckpointError] = []
    newest = layout.newest_verified(run.folder / layout.FOLDER, damage.append)
    _demand(not damage, str(damage[0]) if damage else "")
    _demand(newest is not None, "no checkpoint was committed")
    assert newest is not None
    _demand(layout.step_of(newest) == run.steps, f"the newest is of step {layout.step_of(newest)}, not {run.steps}")
    return f"{len(layout.committed(run.folder / layout.FOLDER))} kept, {newest.name} verified"


def _weights(run: _Run) -> str:
    path = run.folder / WEIGHTS_FILE
    path.stat()  # the library's own message names no file
    try:
        with safe_open(path, framework="np") as file:
            count = len(list(file.keys()))
    except Exception as error:  # the library has several, none of them its own
        raise Unsound(f"cannot be read: {error}") from None
    _demand(count > 0, "holds no tensor")
    return f"{count} tensors"


def _tensorboard(run: _Run) -> str:
    files = [path for path in (run.folder / "tb").glob("events.out.tfevents.*") if path.stat().st_size > 0]
    _demand(bool(files), "holds no event file")
    return f"{len(files)} files"
