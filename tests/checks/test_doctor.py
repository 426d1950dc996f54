"""`nsa doctor` on systems that are broken on purpose: it names the smallest configuration that fails, its stacks and
what to do, and calls a sound system healthy."""

import io
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from rich.console import Console

from nsa.checks.diagnose import OTHER_NUMBERS, Attempt, Diagnosis
from nsa.checks.probe import ProbeResult
from nsa.checks.progress import Progress
from nsa.checks.trials import outcome_of
from nsa.config import load_config
from nsa.errors import ConfigError
from nsa.inspect.reading import read_run
from tests import warm
from tests.checks.helpers import trial_here
from tests.distributed.launching import ROOT, environment, wait_all, write_config

SABOTAGE = Path(__file__).parent / "sabotage"
ONE_LAYER = {"n_layers": 1}
TREE = ["environment", "single process", "checkpointing", "ddp", "fsdp"]
ALONE = ["cmp alone", "sel alone", "win alone"]
SOUND = ProbeResult([{"what": "device", "ok": True, "found": "CPU", "advice": ""}])
TEXT = {"source": "text", "paths": ["notes.txt"]}
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Diagnosed:
    found: dict  # doctor.json
    output: str
    code: int = 0
    trials: tuple = ()  # as they were started

    @property
    def names(self) -> list[str]:
        return [trial["name"] for trial in self.found["trials"]]

    @property
    def outcomes(self) -> dict[str, str]:
        return {trial["name"]: trial["failure"] or "ok" for trial in self.found["trials"]}

    @property
    def smallest(self) -> str:
        return self.found["smallest"]["name"]

    @property
    def advice(self) -> str:
        return "\n".join(self.found["advice"])


def diagnose(tmp_path, behave, machine=SOUND, leave=lambda folder: None, **sections) -> Diagnosed:
    """A diagnosis in which `behave(config)` gives the exit code and the loss of each trial, and `leave` writes files
    into its folder; or, where `behave` is None, with real runs in this process."""
    path = write_config(tmp_path, train={"batch_size": 4, "seq_len": 64, **sections.pop("train", {})}, **sections)
    started = []

    def run(trial, on_progress):
        started.append(trial)
        if behave is None:
            return trial_here(trial, on_progress)
        code, loss = behave(trial.config)
        rows = [f"{step},{loss},1.0" for step in range(1, trial.config.train.steps + 1)]
        (trial.folder / "training.csv").write_text("\n".join(["step,loss,grad_norm", *rows, ""]))
        (trial.folder / "metrics.json").write_text(json.dumps({"status": "failed" if code else "done"}))
        trial.log_file.write_text("RuntimeError: faked\n" if code else "")
        leave(trial.folder)
        return outcome_of(trial, read_run(trial.folder), code, 1.0)

    def probe(kind, trial):
        assert kind == "machine"
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        return machine

    config = load_config(path)
    diagnosis = Diagnosis(config, tmp_path / "doctor", Progress(Console(quiet=True)), nproc=2)
    with patch.multiple("nsa.checks.diagnose", run_trial=run, run_probe=probe):
        diagnosis.run()
    found = json.loads(diagnosis.write().read_text())
    assert found["schema"] == 3
    return Diagnosed(found, "\n".join(diagnosis.verdict()), int(diagnosis.smallest is not None), tuple(started))


def fails(condition, code=1):
    return lambda config: (code if condition(config) else 0, 5.0)


def test_a_sound_system_is_healthy_after_the_trials_in_their_fixed_order(tmp_path):
    found = diagnose(tmp_path, fails(lambda config: False), data=TEXT)
    assert found.names == [*TREE, "as given"]
    assert found.found["healthy"]
    assert found.output.startswith("healthy: 5 trials, ")
    runs = [
        (t.nproc, t.config.parallel.strategy, t.config.runtime.gradient_checkpointing, t.config.data.source)
        for t in found.trials
    ]
    assert runs == [
        (1, "single", "none", "synthetic"),
        (1, "single", "block", "synthetic"),
        (2, "ddp", "none", "synthetic"),
        (2, "fsdp", "none", "synthetic"),
        (2, "ddp", "none", "text"),
    ]
    assert all(trial.config.train.steps == 3 for trial in found.trials)


