"""Real processes that get stuck (stuck.py) under a watchdog with a floor of one second."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import timeit
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nsa.record.watchdog import Watchdog
from tests.distributed.launching import ROOT, Ended, environment, events_of, wait_all

STUCK = Path(__file__).with_name("stuck.py")
IN_TIME_S = 15  # the limit is one second, the rest is for a busy machine
linux = pytest.mark.skipif(sys.platform != "linux", reason="the dead man needs glibc")


def start(how: str, folder: Path, rank: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(STUCK), how, str(folder), str(rank)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def run(how: str, folder: Path) -> Ended:
    return wait_all([start(how, folder)], IN_TIME_S)[0]


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert any(line.strip() == word for line in iter(process.stdout.readline, ""))


def dumps(folder: Path, rank: int = 0) -> list[str]:
    while True:
        with suppress(FileNotFoundError):  # it just got another name
            return [path.read_text() for path in folder.glob(f"stackdump_*_rank{rank}.txt")]


def shown_where(how: str, text: str) -> bool:
    """Whether the stacks name the line of stuck.py that is marked so, and its function."""
    lines = STUCK.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {how}"))
    function = next(line for line in reversed(lines[:number]) if line.lstrip().startswith("def "))
    name = function.split("def ")[1].split("(")[0]
    return f'File "{STUCK}", line {number} in {name}\n' in text


def stamps(folder: Path, rank: int = 0) -> list[float]:
    """The times that the names of the dumps say."""
    names = [path.name for path in folder.glob(f"stackdump_*_rank{rank}.txt")]
    return [time.mktime(time.strptime(name.split("_")[1], "%Y%m%dT%H%M%S")) for name in names]


def wait_until(condition, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["sleeping", "lock", "pipe", "data_thread"])
def test_a_stuck_process_ends_with_code_6_and_its_stacks_show_where(tmp_path, how):
    ended = run(how, tmp_path)
    assert ended.code == 6
    said = ended.output.splitlines()[-1]
    assert re.fullmatch(
        r"hang: rank 0: no progress for \d s in step 12 \(phase backward\); stacks in .*; exit code 6", said
    )
    (text,) = dumps(tmp_path)
    assert shown_where(how, text)
    assert said in text
    assert "GiB resident" in text
    (path,) = tmp_path.glob("stackdump_*")
    assert f"stacks in {path}; exit code 6" in said
    (stamp,) = stamps(tmp_path)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
    assert f"\n{at}, limit 1.0 s" in text, "the name has the time of the dump, not of the start"
    assert "rank 0: step 0, event start" in text
    hang = events_of(tmp_path)[-1]
    assert (hang["event"], hang["step"], hang["phase"], hang["limit_s"]) == ("hang", 12, "backward", 1.0)


@linux
def test_a_process_whose_c_code_never_gives_up_the_gil_ends_with_code_6_and_its_stacks(tmp_path):
    ended = run("gil", tmp_path)
    assert ended.code == 6
    assert "exit code 6; last beat: step 12 (phase backward)" in ended.output
    (text,) = dumps(tmp_path)
    assert shown_where("gil", text)
    assert "step 12 (phase backward)" in text


def test_where_the_dead_man_needs_faulthandler_the_process_ends_too(tmp_path):
    assert run("elsewhere", tmp_path).code == 1
    (text,) = dumps(tmp_path)
    assert shown_where("gil", text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hung_device_ends_the_process_with_its_memory_and_nccls_record(tmp_path):
    ended = wait_all([start("device", tmp_path)], 120)[0]
    assert ended.code == 6
    (text,) = dumps(tmp_path)
    assert shown_where("device", text)
    assert "PyTorch CUDA memory summary" in text
    assert json.loads((tmp_path / "nccl_trace_rank0.json").read_text())["entries"]


def test_c_code_that_gives_up_the_gil_only_now_and_then_hides_no_hang(tmp_path):
    assert run("gil_again_and_again", tmp_path).code == 6
    (text,) = dumps(tmp_path)
    assert shown_where("gil_again_and_again", text)


@pytest.mark.parametrize("how", ["slow_steps", "first_step", "patience"])
def test_what_may_take_long_is_no_hang(tmp_path, how):
    ended = run(how, tmp_path)
    assert (ended.code, ended.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(tmp_path)


def test_a_hang_after_a_long_phase_is_found(tmp_path):
    assert run("after_patience", tmp_path).code == 6


def test_a_rank_that_waits_for_one_whose_data_does_not_come_is_no_hang(tmp_path):
    ended = run("another_rank_waits_for_data", tmp_path)
    assert (ended.code, ended.output) == (0, "armed\ndone with 0 failures\n")


def test_it_is_one_as_soon_as_that_rank_hangs(tmp_path):
    assert run("another_rank_waits_and_hangs", tmp_path).code == 6
    assert events_of(tmp_path)[-1]["silent_s"] > 2.2, "not before"


def test_a_rank_whose_own_data_does_not_come_judges_for_itself(tmp_path):
    assert run("all_ranks_wait_for_data", tmp_path).code == 6


@linux
def test_a_stopped_process_goes_on_when_it_is_continued_and_is_still_watched(tmp_path):
    process = start("working_then_gil", tmp_path)
    wait_for(process, "working")
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # longer than the limit and the dead man's grace together
        process.send_signal(signal.SIGCONT)
        time.sleep(1.2)
        assert process.poll() is None
    assert dumps(tmp_path) == [""]
    (tmp_path / "stop").touch()
    assert wait_all([process], IN_TIME_S)[0].code == 6
    (text,) = dumps(tmp_path)
    assert shown_where("gil", text)


def test_sigusr2_shows_the_stacks_and_the_run_goes_on(tmp_path):
    process = start("working", tmp_path)
    wait_for(process, "working")
    for times in (1, 2):
        time.sleep(1.1)
        asked = time.time()
        process.send_signal(signal.SIGUSR2)
        wait_until(lambda times=times: [dump.count("in working\n") for dump in dumps(tmp_path)] == [times])
        wait_until(lambda asked=asked: any(stamp >= asked - 1.0 for stamp in stamps(tmp_path)))  # whole seconds
    (tmp_path / "stop").touch()
    ended = wait_all([process], IN_TIME_S)[0]
    assert (ended.code, ended.output) == (0, "stopped itself\ndone with 0 failures\n")
    assert len(dumps(tmp_path)) == 1  # what was asked for is kept


@linux
def test_sigusr2_shows_the_stacks_of_a_process_that_keeps_the_gil(tmp_path):
    process = start("gil", tmp_path)
    wait_for(process, "armed")
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: any(shown_where("gil", dump) for dump in dumps(tmp_path)), within_s=1.0)
    assert wait_all([process], IN_TIME_S)[0].code == 6


def test_an_abort_leaves_its_stacks(tmp_path):
    assert run("aborting", tmp_path).code == -signal.SIGABRT
    (text,) = dumps(tmp_path)
    assert shown_where("aborting", text)


@pytest.mark.parametrize("how", ["sleeping", "gil"])
def test_without_a_folder_the_stacks_are_on_stderr(tmp_path, how):
    folder = tmp_path / "file"
    folder.write_text("in place of the folder")
    ended = run(how, folder)
    assert ended.code == 6
    assert shown_where(how, ended.output)
    assert "hang: rank 0: no progress" in ended.output
    assert "stacks above; exit code 6" in ended.output


def test_with_a_full_disk_the_stacks_are_on_stderr(tmp_path):
    ended = run("full_disk", tmp_path)
    assert ended.code == 6
    assert shown_where("sleeping", ended.output)
    assert "(phase backward); stacks above; exit code 6" in ended.output
    assert dumps(tmp_path) == [""]


@linux
def test_a_stderr_that_nobody_reads_does_not_keep_the_process(tmp_path):
    process = start("stderr_that_nobody_reads", tmp_path)
    assert process.wait(IN_TIME_S) == 6
    process.communicate()
    (text,) = dumps(tmp_path)
    assert shown_where("stderr_that_nobody_reads", text)


def test_a_normal_end_leaves_no_file_and_no_thread(tmp_path):
    leftover = tmp_path / "stackdump_20250101T000000_rank0.txt"
    leftover.touch()  # of a process that was killed
    ended = run("nothing", tmp_path)
    assert (ended.code, ended.output) == (0, "armed\ndone with 0 failures\n")
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat_rank0.jsonl"]


def test_after_an_exception_nothing_is_watched(tmp_path):
    ended = run("raising", tmp_path)  # sleeps longer than the limit after it
    assert (ended.code, ended.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(tmp_path)


@linux
def test_a_stopped_rank_is_named_and_killed_and_a_running_one_shows_its_stacks(tmp_path):
    of_a_run_before = tmp_path / "stackdump_20250101T000000_rank0.txt"
    of_a_run_before.write_text("these are not the stacks that are wanted")
    os.utime(of_a_run_before, (0, 0))
    running, stopped = start("working", tmp_path, 0), start("working", tmp_path, 1)
    for process in (running, stopped):
        wait_for(process, "working")
    stopped.send_signal(signal.SIGSTOP)
    ended = wait_all([start("sleeping", tmp_path, 2)], IN_TIME_S)[0]
    assert ended.code == 6
    assert stopped.wait(5) == -signal.SIGKILL
    stopped.communicate()
    (text,) = dumps(tmp_path, 2)
    host = os.uname().nodename
    assert re.search(rf"rank 1: step 0, event start, \d+ s ago; process {stopped.pid} on {host}: stopped\n", text)
    assert "rank 1 was stopped and could not end itself: killed" in text
    assert [(r["rank"], r["killed"]) for r in events_of(tmp_path, 2)[-1]["ranks"]] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    wait_until(lambda: any("in working\n" in dump for dump in dumps(tmp_path, 0)))
    (tmp_path / "stop").touch()
    assert wait_all([running], IN_TIME_S)[0].code == 0


def test_no_process_is_touched_that_only_has_a_dead_ranks_number(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        start_event = {"step": 3, "event": "start", "pid": sleeper.pid, "host": os.uname().nodename}
        for rank, seen_at in ((1, time.time() - 100), (2, "never")):
            event = {"time": seen_at, "rank": rank, **start_event}
            (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text(json.dumps(event) + '\n{"time": 1')
        assert run("sleeping", tmp_path).code == 6
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    (text,) = dumps(tmp_path)
    assert f"process {sleeper.pid} on {os.uname().nodename}: gone" in text


def test_the_limit_follows_the_median_step(tmp_path):
    with Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0) as dog:
        assert dog.limit_s == 600.0
        dog.step_done(2.0)
        assert dog.limit_s == 60.0
        for seconds in (20.0, 20.0, 1000.0):
            dog.step_done(seconds)
        assert dog.limit_s == 100.0
        with dog.patient(300.0), dog.patient(200.0):
            assert dog.limit_s == 300.0
        assert dog.limit_s == 100.0
        for _ in range(101):
            dog.step_done(0.1)
        assert dog.limit_s == 60.0


def test_a_beat_costs_less_than_20_microseconds(tmp_path):
    with Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0) as dog:
        rounds = timeit.repeat(lambda: dog.beat(12, "backward"), number=2000, repeat=10)
    assert min(rounds) / 2000 < 20e-6
    assert dog.failures == 0
