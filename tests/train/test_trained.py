"""`nsa.load_run` and `nsa generate`: what a run trained can be used wherever its folder lies."""

import html
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import nsa
from nsa.checkpoint.export import find_weights, read_weights
from nsa.cli.main import app
from nsa.data.vocabulary import train_bpe
from nsa.errors import BackendError, CheckpointError, ConfigError, DataError, LaunchError, printable
from nsa.inspect.reading import read_run
from nsa.inspect.run_report import render
from nsa.train import train
from tests.checkpoint.helpers import checkpoint_of, flip_byte, small, train_until

TEXT = "the window reads the newest tokens, the compressed branch the whole past\n" * 30


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with a tokenizer of its own, named relative to a folder, that is gone afterwards. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("own")
    train_bpe([TEXT], folder / "mine.json", vocab_size=280, max_bytes=1 << 20)
    for name in "ab":
        (folder / f"{name}.txt").write_text(TEXT + name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data = ("data.source=text", "data.paths=[a.txt, b.txt]", "data.tokenizer=mine.json", "data.workers=0")
        train(small(*data, "data.validation_fraction=0.5"), folder / "run")
    (folder / "mine.json").unlink()
    return folder / "run"


@pytest.fixture
def run(original, tmp_path, monkeypatch):
    """A copy of it, seen from another folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(original, tmp_path / "moved")


def generate(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments), "--max-tokens", "8"], catch_exceptions=False)


def same_weights(model, weights):
    own = dict(model.named_parameters())
    return own.keys() == weights.keys() and all(torch.equal(own[name].detach(), weights[name]) for name in own)


def test_a_run_loads_with_model_tokenizer_and_configuration(run):
    loaded = nsa.load_run(str(run))
    assert loaded.weights == run / "model.safetensors"
    assert same_weights(loaded.model, read_weights(checkpoint_of(run, 6)))
    assert not loaded.model.training
    assert loaded.config.model.dim == 16
    assert loaded.config.data.tokenizer == "mine.json"
    assert loaded.tokenizer.vocab_size == loaded.model.vocab_size == 280
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the past").tolist()) == "the past"


@pytest.mark.parametrize(("name", "step"), [("latest", 6), ("best", None), ("step_00000004", 4)])
def test_a_checkpoint_is_loaded_by_its_name(name, step, run):
    best = int((run / "checkpoints" / "best").read_text().removeprefix("step_"))
    wanted = checkpoint_of(run, step or best)
    loaded = nsa.load_run(run, checkpoint=name)
    assert loaded.weights == wanted
    assert same_weights(loaded.model, read_weights(wanted))
    for path in (wanted, run / "checkpoints" / name):  # latest and best are files that hold the name of another
        by_path = nsa.load_run(path)
        assert by_path.weights == wanted
        assert same_weights(by_path.model, read_weights(wanted))
        assert by_path.config == loaded.config
        assert by_path.tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_the_tokenizer_of_a_run_is_found_from_the_folder_of_its_checkpoints(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    assert nsa.load_run("latest").tokenizer.vocab_size == 280


def test_a_missing_checkpoint_is_named_with_the_existing_ones(run):
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step_1'; it has step_00000006, step_00000004"):
        nsa.load_run(run, checkpoint="step_1")
    with pytest.raises(CheckpointError, match="no checkpoint 'best'; it has none"):
        nsa.load_run(run / "checkpoints", checkpoint="best")


def test_an_unfinished_run_loads_from_its_newest_sound_checkpoint(tmp_path):
    train_until(5, tmp_path / "run")
    assert nsa.load_run(tmp_path / "run").weights == checkpoint_of(tmp_path / "run", 4)
    flip_byte(checkpoint_of(tmp_path / "run", 4) / "state.json", 0.5)
    with pytest.warns(UserWarning, match="step_00000004/state.json: .*; using step_00000003 instead"):
        assert nsa.load_run(tmp_path / "run").weights == checkpoint_of(tmp_path / "run", 3)


def test_a_weights_file_alone_rebuilds_the_model(run, tmp_path):
    file = (run / "model.safetensors").rename(tmp_path / "alone.safetensors")
    with safe_open(file, "pt") as opened:
        carried = json.loads(opened.metadata()["nsa"])
    assert (carried["step"], carried["config"]["data"]["tokenizer"]) == (6, "mine.json")
    with pytest.raises(DataError, match=r"data\.tokenizer: there is no file mine\.json"):
        nsa.load_run(file)
    loaded = nsa.load_run(file, overrides=[f"data.tokenizer={run}"])
    assert same_weights(loaded.model, read_weights(find_weights(run)))
    assert loaded.config.nsa == nsa.load_run(run).config.nsa


def test_weights_of_another_program_are_refused(run, tmp_path):
    (tmp_path / "other.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: carries no configuration; .* `nsa import`"):
        nsa.load_run(tmp_path / "other.safetensors")


def test_the_command_generates_from_any_folder_after_the_tokenizer_is_gone(run):
    texts = [generate(source, "--prompt", "the ").stdout for source in (run, checkpoint_of(run, 6))]
    assert texts[0] == texts[1]
    assert texts[0].startswith("the ")


@pytest.fixture
def trained_on_a_gpu(run, monkeypatch):
    """The run, as if it had been trained on a GPU, on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(saved.replace("device: cpu", "device: cuda").replace("sel: auto", "sel: triton"))
    return run


def test_a_run_of_a_gpu_generates_on_a_cpu_and_says_so(trained_on_a_gpu):
    with pytest.warns(UserWarning, match=r"runtime\.device: .* PyTorch finds none here; using the CPU"):
        loaded = nsa.load_run(trained_on_a_gpu)
    assert loaded.model.head.weight.device.type == loaded.config.runtime.device == "cpu"
    with pytest.warns(UserWarning, match="using the CPU"):
        assert generate(trained_on_a_gpu, "--prompt", "the ").output.startswith("the ")


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_override_is_obeyed_by_generate(trained_on_a_gpu):
    asked = generate(trained_on_a_gpu, "runtime.device=cpu", "--prompt", "the ")
    assert (asked.exit_code, asked.output[:4]) == (0, "the ")
    for wanted in (["runtime.device=cuda"], ["--override", "runtime.device=cuda"]):
        with pytest.raises(LaunchError, match="'cuda' is configured and PyTorch finds no GPU"):
            generate(trained_on_a_gpu, *wanted)
    with pytest.raises(BackendError, match="sel"):
        generate(trained_on_a_gpu, "runtime.device=cpu", "runtime.kernels.sel=triton")
    with pytest.raises(ConfigError, match=r"did you mean 'runtime\.device'"):
        generate(trained_on_a_gpu, "runtime.devise=cpu")


def test_importing_the_package_imports_no_torch():
    code = "import nsa, sys; sys.exit(bool({'torch', 'yaml', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_generated_text_is_kept_in_the_run_folder_for_the_report(run, tmp_path):
    first = generate(run, "--prompt", "the ", "--beside-untrained")
    generate(checkpoint_of(run, 4), "--seed", "3")
    one, two = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert first.stdout.endswith(f"--- after training ---\nthe {printable(one['text'])}\n\n")
    assert (one["weights"], one["prompt"]) == ("model.safetensors", "the ")
    assert one["settings"] == {"max_tokens": 8, "temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 0}
    assert (two["weights"], two["prompt"], two["settings"]["seed"]) == ("checkpoints/step_00000004", "", 3)
    page = render(read_run(run))
    assert f"<b>the </b>{html.escape(printable(one['text']))}</pre>" in page
    assert page.index("step_00000004 · max_tokens 8") < page.index("model.safetensors · max_tokens 8"), "newest first"


def test_weights_outside_of_a_run_and_a_folder_that_cannot_be_written_do_not_stop_generation(run, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(run / "model.safetensors", alone)
    shutil.copy(run / "tokenizer.json", alone / "mine.json")
    assert generate(alone / "model.safetensors", f"data.tokenizer={alone / 'mine.json'}").exit_code == 0
    assert sorted(path.name for path in alone.iterdir()) == ["mine.json", "model.safetensors"]
    (run / "samples.jsonl").mkdir()
    with pytest.warns(UserWarning, match=r"samples\.jsonl: the text is not recorded: Is a directory"):
        assert generate(run).exit_code == 0


def test_a_run_is_loaded_where_it_is_wanted(tmp_path):
    train(small("train.steps=1"), tmp_path)
    assert nsa.load_run(tmp_path, device="meta").model.head.weight.device.type == "meta"
