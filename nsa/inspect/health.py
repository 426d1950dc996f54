"""Health warnings about a run, one line each, the most severe first."""

import math
from collections.abc import Iterator

import numpy as np

from nsa.formatting import listed, seconds, short
from nsa.inspect.reading import FAILED, PREEMPTED, RECENT, RUNNING, SILENT, RunView
from nsa.inspect.run_files import lookup
from nsa.run_folder import ALL_LAYERS, BRANCHES, GateStats

MAX_COLLAPSED = 0.5  # fraction of the rows of a layer
MIN_SHARE = 0.01  # of the weight, for each branch
MAX_DATA_WAIT = 0.2  # fraction of a step
RISE = 0.05  # relative increase over the best median of the loss
MIN_WINDOW, MAX_WINDOW = 20, 500  # steps per median of the loss


def is_unhealthy(gates: GateStats) -> bool:
    return gates.collapsed > MAX_COLLAPSED or min(gates.shares) < MIN_SHARE


def unhealthy(view: RunView) -> list[str]:
    """The warnings; empty for a healthy run."""
    checks = (_standing, _not_finite, _rising, _data_wait, _behind, _gates, _others)
    return [line for check in checks for line in check(view)]


def _standing(view: RunView) -> Iterator[str]:
    status = view.status
    if status.kind == FAILED:
        yield f"failed with exit code {status.exit_code}: {status.reason}"
    elif status.kind == SILENT:
        normal = f"silent for {seconds(status.age_s)}, {seconds(status.limit_s)} is normal"
        yield f"{normal}: the process has ended, hangs, or cannot reach its disk"
    elif status.kind == PREEMPTED:
        yield f"stopped before its end: {status.reason}"


def _not_finite(view: RunView) -> Iterator[str]:
    losses, skipped = (view.training.column(name)[-RECENT:] for name in ("loss", "skipped"))
    if len(losses) and not math.isfinite(losses[-1]):
        yield f"the loss of step {view.step} is {losses[-1]}"
    elif bad := int((~np.isfinite(losses)).sum()):
        yield f"the loss was not finite in {bad} of the last {len(losses)} steps"
    elif left_out := int((skipped > 0).sum()):
        yield f"{left_out} of the last {len(skipped)} steps were skipped: not finite"


def _rising(view: RunView) -> Iterator[str]:
    """Compares the median of the last window of steps with the best median of the windows before it."""
    losses = view.training.column("loss")
    losses = losses[np.isfinite(losses)]
    window = min(MAX_WINDOW, max(MIN_WINDOW, len(losses) // 10))
    count = len(losses) // window
    if count < 2:
        return
    parts = losses[len(losses) - count * window :].reshape(count, window)
    medians = np.median(parts, axis=1)
    noise = float(np.median(np.abs(parts[-1] - medians[-1])))
    best, now = float(medians[:-1].min()), float(medians[-1])
    if now > best + max(RISE * abs(best), noise):
        yield f"the loss rises: median of the last {window} steps {now:.4f}, it was {best:.4f} at its best"


def _data_wait(view: RunView) -> Iterator[str]:
    if view.data_share > MAX_DATA_WAIT:
        yield f"{view.data_share:.0%} of a step is spent waiting for data: raise data.workers, or look at the source"


def _behind(view: RunView) -> Iterator[str]:
    """A rank that is silent while others take steps. One in the same step, or the step before, has another clock."""
    if view.status.kind != RUNNING or len(view.ranks) < 2:
        return
    seen = {rank: file.newest for rank, file in view.ranks.items()}
    latest = max(seen.values(), key=lambda event: event["time"])
    if latest["event"] == "data_stall":
        return  # the others wait for this rank
    behind = {rank: event for rank, event in seen.items() if event["step"] + 1 < latest["step"]}
    silent_s = {rank: latest["time"] - event["time"] for rank, event in behind.items()}
    if late := sum(age > view.status.limit_s for age in silent_s.values()):
        worst = max(silent_s, key=lambda rank: silent_s[rank])
        more = f" (and {late - 1} more ranks)" if late > 1 else ""
        yield f"rank {worst} has been silent for {seconds(silent_s[worst])}, at step {seen[worst]['step']}{more}"


def _gates(view: RunView) -> Iterator[str]:
    if lookup(view.config, "nsa.force_branch"):
        return  # a single branch was requested
    layers = {layer: gates for layer, gates in view.gates.items() if layer != ALL_LAYERS} or view.gates
    collapsed = {layer: g.collapsed for layer, g in layers.items() if g.collapsed > MAX_COLLAPSED}
    if collapsed:
        worst = max(collapsed, key=lambda layer: collapsed[layer])
        where = f"gates are collapsed in {len(collapsed)} of {len(layers)} layers"
        yield f"{where}: in {worst} one branch has all the weight in {collapsed[worst]:.0%} of rows"
    for at, branch in enumerate(BRANCHES):
        idle = {layer: g.shares[at] for layer, g in layers.items() if g.shares[at] < MIN_SHARE}
        if idle:
            worst = min(idle, key=lambda layer: idle[layer])
            where = f"branch {branch} is hardly used in {len(idle)} of {len(layers)} layers"
            yield f"{where}: its share in {worst} is {idle[worst]:.2%}"


def _others(view: RunView) -> Iterator[str]:
    if view.on_gpu and any(view.fallbacks.values()):
        (branch, reason), count = max(view.fallbacks.items(), key=lambda item: item[1])
        yield f"slow kernels on a GPU: {branch} fell back {short(count)} times, {reason}"
    if reason := lookup(view.metrics, "data.fallback"):
        yield f"trained on synthetic text: {reason}"
    elif any(entry.kind == "data_fallback" for entry in view.timeline):
        yield "trains on synthetic text: its data did not answer"
    if lost := view.telemetry_failures:
        ranks = listed([f"{count} of rank {rank}" for rank, count in lost.items()], 4)
        yield f"records could not be written: {ranks}; look at the disk and the tracker"
