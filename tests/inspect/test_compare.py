"""Several runs on one page: the numbers of each, and their curves against steps, tokens and time."""

import html
import json
import math
import re
import shutil

import pytest
import typer
import yaml
from typer.testing import CliRunner

from nsa.cli.report import report
from nsa.errors import ConfigError
from nsa.inspect.compare import render_comparison, utilisation
from nsa.inspect.reading import read_run
from nsa.inspect.svg import STYLES
from tests.inspect.test_recorded import RECORDED
from tests.inspect.test_report import EVIL, browse, figure_of
from tests.record.runs import BEGAN, long_run

PLOTS = ("plot-loss", "plot-loss-tokens", "plot-loss-time", "plot-bits", "plot-throughput")


@pytest.fixture
def views(tmp_path):
    long = read_run(long_run(tmp_path / "long", 400, 2, 50), BEGAN + 220)
    return [long, read_run(shutil.copytree(RECORDED, tmp_path / "short"))]


def lines_of(page: str, identity: str) -> dict[str, int]:
    """The points of every line of a figure, by its style."""
    svg = re.search(r"<svg.*?</svg>", figure_of(page, identity), re.DOTALL)[0]
    found = re.findall(r'<path class="(c\d(?: dash)?) line" d="([^"]*)"', svg)
    return {style: len(re.findall("[ML]", points)) for style, points in found}


def test_the_page_has_the_numbers_and_curves_of_every_run(views):
    page = render_comparison(views)
    rows = dict(re.findall(r'<tr><td><i class="key [^"]*"></i>([^<]*)</td>(.*?)</tr>', page))
    assert list(rows) == ["long", "short"]
    for view in views:
        assert f">{view.loss:.4f}<" in rows[view.name]
        assert f">{view.step:,} of {view.steps:,}<" in rows[view.name]
    assert f">{views[1].validation[2]:.3f}<" in rows["short"]
    for identity in ("plot-loss", "plot-loss-tokens", "plot-loss-time", "plot-throughput"):
        assert lines_of(page, identity) == {"c1": 400, "c2": 6}, identity
    assert lines_of(page, "plot-bits") == {"c1": 0, "c2": 2}  # the other was never validated
    for identity, along in (("plot-loss", "step"), ("plot-loss-tokens", "tokens"), ("plot-loss-time", "min")):
        assert re.search(rf">[^<]*{along}</text>", figure_of(page, identity)), identity
    assert not re.search(r"https?://|@import|url\(|<script|<iframe", page)


def test_parameters_and_the_keys_that_differ_are_shown(tmp_path):
    folders = [shutil.copytree(RECORDED, tmp_path / name) for name in "abc"]
    config = yaml.safe_load((RECORDED / "config.yaml").read_text())
    config["train"]["out_dir"], config["train"]["seed"], config["data"]["paths"] = "elsewhere", 77, ["x", EVIL]
    del config["model"]["tied_head"]  # of another version
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    (folders[1] / "env.json").write_text(json.dumps({"parameters": 124_000_000}))

    def shown(*names):
        page = render_comparison([read_run(tmp_path / name) for name in names])
        section = re.search(r'<section id="configuration">.*?</section>', page)[0]
        return page, dict(re.findall(r"<tr><th>([^<]*)</th>(.*?)</tr>", section)), section

    page, keys, _ = shown("a", "b")
    assert '<td class="num">124M</td>' in page
    assert keys == {
        "model.tied_head": "<td>false</td><td>-</td>",
        "data.paths": f"<td>none</td><td>x<br>{html.escape(EVIL)}</td>",
        "train.seed": "<td>0</td><td>77</td>",
        "key": keys["key"],  # the names of the runs
    }
    assert "All runs have the same configuration" in shown("a", "c")[2]
    (folders[2] / "config.yaml").unlink()
    _, keys, section = shown("a", "b", "c")
    assert keys["train.seed"] == "<td>0</td><td>77</td><td>-</td>"
    assert "train.steps" not in keys, "a run whose configuration is not known differs in no key"
    assert "No configuration of c is known" in section


