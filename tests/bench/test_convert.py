"""`python -m bench.convert`: a dense run is converted with the user's commands, within a tenth of its tokens."""

import json
import re

import pytest

from bench import convert, learning
from bench.learning_rows import read_results
from nsa.config import load_config
from tests.bench.conftest import TINY

pytest.importorskip("transformers")
SIZES = ["--tokens", str(20 * 4 * 64), "--seq-len", "64", "--batch-size", "4", "--eval-tokens", "256"]


def test_models_trained_at_several_rates_have_their_own_logs(tmp_path):
    assert len({convert.log_of(tmp_path / f"dense-lr{rate:g}") for rate in (1e-3, 1.2e-3, 0.002, 6e-4)}) == 4


def test_rows_are_converted_within_a_tenth_of_the_tokens_and_go_on_when_cut(shards, tmp_path, called):
    results = tmp_path / "results.jsonl"
    names = ["dense", "two-stages", "second-stage-alone", "msa-two-stages", "dense-continued"]
    given = ["--rows", ",".join(names), "--results", str(results), "--allow-dirty"]
    arguments = ["run", str(shards), *given, *SIZES, *TINY.split()]
    with pytest.raises(SystemExit, match="has not finished; run it first"):
        convert.main([*arguments, "--rows", "two-stages"])
    called.fails = "/two-stages-2"
    with pytest.raises(SystemExit, match="1 rows failed"):
        convert.main(arguments)
    (failed,) = (r for r in read_results(results) if r["exit_code"])
    assert (failed["row"], failed["val_loss"]) == ("two-stages", None)
    assert [c for c in called if c.startswith("train") and "/two-stages-1" in c]
    called.clear()
    called.fails = "nothing"
    convert.main(arguments)
    assert [command.split()[0] for command in called] == ["train"], "only the second stage was left"
    called.clear()
    convert.main(arguments)
    assert called == []
    rows = convert.finished_rows(results)
    assert list(rows) == names
    for name, r in list(rows.items())[1:]:
        assert r["tokens"] == 0.1 * rows["dense"]["tokens"], name
        assert len(r["curve"]) >= (4 if name == "msa-two-stages" else 5)
        tokens = [t for t, _ in r["curve"]]
        assert tokens == sorted(tokens)
    starts = {name: r["curve"][0] for name, r in rows.items()}
    assert starts["two-stages"] == starts["second-stage-alone"]
    assert starts["dense-continued"][1] == pytest.approx(rows["dense"]["val_loss"], rel=1e-5)
    assert 0 < rows["two-stages"]["first_stage_tokens"] < rows["two-stages"]["tokens"]
    msa = rows["msa-two-stages"]
    assert msa["curve"][1][0] == msa["first_stage_tokens"], "the first stage validates dense attention"
    found = [r | {"corpus": "another"} for r in read_results(results)]
    results.write_text("".join(json.dumps(r) + "\n" for r in found))
    convert.main([*arguments, "--rows", "dense"])
    assert len(read_results(results)) == len(found) + 1, "results of another corpus do not count"
    assert list(convert.finished_rows(results)) == ["dense"]
    (folder,) = (shards / "runs").iterdir()
    folder.rename(shards / "elsewhere")
    called.fails = "train"
    with pytest.raises(SystemExit, match="run it first"):
        convert.main([*arguments, "--rows", "dense,dense-continued"])
    with pytest.raises(SystemExit, match="1 rows failed"):
        convert.main([*arguments, "--rows", "dense"])


