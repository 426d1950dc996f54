"""The criteria of a phase: artifacts, thresholds; and the pages that show them."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from nsa.checkpoint.format import name_of
from nsa.checks.artifacts import check_artifacts
from nsa.checks.criteria import judge_run
from nsa.checks.progress import Progress
from nsa.checks.readiness import (
    FULL,
    QUICK,
    QUICK_ON_CPU,
    ReadinessCheck,
    deep,
    first_difference,
    is_deep,
    resumable,
    short_run,
)
from nsa.checks.ready_report import compare, headline, html, launch_commands, markdown
from nsa.checks.trials import Trial, changed, outcome_of
from nsa.config import parse_config
from nsa.config.schema import ReadinessConfig
from nsa.inspect.reading import read_run
from nsa.train import train
from tests.docs.pages import ROOT
from tests.inspect.test_report import browse
from tests.record.runs import HEADER, TINY, event, training_row

CONFIG = parse_config(
    {**TINY, "train": {**TINY["train"], "lr": 3e-3}, "telemetry": {"every": 5}, "checkpoint": {"every": 10}}, "test"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that left everything."""
    folder = tmp_path_factory.mktemp("ready") / "run"
    train(CONFIG, folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def bad(folder: Path, config=CONFIG, ranks: int = 1) -> dict[str, str]:
    return {artifact.name: artifact.found for artifact in check_artifacts(folder, config, ranks) if not artifact.ok}


def test_a_finished_run_has_every_artifact(finished):
    assert bad(finished) == {}
    assert len(check_artifacts(finished, CONFIG, 1)) == 16


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path: Path, lines: int) -> None:
    kept = path.read_text().splitlines(keepends=True)[:-lines]
    path.write_text("".join(kept))


DAMAGE = {
    "metrics.json": [
        (lambda f: edit(f / "metrics.json", '"done"', '"running"'), "status is 'running'"),
        (
            lambda f: edit(f / "metrics.json", '"telemetry_failures": 0', '"telemetry_failures": 3'),
            "telemetry_failures",
        ),
        (lambda f: (f / "metrics.json").write_text("{"), "cannot be parsed"),
    ],
    "env.json": [
        (lambda f: (f / "env.json").write_text("{}"), "not a table of values"),
        (lambda f: edit(f / "env.json", '"world_size": 1', '"world_size": 2'), "world_size is 2, not 1"),
    ],
    "config.yaml": [(lambda f: (f / "config.yaml").write_text(""), "not a table of values")],
    "run.log": [(lambda f: (f / "run.log").unlink(), "run.log is missing")],
    "training.csv": [
        (lambda f: cut(f / "training.csv", 1), "29 rows do not show each of 30 steps"),
        (lambda f: edit(f / "training.csv", "\n7,", "\nx,"), "1 damaged rows"),
    ],
    "heartbeat_rank{r}.jsonl": [
        (lambda f: cut(f / "heartbeat_rank0.jsonl", 1), "has no event end"),
        (lambda f: (f / "heartbeat_rank0.jsonl").unlink(), "is missing"),
        (lambda f: edit(f / "heartbeat_rank0.jsonl", '"step": 7,', '"step": 8,'), "has 30 of 30 steps"),
    ],
    "k_stats.csv": [
        (lambda f: cut(f / "k_stats.csv", 7), "0 rows do not show each of 7 steps"),
        (lambda f: edit(f / "k_stats.csv", ",0.0,\n", ",0.0.0,\n"), "damaged rows"),
    ],
    "gate_stats.csv": [
        (lambda f: (f / "gate_stats.csv").unlink(), "missing"),
        (lambda f: cut(f / "gate_stats.csv", 1), "20 rows do not show each of 7 steps 3 times"),
    ],
    "fallback_counters.csv": [(lambda f: (f / "fallback_counters.csv").write_text("a,b\n"), "not the header")],
    "dtypes_report.txt": [
        (
            lambda f: edit(f / "dtypes_report.txt", "unexpected types: none", "unexpected types: 2"),
            "unexpected types: 2",
        ),
    ],
    "mem_boot.*": [(lambda f: (f / "mem_boot.txt").unlink(), "mem_boot.txt is missing")],
    "mem_step1.*": [(lambda f: (f / "mem_step1.json").write_text("{}"), "mem_step1.json has no values")],
    "opt_state_mb.txt": [(lambda f: (f / "opt_state_mb.txt").write_text("0.0 MB\n"), "begins with '0.0 MB")],
    "checkpoints/": [
        (lambda f: flip_a_byte(largest_file(f / "checkpoints" / name_of(30))), "step_00000030"),
        (lambda f: shutil.rmtree(f / "checkpoints" / name_of(30)), "the newest is of step 20, not 30"),
    ],
    "model.safetensors": [
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 100), "not a complete safetensors file"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    ],
    "tb/": [(lambda f: shutil.rmtree(f / "tb"), "has no event file")],
}


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [(name, damage, words) for name, cases in DAMAGE.items() for damage, words in cases],
)
def test_a_missing_or_damaged_artifact_is_named(run, name, damage, words):
    damage(run)
    found = bad(run)
    assert list(found) == [name], found
    assert words in found[name]


