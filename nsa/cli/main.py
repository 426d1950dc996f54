"""The `nsa` command: its subcommands, and how an error ends it.

Heavy imports happen inside the commands, so that `nsa --version` and `nsa config` start fast.
"""

import os
import sys
import threading
import time
import traceback
import warnings
from typing import Annotated, NoReturn

import typer

from nsa import __version__
from nsa.cli import ckpt, config, data, doctor, eval, generate, hf, memory, ready, report, trace, train, watch
from nsa.cli.output import say
from nsa.cli.start import missing_module
from nsa.errors import NSAError, Preempted

THREADS_END_S = 1.0

app = typer.Typer(
    name="nsa",
    help="Train and run language models with Native Sparse Attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else [books] in a help text is markup, and disappears
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
    say(f"warning: {message}", file=sys.stderr)


def _label(error: NSAError) -> str:
    return "stopped" if isinstance(error, Preempted) else "error"


def main(command: typer.Typer = app) -> None:
    """Runs the command; a typed error is printed without a traceback and sets the exit code."""
    warnings.showwarning = _print_warning
    try:
        command()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except NSAError as error:
        for line in str(error).splitlines():
            say(f"{_label(error)}: {line}", file=sys.stderr)
        _leave(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        _leave(130)
    except Exception as error:
        if problem := missing_module(error):
            say(f"error: {problem}", file=sys.stderr)
        else:  # a bug, or a broken machine: show the whole traceback
            say(traceback.format_exc(), end="", file=sys.stderr)
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends the process; immediately where threads still run. Network threads may wait for ranks that ended, data
    threads for a server, and neither survives the shutdown of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1" or _reads_data():
        os._exit(code)
    sys.exit(code)


def _reads_data() -> bool:
    """Whether a thread of nsa.data still reads; a thread that only has to end gets THREADS_END_S to do so."""
    deadline = time.monotonic() + THREADS_END_S
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("data-")]
    for thread in readers:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in readers)
