"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from nsa.config.load import split_overrides

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="YAML file of the run, or a name of `nsa config list`.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides such as train.steps=10.", show_default=False),
]
JoinedOverrides = Annotated[
    list[str] | None,
    typer.Option("--override", metavar="'KEY=VALUE ...'", help="The same as one string.", show_default=False),
]
TrainedModel = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|FILE",
        help="A run (its weights, else its newest checkpoint), one checkpoint, or a .safetensors file of a run.",
        show_default=False,
    ),
]


def all_overrides(separate: list[str] | None, joined: list[str] | None) -> list[str]:
    """Every override in order; those of --override come last, so they win."""
    return [*(separate or []), *(part for text in joined or [] for part in split_overrides(text))]
