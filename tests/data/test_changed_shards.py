"""Prepared shards that change: before a run, and while it reads them. No wrong token reaches training in silence."""

import errno
import json
import os
import time

import pytest
import torch

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.prepare import prepare
from nsa.data.sources.text import TextSource
from nsa.data.token_shards import verify
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import DataError
from nsa.parallel.world import World, read_launch
from tests.distributed.launching import metrics_of, rows_of, start_ranks, wait_all, write_config

TOKENIZER = ByteTokenizer()


@pytest.fixture
def shards(tmp_path):
    """A folder of several, and how a run reads them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for file in range(4):
        lines = [json.dumps({"text": f"file {file} line {n} " + "word " * (n % 17)}) for n in range(100)]
        (texts / f"{file}.jsonl").write_text("\n".join(lines))
    prepare(TextSource([str(texts)]), TOKENIZER, tmp_path / "shards", workers=1, shard_bytes=4_000)
    return tmp_path / "shards"


def open_data(shards, **more):
    data = DataConfig(source="prepared", paths=[str(shards)])
    return build_data(data, TrainConfig(seq_len=64, batch_size=4), TOKENIZER, **more)


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def zero(path):
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


@pytest.mark.parametrize(("change", "message"), [(shorten, "bytes, the manifest says"), (zero, "its SHA-256 is")])
def test_a_shard_that_changes_while_it_is_read_is_an_error_that_names_it(shards, change, message):
    loader = open_data(shards).train
    path = sorted(shards.glob("*.tokens"))[1]
    expected = loader.batch(0, 400)
    change(path)
    with pytest.raises(DataError, match=f"{path.name}.*{message}"):
        loader.batch(0, 400)
    assert expected.inputs.max() < TOKENIZER.vocab_size


def test_a_shard_that_the_disk_does_not_return_is_an_error_that_names_it(shards, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", fail)
    expected = r"shard-00000\.tokens: cannot be read: Input/output error; prepare the data again with --fresh"
    for attempt in (lambda: open_data(shards), lambda: verify(shards)):
        with pytest.raises(DataError, match=expected):
            attempt()


def test_a_shard_that_was_only_touched_is_checked_again_and_read_on(shards):
    loader = open_data(shards).train
    expected = loader.batch(0, 400)
    for path in shards.glob("*.tokens"):
        path.write_bytes(path.read_bytes())
    assert loader.batch(0, 400).inputs.equal(expected.inputs)


def test_a_file_system_that_returns_less_than_it_is_asked_for_gives_the_same_batches(shards, monkeypatch):
    loader, read = open_data(shards).train, os.preadv
    expected = loader.batch(0, 20)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset))
    assert loader.batch(0, 20).inputs.equal(expected.inputs)


def test_damage_is_found_before_the_first_batch_by_the_rank_that_checks_the_shard(shards):
    paths = sorted(shards.glob("*.tokens"))
    zero(paths[1])
    with pytest.raises(DataError, match=paths[1].name):
        open_data(shards)
    with pytest.raises(DataError, match=paths[1].name):
        open_data(shards, checked=share(1))
    open_data(shards, checked=share(0))


def share(local_rank, nodes=3):
    """Of a rank of the last of several nodes with two ranks each."""
    rank = 2 * (nodes - 1) + local_rank
    variables = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2 * nodes, "LOCAL_WORLD_SIZE": 2}
    launch = read_launch({name: str(value) for name, value in variables.items()})
    return World(torch.device("cpu"), local_rank=launch.local_rank, local_size=launch.local_size).node_share


def test_a_rank_checks_all_shards_where_its_launcher_does_not_say_how_many_share_the_node():
    assert World(torch.device("cpu"), rank=1, local_rank=1, size=2).node_share == slice(None)


def test_an_id_beyond_the_vocabulary_is_an_error_that_names_the_shard(shards):
    """The manifest fits: somebody prepared it so."""
    few = ByteTokenizer()
    few.vocab_size = ord("w")
    train = TrainConfig(seq_len=64, batch_size=4)
    loader = build_data(DataConfig(source="prepared", paths=[str(shards)]), train, few).train
    with pytest.raises(DataError, match=r"shard-\d+\.tokens: contains token \d+, the vocabulary has 119"):
        loader.batch(0, 400)


def test_a_run_whose_shard_changes_ends_with_code_3_and_its_name(tmp_path, shards):
    data = {"source": "prepared", "paths": [str(shards)]}
    config = write_config(tmp_path, data=data, train={"steps": 100_000, "eval_every": 0})
    processes = start_ranks(1, "train", config, f"train.out_dir={tmp_path / 'run'}")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "training.csv").exists() or len(rows_of(tmp_path / "run")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    path = sorted(shards.glob("*.tokens"))[2]
    zero(path)
    [ended] = wait_all(processes)
    assert ended.code == 3, ended.output
    assert path.name in ended.output.splitlines()[-1]
    assert metrics_of(tmp_path / "run")["exit_code"] == 3
