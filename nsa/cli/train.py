"""`nsa train`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.config import load_config


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew where the folder holds a finished run.")] = False,
) -> None:
    """Train a model as CONFIG says."""
    resolved = load_config(config, all_overrides(overrides, override))
    from nsa.train import train as train_model

    folder = Path(resolved.train.out_dir or Path("runs") / config.stem)
    train_model(resolved, folder, fresh=fresh)
