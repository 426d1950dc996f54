"""`python -m bench.learning`: its rows are runs that can start, its results can be shown."""

import json

import pytest

from bench.learning import (
    FIGURES,
    MARKS,
    PAGE,
    RATES_RESULTS,
    RESULTS,
    ROWS,
    comparable,
    corpus_of,
    lines_by,
    main,
    overrides_of,
    parse,
    read_results,
    seconds_of,
    write_page,
)
from nsa.config import load_config
from nsa.run_folder import HEARTBEAT, format_event
from tests.bench.conftest import TEXT, TINY, make_shards


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


def test_results_are_shown_with_their_recall(tmp_path, capsys):
    measured = {"recall": [{"length": 8192, "keys": "several", "by_depth": [1.0, 0.5]}]}
    results = tmp_path / "results.jsonl"
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    results.write_text("".join(json.dumps({**result, "eval": measured}) + "\n" for result in found))
    main(["show", "--results", str(results)])
    shown = capsys.readouterr().out
    assert "+0.00%" in shown
    assert "nsa, several,  8,192 tokens, exact in % by depth: 100.0  50.0" in shown


def test_a_row_is_trained_and_measured_once_for_each_corpus(shards, tmp_path, called, capsys):
    results = tmp_path / "results.jsonl"
    sizes = ["--tokens", str(4 * 2 * 256), "--seq-len", "256", "--batch-size", "2", "--eval-tokens", "1024"]
    sizes += ["--rates", "1e-3", "train.warmup_steps=1"]
    arguments = ["run", str(shards), "--evaluate", "--results", str(results), "--allow-dirty", *sizes]
    for kind in ("nsa", "dense", "msa", "nsa", "dense", "msa"):
        tiny = [override for override in TINY.split() if override[:4] not in {"nsa.", "msa."} - {f"{kind}."}]
        main([*arguments, "--rows", kind, *tiny])
    assert [command.split()[0] for command in called] == ["train", "eval"] * 3
    found = read_results(results)
    for r in found:
        (loss,), (selection,) = r["eval"]["loss"], r["eval"]["selection"]
        assert loss["loss"] == pytest.approx(r["val_loss"], rel=1e-4)
        assert [bucket["first"] for bucket in loss["buckets"]] == [1 << n for n in range(7)]
        assert all(layer["mass"] < 1 for layer in selection["layers"]) == (r["row"] != "dense")
        assert 0 < r["step_seconds"] * r["curve"][-1][0] < r["seconds"]
    for by, columns in ("position", "1 | 2 | 4 | 8 | 16 | 32 | 64"), ("seed", "0 | mean | against dense"):
        capsys.readouterr()
        main(["show", "--results", str(results), "--by", by])
        shown = capsys.readouterr().out
        assert f"| row | {columns} |" in shown
        assert shown.index("| dense, rate 0.001 |") < shown.index("| nsa, rate 0.001 |")
    pytest.importorskip("matplotlib")
    for runs_at_once, panels in (1, ["tokens of context", "seconds in training steps"]), (2, ["tokens of context"]):
        results.write_text("".join(json.dumps(r | {"runs_at_once": runs_at_once}) + "\n" for r in found))
        main(["plot", "--results", str(results), "--by", "position,seconds"])
        drawn = results.with_suffix(".svg").read_text()
        assert [
            label for label in ("tokens of context", "seconds in training steps") if f">{label}<" in drawn
        ] == panels
    results.write_text("".join(json.dumps(r | {"corpus": "another"}) + "\n" for r in found))
    called.fails = "train"
    main([*arguments, "--rows", "dense,nsa"])
    assert len(called) == 8, "the results of another corpus do not count"


def test_the_corpus_is_named_by_its_tokens_alone(shards, tmp_path):
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    assert corpus_of(make_shards(tmp_path / "same", TEXT), "bpe") == corpus_of(shards, "bpe")
    assert corpus_of(make_shards(tmp_path / "other", f"{TEXT} "), "bpe") != corpus_of(shards, "bpe")


def test_rates_are_compared_within_the_corpus_of_most_rows(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (one, *_) = (r for r in read_results(RATES_RESULTS) if "corpus" in r)
    rows = [
        one | {"row": f"{kind}{optimizer}", "lr": lr, "val_loss": loss + lr, "corpus": corpus}
        for kind, loss in (("nsa", 3.0), ("dense", 4.0))
        for optimizer in ("", "-muon")
        for lr, corpus in ((0.5, "most"), (1.0, "most"), (2.0, "few"))
    ]
    del (unnamed := dict(one))["corpus"]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(r) + "\n" for r in [unnamed, *rows]))
    main(["show", "--results", str(results), "--by", "rate"])
    shown = capsys.readouterr().out
    assert "8 rows, bpe, corpus most\n" in shown
    assert "4 rows, bpe, corpus few: left out\n" in shown
    assert "1 rows, bpe, corpus unknown: left out\n" in shown
    assert "| row | 0.5 | 1 | lowest | against dense |" in shown
    assert "| dense | 4.5000 | 5.0000 | 4.5000 | +0.0 % |" in shown
    assert "| nsa-muon | 3.5000 | 4.0000 | 3.5000 | -22.2 % |" in shown
    for name in "ab":
        main(["plot", "--results", str(results), "--by", "rate", "--figure", str(tmp_path / "img" / f"{name}.svg")])
    drawn = (tmp_path / "img" / "a.svg").read_text()
    assert all(f">{label}<" in drawn for label in ("learning rate", "dense", "nsa-muon", "0.5", "1"))
    assert ">2<" not in drawn
    assert drawn == (tmp_path / "img" / "b.svg").read_text()


def test_the_guide_has_the_tables_and_figures_of_its_results(tmp_path):
    guide = PAGE.read_text(encoding="utf-8")
    for figure, (results, by) in FIGURES.items():
        has_rows = any(lines_by(comparable(results), way) for way in by.split(","))
        assert (figure.exists(), f"](img/{figure.name})" in guide) == (has_rows, has_rows), figure
    assert MARKS.search(guide)
    page = tmp_path / "page.md"
    page.write_text(MARKS.sub(r"\1old\n\4", guide), encoding="utf-8")
    write_page(page)
    assert page.read_text(encoding="utf-8") == guide, "python -m bench.learning page brings it up to date"


def test_what_cannot_be_drawn_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="no row to draw"):
        main(["plot", "--results", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        main(["plot", "--by", "colour"])
    assert "--by: 'colour' is none of rate, seed" in capsys.readouterr().err


def test_the_seconds_of_a_row_that_was_resumed_count_all_its_starts(tmp_path):
    assert seconds_of(tmp_path) == 0.0, "it never began"
    moments = [("boot", 5.0), ("start", 7.0), ("step", 25.0), ("boot", 1000.0), ("step", 1001.5), ("end", 1002.5)]
    about = {"v": 1, "time": 0.0, "rank": 0, "step": 0}
    lines = [format_event({**about, "event": event, "clock": clock}) for event, clock in moments]
    HEARTBEAT.path(tmp_path, 0).write_text("".join(lines))
    assert seconds_of(tmp_path) == 22.5
