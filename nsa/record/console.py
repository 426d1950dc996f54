"""What a person sees of a run: a progress bar on a terminal, plain lines anywhere else."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nsa.errors import printable


def step_line(step: int, loss: float, lr: float, toks_per_s: float, grad_norm: float) -> str:
    return f"step {step:04d} | loss {loss:.4f} | lr {lr:.2e} | toks/s {toks_per_s:.0f} | grad_norm {grad_norm:.2f}"


class RunConsole:
    """Prints lines, above a progress bar where the output is a terminal."""

    def __init__(self, total_steps: int, console: Console | None = None, *, silent: bool = False):
        self.console = console or Console(highlight=False, soft_wrap=True, quiet=silent)
        self._progress: Progress | None = None
        if self.console.is_terminal and not silent:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=total_steps, loss=float("nan"))

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def log(self, line: str) -> None:
        self.console.print(printable(line), markup=False, highlight=False)

    def advance(self, step: int, loss: float) -> None:
        if self._progress:
            self._progress.update(self._task, completed=step, loss=loss)
