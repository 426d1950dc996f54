"""`env.json`: configuration, versions and hardware of a run."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nsa import __version__

_PACKAGES = ("torch", "triton", "numpy", "pydantic", "safetensors", "pyarrow", "tokenizers", "tiktoken")


def describe_environment(config: dict[str, Any], world_size: int, strategy: str) -> dict[str, Any]:
    return {
        "nsa": __version__,
        "commit": commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "world_size": world_size,
        "strategy": strategy,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NSA_")},
        "config": config,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that holds this package, or None; ends in "-dirty" if tracked files are modified.
    Benchmark results and the pages about them are ignored: they change while one commit is measured. A package that is
    installed inside another repository has no commit."""
    folder, others = Path(__file__).parents[2], (":!bench/results", ":!docs")

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10)  # noqa: S603

    try:
        if git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(folder))).returncode:
            return None
        asked = git("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--", ".", *others)
    except (OSError, subprocess.TimeoutExpired):
        return None
    head = re.match(r"# branch\.oid ([0-9a-f]+)\n", asked.stdout)
    is_dirty = any(not line.startswith("#") for line in asked.stdout.splitlines())
    return head[1] + "-dirty" * is_dirty if head else None


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # a machine without the library still trains
        return None
