"""`python -m bench.learning`: its rows are runs that can start, its results can be shown."""

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench import figures, learning
from bench.learning import CONFIG, VOCABULARY, corpus_of, main, overrides_of, parse
from bench.learning_report import (
    FIGURES,
    MARKS,
    PAGE,
    RATES_RESULTS,
    RESULTS,
    by_layer,
    comparable,
    lines_by,
    write_page,
)
from bench.learning_rows import ROWS, read_results
from nsa.config import load_config
from tests.bench.conftest import TEXT, TINY, make_shards


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("action", ["run", "recall"])
def test_every_row_is_a_configuration_that_loads(row, action, tmp_path):
    options = parse([action, str(tmp_path), "--tokenizer", "bytes", "--tokens", "1000000", "train.log_every=7"])
    config = load_config(CONFIG, overrides_of(tmp_path, row, options, seed=3, lr=1e-3))
    assert config.train.seed == 3
    assert config.train.log_every == 7
    steps = 62 if action == "recall" else 16
    assert config.train.steps == steps
    sources = [part.source for part in config.data.mixture] or [config.data.source]
    assert sources == (["prepared", "recall"] if action == "recall" else ["prepared"])
    assert f"/{'recall-' * (action == 'recall')}bytes-{row}-8192-{steps}-s3-lr0.001-" in config.train.out_dir


@pytest.mark.parametrize(("million", "every", "steps"), [("64", 245, 977), ("300", 512, 4578)])
def test_a_row_is_validated_four_times_and_a_long_one_every_32_million_tokens(million, every, steps, tmp_path):
    options = parse(["run", str(tmp_path), "--tokens", f"{million}000000"])
    assert {f"train.eval_every={every}", f"train.steps={steps}"} <= {*overrides_of(tmp_path, "nsa", options, 0, 1e-3)}


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
        assert r["step_seconds"] > 0
        assert r["parameters"] > 0 < r["flops_per_token"]
    for by, columns in (
        ("position", "1 | 2 | 4 | 8 | 16 | 32 | 64"),
        ("seed", "0 | mean | lowest to highest | against dense"),
    ):
        capsys.readouterr()
        main(["show", "--results", str(results), "--by", by])
        shown = capsys.readouterr().out
        assert f"| row | {columns} |" in shown
        assert shown.index("| dense, rate 0.001 |") < shown.index("| nsa, nsa.cmp_block=4 ")
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
    with pytest.raises(SystemExit, match="2 of 2 rows failed"):
        main([*arguments, "--rows", "dense,nsa"])
    assert len(called) == 8, "the results of another corpus do not count"


@pytest.fixture
def commands(monkeypatch):
    """The commands of rows, none of which runs; those that contain `commands.fails` fail, after an earlier success."""

    class Commands(list):
        fails = "nothing"

    found = Commands()

    def run(arguments, log):
        found.append(" ".join(arguments))
        folder = Path(arguments[1])
        if arguments[0] == "train":
            folder = Path(load_config(arguments[1], arguments[2:]).train.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps({"val_loss": 3.0, "val_bits_per_byte": 1.0}))
        (folder / "eval.json").write_text(json.dumps({"loss": []}))
        return 2 if found.fails in found[-1] else 0

    monkeypatch.setattr(learning, "run_logged", run)
    monkeypatch.setattr(learning, "corpus_of", lambda *_: "c6d32d9a62f6")
    return found


@pytest.mark.parametrize(
    "given", [["train.weight_decay=0"], ["--batch-size", "4"], ["--eval-tokens", "8192"], ["nsa.window=64"]]
)
def test_further_overrides_and_sizes_make_a_run_of_their_own(given, tmp_path, commands):
    results = tmp_path / "results.jsonl"
    results.write_text(RATES_RESULTS.read_text())
    arguments = ["run", str(tmp_path), "--rows", "nsa", "--tokens", "32047104", "--results", str(results)]
    arguments += ["--allow-dirty", "--rates", "6e-4"]
    main(arguments)
    assert commands == [], "the row that the results have"
    for _ in range(2):
        main([*arguments, *given])
    assert len(commands) == 1
    plain, other = (learning.folder_of(tmp_path, "nsa", parse([*arguments, *more]), 0, 6e-4) for more in ([], given))
    assert plain.name == "nsa-8192-489-s0-lr0.0006"
    assert other != plain
    assert f"train.out_dir={tmp_path}/runs/c6d32d9a62f6/{other.name}" in commands[0]