def test_a_configuration_that_equals_a_trial_runs_once(tmp_path):
    assert diagnose(tmp_path, fails(lambda config: False)).names == TREE


def test_a_branch_that_fails_is_named(tmp_path, monkeypatch):
    def window_attention(*args, **options):
        raise RuntimeError("sabotage: window attention")

    monkeypatch.setattr("nsa.ops.reference.windowed.forward", window_attention)
    found = diagnose(tmp_path, None, model=ONE_LAYER, train={"seq_len": 16}, checkpoint={"every": 0})
    assert found.names == [*TREE[:2], *(f"single process, {name}" for name in ALONE)]
    crash = "crash (exit code 1)"
    assert list(found.outcomes.values()) == ["ok", crash, "ok", "ok", crash]
    assert found.smallest == "single process, win alone"
    assert "sabotage: window attention" in found.found["smallest"]["reason"]
    assert "Branches that fail alone: win. Their operators are at fault." in found.output
    assert found.code == 1


@pytest.mark.parametrize(
    ("branches", "smallest", "advice"),
    [
        ((), "ddp", "Each branch alone passes"),
        (("cmp", "sel"), "ddp, cmp alone", "Branches that fail alone: cmp, sel."),
        (("cmp", "sel", "win"), "ddp, cmp alone", ""),
    ],
)
def test_branches_run_one_at_a_time(tmp_path, branches, smallest, advice):
    def is_broken(config):
        return config.parallel.strategy == "ddp" and config.nsa.force_branch in (None, *branches)

    found = diagnose(tmp_path, fails(is_broken), model=ONE_LAYER)
    assert found.names == [*TREE[:4], *(f"ddp, {name}" for name in ALONE)]
    assert found.smallest == smallest
    assert "parallel.ddp.safe_mode=true" in found.advice
    assert advice in found.advice
    assert ("alone" in found.advice) == bool(advice)


def test_layers_are_halved_for_as_long_as_it_fails(tmp_path):
    deep = fails(lambda config: config.model.n_layers > 2)
    found = diagnose(tmp_path, deep, model={"n_layers": 12}, train={"init_from": "weights.safetensors"})
    layers = [f"single process, cmp alone, {count} of 12 layers" for count in (6, 3, 1)]
    assert found.names[5:] == layers
    assert found.smallest == layers[1]
    assert "It fails with 3 layers and passes with 1: look at memory" in found.advice
    assert [trial.config.train.init_from for trial in found.trials][-3:] == [None] * 3, "of another depth"


def test_where_everything_fails_one_layer_of_one_branch_is_the_smallest(tmp_path):
    found = diagnose(tmp_path, fails(lambda config: True))
    assert found.smallest == "single process, cmp alone, 1 of 2 layers"
    assert "the model or a kernel is at fault" in found.output


def test_a_smaller_trial_that_fails_in_another_way_does_not_count(tmp_path):
    found = diagnose(tmp_path, lambda config: (1 if config.nsa.force_branch is None else 5, 5.0), model=ONE_LAYER)
    assert found.outcomes["single process, cmp alone"] == "non-finite numbers"
    assert found.smallest == "single process"
    assert "No branch alone fails in this way: cmp: non-finite numbers; sel: non-finite numbers" in found.advice
    found = diagnose(tmp_path, lambda config: (1 if config.model.n_layers > 1 else 2, 5.0))
    assert found.smallest == "single process, cmp alone"
    assert "It fails with 2 layers and fails in another way with 1: crash (exit code 2)" in found.advice


