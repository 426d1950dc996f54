"""`nsa ready`: checks in four phases, each in separate processes, whether a run can go to production on this machine.

Phase 0 checks the machine, the kernels and one step. Phase 1 trains on synthetic data, phase 2 on the configured data.
Phase 3 saves, kills, resumes and compares. Each phase changes the user's configuration as little as possible. A phase
that cannot complete its steps ends the check: later phases do not run, and a phase that did not run has not passed.
"""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nsa.checks.artifacts import Artifact, check_artifacts
from nsa.checks.criteria import WARMUP_SHARE, Criterion, judge_run, stability
from nsa.checks.machine import GpuUtilization
from nsa.checks.probe import NOT_CHECKED, ProbeResult, describe, run_probe
from nsa.checks.progress import Progress
from nsa.checks.trials import SYNTHETIC, OnProgress, Outcome, Trial, changed, remove_weights, run_trial
from nsa.config import Config
from nsa.errors import printable
from nsa.formatting import seconds
from nsa.inspect.reading import RunView
from nsa.parallel.context import data_ranks
from nsa.parallel.world import choose_strategy
from nsa.run_folder import MACHINE_COLUMNS, TRAINING, WEIGHTS_FILE, read_events, read_rows
from nsa.train.state import micro_batch_size

TITLES = {
    "phase0": "environment, kernels, one step",
    "phase1": "synthetic data",
    "phase2": "the configured data",
    "phase3": "save, kill, resume, compare",
}
STYLES = {"pass": "green", "fail": "bold red", "n/a": "dim"}
FATAL = ("stability", "environment", "kernels", "one step", "deep step", "resume")  # a failure ends the check
DEEP_LAYERS, DEEP_TOKENS = 12, 2048  # a size at which an earlier system hung


@dataclass(frozen=True)
class Scale:
    """Steps of each phase. Phase 3 kills a run at the start of step `killed_at`."""

    label: str
    synthetic: int
    data: int
    resume: int
    save_every: int
    killed_at: int

    @property
    def total(self) -> int:
        """Maximum number of training steps: the killed run repeats the steps after its last save."""
        return self.synthetic + self.data + 2 * self.resume + self.save_every


FULL = Scale("full", synthetic=200, data=300, resume=20, save_every=6, killed_at=15)
QUICK = Scale("quick", synthetic=20, data=30, resume=8, save_every=2, killed_at=6)
QUICK_ON_CPU = Scale("quick", synthetic=10, data=10, resume=4, save_every=2, killed_at=4)  # where a step takes seconds


@dataclass
class Phase:
    """The results of one phase. A phase without criteria did not run and has not passed."""

    key: str
    criteria: list[Criterion] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return TITLES[self.key]

    @property
    def was_run(self) -> bool:
        return bool(self.criteria)

    @property
    def passed(self) -> bool:
        return self.was_run and all(criterion.verdict != "fail" for criterion in self.criteria)

    @property
    def is_fatal(self) -> bool:
        return any(criterion.verdict == "fail" and criterion.name in FATAL for criterion in self.criteria)

    def __rich__(self) -> Group:
        """Renders each criterion with its target and the measured value."""
        word = "not run" if not self.was_run else "passed" if self.passed else "FAILED"
        style = "green" if self.passed else "bold red"
        head = Text.assemble((f"{self.key} ", "bold"), f"{self.title}: ", (word, style))
        if self.was_run:
            head.append(f" in {seconds(self.seconds)}")
        table = Table(box=None, padding=(0, 1), show_header=False)
        for c in self.criteria:
            measured = f"{c.measured} ({c.remark})" if c.remark and c.verdict == "fail" else c.measured
            table.add_row(Text(c.verdict, STYLES[c.verdict]), c.name, Text(printable(measured)), Text(c.target, "dim"))
        return Group(head, table)


