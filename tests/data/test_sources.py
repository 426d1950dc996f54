"""The user's files and the standard library as documents: all of them, each once, however they are cut and packed."""

import gzip
import io
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.sources import readers
from nsa.data.sources.base import Skipped, Unit
from nsa.data.sources.readers import parquet_documents, parquet_units
from nsa.data.sources.text import PythonSource, TextSource, expand_paths
from nsa.errors import DataError, DataUnavailableError


def read(source):
    """Every document of every unit, and what was left out."""
    skipped = Skipped()
    return [text for unit in source.units() for text in source.documents(unit, skipped)], skipped


def jsonl(texts, field="text"):
    return "".join(json.dumps({field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def parquet(path, texts, **options):
    table = texts if isinstance(texts, pa.Table) else pa.table({"text": texts})
    pq.write_table(table, path, **options)
    return path


TEXTS = ["first", "zweites Stück\nin zwei Zeilen", "第三", "😀 fourth\r\n"]


# Where files are found.


def test_every_format_is_read_from_a_folder_in_the_order_of_names(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_bytes(jsonl(["b1", "b2"]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(["c1", "c2"])))
    (tmp_path / "d.jsonl.zst").write_bytes(zstd(jsonl(["d1", "d2"])))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "e.TXT").write_text("e")
    parquet(tmp_path / "f.parquet", ["f1", "f2"])
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"g"))
    (tmp_path / "h.txt.zst").write_bytes(zstd(b"h"))
    (tmp_path / "not.csv").write_text("no")
    (tmp_path / "parquet").write_text("no")
    source = TextSource([str(tmp_path)])
    assert read(source) == (["a", "b1", "b2", "c1", "c2", "d1", "d2", "e", "f1", "f2", "g", "h"], {})
    assert [u.part for u in source.units()] == [0] * 8


def test_a_file_that_is_named_twice_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/[d].txt"):
        (tmp_path / name).write_text(name)
    assert read(TextSource(["b.txt", "*.txt", "sub", "sub/c.txt", "sub/[d].txt"]))[0] == [
        "b.txt",
        "a.txt",
        "sub/[d].txt",
        "sub/c.txt",
    ]


def test_a_glob_with_two_stars_reaches_every_depth_and_no_hidden_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["top.txt", "x/one.txt", "x/y/two.txt", "x/y/two.jsonl", ".hidden/no.txt", "x/.no.txt", "z/one.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(map(str, expand_paths(["**/*.txt"]))) == ["top.txt", "x/one.txt", "x/y/two.txt", "z/one.txt"]
    assert list(map(str, expand_paths(["x/**"]))) == ["x/one.txt", "x/y/two.jsonl", "x/y/two.txt"]
    assert list(map(str, expand_paths(["?/**/one.*"]))) == ["x/one.txt", "z/one.txt"]
    assert list(map(str, expand_paths([f"{tmp_path}/**/y/*.txt"]))) == [f"{tmp_path}/x/y/two.txt"]
    with pytest.raises(DataError, match="check the pattern"):
        expand_paths(["x/**/*.parquet"])


@pytest.mark.timeout(150)
def test_links_that_form_rings_end(tmp_path):
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (data / "a.txt").write_text("a")
    (data / "deep" / "b.txt").write_text("b")
    (tmp_path / "elsewhere" / "c.txt").write_text("c")
    for i in range(4):  # four ways on from every step would be more paths than anyone can walk
        (data / f"ring{i}").symlink_to(data)
    (data / "deep" / "up").symlink_to(data)
    (data / "self").symlink_to("self")
    (data / "out").symlink_to(tmp_path / "elsewhere")
    (data / "gone.txt").symlink_to(tmp_path / "nothing")
    for entry in (str(data), f"{data}/**/*.txt"):
        assert read(TextSource([entry]))[0] == ["a", "b", "c"]


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is neither a regular file nor a folder"):
        expand_paths([str(tmp_path / "pipe.txt")])
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "a.txt").write_text("a")
    assert read(TextSource([str(tmp_path)]))[0] == ["a"]
    assert read(TextSource([f"{tmp_path}/*.txt"]))[0] == ["a"]
    for name in ("pipe.txt", "folder.txt"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read: not a regular file"):
            list(TextSource([]).documents(Unit(str(tmp_path / name)), Skipped()))


@pytest.mark.parametrize("entry", ["~no_such_user/a.txt", "x" * 5000, "a\0b"])
def test_a_path_that_cannot_exist_is_named(entry):
    with pytest.raises(DataError, match=r"no such file|name too long"):
        expand_paths([entry])


# Lines.

PIECES = st.sampled_from(["", "a", "é", "語", "😀", " ", "\n", "\\", '"', "long " * 20])
RECORDS = st.builds(
    lambda parts, plain: json.dumps({"text": "".join(parts)}, ensure_ascii=plain), st.lists(PIECES), st.booleans()
)


@settings(max_examples=150)
@given(
    lines=st.lists(st.tuples(st.one_of(RECORDS, st.sampled_from(["", " ", "\t"])), st.sampled_from(["\n", "\r\n"]))),
    ended=st.booleans(),
    range_bytes=st.integers(1, 300),
)
def test_ranges_of_a_jsonl_file_hold_every_line_once(tmp_path_factory, lines, ended, range_bytes):
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    content = "".join(line + end for line, end in lines)
    path.write_bytes((content if ended else content.rstrip("\r\n")).encode())
    texts = [json.loads(line)["text"] for line, _ in lines if line.strip()]
    source = TextSource([str(path)], range_bytes=range_bytes)
    units = source.units()
    assert [u.start for u in units] == list(range(0, path.stat().st_size, range_bytes))
    assert [u.stop for u in units[:-1]] == [u.start for u in units[1:]]
    assert sum(u.size for u in units) == path.stat().st_size
    documents, skipped = read(source)
    assert documents == [text for text in texts if text.strip()]
    assert sum(skipped.values()) == len(texts) - len(documents)


@settings(max_examples=300)
@given(
    data=st.text("\nab", max_size=80).map(str.encode),
    cut=st.integers(1, 20),
    block=st.integers(1, 9),
)
def test_a_line_beyond_the_limit_is_left_out_once_and_its_neighbours_stay(data, cut, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "MAX_DOCUMENT_BYTES", 6)
        patch.setattr(readers, "BLOCK_BYTES", block)
        found = []
        for start in range(0, len(data), cut):
            found += readers.lines(io.BytesIO(data), start, start + cut)
    expected, offset = [], 0
    for line in data.split(b"\n"):
        expected.append((offset, line if len(line) <= 6 else None))
        offset += len(line) + 1
    if expected[-1][1] == b"":  # nothing follows the last newline
        expected.pop()
    assert found == expected


def test_a_range_stops_reading_when_no_further_line_can_start_in_it(monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 10)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 4)
    for start in (0, 8):
        file = io.BytesIO(b"x" * 10_000)
        assert list(readers.lines(file, start, start + 8)) == ([(0, None)] if start == 0 else [])
        assert file.tell() < 30


def test_byte_order_marks_are_dropped_and_null_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(["marked", None, "\ufeffkept"]))
    assert read(TextSource([str(tmp_path)])) == (["marked", "marked", "\ufeffkept"], {"no text": 1})


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_files_of_several_members_are_read_whole(suffix, pack, tmp_path):
    path = tmp_path / f"a.jsonl{suffix}"
    data = jsonl(TEXTS)
    # Members end within lines and characters; empty ones stand at the start, between others and at the end.
    parts = [b"", *(data[i : i + 7] for i in range(0, len(data), 7)), b"", b""]
    path.write_bytes(b"".join(map(pack, parts)))
    source = TextSource([str(path)])
    assert read(source) == (TEXTS, {})
    (unit,) = source.units()
    assert unit.size == 3 * path.stat().st_size


