"""What a person sees of a run on a terminal: the numbers of its files, how it stands, and what is unhealthy."""

import csv
import json
import os
import re
import shutil
import statistics
import time
from pathlib import Path

import pytest
from rich.console import Console

from nsa import run_folder
from nsa.errors import CheckpointError
from nsa.inspect.health import unhealthy
from nsa.inspect.reading import read_run
from nsa.inspect.view import frame
from nsa.run_folder import format_event, parse_event
from tests.record.runs import (
    BEGAN,
    EVENT_FIELDS,
    GATES,
    HEADER,
    event,
    long_run,
    real_run,
    training_row,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "training.csv",
    "gate_stats.csv",
    "k_stats.csv",
    "k_stats_layers.csv",
    "fallback_counters.csv",
    "heartbeat_rank0.jsonl",
    "metrics.json",
    "config.yaml",
    "env.json",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return real_run(tmp_path_factory.mktemp("watch") / "run")


@pytest.fixture
def copy(finished, tmp_path):
    return Path(
        shutil.copytree(finished, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
    )


def live_run(folder, steps=40, **row):
    """A run that goes on, its last event at BEGAN + steps * 0.55."""
    long_run(folder, steps, layers=2, every=10)
    if row:
        lines = [training_row(step, **row) for step in range(1, steps + 1)]
        (folder / "training.csv").write_text(HEADER + "\n" + "".join(lines))
    return BEGAN + steps * 0.55


def text_of(view, width=80, height=24, **kind):
    return frame(view, width, height, **kind).plain


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_numbers_in_the_view_match_the_files(finished):
    view, rows = read_run(finished), rows_of(finished / "training.csv")
    assert [view.step, view.steps, len(view.training)] == [30, 30, 30]
    assert view.training.column("loss").tolist() == [float(row["loss"]) for row in rows]
    assert view.loss == pytest.approx(statistics.mean(float(row["loss"]) for row in rows[-5:]))
    assert view.recent("toks_per_s") == pytest.approx(statistics.median(float(row["toks_per_s"]) for row in rows))
    waited, took = (sum(float(row[name]) for row in rows) for name in ("data_wait_s", "step_s"))
    assert view.data_share == pytest.approx(waited / took)
    assert view.validation == (30, float(rows[-1]["val_loss"]), float(rows[-1]["val_bits_per_byte"]))
    assert view.mem_gib == float(rows[-1]["mem_gib"])
    last = [row for row in rows_of(finished / "gate_stats.csv") if row["step"] == "30"]
    assert list(view.gates) == [row["layer"] for row in last]
    assert [gates.share_sel for gates in view.gates.values()] == [float(row["share_sel"]) for row in last]
    selection = rows_of(finished / "k_stats.csv")[-1]
    assert view.selection.agreement == float(selection["agreement"])
    assert view.selection.distances[2] == float(selection["distance_2-3"])
    text = text_of(view)
    assert "finished" in text
    assert "step 30 of 30 (100%)" in text
    assert f"loss {view.loss:.4f}" in text
    assert f"validation {view.validation[1]:.4f} at step 30" in text
    assert f"agreement {view.selection.agreement:.1%}" in text


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60), (20, 4)])
@pytest.mark.parametrize("plain", [False, True])
def test_a_frame_fits_its_terminal(tmp_path, size, plain):
    now = live_run(tmp_path / "run", 200)
    lines = text_of(read_run(tmp_path / "run", now), *size, plain=plain).split("\n")
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    text = "\n".join(lines)
    if plain:
        text.encode("ascii")
        assert "?" not in text, "a sign without a counterpart"
    if size == (80, 24):
        assert set("*|#=.-" if plain else "│█▓░━─") <= set(text)
        for part in (
            "running",
            "loss",
            "tokens/s",
            "gates at step",
            "blocks.1.attention",
            "selection",
            "distance",
            "start",
        ):
            assert part in text


