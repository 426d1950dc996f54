"""Files of results: each names the machine and the commit of the code that was measured.

Results of uncommitted code cannot be reproduced: `Results` refuses them before anything is measured.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nsa.files import write_whole
from nsa.record.environment import describe_environment


def add_dirty_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write results of code with uncommitted changes, marked -dirty"
    )


class Results:
    """The results of one command. Create it before measuring: it ends a command whose code has uncommitted changes."""

    def __init__(self, path: Path, allow_dirty: bool):
        self.path, self.machine = path, machine()
        if self.machine["commit"].endswith("-dirty") and not allow_dirty:
            sys.exit(
                f"{path}: not written: the code has uncommitted changes (git status), so no commit would give these "
                "results again; commit the changes, or give --allow-dirty"
            )
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **content: Any) -> None:
        """Replaces the file, with the machine first. If it is killed, the former rows stay."""
        write_whole(self.path, json.dumps({"machine": self.machine, **content}, indent=1) + "\n")

    def append(self, row: dict[str, Any]) -> None:
        """Adds a line to a file of rows from several commands."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"commit": self.machine["commit"]}) + "\n")


def machine() -> dict[str, Any]:
    found = describe_environment({}, 1, "single")
    return {
        "gpu": found["gpu"][0] if found["gpu"] else "none",
        "cores": len(os.sched_getaffinity(0)),
        "python": found["python"],
        **found["packages"],
        "cuda": found["cuda"],
        "commit": found["commit"] or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
