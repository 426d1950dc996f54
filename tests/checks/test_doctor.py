"""`nsa doctor` on systems that are broken on purpose: it names the cause, and calls a sound system healthy."""

import io
import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nsa.checks.doctor import OTHER_NUMBERS, Attempt, Diagnosis, load_setup
from nsa.checks.doctor_report import write_page
from nsa.checks.doctor_search import AS_GIVEN, OPERATORS, Case, search
from nsa.checks.probe import ProbeResult
from nsa.checks.progress import Progress
from nsa.checks.trials import Outcome
from nsa.config import load_config
from nsa.errors import ConfigError
from nsa.inspect.reading import read_run
from tests import warm
from tests.checks.helpers import trial_here
from tests.distributed.launching import ROOT, environment, wait_all, write_config
from tests.record.runs import event

SABOTAGE = Path(__file__).parent / "sabotage"
ONE_LAYER = {"n_layers": 1}
PROBES = ["environment", "kernels"]
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Diagnosed:
    code: int
    found: dict
    page: str
    output: str

    @property
    def causes(self):
        return {cause["text"] for cause in self.found["causes"]}


def run_doctor(tmp_path, *arguments, sabotage="", env=(), **sections) -> Diagnosed:
    """`nsa doctor` as a user starts it, in a sabotaged system."""
    config = write_config(
        tmp_path,
        train={"seq_len": 32, "batch_size": 2, **sections.pop("train", {})},
        telemetry={
            "tensorboard": False,
            "watchdog_first_step_s": 8.0,
            "watchdog_floor_s": 4.0,
            **sections.pop("telemetry", {}),
        },
        checkpoint={"every": 0},
        **sections,
    )
    out = tmp_path / "doctor"
    path = os.pathsep.join([str(SABOTAGE), str(ROOT)]) if sabotage else str(ROOT)
    known = environment(PYTHONPATH=path, SABOTAGE=sabotage, **dict(env))
    command = ("nsa", "doctor", config, "--out", str(out), "--limit", "240", *arguments)
    [ended] = wait_all([warm.start(*command, env=known)], 840)
    print(ended.output)
    assert (out / "doctor.json").exists(), ended.output
    found = json.loads((out / "doctor.json").read_text())
    assert found["schema"] == 2
    return Diagnosed(ended.code, found, (out / "doctor.md").read_text(), ended.output)


def test_a_reference_with_a_wrong_gradient_is_named(tmp_path):
    found = run_doctor(tmp_path, sabotage="reference_gradient_wrong", model=ONE_LAYER)
    assert found.code == 1
    assert found.causes == {"kernel sel (reference)"}
    wrong = [check for check in found.found["kernels"]["findings"] if not check["ok"]]
    assert [(check["operator"], check["part"]) for check in wrong] == [("sel", "gradient of k by differences")]
    assert [trial["name"] for trial in found.found["trials"]] == [*PROBES, "sel (reference) in training"]
    assert "sel: the reference contradicts finite differences." in found.page
    assert "cause: kernel sel (reference)" in found.page.splitlines()[2]


@pytest.mark.long
def test_a_sound_system_is_called_healthy(tmp_path):
    found = run_doctor(tmp_path)
    assert found.code == 0
    assert found.found["healthy"]
    assert not found.causes
    trials = [*PROBES, "single process", "checkpointing (block)", "ddp x 2", "fsdp x 2", "the configuration as given"]
    assert [trial["name"] for trial in found.found["trials"]] == trials
    assert {trial["failure"] for trial in found.found["trials"]} == {""}
    assert found.page.startswith("# nsa doctor: healthy")
    assert "healthy: 5 trials" in found.output


