"""The commands of README.md, run in the order of the page in a folder that looks like the checkout.

Sizes are reduced by overrides at the end of a command. Commands of nsa run in this process.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.checks.readiness import QUICK_ON_CPU
from nsa.cli.main import app
from tests.distributed.launching import environment
from tests.docs.pages import README, ROOT

SMALL = "train.steps=2 train.batch_size=2 train.eval_sequences=1 model.n_layers=1 telemetry.tensorboard=false"
REDUCED = {  # what is added to a command that would take long
    "train": ["--override", SMALL],
    "generate": ["--max-tokens", "3"],
    "memory": ["model.n_layers=2", "train.seq_len=256", "--card", "24gb"],
    "eval": ["--samples", "1", "--lengths", "256"],
}
# Lines that run elsewhere: packages in tests/packaging, examples in test_docs.py, checks below; the others are this
# suite, the linters, the site of test_site.py, and a benchmark for a GPU.
ELSEWHERE = r"pip |\.venv/bin/(python examples/|nsa (ready|doctor) )|make (test|lint|docs|bench)"
LIMIT_S = 300  # of a quick check on two CPU cores


def lines() -> Iterator[str]:
    """The command lines of the page. `make train` is what it would run."""
    for line in "".join(README.blocks("sh")).replace("\\\n", " ").splitlines():
        if line == "make train":
            recipe = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True)
            yield from re.findall(r"^\.venv/bin/nsa .*", recipe.stdout, re.MULTILINE)
        else:
            yield line


def words_of(line: str, folder: Path) -> list[str]:
    """The words of a line as a shell makes them."""
    words = shlex.split(line, comments=True)
    return [name for word in words for name in (sorted(map(str, folder.glob(word))) if "*" in word else [word])]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("README.md", "LICENSE", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_run_in_the_order_of_the_page(checkout, capsys):
    printed: dict[str, str] = {}
    for line in lines():
        words = words_of(line, checkout)
        if re.match(ELSEWHERE, line):
            continue
        if Path(words[0]).name != "nsa":
            subprocess.run(["bash", "-ec", line], check=True)
            continue
        given, target = (words[1:-2], words[-1]) if ">" in words else (words[1:], None)
        assert not app([*given, *REDUCED.get(given[0], [])], standalone_mode=False), line
        printed[" ".join(given)] = output = capsys.readouterr().out
        if target:
            Path(target).write_text(output, encoding="utf-8")
    assert len(printed) >= 20
    [after_make_train] = [text for command, text in printed.items() if "--beside-untrained" in command]
    assert "--- after training ---" in after_make_train
    assert "this run is done (2 steps)" in printed["train quickstart"], "the page trains it more than once"
    [checked] = [text for command, text in printed.items() if command.startswith("config check")]
    assert checked.count(": ok") == len(list((ROOT / "configs").iterdir()))
    for made in ("mine.yaml", "weights.safetensors", "runs/quickstart/report.html", "runs/comparison.html"):
        assert Path(made).stat().st_size > 500, made
    assert {path.name for path in Path("runs").glob("*/")} == {"quickstart", "small", "dense", "texts", "mine"}


def run_as_on_the_page(command: str, folder: Path, timeout_s: float) -> str:
    """What the page's only line with a command of nsa prints, in a process with all cores."""
    [line] = [line for line in lines() if f"/nsa {command} " in line]
    known = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "nsa", *words_of(line, folder)[1:]]
    done = subprocess.run(command, env=known, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_quick_check_of_the_page_ends_in_time_and_says_before_how_long_it_takes(checkout):
    began = time.monotonic()
    output = run_as_on_the_page("ready", checkout, 2 * LIMIT_S)
    spent_s = time.monotonic() - began
    assert f"about {QUICK_ON_CPU.total} steps in 6 runs" in output.splitlines()[0]
    minutes, seconds = re.search(r"at most (?:(\d+) min )?(?:(\d+) s )?to go", output).groups("0")
    assert spent_s < LIMIT_S
    assert spent_s < 60 * int(minutes) + int(seconds) + 60, "that line comes in the first minute"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_doctor_of_the_page_finds_nothing(checkout):
    assert "healthy: 4 trials" in run_as_on_the_page("doctor", checkout, 800)
