"""Tables and diagrams of the documentation agree with the code."""

import inspect
import re
import tomllib

import pytest

from nsa import errors, run_folder
from nsa.errors import NSAError
from tests.distributed.launching import run_ranks, write_config
from tests.docs.pages import ROOT, Page, table_with

DIAGRAM = re.compile(r"```\n(errors\n.*?)```", re.DOTALL)


def test_the_exit_codes_are_those_of_the_errors():
    table = table_with(Page(ROOT / "docs/reliability.md"), "code", "error", "what happened", "what to do")
    listed = {name: int(code) for code, names, *_ in table for name in re.findall(r"`(\w+)`", names)}
    raised = {
        name: error.exit_code
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, NSAError) and error is not NSAError
    }
    assert listed == raised
    codes = [int(row[0]) for row in table]
    assert codes == sorted({0, 1, *raised.values()})


def test_exit_codes_have_one_table():
    """Other pages link to it."""
    with_codes = [
        str(page.relative_to(ROOT))
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for table in Page(page).tables
        if {"6", "75"} <= {row[0] for row in table} or {"6", "75, 130"} <= {row[0] for row in table}
    ]
    assert with_codes == ["docs/reliability.md"]


@pytest.fixture(scope="module")
def artifacts():
    """Whether a name is in the table of artifacts."""
    table = table_with(Page(ROOT / "docs/telemetry.md"), "file", "what", "when", "rank")
    listed = [name for row in table for name in re.findall(r"`([^`]+)`", row[0])]
    patterns = [re.sub(r"\\{\w+\\}|\\\*", r"[\\w.]+", re.escape(name)) for name in listed]
    return lambda name: any(re.fullmatch(pattern, name) for pattern in patterns)


def test_every_name_of_the_contract_is_in_the_table_of_artifacts(artifacts):
    constants = vars(run_folder)
    names = [value for name, value in constants.items() if name.endswith("_FILE") and value != run_folder.REPORT_FILE]
    names += [value.name(0) for value in constants.values() if isinstance(value, run_folder.RankFiles)]
    names += [value.file for value in constants.values() if isinstance(value, run_folder.Table)]
    names += [
        f"{run_folder.CHECKPOINTS_FOLDER}/",
        f"{run_folder.TENSORBOARD_FOLDER}/",
        run_folder.stack_dumps("1").name(0),
    ]
    assert len(names) > 20
    assert [name for name in names if not artifacts(name)] == []


def test_every_file_of_a_run_is_in_the_table_of_artifacts(artifacts, tmp_path):
    config = write_config(tmp_path, telemetry={"tensorboard": False, "trace_grads": True})
    [ended] = run_ranks(1, "train", config, f"train.out_dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.output
    written = [path.name + "/" * path.is_dir() for path in (tmp_path / "run").iterdir()]
    assert {"training.csv", "heartbeat_rank0.jsonl", "checkpoints/"} <= set(written)
    assert [name for name in written if not artifacts(name)] == []


def test_the_grep_of_the_page_finds_why_a_run_ended(tmp_path):
    """In what the run printed and in its run.log, which name the end in different words."""
    page = (ROOT / "docs/many-gpus.md").read_text(encoding="utf-8")
    pattern = re.search(r"^grep -E '(.+)' LOG", page, re.MULTILINE)[1]
    config = write_config(tmp_path, train={"out_dir": str(tmp_path / "run")})
    [ended] = run_ranks(1, "train", config, faults="step.loss:nan:hit=2")
    assert ended.code == errors.NumericsError.exit_code, ended.output
    for text in (ended.output, (tmp_path / "run" / "run.log").read_text(encoding="utf-8")):
        assert re.search(pattern, text.splitlines()[-1]), text
    assert re.search(pattern, "hang: rank 0: no progress for 6 s"), "as the watchdog prints it"


def test_the_import_diagram_names_every_package_in_the_order_that_is_checked():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = [set(line.split()) for line in DIAGRAM.search(text)[1].splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    checked = [{name.removeprefix("nsa.") for name in layer.split(" | ")} for layer in reversed(layers)]
    assert shown == checked
    rooms = {path.stem for path in (ROOT / "nsa").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    modules = {path.stem for path in (ROOT / "nsa").glob("*.py") if not path.stem.startswith("__")}
    assert set().union(*shown) == rooms | modules
