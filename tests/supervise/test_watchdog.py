"""The watchdog: its rules, and real processes that get stuck (stuck.py, floor 0.5 s)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import timeit
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from nsa.record.failures import Failures
from nsa.run_folder import format_event, make_event
from nsa.supervise.ranks import RankState, format_ranks, identify, read_ranks
from nsa.supervise.watchdog import Watchdog
from tests.distributed.launching import ROOT, Ended, environment, events_of, wait_all
from tests.waiting import wait_until

STUCK = Path(__file__).with_name("stuck.py")
IN_TIME_S = 30  # the limit is half a second, the rest is for a busy machine
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


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


# The rules.


def make_watchdog(folder: Path, failures: Failures, floor_s: float = 60.0, size: int = 1) -> Watchdog:
    return Watchdog(
        folder,
        0,
        size,
        floor_s=floor_s,
        first_step_s=600.0,
        on_hang=lambda report, message: None,
        counted=failures.counted,
    )


def test_the_limit_follows_the_median_step(tmp_path):
    dog = make_watchdog(tmp_path, Failures())
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


@pytest.mark.parametrize(
    ("events", "is_stalled"),
    [
        (("step", "data_stall", "data_stall"), True),
        (("data_stall", "step"), False),
        (("data_stall", "hang"), False),
        (("data_stall", "hang", "data_stall"), False),  # until it ends, its other threads still report it
    ],
)
def test_a_rank_whose_data_is_missing_decides_until_it_goes_on_or_hangs(events, is_stalled):
    assert RankState(1, Path(), [{"event": kind} for kind in events]).is_stalled is is_stalled


def write_events(folder: Path, rank: int, *events: dict[str, object]) -> None:
    common = {"time": time.time(), "clock": time.monotonic(), "rank": rank, "step": 3}
    lines = [json.dumps({**common, **event}) + "\n" for event in events]
    (folder / f"heartbeat_rank{rank}.jsonl").write_text("".join(lines))


@linux
@pytest.mark.parametrize("jump_s", [-7200, 0, 7200])
def test_a_changed_clock_does_not_make_a_rank_look_gone(tmp_path, jump_s):
    boot = {"event": "boot", "time": time.time() - jump_s, **identify(os.getpid())}
    write_events(tmp_path, 1, boot, {"event": "step", "time": time.time() - jump_s, "clock": time.monotonic() - 40})
    (rank,) = read_ranks(tmp_path, 2)
    assert rank.process in ("running", "sleeping")
    assert rank.age_s == pytest.approx(40.0, abs=5.0)


@linux
def test_another_process_with_the_id_of_a_dead_rank_is_not_the_rank(tmp_path):
    own = {"event": "boot", **identify(os.getpid())}
    write_events(tmp_path, 0, own)
    write_events(tmp_path, 1, {**own, "start_ticks": own["start_ticks"] - 1})
    write_events(tmp_path, 2, {**own, "boot_id": "before the machine was restarted"})
    write_events(tmp_path, 3, {**own, "host": "another"})
    write_events(tmp_path, 4, {"event": "boot", "pid": os.getpid(), "host": own["host"]})  # of an earlier version
    states = [rank.process for rank in read_ranks(tmp_path, 5)]
    assert states[1:] == ["gone", "gone", "unknown", "unknown"]
    assert states[0] in ("running", "sleeping")


def test_every_rank_is_listed_also_after_it_found_a_hang_or_with_a_damaged_file(tmp_path):
    boot = {"event": "boot", **identify(os.getpid())}
    write_events(tmp_path, 0, boot, {"event": "hang", "ranks": [{"rank": 0, "pid": 1, "host": boot["host"]}]})
    write_events(tmp_path, 1, {**boot, "pid": "none"})
    write_events(tmp_path, 2, {**boot, "host": "another"}, {"event": "step", "time": "never"})
    (tmp_path / "heartbeat_rank3.jsonl").write_bytes(b"\xff\n{")
    write_events(tmp_path, 4, boot)  # of an earlier start with more ranks
    ranks = read_ranks(tmp_path, 4)
    assert [(r.rank, r.to_dict()["event"], r.to_dict()["pid"]) for r in ranks] == [
        (0, "hang", os.getpid()),
        (1, "boot", "none"),
        (2, "boot", os.getpid()),
    ]
    text = format_ranks(ranks)
    assert f"rank 2: step 3, event boot, 0 s ago; process {os.getpid()} on another: unknown\n" in text
    assert "last events of rank 0:\n" in text


@linux
def test_a_look_at_all_ranks_does_not_depend_on_the_length_of_the_run(tmp_path):
    """A rank that waits for the others looks every second; a report needs the boot event at the beginning."""
    write_events(tmp_path, 0, {"event": "boot", **identify(os.getpid())}, {"event": "data_stall", "filler": "x" * 200})
    path = tmp_path / "heartbeat_rank0.jsonl"
    boot, stall = path.read_text().splitlines(keepends=True)
    path.write_text(boot + stall * 200_000)
    began = time.thread_time()
    (rank,) = read_ranks(tmp_path, 1)
    assert rank.is_stalled
    assert time.thread_time() - began < 0.1
    assert rank.to_dict()["pid"] == os.getpid()
    assert rank.process in ("running", "sleeping")


@pytest.mark.parametrize("behind_s", [-60, 60])
def test_a_rank_waits_for_a_stalled_one_on_a_host_with_another_clock_as_long_as_it_reports(tmp_path, behind_s):
    failures, ended_at = Failures(), []
    dog = make_watchdog(tmp_path, failures, 2.0, size=2)
    dog._end_process = lambda *_: (ended_at.append(time.monotonic()), dog.step_done(0.0))
    with (tmp_path / "heartbeat_rank1.jsonl").open("ab", buffering=0) as file, dog:
        dog.step_done(0.1)
        began = time.monotonic()
        while time.monotonic() < began + 3:
            file.write(format_event(make_event("data_stall", 1, 3) | {"time": time.time() - behind_s}).encode())
            time.sleep(0.05)
        assert not ended_at
        last = time.monotonic()
        wait_until(lambda: ended_at)
        assert ended_at[0] - last < 10
    assert failures.count == 0


def test_a_beat_costs_less_than_20_microseconds(tmp_path):
    failures = Failures()
    with make_watchdog(tmp_path, failures) as dog:
        rounds = timeit.repeat(lambda: dog.beat(12, "backward"), number=2000, repeat=10)
    assert min(rounds) / 2000 < 20e-6
    assert failures.count == 0


@pytest.mark.parametrize("floor_s", [60.0, 1e300])
def test_without_its_thread_training_goes_on_and_the_failure_is_counted(tmp_path, monkeypatch, floor_s):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    failures = Failures()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with make_watchdog(tmp_path, failures, floor_s) as dog:
            dog.beat(1, "step")
    assert (failures.count, failures.last) == (1, "can't start new thread")
    with make_watchdog(tmp_path, failures, floor_s) as dog:
        dog.step_done(1.0)
        time.sleep(0.1)
    assert failures.count == 1
    assert not list(tmp_path.iterdir())


# Real processes. Those that need nothing but time run at once.

WITHOUT_FOLDER = ("sleeping", "gil")
HANGS = (
    *("sleeping", "lock", "pipe", "data_thread", "gil", "gil_again_and_again", "stderr_that_nobody_reads"),
    *("full_disk", "report_that_never_ends", "after_allowed", "aborting", "end_while_it_is_reported"),
)
NO_HANGS = ("first_step", "allowed", "nothing", "raising")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each of the processes ended and the folder it left, by name; `no folder NAME` had a file in its place."""
    folders = {how: tmp_path_factory.mktemp(how) for how in (*HANGS, *NO_HANGS)}
    (folders["nothing"] / "stackdump_20250101T000000_rank0.txt").touch()  # of a process that was killed
    write_events(folders["sleeping"], 9, {"event": "boot", "host": "another"})
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
    (path,) = folder.glob("stackdump_*")
    assert "rank 9" not in path.read_text(), "it is left from a larger world"
    line = r"hang: rank 0: no progress for \d s in step 12 \(phase backward\); "
    assert re.fullmatch(line + re.escape(f"stacks in {path}; exit code 6"), end.output.splitlines()[-1])
    (text,) = dumps(folder)
    assert re.match(line + r"limit 0.5 s\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, process \d+ on ", text)
    assert shown_where(how, text)
    assert "GiB resident" in text
    assert "rank 0: step 11, event step" in text
    hang = events_of(folder)[-1]
    assert (hang["event"], hang["step"], hang["phase"], hang["limit_s"]) == ("hang", 12, "backward", 0.5)
    assert (hang["file"], [rank["event"] for rank in hang["ranks"]]) == (str(path), ["step"])


