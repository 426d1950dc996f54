"""Checks that a finished run wrote every file of the contract in `nsa.run_folder`: each must exist, parse, and have a
row or an event for every step."""

import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nsa import run_folder
from nsa.checkpoint.format import committed, newest_verified, step_of
from nsa.checkpoint.storage import open_safetensors
from nsa.config import Config
from nsa.errors import CheckpointError
from nsa.files import LARGEST_LOG, read_regular
from nsa.inspect.run_files import SampleTable, read_document
from nsa.nn.attention import sample_layers
from nsa.run_folder import RankFiles, Table, memory_files


@dataclass(frozen=True)
class Artifact:
    """One file or one kind of file of a run. `found` says what the file contains, or what is wrong with it."""

    name: str
    ok: bool
    found: str


def check_artifacts(folder: Path, config: Config, ranks: int) -> list[Artifact]:
    """Checks every artifact that a run of this configuration with `ranks` ranks must write."""
    return [_check(name, check) for name, check in _Checks(folder, config, ranks).all().items()]


def _check(name: str, check: Callable[[], str]) -> Artifact:
    try:
        return Artifact(name, True, check())
    except FileNotFoundError as error:
        return Artifact(name, False, f"{Path(str(error.filename)).name} is missing")
    except (OSError, ValueError, CheckpointError) as error:
        return Artifact(name, False, str(error))


def _demand(condition: object, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


class _Checks:
    def __init__(self, folder: Path, config: Config, ranks: int):
        self.folder, self.config, self.ranks, self.steps = folder, config, ranks, config.train.steps

    def all(self) -> dict[str, Callable[[], str]]:
        every, layers = self.config.telemetry.every, sample_layers(self.config)
        recorded = Counter(name for kind in self.config.model.layer_kinds() for name in layers[kind].statistics)
        steps, sampled = range(1, self.steps + 1), sorted({1, *range(every, self.steps + 1, every)})
        metrics: dict[str, Any] = {"status": "done", "steps": self.steps, "telemetry_failures": 0}
        checks: dict[str, Callable[[], str]] = {
            run_folder.METRICS_FILE: partial(self._document, run_folder.METRICS_FILE, **metrics),
            run_folder.ENVIRONMENT_FILE: partial(self._document, run_folder.ENVIRONMENT_FILE, world_size=self.ranks),
            run_folder.CONFIG_FILE: partial(self._document, run_folder.CONFIG_FILE),
            run_folder.RUN_LOG.name(0): partial(self._texts, run_folder.RUN_LOG),
            run_folder.TRAINING.file: partial(self._rows, run_folder.TRAINING, steps),
            "heartbeat_rank{r}.jsonl": self._heartbeats,
            run_folder.FALLBACKS.file: partial(self._rows, run_folder.FALLBACKS),
            run_folder.DTYPES_FILE: partial(self._texts, run_folder.DTYPES_FILE, begins="unexpected types: none"),
            "mem_boot.*": partial(self._texts, memory_files("boot", ".json"), memory_files("boot", ".txt")),
            "mem_step1.*": partial(self._texts, memory_files("step1", ".json"), memory_files("step1", ".txt")),
            run_folder.OPTIMIZER_STATE_FILE: partial(self._texts, run_folder.OPTIMIZER_STATE_FILE, begins="rank 0: "),
            f"{run_folder.CHECKPOINTS_FOLDER}/": self._checkpoints,
            run_folder.WEIGHTS_FILE: self._weights,
        }
        if recorded["selection"]:  # MSA layers, which also report "mass", select nothing in some steps
            selects = sampled if recorded["selection"] > recorded["mass"] else None
            checks[run_folder.SELECTION.file] = partial(self._rows, run_folder.SELECTION, selects)
        if recorded["gates"]:
            checks[run_folder.GATES.file] = partial(self._rows, run_folder.GATES, sampled, recorded["gates"] + 1)
        if self.config.telemetry.tensorboard:
            checks[f"{run_folder.TENSORBOARD_FOLDER}/"] = self._tensorboard
        return checks

    def _texts(self, *files: RankFiles | str, begins: str = "") -> str:
        ranks = range(self.ranks)
        names = [name for file in files for name in ([file] if isinstance(file, str) else map(file.name, ranks))]
        for name in names:
            text = read_regular(self.folder / name, LARGEST_LOG).decode()
            _demand(text.strip() and text.startswith(begins), f"{name} begins with {text[:60]!r}")
            _demand(not name.endswith(".json") or json.loads(text), f"{name} has no values")
        return f"{len(names)} files"

    def _rows(self, table: Table, expected: Collection[int] | None = None, per_step: int = 1) -> str:
        found = SampleTable(self.folder / table.file, table)
        _demand(not found.problem, found.problem)
        rows = {step: len(rows) for step, rows in found.steps.items()}
        count = sum(rows.values())
        if expected is not None and rows != dict.fromkeys(expected, per_step):
            hint = "" if rows else "; telemetry.attention must be on"
            raise ValueError(f"{count} rows do not show each of {len(expected)} steps {per_step} times{hint}")
        return f"{count} rows"

    def _document(self, name: str, **values: object) -> str:
        content, problem = read_document(self.folder / name)
        _demand(not problem, problem)
        for key, wanted in values.items():
            _demand(content.get(key) == wanted, f"{key} is {content.get(key)!r}, not {wanted!r}")
        return ", ".join(f"{key} {value}" for key, value in values.items()) or f"{len(content)} sections"

    def _heartbeats(self) -> str:
        for name in map(run_folder.HEARTBEAT.name, range(self.ranks)):
            lines = read_regular(self.folder / name, LARGEST_LOG).splitlines()
            events = [(event["event"], event["step"]) for event in map(run_folder.parse_event, lines)]
            missing = {"boot", "start", "end"} - {kind for kind, _ in events}
            _demand(not missing, f"{name} has no event {', '.join(sorted(missing))}")
            done = [step for kind, step in events if kind == "step"]
            _demand(done == list(range(1, self.steps + 1)), f"{name} has {len(done)} of {self.steps} steps")
        return f"{self.ranks} files, {self.steps} steps each"

    def _checkpoints(self) -> str:
        newest, damage = newest_verified(root := self.folder / run_folder.CHECKPOINTS_FOLDER)
        _demand(not damage, "; ".join(damage))
        step = step_of(newest) if newest else 0
        _demand(step == self.steps, f"the newest is of step {step}, not {self.steps}")
        return f"{len(committed(root))} kept, the newest is verified"

    def _weights(self) -> str:
        path = self.folder / run_folder.WEIGHTS_FILE
        path.stat()  # a missing file gets the same message as any other
        with open_safetensors(path) as file:
            return f"{len(file.keys())} tensors"

    def _tensorboard(self) -> str:
        files = list((self.folder / run_folder.TENSORBOARD_FOLDER).glob("events.out.tfevents.*"))
        _demand(files, "has no event file")
        return f"{len(files)} files"
