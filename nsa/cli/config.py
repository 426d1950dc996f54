"""`nsa config list`, `nsa config show` and `nsa config check`."""

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.cli.output import say
from nsa.config import load_config, shipped_names
from nsa.config.load import SHIPPED, ConfigWarning, warn_if_unlikely
from nsa.errors import ConfigError, DataError
from nsa.plain_yaml import dump_yaml

FIRST = ("quickstart", "m7c_125m_muon")  # for a first run, and what learned best (docs/learning.md)

app = typer.Typer(help="List, show and check configurations.", no_args_is_help=True)


@app.command("list")
def list_shipped() -> None:
    """Print the configurations that come with nsa. Every command accepts their names instead of a file."""
    names = [*FIRST, *(name for name in shipped_names() if name not in FIRST)]
    for name in names:
        about = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        say(f"{name:{max(map(len, names))}}  {about}")


@app.command()
def show(config: ConfigFile, overrides: Overrides = None, override: JoinedOverrides = None) -> None:
    """Print the resolved configuration: the file, the overrides, the environment, and every default."""
    resolved = load_config(config, all_overrides(overrides, override), os.environ)
    say(dump_yaml(resolved.to_dict(), ascii_only=True), end="")  # say() would escape some characters differently


@app.command()
def check(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="YAML files of runs.", show_default=False)],
) -> None:
    """Validate every given file and the NSA_* variables, and list all mistakes of all files."""
    problems: list[str] = []
    for path in configs:
        try:
            config = load_config(path, (), os.environ)
            warn_if_unlikely(config, str(path))
            _check_tokenizer(config.data.tokenizer, path)
        except ConfigError as error:
            problems += str(error).splitlines()
        else:
            say(f"{path}: ok")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_tokenizer(name: str, path: Path) -> None:
    """Raises ConfigError if the name cannot be a tokenizer. A missing file gives a warning: it may exist later, or on
    another machine."""
    from nsa.data.tokenizers import BUILT_IN, json_file

    try:
        if name not in BUILT_IN:
            json_file(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except DataError as error:
        warnings.warn(f"{path}: {error}", ConfigWarning, stacklevel=2)
