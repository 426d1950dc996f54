"""Real processes, killed at random moments: what they read, put together, is the stream that nobody interrupted."""

import json
import multiprocessing
import random
import signal
import time

import pytest

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.prepare import prepare
from nsa.data.sources.text import TextSource
from nsa.data.tokenizers import ByteTokenizer
from tests.data.corpora import write_texts
from tests.data.killed import digests, read_steps
from tests.data.mirror import write_mirror

STEPS, BATCH, SEQ_LEN = 240, 12, 48
TRAIN = {"steps": STEPS, "batch_size": BATCH, "seq_len": SEQ_LEN, "seed": 3}


@pytest.fixture(scope="module")
def context():
    # Forked from a process that has everything imported and no thread: a start costs milliseconds.
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.data.killed"])
    return made


def uninterrupted(data):
    loader = build_data(DataConfig.model_validate(data), TrainConfig.model_validate(TRAIN), ByteTokenizer()).train
    return [
        digest for step in range(STEPS) for digest in digests(loader, loader.batch(step * BATCH, BATCH).inputs, BATCH)
    ]


def finished_steps(log):
    """Digests by step of one rank's log; a line that the kill cut short does not count."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return {int(line.split()[0]): line.split()[1:] for line in lines if line.endswith("\n")}


def read_with_kills(context, data, folder, kills, draw):
    """Starts, kills, resumes at the last step that all ranks had finished; as a run does at its checkpoint."""
    found, cursor, killed, starts = {}, 0, 0, 0
    while cursor < STEPS or killed < kills:
        if cursor == STEPS:  # through before the last kill: once more from the start
            found, cursor = {}, 0
        size, workers = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4])
        logs = [folder / f"{starts}-{rank}.log" for rank in range(size)]
        index = folder / "run"
        index.mkdir(exist_ok=True)
        ranks = [
            context.Process(
                target=read_steps,
                args=({**data, "workers": workers}, TRAIN, rank, size, cursor, logs[rank], index, 0.002),
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        if killed < kills:
            wanted = cursor + draw.randrange(0, (STEPS - cursor) // (kills - killed + 1) + 2)
            _wait(ranks, logs, wanted, draw)
            alive = [process for process in ranks if process.is_alive()]
            for process in alive:
                process.kill()
            killed += bool(alive)
        for process in ranks:
            process.join(120)
            assert process.exitcode in (0, -signal.SIGKILL)
        done = [finished_steps(log) for log in logs]
        common = cursor
        while all(common in steps for steps in done):
            for rank, steps in enumerate(done):
                for place, digest in enumerate(steps[common]):
                    number = common * BATCH + rank + place * size
                    assert number not in found, "read twice"
                    found[number] = digest
            common += 1
        cursor, starts = common, starts + 1
    return [found[number] for number in range(STEPS * BATCH)]


def _wait(ranks, logs, wanted, draw):
    """Until a rank has finished a step number, or has had the time to; then a moment more."""
    deadline = time.monotonic() + 60
    rank = draw.randrange(len(logs))
    while time.monotonic() < deadline and ranks[rank].is_alive():
        if wanted in finished_steps(logs[rank]) or any(step >= wanted for step in finished_steps(logs[rank])):
            break
        time.sleep(0.002)
    time.sleep(draw.random() * 0.01)


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.long)])
def test_a_streamed_mirror_is_read_once_over_many_kills(context, tmp_path, kills):
    write_mirror(tmp_path / "mirror", files=3, row_groups=8, rows=30)
    data = {"source": "fineweb_edu", "paths": [str(tmp_path / "mirror")], "validation_fraction": 0.05}
    assert read_with_kills(context, data, tmp_path, kills, random.Random(0)) == uninterrupted(data)


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("megatron", "datatrove")]


@pytest.mark.parametrize("kind", ["text", "prepared", "mixture", *LONG])
def test_other_sources_are_read_once_over_kills(context, tmp_path, kind):
    texts = tmp_path / "a.jsonl"
    documents = [f"{n} " * (20 + n % 30) for n in range(600)]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    data = {"source": "text", "paths": [str(texts)], "validation_fraction": 0.05}
    if kind == "prepared":
        prepare(TextSource([str(texts)]), ByteTokenizer(), tmp_path / "shards", workers=1, shard_bytes=5000)
        data |= {"source": "prepared", "paths": [str(tmp_path / "shards")]}
    if kind in ("megatron", "datatrove"):
        data |= write_texts(kind, tmp_path / "corpus", documents)
    if kind == "mixture":
        write_mirror(tmp_path / "mirror", files=2, row_groups=6, rows=30)
        streamed = {"source": "fineweb_edu", "paths": [str(tmp_path / "mirror")], "weight": 2.0}
        parts = [{"source": "text", "paths": [str(texts)], "weight": 1.0}, streamed]
        data = {"mixture": parts, "validation_fraction": 0.05}
    assert read_with_kills(context, data, tmp_path, 6, random.Random(1)) == uninterrupted(data)