@pytest.mark.long
def test_checkpointing_that_fails_in_backward_is_named(tmp_path):
    found = run_doctor(tmp_path, sabotage="recompute_raises", train={"seq_len": 16})
    assert found.code == 1
    assert found.causes == {"checkpointing (block)"}
    assert found.found["failure"]["failure"] == "crash (exit code 1)"
    smallest = found.found["smallest"]["factors"]
    assert (smallest["layers"], smallest["strategy"], smallest["checkpointing"]) == (1, "single", "block")
    assert "runtime.gradient_checkpointing=block" in found.found["smallest"]["command"]
    assert "cause: checkpointing (block)" in found.page.splitlines()[2]
    assert "RuntimeError: sabotage: the recomputed forward pass" in found.page
    assert "in step 1 after" in found.page, "the trace is explained"


@pytest.mark.long
def test_a_branch_that_fails_is_named_by_the_command(tmp_path):
    found = run_doctor(tmp_path, sabotage="win_raises", model=ONE_LAYER, train={"seq_len": 16})
    assert found.code == 1
    assert found.causes == {"branch win"}
    outcomes = {trial["name"]: trial["failure"] for trial in found.found["trials"]}
    assert outcomes["branch cmp alone"] == outcomes["branch sel alone"] == ""
    smallest = found.found["smallest"]["factors"]
    assert (smallest["branch"], smallest["layers"], smallest["tokens"]) == ("win", 1, 16)
    assert "nsa.force_branch=win" in found.found["smallest"]["command"]
    assert "RuntimeError: sabotage: window attention" in found.page


@pytest.mark.long
def test_a_strategy_that_hangs_on_one_rank_is_named_with_stacks_of_both(tmp_path):
    found = run_doctor(
        tmp_path, sabotage="fsdp_hangs", model=ONE_LAYER, train={"seq_len": 16}, nsa={"force_branch": "win"}
    )
    assert found.code == 1
    assert found.causes == {"strategy fsdp"}
    assert found.found["failure"]["failure"] == "hang"
    assert found.found["smallest"]["reproduced"]
    ranks = {stack["rank"]: "\n".join(stack["frames"]) for stack in found.found["evidence"]["stacks"]}
    assert set(ranks) == {0, 1}
    assert "sitecustomize.py" in ranks[1], "the line at which rank 1 hangs"
    assert "fsdp" in ranks[0], "rank 0 waits in FSDP"
    assert all("nsa/train/step.py" in frames for frames in ranks.values())
    hung = found.found["evidence"]["hangs"]
    assert {(hang["rank"], hang["step"]) for hang in hung} >= {(1, 1)}
    for words in ("Rank 0, main thread", "Rank 1, main thread", "BEHIND THE OTHERS", "Where each rank stood"):
        assert words in " ".join(found.page.split()), words
    assert "torchrun --standalone --nproc-per-node 2 -m nsa train" in found.page
    assert "The configuration as given does not use it." in found.page


@pytest.mark.long
def test_a_kernel_with_a_wrong_gradient_is_named(tmp_path):
    found = run_doctor(
        tmp_path,
        *("--nproc", "1", "--steps", "1"),
        sabotage="sel_gradient_wrong",
        env={"TRITON_INTERPRET": "1"},
        model=ONE_LAYER,
        train={"batch_size": 1},
        telemetry={"watchdog_first_step_s": 60.0},  # interpreted kernels take seconds
    )
    assert found.code == 1
    assert found.causes == {"kernel sel (triton)"}
    wrong = [check for check in found.found["kernels"]["findings"] if not check["ok"]]
    assert [(check["operator"], check["part"]) for check in wrong] == [("sel", "gradient of k")]
    assert "sel: the reference agrees with finite differences: the fault is in the kernel" in found.page
    assert "runtime.kernels.sel=reference" in found.page
    assert found.found["evidence"]["failure"] == OTHER_NUMBERS, "and training shows it"


# The decision tree, with trials and probes that are faked.

SOUND = ProbeResult([{"what": "device", "ok": True, "found": "CPU", "advice": ""}])
CHECK = {"operator": "sel", "part": "output", "backend": "reference", "error": 0.0, "limit": 1.0, "ok": True}
KERNELS = ProbeResult([CHECK])