def test_text_that_was_prepared_again_is_trained_on_in_another_folder(tmp_path, commands, monkeypatch):
    arguments = ["run", str(tmp_path), "--rows", "nsa", "--results", str(tmp_path / "r"), "--allow-dirty"]
    main(arguments)
    monkeypatch.setattr(learning, "corpus_of", lambda *_: "another")
    main(arguments)
    folders = {next(o for o in command.split() if o.startswith("train.out_dir=")) for command in commands}
    assert len(folders) == 2
    assert {r["corpus"] for r in read_results(tmp_path / "r")} == {"c6d32d9a62f6", "another"}


def test_losses_on_different_recall_tasks_are_not_compared():
    about = {"changes": "", "seq_len": 8192, "tokens": 1, "seed": 0, "lr": 1e-3, "curve": [[1, 2.0]], "eval": {}}
    found = [about | {"row": row, "tasks": tasks} for row in ("dense", "nsa") for tasks in ("pairs", "counting")]
    groups = lines_by(found, "tokens")
    assert [key[-1] for key in groups] == ["", "counting"]
    assert all(len(lines) == 2 for lines in groups.values())


@pytest.mark.parametrize(
    ("action", "jobs", "is_off"), [("run", "1", False), ("run", "2", True), ("recall", "2", False)]
)
def test_large_rows_that_share_a_gpu_train_without_cuda_graphs(action, jobs, is_off, tmp_path, commands):
    main([action, str(tmp_path), "--rows", "nsa", "--jobs", jobs, "--results", str(tmp_path / "r"), "--allow-dirty"])
    assert ("runtime.cuda_graphs=false" in commands[0]) == is_off


def test_an_interrupt_ends_the_study_and_starts_no_further_row(tmp_path, commands, monkeypatch):
    started, results = [], tmp_path / "results.jsonl"

    def train(arguments, log):
        started.append(arguments)
        time.sleep(0.1)  # until the other rows wait
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # as `nsa train` saves a checkpoint
        return 130

    monkeypatch.setattr(learning, "run_logged", train)
    with pytest.raises(KeyboardInterrupt):
        main(["run", str(tmp_path), "--rows", "dense,nsa,msa", "--results", str(results), "--allow-dirty"])
    assert len(started) == 1
    assert read_results(results) == []


def test_a_row_that_failed_has_no_loss_and_is_not_shown(tmp_path, commands, capsys):
    results = tmp_path / "results.jsonl"
    arguments = ["run", str(tmp_path), "--rows", "dense,nsa", "--results", str(results), "--allow-dirty"]
    commands.fails = "model.attention=dense"
    with pytest.raises(SystemExit, match="1 of 2 rows failed"):
        main(arguments)
    assert "dense, seed 0, rate 0.0006: exit code 2" in capsys.readouterr().out
    assert {r["row"]: r["val_loss"] for r in read_results(results)} == {"dense": None, "nsa": 3.0}
    main(["show", "--results", str(results)])
    shown = capsys.readouterr().out
    assert "nsa" in shown
    assert "dense " not in shown.replace("against dense", "")


@pytest.mark.parametrize(("row", "selects"), [("window", False), ("window-dense-muon", True), ("nsa", True)])
def test_the_selection_is_measured_in_models_that_have_one(row, selects, tmp_path, commands):
    results = ["--results", str(tmp_path / "results.jsonl"), "--allow-dirty"]
    main(["run", str(tmp_path), "--rows", row, "--evaluate", *results])
    assert commands[1].startswith("eval")
    assert ("--selection" in commands[1]) == selects


def test_layers_that_select_have_the_numbers_of_the_model():
    layers = [{"layer": f"blocks.{n}.attention", "mass": n / 10, "queries": 8} for n in (3, 7)]
    dense = {"layer": "blocks.8.attention", "mass": 1.0, "queries": 0}
    result = {"seq_len": 256, "eval": {"selection": [{"length": 256, "layers": [*layers, dense]}]}}
    assert by_layer(result) == [(3, 0.3), (7, 0.7)]


