"""What the documentation shows exists and runs."""

import re

import pytest
import typer

from nsa.cli.main import app
from nsa.config import load_config, shipped_names
from nsa.train.schedule import learning_rate
from tests import warm
from tests.distributed.launching import environment, wait_all
from tests.docs.pages import PAGES, README, ROOT, Page

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = typer.main.get_command(app)
FOLDERS = "nsa|configs|docs|tests|examples|bench|scripts"
every_page = pytest.mark.parametrize("page", PAGES, ids=str)


def test_the_pages_and_examples_are_there():
    assert {"README.md", "CONTRIBUTING.md", "docs/how-it-works.md", "docs/reliability.md"} <= set(map(str, PAGES))
    assert len(EXAMPLES) >= 3


@every_page
def test_links_lead_somewhere(page):
    for link in page.links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name) if name else page.path
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors, link


@every_page
def test_files_named_in_code_marks_exist(page):
    named = [mark for mark in page.code_marks if re.fullmatch(rf"({FOLDERS})/[\w/.-]*", mark)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_modules_of_the_paths_of_a_run_exist():
    """`checkpoint.save` on the page is nsa/checkpoint/save.py."""
    tables = Page(ROOT / "docs" / "how-it-works.md").tables
    (paths,) = [table for table in tables if table[0] == ["path", "modules"]]
    named = re.findall(r"`(\w+\.[\w.]+)`", str(paths))
    places = [ROOT / "nsa" / name.removeprefix("nsa.").replace(".", "/") for name in named]
    assert len(places) > 30
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").exists()] == []


@every_page
def test_tables_are_whole(page):
    """A row that a blank line cuts off its table is shown as text with bars in it."""
    stray = [t.content for t in page.tokens if t.type == "inline" and t.content.startswith("|")]
    assert stray == []
    for table in page.tables:
        assert [row for row in table if len(row) != len(table[0])] == []


@every_page
def test_commands_exist_with_their_options(page):
    for words in page.commands:
        command = COMMANDS
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            name, *words = words
            assert name in command.commands, (name, words)
            command = command.commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.partition("=")[0].strip("[]") for word in words if word.strip("[]").startswith("--")}
        assert given <= known | {"--help"}, (command.name, words)


def test_every_command_is_shown_on_a_page():
    def leaves(command, *names):
        below = getattr(command, "commands", {})
        return [leaf for name in below for leaf in leaves(below[name], *names, name)] if below else [names]

    shown = [words for page in PAGES for words in page.commands]
    assert [names for names in leaves(COMMANDS) if not any(tuple(w[: len(names)]) == names for w in shown)] == []


@every_page
def test_commands_in_code_marks_exist(page):
    for mark in page.code_marks:
        if found := re.match(r"(?:\S*torchrun .* -m |\.venv/bin/)?nsa ([a-z]+)(?: ([a-z]+)(?= |$))?", mark):
            assert found[1] in COMMANDS.commands, mark
            below = getattr(COMMANDS.commands[found[1]], "commands", None)
            assert not below or not found[2] or found[2] in below, mark


@every_page
def test_configurations_and_overrides_of_commands_are_valid(page):
    for words in page.commands:
        files = [ROOT / word for word in words if word.startswith("configs/") and "*" not in word]
        takes_name = words[0] in ("train", "memory", "ready", "doctor")
        names = [word for word in words[1:2] if takes_name and word.islower() and not word.startswith("runs/")]
        assert files or set(names) <= set(shipped_names()), words
        joined = [words[place + 1] for place, word in enumerate(words) if word == "--override"]
        overrides = [word for word in [*words, *" ".join(joined).split()] if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
        for file in [*files, *names] or ["quickstart"]:
            load_config(file, overrides)


@pytest.mark.parametrize("page", [page for page in PAGES if page.blocks("python")], ids=str)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In the order of the page, in a folder with the run and the token shards that they read."""
    monkeypatch.chdir(tmp_path)
    if "shards" in "".join(page.blocks("python")):
        (tmp_path / "a.txt").write_text("some text " * 20)
        run_nsa(tmp_path, "data", "prepare", "shards", "data.source=text", "data.paths=[a.txt]", "--workers", "1")
    if "runs/quickstart" in "".join(page.blocks("python")):
        small = ["train.steps=1", "train.batch_size=2", "train.eval_sequences=1", "data.source=synthetic"]
        small += ["model.n_layers=1"]
        run_nsa(tmp_path, "train", str(ROOT / "configs" / "quickstart.yaml"), *small, "telemetry.tensorboard=false")
    if "quickstart-hf" in "".join(page.blocks("python")):
        pytest.importorskip("transformers")
        from nsa.hf.exporter import export_model
        from tests.hf.runs import make_run

        export_model(make_run(tmp_path / "run", "mean"), tmp_path / "quickstart-hf")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in page.blocks("python"):
        exec(compile(block, str(page), "exec"), names)


def run_nsa(folder, *arguments):
    [ended] = wait_all([warm.start("nsa", *arguments, env=environment(), cwd=folder)])
    assert ended.code == 0, ended.output


def test_the_step_line_of_the_readme_can_occur():
    (line,) = [mark for mark in README.code_marks if mark.startswith("step ")]
    found = re.fullmatch(
        r"step (\d{4}) \| loss \d+\.\d{4} \| lr (\d\.\d\de-\d\d) \| toks/s \d+ \| grad_norm \d+\.\d\d", line
    )
    assert found, line
    step, train = int(found[1]), load_config(ROOT / "configs" / "quickstart.yaml").train
    assert step == 1 or step % train.log_every == 0
    assert found[2] == f"{learning_rate(step - 1, train):.2e}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_as_they_are(example, tmp_path):
    [ended] = wait_all([warm.start(str(example), env=environment(), cwd=tmp_path)])
    assert ended.code == 0, ended.output
    assert ended.output.strip()
    assert list(tmp_path.iterdir()) == []
    if example.name == "first_steps.py":  # it has learned to count
        assert "writes 'three four five six seven eight'" in ended.output
    if example.name == "finetune.py":
        losses = re.findall(r"^(?:transformers.Trainer|PEFT|TRL): loss (\S+) -> (\S+)$", ended.output, re.MULTILINE)
        has_trl = "TRL: not installed" not in ended.output
        assert len(losses) == 2 + has_trl, ended.output
        assert all(float(last) < float(first) - 0.2 for first, last in losses)
        if not has_trl:
            pytest.skip("TRL is not installed; the rest of the example was run")