def test_every_artifact_has_a_damage_that_is_found(finished):
    assert {artifact.name for artifact in check_artifacts(finished, CONFIG, 1)} == set(DAMAGE)


def test_files_of_every_rank_are_wanted(finished):
    found = bad(finished, ranks=2)
    assert "run_rank1.log is missing" in found["run.log"]
    assert "heartbeat_rank1.jsonl is missing" in found["heartbeat_rank{r}.jsonl"]
    assert "mem_boot_rank1.json is missing" in found["mem_boot.*"]


def trial(steps: int, folder: Path) -> Trial:
    return Trial(short_run(CONFIG, steps), folder, 1, 60.0)


def judged(folder: Path, steps: int, **thresholds: float) -> dict[str, object]:
    outcome = outcome_of(trial(steps, folder), read_run(folder), 0, 1.0)
    return {c.name: c for c in judge_run(outcome, ReadinessConfig(**thresholds), None, [])}


@pytest.fixture
def measured(tmp_path):
    """100 steps of 0.5 s, the first ten 20 s each; a save of 45 s in the middle; the loss falls from 5 to 3."""
    rows = [
        training_row(
            step,
            loss=5.0 - 2.0 * step / 100,
            step_s=20.0 if step <= 10 else 0.5,
            toks_per_s=100.0 if step <= 10 else 4000.0,
            data_wait_s=0.0,
            save_wait_s=45.0 if step == 50 else 0.0,
            mem_gib=12.5,
        )
        for step in range(1, 101)
    ]
    (tmp_path / "training.csv").write_text(HEADER + "\n" + "".join(rows))
    (tmp_path / "env.json").write_text(json.dumps({"gpu": []}))
    (tmp_path / "metrics.json").write_text(json.dumps({"status": "done"}))
    return tmp_path


def test_speed_excludes_the_first_steps_and_includes_waits(measured):
    found = judged(measured, 100, min_toks_per_s=2000.0, max_step_s=0.6)
    assert found["throughput"].value == pytest.approx(90 * 2000 / (90 * 0.5 + 45))
    assert found["throughput"].verdict == "pass"
    assert found["step time"].value == 0.5
    assert judged(measured, 100, min_toks_per_s=2001.0)["throughput"].verdict == "fail"
    assert judged(measured, 100, max_step_s=0.49)["step time"].verdict == "fail"


def test_a_threshold_that_is_not_set_decides_nothing(measured):
    found = judged(measured, 100)
    assert (found["throughput"].verdict, found["step time"].verdict) == ("n/a", "n/a")


def test_memory_must_stay_below_its_limit(measured):
    assert judged(measured, 100, max_mem_gib=12.6)["memory per process"].verdict == "pass"
    assert judged(measured, 100, max_mem_gib=12.5)["memory per process"].verdict == "fail"


