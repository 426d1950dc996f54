"""`nsa trace`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.output import say


def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a traced run.", show_default=False)],
) -> None:
    """Summarize the traces of a run: where each rank stopped, parameters without gradients, where ranks differ."""
    from nsa.inspect.trace_report import explain

    for line in explain(run_dir):
        say(line)