@pytest.mark.parametrize(("attention", "branch"), [("dense", None), ("nsa", "win")])
def test_dense_attention_and_a_forced_branch_have_no_branches_to_try(tmp_path, attention, branch):
    model = {**ONE_LAYER, "attention": attention}
    found = diagnose(tmp_path, fails(lambda config: True), model=model, nsa={"force_branch": branch})
    assert found.names == TREE[:2]


STACKS = """{first}
Thread 0x00007f02 (most recent call first):
  File "/x/python3.11/threading.py", line 331 in wait
  File "/home/me/nsa/supervise/watchdog.py", line 140 in _watch

Thread 0x00007f01 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 820 in _engine_run_backward
  File "/home/me/nsa/train/step.py", line 63 in train_step
  File "/home/me/nsa/cli/train.py", line 9 in train
  File "<frozen runpy>", line 88 in _run_code

memory: 0.435 GiB resident
"""


@pytest.mark.parametrize(
    ("code", "first"),
    [(6, "hang: rank 0: no progress for 6 s\n\nstacks of all threads:"), (1, "Timeout (0:00:08)!")],
    ids=["watchdog", "C timer"],
)
def test_a_hang_is_shown_with_the_stacks_of_every_rank(tmp_path, code, first):
    def leave(folder):
        for rank in (0, 1) if "fsdp" in folder.name else ():
            (folder / f"stackdump_20260101T000000_rank{rank}.txt").write_text(STACKS.format(first=first))

    hangs = fails(lambda config: config.parallel.strategy == "fsdp", code)
    found = diagnose(tmp_path, hangs, leave=leave, model=ONE_LAYER)
    assert (found.outcomes["fsdp"], found.smallest) == ("hang", "fsdp, cmp alone")
    frames = ["torch/autograd/graph.py:820 _engine_run_backward", "nsa/train/step.py:63 train_step"]
    assert [(stack["rank"], stack["threads"]) for stack in found.found["stacks"]] == [(0, [frames]), (1, [frames])]
    dump = tmp_path / "doctor" / "trials" / "05-fsdp-cmp-alone" / "stackdump_20260101T000000_rank1.txt"
    assert f"rank 1, newest call first ({dump}):\n  {frames[0]}\n  {frames[1]}\n" in found.output
    assert "nsa trace" in found.advice


def test_a_hang_is_found_by_the_watchdog_of_the_trial_before_the_time_limit(tmp_path):
    found = diagnose(tmp_path, fails(lambda config: config.parallel.strategy == "fsdp", 6), model=ONE_LAYER)
    limits = [trial.limit_s for trial in found.trials]
    assert limits == [300.0] * 4 + [60.0] * 3, "sound trials took a second: those after the failure get a minute"
    for trial in found.trials:
        telemetry = trial.config.telemetry
        assert telemetry.watchdog_floor_s < telemetry.watchdog_first_step_s < trial.limit_s
        assert trial.config.parallel.timeout_s >= trial.limit_s


def test_the_command_runs_the_smallest_configuration_again(tmp_path):
    found = diagnose(tmp_path, fails(lambda config: config.parallel.strategy == "fsdp"), model=ONE_LAYER)
    *start, file, folder = shlex.split(found.found["smallest"]["command"])
    assert start == ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "nsa", "train"]
    assert folder == f"train.out_dir={tmp_path / 'doctor' / 'again'}"
    assert Path(file) == found.trials[4].config_file, "fsdp, cmp alone"
    assert f"to run it again: {found.found['smallest']['command']}\n" in found.output


@pytest.mark.parametrize(("difference", "failure"), [(1e-3, OTHER_NUMBERS), (1e-5, "ok")])
def test_a_strategy_that_trains_with_other_numbers_is_named(tmp_path, difference, failure):
    found = diagnose(tmp_path, lambda config: (0, 5.0 + difference * (config.parallel.strategy == "fsdp")))
    assert found.outcomes["fsdp"] == failure
    if found.code:
        assert found.smallest == "fsdp"
        assert found.found["smallest"]["reason"] == "step 1: loss 5.001, in 'single process' 5"


