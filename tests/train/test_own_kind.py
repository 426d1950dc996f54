"""A kind of attention that somebody registers trains, resumes, decodes and is reported like those of the package, with
no file of the package touched."""

import csv
import signal

import pytest
import torch

from nsa import kinds
from nsa.checks.artifacts import check_artifacts
from nsa.checks.memory_estimate import Planner
from nsa.config import load_config, parse_config
from nsa.errors import ConfigError
from nsa.nn import KVCache, attention
from nsa.nn.flops import flops_per_token
from nsa.nn.model import build_model
from nsa.train.trained import load_run
from tests.distributed.launching import TINY, numbers_of, run_ranks, start_ranks, wait_all, write_config
from tests.train.two_blocks import BLOCK, TwoBlocks

LAYERS = {"model": {"layer_pattern": ["two_blocks", "nsa"]}, "train": {"seq_len": 48}}
MODULE = "tests.train.two_blocks"


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(attention, "_REGISTRY", {**attention._REGISTRY})
    attention.register("two_blocks")(TwoBlocks)
    yield
    kinds.KINDS.remove("two_blocks")


def configured(**sections):
    return parse_config({name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}, "test")


def run(size, *arguments, faults=""):
    return wait_all(start_ranks(size, *arguments, faults=faults, module=MODULE))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process that nothing disturbed."""
    folder = tmp_path_factory.mktemp("two_blocks")
    file = write_config(folder, **LAYERS)
    (ended,) = run(1, "train", file, f"train.out_dir={folder / 'run'}")
    assert ended.code == 0, ended.output
    assert "1 two_blocks + 1 nsa attention" in ended.output
    return file, folder / "run"


def test_an_unregistered_name_is_refused():
    with pytest.raises(ConfigError, match=r"layer_pattern.*must be one of nsa, msa, dense, window.*'two_blocks'"):
        configured(**LAYERS)


def test_a_killed_run_ends_with_the_weights_and_rows_of_an_undisturbed_one(whole, tmp_path):
    file, undisturbed = whole
    (killed,) = run(1, "train", file, f"train.out_dir={tmp_path}", faults="step.begin:kill:hit=6")
    assert killed.code == -signal.SIGKILL, killed.output
    (ended,) = run(1, "train", file, f"train.out_dir={tmp_path}")
    assert ended.code == 0, ended.output
    assert "resume" in ended.output
    assert numbers_of(tmp_path) == numbers_of(undisturbed)
    assert (tmp_path / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_it_trains_on_two_ranks_of_fsdp_and_is_refused_where_ranks_share_sequences(whole, tmp_path):
    file, undisturbed = whole
    ended = run(2, "train", file, "parallel.strategy=fsdp", f"train.out_dir={tmp_path / 'fsdp'}")
    assert [one.code for one in ended] == [0, 0], ended[0].output
    sharded, single = ([float(row["loss"]) for row in numbers_of(run)] for run in (tmp_path / "fsdp", undisturbed))
    assert sharded == pytest.approx(single, rel=1e-5)
    ended = run(2, "train", file, "parallel.context=2", f"train.out_dir={tmp_path / 'context'}")
    assert [one.code for one in ended] == [2, 2], ended[0].output
    assert "blocks.0.attention is a TwoBlocks, which cannot divide a sequence among ranks" in ended[0].output


def test_statistics_of_the_layer_are_recorded_and_the_report_shows_them(whole):
    _, folder = whole
    with (folder / "k_stats_layers.csv").open() as file:
        assert {row["layer"] for row in csv.DictReader(file)} == {"blocks.0.attention", "blocks.1.attention"}
    (ended,) = run_ranks(1, "report", str(folder))
    assert ended.code == 0, ended.output
    assert "blocks.0.attention" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("registered")
def test_nsa_ready_expects_the_statistics_of_the_layer(whole, tmp_path):
    assert [a for a in check_artifacts(whole[1], load_config(whole[1] / "config.yaml"), 1) if not a.ok] == []
    alone = configured(model={"layer_pattern": ["two_blocks"]})
    expected = {artifact.name for artifact in check_artifacts(tmp_path, alone, 1)}
    assert "k_stats.csv" in expected
    assert "gate_stats.csv" not in expected


@pytest.mark.usefixtures("registered")
def test_it_decodes_with_a_cache_as_without_one(whole):
    model = load_run(whole[1]).model
    tokens = torch.randint(0, 256, (2, 8 * BLOCK + 5))
    with torch.no_grad():
        wanted = model(tokens)
        cache = KVCache(model, sequences=2, max_length=200)
        sizes = [BLOCK + 3, 1, 1, 2 * BLOCK, 5 * BLOCK]
        parts = [model(part, cache=cache) for part in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("registered")
def test_it_has_operations_and_a_memory_estimate():
    config = configured(**LAYERS)
    sparse, dense = (
        build_model(configured(**{**LAYERS, "model": {"layer_pattern": [kind]}}), 256, 0)
        for kind in ("two_blocks", "dense")
    )
    assert flops_per_token(sparse, 4096).sparse < flops_per_token(sparse, 4096).dense_equivalent
    assert flops_per_token(sparse, 4096).dense_equivalent == flops_per_token(dense, 4096).sparse
    planner = Planner(config, 1)
    assert planner.estimate().planned_gib > 0
    assert planner.estimate_cache(1000).parts["two"] > 0
