"""What is broken, and the smallest case that shows it: the decision tree of `nsa doctor`.

The environment, the kernels, then a survey of short runs on synthetic data, each in processes of its own: alone, with
checkpointing, under DDP, under FSDP, compiled where that is configured, and at last the configuration as it is given.
The first ones train the same batches, so that their losses and gradient norms must agree. A healthy system ends here.
Where a run fails, `doctor_search` finds the smallest case that fails in the same way; that one is run once more,
traced, as evidence.
"""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nsa.checkpoint import format as layout
from nsa.checks.doctor_search import (
    AS_GIVEN,
    BRANCH_OF,
    FEWEST_TOKENS,
    OPERATORS,
    SMALL,
    SYNTHETIC,
    Case,
    Guilty,
    Space,
    search,
)
from nsa.checks.probe import Probed, in_words, run_probe
from nsa.checks.trials import Outcome, Trial, run_trial, write_trial_config
from nsa.config import Config, load_config, parse_config
from nsa.errors import ConfigError, HangError, NumericsError, OutOfMemoryError
from nsa.inspect.reading import RunView, read_run
from nsa.record.schema import NONFINITE_FOLDER, WEIGHTS_FILE
from nsa.train.state import micro_batch_size

HANG, NON_FINITE, OUT_OF_MEMORY = "hang", "non-finite numbers", "out of memory"
OTHER_NUMBERS = "trains with other numbers"
SAME_FP32, SAME_ROUNDED = 1e-4, 2e-2  # relative
ENDS_IT = ("python", "torch", "triton", "GPUs")  # of the environment: without them no trial says anything
PATIENCE, SHORTEST_S = 10, 60.0  # trials of a search get ten times what a sound one took, and at least a minute


