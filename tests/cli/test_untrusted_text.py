"""Text from data, files, servers and models never controls the terminal: control characters are shown escaped."""

import json
import re
import sys
from pathlib import Path

import pytest

from nsa.cli.main import main
from nsa.errors import ConfigError, DataError, printable
from nsa.formatting import one_line
from nsa.record.console import RunConsole
from nsa.record.run_log import RunLog
from tests.cli.test_broken_input import BASE

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"  # OSC 52: writes the clipboard of the reader
SHOWN = r"\x1b]52;c;cm0gLXJmIH4=\x07"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def run(arguments, monkeypatch, capsys) -> str:
    """All that the command writes."""
    monkeypatch.setattr(sys, "argv", ["nsa", *arguments])
    monkeypatch.setattr("nsa.cli.main._waiting_threads", set)
    with pytest.raises(SystemExit):
        main()
    written = capsys.readouterr()
    return written.out + written.err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode ✓ 👩‍🚀\ttab\nline\r\nend", "plain, ünïcode ✓ 👩‍🚀\ttab\nline\r\nend"),
        (CLIPBOARD, SHOWN),
        ("a\rb", r"a\rb"),
        ("\x9b31m", r"\x9b31m"),
        ("\x7f\x00\x85", r"\x7f\x00\x85"),
        ("txt.\u202egpj", r"txt.\u202egpj"),
        (b"\xff.yaml".decode(errors="surrogateescape"), r"\udcff.yaml"),
        (r"\x1b", r"\x1b"),
    ],
)
def test_control_characters_are_escaped_and_all_others_are_kept(text, shown):
    assert printable(text) == printable(printable(text)) == shown


def test_every_typed_error_is_printable_wherever_it_is_written():
    for error in (ConfigError(f"{CLIPBOARD}: no such file"), DataError(CLIPBOARD)):
        assert SHOWN in str(error)
        assert not CONTROLS.search(f"{error}")


def test_lines_of_a_run_and_of_its_views_are_printable(tmp_path, capsys):
    with RunLog(tmp_path, 0) as log:
        RunConsole(1, log).log(f"incident: {CLIPBOARD}")
    with pytest.raises(ValueError, match="boom"), RunLog(tmp_path, 0):
        raise ValueError(f"boom {CLIPBOARD}")
    kept = (tmp_path / "run.log").read_text()
    assert kept.count(SHOWN) == 2, "the line and how it ended"
    for text in (capsys.readouterr().out, kept, one_line(CLIPBOARD)):
        assert SHOWN in text
        assert not CONTROLS.search(text)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder with a file of every kind whose name or content holds an escape sequence; the current one."""
    monkeypatch.chdir(tmp_path)
    base = BASE.replace("OUT_DIR", "out")
    Path(f"{CLIPBOARD}.yaml").write_text(base)
    Path("key.yaml").write_text(base + '"\\e]52;c;cm0gLXJmIH4=\\a": 1\n')
    Path("value.yaml").write_text(base.replace("source: synthetic", 'source: "\\e]52;c;cm0gLXJmIH4=\\a"'))
    Path("data.txt").write_text(f"a document {CLIPBOARD}")
    checkpoint = Path("run/checkpoints/step_00000001")
    checkpoint.mkdir(parents=True)
    progress = {"tokens": 1, "loss": 1.0, "val_loss": None}
    state = {"version": 1, "progress": progress, "strategy": CLIPBOARD, "world_size": 1}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "check", f"{CLIPBOARD}.yaml"),
        ("config", "show", f"{CLIPBOARD}"),
        ("config", "show", "key.yaml"),
        ("config", "show", "value.yaml"),
        ("config", "show", "value.yaml", f"data.source={CLIPBOARD}"),
        ("data", "stats", "data.source=text", "data.paths=[data.txt]"),
        ("ckpt", "list", "run"),
        ("train", f"{CLIPBOARD}.yml"),
    ],
    ids=" ".join,
)
def test_no_command_prints_control_characters_of_its_input(arguments, hostile, monkeypatch, capsys):
    text = run(list(arguments), monkeypatch, capsys)
    assert "52;c;" in text
    assert not CONTROLS.search(text), text


def test_generated_text_is_printable(hostile, monkeypatch, capsys):
    run(["train", f"{CLIPBOARD}.yaml"], monkeypatch, capsys)
    text = run(["generate", "out", "--prompt", f"say {CLIPBOARD}", "--max-tokens", "8"], monkeypatch, capsys)
    assert SHOWN in text
    assert not CONTROLS.search(text)
