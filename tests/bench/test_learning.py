"""`python -m bench.learning`: its rows are runs that can start, its results can be shown."""

import json

import pytest

from bench.learning import RESULTS, ROWS, corpus_of, main, overrides_of, parse, plot, seconds_of
from nsa.config import load_config
from nsa.run_folder import HEARTBEAT, format_event
from tests.bench.conftest import TEXT, make_shards


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("action", ["run", "recall"])
def test_every_row_is_a_configuration_that_loads(row, action, tmp_path):
    options = parse([action, str(tmp_path), "--tokenizer", "bytes", "--tokens", "1000000", "train.log_every=7"])
    config = load_config("configs/m7c_125m.yaml", overrides_of(tmp_path, row, options, seed=3, lr=1e-3))
    assert config.train.seed == 3
    assert config.train.log_every == 7
    steps = 62 if action == "recall" else 16
    assert config.train.steps == steps
    sources = [part.source for part in config.data.mixture] or [config.data.source]
    assert sources == (["prepared", "recall"] if action == "recall" else ["prepared"])
    assert config.train.out_dir.endswith(f"{'recall-' * (action == 'recall')}bytes-{row}-8192-{steps}-s3-lr0.001")


def test_results_are_shown_with_their_recall(tmp_path, monkeypatch, capsys):
    measured = {"recall": [{"length": 8192, "keys": "several", "by_depth": [1.0, 0.5]}]}
    results = tmp_path / "results.jsonl"
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    results.write_text("".join(json.dumps({**result, "eval": measured}) + "\n" for result in found))
    monkeypatch.setattr("sys.argv", ["learning", "show", "--results", str(results)])
    main()
    shown = capsys.readouterr().out
    assert "+0.00%" in shown
    assert "nsa, several,  8,192 tokens, exact in % by depth: 100.0  50.0" in shown


def test_the_corpus_is_named_by_its_tokens_alone(shards, tmp_path):
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    assert corpus_of(make_shards(tmp_path / "same", TEXT), "bpe") == corpus_of(shards, "bpe")
    assert corpus_of(make_shards(tmp_path / "other", f"{TEXT} "), "bpe") != corpus_of(shards, "bpe")


def test_the_same_results_give_the_same_figure(tmp_path):
    pytest.importorskip("matplotlib")
    for name in "ab":
        plot(RESULTS, tmp_path / "img" / f"{name}.svg")
    drawn = (tmp_path / "img" / "a.svg").read_text()
    assert "million tokens" in drawn
    assert "pattern-1-3" in drawn
    assert drawn == (tmp_path / "img" / "b.svg").read_text()


def test_the_seconds_of_a_row_that_was_resumed_count_all_its_starts(tmp_path):
    assert seconds_of(tmp_path) == 0.0, "it never began"
    moments = [("boot", 5.0), ("start", 7.0), ("step", 25.0), ("boot", 1000.0), ("step", 1001.5), ("end", 1002.5)]
    about = {"v": 1, "time": 0.0, "rank": 0, "step": 0}
    lines = [format_event({**about, "event": event, "clock": clock}) for event, clock in moments]
    HEARTBEAT.path(tmp_path, 0).write_text("".join(lines))
    assert seconds_of(tmp_path) == 22.5
