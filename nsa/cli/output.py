"""Output of the commands."""

import sys
from typing import TextIO

from nsa.errors import printable


def say(text: object, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Prints and flushes, with control characters escaped: file names, data and generated text are untrusted.
    In one write, since ranks share the terminal."""
    print(f"{printable(text)}{end}", end="", file=file or sys.stdout, flush=True)