def test_memory_that_no_row_holds_is_that_of_the_heartbeat(measured):
    (measured / "training.csv").write_text((measured / "training.csv").read_text().replace("12.5", ""))
    (measured / "heartbeat_rank0.jsonl").write_text(event("step", 100, mem_gib=12.5))
    assert judged(measured, 100, max_mem_gib=12.6)["memory per process"].value == 12.5


def test_the_loss_is_compared_by_medians_of_tenths(measured):
    assert judged(measured, 100)["loss"].verdict == "pass"
    path = measured / "training.csv"
    lines = path.read_text().splitlines(keepends=True)
    spiked = [training_row(step, loss=1.0 if step % 2 else 6.0) for step in range(91, 101)]  # its median is 3.5
    path.write_text("".join([*lines[:91], *spiked]))
    assert judged(measured, 100)["loss"].value == pytest.approx(3.5)
    path.write_text("".join([*lines[:91], *(training_row(step, loss=4.95) for step in range(91, 101))]))
    assert judged(measured, 100)["loss"].verdict == "fail"


def test_ten_of_two_hundred_steps_are_no_pass(measured):
    found = judged(measured, 200)["stability"]
    assert found.verdict == "fail"
    assert found.measured == "100 of 200 steps"
    assert found.remark == "ended with success after 100 of 200 steps"


def test_a_step_that_was_not_finite_does_not_pass_and_one_that_finds_the_loss_scale_does(measured):
    """training.csv counts both as skipped, metrics.json only the first."""
    path = measured / "training.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], training_row(1, loss=5.0, skipped=1), *lines[2:]]))
    metrics = json.loads((measured / "metrics.json").read_text())
    for skipped, verdict in ((0, "pass"), (1, "fail")):
        (measured / "metrics.json").write_text(json.dumps(metrics | {"skipped_steps": skipped}))
        assert judged(measured, 100)["stability"].verdict == verdict


def test_a_gpu_that_cannot_be_measured_does_not_pass(measured):
    (measured / "env.json").write_text(json.dumps({"gpu": ["H200"]}))
    assert judged(measured, 100)["GPU utilisation"].verdict == "fail"


def check_of(config, nproc: int, scale) -> ReadinessCheck:
    return ReadinessCheck(config, Path("ready"), nproc, scale, Progress(Console(quiet=True)))


def test_phases_change_the_configuration_as_little_as_possible():
    long = parse_config({"train": {"steps": 50_000, "warmup_steps": 2000}, "model": {"n_layers": 12}}, "test")
    short = short_run(long, 200)
    assert (short.train.steps, short.checkpoint.every, short.telemetry.every) == (200, 100, 50)
    assert short.train.warmup_steps == 2000
    assert short.model == long.model
    assert resumable(long, FULL).runtime.deterministic
    for given, wanted in ((True, "auto"), ("auto", "auto"), (False, False)):  # a run that is killed refuses `true`
        asked = parse_config(long.to_dict(), "test", [f"runtime.cuda_graphs={json.dumps(given)}"])
        assert resumable(asked, FULL).runtime.cuda_graphs == wanted
    for scale in (FULL, QUICK, QUICK_ON_CPU):  # a checkpoint before the kill, steps after it
        assert scale.save_every < scale.killed_at - 1 < scale.resume
    assert not is_deep(long)
    made = deep(long, 2)
    assert is_deep(made)
    assert made.train.batch_size == 2
    assert deep(changed(long, {"parallel.context": 4}), 8).train.batch_size == 2, "one for each group of ranks"


def test_two_runs_are_the_same_to_the_bit_or_the_place_is_named(finished, run):
    assert first_difference(finished, run) == ""
    edit(run / "training.csv", "\n7,", "\n8,")
    assert first_difference(finished, run) == "step 7: step is 8 and was 7"
    shutil.copy(finished / "training.csv", run)
    cut(run / "training.csv", 1)
    assert first_difference(finished, run) == "29 rows instead of 30"
    shutil.copy(finished / "training.csv", run)
    flip_a_byte(run / "model.safetensors")
    assert "the weights are not" in first_difference(finished, run)


