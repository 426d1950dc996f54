"""Starts the `nsa` command. Imports only the standard library, so that it can report missing packages."""

import sys
from importlib import import_module

from nsa import __version__
from nsa.installation import missing_module


def main(module: str = "nsa.cli.main", **options: bool) -> None:
    """Runs `main` of the module: the `nsa` command, or a script in `scripts/`."""
    try:
        run = import_module(module).main
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["--version"]:  # needs no extra
            print(f"nsa {__version__}")
            return
        problem = missing_module(error)
        if problem is None:
            raise
        sys.exit(f"error: {problem}")
    run(**options)