def test_a_process_whose_c_code_never_releases_the_gil_leaves_its_stacks_and_ends_with_code_1(ended):
    end, folder = ended["gil"]
    assert (end.code, end.output) == (1, "armed\n")
    (text,) = dumps(folder)
    assert text.startswith("Timeout (")
    assert shown_where("gil", text)


def test_a_process_that_rarely_releases_the_gil_is_found_by_the_watchdog_or_by_the_c_timer(ended):
    """Whichever gets to run first: a busy machine may not give the interpreter to the watchdog in time."""
    end, folder = ended["gil_again_and_again"]
    assert end.code in (6, 1)
    (text,) = dumps(folder)
    assert shown_where("gil_again_and_again", text)


@pytest.mark.parametrize("how", ["stderr_that_nobody_reads", "after_allowed"])
def test_other_ways_to_hang_are_found_too(ended, how):
    end, folder = ended[how]
    assert end.code == 6
    (text,) = dumps(folder)
    assert shown_where("sleeping" if how == "after_allowed" else how, text)


def test_a_report_that_does_not_end_is_cut_off(ended):
    end, folder = ended["report_that_never_ends"]
    assert end.code == 6
    (text,) = dumps(folder)
    assert shown_where("sleeping", text)


def test_a_rank_that_goes_on_during_its_report_waits_for_it_and_ends_with_code_6(ended):
    end, folder = ended["end_while_it_is_reported"]
    assert end.code == 6
    assert [event["event"] for event in events_of(folder)] == ["boot", "step", "hang"]
    (text,) = dumps(folder)
    assert text.count("stacks of all threads") == 1
    assert "Fatal" not in text


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
def test_allowed_long_work_is_not_a_hang(ended, how):
    end, folder = ended[how]
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(folder)


