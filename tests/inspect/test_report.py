"""The report of a run: one file that a real browser shows without errors, with the numbers of the run's files."""

import csv
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from nsa.cli.report import report
from nsa.errors import CheckpointError, LaunchError
from nsa.inspect.compare import render_comparison
from nsa.inspect.reading import read_run
from nsa.inspect.report_plots import smooth
from nsa.inspect.run_report import render, write_page
from nsa.inspect.svg import log_ticks, thin, ticks
from nsa.inspect.view import frame
from nsa.record.samples import Sample
from tests.inspect.test_recorded import RECORDED
from tests.record.runs import BEGAN, event, long_run

PLOTS = (
    *("plot-loss", "plot-lr", "plot-grad-norm", "plot-bits", "plot-throughput", "plot-step-time", "plot-memory"),
    *("plot-gates-cmp", "plot-gates-sel", "plot-gates-win", "plot-entropy", "plot-lowest-entropy", "plot-collapsed"),
    *("plot-distance", "plot-agreement", "plot-distinct"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--dump-dom",
    ),
)
EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def finished(tmp_path):
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page as a browser has it in the end, and what its console says."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        message = "no browser is found: apt-get install chromium, or put chromium or google-chrome on the PATH"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    done = subprocess.run(
        [browser, *FLAGS, *flags, f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def figure_of(page: str, identity: str) -> str:
    found = re.search(rf'<figure[^>]* id="{identity}".*?</figure>', page, re.DOTALL)
    assert found, identity
    return found[0]


def test_a_browser_shows_every_plot_without_an_error(finished, tmp_path):
    page = tmp_path / "report.html"
    write_page(render(read_run(finished)), page)
    shown, complaints = browse(page, tmp_path / "profile", "--virtual-time-budget=1000")
    assert complaints == []
    for identity in PLOTS:
        assert "<svg" in figure_of(shown, identity), identity
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen')</script>")
    assert "seen" in "".join(browse(broken, tmp_path / "profile")[1])  # an error would have been noticed


def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path):
    folder = long_run(tmp_path / "run", 400, 12, 50)
    with (folder / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("incident", 400, kind="save_failed", message="a_long_word_without_a_space/" * 30))
    page = tmp_path / "report.html"
    page.write_text(render(read_run(folder)).replace("<details", "<details open"))
    phone = tmp_path / "phone.html"  # a window cannot be as narrow as a frame
    phone.write_text(
        f'<iframe src="{page.name}" width="375" height="9000" frameborder="0"></iframe><p id="wide"></p><script>'
        "onload = () => { wide.textContent = frames[0].document.documentElement.scrollWidth + ' pixels' }</script>"
    )
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=1000")
    shown, complaints = browse(phone, tmp_path / "profile", *flags)
    assert complaints == []
    assert ">375 pixels<" in shown


def test_text_of_a_run_cannot_act_in_a_browser(tmp_path):
    folder = long_run(tmp_path / f"run{EVIL.replace('/', '')}", 40, 1, 10)
    (folder / "metrics.json").write_text(json.dumps({"status": "failed", "exit_code": 1, "reason": EVIL, "steps": 40}))
    (folder / "config.yaml").write_text(json.dumps({"train": {"steps": 40, EVIL: EVIL}}))
    (folder / "env.json").write_text(json.dumps({"gpu": [EVIL], "strategy": EVIL, EVIL: {EVIL: [EVIL]}}))
    quoted = '"' + EVIL.replace('"', '""') + '"'
    for name, row in (
        ("gate_stats.csv", f"10,{quoted},1,1,1,1,0,0.3,0.3,0.4\n"),
        ("k_stats_layers.csv", f"40,{quoted},1,1,1,1,1,1{',0.1' * 12}\n"),
        ("fallback_counters.csv", f"10,{quoted},{quoted},3\n"),
    ):
        with (folder / name).open("a") as file:
            file.write(row)
    with (folder / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("incident", 40, kind=EVIL, message=EVIL))
    page = render(read_run(folder))
    assert EVIL not in page
    assert "<script" not in page
    assert "<img" not in page
    assert page.count(html.escape(EVIL)) >= 10
    (tmp_path / "report.html").write_text(page)
    shown, complaints = browse(tmp_path / "report.html", tmp_path / "profile")
    assert complaints == []
    assert "<title>owned" not in shown
    assert "<img" not in shown


