"""Shows the progress of `nsa ready` and `nsa doctor`: one live line on a terminal, plain lines elsewhere."""

import time
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from nsa.formatting import exact, seconds, short
from nsa.inspect.reading import RunView

PLAIN_EVERY_S = 30.0


class Progress:
    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._name, self._printed_at = "", time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, name: str) -> None:
        self._name = name
        self._show(Text(f"{name} ..."), now=True)

    def update(self, view: RunView | None, elapsed_s: float) -> None:
        self._show(Text(f"{self._name}: {_state(view)}, {seconds(elapsed_s)}"))

    def note(self, message: RenderableType) -> None:
        """Prints a message, or a trial or phase that has ended, above the live line."""
        self._console.print(message)
        self._printed_at = time.monotonic()

    def _show(self, line: Text, *, now: bool = False) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live.update(line, refresh=True)
        elif now or time.monotonic() - self._printed_at > PLAIN_EVERY_S:
            self.note(line)


def _state(view: RunView | None) -> str:
    if view is None or not view.step:
        return "starting"
    speed = f"{short(view.recent('toks_per_s'))} tokens/s, {exact(view.mem_gib, '.2f')} GiB"
    left = f", {seconds(view.left_s)} left" if view.left_s is not None else ""
    return f"step {view.step} of {view.steps}, loss {exact(view.loss)}, {speed}{left}"
