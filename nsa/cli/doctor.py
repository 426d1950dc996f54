"""`nsa doctor`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, all_overrides, overrides_such_as
from nsa.cli.output import say


def doctor(
    config: ConfigFile,
    overrides: Annotated[list[str] | None, overrides_such_as("parallel.strategy=fsdp")] = None,
    override: JoinedOverrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes of DDP and FSDP.", show_default="all GPUs, or 2")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of a trial.")] = 3,
    limit: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of a trial.")] = 300.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results.", show_default="runs/NAME-doctor")
    ] = None,
) -> None:
    """Find the smallest configuration that fails, or report that the system is healthy."""
    from rich.console import Console

    from nsa.checks.diagnose import Diagnosis
    from nsa.checks.progress import Progress
    from nsa.checks.trials import hold_results, prepare_to_launch
    from nsa.config import load_config

    prepare_to_launch()
    folder = out or Path("runs") / f"{config.stem}-doctor"
    resolved = load_config(config, all_overrides(overrides, override), os.environ)
    progress = Progress(Console(highlight=False, soft_wrap=True))
    diagnosis = Diagnosis(resolved, folder, progress, nproc, steps, limit)
    with hold_results(folder):
        with progress:
            diagnosis.run()
        written = diagnosis.write()
    for line in (*diagnosis.verdict(), written):
        say(line)
    if diagnosis.smallest:
        raise typer.Exit(1)
