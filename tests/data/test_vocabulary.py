"""`nsa data tokenizer`: a vocabulary learned from one's own text."""

import os

import pytest
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.data.tokenizers import load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.errors import ConfigError, DataError

TEXT = "the compressed branch reads the whole past, the window the newest tokens\n" * 50


def run(*arguments: str):
    return CliRunner().invoke(app, ["data", "tokenizer", *arguments], catch_exceptions=False)


def test_a_learned_vocabulary_shortens_its_text_and_returns_any_text(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text(TEXT)
    file = tmp_path / "new" / "tokenizer.json"
    result = run(str(file), "data.source=text", f"data.paths=[{tmp_path / 'books'}]", "--vocab-size", "300")
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.vocab_size == 300
    assert tokenizer.separator == 299
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 3
    unseen = "überraschend: \x00 <|endoftext|> 漢字\r\n"
    assert tokenizer.decode(tokenizer.encode(unseen).tolist()) == unseen
    assert tokenizer.separator not in tokenizer.encode(unseen)
    assert [path.name for path in file.parent.iterdir()] == ["tokenizer.json"]


def test_the_same_text_gives_the_same_vocabulary(tmp_path):
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        train_bpe([TEXT, "another document"], file, vocab_size=290, max_bytes=1 << 20)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_place_that_cannot_be_written_is_named_and_the_environment_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"t\.json: cannot be written"):
        train_bpe([TEXT], tmp_path / "file" / "t.json", vocab_size=280, max_bytes=100)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_only_the_first_bytes_are_read(tmp_path):
    def documents():
        yield TEXT
        pytest.fail("a second document was read")

    _, read = train_bpe(documents(), tmp_path / "t.json", vocab_size=280, max_bytes=100)
    assert read == len(TEXT)


def test_bad_requests_are_refused_and_write_nothing(tmp_path):
    result = run(str(tmp_path / "t.json"), "--vocab-size", "256")
    assert result.exit_code == 2
    assert "257" in result.output
    with pytest.raises(ConfigError, match=r"\.json"):
        train_bpe([TEXT], tmp_path / "t.bin", vocab_size=300, max_bytes=100)
    with pytest.raises(DataError, match="no text"):
        train_bpe([], tmp_path / "t.json", vocab_size=300, max_bytes=100)
    assert not list(tmp_path.iterdir())
