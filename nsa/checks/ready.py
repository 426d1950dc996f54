"""May this go to production on this machine: four phases, each in processes of its own, and an answer with evidence.

Phase 0 looks at the machine, the kernels and one step; phase 1 trains on synthetic data, phase 2 on the configured
data, phase 3 saves, kills, resumes and compares. A phase that fails to do its steps ends the check: what follows is
not run, and what was not run has not passed.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.checks import phases
from nsa.checks.artifacts import Artifact, check_artifacts
from nsa.checks.criteria import SETTLING, Criterion, judge_run, passed, stability
from nsa.checks.phases import Scale
from nsa.checks.probe import in_words, run_probe
from nsa.checks.trials import Outcome, Trial, run_trial, write_trial_config
from nsa.checks.utilisation import Utilisation
from nsa.config import Config
from nsa.errors import ConfigError
from nsa.inspect.reading import RunView, read_run

TITLES = {
    "phase0": "environment, kernels, one step",
    "phase1": "synthetic data",
    "phase2": "the configured data",
    "phase3": "save, kill, resume, compare",
}


@dataclass(frozen=True)
class Watcher:
    """Told what is going on, for a live view; each does nothing unless given."""

    begins: Callable[[str, str], None] = lambda phase, what: None
    stands: Callable[[RunView | None, float], None] = lambda view, seconds: None
    ended: Callable[["Phase"], None] = lambda phase: None


@dataclass
class Phase:
    """What became of one phase. Without a criterion it was not run, and has not passed."""

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
    def is_broken(self) -> bool:
        """Whether it makes no sense to go on."""
        ends = ("stability", "environment", "kernels", "one step", "deep step", "resume")
        return any(c.verdict == "fail" and c.name in ends for c in self.criteria)


@dataclass(frozen=True)
class Plan:
    """What is to be checked, and where the evidence goes."""

    config: Config
    folder: Path
    nproc: int
    scale: Scale
    arguments: tuple[str, ...] = ()  # of `nsa train` in phases with the configured data

    def trial(self, name: str, config: Config, arguments: tuple[str, ...] = (), faults: str = "") -> Trial:
        limit = self.config.readiness.phase_limit_s
        return Trial(name, config, self.folder / name, self.nproc, limit, arguments, faults)


def check_readiness(plan: Plan, watcher: Watcher) -> list[Phase]:
    """All four phases in their order."""
    made: list[Phase] = []
    steps = {"phase0": _phase0, "phase1": _phase1, "phase2": _phase2, "phase3": _phase3}
    for key, run in steps.items():
        phase = Phase(key)
        if not any(before.is_broken for before in made):
            began = time.monotonic()
            run(plan, phase, watcher)
            phase.seconds = time.monotonic() - began
        made.append(phase)
        watcher.ended(phase)
    return made


def _phase0(plan: Plan, phase: Phase, watcher: Watcher) -> None:
    wanted = plan.trial("phase0-probe", plan.config)
    write_trial_config(wanted)
    for kind, judge in (("machine", _judge_machine), ("kernels", _judge_kernels)):
        watcher.begins(phase.key, kind)
        probed = run_probe(kind, wanted.config_file, plan.nproc, plan.folder, wanted.limit_s)
        phase.facts[kind] = probed.findings
        phase.criteria.append(judge(probed.findings, probed.problem))
        if phase.is_broken:
            return
    one = phases.short_run(phases.synthetic(plan.config), 1)
    cases = {"one step": one}
    if plan.scale is phases.FULL and not phases.is_deep(plan.config):
        cases["deep step"] = phases.deep(one, plan.nproc)
    for name, config in cases.items():
        watcher.begins(phase.key, name)
        outcome = _run(plan.trial(f"phase0-{name.split()[0]}", config), watcher)
        phase.outcomes.append(outcome)
        target = f"{config.model.n_layers} layers, {config.train.seq_len} tokens, checkpointing " + (
            config.runtime.gradient_checkpointing
        )
        measured = f"done in {outcome.seconds:.1f} s" if outcome.passed else "failed"
        phase.criteria.append(Criterion(name, phase.key, target, measured, passed(ok=outcome.passed), outcome.reason))


def _judge_machine(findings: list[dict[str, Any]], problem: str) -> Criterion:
    bad = [f"{in_words(finding)}; {finding['advice']}" for finding in findings if not finding["ok"]]
    remark = problem or "; ".join(bad)
    measured = f"{len(findings) - len(bad)} of {len(findings)}" if findings else "no answer"
    return Criterion("environment", "phase0", "fits the run", measured, passed(ok=not remark), remark)


def _judge_kernels(checks: list[dict[str, Any]], problem: str) -> Criterion:
    bad = [in_words(check) for check in checks if not check["ok"]]
    remark = problem or "; ".join(bad)
    if not checks and not problem:
        return Criterion("kernels", "phase0", "equal to the reference", "dense attention", "n/a")
    by = sorted({str(check["backend"]) for check in checks})
    worst = max((check["error"] / check["limit"] for check in checks), default=0.0)
    measured = f"{' and '.join(by)}: {len(checks)} checks, worst at {worst:.0%} of its limit" if checks else "no answer"
    return Criterion("kernels", "phase0", "equal to the reference", measured, passed(ok=not remark), remark)


def _phase1(plan: Plan, phase: Phase, watcher: Watcher) -> None:
    config = phases.short_run(phases.synthetic(plan.config), plan.scale.synthetic)
    _train(plan, phase, plan.trial("phase1", config), watcher)


def _phase2(plan: Plan, phase: Phase, watcher: Watcher) -> None:
    config = phases.short_run(plan.config, plan.scale.data)
    _train(plan, phase, plan.trial("phase2", config, plan.arguments), watcher)
    data = phase.facts.get("data") or {}
    used = str(data.get("source") or "unknown")
    fallback = data.get("fallback")
    remark = f"trained on fallback data: {fallback}" if fallback else "" if data else "the run did not say what it read"
    wanted = ", ".join(part.source for part in plan.config.data.mixture) or plan.config.data.source
    phase.criteria.append(Criterion("data", phase.key, wanted, used, passed(ok=not remark), remark))


def _train(plan: Plan, phase: Phase, trial: Trial, watcher: Watcher) -> None:
    """A phase that trains: runs it, and holds it to every criterion."""
    watcher.begins(phase.key, f"{trial.config.train.steps} steps")
    busy = Utilisation(plan.nproc)
    settling = int(trial.config.train.steps * SETTLING)

    def stands(view: RunView | None, seconds: float) -> None:
        watcher.stands(view, seconds)
        if view is not None and settling < view.step < trial.config.train.steps:
            busy.sample()

    outcome = _run(trial, Watcher(stands=stands))
    view = _view(trial.folder)
    phase.outcomes.append(outcome)
    phase.artifacts = check_artifacts(trial.folder, trial.config, plan.nproc)
    phase.criteria += judge_run(phase.key, outcome, view, plan.config.readiness, busy.percent, phase.artifacts)
    if view is not None:
        phase.facts |= {"data": view.metrics.get("data"), "env": view.env, "fallbacks": sum(view.fallbacks.values())}


def _phase3(plan: Plan, phase: Phase, watcher: Watcher) -> None:
    config, scale = phases.resumable(plan.config, plan.scale), plan.scale
    kill = f"step.begin:kill:hit={scale.killed_at}:rank={plan.nproc - 1}"
    whole = plan.trial("phase3-whole", config, plan.arguments)
    killed = plan.trial("phase3-killed", config, plan.arguments, kill)
    again = plan.trial("phase3-killed", config, plan.arguments)
    watcher.begins(phase.key, "without a kill")
    phase.outcomes.append(_run(whole, watcher))
    phase.criteria.append(stability(phase.key, phase.outcomes[-1], _view(whole.folder)))
    if phase.is_broken:
        return
    watcher.begins(phase.key, f"killed in step {scale.killed_at}")
    phase.outcomes.append(_run(killed, watcher))
    watcher.begins(phase.key, "going on")
    phase.outcomes.append(_run(again, watcher, anew=False))
    phase.criteria.append(_judge_resume(phase.outcomes[1], phase.outcomes[2], whole.folder))


def _judge_resume(killed: Outcome, again: Outcome, whole: Path) -> Criterion:
    folder, taken = again.trial.folder, None
    if killed.passed:
        remark = "the run came to its end although it was killed: nothing was shown"
    elif not again.passed:
        remark = f"did not go on: {again.reason}"
    else:
        taken = phases.resumed_from(folder)[-1]
        remark = phases.first_difference(whole, folder) if taken else "it started over instead of going on"
    measured = f"equal, from {taken}" if not remark else "not equal"
    return Criterion("resume", "phase3", "bit-equal after kill -9", measured, passed(ok=not remark), remark)


def _run(trial: Trial, watcher: Watcher, *, anew: bool = True) -> Outcome:
    if anew:
        shutil.rmtree(trial.folder, ignore_errors=True)  # of an earlier check
    return run_trial(trial, watcher.stands)


def _view(folder: Path) -> RunView | None:
    try:
        return read_run(folder)
    except ConfigError:  # the run came to nothing
        return None