@pytest.mark.parametrize("width", [40, 80])
def test_numbers_that_do_not_fit_into_a_line_continue_in_the_next(tmp_path, width):
    now = live_run(tmp_path / "run", 2000)
    lines = text_of(read_run(tmp_path / "run", now), width, 40).split("\n")
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for part in (
        "at step 2000 bits/byte 0.900 lr 3.00e-04 grad 0.485 tokens/s",
        "memory 31.50 GiB",
        "32-63 █",
        "1024+ ▁",
    ):
        assert part in words


def test_every_event_of_a_run_has_the_fields_of_the_contract(finished):
    events = run_folder.read_events(finished)
    assert len(events) == len((finished / "heartbeat_rank0.jsonl").read_text().splitlines())
    assert {each["event"] for each in events} >= {"boot", "first_batch", "start", *run_folder.ROUTINE_EVENTS, "end"}
    for each in events:
        assert tuple(each) == (*run_folder.COMMON_FIELDS, *EVENT_FIELDS[each["event"]])


def test_a_run_is_running_then_silent(tmp_path):
    now = live_run(tmp_path / "run")
    fresh, stale = (read_run(tmp_path / "run", now + later) for later in (5, 4000))
    assert (fresh.status.kind, unhealthy(fresh)) == ("running", [])
    assert fresh.left_s == pytest.approx((80 - 40) * 0.55)
    assert stale.status.kind == "silent"
    assert "SILENT for 1 h 6 min" in text_of(stale)
    assert "silent for 1 h 6 min, 1 min is normal" in unhealthy(stale)[0]


def test_a_run_that_was_killed_before_it_wrote_its_weights_has_not_finished(tmp_path):
    now = live_run(tmp_path / "run", 80)
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("end", 80, at=now))
    assert [read_run(tmp_path / "run", now + later).status.kind for later in (5, 4000)] == ["running", "silent"]


