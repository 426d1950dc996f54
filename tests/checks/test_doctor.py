"""`nsa doctor` on systems that are broken on purpose: it names what is, and calls a sound one healthy."""

import io
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nsa.checks.doctor import OTHER_NUMBERS, Record, Watcher, admit, diagnose
from nsa.checks.doctor_report import write_page
from nsa.checks.doctor_search import AS_GIVEN, OPERATORS, Case, Space, search
from nsa.checks.probe import Probed
from nsa.checks.trials import Outcome
from nsa.cli.doctor import Screen
from nsa.config import load_config
from nsa.errors import ConfigError
from tests.distributed.launching import ROOT, environment, write_config

SABOTAGE = Path(__file__).parent / "sabotage"
ONE_LAYER = {"n_layers": 1}
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Examined:
    code: int
    told: dict
    page: str
    said: str

    @property
    def guilty(self):
        return {guilty["text"] for guilty in self.told["guilty"]}


def examine(tmp_path, *arguments, sabotage="", env=(), **sections) -> Examined:
    """`nsa doctor` as a user starts it, in a system that is sabotaged."""
    config = write_config(
        tmp_path,
        train={"seq_len": 32, "batch_size": 2, **sections.pop("train", {})},
        telemetry={"tensorboard": False, "watchdog_first_step_s": 8.0, "watchdog_floor_s": 4.0},
        checkpoint={"every": 0},
        **sections,
    )
    out = tmp_path / "doctor"
    path = os.pathsep.join([str(SABOTAGE), str(ROOT)]) if sabotage else str(ROOT)
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "nsa", "doctor", config, "--out", str(out), "--limit", "240", *arguments],
        env=environment(PYTHONPATH=path, SABOTAGE=sabotage, **dict(env)),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    print(f"{ended.stdout}{ended.stderr}{time.monotonic() - began:.1f} s in all")
    assert (out / "doctor.json").exists(), ended.stderr
    told = json.loads((out / "doctor.json").read_text())
    assert told["schema"] == 1
    return Examined(ended.returncode, told, (out / "doctor.md").read_text(), ended.stdout)


def test_a_sound_system_is_called_healthy(tmp_path):
    found = examine(tmp_path)
    assert found.code == 0
    assert found.told["healthy"]
    assert not found.guilty
    trials = ["environment", "kernels", "single process", "checkpointing (block)", "ddp x 2", "fsdp x 2"]
    assert [trial["name"] for trial in found.told["trials"]] == [*trials, "the configuration as given"]
    assert {trial["outcome"] for trial in found.told["trials"]} == {"ok"}
    assert found.page.startswith("# nsa doctor: healthy")
    assert "healthy: 5 trials" in found.said


def test_checkpointing_that_fails_in_backward_is_named(tmp_path):
    found = examine(tmp_path, sabotage="recompute_raises", train={"seq_len": 16})
    assert found.code == 1
    assert found.guilty == {"checkpointing (block)"}
    assert found.told["failure"]["kind"] == "crash (exit code 1)"
    smallest = found.told["smallest"]["factors"]
    assert (smallest["layers"], smallest["strategy"], smallest["checkpointing"]) == (1, "single", "block")
    assert "runtime.gradient_checkpointing=block" in found.told["smallest"]["command"]
    assert "guilty: checkpointing (block)" in found.page.splitlines()[2]
    assert "RuntimeError: sabotage: the recomputed forward pass" in found.page
    assert "in step 1 after" in found.page, "the trace is explained"


def test_a_branch_that_fails_is_named(tmp_path):
    found = examine(tmp_path, sabotage="win_raises", model=ONE_LAYER, train={"seq_len": 16})
    assert found.code == 1
    assert found.guilty == {"branch win"}
    outcomes = {trial["name"]: trial["outcome"] for trial in found.told["trials"]}
    assert outcomes["branch cmp alone"] == outcomes["branch sel alone"] == "ok"
    smallest = found.told["smallest"]["factors"]
    assert (smallest["branch"], smallest["layers"], smallest["tokens"]) == ("win", 1, 16)
    assert "nsa.force_branch=win" in found.told["smallest"]["command"]
    assert "RuntimeError: sabotage: window attention" in found.page


def test_a_strategy_that_hangs_on_one_rank_is_named_with_stacks_of_both(tmp_path):
    found = examine(
        tmp_path, sabotage="fsdp_hangs", model=ONE_LAYER, train={"seq_len": 16}, nsa={"force_branch": "win"}
    )
    assert found.code == 1
    assert found.guilty == {"strategy fsdp"}
    assert found.told["failure"]["kind"] == "hang"
    assert found.told["smallest"]["reproduced"]
    ranks = {stack["rank"]: "\n".join(stack["frames"]) for stack in found.told["evidence"]["stacks"]}
    assert set(ranks) == {0, 1}
    assert "sitecustomize.py" in ranks[1], "the line at which rank 1 hangs"
    assert "fsdp" in ranks[0], "rank 0 waits in FSDP"
    assert all("nsa/train/step.py" in frames for frames in ranks.values())
    for words in ("Rank 0, main thread", "Rank 1, main thread", "BEHIND THE OTHERS", "Where each rank stood"):
        assert words in " ".join(found.page.split()), words
    assert "torchrun --standalone --nproc-per-node 2 -m nsa train" in found.page
    assert "The configuration as given does not use it." in found.page