@pytest.mark.parametrize(
    ("sections", "is_broken"),
    [
        ({"data": TEXT}, lambda config: config.data.source == "text"),
        ({"runtime": {"device": "cpu", "compile": True}}, lambda config: config.runtime.compile),
        ({"train": {"batch_size": 8, "micro_batch": 2}}, lambda config: config.train.batch_size == 8),
    ],
    ids=["data", "compile", "batch"],
)
def test_the_configuration_as_given_is_tried_last(tmp_path, sections, is_broken):
    found = diagnose(tmp_path, fails(is_broken, 3), **sections)
    assert list(found.outcomes.values())[:6] == ["ok"] * 5 + ["crash (exit code 3)"]
    assert found.smallest.startswith("as given, ")
    assert "runtime.compile=false, with data.source=synthetic or with a smaller train.micro_batch" in found.advice


def test_ddp_and_fsdp_use_the_configured_checkpointing(tmp_path):
    def is_broken(config):
        return config.parallel.strategy == "ddp" and config.runtime.gradient_checkpointing == "branch"

    found = diagnose(tmp_path, fails(is_broken), runtime={"device": "cpu", "gradient_checkpointing": "branch"})
    assert found.smallest == "ddp, cmp alone, 1 of 2 layers"
    assert found.trials[1].config.runtime.gradient_checkpointing == "branch"


@pytest.mark.parametrize("kept", ["none", "block"])
def test_out_of_memory_counts_only_in_the_configuration_as_given(tmp_path, kept):
    out_of_memory = fails(lambda config: config.runtime.gradient_checkpointing == "none", 9)
    runtime = {"device": "cpu", "gradient_checkpointing": kept}
    found = diagnose(tmp_path, out_of_memory, runtime=runtime, model=ONE_LAYER)
    assert found.outcomes["single process"] == "out of memory"
    assert found.code == (kept == "none")
    if found.code:
        assert found.smallest == "ddp, cmp alone", "with two processes DDP is the configuration as given"
        assert "nsa memory" in found.advice


def test_ranks_that_share_sequences_are_compared_with_each_other(tmp_path):
    found = diagnose(
        tmp_path,
        lambda config: (0, 5.0 + config.train.seq_len),
        parallel={"context": 2, "strategy": "ddp", "ddp": {"static_graph": True}},
    )
    assert found.found["healthy"], found.output
    assert [trial.config.train.seq_len for trial in found.trials] == [32, 32, 64, 64]
    assert [trial.config.parallel.context for trial in found.trials] == [1, 1, 2, 2]


def test_without_the_gpus_that_are_asked_for_nothing_is_tried(tmp_path):
    missing = ProbeResult([{"what": "GPUs", "ok": False, "found": "0 visible", "advice": "check the driver"}])
    found = diagnose(tmp_path, fails(lambda config: False), machine=missing)
    assert found.names == ["environment"]
    assert "). environment: 1 of 1 wrong\n  GPUs: 0 visible\nwhat to do:\n- GPUs: check the driver" in found.output


def test_a_full_disk_is_named_and_the_trials_run_all_the_same(tmp_path):
    full = ProbeResult([{"what": "disk", "ok": False, "found": "0.1 GiB free", "advice": "free some"}])
    found = diagnose(tmp_path, fails(lambda config: False), machine=full)
    assert found.names == TREE
    assert (found.smallest, found.code) == ("environment", 1)
    assert "disk: free some" in found.advice


def test_an_environment_that_cannot_be_checked_is_named_with_the_reason(tmp_path):
    found = diagnose(
        tmp_path, fails(lambda config: False), machine=ProbeResult([], "data.tokenizer: the file does not exist")
    )
    assert found.names == ["environment"]
    assert found.output.endswith("). environment: not checked\n  data.tokenizer: the file does not exist")


