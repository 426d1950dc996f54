"""The site of `make docs`: built without a warning, complete, and with nothing that is fetched from a network."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer

import nsa.nn
import nsa.ops
from nsa import errors
from nsa.cli.main import app
from nsa.config import Config
from nsa.config.architecture import RopeScalingConfig
from nsa.config.schema import MixturePart
from nsa.plain_yaml import flat
from tests.docs.pages import ROOT
from tests.inspect.test_report import browse


class Links(HTMLParser):
    """What a page links to, what it loads, and the names in it that links can lead to."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" or values.get("src"):
            self.loaded.append(values.get("src") or values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("warning|error", done.stdout + done.stderr, re.IGNORECASE) is None, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def commands(command, *names: str) -> Iterator[str]:
    yield " ".join(names)
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *names, name)


def test_every_page_of_the_guide_is_in_the_site(site):
    guide = {path.stem for path in ROOT.glob("docs/*.md")}
    assert {*guide, "index", "contributing", "security", "changes"} <= {path.stem for path in site.glob("*.html")}


def test_links_lead_to_files_of_the_site(site):
    """Also those that lead out of docs/ in the repository: to results, to the configuration, to the licence."""
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= 16
    for path, found in pages.items():
        for link in found.links + found.loaded:
            name, _, anchor = link.partition("#")
            if ":" in name:
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            assert target.is_file(), (path.name, link)
            assert not anchor or target not in pages or anchor in pages[target].names, (path.name, link)
    assert (site / "source/bench/results/trainer-h200.json").is_file()


def test_nothing_is_fetched_from_a_network(site):
    for path in site.rglob("*.html"):
        assert [name for name in Links(path).loaded if "//" in name] == [], path.name
    for path in site.rglob("*.css"):
        assert re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")) is None, path.name


def test_every_key_of_a_configuration_has_a_row_with_its_default_and_meaning(site):
    shown = page(site, "reference/configuration.html")
    rows = dict(re.findall(r"<tr>\s*<td><code>([\w.\[\]]+)</code></td>(.*?)</tr>", shown, re.DOTALL))
    inner = {
        "data.mixture[]": MixturePart,
        "model.rope_scaling": RopeScalingConfig,
    }
    more = {f"{prefix}.{name}" for prefix, section in inner.items() for name in section.model_fields}
    assert set(rows) == {*flat(Config().to_dict()), *more}
    values, default, meaning = re.findall(r"<td>(.*?)</td>", rows["train.micro_batch"], re.DOTALL)
    assert (values, default) == (
        "whole number, at least 1, at most 2147483647, or <code>auto</code>",
        "<code>auto</code>",
    )
    assert meaning == "sequences in one forward pass of a rank"
    assert all(re.search(r"<td>.+</td>\s*<td>.+</td>\s*<td>.+</td>", row) for row in rows.values())


def test_the_interfaces_are_described(site):
    for module, name in ((nsa.nn, "layers"), (nsa.ops, "operators")):
        shown = page(site, f"reference/{name}.html")
        assert [name for name in module.__all__ if f'id="{module.__name__}.{name}"' not in shown] == []
    layer = page(site, "reference/layers.html")
    for argument in inspect.signature(nsa.nn.NSAAttention).parameters:
        assert f"<td><code>{argument}</code></td>" in layer, argument
    assert "<td><code>cu_seqlens</code></td>" in layer
    raised = [name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    shown = page(site, "reference/errors.html")
    assert [name for name in raised if f'id="nsa.errors.{name}"' not in shown] == []
    shown = page(site, "reference/runs.html")
    assert [name for name in nsa.__all__[1:] if f'id="nsa.{name}"' not in shown] == []
    assert "<td><code>top_k, top_p</code></td>" in shown, "a line for two arguments"


def test_every_command_is_described(site):
    shown = page(site, "reference/commands.html")
    for name in commands(typer.main.get_command(app), "nsa"):
        assert f"Usage: {name} " in shown, name


def test_a_browser_shows_a_page_without_an_error(site, tmp_path):
    shown, complaints = browse(site / "reference/configuration.html", tmp_path / "profile")
    assert complaints == []
    assert "Configuration" in shown
