"""A trial is ended when its time is up, with stacks, and leaves nobody behind."""

import psutil

from nsa.checks.probe import run_probe
from nsa.checks.trials import Trial, run_trial
from nsa.config import load_config
from tests.checks.helpers import write_config


def processes_that_name(folder) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def test_a_run_over_its_limit_is_asked_for_its_stacks_and_ended(tmp_path):
    config = load_config(write_config(tmp_path))
    fault = "step.backward:sleep:hit=2:rank=1"  # its own watchdog allows 60 s
    outcome = run_trial(Trial("slow", config, tmp_path / "run", nproc=2, limit_s=30.0, faults=fault))
    assert (outcome.timed_out, outcome.passed, outcome.exit_code) == (True, False, 6)
    assert outcome.reason == "no end after 30 s: it stood after step 1"
    stacks = list((tmp_path / "run").glob("stackdump_*.txt"))
    assert len(stacks) == 2
    assert any("in train_step" in dump.read_text() for dump in stacks)
    assert processes_that_name(tmp_path) == []


def test_a_probe_that_does_not_answer_in_time_says_so(tmp_path):
    probed = run_probe("kernels", write_config(tmp_path), 1, tmp_path, limit_s=0.5)
    assert (probed.findings, probed.problem) == ([], "no answer after 0.5 s")
    assert processes_that_name(tmp_path) == []


def test_a_probe_that_fails_gives_its_last_word(tmp_path):
    config = write_config(tmp_path, runtime={"kernels": {"sel": "triton"}})
    probed = run_probe("kernels", config, 1, tmp_path, limit_s=60.0)
    assert "backend 'triton' cannot run operator 'sel' here" in probed.problem
