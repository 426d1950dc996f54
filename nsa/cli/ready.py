"""`nsa ready`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.config import load_config


def ready(
    config: ConfigFile,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps: a GO clears the quick check only.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes; one a GPU when unset.", show_default=False)
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="readiness.json to compare with.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the evidence; runs/NAME-ready when unset."),
    ] = None,
    synthetic_on_fail: Annotated[
        bool, typer.Option("--synthetic-on-fail", help="Measure on even if the source does not answer; still NO-GO.")
    ] = False,
) -> None:
    """Say GO or NO-GO for production on this machine, with the evidence. Exit code 0 for GO, 1 for NO-GO."""
    given = all_overrides(overrides, override)
    resolved = load_config(config, given, os.environ)

    import time

    from rich.console import Console

    from nsa.checks.live import LiveCheck
    from nsa.checks.pages import HTML_FILE, headline, write_pages
    from nsa.checks.phases import FULL, QUICK
    from nsa.checks.ready import Plan, check_readiness
    from nsa.checks.result import Launch, build_result, compare, read_baseline
    from nsa.checks.trials import default_nproc, refuse_launcher
    from nsa.train.folder import claim_folder

    refuse_launcher()
    before = read_baseline(baseline) if baseline else None
    folder = out or Path("runs") / f"{config.stem}-ready"
    arguments = ("--synthetic-on-fail",) if synthetic_on_fail else ()
    plan = Plan(resolved, folder, nproc or default_nproc(resolved), QUICK if quick else FULL, arguments)
    launch = Launch(config, tuple(given), plan.nproc, resolved.train.out_dir or str(Path("runs") / config.stem))
    console, began = Console(highlight=False), time.monotonic()
    with claim_folder(folder), LiveCheck(console) as live:
        phases = check_readiness(plan, live.watcher())
        result = build_result(plan, phases, launch, time.monotonic() - began)
        if before is not None:
            result["changes"] = compare(result, before)
        write_pages(result, folder)
    console.print(f"\n{headline(result)}", style="bold green" if result["outcome"] == "GO" else "bold red")
    for line in result["reasons"] or result["launch"]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(f"evidence in {folder / HTML_FILE}, readiness.md and readiness.json", markup=False, soft_wrap=True)
    raise typer.Exit(0 if result["outcome"] == "GO" else 1)
