"""Preparation on many machines: merged parts have the bytes of one preparation, whatever was killed and repeated."""

import json
import multiprocessing
import os
import signal

import pytest

from nsa.data.prepare import make_plan, merge, prepare
from nsa.data.sources.text import TextSource
from nsa.data.token_shards import MANIFEST, open_shards, verify
from nsa.data.tokenizers import load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.errors import ConfigError, DataError
from tests.data.parts import work_until
from tests.data.test_prepare import SHARD_BYTES, TOKENIZER, contents, dense_file, nsa_data, source

__all__ = ["dense_file", "source"]  # fixtures


def prepare_parts(source, folder, of, tokenizer=TOKENIZER, shard_bytes=SHARD_BYTES):
    return [
        prepare(source, tokenizer, folder, workers=1, shard_bytes=shard_bytes, part=(number, of))
        for number in range(1, of + 1)
    ]


@pytest.fixture
def whole(source, tmp_path):
    prepare(source, TOKENIZER, tmp_path / "whole", workers=1, shard_bytes=SHARD_BYTES)
    return contents(tmp_path / "whole")


def test_parts_that_were_killed_and_repeated_merge_to_one_preparation(source, whole, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.parts"])
    out = tmp_path / "out"

    def kill(fault, part=None):
        process = context.Process(target=work_until, args=(fault, out, tmp_path / "texts", SHARD_BYTES, part))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL

    for number, fault in enumerate(("prepare.tokens", "prepare.entry", "prepare.manifest"), start=1):
        kill(f"{fault}:kill", (number, 3))
        with pytest.raises(DataError, match=r"contains no finished part|parts are missing or not finished: "):
            merge(out)
        before = {path: path.stat().st_mtime_ns for path in out.glob("part-*/shard-*.tokens")}
        finished = {path for path in before if path.with_suffix(".json").exists()}
        prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES, part=(number, 3))
        assert all(path.stat().st_mtime_ns == before[path] for path in finished), "finished shards are kept"
    for fault in ("merge.moved:kill", "merge.moved:kill:hit=4", "prepare.manifest:kill", "merge.manifest:kill"):
        kill(fault)
        assert (out / MANIFEST).exists() == (fault == "merge.manifest:kill")
    manifest = merge(out)
    assert contents(out) == whole
    assert verify(out) == manifest == merge(out)
    with pytest.raises(DataError, match="the parts are merged already; remove the folder"):
        prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES, part=(1, 3), fresh=True)


def test_a_part_is_repeated_after_the_merge_without_work(source, whole, tmp_path):
    out = tmp_path / "out"
    parts = prepare_parts(source, out, 2)
    assert parts == prepare_parts(source, out, 2)
    merged = merge(out)
    assert prepare_parts(source, out, 2) == [merged, merged]
    assert contents(out) == whole
    os.utime(tmp_path / "texts" / "0.jsonl", (1, 1))
    with pytest.raises(DataError, match=r"another preparation .* or remove it"):
        prepare_parts(source, out, 2)


def test_more_parts_than_groups_of_files_merge_too(source, whole, tmp_path):
    out, of = tmp_path / "out", 2 + len(make_plan(source, TOKENIZER, SHARD_BYTES).tasks)
    *_, last = prepare_parts(source, out, of)
    assert last.shards == []
    empty = f"part-{of:05d}-of-{of:05d}"
    assert "0 documents" in nsa_data("stats", str(out / empty))
    assert len(open_shards([out / empty], TOKENIZER)[0].lengths) == 0
    merge(out)
    assert contents(out) == whole


