"""A command ends with its exit code, whatever happens to its output and to its threads."""

import fcntl
import os
import subprocess
import sys

import pytest

START = "import atexit, os, signal, sys, threading, time, warnings; from nsa.cli import main as cli; "


def run(code: str, streams: str = "", **more) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, "-c", START + code]
    return subprocess.run(command, capture_output="stderr" not in more, text=True, timeout=150, check=False, **more)


@pytest.mark.parametrize(
    ("streams", "kept"), [(">&-", ""), ("2>&-", "kept"), (">&- 2>&-", ""), ("2>/dev/full", "kept")]
)
def test_output_that_is_closed_or_full_does_not_change_the_exit_code(streams, kept):
    code = "cli.main(lambda: (warnings.warn('remark'), sys.stdout and sys.stdout.write('kept'), sys.exit(3)))"
    done = run(code, streams)
    assert done.returncode == 3
    assert done.stdout == kept
    assert run("sys.argv = ['nsa', '--version']; cli.main()", streams).returncode == 0


HUNG_CONSOLE = (
    "from nsa.errors import DataError; cli.THREADS_END_S = 0.1\n"
    "def command(): raise DataError('no text')\n"
    "threading.Thread(target=time.sleep, args=(60,), name='console', daemon=True).start(); cli.main(command)"
)


def test_the_last_message_reaches_standard_error_while_the_console_hangs():
    done = run(HUNG_CONSOLE)
    assert (done.returncode, done.stderr) == (3, "error: no text\n")


def test_a_full_standard_error_does_not_hold_up_the_end():
    reader, writer = os.pipe()
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096))
    assert run(HUNG_CONSOLE, stderr=writer).returncode == 3
    for end in (reader, writer):
        os.close(end)


def test_a_signal_ends_a_process_that_waits_for_its_threads():
    waiting = (
        "def work():\n"
        "    threading.main_thread().join()\n"  # it is over where the interpreter begins to wait for threads
        # Again and again: Python runs no handler for a signal that comes right before it begins to wait.
        "    for _ in range(600): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)\n"
        "threading.Thread(target=work).start(); cli.main(lambda: sys.exit(5))"
    )
    assert run("\n" + waiting).returncode == 5
    # Once they are over, the code stands.
    late = "cli.main(lambda: sys.exit(5))"
    assert run("atexit.register(os.kill, os.getpid(), signal.SIGTERM); " + late).returncode == 5


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); cli.main(os.getcwd)",
            "working directory was deleted",
        ),
        (
            "cli.resource.setrlimit(cli.resource.RLIMIT_NOFILE, (20, 20)); "
            "cli.main(lambda: [open(os.devnull) for _ in range(20)])",
            "may open 20 files, which is too few; raise the limit in this shell: ulimit -n",
        ),
    ],
    ids=["no working directory", "few open files"],
)
def test_a_process_that_lacks_what_every_command_needs_says_so_without_a_traceback(code, said, tmp_path):
    done = run(code, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