def test_an_abort_leaves_its_stacks(ended):
    end, folder = ended["aborting"]
    assert end.code == -signal.SIGABRT
    (text,) = dumps(folder)
    assert shown_where("aborting", text)


@pytest.mark.parametrize(("how", "code", "first"), [("sleeping", 6, "hang: rank 0: "), ("gil", 1, "Timeout (")])
def test_without_a_folder_the_stacks_are_on_stderr(ended, how, code, first):
    end, _ = ended[f"no folder {how}"]
    assert end.code == code
    assert end.output.removeprefix("armed\n").startswith(first)
    assert shown_where(how, end.output)
    assert ("stacks above; exit code 6" in end.output) is (code == 6)


def test_with_a_full_disk_the_stacks_are_on_stderr(ended):
    end, folder = ended["full_disk"]
    assert end.code == 6
    assert shown_where("sleeping", end.output)
    assert "(phase backward); stacks above; exit code 6" in end.output
    assert dumps(folder) == [""]


def test_a_normal_end_leaves_no_file_and_no_thread(ended):
    end, folder = ended["nothing"]
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert [path.name for path in folder.iterdir()] == ["heartbeat_rank0.jsonl"]


def test_after_an_exception_nothing_is_watched(ended):
    end, folder = ended["raising"]  # sleeps longer than the limit after it
    assert (end.code, end.output) == (0, "armed\ndone with 0 failures\n")
    assert not dumps(folder)


def test_sigusr2_shows_the_stacks_and_the_run_goes_on(tmp_path):
    process = start("working", tmp_path)
    wait_for(process, "working")
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: [dump.count("in working\n") for dump in dumps(tmp_path)] == [1])
    (tmp_path / "stop").touch()
    ended = wait_all([process], IN_TIME_S)[0]
    assert (ended.code, ended.output) == (0, "stopped itself\ndone with 0 failures\n")
    assert len(dumps(tmp_path)) == 1  # what was asked for is kept


def test_a_rank_in_a_long_phase_leaves_its_stacks_when_another_one_finds_a_hang(tmp_path):
    """As when the disk of one rank does not answer while it saves, and the others wait for it."""
    saving = start("allowed_for_long", tmp_path, 1)
    wait_for(saving, "armed")
    assert wait_all([start("sleeping", tmp_path, 0)], IN_TIME_S)[0].code == 6
    wait_until(lambda: any(shown_where("allowed_for_long", text) for text in dumps(tmp_path, 1)))
    (text,) = dumps(tmp_path, 1)
    assert text.startswith("another rank reports a hang\n")
    saving.kill()
    saving.communicate()


@linux
def test_no_process_is_signalled_because_a_file_names_it(tmp_path):
    """Neither a stopped nor a running one, and not even a rank of the run: torchrun's agent ends its own children."""
    of_no_run = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    rank = start("working", tmp_path, 1)
    try:
        wait_for(rank, "working")
        for process in (rank, of_no_run[0]):
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda pid=process.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        for number, process in zip((7, 8), of_no_run, strict=True):
            write_events(tmp_path, number, {"event": "boot", **identify(process.pid)})
        assert wait_all([start("sleeping", tmp_path, 0)], IN_TIME_S)[0].code == 6
        (text,) = dumps(tmp_path)
        host = os.uname().nodename
        assert re.search(rf"rank 1: step \d+, event step, \d+ s ago; process {rank.pid} on {host}: stopped\n", text)
        assert f"process {of_no_run[0].pid} on {host}: stopped\n" in text
        states = [psutil.Process(process.pid).status() for process in (rank, *of_no_run)]
        assert states == ["stopped", "stopped", "sleeping"]
        assert dumps(tmp_path, 1) == [""]
    finally:
        for process in (rank, *of_no_run):
            process.kill()
            process.communicate()
