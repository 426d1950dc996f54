"""`nsa doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.markup import escape
from rich.text import Text

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.record.numbers import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from nsa.checks.doctor import Record
    from nsa.inspect.reading import RunView


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
        typer.Option("--out", metavar="DIR", help="Where the page goes.", show_default="runs/NAME-doctor"),
    ] = None,
) -> None:
    """Find what is broken and the smallest case that shows it, or say that all is well."""
    from rich.console import Console

    from nsa.checks.doctor import Watcher, admit, diagnose
    from nsa.checks.doctor_report import verdict, write_page
    from nsa.checks.trials import refuse_launcher
    from nsa.train.folder import claim_folder

    refuse_launcher()
    folder = out or Path("runs") / f"{config.stem}-doctor"
    patient = admit(config, all_overrides(overrides, override), folder, nproc, steps, limit)
    with claim_folder(folder):
        with Screen(Console(highlight=False, soft_wrap=True), steps) as screen:
            found = diagnose(patient, Watcher(screen.begins, screen.stands, screen.ended))
        page = write_page(found)
    print(f"{verdict(found)}\n{page}: what was found and what to do")
    if not found.healthy:
        raise typer.Exit(1)


class Screen:
    """A line for every trial that ended; on a terminal, below them, how the one that runs stands."""

    def __init__(self, console: "Console", steps: int):
        self._console, self._steps = console, steps
        self._status = console.status("")
        self._running, self._limit_s = "", 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begins(self, name: str, limit_s: float) -> None:
        self._running, self._limit_s = name, limit_s
        self._status.update(escape(name))

    def stands(self, view: "RunView | None", seconds: float) -> None:
        step = f"step {view.step if view else 0} of {self._steps}"
        self._status.update(escape(f"{self._running}: {step}, {seconds:.0f} of at most {self._limit_s:.0f} s"))

    def ended(self, record: "Record") -> None:
        line = Text(f"{record.name:<32} ")
        line.append(f"{record.kind or 'ok':<26} ", "green" if record.passed else "red")
        line.append(f"{record.seconds:6.1f} s")
        line.append(f"  {one_line(record.reason, 200)}" if record.kind else "")
        self._console.print(line)
