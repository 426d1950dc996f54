"""Shards: the same tokens however they were made, whole after any kill, and never wrong in silence."""

import errno
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from nsa.cli.data import app
from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.corpus import join, tokenise_unit
from nsa.data.prepare import make_plan, prepare
from nsa.data.sources.base import Skipped
from nsa.data.sources.text import TextSource
from nsa.data.token_shards import MANIFEST, open_shards, read_manifest, verify
from nsa.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.errors import ConfigError, DataError
from tests.waiting import wait_until

TOKENIZER = ByteTokenizer()
SHARD_BYTES = 2_000


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for file in range(6):
        lines = [json.dumps({"text": f"file {file} line {n} " + "wörd " * (n % 17)}) for n in range(40)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + '\n{"text": ""}\n', encoding="utf-8")
    return TextSource([str(folder)])


def whole(piece):
    tokens = np.empty(len(piece), piece.dtype)
    piece.read(0, tokens)
    return tokens


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def run_cli(folder, source_folder, *more, faults="", check=True):
    command = [sys.executable, "-m", "nsa", "data", "prepare", str(folder), "data.source=text"]
    command += [f"data.paths=[{source_folder}]", *more]
    environment = {**os.environ, "NSA_FAULTS": faults}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def test_shards_keep_the_tokenizer_file_they_were_made_with(source, tmp_path):
    own, out = tmp_path / "own.json", tmp_path / "out"
    train_bpe(["some words of a vocabulary"], own, vocab_size=262, max_bytes=1 << 10)
    arguments = ["prepare", str(out), "data.source=text", f"data.paths=[{tmp_path / 'texts'}]", f"data.tokenizer={own}"]
    done = CliRunner().invoke(app, [*arguments, "--workers", "1"], catch_exceptions=False)
    fingerprint = load_tokenizer(str(own)).fingerprint
    own.unlink()
    (last,) = [line for line in done.output.splitlines() if line.startswith("train with ")]
    kept = load_tokenizer(last.rpartition("data.tokenizer=")[2])
    assert kept.fingerprint == fingerprint
    assert len(open_shards([out], kept)[0].lengths) == 240


def test_shards_hold_the_source_document_for_document(source, tmp_path):
    out = tmp_path / "out"
    manifest = prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    direct = join((tokenise_unit(source, u, tokenizer=TOKENIZER) for u in source.units()), TOKENIZER)
    shards, _ = open_shards([out], TOKENIZER)
    assert len(manifest.shards) > 2
    assert np.array_equal(np.concatenate([whole(piece) for piece in shards.pieces]), direct.pieces[0])
    assert np.array_equal(shards.lengths, direct.lengths)
    assert np.array_equal(shards.keys, direct.keys)
    assert manifest.documents == 240
    assert manifest.tokens == len(direct.pieces[0])
    assert manifest.text_bytes == direct.text_bytes
    assert manifest.skipped == {"empty": 6}
    assert manifest.tokenizer.name == "bytes"
    assert verify(out).tokens == manifest.tokens


def test_the_number_of_workers_changes_no_byte(source, tmp_path):
    for workers in (1, 2):
        prepare(source, TOKENIZER, tmp_path / str(workers), workers=workers, shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_training_from_shards_reads_what_training_from_the_files_reads(source, tmp_path):
    prepare(source, TOKENIZER, tmp_path / "out", workers=1, shard_bytes=SHARD_BYTES)
    train = TrainConfig(seq_len=64, batch_size=4)
    options = {"validation_fraction": 0.1}
    from_files = build_data(DataConfig(source="text", paths=[str(tmp_path / "texts")], **options), train, TOKENIZER)
    from_shards = build_data(DataConfig(source="prepared", paths=[str(tmp_path / "out")], **options), train, TOKENIZER)
    for number in range(0, 300, 7):
        for side in ("train", "validation"):
            a, b = (getattr(d, side).batch(number, 3) for d in (from_files, from_shards))
            assert a.inputs.equal(b.inputs)
            assert a.targets.equal(b.targets)
            assert a.cu_seqlens.equal(b.cu_seqlens)


POINTS = ("prepare.tokens", "prepare.docs", "prepare.renamed", "prepare.entry", "prepare.manifest")


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_and_started_again_gives_the_same_files(source, tmp_path, point):
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(source, TOKENIZER, whole, workers=1, shard_bytes=1 << 20)
    arguments = ("--workers", "1", "--shard-mb", "1")
    killed = run_cli(out, tmp_path / "texts", *arguments, faults=f"{point}:kill", check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / MANIFEST).exists()
    with pytest.raises(DataError, match="contains no finished shards"):
        open_shards([out], TOKENIZER)
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=1 << 20)
    assert contents(out) == contents(whole)