@dataclass(frozen=True)
class ReadinessCheck:
    """Checks `config` with `nproc` processes and writes the evidence into `folder`. Raises ConfigError or LaunchError
    if that many processes cannot run it."""

    config: Config
    folder: Path
    nproc: int
    scale: Scale
    progress: Progress
    arguments: tuple[str, ...] = ()  # of `nsa train` in phases that use the configured data

    def __post_init__(self) -> None:
        parallel = self.config.parallel
        choose_strategy(parallel.strategy, self.nproc)
        micro_batch_size(self.config, data_ranks(parallel.context, self.nproc))

    def run(self) -> list[Phase]:
        """Removes the runs of an earlier check and runs all four phases in order."""
        phases, scale = list[Phase](), self.scale
        self.progress.note(f"{scale.label} check: about {scale.total} steps")
        for folder in self.folder.glob("phase[0-3]*/"):
            shutil.rmtree(folder, ignore_errors=True)
        for key, check in zip(TITLES, (self._phase0, self._phase1, self._phase2, self._phase3), strict=True):
            phase = Phase(key)
            if not any(earlier.is_fatal for earlier in phases):
                began = time.monotonic()
                check(phase)
                phase.seconds = time.monotonic() - began
                for folder in self.folder.glob(f"{key}*/"):
                    remove_weights(folder)
            phases.append(phase)
            self.progress.note(phase)
        return phases

    def _trial(self, name: str, config: Config, faults: str = "") -> Trial:
        arguments = self.arguments if name.startswith(("phase2", "phase3")) else ()
        return Trial(config, self.folder / name, self.nproc, config.readiness.phase_limit_s, arguments, faults)

    def _run(self, phase: Phase, what: str, trial: Trial, update: OnProgress | None = None) -> Outcome:
        self.progress.begin(f"{phase.key}: {what}")
        outcome = run_trial(trial, update or self.progress.update)
        phase.outcomes.append(outcome)
        return outcome

    def _phase0(self, phase: Phase) -> None:
        probed = self._trial("phase0-probe", self.config)
        for kind, judge_findings in (("machine", _judge_machine), ("kernels", _judge_kernels)):
            self.progress.begin(f"{phase.key}: {kind}")
            found = run_probe(kind, probed)
            phase.facts[kind] = found.findings
            phase.criteria.append(judge_findings(found))
            if phase.is_fatal:
                return
        one = short_run(changed(self.config, SYNTHETIC), 1)
        cases = {"one step": one}
        if self.scale is FULL and not is_deep(self.config):
            cases["deep step"] = deep(one, self.nproc)
        for name, config in cases.items():
            outcome = self._run(phase, name, self._trial(f"phase0-{name.split()[0]}", config))
            size = f"{config.model.n_layers} layers, {config.train.seq_len} tokens"
            target = f"{size}, checkpointing {config.runtime.gradient_checkpointing}"
            measured = f"done in {outcome.seconds:.1f} s" if outcome.passed else "failed"
            phase.criteria.append(Criterion(name, target, measured, outcome.passed, outcome.reason))

    def _phase1(self, phase: Phase) -> None:
        self._train(phase, short_run(changed(self.config, SYNTHETIC), self.scale.synthetic))

    def _phase2(self, phase: Phase) -> None:
        self._train(phase, short_run(self.config, self.scale.data))
        wanted, used = self.config.data, phase.facts.get("data") or {}
        problem = "" if used else "the run did not record its data source"
        if used.get("fallback"):
            problem = f"trained on fallback data: {used['fallback']}"
        target = ", ".join(part.source for part in wanted.mixture) or wanted.source
        measured = str(used.get("source") or "unknown")
        phase.criteria.append(Criterion("data", target, measured, not problem, problem))

    def _train(self, phase: Phase, config: Config) -> None:
        """Runs a training phase and judges all its criteria."""
        trial, steps, utilization = self._trial(phase.key, config), config.train.steps, GpuUtilization(self.nproc)

        def update(view: RunView | None, elapsed_s: float) -> None:
            self.progress.update(view, elapsed_s)
            if view is not None and int(steps * WARMUP_SHARE) < view.step < steps:
                utilization.sample()

        outcome = self._run(phase, f"{steps} steps", trial, update)
        phase.artifacts = check_artifacts(trial.folder, config, self.nproc)
        phase.criteria += judge_run(outcome, config.readiness, utilization.percent, phase.artifacts)
        if view := outcome.view:
            phase.facts |= {"data": view.metrics.get("data"), "env": view.env}

    def _phase3(self, phase: Phase) -> None:
        config, killed_at = resumable(self.config, self.scale), self.scale.killed_at
        fault = f"step.begin:kill:hit={killed_at}:rank={self.nproc - 1}"
        whole = self._run(phase, "without a kill", self._trial("phase3-whole", config))
        phase.criteria.append(stability(whole))
        if phase.is_fatal:
            return
        killed = self._run(phase, f"killed in step {killed_at}", self._trial("phase3-killed", config, fault))
        resumed = self._run(phase, "resumed", self._trial("phase3-killed", config))
        phase.criteria.append(_judge_resume(whole, killed, resumed))