def test_wide_dense_attention_has_the_parameters_of_nsa_and_a_width_for_fast_products():
    from nsa.nn.model import build_model

    def parameters(row):
        with torch.device("meta"):
            return build_model(load_config(CONFIG, ROWS[row].split()), VOCABULARY, 0).num_parameters()

    assert parameters("nsa") <= parameters("dense-wide-muon") <= 1.0011 * parameters("nsa")
    assert load_config(CONFIG, ROWS["dense-wide-muon"].split()).model.mlp_dim % 16 == 0
    assert parameters("dense") < 0.95 * parameters("nsa")


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


@pytest.fixture
def studied(tmp_path):
    """Writes results with these losses, by row, seed, rate and further overrides, and returns their path."""
    (one, *_) = (r for r in read_results(RATES_RESULTS) if "corpus" in r)

    def write(*losses):
        rows = [
            one | {"row": row, "changes": f"{ROWS[row]} {more}", "seed": seed, "lr": lr, "val_loss": loss}
            for row, seed, lr, more, loss in losses
        ]
        path = tmp_path / "results.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_rows_are_compared_with_dense_rows_of_the_same_seeds_and_overrides(studied, capsys):
    losses = [("dense", 0, 0.5, "", 4.0), ("dense", 1, 0.5, "", 5.0), ("nsa", 1, 0.5, "", 4.5)]
    losses += [("dense", 0, 0.5, "train.weight_decay=0", 3.0), ("nsa", 0, 0.5, "train.weight_decay=0", 3.3)]
    losses += [("nsa", 1, 0.5, "nsa.window=64 checkpoint.every=9", 5.5)]
    losses += [("dense-muon", 1, 0.5, "", 2.0), ("nsa-muon", 1, 0.5, "", 2.5)]
    results = studied(*losses)
    main(["show", "--results", str(results), "--by", "rate"])
    shown = capsys.readouterr().out
    assert "| nsa, seed 1 | 4.5000 | 4.5000 | -10.0 % |" in shown
    assert "| nsa, nsa.window=64, seed 1 | 5.5000 | 5.5000 | +10.0 % |" in shown
    decayed = shown[shown.index("32 million tokens, train.weight_decay=0, by learning rate:") :]
    assert "| nsa | 3.3000 | 3.3000 | +10.0 % |" in decayed
    main(["show", "--results", str(results), "--by", "seed"])
    shown = capsys.readouterr().out
    assert "| dense, rate 0.5 | 4.0000 | 5.0000 | 4.5000 | 4.0000 to 5.0000 | +0.0 % |" in shown
    assert "| nsa, rate 0.5 |  | 4.5000 | 4.5000 |  | -10.0 % |" in shown
    main(["show", "--results", str(results)])
    shown = capsys.readouterr().out
    assert "-10.00%" in shown
    assert shown.count("+10.00%") == 2
    assert "+25.00%" in shown, "with the same optimizer"


def test_the_rows_of_a_figure_can_be_told_apart_and_their_seeds_look_alike(studied, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []

    @contextmanager
    def figure(*arguments, make=figures.figure, **more):
        with make(*arguments, **more) as made:
            drawn.append(made)
            yield made

    monkeypatch.setattr(figures, "figure", figure)
    rows = ("dense", "nsa", "nsa-muon", "pattern-1-1")
    results = studied(*((row, seed, 0.5, "", 4.0 + seed) for row in rows for seed in range(3)))
    main(["plot", "--results", str(results), "--by", "rate", "--figure", str(tmp_path / "a.svg")])
    lines = drawn[0].axes[0].get_lines()
    assert len(lines) == 12
    styles = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
    assert [len(set(styles[3 * n : 3 * n + 3])) for n in range(4)] == [1] * 4
    assert len(set(styles)) == 4
    assert len({line.get_color() for line in lines}) == 3, "a color for each kind"
    named = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert sorted(named) == sorted(rows)


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
