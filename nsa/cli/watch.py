"""`nsa watch`."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
) -> None:
    """Show a live or finished run: progress, loss, speed, gates, selection, and warnings.

    Waits for a folder that does not exist yet, except with --once.
    """
    import time

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from nsa.errors import CheckpointError
    from nsa.inspect.reading import read_run
    from nsa.inspect.view import frame
    from nsa.run_folder import LOCK_FILE

    console = Console(highlight=False)
    plain = console.options.ascii_only
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(frame(read_run(run_dir), console.width, max(24, console.height), plain=plain))
        return
    waits = not run_dir.exists() or (run_dir / LOCK_FILE).exists()  # a starting run takes the lock first

    def look() -> Text:
        try:
            # The last line stays empty: writing to it would scroll the terminal.
            return frame(read_run(run_dir), console.width, console.height - 1, plain=plain)
        except CheckpointError as error:
            if not waits:
                raise
            return Text(f"waiting for a run; Ctrl-C ends\n{error}")

    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                began = time.monotonic()
                live.update(look(), refresh=True)
                time.sleep(max(every, 3 * (time.monotonic() - began)))  # at most a quarter of a core
    except KeyboardInterrupt:
        console.print(look())
