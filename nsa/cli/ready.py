"""`nsa ready`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, all_overrides, overrides_such_as
from nsa.cli.output import say
from nsa.config import load_config
from nsa.errors import printable


def ready(
    config: ConfigFile,
    overrides: Annotated[list[str] | None, overrides_such_as("train.batch_size=16")] = None,
    override: JoinedOverrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps; a GO does not clear a production run.")] = False,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; one per GPU when unset.", show_default=False)
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="readiness.json to compare with.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the reports and the runs of the phases; runs/NAME-ready when unset."
        ),
    ] = None,
    synthetic_on_fail: Annotated[
        bool,
        typer.Option(
            "--synthetic-on-fail", help="Use synthetic text if the source does not answer; the verdict is then NO-GO."
        ),
    ] = False,
) -> None:
    """Check whether a run can go to production on this machine. Exit code 0 for GO, 1 for NO-GO."""
    given = all_overrides(overrides, override)
    resolved = load_config(config, given, os.environ)

    from rich.console import Console

    from nsa.checks.progress import Progress
    from nsa.checks.readiness import FULL, QUICK, QUICK_ON_CPU, ReadinessCheck
    from nsa.checks.ready_report import HTML_FILE, build_result, compare, headline, read_baseline, write_pages
    from nsa.checks.trials import hold_results, prepare_to_launch, usable_gpus

    prepare_to_launch()
    before = read_baseline(baseline) if baseline else None
    folder = out or Path("runs") / f"{config.stem}-ready"
    gpus = usable_gpus(resolved)
    processes = nproc or (1 if resolved.parallel.strategy == "single" else max(resolved.parallel.context, gpus))
    scale = FULL if not quick else QUICK if gpus else QUICK_ON_CPU
    arguments = ("--synthetic-on-fail",) if synthetic_on_fail else ()
    console = Console(highlight=False)
    progress = Progress(console)
    check = ReadinessCheck(resolved, folder, processes, scale, progress, arguments)
    with hold_results(folder), progress:
        result = build_result(check, check.run(), config, tuple(given))
        if before is not None:
            result["changes"] = compare(result, before)
        write_pages(result, folder)
    console.print(f"\n{headline(result)}", style="bold green" if result["outcome"] == "GO" else "bold red")
    for line in result["reasons"] or result["launch"]:
        console.print(f"  {printable(line)}", markup=False, soft_wrap=True)
    say(f"evidence in {folder / HTML_FILE}, readiness.md and readiness.json")
    raise typer.Exit(0 if result["outcome"] == "GO" else 1)
