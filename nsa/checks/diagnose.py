"""`nsa doctor`: finds the smallest configuration that fails, and reports its stacks and advice.

After the environment guard, short trials run in a fixed order, each in separate processes with a time limit: single
process without gradient checkpointing, with checkpointing, DDP, FSDP, the configuration as given. The first trial that
fails runs again with one attention branch at a time, then with half the layers, again and again, while it fails.

All trials but the last train on the same synthetic batches: their losses and gradient norms must agree.
"""

import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from nsa import __version__
from nsa.checks.probe import NOT_CHECKED, ProbeResult, describe, run_probe
from nsa.checks.progress import Progress
from nsa.checks.trials import (
    SYNTHETIC,
    Trial,
    changed,
    format_command,
    last_lines,
    remove_weights,
    run_trial,
    usable_gpus,
    write_files,
)
from nsa.config import Config
from nsa.errors import HangError, NumericsError, OutOfMemoryError
from nsa.files import read_regular
from nsa.formatting import one_line, plain, seconds
from nsa.nn.attention import attention_kinds
from nsa.parallel.context import data_ranks
from nsa.parallel.world import choose_strategy
from nsa.run_folder import stack_dumps
from nsa.train.state import micro_batch_size

SCHEMA = 3
JSON_FILE = "doctor.json"
SINGLE, CHECKPOINTING, DDP, FSDP, AS_GIVEN = "single process", "checkpointing", "ddp", "fsdp", "as given"
HANG, NON_FINITE, OUT_OF_MEMORY, OTHER_NUMBERS = "hang", "non-finite numbers", "out of memory", "other numbers"
KINDS = {0: "ended early", HangError.exit_code: HANG, NumericsError.exit_code: NON_FINITE}
KINDS |= {OutOfMemoryError.exit_code: OUT_OF_MEMORY}
REQUIRED = {"python", "torch", "triton", "GPUs"}  # if one of these findings failed, no trial can run
TOLERANCE_FP32, TOLERANCE_ROUNDED = 1e-4, 2e-2  # relative, of losses and gradient norms on the same batches
LIMIT_FACTOR, MIN_LIMIT_S = 10, 60.0  # after a failure, the limit is ten times the longest trial that passed
MAX_FRAMES, LOG_LINES = 20, 12

ADVICE = {
    SINGLE: "Neither checkpointing nor a second process matters: the model or a kernel is at fault. `nsa ready` "
    "compares each kernel with its reference; runtime.kernels.sel=reference (phi, cmp, select, win, mix) avoids one.",
    CHECKPOINTING: "runtime.gradient_checkpointing=none avoids it and needs more memory (see `nsa memory`); another "
    "granularity (block, branch, selective) may avoid it too.",
    DDP: "parallel.ddp.safe_mode=true shows whether an option of DDP is at fault; parallel.strategy=fsdp avoids DDP. "
    "On GPUs check the links too: NCCL_DEBUG=INFO.",
    FSDP: "parallel.strategy=ddp avoids FSDP if the model fits one GPU; parallel.fsdp.forward_prefetch=false and "
    "parallel.fsdp.sharding=grad_op narrow it down.",
    AS_GIVEN: "The same model trains on small synthetic batches without torch.compile. Run `nsa doctor` again with "
    "runtime.compile=false, with data.source=synthetic or with a smaller train.micro_batch to see which of them "
    "matters; `nsa data stats` and `nsa data verify` check the data.",
    HANG: "The stacks show where each rank waits; a rank that waits elsewhere is the cause. Run the command again "
    "with telemetry.trace_grads=true: `nsa trace` then shows the gradient at which the rank stopped.",
    NON_FINITE: "The command saves the non-finite step in the folder `nonfinite` of its run.",
    OUT_OF_MEMORY: "`nsa memory` prints the memory that a configuration needs and the largest batch that fits.",
    OTHER_NUMBERS: "The results differ from those of one process: do not start long runs with this configuration.",
}

# The format of the stack dumps, which faulthandler writes.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONG_PATH = re.compile(r"^.*/(?:site-packages/|(?=nsa/|python3\.\d+/))")
_TRAINS = re.compile(r"nsa/(?:train|nn|ops|parallel)/")


class Case(NamedTuple):
    """A configuration to try. `is_given`: the configuration as given, apart from its number of steps."""

    name: str
    config: Config
    nproc: int
    is_given: bool = False

    def smaller(self, name: str, changes: dict[str, Any]) -> "Case":
        return self._replace(name=f"{self.name}, {name}", config=changed(self.config, changes))