def test_the_newest_texts_are_shown_with_control_characters_visible(finished):
    view = read_run(finished)
    assert 'id="samples"' not in render(view)
    assert view.problems == read_run(RECORDED).problems, "most runs have none"
    settings = {"temperature": 0.8, "top_k": None, EVIL: EVIL}
    texts = [f"text {n} {EVIL}" for n in range(10)] + ["a\tb\n\x1b[31mred\u202e\ud800", "long " * 2000]
    lines = [Sample(BEGAN, f"model{EVIL}", "the prompt ", text, settings).to_line() for text in texts]
    (finished / "samples.jsonl").write_text("".join(lines[:10]) + '{"time": 1}\n[]\n' + "".join(lines[10:]))
    view = read_run(finished)
    page = render(view)
    shown = re.findall(r"<pre><b>the prompt </b>(.*?)</pre>", page, re.DOTALL)
    assert [text[:7].strip() for text in shown] == ["long lo", "a\tb\n\\x1", *(f"text {n}" for n in range(9, 3, -1))]
    assert shown[1] == "a\tb\n\\x1b[31mred\\u202e\\ud800"
    assert "6,000 more characters are in samples.jsonl" in page
    assert "temperature 0.8" in page
    assert "top_k" not in page
    assert EVIL not in page
    assert view.problems["samples.jsonl"] == "2 damaged lines left out"
    page.encode("utf-8")


MEASURED = {
    "weights": f"runs/{EVIL}",
    "trained_length": 32,
    "samples": 8,
    "loss": [
        {"length": length, "loss": 2.0, "buckets": [
            {"first": 2**n, "last": 2 ** (n + 1) - 1, "tokens": 9, "loss": 3.0 - n / 4} for n in range(4)
        ]}
        for length in (600, 12_000)
    ],
    "recall": [
        {"length": length, "keys": keys, "by_depth": [1.0, 0.5, share]}
        for length, share in ((600, 0.0), (12_000, 0.25)) for keys in ("one", "several")
    ],
    "tasks": [
        {"length": length, "task": "tracking", "levels": [1, 2], "unit": "copies", "by_level": [1.0, share]}
        for length, share in ((600, 0.5), (12_000, 0.25))
    ],
}  # fmt: skip


def test_an_evaluation_is_part_of_the_page_with_its_numbers(finished):
    assert 'id="evaluation"' not in render(read_run(finished))
    (finished / "eval.json").write_text(json.dumps(MEASURED))
    page = render(read_run(finished))
    assert EVIL not in page
    for keys in ("one", "several"):
        svg = figure_of(page, f"plot-recall-{keys}")
        cells = re.findall(r'class="cell( deep)?" [^>]*>([^<]*)<', svg)
        assert cells == [(" deep", "100")] * 2 + [("", "50")] * 2 + [("", "0"), ("", "25")]  # row by row
        assert all(f">{label}</text>" in svg for label in ("0-33", "33-66", "66-100", "600", "12,000"))
    tracking = figure_of(page, "plot-task-tracking")
    assert re.findall(r'class="cell(?: deep)?" [^>]*>([^<]*)<', tracking) == ["100", "100", "50", "25"]
    assert all(f">{label}</text>" in tracking for label in ("copies: 1", "copies: 2", "600", "12,000"))
    earlier = {name: found for name, found in MEASURED.items() if name != "tasks"}  # as versions without tasks wrote it
    (finished / "eval.json").write_text(json.dumps(earlier))
    assert "plot-recall-several" in render(read_run(finished))
    losses = figure_of(page, "plot-position")
    (line, _) = (re.findall(r"[\d.]+", d) for d in re.findall(r'<path class="c\d line" d="([^"]*)"', losses))
    steps = np.diff([float(x) for x in line[::2]])
    assert len(steps) == 3
    assert steps.max() / steps.min() < 1.4, "buckets that double lie evenly on the axis"
    assert "12,000 tokens</li>" in losses


