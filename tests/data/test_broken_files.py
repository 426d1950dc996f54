"""Damaged, lying and odd files: documents or a `DataError` with the file's name; no other exception, hang or crash."""

import gzip
import io
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.sources import readers
from nsa.data.sources.base import MAX_DOCUMENT_BYTES, Skipped
from nsa.data.sources.readers import parquet_documents
from nsa.data.sources.text import TextSource
from nsa.errors import DataError
from tests.data.test_sources import jsonl, zstd

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"Document {i} of many, größer und größer. " * (1 + i % 5) for i in range(60)]


def read(path, **options):
    source, skipped = TextSource([str(path)], **options), Skipped()
    return [text for unit in source.units() for text in source.documents(unit, skipped)], skipped


def refusal(path, **options):
    """The message a file is refused with. It names the file and is one line."""
    with pytest.raises(DataError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def read_or_refuse(path, **options):
    """The documents of a file, none when it is refused by name. Whatever else is raised fails the test."""
    try:
        return read(path, **options)[0]
    except DataError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return []


def parquet(table, **options):
    buffer = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.table({"text": table}), buffer, **options)
    return buffer.getvalue()


def write(path, data):
    path.write_bytes(data)
    return path


# Damage of every kind, anywhere.

NESTED = pa.table({"text": TEXTS, "nested": [{"a": [i]} for i in range(60)]})
WHOLE = {
    "a.txt": ["".join(TEXTS).encode()],
    "a.jsonl": [jsonl(TEXTS)],
    "a.jsonl.gz": [gzip.compress(jsonl(TEXTS)), gzip.compress(jsonl(TEXTS[:30])) + gzip.compress(jsonl(TEXTS[30:]))],
    "a.jsonl.zst": [zstd(jsonl(TEXTS)), zstd(jsonl(TEXTS[:30])) + zstd(jsonl(TEXTS[30:]))],
    "a.parquet": [
        parquet(NESTED, row_group_size=25),
        parquet(TEXTS, compression="zstd", data_page_version="2.0", data_page_size=500),
        parquet(TEXTS, compression="none", use_dictionary=False, write_page_index=True),
        parquet(TEXTS, compression="gzip", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}),
        parquet(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), write_page_checksum=True),
        parquet(pa.table({"text": pa.array(TEXTS).cast(pa.large_string())}), compression="lz4", store_schema=False),
    ],
}


