"""What a run does about its data: the same batch again gives the same loss, changed data is refused, a source that
does not answer is reported."""

import csv
import json
import re

import pytest

import nsa.train.loop
from nsa.checkpoint.format import BEST, FOLDER, committed, read_pointer
from nsa.config import parse_config
from nsa.data import build
from nsa.data.loader import Loader
from nsa.data.prepare import prepare
from nsa.data.sources.text import TextSource
from nsa.data.threads import Progress
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import DataError, DataUnavailableError
from nsa.train import train
from nsa.train.state import build_state
from nsa.train.step import train_step
from tests.checkpoint.helpers import faults_armed, rows_of
from tests.data.corpora import write_texts as write_corpus
from tests.data.mirror import write_mirror

TINY = [
    "model.dim=32",
    "model.n_layers=1",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "model.head_dim_k=16",
    "model.head_dim_v=16",
    "nsa.cmp_block=8",
    "nsa.cmp_stride=4",
    "nsa.sel_block=8",
    "nsa.num_selected=4",
    "nsa.window=16",
    "train.seq_len=32",
    "train.batch_size=4",
    "train.steps=4",
    "train.eval_sequences=4",
    "telemetry.tensorboard=false",
    "runtime.device=cpu",
    "data.validation_fraction=0.2",
]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_texts(folder / "a.jsonl", 60)
    return folder


def write_texts(path, count):
    path.write_text("".join(json.dumps({"text": f"{n} is a number " * 6}) + "\n" for n in range(count)))


def config_of(folder, *more):
    return parse_config({}, "test", [*TINY, "data.source=text", f"data.paths=[{folder}]", *more])


def metrics_of(out):
    return json.loads((out / "metrics.json").read_text())


def events_of(out):
    return [json.loads(line) for line in (out / "heartbeat_rank0.jsonl").read_text().splitlines()]


