"""What `nsa ready` and its phases look like while they run: one panel on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nsa.checks.ready import TITLES, Phase, Watcher
from nsa.inspect.reading import RunView
from nsa.record.numbers import exact, seconds, short

PLAIN_EVERY_S = 30.0
_STYLES = {"pass": "green", "fail": "bold red", "n/a": "dim"}


class LiveCheck:
    """Shows phases as they come; what has ended stays on the screen with its criteria."""

    def __init__(self, console: Console):
        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._phase, self._what = "", ""
        self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def watcher(self) -> Watcher:
        return Watcher(self._begins, self._stands, self._ended)

    def _begins(self, phase: str, what: str) -> None:
        self._phase, self._what = phase, what
        if self._live is None:
            self._print(Text(f"{phase}: {what} ..."))
        else:
            self._stands(None, 0.0)

    def _stands(self, view: RunView | None, passed_s: float) -> None:
        if self._live is not None:
            self._live.update(self._panel(view, passed_s), refresh=True)
        elif view is not None and time.monotonic() - self._said_at > PLAIN_EVERY_S:
            self._print(Text(f"{self._phase}: {self._what}: {_line(view)}"))

    def _ended(self, phase: Phase) -> None:
        self._print(summary(phase))

    def _print(self, what: RenderableType) -> None:
        self._said_at = time.monotonic()
        self.console.print(what)

    def _panel(self, view: RunView | None, passed_s: float) -> RenderableType:
        head = Text.assemble((f"{self._phase} ", "bold"), TITLES[self._phase], f": {self._what}, {seconds(passed_s)}")
        if view is None:
            return Group(head, Text("starting ...", style="dim"))
        bar = ProgressBar(total=max(1, view.steps), completed=min(view.step, view.steps), width=40)
        return Group(head, bar, Text(_line(view)))


def _line(view: RunView) -> str:
    left = f" | {seconds(view.left_s)} left" if view.left_s is not None else ""
    return (
        f"step {view.step} of {view.steps} | loss {exact(view.loss)} | {short(view.recent('toks_per_s'))} tokens/s | "
        f"{exact(view.mem_gib, '.2f')} GiB{left}"
    )


def summary(phase: Phase) -> RenderableType:
    """A phase that has ended: each criterion with its target and what was measured."""
    word = "not run" if not phase.was_run else "passed" if phase.passed else "FAILED"
    style = "green" if phase.passed else "bold red"
    head = Text.assemble((f"{phase.key} ", "bold"), f"{phase.title}: ", (word, style), f" in {seconds(phase.seconds)}")
    if not phase.was_run:
        return Text.assemble((f"{phase.key} ", "bold"), f"{phase.title}: ", (word, style))
    table = Table(box=None, padding=(0, 1), show_header=False)
    for criterion in phase.criteria:
        measured = Text(criterion.measured)
        if criterion.remark and criterion.verdict == "fail":
            measured.append(f" ({criterion.remark})")
        table.add_row(
            Text(criterion.verdict, style=_STYLES[criterion.verdict]),
            criterion.name,
            measured,
            Text(criterion.target, "dim"),
        )
    return Group(head, table)