def test_validation_and_saving_count_in_the_time_left(tmp_path):
    live_run(tmp_path / "run", 40)
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("w") as file:
        file.write(event("boot", 0, at=BEGAN - 100) + event("start", 0, at=BEGAN - 90, steps=80, from_checkpoint=None))
        for step in range(1, 41):  # every tenth step 2.6 s of validation and saving follow
            file.write(event("step", step, at=BEGAN + step * 0.55 + step // 10 * 2.6))
    view = read_run(tmp_path / "run", BEGAN + 40)
    assert view.left_s == pytest.approx(40 * (0.55 + 4 * 2.6 / 39)), "not the start, which comes once"
    assert view.status.kind == "running"


def test_a_suspended_machine_does_not_count_in_the_time_left(tmp_path):
    now = live_run(tmp_path / "run", 40)
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("w") as file:
        file.write(event("boot", 0, clock=9.0) + event("start", 0, steps=80, clock=9.5))
        for step in range(1, 41):  # suspended for eight hours after step 20
            late_s = 8 * 3600.0 if step > 20 else 0.0
            file.write(event("step", step, at=BEGAN + step * 0.55 + late_s, clock=10 + step * 0.55))
    assert read_run(tmp_path / "run", now + 8 * 3600).left_s == pytest.approx(40 * 0.55)


def test_a_run_may_be_silent_for_longer_while_it_validates_or_saves(tmp_path):
    now = live_run(tmp_path / "run", 40) + 300
    limits = "telemetry:\n  watchdog_floor_s: 60.0\n  watchdog_first_step_s: 600.0\n"
    for config, kind in (
        ("", "silent"),
        ("train:\n  eval_every: 41\n", "running"),  # validates in step 41
        ("train:\n  eval_every: 40\n", "running"),  # saves the best of step 40
        ("checkpoint:\n  every: 20\n", "running"),
        ("train:\n  profile_steps: [30, 40]\n", "running"),
        ("train:\n  eval_every: 39\ncheckpoint:\n  every: 41\n", "silent"),
    ):
        (tmp_path / "run" / "config.yaml").write_text(limits + config)
        assert read_run(tmp_path / "run", now).status.kind == kind, config
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("attention", 41, at=now - 300))
    assert read_run(tmp_path / "run", now).status.kind == "running", "compiles again"


def test_a_fresh_start_hides_the_events_of_an_earlier_run(tmp_path):
    folder = tmp_path / "run"
    now = live_run(folder, 40)
    before = BEGAN - 10_000
    for rank in range(10):  # the new run has eight
        with (folder / f"heartbeat_rank{rank}.jsonl").open("w") as file:
            file.write(event("boot", 0, rank, at=before) + event("start", 0, rank, at=before, fresh=False))
            file.write(event("step", 7, rank, at=before, mem_gib=99.0, telemetry_failures=5))
            file.write(event("incident", 7, rank, at=before, kind="save_failed", message="of old"))
            if rank < 8:
                file.write(
                    event("boot", 0, rank, at=BEGAN) + event("data_stall", 0, rank, at=BEGAN, message="slow hub")
                )
                file.write(event("start", 0, rank, at=BEGAN, world_size=8, steps=80, fresh=True))
                file.write(event("step", 40, rank))
    (folder / "gate_stats_rank9.csv").write_text(GATES + "\n40,all,1000000,0.1,0.0,1.0,1.0,1.0,0.0,0.0\n")
    view = read_run(folder, now)
    assert [(h.kind, h.message, len(h.ranks)) for h in view.timeline] == [
        ("data stall", "slow hub", 8),
        ("start", "from the beginning", 8),
    ]
    assert (view.attempts, view.started_at, len(view.ranks)) == (1, BEGAN, 8)
    assert (view.telemetry_failures, unhealthy(view)) == ({}, [])
    assert view.mem_gib == 31.5
    for rank in range(8):
        with (folder / f"heartbeat_rank{rank}.jsonl").open("a") as file:
            file.write(event("boot", 0, rank, at=now))
            file.write(event("start", 20, rank, at=now, world_size=8, steps=80, from_checkpoint="step_20"))
    again = read_run(folder, now)
    assert (again.attempts, again.started_at) == (2, BEGAN), "one that goes on is the same run"
    assert [h.kind for h in again.timeline] == ["start", "data stall", "start"]


def test_a_restart_without_a_checkpoint_keeps_earlier_events(tmp_path):
    now = live_run(tmp_path / "run", 40)
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("hang", 41, at=now, phase="step", silent_s=60.0))
        file.write(event("boot", 0, at=now + 9) + event("start", 0, at=now + 9, from_checkpoint=None, fresh=False))
    view = read_run(tmp_path / "run", now + 10)
    assert view.attempts == 2
    assert "hang" in [h.kind for h in view.timeline]


def test_records_that_any_rank_could_not_write_are_counted(tmp_path):
    now = live_run(tmp_path / "run", 40)
    for rank in (1, 3):
        with (tmp_path / "run" / f"heartbeat_rank{rank}.jsonl").open("w") as file:
            file.write(event("step", 40, rank, telemetry_failures=rank * 4))
            file.write(event("incident", 40, rank, at=now, kind="telemetry", message="disk full"))
    view = read_run(tmp_path / "run", now)
    assert "records could not be written: 4 of rank 1, 12 of rank 3" in text_of(view)
    assert next(h.ranks for h in view.timeline if h.kind == "telemetry") == (1, 3)
    (tmp_path / "run" / "metrics.json").write_text(
        json.dumps({"status": "failed", "exit_code": 1, "reason": "x", "rank": 3, "telemetry_failures": 20})
    )
    assert read_run(tmp_path / "run", now).telemetry_failures == {1: 4, 3: 20}


def test_a_failed_run_shows_its_exit_code_and_reason(copy):
    (copy / "metrics.json").write_text(
        json.dumps({"status": "failed", "exit_code": 5, "reason": "the loss is nan", "steps": 30})
    )
    with (copy / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("incident", 30, at=time.time(), kind="non_finite", message="step 31: the loss is nan"))
    text = text_of(read_run(copy))
    assert "FAILED, exit code 5" in text
    assert "! failed with exit code 5: the loss is nan" in text
    assert "non_finite: step 31: the loss is nan" in text


