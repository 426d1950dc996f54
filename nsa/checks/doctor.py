"""What is broken, and the smallest case that shows it: the decision tree of `nsa doctor`.

It checks the environment and the kernels, then runs short trials on synthetic data, each in its own processes: single
process, with checkpointing, DDP, FSDP, compiled where that is configured, and finally the configuration as given. All
but the last train on the same batches, so their losses and gradient norms must agree. A healthy system ends here. Where
a trial fails, `doctor_search` finds the smallest case that fails in the same way. It runs once more, traced, as
evidence.
"""

import math
import os
import re
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from nsa.checks.doctor_search import AS_GIVEN, BRANCH_OF, MIN_TOKENS, OPERATORS, SMALL, SYNTHETIC, Case, Cause, search
from nsa.checks.probe import ProbeResult, describe, run_probe
from nsa.checks.progress import Progress
from nsa.checks.trials import SYNTHETIC_DATA, Outcome, Trial, changed, remove_weights, run_trial, usable_gpus
from nsa.config import Config, load_config
from nsa.errors import HangError, NumericsError, OutOfMemoryError
from nsa.parallel.context import data_ranks
from nsa.parallel.launch import choose_strategy
from nsa.record.numbers import one_line
from nsa.train.state import micro_batch_size

HANG, NON_FINITE, OUT_OF_MEMORY = "hang", "non-finite numbers", "out of memory"
OTHER_NUMBERS = "trains with other numbers"
KINDS = {
    0: "ended early",
    HangError.exit_code: HANG,
    NumericsError.exit_code: NON_FINITE,
    OutOfMemoryError.exit_code: OUT_OF_MEMORY,
}
TOLERANCE_FP32, TOLERANCE_ROUNDED = 1e-4, 2e-2  # relative, of losses and gradient norms on the same batches
REQUIRED = ("python", "torch", "triton", "GPUs")  # without these no trial means anything
LIMIT_FACTOR, MIN_LIMIT_S = 10, 60.0  # trials of a search get ten times what a sound one took, and at least a minute