def diagnose(tmp_path, behave, machine=SOUND, kernels=KERNELS, leave=lambda folder: None, **sections):
    """A diagnosis where `behave(config)` gives each trial's exit code and first loss, and `leave` writes its files; or
    where `behave` is None, with real runs in this process."""
    config = write_config(tmp_path, train={"batch_size": 4, "seq_len": 64, **sections.pop("train", {})}, **sections)

    def run(trial, on_progress):
        code, loss = behave(trial.config)
        rows = [f"{step},{loss},1.0" for step in range(1, trial.config.train.steps + 1)]
        (trial.folder / "training.csv").write_text("\n".join(["step,loss,grad_norm", *rows, ""]))
        trial.log_file.write_text("RuntimeError: faked\n" if code else "")
        leave(trial.folder)
        reason = f"exit code {code}: faked" if code else ""
        return Outcome(trial, code, False, 1.0, reason, read_run(trial.folder))

    def probe(kind, trial):
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        return machine if kind == "machine" else kernels

    setup = load_setup(Path(config), [], tmp_path / "doctor", 2, 3, 300.0)
    diagnosis = Diagnosis(setup, Progress(Console(quiet=True)))
    with patch.multiple("nsa.checks.doctor", run_trial=run if behave else trial_here, run_probe=probe):
        diagnosis.run()
    page = write_page(diagnosis).read_text()
    return diagnosis, json.loads((tmp_path / "doctor" / "doctor.json").read_text()), page


def causes(found: dict) -> list[str]:
    return [cause["text"] for cause in found["causes"]]


def test_a_branch_that_fails_is_named(tmp_path, monkeypatch):
    def window_attention(*args, **options):
        raise RuntimeError("sabotage: window attention")

    monkeypatch.setattr("nsa.ops.library.window_attention", window_attention)
    _, found, page = diagnose(tmp_path, None, model=ONE_LAYER, train={"seq_len": 16}, checkpoint={"every": 0})
    assert causes(found) == ["branch win"]
    outcomes = {trial["name"]: trial["failure"] for trial in found["trials"]}
    assert outcomes["branch cmp alone"] == outcomes["branch sel alone"] == ""
    assert outcomes["branch win alone"] == outcomes["the smallest case, traced"] == "crash (exit code 1)"
    smallest = found["smallest"]["factors"]
    assert (smallest["branch"], smallest["layers"], smallest["tokens"]) == ("win", 1, 16)
    assert "nsa.force_branch=win" in found["smallest"]["command"]
    assert "sabotage: window attention" in page


