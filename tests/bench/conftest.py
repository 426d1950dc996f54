"""Prepared shards, and commands of the studies that run in this process."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import convert, learning
from nsa.cli.main import app
from nsa.config import load_config
from nsa.data.vocabulary import train_bpe
from nsa.train import train

TEXT = "def main():\n    return [x * 2 for x in range(10)]  # the end\n" * 4
TINY = """
    model.dim=16 model.n_layers=2 model.n_heads=2 model.n_kv_heads=1 model.head_dim_k=16 model.head_dim_v=16
    model.mlp_dim=32 nsa.cmp_block=4 nsa.cmp_stride=2 nsa.sel_block=4 nsa.num_selected=4 nsa.window=8
    msa.block=16 msa.num_selected=2 msa.index_dim=16
    data.validation_fraction=0.3 data.workers=0 runtime.device=cpu runtime.threads=1 runtime.precision=fp32
    runtime.compile=false checkpoint.background=false
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("work"), TEXT)


def make_shards(work, text):
    train_bpe([TEXT], work / "tokenizer.json", vocab_size=300, max_bytes=1 << 20)
    corpus = work / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"# {n}\n{text}"}) + "\n" for n in range(40)))
    source = ["data.source=text", f"data.paths=[{corpus}]", f"data.tokenizer={work / 'tokenizer.json'}"]
    ended = CliRunner().invoke(app, ["data", "prepare", str(work / "shards"), *source], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return work


@pytest.fixture
def called(monkeypatch):
    """Commands run in this process, and are noted; those that contain `called.fails` fail."""

    class Called(list):
        fails = "nothing"

    commands = Called()

    def run(arguments, log):
        commands.append(" ".join(arguments))
        if commands.fails in commands[-1]:
            return 1
        if arguments[0] == "train":
            config = load_config(arguments[1], arguments[2:])
            train(config, Path(config.train.out_dir))
            return 0
        return CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code

    for module in (convert, learning):
        monkeypatch.setattr(module, "run_logged", run)
    return commands
