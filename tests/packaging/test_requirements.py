"""What is needed without the extras, and what a command says that needs more."""

import re
import subprocess
import sys
import tomllib
from email.message import Message
from importlib import import_module
from importlib.metadata import packages_distributions

import pytest

from nsa import __version__, installation
from nsa.cli.main import main
from nsa.installation import TRAIN_PACKAGES, how_to_install
from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LAYER_AND_OPERATORS = """
import torch
from nsa.nn import Decoder, NSAAttention
from nsa.ops import NSASpec, window_attention

spec = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, window=5)
x = torch.randn(1, 20, 32, requires_grad=True)
NSAAttention(dim=32, num_heads=4, num_kv_heads=2, head_dim_k=16, spec=spec)(x).sum().backward()
q, k = torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16)
print(x.grad.abs().sum() > 0, window_attention(q, k, k, spec).shape == q.shape, file=sys.stderr)
"""
FUNCTIONS = """
import nsa

for name in ("load_run", "generate_tokens"):
    try:
        getattr(nsa, name)
    except ModuleNotFoundError as error:
        print(error)
"""


def run_without(packages, program):
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({sorted(packages)}))\n"
    return subprocess.run([sys.executable, "-c", blocked + program], cwd=ROOT, capture_output=True, text=True)


def distributions(requirements):
    return {requirement.partition(">")[0].lower().replace("_", "-") for requirement in requirements}


def test_the_base_needs_torch_and_triton_alone():
    assert distributions(PROJECT["dependencies"]) == {"torch", "triton"}
    assert "nsa[hf,float8]" in PROJECT["optional-dependencies"]["dev"]
    assert "nsa[train]" in PROJECT["optional-dependencies"]["hf"]


def test_the_known_packages_match_the_extra():
    names = packages_distributions()
    known = {names[package][0].lower().replace("_", "-") for package in TRAIN_PACKAGES}
    assert known == distributions(PROJECT["optional-dependencies"]["train"])


def test_with_torch_alone_layer_and_operators_run_and_other_functions_name_the_extra_that_is_missing():
    done = run_without({*TRAIN_PACKAGES, "triton"}, LAYER_AND_OPERATORS + FUNCTIONS)
    assert done.stderr.splitlines()[-1] == "tensor(True) True", done.stderr
    told = r"the package '\w+' is not installed; nsa.{} needs it: " + re.escape(how_to_install("train")) + "\n"
    assert re.fullmatch(told.format("load_run") + told.format("generate_tokens"), done.stdout), done.stderr


def test_the_version_needs_no_extra():
    program = "import runpy; sys.argv = ['nsa', '--version']; runpy.run_module('nsa', run_name='__main__')"
    assert run_without({*TRAIN_PACKAGES, "torch"}, program).stdout == f"nsa {__version__}\n"


@pytest.mark.parametrize("package", ["typer", "pydantic", "yaml"])
def test_a_command_names_the_extra_that_is_missing(package):
    program = "import runpy; sys.argv = ['nsa', 'config', 'list']; runpy.run_module('nsa', run_name='__main__')"
    done = run_without({package}, program)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: the package '{package}' is not installed; the nsa command needs it: {how_to_install('train')}"
    ]


@pytest.mark.parametrize("script", ["train_showcase.py", "train_showcase_fsdp.py"])
def test_a_script_names_the_extra_that_is_missing(script):
    done = run_without({"typer"}, f"import runpy; runpy.run_path('scripts/{script}', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: the package 'typer' is not installed; the nsa command needs it: {how_to_install('train')}"
    ]


def test_without_an_address_a_message_warns_of_the_name_on_an_index(monkeypatch):
    monkeypatch.setattr(installation, "metadata", lambda _: Message())
    wheel = f"./nsa-{__version__}-py3-none-any.whl[hf]"
    assert how_to_install("hf") == (
        f"pip install '{wheel}' with the wheel of this version, or pip install '.[hf]' in its repository; a package "
        "named nsa on a public index is not this one"
    )


def test_a_message_names_the_repository_that_the_package_was_built_from(monkeypatch):
    built = Message()
    built["Project-URL"] = "Documentation, https://docs.invalid"
    built["Project-URL"] = "Repository, https://host.invalid/nsa"
    monkeypatch.setattr(installation, "metadata", lambda _: built)
    assert how_to_install("hf") == "pip install 'nsa[hf] @ git+https://host.invalid/nsa'"


def test_no_text_asks_for_the_name_on_an_index():
    pages = [ROOT / "README.md", *(path for name in ("nsa", "docs", "examples") for path in (ROOT / name).rglob("*"))]
    read = [path.read_text(encoding="utf-8") for path in pages if path.suffix in (".py", ".md", ".yaml")]
    assert len(read) > 150
    assert not [
        found for text in read for found in re.findall(r"pip install '?nsa\[\w+\](?! @)|pip install nsa$", text)
    ]


def failure(monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("nsa.cli.main._waiting_threads", set)  # threads of other tests may still wait
    with pytest.raises(SystemExit) as end:
        main(lambda: import_module(module))
    assert end.value.code == 1
    return capsys.readouterr().err


def test_a_package_that_is_missing_later_is_named_as_well(monkeypatch, capsys):
    assert how_to_install("train") in failure(monkeypatch, capsys, "pyarrow")
    assert "needs Linux" in failure(monkeypatch, capsys, "fcntl")


def test_other_missing_modules_are_bugs_and_show_where(monkeypatch, capsys):
    assert "Traceback" in failure(monkeypatch, capsys, "nsa.nowhere")