def test_a_kernel_with_a_wrong_gradient_is_named(tmp_path):
    found = examine(
        tmp_path,
        *("--nproc", "1", "--steps", "1"),
        sabotage="sel_gradient_wrong",
        env={"TRITON_INTERPRET": "1"},
        model=ONE_LAYER,
        train={"batch_size": 1},
    )
    assert found.code == 1
    assert found.guilty == {"kernel sel (triton)"}
    wrong = [check for check in found.told["kernels"]["checks"] if not check["ok"]]
    assert [(check["operator"], check["part"]) for check in wrong] == [("sel", "gradient of k")]
    assert "sel: the reference agrees with finite differences: the fault is in the kernel" in found.page
    assert "runtime.kernels.sel=reference" in found.page
    assert found.told["evidence"]["outcome"] == OTHER_NUMBERS, "and training shows it"


# The tree, on processes that are only played.

SOUND = Probed([{"what": "device", "ok": True, "found": "CPU", "advice": ""}])
KERNELS = Probed([{"operator": "sel", "part": "output", "backend": "reference", "error": 0.0, "limit": 1, "ok": True}])


def play(tmp_path, behave, machine=SOUND, **sections):
    """A diagnosis where `behave(config)` says each trial's exit code and first loss."""
    config = write_config(tmp_path, train={"batch_size": 4, "seq_len": 64, **sections.pop("train", {})}, **sections)

    def run(trial, watch):
        code, loss = behave(trial.config)
        trial.folder.mkdir(parents=True)
        rows = [f"{step},{loss},1.0" for step in range(1, trial.config.train.steps + 1)]
        (trial.folder / "training.csv").write_text("\n".join(["step,loss,grad_norm", *rows, ""]))
        trial.log_file.write_text("RuntimeError: played\n" if code else "")
        return Outcome(trial, code, False, 1.0, f"exit code {code}: played" if code else "")

    def probe(kind, *_):
        return machine if kind == "machine" else KERNELS

    patient = admit(Path(config), [], tmp_path / "doctor", 2, 3, 300.0)
    found = diagnose(patient, Watcher(), run, probe)
    page = write_page(found).read_text()
    told = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    return found, told, page


def test_ddp_with_checkpointing_names_both(tmp_path):
    def behave(config):
        both = config.parallel.strategy == "ddp" and config.runtime.gradient_checkpointing != "none"
        return (1 if both else 0), 5.0

    _, told, page = play(tmp_path, behave, runtime={"device": "cpu", "gradient_checkpointing": "branch"})
    assert [guilty["text"] for guilty in told["guilty"]] == ["strategy ddp", "checkpointing (branch)"]
    assert "parallel.ddp.safe_mode=true" in page
    assert "runtime.gradient_checkpointing=block" in page, "the other granularity is worth a try"
    assert told["smallest"]["factors"]["layers"] == 1
    assert told["smallest"]["factors"]["tokens"] == 16


def test_the_command_for_the_smallest_case_leads_to_its_very_configuration(tmp_path):
    def behave(config):
        return (1 if config.parallel.strategy == "fsdp" and config.train.seq_len > 32 else 0), 5.0

    found, told, _ = play(tmp_path, behave)
    assert [guilty["text"] for guilty in told["guilty"]] == [
        "strategy fsdp",
        "sequence length: fails with 64, not with 32",
    ]
    words = shlex.split(told["smallest"]["command"])
    at = words.index("train")
    typed = load_config(words[at + 1], words[at + 2 :]).to_dict()
    meant = found.patient.tree(found.smallest)
    typed["train"]["out_dir"] = meant["train"]["out_dir"]
    assert typed == meant


def test_a_strategy_that_trains_with_other_numbers_is_named(tmp_path):
    def behave(config):
        return 0, 5.001 if config.parallel.strategy == "ddp" else 5.0

    _, told, page = play(tmp_path, behave)
    assert told["failure"]["kind"] == OTHER_NUMBERS
    assert [guilty["text"] for guilty in told["guilty"]] == ["strategy ddp"]
    assert told["evidence"]["numbers"][0] == {
        "step": 1, "loss": 5.001, "baseline_loss": 5.0, "grad_norm": 1.0, "baseline_grad_norm": 1.0
    }  # fmt: skip
    assert "step 1: loss 5.001" in page


def test_numbers_that_differ_by_rounding_are_the_same(tmp_path):
    found, _, _ = play(tmp_path, lambda config: (0, 5.0 + 1e-5 * (config.parallel.strategy == "ddp")))
    assert found.healthy