STACKS = """
Thread 0x00007f01 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 820 in _engine_run_backward
  File "/home/me/nsa/train/step.py", line 63 in train_step
  File "/home/me/nsa/cli/train.py", line 9 in train
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_hang_is_shown_with_its_events_and_stacks(tmp_path):
    ranks = [{"rank": r, "step": 2, "event": "step", "age_s": 4.5, "pid": 7, "host": "h", "state": s} for r, s in
             enumerate(("running", "sleeping"))]  # fmt: skip
    hang = {"phase": "backward", "silent_s": 4.5, "limit_s": 4.0, "file": "x", "ranks": ranks, "reported_by": "thread"}

    def leave(folder):
        for rank in (0, 1):
            events = event("boot", 0, rank) + event("hang", 2, rank, **hang)
            (folder / f"heartbeat_rank{rank}.jsonl").write_text(events)
            (folder / f"stackdump_20260101T000000_rank{rank}.txt").write_text(STACKS)

    def behave(config):
        return (6 if config.parallel.strategy == "fsdp" else 0), 5.0

    _, found, page = diagnose(tmp_path, behave, leave=leave)
    assert found["failure"]["failure"] == "hang"
    assert causes(found) == ["strategy fsdp"]
    evidence = found["evidence"]
    assert [(h["rank"], h["step"], h["phase"], h["silent_s"]) for h in evidence["hangs"]] == [
        (0, 2, "backward", 4.5), (1, 2, "backward", 4.5)
    ]  # fmt: skip
    assert evidence["stacks"][1]["rank"] == 1
    assert evidence["stacks"][1]["frames"] == [
        "torch/autograd/graph.py:820 _engine_run_backward", "nsa/train/step.py:63 train_step"
    ]  # fmt: skip
    assert "| 1 | 2 | backward | 4.5 | 4 | thread |" in page
    assert "| 1 | 2 | step | 4.5 | 7 | h | sleeping |" in page.split("### Where each rank stood")[1]
    assert "Rank 1, main thread, newest call first (stackdump_20260101T000000_rank1.txt)" in page
    assert "stackdump_*" in page.split("## What to do")[1]


def test_a_wrong_kernel_ends_the_diagnosis_with_training_on_it_and_on_the_reference(tmp_path):
    wrong = {**CHECK, "backend": "triton", "part": "gradient of k", "error": 2.0, "ok": False}
    slope = {**CHECK, "part": "gradient of k by differences"}
    diagnosis, found, page = diagnose(tmp_path, lambda config: (0, 5.0), kernels=ProbeResult([wrong, slope]))
    assert causes(found) == ["kernel sel (triton)"]
    trials = ["environment", "kernels", "sel on the reference", "sel (triton) in training"]
    assert [attempt.name for attempt in diagnosis.attempts] == trials
    assert "runtime.kernels.sel=reference" in page
    assert "sel: the reference agrees with finite differences: the fault is in the kernel." in page


def test_a_reference_that_finite_differences_contradict_is_named_itself(tmp_path):
    slope = {**CHECK, "part": "gradient of k by differences", "error": 2.0, "ok": False}
    _, found, page = diagnose(tmp_path, lambda config: (0, 5.0), kernels=ProbeResult([slope]))
    assert causes(found) == ["kernel sel (reference)"]
    assert "sel: the reference contradicts finite differences." in page


def test_ddp_with_checkpointing_names_both(tmp_path):
    def behave(config):
        both = config.parallel.strategy == "ddp" and config.runtime.gradient_checkpointing != "none"
        return (1 if both else 0), 5.0

    _, found, page = diagnose(tmp_path, behave, runtime={"device": "cpu", "gradient_checkpointing": "branch"})
    assert causes(found) == ["strategy ddp", "checkpointing (branch)"]
    assert "parallel.ddp.safe_mode=true" in page
    assert "runtime.gradient_checkpointing=block" in page, "the other granularity is worth a try"
    assert found["smallest"]["factors"]["layers"] == 1
    assert found["smallest"]["factors"]["tokens"] == 16


def test_the_command_for_the_smallest_case_leads_to_its_very_configuration(tmp_path):
    def behave(config):
        return (1 if config.parallel.strategy == "fsdp" and config.train.seq_len > 32 else 0), 5.0

    diagnosis, found, _ = diagnose(tmp_path, behave)
    assert causes(found) == [
        "strategy fsdp",
        "sequence length: fails with 64, not with 32",
    ]
    words = shlex.split(found["smallest"]["command"])
    at = words.index("train")
    typed = load_config(words[at + 1], words[at + 2 :]).to_dict()
    meant = diagnosis.setup.resolve(diagnosis.smallest, 300.0).to_dict()
    typed["train"]["out_dir"] = meant["train"]["out_dir"]
    assert typed == meant


def test_a_strategy_that_trains_with_other_numbers_is_named(tmp_path):
    def behave(config):
        return 0, 5.001 if config.parallel.strategy == "ddp" else 5.0

    _, found, page = diagnose(tmp_path, behave)
    assert found["failure"]["failure"] == OTHER_NUMBERS
    assert causes(found) == ["strategy ddp"]
    assert found["evidence"]["numbers"][0] == {
        "step": 1, "loss": 5.001, "baseline_loss": 5.0, "grad_norm": 1.0, "baseline_grad_norm": 1.0
    }  # fmt: skip
    assert "step 1: loss 5.001" in page


def test_numbers_that_differ_by_rounding_are_the_same(tmp_path):
    diagnosis, _, _ = diagnose(tmp_path, lambda config: (0, 5.0 + 1e-5 * (config.parallel.strategy == "ddp")))
    assert diagnosis.failure is None


def test_data_that_cannot_be_read_is_named(tmp_path):
    def behave(config):
        return (3 if config.data.source != "synthetic" else 0), 5.0

    diagnosis, found, page = diagnose(tmp_path, behave, data={"source": "text", "paths": ["notes.txt"]})
    assert [cause["factor"] for cause in found["causes"]] == ["data"]
    assert diagnosis.failure.name == "the configuration as given"
    assert diagnosis.smallest.data == AS_GIVEN
    assert "nsa data verify" in page


def test_compiled_blocks_that_fail_are_named(tmp_path):
    _, found, _ = diagnose(
        tmp_path,
        lambda config: (1 if config.runtime.compile else 0, 5.0),
        runtime={"device": "cpu", "compile": True},
    )
    assert causes(found) == ["torch.compile"]


def test_a_failure_that_does_not_come_again_is_said_to_be_so(tmp_path):
    def behave(config):
        return (1 if config.parallel.strategy == "fsdp" and not config.telemetry.trace_grads else 0), 5.0

    _, found, page = diagnose(tmp_path, behave)
    assert found["smallest"]["reproduced"] is False
    assert "not reproducible every time" in page
    assert found["evidence"]["failure"] == "crash (exit code 1)", "the evidence is of a run that failed"


def test_without_the_gpus_that_are_asked_for_nothing_is_tried(tmp_path):
    missing = ProbeResult([{"what": "GPUs", "ok": False, "found": "0 visible", "advice": "check the driver"}])
    diagnosis, found, page = diagnose(tmp_path, lambda config: (0, 5.0), machine=missing)
    assert [attempt.name for attempt in diagnosis.attempts] == ["environment"]
    assert causes(found) == ["environment: GPUs"]
    assert "check the driver" in page


def test_a_full_disk_is_named_and_the_trials_are_run_all_the_same(tmp_path):
    full = ProbeResult([{"what": "disk", "ok": False, "found": "0.1 GiB free", "advice": "free some"}])
    diagnosis, found, _ = diagnose(tmp_path, lambda config: (0, 5.0), machine=full)
    trials = ["single process", "checkpointing (block)", "ddp x 2", "fsdp x 2"]
    assert [attempt.name for attempt in diagnosis.attempts if attempt.case] == trials, "of which DDP is as given"
    assert causes(found) == ["environment: disk"]


def test_no_case_is_trained_twice_except_the_traced_one(tmp_path):
    diagnosis, _, _ = diagnose(tmp_path, lambda config: (1 if config.train.seq_len > 32 else 0, 5.0))
    cases = [attempt.case for attempt in diagnosis.attempts if attempt.case]
    assert len(cases) == len(set(cases)) + 1
    assert cases.count(diagnosis.smallest) == 2


def test_where_everything_fails_no_factor_is_named(tmp_path):
    diagnosis, found, page = diagnose(tmp_path, lambda config: (1, 5.0))
    assert found["causes"] == []
    assert diagnosis.smallest == Case(1, 16, branch="win")
    assert "No factor makes a difference" in page


def test_a_batch_that_the_ranks_cannot_share_is_a_mistake_in_the_configuration(tmp_path):
    config = write_config(tmp_path, train={"batch_size": 3}, parallel={"strategy": "ddp"})
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        load_setup(Path(config), [], tmp_path / "doctor", 2, 3, 300.0)


def shown(*, terminal: bool) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=terminal, color_system=None, soft_wrap=True)
    with Progress(console) as progress:
        progress.begin("ddp x 2 (at most 300 s)")
        progress.update(None, 4.0)
        progress.note(Attempt("ddp x 2", "hang", "exit code 6: no [progress]", 12.0))
    return console.file.getvalue()


def test_a_terminal_shows_the_state_of_a_trial_and_a_file_gets_a_line_when_it_begins_and_ends():
    line = "ddp x 2                          hang                         12.0 s  exit code 6: no [progress]"
    assert shown(terminal=False) == f"ddp x 2 (at most 300 s) ...\n{line}\n"
    assert line in shown(terminal=True)
    assert "ddp x 2 (at most 300 s): starting, 4.0 s" in shown(terminal=True)


# The search, for any fault.


@dataclass(frozen=True)
class Fault:
    """Fails where all that it needs is there."""

    factors: dict
    kernels: frozenset
    branch: str | None
    layers: int
    tokens: int

    def strikes(self, case: Case) -> bool:
        return (
            all(getattr(case, name) == value for name, value in self.factors.items())
            and self.kernels <= set(OPERATORS[case.branch]) - set(case.on_reference)
            and (self.branch is None or case.branch in (None, self.branch))
            and case.layers >= self.layers
            and case.tokens >= self.tokens
        )

    def names(self, min_tokens: int) -> set:
        alone = {
            name
            for name in ("cmp", "sel", "win")
            if self.branch in (None, name) and self.kernels <= set(OPERATORS[name])
        }
        named = {("compile" if name == "compiled" else name) for name in self.factors}
        named |= {f"kernel {name}" for name in self.kernels}
        if not alone:
            named.add("branch mixture")
        elif alone in ({"cmp"}, {"cmp", "sel"}):  # selection needs the scores of cmp
            named.add("branch cmp")
        elif len(alone) == 1:
            named.add(f"branch {alone.pop()}")
        named |= {"layers"} if self.layers > 1 else set()
        return named | ({"sequence length"} if self.tokens > min_tokens else set())


START = Case(12, 2048, "fsdp", "block", True, data=AS_GIVEN, batch=AS_GIVEN)  # everything that can be configured is
FACTORS = {"strategy": "fsdp", "checkpointing": "block", "compiled": True, "data": AS_GIVEN, "batch": AS_GIVEN}
faults = st.builds(
    Fault,
    st.sets(st.sampled_from(sorted(FACTORS))).map(lambda names: {name: FACTORS[name] for name in names}),
    st.frozensets(st.sampled_from(OPERATORS[None]), max_size=2),
    st.sampled_from([None, "cmp", "sel", "win"]),
    st.integers(1, 12),
    st.integers(1, 2048),
)


@given(faults, st.sampled_from([16, 64]))
def test_the_search_names_exactly_what_a_fault_needs(fault, min_tokens):
    if fault.branch is not None and not fault.kernels <= set(OPERATORS[fault.branch]):
        fault = replace(fault, branch=None)  # a kernel that its branch never runs
    tried = []

    def fails(name, case):
        tried.append(case)
        return fault.strikes(case)

    smallest, found = search(START, fails, fast=OPERATORS[None], branches=True, min_tokens=min_tokens)
    named = {f"{g.factor} {g.value}" if g.factor in ("kernel", "branch") else g.factor for g in found}
    assert named == fault.names(min_tokens)
    assert fault.strikes(smallest)
    assert len(set(tried)) <= 6 + 3 + 6 + 4 + 7  # a diagnosis runs no case twice


def test_a_search_without_kernels_and_branches_tries_neither():
    tried = []
    fault = Fault({"strategy": "fsdp"}, frozenset(), None, 1, 1)

    def fails(name, case):
        tried.append(name)
        return fault.strikes(case)

    search(Case(1, 16, "fsdp"), fails, fast=(), branches=False, min_tokens=16)
    assert tried == ["without fsdp"]


def test_muon_is_examined_without_the_strategy_that_it_cannot_use(tmp_path):
    diagnosis, found, _ = diagnose(tmp_path, lambda config: (0, 2.0), train={"optimizer": "muon"})
    assert found["healthy"]
    assert "ddp x 2" in [attempt.name for attempt in diagnosis.attempts]
    assert not any("fsdp" in attempt.name for attempt in diagnosis.attempts)
