"""`nsa report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write it.", show_default="RUN_DIR/report.html"),
    ] = None,
) -> None:
    """Write a run as one HTML file with all curves, that opens without a network."""
    from nsa.inspect.reading import read_run
    from nsa.inspect.report import write_report
    from nsa.record.schema import REPORT_FILE

    target = out or run_dir / REPORT_FILE
    write_report(read_run(run_dir), target)
    print(f"{target}: open it in a browser")
