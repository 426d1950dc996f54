"""The `nsa` command: its subcommands, and its exit codes.

The commands import heavy modules when they run, so that `nsa --version` and `nsa config` start fast.
"""

import atexit
import errno
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from nsa import __version__
from nsa.cli import ckpt, config, data, doctor, eval, generate, hf, memory, ready, report, trace, train, watch
from nsa.cli.output import say
from nsa.errors import LaunchError, NSAError, Preempted, printable
from nsa.installation import missing_module
from nsa.record.run_log import CONSOLE_THREAD
from nsa.supervise.signals import SIGNALS

THREADS_END_S = 1.0

app = typer.Typer(
    name="nsa",
    help="Train, evaluate and run language models with sparse attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # otherwise [books] in a help text is markup and disappears
    context_settings={"max_content_width": 120},
)
app.command("train")(train.train)
app.command("generate")(generate.generate)
app.command("eval")(eval.evaluate)
app.command("export")(hf.export)
app.command("import")(hf.import_)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("trace")(trace.trace)
app.command("doctor")(doctor.doctor)
app.command("ready")(ready.ready)
app.command("memory")(memory.memory)
app.add_typer(config.app, name="config")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"nsa {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        _write_nonblocking(printable(f"warning: {message}\n"), wait_s=1.0)  # the pipe may have no reader
    elif sys.stderr is not None:
        with suppress(OSError, ValueError):  # a warning that cannot be printed must not end the command
            say(f"warning: {message}", file=sys.stderr)


def main(command: typer.Typer = app) -> None:
    """Runs the command. Prints an NSAError without a traceback and exits with its code."""
    warnings.showwarning = _print_warning
    atexit.register(_ignore_stop_signals)  # registered first, so that it runs last, after threads are joined
    try:
        command()
    except SystemExit as end:
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except NSAError as error:
        label = "stopped" if isinstance(error, Preempted) else "error"
        _exit(error.exit_code, "".join(f"{label}: {line}\n" for line in str(error).splitlines()))
    except KeyboardInterrupt:
        _exit(130, "interrupted\n")
    except Exception as error:
        if problem := _machine_problem(error):
            _exit(LaunchError.exit_code, f"error: {problem}\n")
        problem = missing_module(error)  # any other error is a bug or a broken machine: show the traceback
        _exit(1, f"error: {problem}\n" if problem else traceback.format_exc())


def _machine_problem(error: Exception) -> str | None:
    """Describes a problem of the environment that makes Python or a package fail: too few open files, or a deleted
    working directory."""
    if os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may open {limit} files, which is too few; raise the limit in this shell: ulimit -n 4096"
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the working directory was deleted; change to one that exists, then start the command again"
    return None


def _exit(code: int, message: str = "") -> NoReturn:
    """Ends the process with this code, even if signals arrive or nobody reads its output.

    Does not wait for threads that still run: network threads may wait for ranks that have ended, data threads for a
    server, the console thread for a terminal, and the interpreter cannot shut down around them.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(code))
    waiting = _waiting_threads()
    at_once = bool(waiting) or os.environ.get("WORLD_SIZE", "1") != "1"
    if CONSOLE_THREAD in waiting:  # nobody reads one of the streams, and writing to it would block
        _write_nonblocking(printable(message))
    else:
        for stream, text in ((sys.stderr, printable(message)), (sys.stdout, "")):
            try:
                if stream is not None:  # None if it was closed when the process started
                    stream.write(text)
                    stream.flush()
            except (OSError, ValueError):
                at_once = True  # the interpreter would fail in the same way and exit with another code
    if at_once:
        os._exit(code)
    sys.exit(code)


def _write_nonblocking(text: str, wait_s: float = 0.0) -> None:
    """Writes to standard error as long as it does not block. A writable pipe accepts PIPE_BUF bytes."""
    data = text.encode(errors="backslashreplace")
    with suppress(OSError, ValueError):
        while data and sys.__stderr__ is not None and select.select([], [2], [], wait_s)[1]:
            data = data[os.write(2, data[: select.PIPE_BUF]) :]


def _ignore_stop_signals() -> None:
    """Ignores signals that would change the exit code, which is final."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _waiting_threads() -> set[str]:
    """Waits THREADS_END_S for threads that read data, save or print. Returns the names of those that still run."""
    deadline = time.monotonic() + THREADS_END_S
    names = ("data-", "checkpoint", CONSOLE_THREAD)
    found = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in found:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread.name for thread in found if thread.is_alive()}
