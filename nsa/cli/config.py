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

app = typer.Typer(help="Look at configurations without running them.", no_args_is_help=True)


@app.command("list")
def list_shipped() -> None:
    """Print the configurations that come with nsa. Their names stand for their files in every command."""
    names = shipped_names()
    for name in names:
        about = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        say(f"{name:{max(map(len, names))}}  {about}")


@app.command()
def show(config: ConfigFile, overrides: Overrides = None, override: JoinedOverrides = None) -> None:
    """Print the resolved configuration: the file, the overrides, the environment, and every default."""
    resolved = load_config(config, all_overrides(overrides, override), os.environ)
    say(dump_yaml(resolved.to_dict(), ascii_only=True), end="")  # say() would escape some in another way


@app.command()
def check(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="YAML files of runs.", show_default=False)],
) -> None:
    """Validate every file given, and the NSA_* variables; all mistakes of all files are listed."""
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
    """A name that can be no tokenizer is an error; a file may still come, or lie on another machine."""
    from nsa.data.tokenizers import BUILT_IN, json_file

    try:
        if name not in BUILT_IN:
            json_file(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except DataError as error:
        warnings.warn(f"{path}: {error}", ConfigWarning, stacklevel=2)
