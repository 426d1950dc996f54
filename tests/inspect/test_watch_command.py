"""`nsa watch` as a command: one frame or a live view, of a run that is there or comes later."""

import io
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from nsa.cli.watch import watch
from nsa.errors import CheckpointError
from tests.record.runs import long_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 of 80 steps. Nobody writes into it."""
    return long_run(tmp_path_factory.mktemp("watch") / "run", 40, layers=2, every=10)


def command(*arguments):
    app = typer.Typer()
    app.command()(watch)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_prints_one_frame_without_a_terminal(folder):
    for arguments in ((folder,), (folder, "--once")):
        result = command(*arguments)
        assert result.exit_code == 0
        assert "step 40 of 80" in result.output


def test_watching_a_run_needs_no_torch(folder):
    look = f"from nsa.cli.watch import watch; watch(pathlib.Path({str(folder)!r}), 1.0, True)"
    code = f"import pathlib, sys; {look}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "step 40 of 80" in done.stdout) == (0, True)


@pytest.mark.parametrize("starting", [False, True])
def test_a_folder_that_is_not_there_yet_is_waited_for(folder, starting, tmp_path, monkeypatch):
    run, shown, looks = tmp_path / "later", io.StringIO(), []
    own, sleep_really = threading.get_ident(), time.sleep

    def sleep(seconds):
        if threading.get_ident() != own:  # of a thread that another test has left
            sleep_really(seconds)
            return
        looks.append(shown.getvalue())
        shown.truncate(0)
        if len(looks) == 3:
            raise KeyboardInterrupt
        if len(looks) == 2:
            shutil.copytree(folder, run, dirs_exist_ok=True)
        elif not run.exists():
            run.mkdir()

    if starting:
        run.mkdir()
        (run / ".lock").touch()
    terminal = Console(file=shown, force_terminal=True, width=80, height=24, highlight=False)
    monkeypatch.setattr("rich.console.Console", lambda **kind: terminal)
    monkeypatch.setattr(time, "sleep", sleep)
    watch(run)
    assert all("waiting for a run; Ctrl-C ends" in look for look in looks[:2])
    assert "step 40 of 80" in looks[2]
    with pytest.raises(CheckpointError, match="No such file or directory; give the out_dir of a run"):
        watch(tmp_path / "never", once=True)
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        watch(tmp_path)


def test_ctrl_c_ends_the_live_view_with_zero(folder):
    main, side = pty.openpty()
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: not what is tested here.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path; "
    code += f"from nsa.cli.watch import watch; watch(Path({str(folder)!r}), 0.2, False)"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=side, stderr=side, stdin=side, env=environment
    )
    os.close(side)
    seen = b""
    while b"step 40 of 80" not in seen:
        seen += os.read(main, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while True:
            seen += os.read(main, 4096)
    except OSError:
        pass  # the other side is closed
    os.close(main)
    assert process.wait(20) == 0
    assert b"Traceback" not in seen


@pytest.mark.timeout(60)
def test_a_terminal_that_cannot_move_its_cursor_gets_one_frame(folder):
    main, side = pty.openpty()
    code = f"from pathlib import Path; from nsa.cli.watch import watch; watch(Path({str(folder)!r}), 0.2, False)"
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=side, stderr=side, stdin=side, env=environment
    )
    os.close(side)
    seen = b""
    try:
        while True:
            seen += os.read(main, 4096)
    except OSError:
        pass  # it ended
    os.close(main)
    assert process.wait(20) == 0
    assert b"step 40 of 80" in seen
