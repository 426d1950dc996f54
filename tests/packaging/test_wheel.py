"""The wheel, installed in a new virtual environment and used from an empty folder, without a clone beside it."""

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile

import pytest

from nsa import __version__
from nsa.config import load_config
from tests.docs.pages import ROOT

SMALL = ["train.steps=2", "train.batch_size=2", "train.eval_every=0", "train.eval_sequences=1", "model.n_layers=1"]
COMMANDS = [
    ["train", "quickstart", *SMALL, "telemetry.tensorboard=false"],
    ["generate", "runs/quickstart", "--prompt", "def ", "--max-tokens", "3"],
    ["report", "runs/quickstart"],
]
IN_ONE_PROCESS = f"""
from nsa.cli.main import app

for command in {COMMANDS}:
    app(command, standalone_mode=False)
"""
TYPED = """
from nsa.nn import NSAAttention
from nsa.ops import NSASpec

reveal_type(NSASpec(window=64).window)
NSAAttention(dim=32, num_heads="four", num_kv_heads=2, head_dim_k=16)
"""


# The checkout may be on the path of this process.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, cwd=None):
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout, named `nsa` as a clone is: building writes into the folder."""
    source = tmp_path_factory.mktemp("projects") / "nsa"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("nsa", "configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The `bin` folder of an environment with the wheel; the packages that it needs are those of this environment."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    pip("--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()))
    return home / "bin"


def test_the_wheel_has_the_configurations_the_types_and_nothing_beside_the_package(wheel):
    with zipfile.ZipFile(wheel) as files:
        shipped = {name: files.read(name) for name in files.namelist() if name.startswith("nsa/configs/")}
        names = files.namelist()
    assert shipped == {f"nsa/configs/{path.name}": path.read_bytes() for path in (ROOT / "configs").iterdir()}
    assert "nsa/py.typed" in names
    assert f"{wheel.name}[train]" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name.partition("/")[0] for name in names} == {"nsa", f"nsa-{__version__}.dist-info"}


def test_an_editable_install_is_found_in_the_folder_that_holds_the_clone(source, tmp_path):
    packages = tmp_path / "packages"
    pip("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", packages, "--editable", source)
    program = f"import site; site.addsitedir({str(packages)!r}); import nsa; print(nsa.__file__)"
    found = run(sys._base_executable, "-c", program, cwd=source.parent)  # without the packages of this environment
    assert found.strip() == str(source / "nsa" / "__init__.py")


def test_configurations_are_found_by_name(programs, tmp_path):
    assert "site-packages" in run(programs / "python", "-c", "import nsa; print(nsa.__file__)", cwd=tmp_path)
    listed = run(programs / "nsa", "config", "list", cwd=tmp_path)
    names = sorted(line.split()[0] for line in listed.splitlines())
    assert names == sorted(path.stem for path in (ROOT / "configs").iterdir())
    (tmp_path / "mine.yaml").write_text(run(programs / "nsa", "config", "show", "m7c_125m", cwd=tmp_path))
    assert load_config(tmp_path / "mine.yaml") == load_config(ROOT / "configs" / "m7c_125m.yaml")


def test_training_generating_and_reporting_work_without_a_clone(programs, tmp_path):
    printed = run(programs / "python", "-c", IN_ONE_PROCESS, cwd=tmp_path)
    assert "step 0002" in printed
    assert "\ndef " in printed
    assert "quickstart" in (tmp_path / "runs" / "quickstart" / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_mypy_sees_the_types_of_the_wheel(programs, tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--python-executable", programs / "python", "typed.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.int", "int"), done.stdout
    assert 'has incompatible type "str"; expected "int"' in done.stdout
    assert "Found 1 error" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_everything_that_the_wheel_needs_is_installed_from_an_index(wheel, tmp_path):
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "typer"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"no package index is reachable: {answer.stderr.splitlines()[-1]}")
    home, here = tmp_path / "environment", tmp_path / "empty"
    here.mkdir()
    venv.create(home, symlinks=True)
    target = ["--python", home / "bin" / "python", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    pip(*target, wheel)
    refused = subprocess.run([home / "bin" / "nsa", "train", "quickstart"], cwd=here, capture_output=True, text=True)
    assert "whl[train]'" in refused.stderr
    assert "True" in run(home / "bin" / "python", "-c", "import nsa.nn; print(callable(nsa.nn.NSAAttention))", cwd=here)
    pip(*target, f"{wheel}[train]")
    for command in COMMANDS:
        assert run(home / "bin" / "nsa", *command, cwd=here)
    assert (here / "runs" / "quickstart" / "report.html").is_file()
