"""The files around the package: they name the same versions, and their commands exist."""

import re

import pytest
import yaml

from nsa import __version__
from tests.docs.pages import ROOT


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_pre_commit_and_make_lint_use_the_same_ruff():
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    installed = re.search(r"^ruff==.*$", read("constraints.txt"), re.MULTILINE)[0]
    assert [hook["additional_dependencies"] for hook in hooks] == [[installed]] * 2


def test_every_file_names_this_version():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    assert re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[1] == __version__
    assert set(re.findall(r"nsa-([0-9.]+)-py3", read("README.md"))) == {__version__}


@pytest.mark.parametrize(
    ("workflow", "targets"), [("test", ["lint", "test"]), ("versions", ["test-lowest", "test-newest"])]
)
def test_workflows_run_targets_of_the_makefile(workflow, targets):
    jobs = yaml.safe_load(read(f".github/workflows/{workflow}.yml"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    matrix = [target for job in jobs for target in job.get("strategy", {}).get("matrix", {}).get("target", [])]
    assert commands == (["make ${{ matrix.target }}"] if matrix else [f"make {target}" for target in targets])
    assert matrix in ([], targets)
    assert set(targets) <= set(re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)[1].split())