def result(**criteria: float) -> dict:
    rows = [
        {"phase": "phase1", "name": name, "value": value, "unit": "s", "better": better, "verdict": "pass",
         "target": "<script>alert(1)</script>", "measured": "a | b", "remark": ""}
        for name, value in criteria.items()
        for better in ["lower" if name == "step" else "higher"]
    ]  # fmt: skip
    return {
        "scope": "full", "nproc": 1, "machine": {"gpu": []}, "criteria": rows, "outcome": "NO-GO", "data": None,
        "reasons": ["<b>why</b>"], "config_file": "x.yaml", "overrides": [], "time": 0.0, "seconds": 1.0, "launch": [],
        "phases": [],
        "config": {"data": {"source": "text", "paths": ["/data/<i>mirror"], "mixture": []}},
        "environment": [], "kernels": [], "changes": None,
    }  # fmt: skip


def test_slower_values_are_reported_with_the_change():
    rows = compare(result(step=1.1, rate=95.0, other=5.0), result(step=1.0, rate=100.0, gone=1.0))["rows"]
    assert [(row["name"], row["verdict"]) for row in rows] == [("step", "worse"), ("rate", "worse")]
    assert rows[0]["change"] == pytest.approx(0.1)
    assert rows[1]["change"] == pytest.approx(-0.05)
    assert compare(result(step=1.01), result(step=1.0))["rows"][0]["verdict"] == "same"


def test_a_quick_check_clears_only_itself():
    cleared = {**result(step=1.0), "outcome": "GO", "reasons": []}
    assert headline(cleared) == "GO"
    assert headline({**cleared, "scope": "quick"}).startswith("GO (quick check only")
    quick, full = (
        launch_commands(check_of(CONFIG, 2, scale), Path("x.yaml"), ("train.lr=1",)) for scale in (QUICK, FULL)
    )
    assert quick == ["nsa ready x.yaml train.lr=1 --nproc 2"]  # no command that trains
    train = "torchrun --standalone --nproc-per-node 2 -m nsa train x.yaml train.lr=1"
    assert full == [train, "nsa watch runs/x", "nsa report runs/x"]
    *_, watch, report = launch_commands(check_of(CONFIG, 2, FULL), Path("my run.yaml"), ())
    assert (watch, report) == ("nsa watch 'runs/my run'", "nsa report 'runs/my run'")


def test_text_from_files_does_nothing_in_the_pages():
    page = html(result(step=1.0))
    assert "<script>" not in page
    assert "&lt;b&gt;why" in page
    assert "from /data/&lt;i&gt;mirror" in page  # and the page names what was read
    assert "a \\| b" in markdown(result(step=1.0))


@pytest.mark.parametrize("page", ["written", "documented"])
def test_a_long_launch_line_wraps(tmp_path, page):
    launch = ["nsa train configs/m7c_125m.yaml " + "data.paths=[/data/mirror] train.batch_size=32 " * 9]
    if page == "written":
        text = html({**result(step=1.0), "outcome": "GO", "reasons": [], "launch": launch})
    else:
        text = (ROOT / "docs/readiness-h200/readiness.html").read_text()
    (tmp_path / "readiness.html").write_text(text)
    (tmp_path / "phone.html").write_text(
        '<iframe src="readiness.html" width="375" height="900"></iframe><p id="room"></p><script>onload = () => {'
        "const pre = frames[0].document.querySelector('#verdict pre');"
        "room.textContent = pre.scrollWidth <= pre.clientWidth ? 'fits' : 'overflows' }</script>"
    )
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=1000")
    shown, complaints = browse(tmp_path / "phone.html", tmp_path / "profile", *flags)
    assert complaints == []
    assert 'id="room">fits<' in shown
