"""Native Sparse Attention: operators, layers, models and a trainer.

Importing this package does no I/O, starts no CUDA and sets no environment variable.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.generate.stream import generate_tokens
    from nsa.train.trained import load_run

__version__ = "0.2.0"
__all__ = ["__version__", "generate_tokens", "load_run"]

_MODULES = {"generate_tokens": "nsa.generate.stream", "load_run": "nsa.train.trained"}  # imported when they are used


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from nsa.installation import missing_module

        problem = missing_module(error, f"nsa.{name}")
        if problem is None:
            raise
        raise ModuleNotFoundError(problem, name=error.name) from None


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