@dataclass(frozen=True)
class Attempt:
    """The result of the environment guard or a trial, as plain values. `failure` is its kind, empty if it passed."""

    name: str
    failure: str
    reason: str
    seconds: float
    nproc: int = 1
    command: str = ""  # runs the trial again
    folder: str = ""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def __rich__(self) -> Text:
        """A row of the printed table."""
        row = Text(f"{self.name:<40} {self.nproc:>9}  ")
        row.append(f"{self.failure or 'ok':<20} ", "red" if self.failure else "green")
        return row.append(f"{self.seconds:7.1f} s" + (f"  {one_line(self.reason, 200)}" if self.failure else ""))


class Diagnosis:
    """Runs the trials of a configuration and collects the findings. Raises ConfigError or LaunchError if the ranks
    cannot share the batch evenly."""

    def __init__(
        self, config: Config, out: Path, progress: Progress, nproc: int | None, steps: int = 3, limit_s: float = 300.0
    ):
        gpus, parallel, precision = usable_gpus(config), config.parallel, config.runtime.precision
        self.config, self.out, self.progress, self.steps, self.limit_s = config, out, progress, steps, limit_s
        self.nproc = nproc or gpus or max(2, parallel.context)
        is_single = parallel.strategy == "auto" and parallel.context == 1 and not (nproc or gpus)
        self.given_nproc = 1 if is_single or parallel.strategy == "single" else self.nproc
        is_rounded = {precision, parallel.fsdp.param_dtype, parallel.fsdp.reduce_dtype} & {"bf16", "fp16"}
        is_auto_on_gpu = precision == "auto" and gpus > 0  # bf16
        self.tolerance = TOLERANCE_ROUNDED if is_rounded or is_auto_on_gpu else TOLERANCE_FP32
        self.cases = self._cases()
        self.machine = ProbeResult([])
        self.attempts: list[Attempt] = []
        self.smallest: Attempt | None = None  # the smallest attempt that failed; None if the system is healthy
        self.advice: list[str] = []

    def _cases(self) -> list[Case]:
        """Returns the trials in order, without the configuration as given if another trial equals it."""
        config, train, parallel, nproc = self.config, self.config.train, self.config.parallel, self.nproc
        groups = data_ranks(parallel.context, nproc)
        micro = max(1, train.batch_size // groups) if train.micro_batch == "auto" else train.micro_batch
        short = {
            "train.steps": self.steps,
            "train.micro_batch": micro_batch_size(config, data_ranks(parallel.context, self.given_nproc)),
            "train.eval_sequences": min(train.eval_sequences, groups * micro),
            "train.profile_steps": None,
            "parallel.strategy": choose_strategy(parallel.strategy, self.given_nproc),
            "parallel.allow_single_rank": True,
            "telemetry.tracker": "none",
        }
        shared = {**short, **SYNTHETIC, "train.batch_size": groups * micro, "train.micro_batch": micro}
        # Some trials refuse cuda_graphs=true.
        shared |= {"runtime.compile": False, "runtime.float8": "none", "runtime.cuda_graphs": "auto"}
        single = {
            **shared,
            "train.seq_len": train.seq_len // parallel.context,  # a whole sequence may not fit one process
            "parallel.context": 1,
            "parallel.strategy": "single",
            "parallel.ddp.static_graph": False,  # one process needs several passes for the batch
        }
        kept = config.runtime.gradient_checkpointing
        changes: dict[str, tuple[int, dict[str, Any]]] = {
            SINGLE: (1, {**single, "runtime.gradient_checkpointing": "none"}),
            CHECKPOINTING: (1, {**single, "runtime.gradient_checkpointing": "block" if kept == "none" else kept}),
            DDP: (nproc, {**shared, "parallel.strategy": "ddp"}),
            FSDP: (nproc, {**shared, "parallel.strategy": "fsdp"}),
            AS_GIVEN: (self.given_nproc, short),
        }
        cases = [Case(name, changed(config, change), count) for name, (count, change) in changes.items()]
        given = cases[-1].config, cases[-1].nproc
        cases = [case._replace(is_given=(case.config, case.nproc) == given) for case in cases]
        return cases[:-1] if sum(case.is_given for case in cases) > 1 else cases

    def run(self) -> None:
        shutil.rmtree(self.out / "trials", ignore_errors=True)  # from an earlier diagnosis
        self.progress.note(f"{'trial':<40} processes  {'outcome':<20} {'time':>9}")
        if not self._guard():
            return
        baselines: dict[int, Attempt] = {}  # by sequence length, the first trial that passed
        for case in self.cases:
            length = case.config.train.seq_len
            attempt = self._try(case, self.limit_s, None if case.name == AS_GIVEN else baselines.get(length))
            if not attempt.failure:
                baselines.setdefault(length, attempt)
            elif attempt.failure != OUT_OF_MEMORY or case.is_given:  # the other trials may need more memory
                self.smallest = attempt
                self.advice += [ADVICE[key] for key in (case.name, attempt.failure) if key in ADVICE]
                if attempt.failure != OTHER_NUMBERS:  # a smaller trial would have no baseline
                    self._narrow_down(case, attempt.failure)
                return

    def _guard(self) -> bool:
        """Checks the environment. Returns False if no trial can run."""
        self.progress.begin(f"environment (at most {self.limit_s:.0f} s)")
        began, ddp = time.monotonic(), next(case for case in self.cases if case.name == DDP)
        trial = Trial(ddp.config, self.out / "trials" / "environment", ddp.nproc, self.limit_s)
        self.machine = run_probe("machine", trial)
        failed, problem = self.machine.failed, self.machine.problem
        failure = NOT_CHECKED if problem else f"{len(failed)} of {len(self.machine.findings)} wrong" if failed else ""
        reason = problem or "; ".join(map(describe, failed))
        guard = self._end(Attempt("environment", failure, reason, time.monotonic() - began))
        self.smallest = guard if failure else None
        self.advice += [f"{finding['what']}: {finding['advice']}" for finding in failed]
        return not problem and not REQUIRED & {finding["what"] for finding in failed}

    def _narrow_down(self, case: Case, kind: str) -> None:
        """Tries one branch at a time, then fewer layers. Keeps the smallest configuration with the same failure."""
        passed = [attempt.seconds for attempt in self.attempts[1:] if not attempt.failure]
        limit_s = min(self.limit_s, max(MIN_LIMIT_S, LIMIT_FACTOR * max(passed, default=math.inf)))
        for layer in attention_kinds(case.config):
            alone = {name: case.smaller(f"{name} alone", part) for name, part in layer.parts(case.config).items()}
            tried = {name: self._try(smaller, limit_s) for name, smaller in alone.items()}
            failing = [name for name, attempt in tried.items() if attempt.failure == kind]
            if failing:
                case, self.smallest = alone[failing[0]], tried[failing[0]]
            if alone and not any(attempt.failure for attempt in tried.values()):
                self.advice.append("Each branch alone passes: look at the gates and at runtime.kernels.mix.")
            elif alone and not failing:
                other = "; ".join(f"{name}: {attempt.failure or 'passes'}" for name, attempt in tried.items())
                self.advice.append(f"No branch alone fails in this way: {other}.")
            elif len(failing) < len(alone):
                self.advice.append(f"Branches that fail alone: {', '.join(failing)}. Their operators are at fault.")
        whole = case
        while (layers := case.config.model.n_layers) > 1:
            fewer = {"model.n_layers": layers // 2, "train.init_from": None}  # saved weights have another depth
            case = whole.smaller(f"{layers // 2} of {self.config.model.n_layers} layers", fewer)
            attempt = self._try(case, limit_s)
            if attempt.failure != kind:
                other = f"fails in another way with {layers // 2}: {attempt.failure}"
                passes = f"passes with {layers // 2}: look at memory, or at numbers that grow from layer to layer"
                self.advice.append(f"It fails with {layers} layers and {other if attempt.failure else passes}.")
                return
            self.smallest = attempt

    def _try(self, case: Case, limit_s: float, against: Attempt | None = None) -> Attempt:
        """Runs the case as a trial. Losses or gradient norms that differ from `against` are a failure too."""
        self.progress.begin(f"{case.name} (at most {limit_s:.0f} s)")
        telemetry, slug = case.config.telemetry, re.sub(r"\W+", "-", case.name)
        timeouts = {  # the watchdog must find a hang within the limit, and before a collective times out
            "parallel.timeout_s": max(case.config.parallel.timeout_s, limit_s),
            "telemetry.watchdog_first_step_s": min(telemetry.watchdog_first_step_s, limit_s / 2),
            "telemetry.watchdog_floor_s": min(telemetry.watchdog_floor_s, limit_s / 4),
        }
        folder = self.out / "trials" / f"{len(self.attempts):02d}-{slug}"
        folder.mkdir(parents=True, exist_ok=True)
        trial = Trial(changed(case.config, timeouts), folder, case.nproc, limit_s)
        outcome = run_trial(trial, self.progress.update)
        remove_weights(folder, keep_nonfinite=False)
        rows = outcome.view.training if outcome.view else None
        losses, norms = (rows.column(name).tolist() if rows else [] for name in ("loss", "grad_norm"))
        failure, reason = "", outcome.reason
        if not outcome.passed:
            failure = KINDS.get(outcome.exit_code, f"crash (exit code {outcome.exit_code})")
        elif against is not None and (reason := first_difference(losses, norms, against, self.tolerance)):
            failure = OTHER_NUMBERS
        command = format_command(trial.config_file, case.nproc, (f"train.out_dir={self.out / 'again'}",))
        ended = Attempt(case.name, failure, reason, outcome.seconds, case.nproc, command, str(folder), losses, norms)
        return self._end(ended)

    def _end(self, attempt: Attempt) -> Attempt:
        self.attempts.append(attempt)
        self.progress.note(attempt)
        return attempt

    @property
    def stacks(self) -> list[dict[str, Any]]:
        """The newest frames of each training thread of each rank, from the smallest trial that failed."""
        found, folder = [], self.smallest.folder if self.smallest else ""
        for rank, path in stack_dumps().find(Path(folder)).items() if folder else ():
            texts = _THREAD.split(read_regular(path).decode(errors="replace"))[1:]
            calls = [_FRAME.findall(text.partition("/nsa/cli/")[0]) for text in texts]  # up to the command
            threads = [[f"{_LONG_PATH.sub('', file)}:{line} {name}" for file, line, name in each] for each in calls]
            training = [frames[:MAX_FRAMES] for frames in threads if any(map(_TRAINS.match, frames))]
            found.append({"rank": rank, "file": str(path), "threads": training})
        return found

    def verdict(self) -> Iterator[str]:
        """Yields the outcome as lines for the terminal."""
        failed, count = self.smallest, sum(bool(attempt.folder) for attempt in self.attempts)
        spent = f"{count} trials, {seconds(sum(attempt.seconds for attempt in self.attempts))}"
        if failed is None:
            yield f"healthy: {spent}. `nsa ready` also checks the kernels, the data and resuming."
            return
        what = "The smallest configuration that fails: " if failed.folder else ""
        yield f"broken ({spent}). {what}{failed.name}: {failed.failure}"
        yield f"  {one_line(failed.reason, 600)}"
        if failed.command:
            yield from (f"to run it again: {failed.command}", f"its output: {failed.folder}.log")
            lines = [] if self.stacks else last_lines(Path(f"{failed.folder}.log"), LOG_LINES)
            yield from (f"  {line}" for line in lines)
        for stack in self.stacks:
            yield f"rank {stack['rank']}, newest call first ({stack['file']}):"
            yield from (f"  {frame}" for thread in stack["threads"] for frame in thread)
        if self.advice:
            yield from ("what to do:", *(f"- {line}" for line in self.advice))

    def write(self) -> Path:
        """Writes all findings as JSON and returns the path."""
        found = {
            "schema": SCHEMA,
            "nsa": __version__,
            "time": time.time(),
            "config": self.config.to_dict(),
            "healthy": self.smallest is None,
            "environment": asdict(self.machine),
            "trials": [asdict(attempt) for attempt in self.attempts],
            "smallest": self.smallest and asdict(self.smallest),
            "stacks": self.stacks,
            "advice": self.advice,
        }
        write_files(self.out, {JSON_FILE: json.dumps(plain(found), indent=2, allow_nan=False) + "\n"})
        return self.out / JSON_FILE


def first_difference(losses: list[float], norms: list[float], against: Attempt, tolerance: float) -> str:
    """Describes where losses or gradient norms first differ from those of another trial; empty if they agree."""
    rows = zip(losses, against.losses, norms, against.grad_norms, strict=False)
    for step, (loss, other_loss, norm, other_norm) in enumerate(rows, start=1):
        for what, mine, other in (("loss", loss, other_loss), ("gradient norm", norm, other_norm)):
            both_skipped = not (math.isfinite(mine) or math.isfinite(other))  # fp16 skips a step without a norm
            if not both_skipped and not math.isclose(mine, other, rel_tol=tolerance):
                return f"step {step}: {what} {mine:.8g}, in '{against.name}' {other:.8g}"
    return ""
