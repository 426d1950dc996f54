"""Install instructions for messages and for the model cards of exported models. This package is not on a public index,
and a package named `nsa` there is a different project: no text may say `pip install nsa`."""

import sys
from importlib.metadata import PackageNotFoundError, metadata

from nsa import __version__

# The import names of the packages in the extra `train` of pyproject.toml.
TRAIN_PACKAGES = {"huggingface_hub", "numpy", "psutil", "pyarrow", "pydantic", "pynvml", "rich", "safetensors"}
TRAIN_PACKAGES |= {"fsspec", "jinja2", "tensorboard", "tiktoken", "tokenizers", "typer", "yaml"}


def repository() -> str | None:
    """Returns the git address that pip can install this package from: `Repository` in `project.urls` of pyproject.toml.
    None if it is not set."""
    try:
        urls = metadata("nsa").get_all("Project-URL") or []
    except PackageNotFoundError:  # runs from source files
        return None
    found = dict(url.split(", ", 1) for url in urls).get("Repository")
    return f"git+{found}" if found else None


def how_to_install(extra: str, address: str | None = None) -> str:
    """Returns the pip command for the package with an extra, from `address` or from its repository."""
    if address := address or repository():
        return f"pip install 'nsa[{extra}] @ {address}'"
    return (
        f"pip install './nsa-{__version__}-py3-none-any.whl[{extra}]' with the wheel of this version, or pip install "
        f"'.[{extra}]' in its repository; a package named nsa on a public index is not this one"
    )


def missing_module(error: BaseException, needed_by: str = "the nsa command") -> str | None:
    """Returns why an import failed and what to do, if an extra is not installed or the system lacks the module."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    extra = "hf" if name == "transformers" else "train" if name in TRAIN_PACKAGES else None
    if extra is not None:
        return f"the package {name!r} is not installed; {needed_by} needs it: {how_to_install(extra)}"
    if name in sys.stdlib_module_names:
        return f"Python on {sys.platform} has no module {name!r}; {needed_by} needs Linux (on Windows, WSL)"
    return None
