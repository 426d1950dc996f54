"""Starts the `nsa` command. Imports nothing outside Python, so that it can say what is not installed."""

import sys
from importlib import import_module

# What the extra `train` of pyproject.toml installs, by the names under which it is imported.
TRAIN_PACKAGES = {"huggingface_hub", "numpy", "psutil", "pyarrow", "pydantic", "pynvml", "rich", "safetensors"}
TRAIN_PACKAGES |= {"tensorboard", "tiktoken", "tokenizers", "typer", "yaml"}


def main(module: str = "nsa.cli.main", **options: bool) -> None:
    """Runs `main` of the module: the `nsa` command, or one of `scripts/`."""
    try:
        run = import_module(module).main
    except ModuleNotFoundError as error:
        problem = missing_module(error)
        if problem is None:
            raise
        sys.exit(f"error: {problem}")
    run(**options)


def missing_module(error: BaseException) -> str | None:
    """Why an import failed and what to do, if the extra or the operating system lacks the module."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    if name == "transformers":
        return "the package 'transformers' is not installed; this command needs it: pip install 'nsa[hf]'"
    if name in TRAIN_PACKAGES:
        return f"the package {name!r} is not installed; the nsa command needs it: pip install 'nsa[train]'"
    if name in sys.stdlib_module_names:
        return f"Python on {sys.platform} has no module {name!r}; this command needs Linux (on Windows, WSL)"
    return None
