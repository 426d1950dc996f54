"""Console output of a run: a progress bar on a terminal, plain lines elsewhere."""

from contextlib import ExitStack
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nsa.errors import printable
from nsa.record.run_log import RunLog
from nsa.run_folder import TrainingRow


def step_line(row: TrainingRow) -> str:
    index = "" if row.index_kl is None else f" | index_kl {row.index_kl:.4f}"
    speed = f"toks/s {row.toks_per_s:.0f} | grad_norm {row.grad_norm:.2f}"
    return f"step {row.step:04d} | loss {row.loss:.4f} | lr {row.lr:.2e} | {speed}{index}"


class RunConsole:
    """Prints lines, above a progress bar if the output is a terminal. The log gets only the lines."""

    def __init__(self, total_steps: int, log: RunLog, *, silent: bool = False):
        self._log, self._silent = log, silent
        self._active = ExitStack()
        console = Console(file=log.screen, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=silent or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, loss=float("nan"))

    def __enter__(self) -> Self:
        if not self._progress.disable:
            self._active.enter_context(self._progress)  # lines printed from here on appear above the bar
            self._active.enter_context(self._log.copied())
        return self

    def __exit__(self, *_: object) -> None:
        self._active.close()

    def log(self, line: str) -> None:
        if not self._silent:
            print(printable(f"{line}\n"), end="")  # in one write: ranks share the terminal

    def advance(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, loss=loss)
