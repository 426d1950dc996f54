"""Native Sparse Attention: operators, layers, models and a trainer.

Importing this package does no I/O, starts no CUDA and sets no environment variable.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.generate.stream import Generated
    from nsa.nn.model import Decoder
    from nsa.train.trained import TrainedRun

__version__ = "0.1.0"
__all__ = ["__version__", "generate_tokens", "load_run"]


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


def generate_tokens(
    source: "TrainedRun | Decoder",
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] | Sequence[int] = (),
) -> Iterator["Generated"]:
    """Continues prompts with a cache: yields every token as it comes, of all prompts in turn, with `prompt` (its
    number), `token`, `text` (the characters that it completes) and `end` (None, "stop" or "length").

    source        what `load_run` returned, for prompts that are texts; or a model, for prompts that are lists of ids
    prompts       one batch; their lengths may differ, and may exceed the length that the model was trained with
    max_tokens    the most tokens of each
    temperature   0 always takes the likeliest token
    top_k, top_p  draw from the k likeliest, and from the fewest likeliest that make up this share
    seed          of every prompt, or one for each; what a prompt draws does not depend on the others
    stop          texts that end a prompt, and are left out; with a model alone, ids. What the tokenizer ends a
                  text with (its separator, data.end_tokens) always does

    On a GPU a step is the replay of a CUDA graph. Needs the packages of the extra `train`.
    """
    from nsa.generate.stream import generate_tokens as generate

    return generate(
        source,
        prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