def test_parts_of_files_that_fill_several_shards_merge_in_order(dense_file, tmp_path):
    prepare(dense_file, TOKENIZER, tmp_path / "whole", workers=1, shard_bytes=SHARD_BYTES)
    prepare_parts(dense_file, tmp_path / "out", 2)
    merge(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_merged_parts_keep_the_tokenizer_file(source, tmp_path):
    train_bpe(["some words of a vocabulary"], tmp_path / "own.json", vocab_size=262, max_bytes=1 << 10)
    tokenizer = load_tokenizer(str(tmp_path / "own.json"))
    prepare(source, tokenizer, tmp_path / "whole", workers=1)
    prepare_parts(source, tmp_path / "out", 2, tokenizer, 64 << 20)
    merge(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_printed_command_names_the_separator_of_the_parts(source, tmp_path):
    train_bpe(["some words of a vocabulary"], tmp_path / "own.json", vocab_size=262, max_bytes=1 << 10)
    arguments = ["data.source=text", f"data.paths=[{tmp_path / 'texts'}]", f"data.tokenizer={tmp_path / 'own.json'}"]
    for separator, shown in (("<|endoftext|>", ""), ("z", " data.separator=z")):
        out = tmp_path / f"out{len(separator)}"
        nsa_data("prepare", str(out), *arguments, f"data.separator={separator}", "--part", "1/1")
        last = nsa_data("merge", str(out)).splitlines()[-1]
        assert last.endswith(f" data.tokenizer={out / 'tokenizer.json'}{shown}")


def test_parts_that_do_not_fit_are_refused_and_kept(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no such folder"):
        merge(out)
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES, part=(1, 3))
    with pytest.raises(DataError, match="2 parts are missing or not finished: 2, 3; run their commands"):
        merge(out)
    prepare(source, TOKENIZER, out, workers=1, shard_bytes=SHARD_BYTES, part=(2, 2))
    with pytest.raises(DataError, match=r"part-00002-of-00002: is not a part of the same preparation as .*-00003 "):
        merge(out)
    (second,) = out.glob("*-of-00002")
    second.rename(tmp_path / "aside")
    prepare_parts(source, out, 3)
    third = out / "part-00003-of-00003"
    manifest = json.loads((third / MANIFEST).read_text())
    dropped = {**manifest, "shards": manifest["shards"][1:]}
    for content, message in (
        ({**manifest, "plan": "other"}, "part-00003-of-00003: is not a part of the same preparation"),
        (dropped, "manifest.json: is damaged: its shards are not those of part 3"),
    ):
        (third / MANIFEST).write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            merge(out)
    (third / MANIFEST).write_text(json.dumps(manifest))
    tokens = sorted(third.glob("*.tokens"))[-1]
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{tokens.name}: has {len(whole) - 1} bytes, the manifest says {len(whole)}"):
        merge(out)
    tokens.unlink()
    with pytest.raises(DataError, match="the parts cannot be merged: No such file"):
        merge(out)
    assert not list(out.glob("shard-*")), "nothing was moved"
    tokens.write_bytes(whole)
    assert merge(out).documents == 240


def test_parts_without_any_text_are_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ")
    prepare_parts(TextSource([str(tmp_path / "texts")]), tmp_path / "out", 2)
    with pytest.raises(DataError, match="no document contains text"):
        merge(tmp_path / "out")


def test_the_command_line_prepares_and_merges_parts(source, tmp_path):
    out = tmp_path / "out"
    arguments = ["prepare", str(out), "data.source=text", f"data.paths=[{tmp_path / 'texts'}]", "--workers", "1"]
    shown = nsa_data(*arguments, "--part", "1/2")
    assert f"{out}, part 1 of 2: " in shown
    assert f"`nsa data merge {out}`" in shown
    nsa_data(*arguments, "--part", "2/2")
    shown = nsa_data("merge", str(out))
    assert "240 documents" in shown
    assert f"train with data.source=prepared data.paths=[{out}] data.tokenizer=bytes" in shown
    for wrong in ("0/2", "3/2", "2", "1/x", "1/999999"):
        with pytest.raises(ConfigError, match=f"--part: '{wrong}' is not a part"):
            nsa_data(*arguments, "--part", wrong)