def test_a_batch_that_the_ranks_cannot_share_is_a_mistake_in_the_configuration(tmp_path):
    config = load_config(write_config(tmp_path, train={"batch_size": 3}, parallel={"strategy": "ddp"}))
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        Diagnosis(config, tmp_path / "doctor", Progress(Console(quiet=True)), nproc=2)


def shown(*, terminal: bool) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=terminal, color_system=None, soft_wrap=True)
    with Progress(console) as progress:
        progress.begin("ddp (at most 300 s)")
        progress.update(None, 4.0)
        progress.update(SimpleNamespace(step=0, steps=0), 5.0)  # a run that has just created its folder
        progress.note(Attempt("ddp", "hang", "exit code 6: no [progress]", 12.0, 2))
    return console.file.getvalue()


def test_a_terminal_shows_the_state_of_a_trial_and_a_file_gets_a_line_when_it_begins_and_ends():
    line = f"{'ddp':<40}         2  hang                    12.0 s  exit code 6: no [progress]"
    assert shown(terminal=False) == f"ddp (at most 300 s) ...\n{line}\n"
    assert line in shown(terminal=True)
    assert "ddp (at most 300 s): starting, 4.0 s" in shown(terminal=True)
    assert "ddp (at most 300 s): starting, 5.0 s" in shown(terminal=True)


# The command, with real processes.


def run_doctor(tmp_path, sabotage="", **sections) -> Diagnosed:
    """`nsa doctor` as a user starts it, in a sabotaged system."""
    config = write_config(
        tmp_path,
        train={"seq_len": 16, "batch_size": 2},
        telemetry={"tensorboard": False, "watchdog_first_step_s": 8.0, "watchdog_floor_s": 4.0},
        checkpoint={"every": 0},
        **sections,
    )
    out = tmp_path / "doctor"
    path = os.pathsep.join([str(SABOTAGE), str(ROOT)]) if sabotage else str(ROOT)
    command = ("nsa", "doctor", config, "--out", str(out), "--limit", "240")
    [ended] = wait_all([warm.start(*command, env=environment(PYTHONPATH=path, SABOTAGE=sabotage))], 840)
    print(ended.output)
    assert (out / "doctor.json").exists(), ended.output
    return Diagnosed(json.loads((out / "doctor.json").read_text()), ended.output, ended.code)


@pytest.mark.long
def test_the_command_calls_a_sound_system_healthy(tmp_path):
    found = run_doctor(tmp_path)
    assert found.code == 0
    assert found.names == [*TREE, "as given"]
    assert set(found.outcomes.values()) == {"ok"}
    assert "healthy: 5 trials" in found.output


@pytest.mark.long
def test_the_command_names_checkpointing_that_fails_in_backward(tmp_path):
    found = run_doctor(tmp_path, sabotage="recompute_raises")
    assert found.code == 1
    assert found.smallest == "checkpointing, cmp alone, 1 of 2 layers"
    assert found.outcomes["checkpointing"] == "crash (exit code 1)"
    assert "RuntimeError: sabotage: the recomputed forward pass" in found.output


@pytest.mark.long
@pytest.mark.parametrize("sabotage", ["fsdp_hangs", "fsdp_holds_the_gil"])
def test_the_command_names_a_strategy_that_hangs_on_one_rank_with_stacks_of_both(tmp_path, sabotage):
    found = run_doctor(tmp_path, sabotage=sabotage, model=ONE_LAYER, nsa={"force_branch": "win"})
    assert found.code == 1
    assert (found.smallest, found.outcomes["fsdp"]) == ("fsdp", "hang")
    ranks = {s["rank"]: "\n".join(frame for thread in s["threads"] for frame in thread) for s in found.found["stacks"]}
    assert set(ranks) == {0, 1}
    assert "sitecustomize.py" in ranks[1], "the line at which rank 1 hangs"
    assert "fsdp" in ranks[0], "rank 0 waits in FSDP"
    assert all("nsa/train/step.py" in frames for frames in ranks.values())
    assert "torchrun --standalone --nproc-per-node 2 -m nsa train" in found.output