@dataclass(frozen=True)
class Patient:
    """What is to be looked at. `config` is resolved; `stated` is the same without the environment's variables."""

    config_file: Path
    overrides: tuple[str, ...]
    config: Config
    stated: Config
    out: Path
    nproc: int  # of DDP and FSDP
    given_nproc: int  # of the configuration as given
    on_gpu: bool
    steps: int = 3
    limit_s: float = 300.0

    @property
    def given(self) -> Case:
        """The configuration as it is; a ConfigError where its batch does not come out even."""
        config = self.config
        strategy = "single" if self.given_nproc == 1 else "ddp"
        batch = (config.train.batch_size, micro_batch_size(config, self.given_nproc))
        return Case(
            config.model.n_layers,
            config.train.seq_len,
            strategy if config.parallel.strategy == "auto" else config.parallel.strategy,
            config.runtime.gradient_checkpointing,
            config.runtime.compile,
            (),
            config.nsa.force_branch,
            SYNTHETIC if config.data.source == "synthetic" and not config.data.mixture else AS_GIVEN,
            SMALL if batch == self.small_batch else AS_GIVEN,
        )

    @property
    def small_batch(self) -> tuple[int, int]:
        """Sequences of a step and of a pass that one process and all of them can train alike."""
        train = self.config.train
        micro = max(1, train.batch_size // self.nproc) if train.micro_batch == "auto" else train.micro_batch
        return self.nproc * micro, micro

    def processes(self, case: Case) -> int:
        return 1 if case.strategy == "single" else self.nproc if case.batch == SMALL else self.given_nproc

    def tree(self, case: Case) -> dict[str, Any]:
        """The configuration of a case: as given, but for its factors and an end after a few steps."""
        tree = self.config.to_dict()
        train, parallel = tree["train"], tree["parallel"]
        if case.batch == SMALL:
            train["batch_size"], train["micro_batch"] = self.small_batch
        else:
            train["micro_batch"] = micro_batch_size(self.config, self.given_nproc)
        train |= {"steps": self.steps, "seq_len": case.tokens, "profile_steps": None}
        train["eval_sequences"] = min(train["eval_sequences"], train["batch_size"])
        if case.layers != self.config.model.n_layers:
            train["init_from"] = None  # weights of another depth
        tree["model"]["n_layers"] = case.layers
        tree["nsa"]["force_branch"] = case.branch
        tree["runtime"] |= {"gradient_checkpointing": case.checkpointing, "compile": case.compiled}
        tree["runtime"]["kernels"] |= dict.fromkeys(case.slow, "reference")
        parallel["strategy"] = case.strategy
        parallel["allow_single_rank"] |= self.on_gpu and self.processes(case) == 1
        parallel["ddp"]["static_graph"] &= case.strategy == "ddp"  # alone, the same batch takes several passes
        if case.data == SYNTHETIC:
            tree["data"] |= {"source": "synthetic", "paths": [], "mixture": []}
        tree["telemetry"]["tracker"] = "none"
        return tree

    def tolerance(self, case: Case) -> float:
        """How far the losses and gradient norms of two runs of the same batches may be apart."""
        precision, fsdp = self.config.runtime.precision, self.config.parallel.fsdp
        used: set[str] = {("bf16" if self.on_gpu else "fp32") if precision == "auto" else precision}
        if case.strategy == "fsdp":
            used |= {fsdp.param_dtype, fsdp.reduce_dtype} - {"auto"}
        # Compiled code rounds in other places.
        return SAME_FP32 if used == {"fp32"} and not case.compiled else SAME_ROUNDED


def admit(config_file: Path, overrides: list[str], out: Path, nproc: int | None, steps: int, limit_s: float) -> Patient:
    """Reads the configuration and says how many processes it takes. A mistake in it is a ConfigError."""
    from torch import cuda

    stated = load_config(config_file, overrides)
    config = load_config(config_file, overrides, os.environ)
    gpus = 0 if config.runtime.device == "cpu" or not cuda.is_available() else cuda.device_count()
    wanted = nproc or gpus or 2
    alone = config.parallel.strategy == "single" or (config.parallel.strategy == "auto" and not (nproc or gpus))
    patient = Patient(
        config_file, tuple(overrides), config, stated, out, wanted, 1 if alone else wanted, gpus > 0, steps, limit_s
    )
    _ = patient.given
    return patient


@dataclass(frozen=True)
class Record:
    """What became of a trial or a probe. `kind` is how it failed; empty where it did not."""

    name: str
    kind: str
    reason: str
    seconds: float
    case: Case | None = None
    nproc: int = 1
    folder: Path | None = None
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    last_lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.kind


@dataclass(frozen=True)
class Watcher:
    """Told what is going on, for a live view; each does nothing unless given."""

    begins: Callable[[str, float], None] = lambda name, limit_s: None
    stands: Callable[[RunView | None, float], None] = lambda view, seconds: None
    ended: Callable[[Record], None] = lambda record: None


@dataclass
class Diagnosis:
    """Everything that was found. Healthy where nothing failed."""

    patient: Patient
    machine: Probed = field(default_factory=lambda: Probed([]))
    kernels: Probed = field(default_factory=lambda: Probed([]))
    records: list[Record] = field(default_factory=list)
    failure: Record | None = None
    guilty: list[Guilty] = field(default_factory=list)
    smallest: Case | None = None
    evidence: Record | None = None  # the smallest case once more, traced
    baseline: Record | None = None  # whose numbers it should have
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        return self.failure is None


def diagnose(
    patient: Patient,
    watcher: Watcher,
    run: Callable[..., Outcome] = run_trial,
    probe: Callable[..., Probed] = run_probe,
) -> Diagnosis:
    """Walks down the tree, and searches where it breaks."""
    began = time.monotonic()
    shutil.rmtree(patient.out / "trials", ignore_errors=True)  # of an earlier examination
    examination = _Examination(patient, watcher, run, probe)
    examination.examine()
    examination.found.seconds = time.monotonic() - began
    return examination.found


class _Examination:
    def __init__(self, patient: Patient, watcher: Watcher, run: Callable[..., Outcome], probe: Callable[..., Probed]):
        self.patient, self.watcher, self._run, self._probe = patient, watcher, run, probe
        self.found = Diagnosis(patient)
        self._known: dict[str, Record] = {}

    def examine(self) -> None:
        found = self.found
        found.machine, machine = self._look("machine", "environment")
        if machine.kind:
            found.failure = machine
            bad = [finding["what"] for finding in found.machine.findings if not finding["ok"]]
            found.guilty = [Guilty("environment", what, f"environment: {what}") for what in bad or ["no answer"]]
            if not bad or set(bad) & set(ENDS_IT):
                return
        found.kernels, kernels = self._look("kernels", "kernels")
        wrong = [check for check in found.kernels.findings if not check["ok"]]
        if wrong:
            found.failure = kernels
            self._show_wrong_kernels(wrong)
            return
        failed = self._survey()
        if failed is not None:
            found.failure = failed
            self._narrow_down(failed)
        elif kernels.kind:
            found.failure = kernels
            found.guilty.append(Guilty("kernel", "all", "the check of the kernels"))

    def _look(self, kind: str, name: str) -> tuple[Probed, Record]:
        """The environment or the kernels, by a process of its own."""
        patient, began = self.patient, time.monotonic()
        self.watcher.begins(name, patient.limit_s)
        tree = patient.tree(replace(patient.given, strategy="ddp", batch=SMALL))
        folder = patient.out / "trials"
        trial = Trial(kind, parse_config(tree, name), folder / kind, 1, patient.limit_s)
        write_trial_config(trial)
        probed = self._probe(kind, trial.config_file, patient.nproc, folder, patient.limit_s)
        bad = [finding for finding in probed.findings if not finding["ok"]]
        failure = "no answer" if probed.problem else f"{len(bad)} of {len(probed.findings)} wrong" if bad else ""
        record = Record(name, failure, probed.problem or "; ".join(map(in_words, bad)), time.monotonic() - began)
        self._note(record)
        return probed, record

    def _survey(self) -> Record | None:
        """The first run that fails."""
        nproc, given = self.patient.nproc, self.patient.given
        plain = Case(given.layers, given.tokens, branch=given.branch)
        kept = "block" if given.checkpointing == "none" else given.checkpointing
        shared = replace(plain, checkpointing=given.checkpointing)
        cases = [
            ("single process", plain),
            (f"checkpointing ({kept})", replace(plain, checkpointing=kept)),
            (f"ddp x {nproc}", replace(shared, strategy="ddp")),
            (f"fsdp x {nproc}", replace(shared, strategy="fsdp")),
        ]
        if given.compiled:
            cases.append(("torch.compile", replace(shared, compiled=True)))
        for name, case in cases:
            record = self.attempt(name, case, against=self._baseline(case))
            if record.kind:
                return record
        record = self.attempt("the configuration as given", given)
        return record if record.kind else None

    def _narrow_down(self, failed: Record) -> None:
        found, config, kind = self.found, self.patient.config, failed.kind
        assert failed.case is not None

        def fails(name: str, case: Case) -> bool:
            against = self._baseline(case) if kind == OTHER_NUMBERS else None
            return self.attempt(name, case, against=against, limit_s=self._limit(case)).kind == kind

        is_nsa = config.model.attention == "nsa"
        fewest = max(FEWEST_TOKENS, config.nsa.sel_block if is_nsa else 0)
        space = Space(self._fast_operators() if is_nsa else (), is_nsa, min(fewest, failed.case.tokens))
        found.smallest, guilty = search(failed.case, space, fails)
        found.guilty += guilty
        found.baseline = self._baseline(found.smallest) if kind == OTHER_NUMBERS else None
        found.evidence = self.attempt("the smallest case, traced", found.smallest, against=found.baseline, traced=True)

    def _baseline(self, case: Case) -> Record | None:
        """The run whose numbers those of the case must be."""
        plain = replace(case, strategy="single", checkpointing="none", compiled=False)
        if plain == case or case.data != SYNTHETIC or case.batch != SMALL:
            return None
        record = self.attempt("the same, plain", plain)
        return record if record.passed else None

    def _fast_operators(self) -> tuple[str, ...]:
        """Those that not the reference computes; all that may be such, where the probe gave no answer."""
        if not self.patient.on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return ()
        wanted, checks = self.patient.config.runtime.kernels.model_dump(), self.found.kernels.findings
        slow = {c["operator"] for c in checks if c["backend"] == "reference" and "differences" not in c["part"]}
        return tuple(name for name in OPERATORS[None] if wanted[name] != "reference" and name not in slow)

    def _show_wrong_kernels(self, wrong: list[dict[str, Any]]) -> None:
        """What a wrong operator does to training, beside the reference."""
        found, config, operator = self.found, self.patient.config, wrong[0]["operator"]
        backends: dict[str, str] = {}
        for check in wrong:  # a reference that finite differences contradict is itself at fault
            by = "reference" if "differences" in check["part"] else check["backend"]
            backends[check["operator"]] = "reference" if backends.get(check["operator"]) == "reference" else by
        found.guilty += [Guilty("kernel", name, f"kernel {name} ({by})") for name, by in backends.items()]
        tokens = min(config.train.seq_len, (config.nsa.num_selected + 4) * config.nsa.sel_block)
        found.smallest = case = Case(1, tokens, branch=config.nsa.force_branch or BRANCH_OF[operator])
        if backends[operator] != "reference":
            found.baseline = self.attempt(f"{operator} on the reference", replace(case, slow=(operator,)))
        found.evidence = self.attempt(f"{operator} ({backends[operator]}) in training", case, against=found.baseline)

    def attempt(
        self,
        name: str,
        case: Case,
        *,
        against: Record | None = None,
        limit_s: float | None = None,
        traced: bool = False,
    ) -> Record:
        """Trains the case; one that was trained before is remembered, unless it is to be traced now."""
        tree, nproc = self.patient.tree(case), self.patient.processes(case)
        key = json.dumps([tree, nproc])
        if key in self._known and not traced:
            return self._known[key]
        record = self._train(name, case, tree, limit_s or self.patient.limit_s, traced=traced)
        if record.passed and against is not None:
            remark = first_difference(record, against, self.patient.tolerance(case))
            record = replace(record, kind=OTHER_NUMBERS if remark else "", reason=remark)
        self._known.setdefault(key, record)
        self._note(record)
        return record

    def _train(self, name: str, case: Case, tree: dict[str, Any], limit_s: float, *, traced: bool) -> Record:
        self.watcher.begins(name, limit_s)
        slug = re.sub(r"\W+", "-", name).strip("-")
        folder = self.patient.out / "trials" / f"{len(self.found.records) - 1:02d}-{slug}"
        config = parse_config(timed(tree, limit_s, traced=traced), name)
        nproc = self.patient.processes(case)
        outcome = self._run(Trial(name, config, folder, nproc, limit_s), self.watcher.stands)
        losses, norms = _numbers(folder)
        _tidy(folder, keep_nonfinite=traced)
        lines = tuple(outcome.last_lines())
        return Record(
            name, kind_of(outcome), outcome.reason, outcome.seconds, case, nproc, folder, losses, norms, lines
        )

    def _limit(self, case: Case) -> float:
        """A hang should not cost more than it must: sound trials have shown how long one takes."""
        sound = [r.seconds for r in self.found.records if r.passed and r.case and r.case.compiled == case.compiled]
        return min(self.patient.limit_s, max(SHORTEST_S, PATIENCE * max(sound, default=math.inf)))

    def _note(self, record: Record) -> None:
        self.found.records.append(record)
        self.watcher.ended(record)


def kind_of(outcome: Outcome) -> str:
    """How a trial failed, as far as two failures can be called the same."""
    code = outcome.exit_code
    if outcome.passed:
        return ""
    if outcome.timed_out:
        return HANG
    known = {
        0: "ended early",
        HangError.exit_code: HANG,
        NumericsError.exit_code: NON_FINITE,
        OutOfMemoryError.exit_code: OUT_OF_MEMORY,
    }
    return known.get(code, f"crash (exit code {code})")


def first_difference(record: Record, against: Record, limit: float) -> str:
    """Where the losses or gradient norms of two runs part; nothing where they agree."""
    rows = zip(record.losses, against.losses, record.norms, against.norms, strict=False)
    for step, (loss, other_loss, norm, other_norm) in enumerate(rows, start=1):
        for what, mine, other in (("loss", loss, other_loss), ("gradient norm", norm, other_norm)):
            if not _agree(mine, other, limit):
                return f"step {step}: {what} {mine:.8g}, in '{against.name}' {other:.8g}"
    return ""


def _agree(mine: float, other: float, limit: float) -> bool:
    if math.isfinite(mine) and math.isfinite(other):
        return abs(mine - other) <= limit * max(abs(mine), abs(other))
    return math.isfinite(mine) == math.isfinite(other)  # a step that fp16 leaves out has no norm in either


def timed(tree: Mapping[str, Any], limit_s: float, *, traced: bool = False) -> dict[str, Any]:
    """With a watchdog that finds a hang well within the limit, before any collective gives up."""
    telemetry, parallel = dict(tree["telemetry"]), dict(tree["parallel"])
    telemetry["watchdog_first_step_s"] = min(telemetry["watchdog_first_step_s"], limit_s / 2)
    telemetry["watchdog_floor_s"] = min(telemetry["watchdog_floor_s"], limit_s / 4)
    telemetry |= dict.fromkeys(("trace_grads", "trace_modules", "trace_buckets"), True) if traced else {}
    parallel["timeout_s"] = max(parallel["timeout_s"], limit_s)
    return {**tree, "telemetry": telemetry, "parallel": parallel}


def _numbers(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    try:
        training = read_run(folder).training
    except ConfigError:  # it did not come that far
        return (), ()
    return tuple(training.column("loss").tolist()), tuple(training.column("grad_norm").tolist())


def _tidy(folder: Path, *, keep_nonfinite: bool) -> None:
    """Weights are large and tell nothing here, but for those of a step that was not finite."""
    for name in (layout.FOLDER, *(() if keep_nonfinite else (NONFINITE_FOLDER,))):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