def test_a_kill_of_the_whole_group_keeps_finished_shards(source, tmp_path):
    """Real processes, SIGKILL at random times; what is finished is not made again."""
    folder = tmp_path / "big"
    folder.mkdir()
    draw = random.Random(1)
    for file in range(8):
        lines = [json.dumps({"text": draw.randbytes(10_000).hex()}) for _ in range(70)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    out, whole = tmp_path / "out", tmp_path / "whole"
    prepare(TextSource([str(folder)]), TOKENIZER, whole, workers=1, shard_bytes=1 << 20)
    command = [sys.executable, "-m", "nsa", "data", "prepare", str(out), "data.source=text", f"data.paths=[{folder}]"]
    command += ["--workers", "2", "--shard-mb", "1"]
    kills = 0
    while kills < 3:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = len(list(out.glob("shard-*.json"))) if out.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and len(list(out.glob("shard-*.json"))) > before:
                break
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 1
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*.tokens") if p.with_suffix(".json").exists()}
    assert kept
    prepare(TextSource([str(folder)]), TOKENIZER, out, workers=1, shard_bytes=1 << 20)
    assert contents(out) == contents(whole)
    assert all((out / name).stat().st_mtime_ns == time_ns for name, time_ns in kept.items())


def test_finished_shards_are_not_made_again_and_other_ones_are_refused(source, tmp_path):
    out = tmp_path / "out"
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"}
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"} == before
    (out / "shard-99999.json").write_text('{"plan": "of another folder"}')  # the manifest does not list it
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    with pytest.raises(DataError, match="another preparation"):
        prepare(source, TOKENIZER, out, workers=1, shard_bytes=100 * SHARD_BYTES)
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=100 * SHARD_BYTES, fresh=True)
    assert verify(out).documents == 240


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 3)], ids=["removed", "truncated"])
def test_damaged_shards_are_not_taken_for_finished_and_fresh_replaces_them(source, tmp_path, damage):
    out = tmp_path / "out"
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    damage(out / "shard-00001.tokens")
    for attempt in (lambda: prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES), lambda: verify(out)):
        with pytest.raises(DataError, match=r"shard-00001\.tokens: .*prepare the data again with --fresh"):
            attempt()
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES, fresh=True)
    assert verify(out).documents == 240


