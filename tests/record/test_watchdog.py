"""The watchdog: its rules with an injected clock, and real processes that get stuck (stuck.py, floor 0.5 s)."""

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

import psutil
import pytest
import torch

from nsa.record.guard import Silence, data_is_missing_elsewhere, read_ranks
from nsa.record.watchdog import Watchdog
from tests.distributed.launching import ROOT, Ended, environment, events_of, metrics_of, wait_all

STUCK = Path(__file__).with_name("stuck.py")
IN_TIME_S = 30  # the limit is half a second, the rest is for a busy machine
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")


def start(how: str, folder: Path, rank: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(STUCK), how, str(folder), str(rank)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert any(line.strip() == word for line in iter(process.stdout.readline, ""))


def guard_of(process: subprocess.Popen[str]) -> psutil.Process:
    (guard,) = psutil.Process(process.pid).children()
    return guard


def dumps(folder: Path, rank: int = 0) -> list[str]:
    while True:
        with suppress(FileNotFoundError):  # it was just renamed
            return [path.read_text() for path in folder.glob(f"stackdump_*_rank{rank}.txt")]


def shown_where(how: str, text: str) -> bool:
    """Whether the stacks name the line of stuck.py that is marked so, and its function."""
    lines = STUCK.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {how}"))
    function = next(line for line in reversed(lines[:number]) if line.lstrip().startswith("def "))
    name = function.split("def ")[1].split("(")[0]
    return f'File "{STUCK}", line {number} in {name}\n' in text


def stamps(folder: Path, rank: int = 0) -> list[float]:
    """The times in the names of the dumps."""
    names = [path.name for path in folder.glob(f"stackdump_*_rank{rank}.txt")]
    return [time.mktime(time.strptime(name.split("_")[1], "%Y%m%dT%H%M%S")) for name in names]


def wait_until(condition, within_s: float = IN_TIME_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The rules, with an injected clock.


def silence_of(*waits: float, stopped: tuple[int, ...] = (), beats: tuple[int, ...] = ()) -> float:
    """After waits of the given seconds; those at `stopped` found the rank stopped, those at `beats` a new beat."""
    silence, now, beat = Silence(0.0, longest_wait_s=4.0), 0.0, b"beat"
    seconds = silence.measure(beat, now, stopped=False)
    for number, wait in enumerate(waits):
        now += wait
        beat += b"!" if number in beats else b""
        seconds = silence.measure(beat, now, stopped=number in stopped)
    return seconds


def test_silence_is_the_time_without_a_new_beat():
    assert silence_of(1.0, 1.0, 2.0) == 4.0
    assert silence_of(1.0, 1.0, 2.0, beats=(1,)) == 2.0
    assert silence_of(1.0, 1.0, beats=(1,)) == 0.0


def test_time_in_which_the_rank_was_stopped_is_not_silence():
    assert silence_of(1.0, 1.0, 1.0, 1.0, stopped=(1, 2)) == 2.0


def test_time_in_which_the_whole_machine_stood_still_is_not_silence():
    assert silence_of(1.0, 3600.0, 1.0) == 1.0 + 4.0 + 1.0


def test_the_limit_follows_the_median_step(tmp_path):
    dog = Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0)
    assert dog.limit_s == 600.0
    dog.step_done(2.0)
    assert dog.limit_s == 60.0
    for seconds in (20.0, 20.0, 1000.0):
        dog.step_done(seconds)
    assert dog.limit_s == 100.0
    with dog.allow(300.0), dog.allow(200.0):
        assert dog.limit_s == 300.0
    assert dog.limit_s == 100.0
    for _ in range(101):
        dog.step_done(0.1)
    assert dog.limit_s == 60.0


def write_events(folder: Path, rank: int, *events: tuple[str, float]) -> None:
    lines = [{"time": time.time() - age_s, "rank": rank, "step": 3, "event": kind} for kind, age_s in events]
    (folder / f"heartbeat_rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_rank_that_waits_for_one_whose_data_is_missing_is_no_hang(tmp_path):
    write_events(tmp_path, 0, ("step", 70))
    write_events(tmp_path, 1, ("step", 65), ("data_stall", 40), ("data_stall", 10))
    assert data_is_missing_elsewhere(tmp_path, "step", 60.0)
    assert not data_is_missing_elsewhere(tmp_path, "step", 5.0), "its last report is too old"
    assert not data_is_missing_elsewhere(tmp_path, "data", 60.0), "the own data is missing too: judge for itself"


@pytest.mark.parametrize("after", ["step", "hang"])
def test_it_is_a_hang_as_soon_as_that_rank_goes_on_or_hangs(tmp_path, after):
    write_events(tmp_path, 1, ("data_stall", 40), (after, 20))
    assert not data_is_missing_elsewhere(tmp_path, "step", 60.0)
    write_events(tmp_path, 1, ("data_stall", 40), ("hang", 20), ("data_stall", 5))
    assert not data_is_missing_elsewhere(tmp_path, "step", 60.0), "until its end its threads still report it"


@linux
def test_no_process_is_touched_that_only_has_a_dead_ranks_number(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)
        boot = {"step": 3, "event": "boot", "pid": sleeper.pid, "host": os.uname().nodename}
        for rank, seen_at in ((1, time.time() - 100), (2, "never"), (3, time.time())):
            event = {"time": seen_at, "rank": rank, **boot}
            (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text(json.dumps(event) + '\n{"time": 1')
        dead, damaged, alive = (rank for rank, _ in read_ranks(tmp_path))
        dead.kill_if_stopped()
        assert (dead.rank, dead.state, dead.killed) == (1, "gone", False)
        damaged.kill_if_stopped()
        assert (damaged.rank, damaged.pid, damaged.killed) == (2, None, False)
        assert sleeper.poll() is None
        alive.kill_if_stopped()
        assert (alive.rank, alive.state, alive.killed) == (3, "stopped", True)
        assert sleeper.wait(5) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


def test_every_rank_is_listed_also_after_it_found_a_hang_or_with_a_damaged_file(tmp_path):
    host, now = os.uname().nodename, time.time()
    boot = {"time": now, "step": 0, "event": "boot", "pid": os.getpid(), "host": host}
    hang = {"time": now, "step": 4, "event": "hang", "phase": "step", "ranks": [{"rank": 0, "pid": 1, "host": host}]}
    (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(boot) + "\n" + json.dumps(hang) + "\n")
    (tmp_path / "heartbeat_rank1.jsonl").write_text(json.dumps({**boot, "pid": "none"}) + "\n")
    (tmp_path / "heartbeat_rank2.jsonl").write_text(json.dumps({**boot, "host": "another"}) + "\n")
    found = {rank.rank: (rank.event, rank.pid, rank.is_alive_here) for rank, _ in read_ranks(tmp_path)}
    assert found == {0: ("hang", os.getpid(), True), 2: ("boot", os.getpid(), False)}


def test_a_beat_costs_less_than_20_microseconds(tmp_path):
    with Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0) as dog:
        rounds = timeit.repeat(lambda: dog.beat(12, "backward"), number=2000, repeat=10)
    assert min(rounds) / 2000 < 20e-6
    assert dog.failures.count == 0


def test_without_a_guard_training_goes_on_and_the_failure_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0) as dog:
        dog.beat(1, "step")
        assert dog.failures.count == 1
    assert dog.failures.count == 1
    assert not list(tmp_path.iterdir())


def test_a_guard_that_is_killed_is_counted(tmp_path):
    with Watchdog(tmp_path, 0, floor_s=60.0, first_step_s=600.0) as dog:
        (guard,) = (p for p in psutil.Process().children() if "nsa.record.guard" in " ".join(p.cmdline()))
        guard.kill()
        wait_until(lambda: dog.failures.count == 1)
        dog.beat(1, "step")
    assert dog.failures.count == 1
    assert not list(tmp_path.iterdir())


# Real processes. Those that need nothing but time run at once.

WITHOUT_FOLDER = ("sleeping", "gil")
HANGS = (
    *("sleeping", "lock", "pipe", "data_thread", "gil", "gil_without_exit_switch", "gil_again_and_again"),
    *("stderr_that_nobody_reads", "full_disk", "report_that_never_ends", "after_allowed", "aborting"),
    *("end_while_it_is_reported", "end_while_it_is_reported_without_exit_switch"),
)
NO_HANGS = ("first_step", "allowed", "nothing", "raising", "end_before_it_is_reported")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each of the processes ended and the folder it left, by name; `no folder NAME` had a file in its place."""
    folders = {how: tmp_path_factory.mktemp(how) for how in (*HANGS, *NO_HANGS)}
    (folders["nothing"] / "stackdump_20250101T000000_rank0.txt").touch()  # of a process that was killed
    for how in WITHOUT_FOLDER:
        folders[f"no folder {how}"] = tmp_path_factory.mktemp("file") / "file"
        folders[f"no folder {how}"].write_text("in place of the folder")
    results: dict[str, tuple[Ended, Path]] = {}
    names = list(folders)
    for few in (names[i : i + 9] for i in range(0, len(names), 9)):  # no more: they would disturb each other
        processes = [start(name.removeprefix("no folder "), folders[name]) for name in few]
        for name, end in zip(few, wait_all(processes, IN_TIME_S), strict=True):
            results[name] = (end, folders[name])
    return results


@pytest.mark.parametrize("how", ["sleeping", "lock", "pipe", "data_thread"])
def test_a_stuck_process_ends_with_code_6_and_its_stacks_show_where(ended, how):
    end, folder = ended[how]
    assert end.code == 6
    line = end.output.splitlines()[-1]
    assert re.fullmatch(
        r"hang: rank 0: no progress for \d s in step 12 \(phase backward\); stacks in .*; exit code 6", line
    )
    (text,) = dumps(folder)
    assert shown_where(how, text)
    assert line in text
    assert "GiB resident" in text
    (path,) = folder.glob("stackdump_*")
    assert f"stacks in {path}; exit code 6" in line
    (stamp,) = stamps(folder)
    assert any(
        f"\n{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(stamp + late))}, limit 0.5 s" in text for late in (0, 1)
    ), "the name has the time of the dump, not of the start"
    assert "rank 0: step 11, event step" in text
    hang = events_of(folder)[-1]
    assert (hang["event"], hang["step"], hang["phase"], hang["limit_s"]) == ("hang", 12, "backward", 0.5)
    assert (hang["reported_by"], hang["file"]) == ("thread", str(path))


@linux
@pytest.mark.parametrize(("how", "code"), [("gil", 6), ("gil_without_exit_switch", -signal.SIGKILL)])
def test_a_process_whose_c_code_never_releases_the_gil_is_reported_and_ended_by_the_guard(ended, how, code):
    end, folder = ended[how]
    assert end.code == code
    assert re.search(r"hang: rank 0: no progress for \d s in step 12 \(phase backward\)", end.output)
    (text,) = dumps(folder)
    assert shown_where("gil", text)
    assert "rank 0: step 11, event step" in text
    (hang,) = [event for event in events_of(folder) if event["event"] == "hang"]
    assert (hang["step"], hang["phase"], hang["limit_s"]) == (12, "backward", 0.5)
    assert hang["reported_by"] == "guard"
    assert [rank["rank"] for rank in hang["ranks"]] == [0]
    (path,) = folder.glob("stackdump_*")
    assert hang["file"] == str(path)
    metrics = metrics_of(folder)
    assert (metrics["status"], metrics["exit_code"], metrics["steps"]) == ("failed", 6, 11)
    assert "in step 12 (phase backward)" in metrics["reason"]


@pytest.mark.parametrize("how", ["gil_again_and_again", "stderr_that_nobody_reads", "after_allowed"])
def test_other_ways_to_hang_are_found_too(ended, how):
    end, folder = ended[how]
    assert end.code == 6
    (text,) = dumps(folder)
    assert shown_where("sleeping" if how == "after_allowed" else how, text)


def test_a_report_that_does_not_end_is_cut_off_and_the_guard_records_the_hang(ended):
    end, folder = ended["report_that_never_ends"]
    assert end.code == 6
    assert events_of(folder)[-1]["reported_by"] == "guard"
    assert metrics_of(folder)["exit_code"] == 6


@pytest.mark.parametrize("how", ["end_while_it_is_reported", "end_while_it_is_reported_without_exit_switch"])
def test_a_rank_that_goes_on_during_its_report_waits_for_it_and_ends_with_code_6(ended, how):
    end, folder = ended[how]
    assert end.code == 6
    (hang,) = [event for event in events_of(folder) if event["event"] == "hang"]
    assert hang["reported_by"] == "thread"
    (text,) = dumps(folder)
    assert text.count("stacks of all threads") == 1
    assert "Fatal" not in text
    assert "reported by the guard" not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hung_device_ends_the_process_with_its_memory_and_nccls_record(tmp_path):
    (end,) = wait_all([start("device", tmp_path)], 120)
    assert end.code == 6
    (text,) = dumps(tmp_path)
    assert shown_where("device", text)
    assert "PyTorch CUDA memory summary" in text
    assert json.loads((tmp_path / "nccl_trace_rank0.json").read_text())["entries"]


@pytest.mark.parametrize("how", ["first_step", "allowed"])
def test_what_may_take_long_is_no_hang(ended, how):
    end, folder = ended[how]
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(folder)


def test_an_abort_leaves_its_stacks(ended):
    end, folder = ended["aborting"]
    assert end.code == -signal.SIGABRT
    (text,) = dumps(folder)
    assert shown_where("aborting", text)


@pytest.mark.parametrize("how", WITHOUT_FOLDER)
def test_without_a_folder_the_stacks_are_on_stderr(ended, how):
    end, _ = ended[f"no folder {how}"]
    assert end.code == 6
    assert shown_where(how, end.output)
    assert "hang: rank 0: no progress" in end.output
    assert "stacks above; exit code 6" in end.output


def test_with_a_full_disk_the_stacks_are_on_stderr(ended):
    end, folder = ended["full_disk"]
    assert end.code == 6
    assert shown_where("sleeping", end.output)
    assert "(phase backward); stacks above; exit code 6" in end.output
    assert dumps(folder) == [""]


def test_a_rank_that_is_about_to_end_is_sent_no_signal_and_keeps_its_own_code(ended):
    end, folder = ended["end_before_it_is_reported"]
    assert (end.code, end.output.splitlines()[-1]) == (0, "done with 0 failures")
    assert dumps(folder) == []
    assert [event["event"] for event in events_of(folder)] == ["start", "step"]


def test_a_normal_end_leaves_no_file_and_no_thread(ended):
    end, folder = ended["nothing"]
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert [path.name for path in folder.iterdir()] == ["heartbeat_rank0.jsonl"]


def test_after_an_exception_nothing_is_watched(ended):
    end, folder = ended["raising"]  # sleeps longer than the limit after it
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(folder)


@linux
def test_a_stopped_process_goes_on_when_it_is_continued_and_is_still_watched(tmp_path):
    process = start("working_then_gil", tmp_path)
    wait_for(process, "working")
    guard = guard_of(process)
    wait_until(lambda: guard.memory_maps() and "guard" in " ".join(guard.cmdline()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # as a terminal or a scheduler sends
        guard.send_signal(number)
    for stopped in ([process], [process, guard]):
        for each in stopped:
            each.send_signal(signal.SIGSTOP)
        time.sleep(1.2)  # more than twice the limit
        for each in stopped:
            each.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert process.poll() is None
    assert dumps(tmp_path) == [""]
    (tmp_path / "stop").touch()
    assert wait_all([process], IN_TIME_S)[0].code == 6
    (text,) = dumps(tmp_path)
    assert shown_where("gil", text)


def test_sigusr2_shows_the_stacks_and_the_run_goes_on(tmp_path):
    process = start("working", tmp_path)
    wait_for(process, "working")
    time.sleep(1.1)  # names have whole seconds
    asked = time.time()
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: [dump.count("in working\n") for dump in dumps(tmp_path)] == [1])
    wait_until(lambda: any(stamp >= asked - 1.0 for stamp in stamps(tmp_path)))
    (tmp_path / "stop").touch()
    ended = wait_all([process], IN_TIME_S)[0]
    assert (ended.code, ended.output) == (0, "stopped itself\ndone with 0 failures\n")
    assert len(dumps(tmp_path)) == 1  # what was asked for is kept


@linux
def test_the_guard_is_small_and_never_outlives_its_rank(tmp_path):
    process = start("working", tmp_path)
    wait_for(process, "working")
    guard = guard_of(process)
    wait_until(lambda: "mmap" in " ".join(m.path for m in guard.memory_maps()))
    assert guard.memory_info().rss < 40 * 2**20
    assert not [m.path for m in guard.memory_maps() if "torch" in m.path or "numpy" in m.path]
    process.kill()
    process.communicate()
    wait_until(lambda: not psutil.pid_exists(guard.pid))


@linux
def test_a_stopped_rank_is_named_and_killed_and_a_running_one_shows_its_stacks(tmp_path):
    of_an_earlier_run = tmp_path / "stackdump_20250101T000000_rank0.txt"
    of_an_earlier_run.write_text("these are not the stacks that are wanted")
    os.utime(of_an_earlier_run, (0, 0))
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
    assert re.search(rf"rank 1: step 11, event step, \d+ s ago; process {stopped.pid} on {host}: stopped\n", text)
    assert "rank 1 was stopped and could not end itself: killed" in text
    assert [(r["rank"], r["killed"]) for r in events_of(tmp_path, 2)[-1]["ranks"]] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    wait_until(lambda: any("in working\n" in dump for dump in dumps(tmp_path, 0)))
    (tmp_path / "stop").touch()
    assert wait_all([running], IN_TIME_S)[0].code == 0