def test_an_evaluation_shows_the_loss_of_every_length(finished):
    (row, _) = MEASURED["loss"]
    rows = [row | {"length": 512 << n} for n in range(12)]
    (finished / "eval.json").write_text(json.dumps(MEASURED | {"loss": rows}))
    losses = figure_of(render(read_run(finished)), "plot-position")
    assert all(f"{row['length']:,} tokens</li>" in losses for row in rows)


@pytest.mark.parametrize(
    "content",
    [
        {"x": 1},
        MEASURED | {"recall": [{"length": 5, "keys": "one", "by_depth": d} for d in ([1], [1, 2])]},
        MEASURED | {"recall": [{"length": 5, "keys": 7, "by_depth": [1]}]},
        MEASURED | {"recall": [{"length": 5, "keys": "one", "by_depth": [0.5] * 5000}]},
        MEASURED | {"tasks": [{"length": 5, "task": EVIL, "levels": [1, 2], "unit": EVIL, "by_level": [1.0]}]},
        MEASURED | {"tasks": 3},
        MEASURED | {"selection": [{"length": 5, "layers": []}]},
        MEASURED | {"selection": [{"length": 5, "layers": [{"layer": EVIL, "mass": 0.5}] * n} for n in (1, 2)]},
        MEASURED | {"loss": "none"},
        MEASURED | {"loss": []},
    ],
    ids=lambda content: str(content)[-60:],
)
def test_a_file_that_holds_no_evaluation_is_named(finished, content):
    (finished / "eval.json").write_text(json.dumps(content))
    assert "eval.json is not an evaluation" in render(read_run(finished))
    (finished / "eval.json").write_text("{")
    assert read_run(finished).problems["eval.json"] == "damaged: cannot be parsed"


def test_the_page_holds_the_numbers_of_the_files(finished):
    view = read_run(finished)
    page = render(view)
    assert f"<dd>{view.loss:.4f}</dd>" in page
    assert f"<dd>{view.validation[1]:.4f}</dd>" in page
    assert f"{view.gates['blocks.0.attention'].share_win:.1%}</span>" in page
    assert ">finished<" in page
    assert "Nothing unhealthy was found" in page
    assert "num_selected: 4" in page
    loss = ElementTree.fromstring(re.search(r"<svg.*?</svg>", figure_of(page, "plot-loss"), re.DOTALL)[0])
    assert loss.find("title").text == "Loss"
    assert f"{view.training.column('loss')[0]:.4f}" in loss.find("desc").text
    assert len(loss.findall("circle")) == 2  # validations
    (raw,) = [path for path in loss.findall("path") if "faint" in path.get("class")]
    assert len(re.findall("[ML]", raw.get("d"))) == 6


