"""The console is a sink like any other (row 13): what happens to it never reaches training."""

import fcntl
import io
import os
import sys
import threading

import pytest

from nsa.record import events, run_log
from nsa.train import train
from tests.distributed.launching import events_of, metrics_of, rows_of, start_ranks, wait_all
from tests.faults.kills import assert_equal_to_the_bit, make_runs
from tests.train.test_training import tiny


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("console", "why"),
    [(closed_pipe, "Broken pipe"), (lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device")],
    ids=["nobody reads", "full disk"],
)
def test_output_that_cannot_be_written_is_counted_and_the_run_reaches_its_end(tmp_path, unbroken, console, why):
    runs, output = make_runs(tmp_path, "single"), console()
    processes = start_ranks(1, "train", runs.config, f"train.out_dir={tmp_path / 'run'}", console=output)
    os.close(output)
    [ended] = wait_all(processes)
    assert ended.code == 0
    assert metrics_of(tmp_path / "run")["status"] == "done"
    assert metrics_of(tmp_path / "run")["telemetry_failures"] > 0
    [incident] = [e for e in events_of(tmp_path / "run") if e["event"] == "incident"]
    assert incident["message"] == f"standard output cannot be written: {why}"
    assert "step 0008" in (tmp_path / "run" / "run.log").read_text()
    assert_equal_to_the_bit(tmp_path / "run", unbroken("single"), 1)


def test_an_error_keeps_its_exit_code_if_nobody_reads_the_output(tmp_path):
    runs, output = make_runs(tmp_path, "single"), closed_pipe()
    processes = start_ranks(1, "train", runs.config, "train.batch_size=-1", console=output)
    os.close(output)
    assert wait_all(processes)[0].code == 2


def test_a_pipe_that_is_full_and_not_read_does_not_hold_up_training(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096))
    monkeypatch.setattr(events, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(run_log, "FLUSH_S", 0.05)
    with os.fdopen(writer, "w") as output:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            train(tiny(), tmp_path)
        assert len(rows_of(tmp_path)) == 6
        assert "step 0006" in (tmp_path / "run.log").read_text()
        # Now somebody reads, so that the thread that still writes ends.
        threading.Thread(target=lambda: list(iter(lambda: os.read(reader, 4096), b""))).start()


@pytest.mark.long  # its end waits ten seconds for somebody to read
def test_a_process_whose_output_is_not_read_ends_with_its_exit_code(tmp_path):
    runs, (reader, writer) = make_runs(tmp_path, "single"), os.pipe()
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096))
    arguments = ("train", runs.config, f"train.out_dir={tmp_path / 'run'}")
    [ended] = wait_all(start_ranks(1, *arguments, faults="step.forward:terminate:hit=4", console=writer))
    assert ended.code == 75
    assert metrics_of(tmp_path / "run")["exit_code"] == 75
    for end in (reader, writer):
        os.close(end)


def test_the_progress_bar_of_a_terminal_does_not_reach_run_log(tmp_path, monkeypatch):
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    for name in ("plain", "terminal"):
        with monkeypatch.context() as patch, os.fdopen(os.dup(theirs), "w") as output:
            if name == "terminal":
                patch.setattr(sys, "stdout", output)
            train(tiny("train.log_every=1"), tmp_path / name)
    os.set_blocking(ours, False)
    assert b"\x1b[2K" in os.read(ours, 1 << 16), "the terminal has a bar"
    logs = [(tmp_path / name / "run.log").read_text().splitlines() for name in ("plain", "terminal")]
    assert "\x1b" not in "".join(logs[1])
    assert [line.split()[0] for line in logs[0][1:]] == [line.split()[0] for line in logs[1][1:]]
    for end in (ours, theirs):
        os.close(end)


def test_a_line_is_one_write_so_that_two_ranks_never_share_one(tmp_path, monkeypatch):
    written = []

    class Writes(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Writes())
    train(tiny(), tmp_path)
    lines = [text for text in written if text.startswith(("rank 0 of 1", "model ", "step 0006"))]
    assert len(lines) >= 3
    assert all(text.endswith("\n") for text in lines), lines