# Parquet.

KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_parquet_text_is_read(kind, compression, tmp_path):
    texts = [*TEXTS, None, "", " \n"] * 30
    table = pa.table(
        {
            "nested": [{"text": [str(i)]} for i in range(len(texts))],
            "text": pa.array(texts).cast(kind),
            "list": [[i] for i in range(len(texts))],
        }
    )
    path = parquet(tmp_path / "a.parquet", table, compression=compression, row_group_size=50)
    source = TextSource([str(path)])
    assert read(source) == (TEXTS * 30, {"no text": 30, "empty": 60})
    units = source.units()
    assert [(u.part, u.start, u.stop) for u in units] == [(i, 50 * i, min(50 * i + 50, 210)) for i in range(5)]
    assert all(u.size > 0 for u in units)


def test_a_folded_column_longer_than_a_batch_keeps_its_order(tmp_path):
    texts = [f"text {i % 7}" for i in range(5000)]
    folded = pa.table({"text": pa.array(texts).dictionary_encode()})
    assert read(TextSource([str(parquet(tmp_path / "a.parquet", folded))]))[0] == texts


def test_a_parquet_file_without_rows_has_no_documents(tmp_path):
    path = parquet(tmp_path / "a.parquet", pa.table({"text": pa.array([], pa.string())}))
    assert read(TextSource([str(path)])) == ([], {})


