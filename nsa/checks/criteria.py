"""The criteria of a training phase, each with its target and the measured value.

A criterion that does not apply has the verdict "n/a" and no effect. Thresholds come from the `readiness` section.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsa.checks.artifacts import Artifact
from nsa.checks.trials import Outcome
from nsa.config.schema import ReadinessConfig
from nsa.formatting import short
from nsa.inspect.reading import RunView
from nsa.inspect.run_files import number

WARMUP_SHARE = 0.1  # share of the steps, in which kernels compile and caches fill, that does not count for speed


@dataclass
class Criterion:
    """`ok` is None if the criterion does not apply. `value` is `measured` as a number, to compare with a baseline."""

    name: str
    target: str
    measured: str
    ok: bool | None
    remark: str = ""
    value: float | None = None
    unit: str = ""
    better: Literal["", "lower", "higher"] = ""

    def __post_init__(self) -> None:
        self.remark = "" if self.ok else self.remark
        self.verdict = "n/a" if self.ok is None else "pass" if self.ok else "fail"


def judge_run(
    outcome: Outcome, wanted: ReadinessConfig, utilization: float | None, artifacts: list[Artifact]
) -> Iterator[Criterion]:
    view = outcome.view
    yield stability(outcome)
    bad = [artifact for artifact in artifacts if not artifact.ok]
    remark = "; ".join(f"{artifact.name}: {artifact.found}" for artifact in bad)
    found = f"{len(artifacts) - len(bad)} of {len(artifacts)}"
    yield Criterion("artifacts", "all present and sound", found, not bad, remark)
    if view is None or not len(view.training):
        return
    yield _loss(view)
    yield _memory(view, wanted.max_mem_gib)
    yield _throughput(view, wanted.min_toks_per_s)
    median, ceiling = float(np.median(settled(view, "step_s"))), wanted.max_step_s
    target, ok = ("none set", None) if ceiling is None else (f"<= {ceiling:g} s", median <= ceiling)
    yield Criterion("step time", target, f"{median:.4g} s", ok, "", median, "s", "lower")
    yield _utilization(view, utilization, wanted.min_gpu_util)


def stability(outcome: Outcome) -> Criterion:
    """Judges whether the run finished all steps, without a hang or a non-finite step."""
    view = outcome.view
    wanted, done = outcome.trial.config.train.steps, view.step if view else 0
    # Without the steps in which fp16 finds its loss scale.
    skipped = int(number(view.metrics.get("skipped_steps"), 0.0)) if view else 0
    problem = outcome.reason or (f"{skipped} steps were not finite and were skipped" if skipped else "")
    measured = f"{done} of {wanted} steps" + (f", {skipped} skipped" if skipped else "")
    return Criterion("stability", f"{wanted} steps, no hang, all finite", measured, not problem, problem)


def _loss(view: RunView) -> Criterion:
    losses = view.training.column("loss")
    tenth = max(1, len(losses) // 10)
    first, last = float(np.median(losses[:tenth])), float(np.median(losses[-tenth:]))
    target = f"the last tenth below the first ({first:.4f})"
    remark = "the loss did not fall: look at the learning rate, the data and `nsa doctor`"
    return Criterion("loss", target, f"{last:.4f}", last < first, remark, last, "nats")


def _memory(view: RunView, limit: float) -> Criterion:
    peak = float(np.fmax.reduce(view.training.column("mem_gib"), initial=view.mem_gib))  # some steps have no value
    name = f"memory per {'GPU' if view.on_gpu else 'process'}"
    remark = "`nsa memory` shows what uses it and what would fit"
    return Criterion(name, f"< {limit:g} GiB", f"{peak:.2f} GiB", peak < limit, remark, peak, "GiB", "lower")


def settled(view: RunView, column: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns a column without the first steps, which are slower."""
    values = view.training.column(column)
    return values[int(len(values) * WARMUP_SHARE) :]


def _throughput(view: RunView, floor: float) -> Criterion:
    """Judges tokens per second over the whole training time, including waits for data and saves."""
    seconds = settled(view, "step_s")
    tokens = float((settled(view, "toks_per_s") * seconds).sum())
    spent = float(seconds.sum() + np.nansum(settled(view, "save_wait_s")))
    rate = tokens / spent
    target, ok, remark = "none set", None, "set readiness.min_toks_per_s"
    if floor:
        waited = float(np.nansum(settled(view, "data_wait_s"))) / spent
        target, ok = f">= {short(floor)} tokens/s", rate >= floor
        remark = f"{rate / floor:.0%} of the target; training waited for data {waited:.0%} of the time"
    return Criterion("throughput", target, f"{short(rate)} tokens/s", ok, remark, rate, "tokens/s", "higher")


def _utilization(view: RunView, measured: float | None, floor: float) -> Criterion:
    name, target = "GPU utilisation", f"> {floor:g} %"
    if not view.on_gpu:
        return Criterion(name, target, "no GPU", None)
    if measured is not None and math.isnan(measured):
        return Criterion(name, target, "too few steps to measure", None)
    if measured is None:
        return Criterion(name, target, "not measured", False, "NVML gave no value: is nvidia-ml-py installed?")
    return Criterion(name, target, f"{measured:.0f} %", measured > floor, "", measured, "%", "higher")
