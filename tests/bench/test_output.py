"""What the benchmarks write names the code that was measured."""

import json
from importlib import import_module

import pytest
import torch

from bench.output import Results
from nsa.record import environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"
COMMANDS = {
    **dict.fromkeys(("attention", "data", "decode", "generate", "telemetry", "train", "tune"), "--out"),
    "long": "--device=cpu --out",
    "learning": "run --results",
    "convert": "run --results",
}


@pytest.fixture
def _dirty(monkeypatch):
    monkeypatch.setattr(environment, "commit", lambda: f"{COMMIT}-dirty")


@pytest.mark.usefixtures("_dirty")
@pytest.mark.parametrize("name", COMMANDS)
def test_code_with_uncommitted_changes_is_refused_before_it_is_measured(name, tmp_path, monkeypatch):
    benchmark = import_module(f"bench.{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a measurement would fail
    monkeypatch.setattr("sys.argv", [name, *COMMANDS[name].split(), str(tmp_path / "new" / "results")])
    with pytest.raises(SystemExit, match=r"new/results: not written.* uncommitted changes .*--allow-dirty"):
        benchmark.main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_dirty")
def test_results_of_uncommitted_code_are_marked(tmp_path):
    Results(tmp_path / "new" / "a.json", allow_dirty=True).write(results=[1])
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (found["machine"]["commit"], found["results"]) == (f"{COMMIT}-dirty", [1])
    assert found["machine"]["torch"] == torch.__version__


def test_rows_of_several_commands_have_their_commits(tmp_path, monkeypatch):
    for commit in ("first", "second", None):
        monkeypatch.setattr(environment, "commit", lambda commit=commit: commit)
        Results(tmp_path / "a.jsonl", allow_dirty=False).append({"row": "dense"})
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert rows == [{"row": "dense", "commit": commit} for commit in ("first", "second", "unknown")]