class CountingFile(io.BytesIO):
    bytes_read = 0

    def read(self, count=-1):
        data = super().read(count)
        self.bytes_read += len(data)
        return data


def test_units_come_from_the_footer_and_documents_from_the_text_column_alone():
    buffer = io.BytesIO()
    texts = [f"{i} " + "t" * 500 for i in range(400)]
    table = pa.table({"image": [os.urandom(5000) for _ in texts], "text": texts})
    pq.write_table(table, buffer, row_group_size=100, compression="none", use_dictionary=False)
    file = CountingFile(buffer.getvalue())
    units = parquet_units("remote.parquet", file, "text")
    assert len(units) == 4
    assert {u.path for u in units} == {"remote.parquet"}
    # Arrow looks at the last 64 KiB to find the footer.
    assert file.bytes_read < 70_000
    file.bytes_read = 0
    assert list(parquet_documents("remote.parquet", file, 2, "text", Skipped())) == texts[200:300]
    assert file.bytes_read < 130_000
    assert not file.closed
    assert list(parquet_documents("remote.parquet", file, 3, "text", Skipped())) == texts[300:]


def test_a_hub_that_does_not_answer_is_not_taken_for_a_broken_file():
    class Silent(io.BytesIO):
        def read(self, count=-1):
            raise DataUnavailableError("the hub does not answer")

    with pytest.raises(DataUnavailableError):
        parquet_units("remote.parquet", Silent(b"x" * 1000), "text")


# What holds for every source.


@pytest.fixture
def library(tmp_path):
    """A few files of every format, several units each."""
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_bytes(jsonl(f"line {i} {j} " + "x" * j for j in range(50)))
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
        (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(jsonl(f"packed {i} {j}" for j in range(50))))
        parquet(tmp_path / f"{i}.parquet", [f"row {i} {j}" for j in range(50)], row_group_size=10)
    return tmp_path


def test_units_can_be_read_by_threads_and_copies_in_any_order(library):
    source = TextSource([str(library)], range_bytes=100)
    units = source.units()
    expected = [list(source.documents(unit, Skipped())) for unit in units]
    copy = pickle.loads(pickle.dumps(source))
    assert copy.units() == units
    with ThreadPoolExecutor(8) as pool:
        backwards = list(pool.map(lambda unit: list(copy.documents(unit, Skipped())), units[::-1]))
    assert backwards[::-1] == expected
    assert sum(map(len, expected)) == 4 * (50 + 1 + 50 + 50)


def test_the_fingerprint_changes_when_files_are_added_removed_or_changed(library):
    source = TextSource([str(library)])
    seen = {source.fingerprint()}
    assert pickle.loads(pickle.dumps(source)).fingerprint() in seen
    (library / "new.txt").write_text("new")
    seen.add(source.fingerprint())
    (library / "new.txt").write_text("newer")
    seen.add(source.fingerprint())
    os.utime(library / "new.txt", ns=(1, 1))
    seen.add(source.fingerprint())
    (library / "0.txt").unlink()
    seen.add(source.fingerprint())
    assert len(seen) == 5


def test_the_standard_library_comes_in_a_unit_per_file():
    source = pickle.loads(pickle.dumps(PythonSource()))
    units = source.units()
    assert len(units) > 300
    assert [u.path for u in units] == [u.path for u in PythonSource().units()]
    (unit,) = [u for u in units if u.path.endswith("/textwrap.py")]
    (text,) = source.documents(unit, Skipped())
    assert "def dedent(" in text
    assert unit.size == len(text.encode())
    assert not [u for u in units if "/site-packages/" in u.path or "/test/" in u.path]
    assert source.fingerprint() == PythonSource().fingerprint()


def test_odd_python_files_are_counted(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "no.py").write_text("no")
    (tmp_path / "gone.py").write_text("gone")
    source = PythonSource(tmp_path)
    units, skipped = source.units(), Skipped()
    (tmp_path / "gone.py").unlink()
    assert [text for unit in units for text in source.documents(unit, skipped)] == ["x = 1\n"]
    assert skipped == {"empty": 1, "not UTF-8": 1, "cannot be read": 1}
