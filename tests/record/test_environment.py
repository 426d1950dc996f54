"""Which code a run was made with."""

import subprocess

import pytest

from nsa.record import environment


def git(folder, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of one commit in which the package seems to lie."""
    module = tmp_path / "nsa" / "telemetry" / "environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "v1")
    monkeypatch.setattr(environment, "__file__", str(module))
    return tmp_path


def test_the_commit_is_recorded_whole(checkout):
    assert environment.describe_environment({}, 1, "single")["commit"] == git(checkout, "rev-parse", "HEAD")


def test_modified_files_make_the_commit_dirty(checkout):
    (checkout / "nsa" / "telemetry" / "environment.py").write_text("second\n")
    assert environment.describe_environment({}, 1, "single")["commit"] == git(checkout, "rev-parse", "HEAD") + "-dirty"


def test_results_and_pages_do_not_make_a_commit_dirty(checkout):
    """Benchmarks write them, one command after the other, without a commit in between."""
    for name in ("bench/results/a.json", "docs/a.md"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("first\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "second")
    for name in ("bench/results/a.json", "docs/a.md"):
        (checkout / name).write_text("second\n")
    assert environment.commit() == git(checkout, "rev-parse", "HEAD")
    (checkout / "nsa" / "telemetry" / "environment.py").write_text("second\n")
    git(checkout, "add", ".")
    assert environment.commit() == git(checkout, "rev-parse", "HEAD") + "-dirty"


def test_a_package_that_is_installed_inside_another_repository_has_no_commit(checkout, monkeypatch):
    """As in a virtual environment inside the checkout of another project."""
    installed = checkout / "venv" / "lib" / "nsa" / "record" / "environment.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("first\n")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment.commit() is None


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert environment.describe_environment({}, 1, "single")["commit"] is None
