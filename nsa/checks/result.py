"""The answer of `nsa ready`: GO or NO-GO, for what, why, and how it compares with another time.

`readiness.json` is this, as plain values under a schema number; the pages are written from it alone.
"""

import json
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.checks.ready import Phase, Plan
from nsa.checks.trials import spelled
from nsa.errors import ConfigError

SCHEMA = 1
NOTICEABLE = 0.02  # of a value: what a comparison calls slower or fatter

Result = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """How the run that was checked is started in earnest."""

    config_file: Path
    overrides: tuple[str, ...]
    nproc: int
    run_folder: str

    def commands(self, scope: str) -> list[str]:
        """What may be started now. After a quick check that is the whole one."""
        if scope != "full":
            return [shlex.join(["nsa", "ready", str(self.config_file), *self.overrides, "--nproc", str(self.nproc)])]
        return [
            spelled(self.config_file, self.nproc, self.overrides),
            f"nsa watch {self.run_folder}",
            f"nsa report {self.run_folder}",
        ]


def build_result(plan: Plan, phases: list[Phase], launch: Launch, seconds: float) -> Result:
    reasons = [reason for phase in phases for reason in _reasons(phase)]
    env: dict[str, Any] = next((phase.facts["env"] for phase in phases if phase.facts.get("env")), {})
    machine = {key: env.get(key) for key in ("gpu", "driver", "cuda", "python", "packages", "cpu_count", "commit")}
    return {
        "schema": SCHEMA,
        "nsa": __version__,
        "outcome": "NO-GO" if reasons else "GO",
        "scope": plan.scale.label,
        "reasons": reasons,
        "time": time.time(),
        "seconds": seconds,
        "config_file": str(launch.config_file),
        "overrides": list(launch.overrides),
        "config": plan.config.to_dict(),
        "nproc": plan.nproc,
        "machine": machine,
        "data": next((p.facts.get("data") for p in phases if p.key == "phase2"), None),
        "phases": [_phase(phase) for phase in phases],
        "criteria": [asdict(criterion) for phase in phases for criterion in phase.criteria],
        "environment": phases[0].facts.get("machine", []),
        "kernels": phases[0].facts.get("kernels", []),
        "launch": launch.commands(plan.scale.label),
        "changes": None,
    }


def _reasons(phase: Phase) -> list[str]:
    if not phase.was_run:
        return [f"{phase.key} ({phase.title}) was not run"]
    return [
        f"{phase.key}: {c.name}: {c.measured}, wanted {c.target}" + (f" ({c.remark})" if c.remark else "")
        for c in phase.criteria
        if c.verdict == "fail"
    ]


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "key": phase.key,
        "title": phase.title,
        "was_run": phase.was_run,
        "passed": phase.passed,
        "seconds": phase.seconds,
        "artifacts": [asdict(artifact) for artifact in phase.artifacts],
        "runs": [
            {
                "name": outcome.trial.name,
                "steps": outcome.trial.config.train.steps,
                "exit_code": outcome.exit_code,
                "timed_out": outcome.timed_out,
                "seconds": outcome.seconds,
                "reason": outcome.reason,
                "folder": str(outcome.trial.folder),
                "log": str(outcome.trial.log_file),
                "last_lines": [] if outcome.passed else outcome.last_lines(),
            }
            for outcome in phase.outcomes
        ],
    }


def read_baseline(path: Path) -> Result:
    """A readiness.json of another time."""
    try:
        baseline = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--baseline: {path}: no such file; give the readiness.json of an earlier check") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--baseline: {path}: cannot be read: {error}") from None
    if not isinstance(baseline, dict) or baseline.get("schema") != SCHEMA:
        raise ConfigError(f"--baseline: {path}: is no readiness.json of schema {SCHEMA}")
    return baseline


def compare(result: Result, baseline: Result) -> dict[str, Any]:
    """What got slower or fatter since, and what keeps the two from being compared."""
    unlike = [
        f"{what}: {_shown(baseline[key])} then, {_shown(result[key])} now"
        for what, key in (("scope", "scope"), ("processes", "nproc"))
        if baseline.get(key) != result[key]
    ]
    gpus = [(each.get("machine") or {}).get("gpu") for each in (baseline, result)]
    if gpus[0] != gpus[1]:
        unlike.append(f"GPU: {_shown(gpus[0])} then, {_shown(gpus[1])} now")
    then = {(c["phase"], c["name"]): c for c in baseline.get("criteria", [])}
    rows = []
    for now in result["criteria"]:
        before = then.get((now["phase"], now["name"]))
        if before is None or not now["better"] or not before.get("value") or now["value"] is None:
            continue
        change = now["value"] / before["value"] - 1
        worse = change if now["better"] == "lower" else -change
        verdict = "worse" if worse > NOTICEABLE else "better" if worse < -NOTICEABLE else "same"
        rows.append(
            {
                "phase": now["phase"],
                "name": now["name"],
                "then": before["value"],
                "now": now["value"],
                "unit": now["unit"],
                "change": change,
                "verdict": verdict,
            }
        )
    return {"unlike": unlike, "rows": rows}


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