@pytest.mark.parametrize("size", [(80, 24), (40, 40)])
def test_the_reason_of_a_failure_is_wrapped_to_its_last_word(copy, size):
    reason = "saving failed 3 times in a row: " + "the disk of node seventeen is full, " * 8 + "says the very last word"
    (copy / "metrics.json").write_text(json.dumps({"status": "failed", "exit_code": 4, "reason": reason, "steps": 30}))
    lines = text_of(read_run(copy), *size).split("\n")
    assert f"failed with exit code 4: {reason}" in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= size[0]
    assert "loss " in "".join(lines)


def test_a_reason_that_is_longer_than_the_terminal_leaves_the_numbers_and_says_where_it_is(copy):
    (copy / "metrics.json").write_text(
        json.dumps({"status": "failed", "exit_code": 4, "reason": "word " * 400, "steps": 30})
    )
    lines = text_of(read_run(copy), 40, 20).split("\n")
    assert len(lines) == 20
    (more,) = (at for at, line in enumerate(lines) if "run.log or nsa report" in line)
    assert lines[more + 1].startswith("loss ")
    assert lines[-1].startswith("memory ")


def test_the_first_frame_shows_dashes_for_unknown_values(tmp_path):
    (tmp_path / "heartbeat_rank0.jsonl").write_text(event("boot", 0, pid=1, host="node"))
    text = text_of(read_run(tmp_path, BEGAN + 1))
    assert "nan" not in text
    assert "lr -  grad -" in text
    assert "step - of -  elapsed" in text


def test_a_preempted_run_and_one_that_was_started_again(copy):
    (copy / "metrics.json").write_text(
        json.dumps({"status": "preempted", "exit_code": 75, "reason": "asked", "steps": 30})
    )
    assert read_run(copy).status.kind == "preempted"
    later = time.time() + 100
    with (copy / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("boot", 0, at=later))
    again = read_run(copy, later + 1)
    assert (again.status.kind, again.attempts) == ("running", 2)


def test_a_run_has_ended_although_the_clock_of_its_host_is_ahead(tmp_path):
    ahead = time.time() + 3600
    lines = [event("boot", 0, at=ahead), event("start", 0, at=ahead, world_size=1, steps=9), event("step", 1, at=ahead)]
    (tmp_path / "heartbeat_rank0.jsonl").write_text("".join(lines))
    for status in ("failed", "preempted"):
        (tmp_path / "metrics.json").write_text(json.dumps({"status": status, "exit_code": 5, "steps": 1}))
        assert read_run(tmp_path).status.kind == status


def test_a_run_is_silent_although_the_clock_of_its_host_is_ahead(tmp_path):
    now = live_run(tmp_path / "run")
    os.utime(tmp_path / "run" / "heartbeat_rank0.jsonl", (now - 3600, now - 3600))
    for silent_s, kind in ((30.0, "running"), (300.0, "silent")):
        status = read_run(tmp_path / "run", now - 3600 + silent_s).status
        assert (status.kind, status.age_s) == (kind, pytest.approx(silent_s, abs=1e-3))


def test_a_run_is_at_100_percent_only_when_all_steps_are_done(tmp_path):
    now = live_run(tmp_path / "run", steps=200)
    start = event("start", 0, strategy="fsdp2", world_size=8, steps=201, from_checkpoint=None)
    path = tmp_path / "run" / "heartbeat_rank0.jsonl"
    path.write_text(re.sub(r".*\"start\".*\n", lambda _: start, path.read_text()))
    assert "200 of 201 (99%)" in text_of(read_run(tmp_path / "run", now))


def test_the_percentage_is_exact(tmp_path):
    now = live_run(tmp_path / "run", steps=29)
    start = event("start", 0, strategy="fsdp2", world_size=8, steps=100, from_checkpoint=None)
    path = tmp_path / "run" / "heartbeat_rank0.jsonl"
    path.write_text(re.sub(r".*\"start\".*\n", lambda _: start, path.read_text()))
    assert read_run(tmp_path / "run", now).percent == "29%"


