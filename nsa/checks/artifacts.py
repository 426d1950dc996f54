"""Did a finished run leave every file it should, and is each one sound: content, not only presence."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nsa import run_folder
from nsa.checkpoint.format import committed, newest_verified, step_of
from nsa.checkpoint.storage import open_safetensors
from nsa.config import Config
from nsa.errors import CheckpointError
from nsa.files import LARGEST_LOG, read_regular

SHARES_TOLERANCE = 1e-3  # how far the sum of shares may be from 1


class Unsound(Exception):  # noqa: N818
    """Why a file does not count."""


@dataclass(frozen=True)
class Artifact:
    """One file or family of files of a run. `found` is what it holds, or what is wrong with it."""

    name: str
    ok: bool
    found: str


def check_artifacts(folder: Path, config: Config, ranks: int) -> list[Artifact]:
    """Every artifact that a run of this configuration on that many ranks must leave."""
    return [_check(name, check) for name, check in _Checks(folder, config, ranks).all().items()]


def _check(name: str, check: Callable[[], str]) -> Artifact:
    try:
        return Artifact(name, True, check())
    except FileNotFoundError as error:
        return Artifact(name, False, f"{Path(str(error.filename)).name} is missing")
    except (Unsound, OSError) as error:
        return Artifact(name, False, str(error))
    except (ValueError, KeyError, TypeError, CheckpointError) as error:  # damaged in a way that no check foresees
        return Artifact(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unsound(otherwise)


class _Checks:
    def __init__(self, folder: Path, config: Config, ranks: int):
        self.folder, self.config, self.ranks = folder, config, ranks
        self.steps, self.layers = config.train.steps, config.model.layer_kinds().count("nsa")

    def all(self) -> dict[str, Callable[[], str]]:
        checks: dict[str, Callable[[], str]] = {
            run_folder.METRICS_FILE: self._metrics,
            run_folder.ENVIRONMENT_FILE: self._environment,
            run_folder.CONFIG_FILE: lambda: self._lines(self.folder / run_folder.CONFIG_FILE),
            run_folder.RUN_LOG.name(0): lambda: ", ".join(self._lines(path) for path in self._each(run_folder.RUN_LOG)),
            run_folder.TRAINING.file: self._training,
            "heartbeat_rank{r}.jsonl": self._heartbeats,
            run_folder.FALLBACKS.file: self._fallbacks,
            run_folder.DTYPES_FILE: self._dtypes,
            "mem_boot.*": lambda: self._memory("boot"),
            "mem_step1.*": lambda: self._memory("step1"),
            run_folder.OPTIMIZER_STATE_FILE: self._optimizer_state,
            f"{run_folder.CHECKPOINTS_FOLDER}/": self._checkpoints,
            run_folder.WEIGHTS_FILE: self._weights,
        }
        branch = self.config.nsa.force_branch if self.layers else "none"
        if branch in (None, "sel"):
            checks[run_folder.SELECTION.file] = self._selection
        if branch is None:
            checks[run_folder.GATES.file] = self._gates
        if self.config.telemetry.tensorboard:
            checks[f"{run_folder.TENSORBOARD_FOLDER}/"] = self._tensorboard
        return checks

    def _each(self, files: run_folder.RankFiles) -> list[Path]:
        return [files.path(self.folder, rank) for rank in range(self.ranks)]

    def _rows(self, table: run_folder.Table, otherwise: str) -> list[dict[str, str]]:
        rows = run_folder.read_rows(self.folder, table)
        _demand(bool(rows), otherwise)
        missing = [name for name in table.columns if name not in rows[0]]
        _demand(not missing, f"lacks the columns {', '.join(missing)}")
        return rows

    def _lines(self, path: Path) -> str:
        lines = read_regular(path, LARGEST_LOG).count(b"\n")
        _demand(lines > 0, f"{path.name}: is empty")
        return f"{lines} lines"

    def _metrics(self) -> str:
        metrics = run_folder.read_json(self.folder / run_folder.METRICS_FILE)
        _demand(metrics.get("status") == "done", f"status is {metrics.get('status')!r}, not 'done'")
        _demand(metrics.get("steps") == self.steps, f"counts {metrics.get('steps')} steps of {self.steps}")
        lost = metrics.get("telemetry_failures")
        _demand(lost == 0, f"telemetry_failures is {lost}: something could not be written")
        return f"done, {self.steps} steps, {metrics.get('incidents')} incidents"

    def _environment(self) -> str:
        env = run_folder.read_json(self.folder / run_folder.ENVIRONMENT_FILE)
        missing = [name for name in run_folder.ENVIRONMENT_FIELDS if name not in env]
        _demand(not missing, f"lacks {', '.join(missing)}")
        _demand(env["world_size"] == self.ranks, f"says {env['world_size']} ranks, {self.ranks} were started")
        _demand(env["config"]["train"]["steps"] == self.steps, "holds another configuration")
        return f"{env['strategy']} on {self.ranks} ranks, torch {env['packages'].get('torch')}"

    def _training(self) -> str:
        rows = self._rows(run_folder.TRAINING, "holds no row")
        steps = [int(row["step"]) for row in rows]
        each_once = steps == list(range(1, self.steps + 1))
        _demand(each_once, f"{len(steps)} rows do not show each of {self.steps} steps once")
        for row in rows:
            wrong = [name for name in ("loss", "grad_norm", "lr") if not math.isfinite(float(row[name]))]
            _demand(not wrong or row["skipped"] == "1", f"step {row['step']}: {', '.join(wrong)} is not finite")
        _demand(any(float(row["grad_norm"]) > 0 for row in rows), "grad_norm is 0 in every step")
        _demand(all(float(row["toks_per_s"]) > 0 for row in rows), "toks_per_s is 0")
        return f"{len(rows)} rows"

    def _heartbeats(self) -> str:
        for rank, path in enumerate(self._each(run_folder.HEARTBEAT)):
            events = [run_folder.parse_event(line) for line in read_regular(path, LARGEST_LOG).splitlines()]
            kinds = {event["event"] for event in events}
            missing = [kind for kind in ("boot", "start", "step", "end") if kind not in kinds]
            _demand(not missing, f"{path.name}: has no event {', '.join(missing)}")
            _demand(all(event["rank"] == rank for event in events), f"{path.name}: holds events of another rank")
            last = max(event["step"] for event in events if event["event"] == "step")
            _demand(last == self.steps, f"{path.name}: ends at step {last} of {self.steps}")
        return f"{self.ranks} files, all to the end"

    def _selection(self) -> str:
        rows = self._rows(run_folder.SELECTION, "holds no sample; telemetry.attention must be on")
        for row in rows:
            most = float(row["max_distinct"])
            _demand(1 <= most <= self.config.nsa.num_selected, f"step {row['step']}: max_distinct is {most:g}")
            total = sum(float(row[name]) for name in run_folder.DISTANCE_COLUMNS)
            _demand(abs(total - 1) < SHARES_TOLERANCE, f"step {row['step']}: distances add up to {total:.3f}")
        return f"{len(rows)} samples"

    def _gates(self) -> str:
        rows = self._rows(run_folder.GATES, "holds no sample; telemetry.attention must be on")
        layers = {row["layer"] for row in rows} - {run_folder.ALL_LAYERS}
        _demand(len(layers) == self.layers, f"shows {len(layers)} of {self.layers} layers")
        for row in rows:
            total = sum(float(row[f"share_{branch}"]) for branch in run_folder.BRANCHES)
            sound = abs(total - 1) < SHARES_TOLERANCE
            _demand(sound, f"step {row['step']}, {row['layer']}: shares add up to {total}")
        return f"{len(rows) // (self.layers + 1)} samples of {self.layers} layers"

    def _fallbacks(self) -> str:
        header = read_regular(self.folder / run_folder.FALLBACKS.file).decode().partition("\n")[0] + "\n"
        _demand(header == run_folder.FALLBACKS.header, "has other columns than it should")
        kinds = {(row["branch"], row["reason"]) for row in run_folder.read_rows(self.folder, run_folder.FALLBACKS)}
        return f"{len(kinds)} kinds of fallback" if kinds else "no fallback"

    def _dtypes(self) -> str:
        text = read_regular(self.folder / run_folder.DTYPES_FILE).decode()
        missing = [kind for kind in ("parameters", "gradients", "optimizer state") if kind not in text]
        _demand(not missing, f"says nothing of {', '.join(missing)}")
        first = text.splitlines()[0]
        _demand(first.startswith("unexpected types:"), "does not begin with what is unexpected")
        _demand(first.endswith("none"), first)
        return first

    def _memory(self, label: str) -> str:
        for path in self._each(run_folder.memory_files(label, ".json")):
            known = run_folder.read_json(path).get("owners", {}).get("parameters", {}).get("bytes", 0)
            _demand(known > 0, f"{path.name}: knows no parameters")
        for path in self._each(run_folder.memory_files(label, ".txt")):
            self._lines(path)
        return f"{2 * self.ranks} files"

    def _optimizer_state(self) -> str:
        lines = read_regular(self.folder / run_folder.OPTIMIZER_STATE_FILE).decode().splitlines()
        megabytes = {line.split(":")[0]: float(line.split(":")[1].split()[0]) for line in lines if ":" in line}
        for rank in range(self.ranks):
            _demand(f"rank {rank}" in megabytes, f"has no line of rank {rank}")
            _demand(megabytes[f"rank {rank}"] > 0, f"rank {rank} holds no optimizer state")
        return f"{megabytes['rank 0']:g} MB on rank 0"

    def _checkpoints(self) -> str:
        root = self.folder / run_folder.CHECKPOINTS_FOLDER
        newest, damage = newest_verified(root)
        _demand(not damage, "; ".join(damage))
        if newest is None:
            raise Unsound("no checkpoint was committed")
        step = step_of(newest)
        _demand(step == self.steps, f"the newest is of step {step}, not {self.steps}")
        return f"{len(committed(root))} kept, {newest.name} verified"

    def _weights(self) -> str:
        path = self.folder / run_folder.WEIGHTS_FILE
        path.stat()  # a missing file is reported like any other
        with open_safetensors(path) as file:
            count = len(file.keys())
        _demand(count > 0, "holds no tensor")
        return f"{count} tensors"

    def _tensorboard(self) -> str:
        files = (self.folder / run_folder.TENSORBOARD_FOLDER).glob("events.out.tfevents.*")
        count = sum(path.stat().st_size > 0 for path in files)
        _demand(count > 0, "holds no event file")
        return f"{count} files"
