"""`--help` of every command says what the code says."""

import inspect
import re

import pytest
import typer
from typer.testing import CliRunner

from nsa.cli.main import app


def commands(command, path=()):
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def words_of(text):
    return " ".join(text.split())


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "nsa")
def test_help_shows_every_text_in_full(path):
    command = COMMANDS[path]
    result = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    shown = words_of(result.output)
    assert words_of(inspect.cleandoc(command.help)) in shown, "markup lost a part"
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} has no help"
        assert words_of(parameter.help) in shown
    flags = [parameter for parameter in command.params if getattr(parameter, "is_flag", False)]
    for flag in flags:
        assert re.search(rf"^ *{flag.opts[0]}  +\S", result.output, re.MULTILINE), "a flag takes no value"
    assert "<bool>" not in shown
    assert not re.search(r"\[\[|\\\\|\.\.\.\.", shown), "brackets doubled, or an escape left"


def test_the_example_of_prepare_keeps_its_brackets():
    result = CliRunner().invoke(app, ["data", "prepare", "--help"], catch_exceptions=False)
    assert "data.paths=[books] data.tokenizer=gpt2" in words_of(result.output)