def _judge_machine(probed: ProbeResult) -> Criterion:
    problem = probed.problem or "; ".join(f"{describe(bad)}; {bad['advice']}" for bad in probed.failed)
    total = len(probed.findings)
    measured = f"{total - len(probed.failed)} of {total}" if total else NOT_CHECKED
    return Criterion("environment", "fits the run", measured, not problem, problem)


def _judge_kernels(probed: ProbeResult) -> Criterion:
    checks, target = probed.findings, "equal to the reference"
    problem = probed.problem or "; ".join(map(describe, probed.failed))
    if not checks:
        measured, ok = (NOT_CHECKED, False) if problem else ("dense attention", None)
        return Criterion("kernels", target, measured, ok, problem)
    backends = " and ".join(sorted({str(check["backend"]) for check in checks}))
    worst = max(check["error"] / check["limit"] for check in checks)
    measured = f"{backends}: {len(checks)} checks, worst at {worst:.0%} of its limit"
    return Criterion("kernels", target, measured, not problem, problem)


def _judge_resume(whole: Outcome, killed: Outcome, resumed: Outcome) -> Criterion:
    checkpoint = None
    if killed.passed:
        problem = "the run finished before it was killed, so the test shows nothing"
    elif not resumed.passed:
        problem = f"did not resume: {resumed.reason}"
    else:
        folder = resumed.trial.folder
        checkpoint = [event for event in read_events(folder) if event["event"] == "start"][-1]["from_checkpoint"]
        problem = "" if checkpoint else "it started over instead of resuming"
        problem = problem or first_difference(whole.trial.folder, folder)
    measured = "not equal" if problem else f"equal, from {checkpoint}"
    return Criterion("resume", "bit-equal after kill -9", measured, not problem, problem)


def short_run(config: Config, steps: int) -> Config:
    """Reduces the steps, with intervals short enough that saving and telemetry still happen."""
    changes = {
        "train.steps": steps,
        "train.log_every": min(config.train.log_every, max(1, steps // 10)),
        "train.profile_steps": None,
        "checkpoint.every": min(config.checkpoint.every or steps, max(1, steps // 2)),
        "telemetry.every": min(config.telemetry.every, max(1, steps // 4)),
    }
    return changed(config, changes)


def is_deep(config: Config) -> bool:
    """Whether the configuration is at least as large as the size at which an earlier system hung."""
    large = config.model.n_layers >= DEEP_LAYERS and config.train.seq_len >= DEEP_TOKENS
    return large and config.runtime.gradient_checkpointing != "none"


def deep(config: Config, nproc: int) -> Config:
    """Sets at least 12 layers and 2048 tokens, gradient checkpointing, and one sequence per rank or context group."""
    recompute = config.runtime.gradient_checkpointing
    changes = {
        "model.n_layers": max(DEEP_LAYERS, config.model.n_layers),
        "train.seq_len": max(DEEP_TOKENS, config.train.seq_len),
        "train.batch_size": data_ranks(config.parallel.context, nproc),
        "train.micro_batch": "auto",
        "train.init_from": None,  # saved weights have another depth
        "data.validation_fraction": 0.0,
        "runtime.gradient_checkpointing": "block" if recompute == "none" else recompute,
    }
    return changed(config, changes)


def resumable(config: Config, scale: Scale) -> Config:
    """Sets deterministic training, so that the resumed run can be compared bit by bit, and saves that block training,
    so that a checkpoint exists before the kill, however fast the steps are."""
    changes = {"checkpoint.every": scale.save_every, "checkpoint.background": False, "telemetry.tracker": "none"}
    graphs = config.runtime.cuda_graphs and "auto"  # true would refuse to run with an armed fault, the kill
    return changed(
        short_run(config, scale.resume), {"runtime.deterministic": True, "runtime.cuda_graphs": graphs, **changes}
    )


def first_difference(whole: Path, resumed: Path) -> str:
    """Describes where two runs that should be identical first differ; empty if they do not."""
    ours, theirs = read_rows(whole, TRAINING), read_rows(resumed, TRAINING)
    for left, right in zip(ours, theirs, strict=False):
        for name, value in left.items():
            if name not in MACHINE_COLUMNS and right.get(name) != value:
                return f"step {left['step']}: {name} is {right.get(name)} and was {value}"
    if len(ours) != len(theirs):
        return f"{len(theirs)} rows instead of {len(ours)}"
    same = (whole / WEIGHTS_FILE).read_bytes() == (resumed / WEIGHTS_FILE).read_bytes()
    return "" if same else "all losses are the same, the weights are not"
