"""`nsa doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.cli.output import say

if TYPE_CHECKING:
    from rich.text import Text

    from nsa.checks.doctor import Attempt


def doctor(
    config: ConfigFile,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, metavar="N", help="Processes of DDP and FSDP.", show_default="all GPUs, else 2"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps of a trial.")] = 3,
    limit: Annotated[
        float, typer.Option("--limit", min=1.0, metavar="SECONDS", help="Longest time of a trial.")
    ] = 300.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the page.", show_default="runs/NAME-doctor"),
    ] = None,
) -> None:
    """Find what is broken and the smallest case that shows it, or say that all is well."""
    from rich.console import Console

    from nsa.checks.doctor import Diagnosis, load_setup
    from nsa.checks.doctor_report import verdict, write_page
    from nsa.checks.progress import Progress
    from nsa.checks.trials import exit_on_sigterm, refuse_launcher
    from nsa.train.folder import claim_folder

    refuse_launcher()
    exit_on_sigterm()
    folder = out or Path("runs") / f"{config.stem}-doctor"
    setup = load_setup(config, all_overrides(overrides, override), folder, nproc, steps, limit)
    with claim_folder(folder):
        with Progress(Console(highlight=False, soft_wrap=True), render=attempt_line) as progress:
            diagnosis = Diagnosis(setup, progress)
            diagnosis.run()
        page = write_page(diagnosis)
    say(f"{verdict(diagnosis)}\n{page}: what was found and what to do")
    if diagnosis.failure:
        raise typer.Exit(1)


def attempt_line(attempt: "Attempt") -> "Text":
    """A trial that has ended, in one line."""
    from rich.text import Text

    from nsa.record.numbers import one_line

    line = Text(f"{attempt.name:<32} ")
    line.append(f"{attempt.failure or 'ok':<26} ", "red" if attempt.failure else "green")
    line.append(f"{attempt.seconds:6.1f} s")
    return line.append(f"  {one_line(attempt.reason, 200)}" if attempt.failure else "")
