"""`nsa report`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.output import say


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of one or several runs.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write.", show_default="RUN_DIR/report.html or comparison.html"
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML report of a run with all curves, or a comparison of several runs."""
    from nsa.inspect.compare import COMPARISON_FILE, render_comparison
    from nsa.inspect.reading import read_run
    from nsa.inspect.run_report import render, write_page
    from nsa.run_folder import REPORT_FILE

    views = [read_run(folder) for folder in run_dirs]
    target = out or (run_dirs[0] / REPORT_FILE if len(views) == 1 else Path(COMPARISON_FILE))
    write_page(render(views[0]) if len(views) == 1 else render_comparison(views), target)
    say(f"{target}: open it in a browser")