def test_a_source_that_changed_in_between_is_refused(source, tmp_path):
    out = tmp_path / "out"
    run_cli(out, tmp_path / "texts", "--workers", "1", faults="prepare.entry:kill", check=False)
    with (tmp_path / "texts" / "0.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(DataError, match="another preparation"):
        prepare(source, TOKENIZER, out, workers=1)


def test_another_field_of_the_same_files_is_another_preparation(tmp_path):
    lines = (json.dumps({"text": f"text {n}", "summary": f"summary {n}"}) for n in range(40))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    of_text, of_summary = (TextSource([str(tmp_path / "a.jsonl")], field) for field in ("text", "summary"))
    prepare(of_text, TOKENIZER, tmp_path / "out", workers=1)
    with pytest.raises(DataError, match=r"another preparation \(other files, text field"):
        prepare(of_summary, TOKENIZER, tmp_path / "out", workers=1)
    prepare(of_summary, TOKENIZER, tmp_path / "out", workers=1, fresh=True)
    shards, _ = open_shards([tmp_path / "out"], TOKENIZER)
    assert "summary 39" in TOKENIZER.decode(whole(shards.pieces[0]).tolist())


def test_fresh_keeps_the_old_shards_where_the_source_cannot_be_read(source, tmp_path):
    prepare(source, TOKENIZER, tmp_path / "out", workers=1)
    before = contents(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for wrong in ("nowhere", "empty"):
        with pytest.raises(DataError, match=r"data\.paths"):
            prepare(TextSource([str(tmp_path / wrong)]), TOKENIZER, tmp_path / "out", workers=1, fresh=True)
    assert contents(tmp_path / "out") == before


def test_more_shards_than_a_process_may_open_files_by_default(tmp_path):
    shards = 40
    for number in range(shards):
        (tmp_path / f"{number}.txt").write_text(f"the text of file {number}")
    manifest = prepare(TextSource([str(tmp_path)]), TOKENIZER, tmp_path / "out", workers=1, shard_bytes=1)
    assert len(manifest.shards) == shards
    program = """
import resource, sys
from nsa.data.token_shards import open_shards
from nsa.data.tokenizers import ByteTokenizer
shards = int(sys.argv[2])
for most in (shards + 100, shards):  # the system allows: enough, too few
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, most))
    try:
        print(len(open_shards([sys.argv[1]], ByteTokenizer())[0].pieces))
    except Exception as error:
        print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(shards)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    opened, refused = done.stdout.splitlines()
    assert int(opened) == shards
    assert refused.startswith(f"DataError data.paths: {shards} shards in {tmp_path / 'out'}, and this process may")
    assert "--shard-mb" in refused


def test_a_bad_file_is_named_and_ends_the_preparation(source, tmp_path):
    (tmp_path / "texts" / "3.jsonl").write_bytes(b'{"text": "a"}\n{"text": \xff}\n')
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"3\.jsonl"):
            prepare(TextSource([str(tmp_path / "texts")]), TOKENIZER, tmp_path / "o", workers=workers, shard_bytes=2000)
    assert not (tmp_path / "o" / MANIFEST).exists()


@pytest.mark.parametrize("point", ["docs", "manifest"])
def test_a_full_disk_ends_the_preparation_and_loses_no_shard(source, tmp_path, point):
    out = tmp_path / "out"
    failed = run_cli(out, tmp_path / "texts", "--workers", "1", faults=f"prepare.{point}:enospc", check=False)
    assert failed.returncode == 3
    assert "No space left" in failed.stderr
    prepare(source, TOKENIZER, out, workers=1)
    assert verify(out).documents == 240


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_in_the_middle_of_a_shard(source, tmp_path, number):
    """SIGKILL reaches the parent alone, Ctrl-C the whole group."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "nsa", "data", "prepare", str(out), "data.source=text", "--workers", "2"]
    command += [f"data.paths=[{tmp_path / 'texts'}]", "--shard-mb", "1"]
    for name in "ab":  # two groups of units, so that there are workers
        (tmp_path / "texts" / f"{name}.jsonl").write_text((json.dumps({"text": "long " * 100}) + "\n") * 2000)
    environment = {**os.environ, "NSA_FAULTS": "prepare.docs:sleep"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(out.glob("*.docs"))) >= 2)
        workers = psutil.Process(process.pid).children(recursive=True)
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        assert process.wait(30) == (130 if number == signal.SIGINT else -number)
        _, left = psutil.wait_procs(workers, timeout=30)
        assert not [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    prepare(source, TOKENIZER, tmp_path / "whole", workers=1, shard_bytes=1 << 20)
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=1 << 20)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_folder_that_cannot_be_locked_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with pytest.raises(DataError, match="cannot be locked: Function not implemented"):
        prepare(source, TOKENIZER, tmp_path / "out", workers=1)


def test_two_preparations_do_not_write_into_one_folder(source, tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another preparation is writing"):
            prepare(source, TOKENIZER, tmp_path / "out", workers=1)


def test_verify_finds_every_flipped_byte(source, tmp_path):
    out = tmp_path / "out"
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    draw = random.Random(2)
    files = [p for p in sorted(out.iterdir()) if p.suffix in (".tokens", ".docs")]
    for path in draw.sample(files, 6):
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        original = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.stem):
            verify(out)
        path.write_bytes(original[:-1])
        with pytest.raises(DataError, match=path.name):
            open_shards([out], TOKENIZER)
        path.unlink()
        with pytest.raises(DataError, match=path.name):
            open_shards([out], TOKENIZER)
        path.write_bytes(original)
    verify(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "format version 2"),
        (lambda m: m.update(format="other"), "not a manifest of token shards"),
        (lambda m: m.pop("tokenizer"), "damaged"),
        (lambda m: m["tokenizer"].update(dtype="object"), "dtype"),
        (lambda m: m["shards"][0].update(tokens=-1), "damaged"),
        (lambda m: m["shards"][0].update(number="../../etc/passwd"), "damaged"),
        (lambda m: m["shards"][0].update(documents=3), "manifest says 48"),
        (lambda m: m.update(shards=None), "damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(source, tmp_path, change, message):
    out = tmp_path / "out"
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES)
    manifest = json.loads((out / MANIFEST).read_text())
    change(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=message):
        open_shards([out], TOKENIZER)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_an_invalid_manifest_is_refused(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match=MANIFEST):
        read_manifest(tmp_path)


def test_shards_of_another_tokenizer_are_refused(source, tmp_path):
    prepare(source, TOKENIZER, tmp_path / "out", workers=1)

    class Other(ByteTokenizer):
        name = "other"
        fingerprint = "other"

    with pytest.raises(DataError, match="was prepared with 'bytes'"):
        open_shards([tmp_path / "out"], Other())
    Other.separator = 3
    with pytest.raises(DataError, match=r"data\.separator: .* was prepared with token 255, the run has 3; set"):
        open_shards([tmp_path / "out"], Other())


def test_several_folders_are_one_corpus(source, tmp_path):
    for part in ("a", "b"):
        prepare(source, TOKENIZER, tmp_path / part, workers=1)
    shards, _ = open_shards([tmp_path / "a", tmp_path / "b"], TOKENIZER)
    once = join((tokenise_unit(source, u, tokenizer=TOKENIZER) for u in source.units()), TOKENIZER)
    assert shards.lengths.tolist() == [*once.lengths, *once.lengths]
    training, validation = shards.split(0.1)
    assert training.num_documents + validation.num_documents == 2 * len(once.lengths)


@pytest.fixture(params=["a.parquet", "a.jsonl.gz"])
def dense_file(request, tmp_path, monkeypatch):
    """A file whose 60 documents unpack to far more than its size lets expect."""
    monkeypatch.setattr("nsa.data.prepare.BATCH_CHARS", 100)
    texts = [f"{i % 2} " * 250 for i in range(60)]
    path = tmp_path / request.param
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=30)
    source = TextSource([str(path)])
    assert sum(unit.size for unit in source.units()) < 5_000 < sum(map(len, texts)) / 5
    return source


