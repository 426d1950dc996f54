"""`nsa train`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.config import load_config, parse_config
from nsa.config.load import warn_if_unlikely
from nsa.files import expand_home


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete the checkpoints and weights of the run.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume from a checkpoint of another configuration or other data.")
    ] = False,
    synthetic_on_fail: Annotated[
        bool, typer.Option("--synthetic-on-fail", help="Train on synthetic text if the source does not answer.")
    ] = False,
) -> None:
    """Train a model, or resume from the newest checkpoint in the folder of the run."""
    resolved = load_config(config, all_overrides(overrides, override), os.environ)  # once: it may be a pipe
    if resolved.train.out_dir is None:
        folder = json.dumps(str(Path("runs") / config.stem), ensure_ascii=False)
        resolved = parse_config(resolved.to_dict(), str(config), [f"train.out_dir={folder}"])
    warn_if_unlikely(resolved, str(config))
    from nsa.train import train as train_model

    train_model(
        resolved,
        expand_home(str(resolved.train.out_dir)),
        fresh=fresh,
        accept_changes=accept_changes,
        synthetic_on_fail=synthetic_on_fail,
        until_exit=True,
    )