def test_the_page_shows_selection_layer_by_layer(finished):
    with (finished / "k_stats_layers.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["step"] == "6"]
    view = read_run(finished)
    assert list(view.layer_selection) == ["blocks.0.attention", "blocks.1.attention"]
    (part,) = re.findall(r'<details[^>]*id="selection-layers".*?</details>', render(view), re.DOTALL)
    assert "Layer by layer at step 6" in part
    rows = part.split("<tr>")[2:]
    assert len(rows) == 2
    for number, (row, shown) in enumerate(zip(last, rows, strict=True)):
        assert f"layer {number}</td>" in shown
        assert f">{float(row['mean_distinct']):.2f}<" in shown
        assert f">{float(row['agreement']):.1%}<" in shown
        assert f'title="2-3 blocks away: {float(row["distance_2-3"]):.1%}"' in shown


def test_the_page_needs_nothing_from_outside(finished):
    page = render(read_run(finished))
    assert not re.search(r"https?://|@import|url\(|<script|<iframe", page)
    assert re.findall(r'(?:src|href)="([^#][^"]*)"', page) == ["data:,"]
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page


@pytest.mark.parametrize(
    ("file", "plots"),
    [
        ("training.csv", PLOTS[:7]),
        ("gate_stats.csv", PLOTS[7:13]),
        ("k_stats.csv", PLOTS[13:]),
        ("k_stats_layers.csv", ()),
        ("env.json", ()),
        ("config.yaml", ()),
        ("metrics.json", ()),
        ("heartbeat_rank0.jsonl", ()),
    ],
)
@pytest.mark.parametrize("damage", [None, b"", b"\xff\x00garbage\n,,\n"])
def test_a_missing_or_damaged_file_gives_boxes_that_name_it(finished, file, plots, damage):
    (finished / file).unlink()
    if damage is not None:
        (finished / file).write_bytes(damage)
    page = render(read_run(finished))
    assert [identity for identity in PLOTS if f'id="{identity}-0-t"' not in page] == list(plots)
    assert page.count(f"Nothing to show: {file}") == (len(plots) if file == "training.csv" else 0)
    sections = {"gate_stats.csv": "gates", "k_stats.csv": "selection", "config.yaml": "configuration"}
    if file in sections:
        assert re.search(rf'<section id="{sections[file]}"><h2>[^<]*</h2><p class="missing">{file}: ', page)
    if damage is None:
        assert f"{file}: missing" in page


def test_a_run_without_gates_or_selected_blocks_has_no_section_for_them(finished):
    for name in ("gate_stats.csv", "k_stats.csv", "k_stats_layers.csv"):  # as a run with dense attention leaves them
        header = (finished / name).read_text().splitlines()[0]
        (finished / name).write_text(f"{header}\n")
    page = render(read_run(finished))
    assert re.findall(r'<section id="([^"]*)"', page) == re.findall(r'<a href="#([^"]*)"', page)
    assert 'id="training"' in page
    assert 'id="gates"' not in page
    assert 'id="selection"' not in page
    assert "Nothing to show" not in page
    assert "Nothing unhealthy was found." in page


@pytest.mark.parametrize("file", ["training.csv", "gate_stats.csv", "k_stats.csv", "k_stats_layers.csv"])
@pytest.mark.parametrize("numbers", [("1e308", "-1e308"), ("1e100", "-1e100"), ("1.7e308", "1"), ("inf", "1")], ids=str)
@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size_are_shown(finished, file, numbers):
    """In every column at once: differences and sums of the largest numbers overflow."""
    header, *rows = [line.split(",") for line in (finished / file).read_text().splitlines()]
    for column in (at for at, name in enumerate(header) if name not in ("step", "layer", "rows")):
        for row, value in zip(rows, numbers * len(rows), strict=False):
            row[column] = value
    (finished / file).write_text("\n".join(map(",".join, [header, *rows])) + "\n")
    view = read_run(finished)
    assert "</html>" in render(view)
    assert "</html>" in render_comparison([view, view])
    assert "loss" in str(frame(view))


def test_a_long_run_is_thinned_and_its_spike_stays(tmp_path):
    page = render(read_run(long_run(tmp_path / "run", 20_000, 4, 50), BEGAN + 11_000))
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", figure_of(page, "plot-grad-norm"), re.DOTALL)[0])
    (line,) = [path for path in svg.findall("path") if "line" in path.get("class")]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line.get("d"))]
    assert 900 < len(heights) < 1100
    assert sorted(heights)[0] < 0.5 * sorted(heights)[1]
    assert len(page) < 1_000_000
    assert "the loss jumped" in page