@pytest.mark.parametrize("phase", ["data", "step"])
def test_a_step_in_which_a_run_hangs_is_not_done(tmp_path, phase):
    start = event("boot", 0) + event("start", 0, world_size=1, steps=3)
    for resumed in (False, True):
        more = event("boot", 0, at=BEGAN + 9) + event("start", 2, at=BEGAN + 9, steps=3) if resumed else ""
        step = 3 if resumed else 1
        hang = event("hang", step, at=BEGAN + 70, phase=phase, silent_s=60.0)
        (tmp_path / "heartbeat_rank0.jsonl").write_text(f"{start}{more}{event('attention', step)}{hang}")
        view = read_run(tmp_path, BEGAN + 80)
        assert (view.step, view.percent) == ((2, "66%") if resumed else (0, "0%"))
        assert f"in step {step} " in view.status.reason


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage", "folder", "pipe"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(copy, name, damage):
    path = copy / name
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "missing":
        broken = {
            "empty": b"",
            "cut": whole[: len(whole) * 2 // 3],
            "garbage": bytes(range(256)) * 20 + b"\n\n{]\n1,2\n",
        }
        path.write_bytes(broken[damage])
    view = read_run(copy)
    text = text_of(view)
    assert "step" in text
    if damage not in ("cut", "empty") or name in ("metrics.json", "env.json"):
        assert name in view.problems
        assert name in text_of(view, 160, 40)


def test_a_folder_without_a_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="give the out_dir of a run"):
            read_run(folder)


def test_a_run_of_50_000_steps_is_read_in_a_fraction_of_the_time_between_two_looks(tmp_path):
    folder = long_run(tmp_path / "run")
    with (folder / "training.csv").open("a") as file:
        file.write(training_row(50_001, loss=3.5))
    began = time.thread_time()  # CPU time: what else the machine does is not its cost
    view = read_run(folder, BEGAN + 50_000 * 0.55)
    assert time.thread_time() - began < 1.5
    assert (len(view.training), view.latest("loss"), view.problems) == (50_001, 3.5, {})
    assert (view.attempts, round(view.elapsed_s), view.timeline[0].step) == (1, 27_500, 25_000)


def test_elapsed_time_follows_no_jump_of_the_time_of_day(tmp_path):
    folder = tmp_path / "run"
    live_run(folder)
    lines = [event("boot", 0, at=BEGAN, clock=50.0), event("start", 0, at=BEGAN + 1, clock=51.0, world_size=1, steps=9)]
    lines += [event("step", 1, at=BEGAN - 7200, clock=60.25), event("end", 1, at=BEGAN - 7190, clock=70.5)]
    (folder / "heartbeat_rank0.jsonl").write_text("".join(lines))
    assert read_run(folder, BEGAN + 10**6).elapsed_s == 20.5
    old = "".join(re.sub(', "clock": [0-9.]+', "", line) for line in lines)  # of a version without that clock
    (folder / "heartbeat_rank0.jsonl").write_text(old)
    assert read_run(folder, BEGAN + 10**6).elapsed_s == 1.0
    assert parse_event(format_event(run_folder.make_event("end", 0, 1)))["clock"] <= time.monotonic() + 1e-3


@pytest.mark.timeout(150)
@pytest.mark.parametrize("text", ["#" * 10**7, "a: &a [x, x]\nb: &b [*a, *a]\n", "<<: {a: 1}\n"])
def test_a_hostile_configuration_is_a_problem_of_its_file_alone(tmp_path, text):
    now = live_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(text)
    view = read_run(tmp_path / "run", now)
    assert view.problems["config.yaml"] == "damaged: cannot be parsed"
    assert view.step == 40


def test_text_of_a_run_cannot_control_the_terminal(tmp_path):
    now = live_run(tmp_path / "run")
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("incident", 40, kind="\x1b[2Jx", message="\x1b]0;owned\x07[bold]a\nb[/bold]"))
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(frame(read_run(tmp_path / "run", now)))
    assert "\x1b" not in capture.get()
    assert "[bold]a b[/bold]" in capture.get()