def test_a_shard_is_not_larger_than_requested_whatever_a_file_unpacks_to(dense_file, tmp_path):
    manifest = prepare(dense_file, TOKENIZER, tmp_path / "out", workers=1, shard_bytes=SHARD_BYTES)
    assert len({shard.number for shard in manifest.shards}) == len(manifest.shards) >= 15
    assert max(shard.text_bytes for shard in manifest.shards) <= SHARD_BYTES
    shards, _ = open_shards([tmp_path / "out"], TOKENIZER)
    direct = join((tokenise_unit(dense_file, u, tokenizer=TOKENIZER) for u in dense_file.units()), TOKENIZER)
    assert np.array_equal(np.concatenate([whole(piece) for piece in shards.pieces]), direct.pieces[0])
    assert np.array_equal(shards.keys, direct.keys)


def test_shards_of_one_file_that_are_lost_before_the_end_are_written_again(dense_file, tmp_path, monkeypatch):
    arguments = {"workers": 1, "shard_bytes": SHARD_BYTES}
    prepare(dense_file, TOKENIZER, tmp_path / "whole", **arguments)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("nsa.data.prepare.write_manifest", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(DataError, match="cannot be written"):
            prepare(dense_file, TOKENIZER, out, **arguments)
    max(out.glob("shard-*.tokens")).unlink()
    prepare(dense_file, TOKENIZER, out, **arguments)
    assert contents(out) == contents(tmp_path / "whole")


def test_the_tokenizer_gets_a_bounded_number_of_characters_at_once(source, tmp_path, monkeypatch):
    given = []
    plain = ByteTokenizer.encode_many
    monkeypatch.setattr(ByteTokenizer, "encode_many", lambda self, texts: given.append(texts) or plain(self, texts))
    monkeypatch.setattr("nsa.data.corpus.BATCH_CHARS", 1000)
    nsa_data("stats", "data.source=text", f"data.paths=[{tmp_path / 'texts'}]")
    assert sum(map(len, given)) == 240
    assert max(sum(map(len, texts)) for texts in given) <= 1000


def test_the_division_depends_on_sizes_alone(source, tmp_path):
    def plan_after(sizes):
        """The plan when every file has so many bytes, of which nothing can be read."""
        for file, size in enumerate(sizes):
            (tmp_path / "texts" / f"{file}.jsonl").write_bytes(b"x" * size)
        plan = make_plan(source, TOKENIZER, SHARD_BYTES)
        assert [u for task in plan.tasks for u in task] == list(source.units())
        return plan

    whole = make_plan(source, TOKENIZER, SHARD_BYTES)
    assert plan_after([unit.size for unit in source.units()]).tasks == whole.tasks
    half = SHARD_BYTES // 2
    fitting = plan_after([half, half, half, half + 1, 2 * SHARD_BYTES, 1])
    assert [len(task) for task in fitting.tasks] == [2, 1, 1, 1, 1]
    smaller = plan_after([half - 1, half, half, half, 2 * SHARD_BYTES, 1])
    assert [len(task) for task in smaller.tasks] == [2, 2, 1, 1]


def test_a_plan_has_another_name_for_files_that_were_written_since(source, tmp_path):
    plan = make_plan(source, TOKENIZER, SHARD_BYTES)
    os.utime(tmp_path / "texts" / "3.jsonl", (1, 1))
    touched = make_plan(source, TOKENIZER, SHARD_BYTES)
    assert touched.tasks == plan.tasks
    assert touched.name != plan.name
    assert make_plan(source, TOKENIZER, 1 << 20).name != touched.name, "another division"


def nsa_data(*arguments):
    """`nsa data ...` in this process; what it prints, or the error it raises."""
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_an_override_is_not_taken_for_the_folder_of_the_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"FOLDER: data\.source=text is an override; give the folder"):
        nsa_data("prepare", "data.source=text", "data.paths=[texts]")
    assert not list(tmp_path.iterdir())


