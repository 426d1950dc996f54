"""What a command prints."""

import sys
from typing import TextIO

from nsa.errors import printable


def say(text: object, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Prints at once, with control characters escaped: file names, data and generated text are not to be trusted."""
    print(printable(text), end=end, file=file or sys.stdout, flush=True)