@dataclass(frozen=True)
class Setup:
    """The configuration to diagnose, and how to run its trials."""

    config_file: Path
    overrides: tuple[str, ...]
    config: Config
    out: Path
    nproc: int  # of DDP and FSDP
    given_nproc: int  # of the configuration as given
    on_gpu: bool
    steps: int = 3
    limit_s: float = 300.0

    @property
    def given(self) -> Case:
        """The configuration as it is; a ConfigError where its ranks cannot share the batch evenly."""
        config = self.config
        return Case(
            config.model.n_layers,
            config.train.seq_len,
            choose_strategy(config.parallel.strategy, self.given_nproc),
            config.runtime.gradient_checkpointing,
            config.runtime.compile,
            branch=config.nsa.force_branch,
            data=SYNTHETIC if config.data.source == "synthetic" and not config.data.mixture else AS_GIVEN,
            batch=SMALL if self._given_batch == self.small_batch else AS_GIVEN,
        )

    @property
    def _given_batch(self) -> tuple[int, int]:
        groups = data_ranks(self.config.parallel.context, self.given_nproc)
        return self.config.train.batch_size, micro_batch_size(self.config, groups)

    @property
    def small_batch(self) -> tuple[int, int]:
        """Sequences of a step and of a pass that one process and all of them can train in the same way."""
        train = self.config.train
        micro = max(1, train.batch_size // self.nproc) if train.micro_batch == "auto" else train.micro_batch
        return self.nproc * micro, micro

    def processes(self, case: Case) -> int:
        return 1 if case.strategy == "single" else self.nproc if case.batch == SMALL else self.given_nproc

    def changes(self, case: Case, limit_s: float, *, traced: bool = False) -> dict[str, Any]:
        """What the configuration of a case changes, by `section.key`: its factors, the number of steps, and timeouts
        with which the watchdog finds a hang well within the limit and before any collective times out."""
        config, telemetry, parallel = self.config, self.config.telemetry, self.config.parallel
        batch_size, micro_batch = self.small_batch if case.batch == SMALL else self._given_batch
        changes: dict[str, Any] = {
            "model.n_layers": case.layers,
            "nsa.force_branch": case.branch,
            "train.batch_size": batch_size,
            "train.micro_batch": micro_batch,
            "train.steps": self.steps,
            "train.seq_len": case.tokens,
            "train.profile_steps": None,
            "train.eval_sequences": min(config.train.eval_sequences, batch_size),
            "runtime.gradient_checkpointing": case.checkpointing,
            "runtime.compile": case.compiled,
            "runtime.cuda_graphs": "auto",  # which no case refuses
            "parallel.strategy": case.strategy,
            "parallel.context": parallel.context if case.strategy != "single" else 1,
            "parallel.allow_single_rank": parallel.allow_single_rank or (self.on_gpu and self.processes(case) == 1),
            # One process takes several passes for the batch, and so do few groups of ranks for the small one.
            "parallel.ddp.static_graph": parallel.ddp.static_graph
            and case.strategy == "ddp"
            and (parallel.context == 1 or case.batch != SMALL),
            "parallel.timeout_s": max(parallel.timeout_s, limit_s),
            "telemetry.watchdog_first_step_s": min(telemetry.watchdog_first_step_s, limit_s / 2),
            "telemetry.watchdog_floor_s": min(telemetry.watchdog_floor_s, limit_s / 4),
            "telemetry.tracker": "none",
        }
        changes |= {f"runtime.kernels.{operator}": "reference" for operator in case.on_reference}
        if case.layers != config.model.n_layers:
            changes["train.init_from"] = None  # those weights have another depth
        if case.data == SYNTHETIC:
            changes |= SYNTHETIC_DATA
        if traced:
            changes |= dict.fromkeys((f"telemetry.trace_{what}" for what in ("grads", "modules", "buckets")), True)
        return changes

    def resolve(self, case: Case, limit_s: float, *, traced: bool = False) -> Config:
        return changed(self.config, self.changes(case, limit_s, traced=traced))

    def tolerance(self, case: Case) -> float:
        """The largest relative difference between losses or gradient norms of two runs on the same batches."""
        precision, fsdp = self.config.runtime.precision, self.config.parallel.fsdp
        used: set[str] = {("bf16" if self.on_gpu else "fp32") if precision == "auto" else precision}
        if case.strategy == "fsdp":
            used |= {fsdp.param_dtype, fsdp.reduce_dtype} - {"auto"}
        # Compiled code rounds in other places.
        return TOLERANCE_FP32 if used == {"fp32"} and not case.compiled else TOLERANCE_ROUNDED


def load_setup(
    config_file: Path, overrides: list[str], out: Path, nproc: int | None, steps: int, limit_s: float
) -> Setup:
    """Loads the configuration and decides how many processes it takes. A mistake in it is a ConfigError."""
    config = load_config(config_file, overrides, os.environ)
    gpus, strategy = usable_gpus(config), config.parallel.strategy
    wanted = nproc or gpus or max(2, config.parallel.context)
    alone = strategy == "auto" and config.parallel.context == 1 and not (nproc or gpus)
    given = 1 if strategy == "single" or alone else wanted
    setup = Setup(config_file, tuple(overrides), config, out, wanted, given, gpus > 0, steps, limit_s)
    _ = setup.given
    return setup


@dataclass(frozen=True)
class Attempt:
    """One trial or probe, as plain values. `failure` is the kind of failure, empty where it passed."""

    name: str
    failure: str
    reason: str
    seconds: float
    case: Case | None = None
    nproc: int = 1
    folder: str = ""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def __rich__(self) -> Text:
        """One line of the terminal."""
        line = Text(f"{self.name:<32} ")
        line.append(f"{self.failure or 'ok':<26} ", "red" if self.failure else "green")
        line.append(f"{self.seconds:6.1f} s")
        return line.append(f"  {one_line(self.reason, 200)}" if self.failure else "")


class Diagnosis:
    """Walks the decision tree and keeps what it finds."""

    def __init__(self, setup: Setup, progress: Progress):
        self.setup, self.progress = setup, progress
        self._known: dict[Case, Attempt] = {}
        self.machine, self.kernels = ProbeResult([]), ProbeResult([])
        self.attempts: list[Attempt] = []
        self.failure: Attempt | None = None  # the first one; None where the system is healthy
        self.causes: list[Cause] = []
        self.smallest: Case | None = None
        self.evidence: Attempt | None = None  # the smallest case once more, traced
        self.baseline: Attempt | None = None  # the run that has the right numbers
        self.environment: dict[str, Any] = {}  # env.json of a trial

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    def run(self) -> None:
        shutil.rmtree(self.setup.out / "trials", ignore_errors=True)  # of an earlier diagnosis
        self.machine, machine = self._probe("machine", "environment")
        if machine.failure:
            self.failure = machine
            bad = [finding["what"] for finding in self.machine.failed] or ["no answer"]
            self.causes = [Cause("environment", what, f"environment: {what}") for what in bad]
            if self.machine.problem or set(bad) & set(REQUIRED):
                return
        self.kernels, kernels = self._probe("kernels", "kernels")
        if self.kernels.failed:
            self.failure = kernels
            self._show_wrong_kernels(self.kernels.failed)
            return
        failed = self._survey()
        if failed is not None:
            self.failure = failed
            self._narrow_down(failed)
        elif kernels.failure:
            self.failure = kernels
            self.causes.append(Cause("kernel", "all", "the check of the kernels"))

    def _probe(self, kind: str, name: str) -> tuple[ProbeResult, Attempt]:
        setup, began = self.setup, time.monotonic()
        self.progress.begin(f"{name} (at most {setup.limit_s:.0f} s)")
        config = setup.resolve(replace(setup.given, strategy="ddp", batch=SMALL), setup.limit_s)
        probed = run_probe(kind, Trial(config, setup.out / "trials" / kind, setup.nproc, setup.limit_s))
        wrong = f"{len(probed.failed)} of {len(probed.findings)} wrong" if probed.failed else ""
        reason = probed.problem or "; ".join(map(describe, probed.failed))
        return probed, self._end(
            Attempt(name, "no answer" if probed.problem else wrong, reason, time.monotonic() - began)
        )

    def _survey(self) -> Attempt | None:
        """The first trial that fails."""
        nproc, given = self.setup.nproc, self.setup.given
        ranks, is_muon = self.setup.config.parallel.context, self.setup.config.train.optimizer == "muon"
        # One process gets the tokens that a rank has: a sequence that is divided may not fit it.
        alone = given.tokens if ranks == 1 else max(2 * ranks, given.tokens // ranks)
        plain = Case(given.layers, alone, branch=given.branch)
        recompute = "block" if given.checkpointing == "none" else given.checkpointing
        shared = replace(plain, tokens=given.tokens, checkpointing=given.checkpointing)
        cases = {
            "single process": plain,
            f"checkpointing ({recompute})": replace(plain, checkpointing=recompute),
            f"ddp x {nproc}": replace(shared, strategy="ddp"),
            **({} if is_muon else {f"fsdp x {nproc}": replace(shared, strategy="fsdp")}),  # it needs whole matrices
            **({"torch.compile": replace(shared, compiled=True)} if given.compiled else {}),
            "the configuration as given": given,
        }
        attempts = (self.attempt(name, case, against=self._baseline(case)) for name, case in cases.items())
        return next((attempt for attempt in attempts if attempt.failure), None)

    def _narrow_down(self, failed: Attempt) -> None:
        config, kind = self.setup.config, failed.failure
        assert failed.case is not None

        def fails(name: str, case: Case) -> bool:
            against = self._baseline(case) if kind == OTHER_NUMBERS else None
            return self.attempt(name, case, against=against, limit_s=self._limit_s(case)).failure == kind

        is_nsa = "nsa" in config.model.layer_kinds()
        shortest = max(MIN_TOKENS, config.nsa.sel_block if is_nsa else 0, 2 * config.parallel.context)
        min_tokens = min(shortest, failed.case.tokens)
        fast = self._fast_operators() if is_nsa else ()
        self.smallest, causes = search(failed.case, fails, fast=fast, branches=is_nsa, min_tokens=min_tokens)
        self.causes += causes
        self.baseline = self._baseline(self.smallest) if kind == OTHER_NUMBERS else None
        self.evidence = self.attempt("the smallest case, traced", self.smallest, against=self.baseline, traced=True)

    def _baseline(self, case: Case) -> Attempt | None:
        """The run whose numbers the case must reproduce."""
        plain = replace(case, strategy="single", checkpointing="none", compiled=False)
        if plain == case or case.data != SYNTHETIC or case.batch != SMALL:
            return None
        attempt = self.attempt("the same, plain", plain)
        return None if attempt.failure else attempt

    def _fast_operators(self) -> tuple[str, ...]:
        """Operators that a fast kernel computes, or may compute where the probe gave no answer."""
        if not self.setup.on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return ()
        wanted, checks = self.setup.config.runtime.kernels.model_dump(), self.kernels.findings
        slow = {c["operator"] for c in checks if c["backend"] == "reference" and "differences" not in c["part"]}
        return tuple(name for name in OPERATORS[None] if wanted[name] != "reference" and name not in slow)

    def _show_wrong_kernels(self, wrong: list[dict[str, Any]]) -> None:
        """Trains with the first wrong operator, and with the reference in its place."""
        config, operator = self.setup.config, wrong[0]["operator"]
        # A reference that finite differences contradict is itself at fault.
        backends = {check["operator"]: check["backend"] for check in wrong}
        backends |= {check["operator"]: "reference" for check in wrong if "differences" in check["part"]}
        self.causes += [Cause("kernel", name, f"kernel {name} ({by})") for name, by in backends.items()]
        tokens = min(config.train.seq_len, (config.nsa.num_selected + 4) * config.nsa.sel_block)
        self.smallest = case = Case(1, tokens, branch=config.nsa.force_branch or BRANCH_OF[operator])
        if backends[operator] != "reference":
            self.baseline = self.attempt(f"{operator} on the reference", replace(case, on_reference=(operator,)))
        self.evidence = self.attempt(f"{operator} ({backends[operator]}) in training", case, against=self.baseline)

    def attempt(
        self, name: str, case: Case, *, against: Attempt | None = None, limit_s: float = 0.0, traced: bool = False
    ) -> Attempt:
        """Trains the case, or returns the earlier attempt at it unless it is to be traced now."""
        setup, limit_s = self.setup, limit_s or self.setup.limit_s
        if case in self._known and not traced:
            return self._known[case]
        self.progress.begin(f"{name} (at most {limit_s:.0f} s)")
        slug = re.sub(r"\W+", "-", name).strip("-")
        folder = setup.out / "trials" / f"{len(self.attempts) - 1:02d}-{slug}"
        folder.mkdir(parents=True, exist_ok=True)  # evidence is read from it even if the run writes nothing
        config, nproc = setup.resolve(case, limit_s, traced=traced), setup.processes(case)
        outcome = run_trial(Trial(config, folder, nproc, limit_s), self.progress.update)
        remove_weights(folder, keep_nonfinite=traced)
        losses, norms = list[float](), list[float]()
        if view := outcome.view:
            losses, norms = (view.training.column(column).tolist() for column in ("loss", "grad_norm"))
            self.environment = self.environment or view.env
        failure, reason = kind_of(outcome), outcome.reason
        if not failure and against is not None:
            reason = first_difference(losses, norms, against, setup.tolerance(case))
            failure = OTHER_NUMBERS if reason else ""
        made = Attempt(name, failure, reason, outcome.seconds, case, nproc, str(folder), losses, norms)
        self._known.setdefault(case, made)
        return self._end(made)

    def _limit_s(self, case: Case) -> float:
        """Bounds the cost of a hang by how long sound trials took."""
        sound = [a.seconds for a in self.attempts if a.case and not a.failure and a.case.compiled == case.compiled]
        return min(self.setup.limit_s, max(MIN_LIMIT_S, LIMIT_FACTOR * max(sound, default=math.inf)))

    def _end(self, attempt: Attempt) -> Attempt:
        self.attempts.append(attempt)
        self.progress.note(attempt)
        return attempt


def kind_of(outcome: Outcome) -> str:
    """How a trial failed, as precisely as two failures can be called the same."""
    if outcome.passed:
        return ""
    return HANG if outcome.timed_out else KINDS.get(outcome.exit_code, f"crash (exit code {outcome.exit_code})")


def first_difference(losses: list[float], norms: list[float], against: Attempt, tolerance: float) -> str:
    """Where losses or gradient norms first differ from those of another run; empty where they agree."""
    rows = zip(losses, against.losses, norms, against.grad_norms, strict=False)
    for step, (loss, other_loss, norm, other_norm) in enumerate(rows, start=1):
        for what, mine, other in (("loss", loss, other_loss), ("gradient norm", norm, other_norm)):
            both_skipped = not (math.isfinite(mine) or math.isfinite(other))  # fp16 skips a step without a norm
            if not both_skipped and not math.isclose(mine, other, rel_tol=tolerance):
                return f"step {step}: {what} {mine:.8g}, in '{against.name}' {other:.8g}"
    return ""
