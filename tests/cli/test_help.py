"""`--help` of every command says what the code says."""

import inspect
import re

import pytest
import typer
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.config import parse_config, shipped_names


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


# The section whose keys each command makes use of.
OVERRIDES = {
    "train": "train", "config show": "train", "memory": "train", "ready": "train", "doctor": "parallel",
    "generate": "runtime", "eval": "data", "import": "nsa",
    "data prepare": "data", "data tokenizer": "data", "data stats": "data",
    "data verify": "data",
}  # fmt: skip


def test_the_example_of_an_override_fits_its_command():
    examples = {
        " ".join(path): re.fullmatch(r"Overrides such as (.+)\.", parameter.help)[1]
        for path, command in COMMANDS.items()
        for parameter in command.params
        if parameter.metavar == "KEY=VALUE"
    }
    assert {name: example.partition(".")[0] for name, example in examples.items()} == OVERRIDES
    assert {name for name, example in examples.items() if "train.steps" in example} == {"train", "config show"}
    for example in examples.values():
        parse_config({}, "help", [example])


def test_the_help_of_checkpoints_says_which_are_read():
    for command, said in (
        ("verify", "A run (all its checkpoints)"),
        ("export", "its newest undamaged checkpoint"),
    ):
        assert said in words_of(CliRunner().invoke(app, ["ckpt", command, "--help"]).output)


def test_the_list_begins_with_a_first_run_and_with_what_learned_best():
    listed = [line.split()[0] for line in CliRunner().invoke(app, ["config", "list"]).output.splitlines()]
    assert listed[:2] == ["quickstart", "m7c_125m_muon"]
    assert listed[2:] == [name for name in shipped_names() if name not in listed[:2]]


def test_a_configuration_that_is_not_trained_by_itself_says_so_in_the_list():
    listed = dict(line.split(None, 1) for line in CliRunner().invoke(app, ["config", "list"]).output.splitlines())
    assert listed["convert"].startswith("For `nsa import --config convert`, not to train by itself")
    assert not [name for name, about in listed.items() if not about.endswith(".")], "each is a sentence"