def losses_of(out):
    return [line.split(",")[2] for line in (out / "training.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_threads_and_batches_ahead_change_no_loss(texts, tmp_path, workers):
    train(config_of(texts, "data.workers=2"), tmp_path / "a")
    train(config_of(texts, f"data.workers={workers}", "data.prefetch=1"), tmp_path / "b")
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")


def test_the_time_to_the_first_batch_and_the_sources_are_recorded(texts, tmp_path, capsys):
    train(config_of(texts), tmp_path / "run")
    data = metrics_of(tmp_path / "run")["data"]
    assert data["source"] == "text"
    assert data["fallback"] is None
    assert data["sequences"] == {"text": 16}
    assert 0 < data["first_batch_s"] < 60
    (event,) = [e for e in events_of(tmp_path / "run") if e["event"] == "first_batch"]
    assert event["seconds"] == data["first_batch_s"]
    assert "first   batch after" in capsys.readouterr().out


def read_from(source, texts, tmp_path):
    """The data section for a source."""
    if source == "text":
        return {"source": "text", "paths": [str(texts)]}
    if source in ("fineweb_edu", "hub"):
        write_mirror(tmp_path / "mirror", files=2, row_groups=3, rows=20)
        return {"source": source, "paths": [str(tmp_path / "mirror")]}
    if source == "prepared":
        prepare(TextSource([str(texts)]), ByteTokenizer(), tmp_path / "shards", workers=1)
        return {"source": "prepared", "paths": [str(tmp_path / "shards")]}
    if source in ("megatron", "datatrove"):
        lines = [json.loads(line)["text"] for line in (texts / "a.jsonl").read_text().splitlines()]
        return write_corpus(source, tmp_path / source, lines)
    if source == "mixture":
        parts = ("text", "fineweb_edu", "hub", "prepared", "megatron")
        return {"mixture": [read_from(part, texts, tmp_path) for part in parts]}
    return {"source": source}


SOURCES = ("synthetic", "python", "text", "fineweb_edu", "hub", "prepared", "megatron", "datatrove", "mixture")


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_batch_twenty_times_gives_the_same_loss_from_every_source(texts, tmp_path, source):
    config = parse_config({"data": read_from(source, texts, tmp_path)}, "test", TINY)
    data = build.build_data(config.data, config.train, ByteTokenizer())
    state = build_state(config, ByteTokenizer())
    # Read again each time, with others in between: neither the source nor a layer keeps anything.
    losses = set()
    for other in range(20):
        losses.add(train_step(state, iter([data.train.batch(0, 4)]), 4 * 32, lr=0.0).loss)
        data.train.batch(4 * other, 4)
    data.close()
    assert len(losses) == 1, losses


def test_a_run_on_a_megatron_pair_equals_a_run_on_shards_over_a_resume(texts, tmp_path, monkeypatch):
    runs = {}
    for source in ("prepared", "megatron"):
        more = [*TINY, "checkpoint.every=1", "checkpoint.background=false"]
        config = parse_config({"data": read_from(source, texts, tmp_path)}, "test", more)
        out = runs[source] = tmp_path / f"run of {source}"
        if source == "megatron":
            monkeypatch.setenv("NSA_FAULTS", "step.end:raise:hit=3")
            with pytest.raises(RuntimeError, match=r"step\.end"):
                train(config, out)
            monkeypatch.delenv("NSA_FAULTS")
        train(config, out)
    assert losses_of(runs["megatron"]) == losses_of(runs["prepared"])
    validations = [metrics_of(out)["val_loss"] for out in runs.values()]
    assert validations[0] == validations[1] is not None
    weights = [(out / "model.safetensors").read_bytes() for out in runs.values()]
    assert weights[0] == weights[1]


def test_a_run_does_not_go_on_in_other_data(texts, tmp_path, monkeypatch):
    config = config_of(texts, "checkpoint.every=1", "checkpoint.background=false")
    monkeypatch.setenv("NSA_FAULTS", "step.end:raise:hit=3")
    with pytest.raises(RuntimeError, match=r"step\.end"):
        train(config, tmp_path / "run")
    monkeypatch.delenv("NSA_FAULTS")
    write_texts(texts / "b.jsonl", 70)
    with pytest.raises(DataError, match=r"trained on other data .*--accept-changes") as refused:
        train(config, tmp_path / "run")
    assert refused.value.exit_code == 3
    train(config, tmp_path / "run", accept_changes=True)
    assert metrics_of(tmp_path / "run")["steps"] == 4


def test_completed_steps_are_saved_if_a_file_is_damaged_when_a_run_validates(texts, tmp_path, monkeypatch):
    config, validate = config_of(texts, "train.eval_every=3"), nsa.train.loop.validate

    def failing(*_):
        raise DataError("shard-00001.tokens: is damaged")

    monkeypatch.setattr(nsa.train.loop, "validate", failing)
    with pytest.raises(DataError, match="is damaged"):
        train(config, tmp_path / "run")
    assert [path.name for path in committed(tmp_path / "run" / FOLDER)] == ["step_00000003"]
    monkeypatch.setattr(nsa.train.loop, "validate", validate)
    train(config, tmp_path / "run")
    train(config, tmp_path / "undisturbed")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")


def test_a_validation_loss_on_earlier_data_is_not_the_best(texts, tmp_path):
    changes = ["train.eval_every=1", "train.lr=1e-2", "checkpoint.every=0", "checkpoint.background=false"]
    train(config_of(texts, *changes, "train.steps=6"), tmp_path / "run")
    rare = "".join(map(chr, range(0x80, 0xC0)))  # never seen before: its loss is higher
    (texts / "a.jsonl").write_text("".join(json.dumps({"text": rare[n:] * 6}) + "\n" for n in range(60)))
    train(config_of(texts, *changes, "train.steps=8"), tmp_path / "run", accept_changes=True)
    losses = [float(row["val_loss"]) for row in rows_of(tmp_path / "run")]
    assert max(losses[:6]) < min(losses[6:])
    assert metrics_of(tmp_path / "run")["best_val_loss"] == min(losses[6:])
    assert read_pointer(tmp_path / "run" / FOLDER, BEST) in ("step_00000007", "step_00000008")


def test_a_validation_loss_on_other_sequences_is_not_the_best(texts, tmp_path):
    changes = ["train.eval_every=1", "checkpoint.every=0", "checkpoint.background=false"]
    config = config_of(texts, *changes, "train.steps=6", "train.lr=1e-2", "train.seq_len=64")
    train(config, tmp_path / "run")
    config = config_of(texts, *changes, "train.steps=7", "train.lr=1e-9", "train.seq_len=16")
    train(config, tmp_path / "run", accept_changes=True)
    losses = [float(row["val_loss"]) for row in rows_of(tmp_path / "run")]
    assert min(losses[:6]) < losses[6]
    assert metrics_of(tmp_path / "run")["best_val_loss"] == losses[6]
    assert read_pointer(tmp_path / "run" / FOLDER, BEST) == "step_00000007"


class DeadSource:
    name = "dead"
    listed = Progress("footers read")

    def cancel(self):
        pass

    def answered(self):
        return 0

    def units(self):
        raise DataUnavailableError("the hub does not answer: connection refused, 5 tries in 3 s")

    fingerprint = units


def test_a_source_that_does_not_answer_ends_the_run_with_exit_code_3(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "open_source", lambda *_: DeadSource())
    config = parse_config({}, "test", [*TINY, "data.source=fineweb_edu"])
    with pytest.raises(DataUnavailableError) as caught:
        train(config, tmp_path / "run")
    assert caught.value.exit_code == 3
    assert metrics_of(tmp_path / "run")["status"] == "failed"


def test_synthetic_on_fail_trains_and_reports_it_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "open_source", lambda *_: DeadSource())
    config = parse_config({}, "test", [*TINY, "data.source=fineweb_edu"])
    train(config, tmp_path / "run", synthetic_on_fail=True)
    printed = capsys.readouterr().out
    assert "DATA FALLBACK: the hub does not answer" in printed
    assert "THIS RUN TRAINS ON SYNTHETIC TEXT" in printed
    metrics = metrics_of(tmp_path / "run")
    assert metrics["status"] == "done"
    assert metrics["incidents"] == 1
    assert metrics["data"]["source"] == "synthetic"
    assert "connection refused" in metrics["data"]["fallback"]
    (incident,) = [e for e in events_of(tmp_path / "run") if e["event"] == "incident"]
    assert incident["kind"] == "data_fallback"


def test_a_bad_file_does_not_cause_a_fallback_to_synthetic_text(texts, tmp_path):
    (texts / "b.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"b\.jsonl"):
        train(config_of(texts), tmp_path / "run", synthetic_on_fail=True)


def test_best_fit_trains_and_its_loss_counts_real_targets_only(texts, tmp_path):
    config = config_of(texts, "data.packing=best_fit", "train.lr=1e-9", "train.steps=2")
    train(config, tmp_path / "run")
    loss = float(losses_of(tmp_path / "run")[0])
    assert 5.0 < loss < 6.2, "an untrained model knows nothing: about ln 256 = 5.5 nats a real target"


def test_a_stalled_source_is_reported_in_the_log_and_the_heartbeat(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NSA_FAULTS", "data.batch:sleep:hit=3:seconds=3")
    train(config_of(texts, "data.stall_s=0.2", "data.prefetch=1", "data.workers=1"), tmp_path / "run")
    assert re.search(r"data: waited \d+\.\d s for the next batch", capsys.readouterr().out)
    stalls = [e for e in events_of(tmp_path / "run") if e["event"] == "data_stall"]
    assert stalls
    assert stalls[0]["seconds"] >= 0.2
    waits = [float(row["data_wait_s"]) for row in csv.DictReader((tmp_path / "run" / "training.csv").open())]
    assert sum(waits) > 0.5, "three seconds, less what the steps before it took"


def test_completed_steps_are_saved_if_validation_has_too_few_documents(tmp_path):
    """Those of a stream are collected before the first step that is validated."""
    write_mirror(tmp_path / "mirror", files=1, row_groups=2, rows=40)
    data = {"source": "fineweb_edu", "paths": [str(tmp_path / "mirror")]}
    few = ["data.validation_fraction=0.02", "train.seq_len=512", "train.steps=4", "train.eval_every=3"]
    config = parse_config({"data": data}, "test", [*TINY, *few])
    for _ in range(2):  # the same command ends in the same way
        with pytest.raises(DataError, match=r"the validation documents have|no validation document"):
            train(config, tmp_path / "run")
        assert [path.name for path in committed(tmp_path / "run" / "checkpoints")] == ["step_00000002"]
        assert len(losses_of(tmp_path / "run")) == 2


def test_completed_steps_are_saved_if_a_file_is_damaged_meanwhile(texts, tmp_path, monkeypatch):
    real = Loader.batch

    def failing(self, first, *more):
        if first >= 8:
            raise DataError("shard-00001.tokens: is damaged")
        return real(self, first, *more)

    monkeypatch.setattr(Loader, "batch", failing)
    with pytest.raises(DataError, match="is damaged"):
        train(config_of(texts, "train.eval_every=0"), tmp_path / "run")
    assert [path.name for path in committed(tmp_path / "run" / "checkpoints")] == ["step_00000002"]
    with pytest.raises(DataError, match="is damaged"), faults_armed("save.own:enospc:times=99"):
        train(config_of(texts, "train.eval_every=0"), tmp_path / "full")
    assert committed(tmp_path / "full" / "checkpoints") == [], "a disk that is full as well does not hide the reason"
    monkeypatch.setattr(Loader, "batch", real)
    train(config_of(texts, "train.eval_every=0"), tmp_path / "run")
    train(config_of(texts, "train.eval_every=0"), tmp_path / "undisturbed")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")