def test_time_is_that_of_the_steps(views):
    page = figure_of(render_comparison(views), "plot-loss-time")
    spent = views[0].training.column("step_s").sum() / 60
    last = re.findall(r"time in steps, min ([\d.]+) to ([\d.]+)", page)[-1]
    assert float(last[1]) == pytest.approx(spent, rel=0.01)


def test_model_flops_utilisation_where_it_is_known(tmp_path):
    folder = long_run(tmp_path / "run", 60, 1, 50)
    env = json.loads((folder / "env.json").read_text())

    def found(**changes):
        (folder / "env.json").write_text(json.dumps(env | {"flops_per_token": 6e9, "precision": "bf16"} | changes))
        return utilisation(read_run(folder))

    (folder / "config.yaml").write_text("train: {batch_size: 8, seq_len: 1024}\n")
    rate = 8 * 1024 / read_run(folder).recent("step_s")  # of all tokens, also those without a target
    assert found(gpu=["NVIDIA H100 80GB HBM3"]) == pytest.approx(rate * 6e9 / (8 * 989e12))
    assert found(gpu=["NVIDIA A100-SXM4-80GB"]) == pytest.approx(rate * 6e9 / (8 * 312e12))
    assert found(gpu=["NVIDIA GH200 480GB"]) == pytest.approx(rate * 6e9 / (8 * 989e12))
    assert math.isnan(found(gpu=["NVIDIA RTX A1000"]))
    unknown = ({"gpu": ["RTX"]}, {"gpu": []}, {"precision": "fp32"}, {"flops_per_token": None}, {"gpu": EVIL})
    assert [found(**changes) for changes in unknown] == [pytest.approx(float("nan"), nan_ok=True)] * len(unknown)


def test_runs_of_one_name_are_distinguished_and_too_many_are_refused(tmp_path):
    folders = [tmp_path / part / "run" for part in "ab"]
    for folder in folders:
        shutil.copytree(RECORDED, folder)
    page = render_comparison([read_run(folder) for folder in folders])
    assert all(f"></i>{folder}</td>" in page for folder in folders)
    with pytest.raises(ConfigError, match="9 runs: at most 8"):
        render_comparison([read_run(folders[0])] * (len(STYLES) + 1))


def test_a_browser_shows_the_page_and_text_of_a_run_cannot_act_in_it(views, tmp_path):
    evil = read_run(long_run(tmp_path / f"run{EVIL.replace('/', '')}", 1, 1, 10))
    page = tmp_path / "comparison.html"
    page.write_text(render_comparison([*views, evil]))
    assert html.escape(evil.name[:40]) in page.read_text()
    shown, complaints = browse(page, tmp_path / "profile", "--virtual-time-budget=1000")
    assert complaints == []
    assert "<title>owned" not in shown
    assert "<img" not in shown
    for identity in PLOTS:
        assert "<svg" in figure_of(shown, identity), identity


def test_runs_without_a_step_are_compared_too(views, tmp_path):
    empty = shutil.copytree(RECORDED, tmp_path / "empty")
    (empty / "training.csv").unlink()
    assert lines_of(render_comparison([*views, read_run(empty)]), "plot-loss") == {"c1": 400, "c2": 6, "c3": 0}
    assert "No run has a step yet" in render_comparison([read_run(empty)] * 2)


def test_the_command_compares_where_it_is_given_several_runs(views, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(report)
    for arguments, target in (([], "comparison.html"), (["--out", "other.html"], "other.html")):
        result = CliRunner().invoke(app, ["long", "short", *arguments])
        assert result.exit_code == 0, result.output
        assert result.output == f"{target}: open it in a browser\n"
        assert "<h1>2 runs</h1>" in (tmp_path / target).read_text()