def test_thinning_keeps_both_ends_extremes_and_gaps():
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[1234], y[4321], y[7000] = 50.0, -40.0, np.nan
    kept_x, kept_y = thin(x, y, 100)
    assert len(kept_x) <= 104
    assert (kept_x[0], kept_x[-1]) == (0.0, 9999.0)
    assert {1234.0, 4321.0, 7000.0} <= set(kept_x)
    assert (np.nanmax(kept_y), np.nanmin(kept_y)) == (50.0, -40.0)


def test_the_smoothed_loss_does_not_lag_behind_the_raw_one():
    step = np.arange(400.0)
    falling = 2.0 + 8.0 * np.exp(-step / 30)
    assert np.abs(smooth(falling, 50) - falling)[:100].max() < 0.2  # of 8; a mean of the past is off by 2.4
    np.testing.assert_allclose(smooth(10.0 - step, 50)[:-25], 10.0 - step[:-25])
    noise = np.random.default_rng(0).normal(size=400)
    assert smooth(falling + noise, 50)[100:].std() < 0.3
    gap = np.where(step == 200, np.nan, falling)
    assert np.isfinite(smooth(gap, 50)).all()


@pytest.mark.parametrize(("lowest", "highest"), [(1.02, 1.0986), (0.3, 0.9), (1.0985, 1.0986)])
def test_the_scale_of_an_entropy_map_is_the_range_of_its_values(tmp_path, lowest, highest):
    folder = long_run(tmp_path / "run", 40, 2, 10)
    with (folder / "gate_stats.csv").open() as file:
        header, *rows = (row for row in csv.reader(file) if row[1] != "all")
    at = header.index("mean_entropy")
    for row, value in zip(rows, np.linspace(highest, lowest, len(rows)), strict=True):
        row[at] = str(value)
    (folder / "gate_stats.csv").write_text("".join(",".join(row) + "\n" for row in [header, *rows]))
    found = figure_of(render(read_run(folder)), "plot-entropy")
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([\d.]+)"', found)]
    low, high = map(float, re.search(r'class="scale"[^>]*>([\d.]+)<i[^>]*></i>([\d.]+)<', found).groups())
    assert high == pytest.approx(highest, abs=0.01)
    if highest - lowest > 0.02:
        assert max(shades) - min(shades) > 0.6
        assert low == pytest.approx(lowest, abs=0.01)
    else:  # nothing but rounding
        assert max(shades) - min(shades) < 0.1


def test_ticks_are_round_and_within_their_range():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1, 52_000) == [20_000, 40_000]
    assert ticks(2.31, 2.39) == [2.32, 2.34, 2.36, 2.38]
    assert log_ticks(0.03, 400) == [0.1, 1.0, 10.0, 100.0]


def test_the_command_writes_into_the_run_or_to_the_file_it_is_given(finished, tmp_path):
    app = typer.Typer()
    app.command()(report)
    for arguments, target in (
        ([], finished / "report.html"),
        (["--out", str(tmp_path / "r.html")], tmp_path / "r.html"),
    ):
        result = CliRunner().invoke(app, [str(finished), *arguments])
        assert result.exit_code == 0
        assert str(target) in result.output.replace("\n", "")
        assert target.read_text().startswith("<!doctype html>")


def test_an_unwritable_path_and_a_folder_without_a_run_are_errors(finished, tmp_path):
    with pytest.raises(LaunchError, match="--out"):
        write_page(render(read_run(finished)), tmp_path / "nowhere" / "r.html")
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        read_run(tmp_path)


def test_a_name_with_invalid_utf_8_is_shown_escaped(tmp_path):
    run = long_run(tmp_path / os.fsdecode(b"caf\xe9"), 20, layers=1, every=10)
    (run / "env.json").write_text(json.dumps({"command": ["nsa", "train", "caf\udce9.yaml"]}))
    write_page(render(read_run(run)), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "caf\\udce9.yaml" in page
