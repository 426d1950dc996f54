"""Arguments shared by several commands."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nsa.config.load import split_overrides

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="YAML file of the run, or a name of `nsa config list`.", show_default=False),
]


def overrides_such_as(example: str) -> Any:
    """Returns the argument for overrides, with an example for the command."""
    return typer.Argument(metavar="KEY=VALUE", help=f"Overrides such as {example}.", show_default=False)


Overrides = Annotated[list[str] | None, overrides_such_as("train.steps=10")]
JoinedOverrides = Annotated[
    list[str] | None,
    typer.Option("--override", metavar="'KEY=VALUE ...'", help="Overrides as one string.", show_default=False),
]
TrainedModel = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|FILE",
        help="A run (its weights, else its newest checkpoint), one checkpoint (its folder, or checkpoints/latest or "
        "checkpoints/best), or a .safetensors file of a run.",
        show_default=False,
    ),
]


def all_overrides(separate: list[str] | None, joined: list[str] | None) -> list[str]:
    """Returns all overrides in order; those of --override come last and win."""
    return [*(separate or []), *(part for text in joined or [] for part in split_overrides(text))]
