"""What is demanded of a phase, and what was measured: a target and a value on every line.

A criterion that does not apply reads "n/a" and decides nothing. Thresholds come from the `readiness` section.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsa.checks.artifacts import Artifact
from nsa.checks.trials import Outcome
from nsa.config.schema import ReadinessConfig
from nsa.inspect.reading import RunView
from nsa.record.numbers import short

Verdict = Literal["pass", "fail", "n/a"]
SETTLING = 0.1  # first part of a phase, in which kernels are compiled and caches filled: no speed is taken from it


@dataclass(frozen=True)
class Criterion:
    """`value` is the number behind `measured`, for comparison with another time; smaller or larger is `better`."""

    name: str
    phase: str
    target: str
    measured: str
    verdict: Verdict
    remark: str = ""
    value: float | None = None
    unit: str = ""
    better: Literal["", "lower", "higher"] = ""


def passed(*, ok: bool) -> Verdict:
    return "pass" if ok else "fail"


def judge_run(
    phase: str,
    outcome: Outcome,
    view: RunView | None,
    wanted: ReadinessConfig,
    utilisation: float | None,
    artifacts: list[Artifact],
) -> Iterator[Criterion]:
    """Everything a training phase is held to."""
    yield stability(phase, outcome, view)
    yield _artifacts(phase, artifacts)
    if view is None or not len(view.training):
        return
    yield _loss(phase, view)
    yield _memory(phase, view, wanted.max_mem_gib)
    yield _throughput(phase, view, wanted.min_toks_per_s)
    yield _step_time(phase, view, wanted.max_step_s)
    yield _utilisation(phase, view, utilisation, wanted.min_gpu_util)


def stability(phase: str, outcome: Outcome, view: RunView | None) -> Criterion:
    """All steps, no hang, nothing that is not finite."""
    wanted = outcome.trial.config.train.steps
    done = view.step if view else 0
    skipped = int(np.nansum(view.training.column("skipped"))) if view else 0
    measured = f"{done} of {wanted} steps" + (f", {skipped} left out" if skipped else "")
    remark = outcome.reason
    if not remark and done < wanted:
        remark = "a phase passes only when it did all its steps"
    scaled = outcome.trial.config.runtime.precision == "fp16"  # leaves steps out while it looks for its scale
    if not remark and skipped and not scaled:
        remark = f"{skipped} steps were not finite and were left out"
    return Criterion(
        "stability", phase, f"{wanted} steps, no hang, all finite", measured, passed(ok=not remark), remark
    )


def _artifacts(phase: str, artifacts: list[Artifact]) -> Criterion:
    bad = [artifact for artifact in artifacts if not artifact.ok]
    measured = f"{len(artifacts) - len(bad)} of {len(artifacts)}"
    remark = "; ".join(f"{artifact.name}: {artifact.found}" for artifact in bad)
    return Criterion("artifacts", phase, "all present and sound", measured, passed(ok=not bad), remark)


def _loss(phase: str, view: RunView) -> Criterion:
    losses = view.training.column("loss")
    tenth = max(1, len(losses) // 10)
    first, last = float(np.median(losses[:tenth])), float(np.median(losses[-tenth:]))
    target = f"the last tenth below the first ({first:.4f})"
    remark = "" if last < first else "the loss did not fall: look at the learning rate, the data and `nsa doctor`"
    return Criterion("loss", phase, target, f"{last:.4f}", passed(ok=last < first), remark, last, "nats")


def _memory(phase: str, view: RunView, limit: float) -> Criterion:
    peak = max(float(np.nanmax(view.training.column("mem_gib"))), view.mem_gib)
    where = "GPU" if view.on_gpu else "process"
    remark = "" if peak < limit else "`nsa memory` shows what needs it and what would fit"
    measured, verdict = f"{peak:.2f} GiB", passed(ok=peak < limit)
    return Criterion(
        f"memory per {where}", phase, f"< {limit:g} GiB", measured, verdict, remark, peak, "GiB", better="lower"
    )


def settled(view: RunView, column: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A column without the steps in which speeds settle."""
    values = view.training.column(column)
    return values[int(len(values) * SETTLING) :]


def _throughput(phase: str, view: RunView, floor: float) -> Criterion:
    """Over everything that training waited for: data and saves count."""
    seconds = settled(view, "step_s")
    tokens = settled(view, "toks_per_s") * seconds
    spent = float(seconds.sum() + np.nansum(settled(view, "save_wait_s")))
    rate = float(tokens.sum()) / spent if spent > 0 else math.nan
    measured = f"{short(rate)} tokens/s"
    if not floor:
        return Criterion(
            "throughput", phase, "none set", measured, "n/a", "set readiness.min_toks_per_s", rate, "tokens/s", "higher"
        )
    waited = float(np.nansum(settled(view, "data_wait_s"))) / spent if spent > 0 else 0.0
    remark = "" if rate >= floor else f"{rate / floor:.0%} of the floor; {waited:.0%} of the time it waited for data"
    return Criterion(
        "throughput",
        phase,
        f">= {short(floor)} tokens/s",
        measured,
        passed(ok=rate >= floor),
        remark,
        rate,
        "tokens/s",
        "higher",
    )


def _step_time(phase: str, view: RunView, ceiling: float | None) -> Criterion:
    median = float(np.median(settled(view, "step_s")))
    if ceiling is None:
        return Criterion("step time", phase, "none set", f"{median:.4g} s", "n/a", "", median, "s", "lower")
    verdict = passed(ok=median <= ceiling)
    return Criterion("step time", phase, f"<= {ceiling:g} s", f"{median:.4g} s", verdict, "", median, "s", "lower")


def _utilisation(phase: str, view: RunView, measured: float | None, floor: float) -> Criterion:
    name, target = "GPU utilisation", f"> {floor:g} %"
    if not view.on_gpu:
        return Criterion(name, phase, target, "no GPU", "n/a")
    if measured is None:
        return Criterion(name, phase, target, "not measured", "fail", "NVML gave no value: is nvidia-ml-py installed?")
    return Criterion(name, phase, target, f"{measured:.0f} %", passed(ok=measured > floor), "", measured, "%", "higher")