def test_a_row_whose_recall_was_not_measured_has_failed(tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    arguments = ["run", str(tmp_path), "--recall", "--rows", "dense", "--results", str(results), "--allow-dirty"]
    options = convert.parse(arguments)
    options.corpus = "c6d32d9a62f6"
    dense = convert.dense_folder(tmp_path, options)
    dense.mkdir(parents=True)
    (dense / "model.safetensors").touch()
    monkeypatch.setattr(learning, "corpus_of", lambda *_: options.corpus)
    called = []
    for module in (convert, learning):
        monkeypatch.setattr(module, "run_logged", lambda arguments, log: called.append(arguments[0]) or 3)
    with pytest.raises(SystemExit, match="1 rows failed"):
        convert.main(arguments)
    assert (called, [r["exit_code"] for r in read_results(results)]) == (["eval"], [3])
    ends = iter([(0, {}), (-9, {})])
    monkeypatch.setattr(learning, "evaluate", lambda *_: next(ends))
    assert convert.recall_of({"start": dense, "end": dense}, options)["exit_code"] == -9, "killed by a signal"


def test_the_dense_model_is_that_of_the_study_at_the_rate_that_is_given(tmp_path):
    options = convert.parse(["run", str(tmp_path), "--rate", "1.2e-3"])
    studied = learning.parse(["run", str(tmp_path), "--tokens", "64000000"])
    assert convert.dense_folder(tmp_path, options) == learning.folder_of(tmp_path, "dense", studied, 0, 1.2e-3)
    options.corpus = "c6d32d9a62f6"
    keys = [convert.key_of(convert.result_of("dense", options, 0, []))]
    options.rate = 6e-4
    keys.append(convert.key_of(convert.result_of("dense", options, 0, [])))
    assert keys[0] != keys[1]


def test_every_dense_model_has_its_own_folder():
    given = [], ["model.n_layers=77"], ["--batch-size", "4"], ["--eval-tokens", "8192"]
    options = [convert.parse(["run", "work", *more]) for more in given]
    assert len({convert.dense_folder(o.work, o) for o in options}) == 4
    options = [convert.parse(["run", "work", *more]) for more in ([], ["nsa.window=64"], ["--batch-size", "8"])]
    assert len({convert.dense_folder(o.work, o) for o in options}) == 1


def row(name, loss, **more):
    options = convert.parse(["run"])
    options.corpus = "a corpus"
    curve = [(0, loss + 0.5), (3_000_000, loss + 0.1), (6_389_760, loss)]
    return convert.result_of(name, options, 0, curve) | more


def test_the_page_shows_the_measured_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, page, figure = tmp_path / "r.jsonl", tmp_path / "docs" / "page.md", tmp_path / "docs" / "img" / "c.svg"
    page.parent.mkdir()
    page.write_text("before\n" + "old\n".join(convert.MARKS) + "after\n")
    convert.write_page(results, figure, page)
    assert page.read_text() == "before\n" + "Not measured on a GPU yet.\n".join(convert.MARKS) + "after\n"
    rows = [row("dense", 3.0), row("two-stages", 3.03, first_stage_tokens=1_000_000), row("second-stage-alone", 3.09)]
    rows.insert(0, row("dense-continued", 2.0, seed=1))
    failed = row("dense-continued", 1.0) | {"exit_code": 1}
    results.write_text("".join(json.dumps(r) + "\n" for r in [*rows, failed]))
    convert.write_page(results, figure, page)
    text = page.read_text()
    assert "| two-stages | 6.4 million | 3.5300 |  | 3.0300 | +1.0 % |  |" in text
    assert "dense-continued" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "two-stages" in figure.read_text()
    assert not re.search("#000000|#ffffff", figure.read_text()), "unreadable on a dark page"
    drawn = figure.read_bytes()
    convert.write_page(results, figure, page)
    assert (figure.read_bytes(), page.read_text()) == (drawn, text)
    convert.show(results)
    assert "+3.0 %" in capsys.readouterr().out
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="has no place for the results"):
        convert.write_page(results, figure, page)


def test_the_page_is_that_of_the_results():
    text = convert.PAGE.read_text(encoding="utf-8")
    section = convert.section(convert.RESULTS, convert.FIGURE, convert.PAGE)
    assert section.join(convert.MARKS) in text
    assert convert.FIGURE.exists() == bool(convert.finished_rows(convert.RESULTS))


def test_the_second_stage_is_that_of_the_recipe():
    recipe = load_config("convert", convert.SECOND.split()).train
    page = convert.PAGE.read_text(encoding="utf-8")
    assert all(setting.replace("train.freeze=[]", "'train.freeze=[]'") in page for setting in convert.SECOND.split())
    assert recipe.freeze == []
