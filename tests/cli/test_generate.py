"""`nsa generate`: what is printed, and when."""

import io

import pytest
from typer.testing import CliRunner

from nsa.cli import generate as command
from nsa.cli.main import app
from nsa.config.load import parse_config
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError
from nsa.generate.stream import Generated
from nsa.nn.model import build_model
from nsa.train.trained import TrainedRun

SIZES = ["model.dim=32", "model.n_layers=1", "model.head_dim_k=16", "model.head_dim_v=16", "train.seq_len=32"]


@pytest.fixture
def generate(monkeypatch, tmp_path):
    """The command over a model that was not trained."""
    config = parse_config({}, "test", [*SIZES, "runtime.device=cpu"])
    model = build_model(config, 256, 0).eval()
    run = TrainedRun(model, ByteTokenizer(), config, tmp_path / "model.safetensors")
    monkeypatch.setattr("nsa.train.trained.load_run", lambda *_, **__: run)
    return lambda *arguments: CliRunner().invoke(app, ["generate", "run", *arguments], catch_exceptions=False)


def test_prompts_and_a_file_of_them_are_one_batch_in_order(generate, tmp_path):
    (tmp_path / "more.txt").write_text("third prompt\n\n  \nfourth\n", encoding="utf-8")
    options = ["--max-tokens", "9", "--seed", "4"]
    both = generate("--prompt", "one", "--prompt", "two", "--prompt-file", str(tmp_path / "more.txt"), *options).stdout
    texts = [generate("--prompt", text, *options).stdout for text in ("one", "two", "third prompt", "fourth")]
    assert both == "".join(f"--- prompt {number} ---\n{text}" for number, text in enumerate(texts, start=1))


def test_the_rate_goes_to_standard_error_with_a_note_about_long_prompts(generate):
    done = generate("--prompt", "short", "--max-tokens", "5", "--temperature", "0")
    assert done.stderr.startswith("5 tokens in ")
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout
    assert "longer than" not in done.stderr
    assert generate("--max-tokens", "1").stderr.startswith("1 token in ")
    long = generate("--prompt", "a" * 40, "--max-tokens", "5")
    assert "a prompt of 41 tokens is longer than the 32 that the model was trained on" in long.stderr
    assert long.stdout.startswith("a" * 40)


def test_generated_text_cannot_control_the_terminal(generate):
    written = generate("--prompt", "a\x1b[2Jb\tc", "--max-tokens", "200", "--temperature", "5", "--top-p", "1").stdout
    assert written.startswith("a\\x1b[2Jb\tc")
    assert not {c for c in written if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n", "\t"}
    assert "\\x" in written.removeprefix("a\\x1b[2Jb\tc")  # random bytes have some


def test_a_stop_text_ends_the_text(generate):
    options = ["--prompt", "p", "--max-tokens", "40", "--seed", "1"]
    whole = generate(*options).stdout
    stop = next(c for c in whole[5:] if c.isalnum())
    assert generate(*options, "--stop", stop).stdout == whole[: whole.index(stop, 1)] + "\n"


def test_the_first_prompt_is_printed_as_it_comes_and_the_others_in_turn(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    seen = []

    def tokens():
        for piece in [
            Generated(0, 1, "a", None),
            Generated(1, 1, "x", "stop"),
            Generated(0, 2, "b", None),
            Generated(0, None, "", "stop"),
        ]:
            yield piece
            seen.append(shown.getvalue())

    assert command._print_stream(tokens(), ["P", "Q"]) == (3, ["ab", "x"])
    first = "--- prompt 1 ---\nP"
    assert seen == [first + "a", first + "a", first + "ab", first + "ab\n--- prompt 2 ---\nQx\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop", ""], "--stop: must not be empty"),
        (["--prompt-file", "missing.txt"], "--prompt-file: missing.txt cannot be read"),
        (["--prompt-file", "empty.txt"], "--prompt-file: empty.txt has no line with text"),
        (["--prompt-file", "binary.txt"], "--prompt-file: binary.txt cannot be read"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(generate, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=message):
        generate(*arguments)


def test_more_tokens_than_a_sequence_can_have_are_refused_by_the_name_of_the_option(generate):
    done = generate("--prompt", "p", "--max-tokens", "2147483648")
    assert done.exit_code == 2
    assert "--max-tokens" in done.stderr