@st.composite
def damaged(draw, wholes):
    """A file with one to four damages, half of them near its end, where parquet keeps its footer."""
    data = bytearray(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.integers(1, 4))):
        last = max(len(data) - 1, 0)
        place = draw(st.one_of(st.integers(0, last), st.integers(max(0, last - 900), last)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "remove"]))
        junk = draw(st.binary(min_size=1, max_size=30))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = junk
        elif kind == "overwrite":
            data[place : place + len(junk)] = junk
        elif kind == "remove":
            del data[place : place + len(junk)]
    return bytes(data)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_gives_documents_or_is_refused_by_name(name, part, tmp_path):
    @settings(max_examples=(600 if name == "a.parquet" else 200) // part)
    @given(damaged(WHOLE[name]))
    def check(data):
        for text in read_or_refuse(write(tmp_path / name, data), range_bytes=700):
            assert text.strip()
            text.encode("utf-8")

    for data in WHOLE[name]:
        documents, skipped = read(write(tmp_path / name, data), range_bytes=700)
        assert documents == (["".join(TEXTS)] if name == "a.txt" else TEXTS)
        assert skipped == {}
    check()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_was_cut_anywhere_is_refused(name, tmp_path):
    whole = WHOLE[name][0]
    for kept in range(0, len(whole), 1 + len(whole) // 100):
        refusal(write(tmp_path / name, whole[:kept]))


def test_a_footer_that_pyarrow_cannot_bear_does_not_end_the_process(tmp_path):
    whole = parquet(["a", "b"], compression="none")
    # The column becomes required instead of optional: the counts of levels among its statistics are one too many.
    element = b"\x15\x0c\x25\x02\x18\x04text"
    assert whole.count(element) == 1
    path = write(tmp_path / "a.parquet", whole.replace(element, element.replace(b"\x25\x02", b"\x25\x00")))
    asked = f"import pyarrow.parquet as pq; pq.ParquetFile({str(path)!r}).metadata.row_group(0).column(0)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=False)
    assert done.returncode == 0 or b"histogram size mismatch" in done.stderr, "not the damage that is meant"
    read_or_refuse(path)


# Compressed files.


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)])
def test_an_error_in_a_compressed_file_names_the_position(name, pack, tmp_path):
    path, codec = tmp_path / name, {"gz": "gzip", "zst": "zstd"}[name.rsplit(".", 1)[1]]
    noise = random.Random(0).randbytes(2 << 20).hex()
    long = jsonl(noise[i : i + 1000] for i in range(0, len(noise), 1000))
    packed = pack(long)
    message = refusal(write(path, packed[: len(packed) // 2]))
    place = int(re.search(rf"its {codec} data is broken after (\d+) bytes of contents", message)[1])
    assert 1 << 20 <= place < len(long) // 2
    assert f"its {codec} data is broken after 0 bytes" in refusal(write(path, b"certainly no magic number"))
    assert f"its {codec} data is broken" in refusal(write(path, pack(jsonl(TEXTS)) + b"something else"))
    assert f"is empty, a {codec} file never is" in refusal(write(path, b""))
    assert f"its {codec} data is broken after 0 bytes" in refusal(write(path, long))


PRELUDE = """\
import sys
from nsa.data.sources.base import Skipped
from nsa.data.sources.text import TextSource
from nsa.errors import DataError

def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

source, skipped, texts = TextSource(sys.argv[1:]), Skipped(), []
before = kib("VmRSS")
try:
    for unit in source.units():
        texts += source.documents(unit, skipped)
except DataError as error:
    print("refused:", error)
print(texts, dict(skipped))
print((kib("VmHWM") - before) // 1024)
"""


def read_apart(path):
    """What a process of its own prints, and by how many MiB its memory grew at most."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE, str(path)], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120
    )
    *printed, grown = done.stdout.splitlines()
    return "\n".join(printed), int(grown)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst"])
def test_a_bomb_is_refused_before_it_fills_memory(name, tmp_path):
    path = tmp_path / name
    million = bytes(1 << 20)
    path.write_bytes((gzip.compress(million) if name.endswith(".gz") else zstd(million)) * 400)
    printed, grown = read_apart(path)
    assert "expands more than 200-fold" in printed
    assert str(path) in printed
    # A .txt is held until its end is known; the rest of the contents never.
    assert grown < (330 if name == "a.txt.gz" else 200)


# Lines.


def test_a_line_of_50_megabytes_is_left_out_and_its_neighbours_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "after"}\n')
    assert read(path) == (["before", "after"], {"longer than 32 MiB": 1})
    assert read(path, range_bytes=1 << 40) == (["before", "after"], {"longer than 32 MiB": 1})
    printed, grown = read_apart(path)
    assert printed == "['before', 'after'] {'longer than 32 MiB': 1}"
    assert grown < 100
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress(path.read_bytes(), 1))
    assert read(packed) == (["before", "after"], {"longer than 32 MiB": 1})


BAD_LINES = [
    (b'{"text": "cut', "not valid JSON: Unterminated string"),
    (b"[" * 100_000, "not valid JSON"),
    (b"1" * 5000, "not valid JSON"),
    (b'{"body": "a", "id": 3}', "no field 'text'; it has body, id; set data.text_field"),
    (b"{}", "no field 'text'; it has none; set data.text_field"),
    (b'{"body": 1, "' + b"x" * 5000 + b'": 2}', "no field 'text'; it has body, ...; set data.text_field"),
    (b'"text"', "no field 'text': the line is a str, not an object; write each line as {\"text\": ...}"),
    (b'{"text": ["a"]}', "field 'text' must be a text, got list; set data.text_field"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_a_bad_line_is_named_by_number_or_by_its_byte(line, reason, tmp_path):
    before = jsonl(["one", "two"])
    path = write(tmp_path / "a.jsonl", before + b"\n" + line + b"\n" + jsonl(["four"]))
    assert f"{path}, line 4: {reason}" in refusal(path)
    assert f"{path}, byte {len(before) + 1}: {reason}" in refusal(path, range_bytes=len(before))
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress(path.read_bytes()))
    assert f"{packed}, line 4: {reason}" in refusal(packed)


# Text that is none.


def test_bytes_that_are_not_utf8_are_named_in_every_format(tmp_path):
    good, bad = jsonl(["one", "two"]), b'{"text": "caf\xe9"}\n'
    place = len(good) + bad.index(b"\xe9")
    line = write(tmp_path / "a.jsonl", good + bad)
    assert f"{line}: byte {place} is not valid UTF-8 (line 3); convert the file" in refusal(line)
    assert f"{line}: byte {place} is not valid UTF-8; convert" in refusal(line, range_bytes=len(good))
    for name, pack in (("b.jsonl.gz", gzip.compress), ("b.jsonl.zst", zstd)):
        packed = write(tmp_path / name, pack(good + bad))
        assert f"{packed}: byte {place} is not valid UTF-8 (line 3)" in refusal(packed)
    text = write(tmp_path / "a.txt", b"\xef\xbb\xbfcaf\xe9")
    assert f"{text}: byte 6 is not valid UTF-8; convert the file" in refusal(text)
    surrogates = write(tmp_path / "c.jsonl", rb'{"text": "lone \ud800, paired \ud83d\ude00"}')
    assert read(surrogates)[0] == ["lone ?, paired 😀"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_parquet_rows_that_are_not_utf8_are_left_out_one_by_one(kind, tmp_path):
    rows = pa.array([b"good", b"caf\xe9", None, b"\xed\xa0\x80", b"fine"]).cast(pa.binary())
    strings = pa.StringArray.from_buffers(len(rows), rows.buffers()[1], rows.buffers()[2], rows.buffers()[0])
    table = pa.table({"text": strings if kind == pa.string() else strings.cast(kind)})
    path = write(tmp_path / "a.parquet", parquet(table))
    assert read(path) == (["good", "fine"], {"not UTF-8": 2, "no text": 1})


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()], ids=str)
def test_parquet_rows_that_are_too_long_are_left_out(kind, tmp_path):
    rows = pa.array(["before", "ä" * (MAX_DOCUMENT_BYTES // 2 + 1), "x" * MAX_DOCUMENT_BYTES, None]).cast(kind)
    path = write(tmp_path / "a.parquet", parquet(pa.table({"text": rows}), compression="zstd"))
    documents, skipped = read(path)
    assert [len(text) for text in documents] == [6, MAX_DOCUMENT_BYTES]
    assert skipped == {"longer than 32 MiB": 1, "no text": 1}


def test_files_without_contents(tmp_path):
    assert read(write(tmp_path / "a.txt", b"")) == ([], {"empty": 1})
    assert read(write(tmp_path / "b.txt", b" \n\t")) == ([], {"empty": 1})
    assert read(write(tmp_path / "c.txt", b"\xef\xbb\xbf")) == ([], {"empty": 1})
    assert read(write(tmp_path / "a.jsonl", b"")) == ([], {})
    assert read(write(tmp_path / "b.jsonl", b"\n\r\n\n")) == ([], {})
    assert read(write(tmp_path / "a.jsonl.gz", gzip.compress(b""))) == ([], {})
    assert read(write(tmp_path / "a.jsonl.zst", zstd(b""))) == ([], {})
    assert read(write(tmp_path / "a.txt.gz", gzip.compress(b""))) == ([], {"empty": 1})
    assert "cannot be read as parquet" in refusal(write(tmp_path / "a.parquet", b""))


def test_a_text_file_too_long_for_one_document_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)  # a hole: it takes no room on the disk
    assert "more than 1024 MiB, too long for one document; split it, or make it a .jsonl" in refusal(path)
    monkeypatch.setattr(readers, "MAX_TEXT_BYTES", 5 << 20)
    assert "too long for one document" in refusal(write(tmp_path / "b.txt.gz", gzip.compress(b"a " * (3 << 20))))


# Parquet.


def test_a_column_that_is_missing_or_not_text_is_named_with_the_others(tmp_path):
    table = pa.table(
        {
            "id": [1],
            "body": ["a"],
            "blob": [b"a"],
            "tags": [["a"]],
            "meta": [{"text": "a"}],
            "codes": pa.array([1]).dictionary_encode(),
        }
    )
    path = write(tmp_path / "a.parquet", parquet(table))
    message = f"{path}: no column 'text'; it has id, body, blob, tags, meta, codes; set data.text_field to the one"
    assert message in refusal(path)
    assert "no column 'meta.text'" in refusal(path, text_field="meta.text")
    for field, kind in {"id": "int64", "blob": "binary", "tags": "list<", "meta": "struct<", "codes": "int64"}.items():
        assert f"column {field!r} must be a text, its type is {kind}" in refusal(path, text_field=field)
    assert read(path, text_field="body")[0] == ["a"]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    assert "2 columns are named 'text'" in refusal(write(tmp_path / "b.parquet", parquet(twice)))


def test_a_damaged_page_is_named_with_its_row_group(tmp_path):
    whole = parquet(TEXTS, row_group_size=20, compression="none", use_dictionary=False, write_page_checksum=True)
    damaged = bytearray(whole)
    damaged[whole.index(b"Document 25 of") + 3] ^= 1
    path = write(tmp_path / "a.parquet", bytes(damaged))
    assert f"{path}, row group 1: cannot be read as parquet: " in refusal(path)


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip"])
@pytest.mark.parametrize("claim", [b"\xfe\xff\xff\x7f", b"\x82\x80\x80\x01"], ids=["128-MiB", "1-MiB"])
def test_a_page_that_unpacks_to_another_size_than_it_claims_is_refused(claim, compression, tmp_path):
    data = bytearray(parquet(["abc" * 1_000_000], compression=compression, use_dictionary=False))
    assert data[4:7] == b"\x15\x00\x15"  # the first page's kind; then its size in four bytes
    data[7:11] = claim
    assert "row group 0: cannot be read as parquet" in refusal(write(tmp_path / "a.parquet", bytes(data)))


def test_a_row_group_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    # One long text stands in the dictionary; the rows only point to it.
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), pa.array(["x" * 100_000]))
    path = write(tmp_path / "a.parquet", parquet(pa.table({"text": rows}), store_schema=False))
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(readers, "MAX_CHUNK_BYTES", 20_000_000)
    assert TextSource([str(path)]).units()[0].size < 200_000
    assert "row group 0: unpacks to 102404096 bytes or more" in refusal(path)
    monkeypatch.setattr(readers, "MAX_CHUNK_BYTES", 50_000)
    assert "over the limit of 50000; write the file again with smaller row groups" in refusal(path)


@pytest.mark.parametrize("folded", [True, False])
def test_a_parquet_bomb_is_refused_after_one_batch(folded, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BOMB_BYTES", 3_000_000)
    monkeypatch.setattr(readers, "BATCH_BYTES", 1_000_000)
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * 100_000]))
    table = pa.table({"text": rows if folded else rows.dictionary_decode()})
    options = {"store_schema": False, "dictionary_pagesize_limit": 1 << 20, "compression": "zstd"}
    path = write(tmp_path / "a.parquet", parquet(table, use_dictionary=folded, **options))
    message = refusal(path)
    assert "row group 0: expands more than 200-fold" in message
    packed, unpacked = map(int, re.search(r"\((\d+) bytes give (\d+) or more\)", message).groups())
    assert packed <= path.stat().st_size
    assert unpacked < 4_100_000 if folded else unpacked > 50_000_000, "plain pages are refused by the footer"


def test_a_missing_row_group_is_named():
    with pytest.raises(DataError, match=r"name, row group 7: .* it has 1 row groups"):
        list(parquet_documents("name", io.BytesIO(parquet(TEXTS)), 7, "text", Skipped()))


# Files that change, vanish or may not be read.


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_vanishes_is_named_with_the_reason(name, tmp_path):
    path = write(tmp_path / name, WHOLE[name][0])
    source = TextSource([str(path)])
    unit = source.units()[-1]
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}: cannot be read: No such file or directory"):
        list(source.documents(unit, Skipped()))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_got_shorter_is_refused(name, tmp_path):
    path = write(tmp_path / name, WHOLE[name][0])
    source = TextSource([str(path)], range_bytes=1000)
    unit = source.units()[-1]
    write(path, path.read_bytes()[:100])
    with pytest.raises(DataError, match=name):
        list(source.documents(unit, Skipped()))


def test_a_file_or_folder_that_may_not_be_read_is_named_with_the_reason(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", b"text")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert f"{path}: cannot be read: Permission denied; fix it" in refusal(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", refuse)
        assert "cannot be searched: Permission denied" in refusal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", refuse)
        assert "cannot be read: Permission denied" in refusal(path)
