"""`env.json`: what a run was started with and on."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nsa import __version__

_PACKAGES = ("torch", "triton", "numpy", "pydantic", "safetensors", "pyarrow", "tokenizers")


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
    """Of the checkout that holds this package, or None; ends in "-dirty" if files differ from it."""
    folder = Path(__file__).parents[2]
    try:
        asked = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # a machine without the library still trains
        return None
