"""What is unhealthy about a run, one line each, the gravest first."""

import math

import numpy as np

from nsa.inspect.reading import FAILED, PREEMPTED, RECENT, RUNNING, SILENT, RunView
from nsa.inspect.run_files import lookup
from nsa.record.numbers import seconds, short
from nsa.record.schema import ALL_LAYERS, BRANCHES, GateStats

MAX_COLLAPSED = 0.5  # of the rows of a layer
MIN_SHARE = 0.01  # of a branch
MAX_DATA_WAIT = 0.2  # of a step
RISE = 0.05  # above the best the loss was
MIN_WINDOW, MAX_WINDOW = 20, 500  # steps whose median is "the loss" when a rise is looked for


def is_unwell(gates: GateStats) -> bool:
    return gates.collapsed > MAX_COLLAPSED or min(gates.shares) < MIN_SHARE


def unhealthy(view: RunView) -> list[str]:
    """Empty for a run that is well."""
    found = [_standing(view), _not_finite(view), _rising(view), _data_wait(view), _behind(view)]
    return [line for line in [*found, *_gates(view), *_others(view)] if line]


def _standing(view: RunView) -> str:
    status = view.status
    if status.kind == FAILED:
        return f"failed with exit code {status.exit_code}: {status.reason}"
    if status.kind == SILENT:
        return (
            f"silent for {seconds(status.age_s)}, {seconds(status.limit_s)} is normal: the process is gone, hangs, or "
            "its disk is not reached"
        )
    return f"stopped before its end: {status.reason}" if status.kind == PREEMPTED else ""


def _not_finite(view: RunView) -> str:
    losses, skipped = (view.training.column(name)[-RECENT:] for name in ("loss", "skipped"))
    if len(losses) and not math.isfinite(losses[-1]):
        return f"the loss of step {view.step} is {losses[-1]}"
    bad = int((~np.isfinite(losses)).sum())
    if bad:
        return f"the loss was not finite in {bad} of the last {len(losses)} steps"
    left_out = int(np.nansum(skipped))
    return f"{left_out} of the last {len(skipped)} steps were left out: not finite" if left_out else ""


def _rising(view: RunView) -> str:
    """The median of the last steps against the best median of as many steps before."""
    losses = view.training.column("loss")
    losses = losses[np.isfinite(losses)]
    window = min(MAX_WINDOW, max(MIN_WINDOW, len(losses) // 10))
    count = len(losses) // window
    if count < 2:
        return ""
    parts = losses[len(losses) - count * window :].reshape(count, window)
    medians = np.median(parts, axis=1)
    noise = float(np.median(np.abs(parts[-1] - medians[-1])))
    best, now = float(medians[:-1].min()), float(medians[-1])
    if now <= best + max(RISE * abs(best), noise):
        return ""
    return f"the loss rises: median of the last {window} steps {now:.4f}, it was {best:.4f} at its best"


def _data_wait(view: RunView) -> str:
    share = view.data_share
    if not share > MAX_DATA_WAIT:
        return ""
    return f"{share:.0%} of a step is spent waiting for data: raise data.workers, or look at the source"


def _behind(view: RunView) -> str:
    """A rank that is silent while others are not: with a collective in every step none can be far ahead."""
    if view.status.kind != RUNNING or len(view.ranks) < 2:
        return ""
    seen_at = {rank: file.newest["time"] for rank, file in view.ranks.items()}
    latest, worst = max(seen_at.values()), min(seen_at, key=lambda rank: seen_at[rank])
    late = sum(latest - at > view.status.limit_s for at in seen_at.values())
    if not late:
        return ""
    more = f" (and {late - 1} more ranks)" if late > 1 else ""
    step, silent_s = view.ranks[worst].newest["step"], latest - seen_at[worst]
    return f"rank {worst} is silent at step {step} since {seconds(silent_s)}{more}"


def _gates(view: RunView) -> list[str]:
    if lookup(view.config, "nsa.force_branch"):
        return []  # one branch alone is what was asked for
    layers = {layer: gates for layer, gates in view.gates.items() if layer != ALL_LAYERS} or view.gates
    found = []
    collapsed = {layer: g.collapsed for layer, g in layers.items() if g.collapsed > MAX_COLLAPSED}
    if collapsed:
        worst = max(collapsed, key=lambda layer: collapsed[layer])
        found.append(
            f"gates are collapsed in {len(collapsed)} of {len(layers)} layers: in {worst} one branch has all "
            f"the weight in {collapsed[worst]:.0%} of rows"
        )
    for at, branch in enumerate(BRANCHES):
        idle = {layer: g.shares[at] for layer, g in layers.items() if g.shares[at] < MIN_SHARE}
        if idle:
            worst = min(idle, key=lambda layer: idle[layer])
            found.append(
                f"branch {branch} is hardly used in {len(idle)} of {len(layers)} layers: its share in {worst} "
                f"is {idle[worst]:.2%}"
            )
    return found


def _others(view: RunView) -> list[str]:
    found = []
    if view.on_gpu and any(view.fallbacks.values()):
        (branch, reason), count = max(view.fallbacks.items(), key=lambda item: item[1])
        found.append(f"slow kernels on a GPU: {branch} fell back {short(count)} times, {reason}")
    if lookup(view.metrics, "data.fallback"):
        found.append(f"trained on synthetic text: {lookup(view.metrics, 'data.fallback')}")
    elif any(entry.kind == "data_fallback" for entry in view.timeline):
        found.append("trains on synthetic text: its data did not answer")
    lost = view.telemetry_failures
    if lost:
        ranks = ", ".join(f"{count} of rank {rank}" for rank, count in list(lost.items())[:4])
        more = f" and {len(lost) - 4} more ranks" if len(lost) > 4 else ""
        found.append(f"records could not be written: {ranks}{more}; look at the disk and the tracker")
    return found
