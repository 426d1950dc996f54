"""The running Python's standard library: real text on every machine."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa.data.sources.base import Skipped, Unit
from nsa.data.sources.readers import files_fingerprint

# Folders of the standard library that hold installed packages, or tests full of deliberate oddities.
PYTHON_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class PythonSource:
    """A document per .py file below `root`, the standard library when it is unset."""

    name = "python"

    def __init__(self, root: Path | None = None):
        self.root = root or Path(sysconfig.get_paths()["stdlib"])

    def units(self) -> Sequence[Unit]:
        return [Unit(str(path), stop=size, size=size) for path in self._paths() for size in [path.stat().st_size]]

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        # Nobody chose these files one by one, so an odd one is left out where one of the user's would be refused.
        try:
            text = Path(unit.path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.add("not UTF-8")
            return
        except OSError:
            skipped.add("cannot be read")
            return
        if text.strip():
            yield text
        else:
            skipped.add("empty")

    def fingerprint(self) -> str:
        return files_fingerprint(self._paths())

    def _paths(self) -> list[Path]:
        inside = (p for p in self.root.rglob("*.py") if not PYTHON_SKIPPED & set(p.relative_to(self.root).parts))
        return sorted(p for p in inside if p.is_file())
