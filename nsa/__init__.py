"""Native Sparse Attention: operators, layers, models and a trainer.

Importing this package does no I/O, starts no CUDA and sets no environment variable.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.train.trained import TrainedRun

__version__ = "0.1.0"
__all__ = ["__version__", "load_run"]


def load_run(path: str | Path, *, checkpoint: str | None = None, overrides: Iterable[str] = ()) -> "TrainedRun":
    """Loads what a run trained: `model` (in eval mode), `tokenizer`, `config`, and `weights`, where they were read.

    path         a run folder (its model.safetensors, or the newest sound checkpoint of an unfinished run), the folder
                 of one checkpoint, or a .safetensors file that a run or `nsa ckpt export` wrote
    checkpoint   a checkpoint of the run folder instead: its name such as step_00000500, "latest" or "best"
    overrides    `section.key=value`, as on the command line, for example runtime.device=cpu

    Where there is no GPU, a run that was trained on one is loaded onto the CPU, with a warning, unless an override asks
    for the GPU. Needs the packages of the extra `train`.
    """
    from nsa.train.trained import load_run as load

    return load(path, checkpoint=checkpoint, overrides=overrides)