def test_there_are_as_many_workers_as_cores_that_the_job_may_use(tmp_path, monkeypatch):
    """A batch system gives a job some cores of its machine."""

    def refuse(*_, workers, **__):
        raise DataError(f"{workers} workers")

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr("nsa.data.prepare.prepare", refuse)
    with pytest.raises(DataError, match=r"^2 workers"):
        nsa_data("prepare", str(tmp_path / "out"), "data.source=python")


def test_stats_and_verify_show_what_was_prepared(source, tmp_path):
    out, texts = tmp_path / "run=3" / "out", tmp_path / "texts"
    shown = nsa_data("prepare", str(out), "data.source=text", f"data.paths=[{texts}]", "--workers", "1")
    assert "240 documents" in shown
    assert f"train with data.source=prepared data.paths=[{out}] data.tokenizer=bytes" in shown
    shown = nsa_data("stats", str(out))
    assert "240 documents" in shown
    lengths = [1 + len(t.encode()) for u in source.units() for t in source.documents(u, Skipped())]
    mean, median = sum(lengths) / 240, int(np.median(lengths))
    expected = f"median {median}, mean {mean:.1f}, shortest {min(lengths)}, longest {max(lengths)}"
    assert f"tokens in a document: {expected}" in shown
    between = sum(16 <= length < 32 for length in lengths)
    assert re.search(rf"^ +16 to 31 +{between} #+$", shown, re.MULTILINE)
    assert "--- sample 3 ---" in shown
    assert "wörd" in shown
    shown = nsa_data("stats", "data.source=text", f"data.paths=[{texts}]")
    assert "240 documents" in shown
    with pytest.raises(DataError, match="nsa data stats FOLDER"):
        nsa_data("stats", "data.source=prepared", f"data.paths=[{out}]")
    assert "skipped 6 (empty)" in shown
    assert "240 documents" in nsa_data("verify", str(out))
    tokens = next(Path(out).glob("*.tokens"))
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DataError, match=tokens.name):
        nsa_data("verify", str(out))