def test_data_that_cannot_be_read_is_named(tmp_path):
    def behave(config):
        return (3 if config.data.source != "synthetic" else 0), 5.0

    found, told, page = play(tmp_path, behave, data={"source": "text", "paths": ["notes.txt"]})
    assert [guilty["factor"] for guilty in told["guilty"]] == ["data"]
    assert found.failure.name == "the configuration as given"
    assert found.smallest.data == AS_GIVEN
    assert "nsa data verify" in page


def test_compiled_blocks_that_fail_are_named(tmp_path):
    _, told, _ = play(
        tmp_path,
        lambda config: (1 if config.runtime.compile else 0, 5.0),
        runtime={"device": "cpu", "compile": True},
    )
    assert [guilty["text"] for guilty in told["guilty"]] == ["torch.compile"]


def test_a_failure_that_does_not_come_again_is_said_to_be_so(tmp_path):
    def behave(config):
        return (1 if config.parallel.strategy == "fsdp" and not config.telemetry.trace_grads else 0), 5.0

    _, told, page = play(tmp_path, behave)
    assert told["smallest"]["reproduced"] is False
    assert "not reproducible every time" in page
    assert told["evidence"]["outcome"] == "crash (exit code 1)", "the evidence is of a run that failed"


def test_without_the_gpus_that_are_asked_for_nothing_is_tried(tmp_path):
    missing = Probed([{"what": "GPUs", "ok": False, "found": "0 visible", "advice": "check the driver"}])
    found, told, page = play(tmp_path, lambda config: (0, 5.0), machine=missing)
    assert [record.name for record in found.records] == ["environment"]
    assert [guilty["text"] for guilty in told["guilty"]] == ["environment: GPUs"]
    assert "check the driver" in page


def test_a_full_disk_is_named_and_the_trials_are_run_all_the_same(tmp_path):
    full = Probed([{"what": "disk", "ok": False, "found": "0.1 GiB free", "advice": "free some"}])
    found, told, _ = play(tmp_path, lambda config: (0, 5.0), machine=full)
    trials = ["single process", "checkpointing (block)", "ddp x 2", "fsdp x 2"]
    assert [record.name for record in found.records if record.case] == trials, "of which DDP is as given"
    assert [guilty["text"] for guilty in told["guilty"]] == ["environment: disk"]


def test_where_everything_fails_no_factor_is_named(tmp_path):
    found, told, page = play(tmp_path, lambda config: (1, 5.0))
    assert told["guilty"] == []
    assert found.smallest == Case(1, 16, branch="win")
    assert "No factor makes a difference" in page


def test_a_batch_that_the_ranks_cannot_share_is_a_mistake_in_the_configuration(tmp_path):
    config = write_config(tmp_path, train={"batch_size": 3}, parallel={"strategy": "ddp"})
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        admit(Path(config), [], tmp_path / "doctor", 2, 3, 300.0)


def shown(*, terminal: bool) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=terminal, color_system=None, soft_wrap=True)
    with Screen(console, steps=3) as screen:
        screen.begins("ddp x 2", 300.0)
        screen.stands(None, 4.0)
        time.sleep(0.3)  # a terminal is drawn anew several times a second
        screen.ended(Record("ddp x 2", "hang", "exit code 6: no [progress]", 12.0))
    return console.file.getvalue()


def test_a_terminal_shows_how_the_trial_stands_and_a_file_gets_a_line_when_it_ends():
    line = "ddp x 2                          hang                         12.0 s  exit code 6: no [progress]"
    assert shown(terminal=False) == f"{line}\n"
    assert line in shown(terminal=True)
    assert "ddp x 2: step 0 of 3, 4 of at most 300 s" in shown(terminal=True)


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
            and self.kernels <= set(OPERATORS[case.branch]) - set(case.slow)
            and (self.branch is None or case.branch in (None, self.branch))
            and case.layers >= self.layers
            and case.tokens >= self.tokens
        )

    def names(self, fewest_tokens: int) -> set:
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
        return named | ({"sequence length"} if self.tokens > fewest_tokens else set())


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
def test_the_search_names_exactly_what_a_fault_needs(fault, fewest_tokens):
    if fault.branch is not None and not fault.kernels <= set(OPERATORS[fault.branch]):
        fault = replace(fault, branch=None)  # a kernel that its branch never runs
    tried = []

    def fails(name, case):
        tried.append(case)
        return fault.strikes(case)

    smallest, guilty = search(START, Space(OPERATORS[None], True, fewest_tokens), fails)
    named = {f"{g.factor} {g.value}" if g.factor in ("kernel", "branch") else g.factor for g in guilty}
    assert named == fault.names(fewest_tokens)
    assert fault.strikes(smallest)
    assert len(tried) == len(set(tried)) <= 6 + 3 + 6 + 4 + 7


def test_a_search_without_kernels_and_branches_tries_neither():
    tried = []
    fault = Fault({"strategy": "fsdp"}, frozenset(), None, 1, 1)

    def fails(name, case):
        tried.append(name)
        return fault.strikes(case)

    search(Case(1, 16, "fsdp"), Space((), False, 16), fails)
    assert tried == ["without fsdp"]
