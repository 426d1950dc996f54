"""Corpora of Megatron-LM and datatrove: every token of every document as its writer meant it, or an error with file and
place."""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data import token_corpora
from nsa.data.build import build_data
from nsa.data.prepare import prepare
from nsa.data.sources.text import TextSource
from nsa.data.token_corpora import CorpusTokens, open_corpora
from nsa.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.errors import ConfigError, DataError
from tests.data.corpora import write_datatrove, write_megatron, write_texts
from tests.data.test_broken_files import damaged
from tests.data.test_prepare import nsa_data

TEXTS = [f"file {n}\nwörd " + "word " * (n % 37) for n in range(200)]
TOKENIZER = ByteTokenizer()
END = TOKENIZER.separator
DOCUMENTS = [[[1, 2, 3], [4, END]], [[5, END]], [[]], [[END]], [], [[6], [], [7, 8]], [[9, END, 10, END]]]
EXPECTED = [[END, 1, 2, 3, 4], [END, 5], [END, 6, 7, 8], [END, 9, END, 10]]


def documents_of(kind, *paths, tokenizer=TOKENIZER, threads=1):
    found, _ = open_corpora(kind, [str(path) for path in paths], tokenizer, threads)
    corpus = found.select(np.ones(len(found.lengths), bool))
    documents = []
    for number, length in enumerate(found.lengths.tolist()):
        whole = np.empty(length, corpus.dtype)
        corpus.read(number, 0, whole)
        rest = np.empty(length - 1, corpus.dtype)
        corpus.read(number, 1, rest)
        assert rest.tolist() == whole[1:].tolist()
        documents.append(whole.tolist())
    return documents


def refusal(kind, path):
    with pytest.raises(DataError) as caught:
        open_corpora(kind, [str(path)], TOKENIZER)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("letter", "BHihq")
@pytest.mark.parametrize("block", [3, 1 << 22])
def test_every_document_of_a_megatron_pair_is_read(tmp_path, monkeypatch, legacy, letter, block):
    monkeypatch.setattr(token_corpora, "BLOCK_TOKENS", block)
    write_megatron(tmp_path / "a.v1", DOCUMENTS, letter, legacy=legacy)
    for given_path in ("", "a.v1", "a.v1.bin", "a.v1.idx", "*.idx"):
        assert documents_of("megatron", tmp_path / given_path, threads=2) == EXPECTED
    write_megatron(tmp_path / "b", [[[1, END]]], "i", legacy=not legacy)
    write_megatron(tmp_path / "c", [], "B", legacy=legacy)
    assert documents_of("megatron", tmp_path) == [*EXPECTED, [END, 1]]


@pytest.mark.parametrize(("letter", "metadata"), [("H", None), ("I", None), ("H", "gpt2"), ("I", "org/name|4")])
def test_every_document_of_a_datatrove_file_is_read(tmp_path, letter, metadata):
    write_datatrove(tmp_path / "00000_00001_shuffled.ds", DOCUMENTS, letter, metadata)
    write_datatrove(tmp_path / "00001_00000_shuffled.ds", [])
    assert documents_of("datatrove", tmp_path) == EXPECTED
    assert documents_of("datatrove", tmp_path / "*.ds") == EXPECTED


def section(kind, folder):
    """The data section of the same documents as shards or as a corpus."""
    if kind == "prepared":
        texts = folder / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        prepare(TextSource([str(texts)]), TOKENIZER, folder / "shards", workers=1)
        return {"source": "prepared", "paths": [str(folder / "shards")]}
    return write_texts(kind, folder / "corpus", TEXTS, end=(END,) if kind == "megatron" else ())


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_a_corpus_gives_the_batches_of_shards_of_the_same_documents(tmp_path, kind, packing):
    options = {"validation_fraction": 0.1, "packing": packing}
    train = TrainConfig(seq_len=64, batch_size=4)
    one, other = (
        build_data(DataConfig.model_validate({**section(k, tmp_path), **options}), train, TOKENIZER)
        for k in (kind, "prepared")
    )
    for number in range(0, 300, 7):
        for side in ("train", "validation"):
            a, b = (getattr(data, side).batch(number, 3) for data in (one, other))
            assert a.inputs.equal(b.inputs)
            assert a.targets.equal(b.targets)
            assert a.cu_seqlens.equal(b.cu_seqlens)
    text = build_data(DataConfig(source="text", paths=[str(tmp_path / "texts.jsonl")], **options), train, TOKENIZER)
    assert one.summary.partition(": ")[2] == text.summary.partition(": ")[2]


def test_a_changed_token_is_another_fingerprint(tmp_path):
    train, data = TrainConfig(seq_len=64, batch_size=4), DataConfig.model_validate(section("megatron", tmp_path))
    before = build_data(data, train, TOKENIZER).fingerprint
    path = tmp_path / "corpus" / "corpus_text_document.bin"
    path.write_bytes(path.read_bytes().replace(b"file 77\n", b"file 78\n"))
    assert build_data(data, train, TOKENIZER).fingerprint != before


def test_a_resumed_run_scans_a_corpus_again_only_if_it_changed(tmp_path, monkeypatch):
    train, run = TrainConfig(seq_len=64, batch_size=4), tmp_path / "run"
    config = write_texts("megatron", tmp_path / "corpus", TEXTS)
    write_megatron(tmp_path / "corpus" / "b", [], "B")
    data = DataConfig.model_validate({"mixture": [config, {"source": "synthetic"}]})
    scans, scan = [], CorpusTokens.scan
    monkeypatch.setattr(CorpusTokens, "scan", lambda self, block: scans.append(block) or scan(self, block))

    def read(**more):
        before = len(scans)
        built = build_data(data, train, TOKENIZER, run, **more)
        return built.fingerprint, built.train.batch(0, 40).inputs.tolist(), len(scans) > before

    expected = read(rank=1)[:2]
    assert read() == (*expected, True), "rank 1 wrote nothing"
    assert read() == read(rank=1) == (*expected, False)
    cache = run / "data_index_0" / "data_index.docs"
    whole = cache.read_bytes()
    other = whole[64:-8] + bytes(8)  # the last document has no tokens
    lying = whole[:32] + hashlib.sha256(other).digest() + other
    for broken in (b"", whole[:-16], whole[:-1] + b"x", b"x" + whole[1:], lying):
        cache.write_bytes(broken)
        assert read() == (*expected, True)
        assert cache.read_bytes() == whole
    path = tmp_path / "corpus" / "corpus_text_document.bin"
    path.write_bytes(path.read_bytes().replace(b"file 77\n", b"file 78\n"))
    found = read()
    assert found[0] != expected[0]
    assert found[2]


def change(path, offset, letter, value):
    content = bytearray(path.read_bytes())
    struct.pack_into("<" + letter, content, offset, value)
    path.write_bytes(content)


# Of a pair with the sequences of DOCUMENTS: the file to change, and the start of its message.
SEQUENCES, BOUNDS = 9, 8
MMAP = [
    (0, "B", 0, r"a\.idx: is not an index of Megatron-LM"),
    (9, "Q", 2, r"a\.idx: has format version 2"),
    (17, "B", 7, r"a\.idx: has dtype code 7"),
    (17, "B", 4, r"a\.idx: sequence 1 does not start where the last one ends"),
    (18, "Q", 2**63, r"a\.idx: has \d+ bytes and should have \d+ \(9223372036854775808 sequences\)"),
    (26, "Q", BOUNDS + 1, r"a\.idx: has \d+ bytes and should have"),
    (34 + 4, "i", -2, r"a\.idx: sequence 2 does not start"),
    (34 + 4 * 8, "i", 500, r"a\.bin: has 30 bytes and should have 1022 \(a\.idx\)"),
    (34 + 12 * SEQUENCES, "q", 1, r"a\.idx: its documents do not contain all of its 9 sequences"),
    (34 + 12 * SEQUENCES + 8, "q", 7, r"a\.idx: document 1 ends before it starts"),
    (34 + 12 * SEQUENCES + 8 * 7, "q", 2**62, r"a\.idx: its documents do not contain"),
]
LEGACY = [
    (24, "Q", 4, r"a\.idx: its sequences are not rows of tokens of 2 bytes"),
    (56 + 8, "q", 7, r"a\.idx: its sequences are not rows"),
    (56 + 8 * 10 + 8, "q", -3, r"a\.idx: sequence 0 has another size"),
    (56 + 16 * 10 + 8, "q", 2**62, r"a\.idx: sequence 1 has another size"),
]


@pytest.mark.parametrize(("legacy", "case"), [(kind, c) for kind, cases in enumerate([MMAP, LEGACY]) for c in cases])
def test_a_wrong_number_in_a_megatron_index_is_named(tmp_path, legacy, case):
    write_megatron(tmp_path / "a", DOCUMENTS, legacy=bool(legacy))
    change(tmp_path / "a.idx", *case[:3])
    with pytest.raises(DataError, match=case[3]):
        open_corpora("megatron", [str(tmp_path)], TOKENIZER)


def test_a_wrong_datatrove_file_is_named(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", DOCUMENTS, "H", "gpt2|2")
    index, about = tmp_path / "a.ds.index", tmp_path / "a.ds.metadata"
    whole = index.read_bytes()
    change(index, 8, "Q", 2)
    assert f"{index}: document 1 ends before it starts" in refusal("datatrove", path)
    index.write_bytes(whole[:-3])
    assert f"{index}: has 53 bytes" in refusal("datatrove", path)
    index.write_bytes(whole[:-8])
    assert f"{about}: says '15' tokens, the index says 11" in refusal("datatrove", path)
    about.unlink()
    assert f"{path}: has 30 bytes and should have 22 (a.ds.index)" in refusal("datatrove", path)
    index.unlink()
    assert f"{index}: cannot be read: No such file" in refusal("datatrove", path)
    index.write_bytes(whole)
    (tmp_path / "a.ds.loss").write_bytes(bytes(15))
    assert f"{path}: has a loss mask, a.ds.loss" in refusal("datatrove", path)


@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_tokens_that_are_cut_lost_or_not_in_the_vocabulary_are_named(tmp_path, kind):
    documents = [[[1, 2]], [[3, 300]], [[4]]]
    write = write_megatron if kind == "megatron" else write_datatrove
    write(tmp_path / ("a" if kind == "megatron" else "a.ds"), documents)
    path = tmp_path / ("a.bin" if kind == "megatron" else "a.ds")
    place = f"{path}, document 1, token 1: 300 is not in the vocabulary of 'bytes' (256 tokens); set data.tokenizer"
    assert place in refusal(kind, tmp_path)
    os.truncate(path, 7)
    assert f"{path}: has 7 bytes and should have 10" in refusal(kind, tmp_path)
    path.unlink()
    assert "a.bin: cannot be read: No such file" in refusal(kind, tmp_path) or kind == "datatrove"
    assert "no such file or folder" in refusal(kind, tmp_path / "nowhere")
    assert "cannot be read: File name too long" in refusal(kind, "x" * 300)


def test_negative_tokens_are_named(tmp_path):
    write_megatron(tmp_path / "a", [[[1, -1]]], "i")
    assert "document 0, token 1: -1 is not in the vocabulary" in refusal("megatron", tmp_path)


def test_documents_that_all_end_with_another_special_token_are_refused(tmp_path):
    train_bpe(["some words of a vocabulary"], tmp_path / "own.json", vocab_size=262, max_bytes=1 << 10)
    spec = json.loads((tmp_path / "own.json").read_text())
    other = {**spec["added_tokens"][0], "id": 262, "content": "</s>"}
    (tmp_path / "own.json").write_text(json.dumps({**spec, "added_tokens": [*spec["added_tokens"], other]}))
    write_megatron(tmp_path / "a", [[[1, 2, 262]], [[3, 262]]])
    with pytest.raises(DataError, match=r"data\.separator: all documents of .*a\.bin end with the special token 262"):
        documents_of("megatron", tmp_path, tokenizer=load_tokenizer(str(tmp_path / "own.json")))
    right = load_tokenizer(str(tmp_path / "own.json"), separator="</s>")
    assert documents_of("megatron", tmp_path, tokenizer=right) == [[262, 1, 2], [262, 3]]


@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_a_file_that_changes_while_it_is_read_is_an_error_that_names_it(tmp_path, kind):
    data = DataConfig.model_validate(write_texts(kind, tmp_path / "corpus", TEXTS))
    loader = build_data(data, TrainConfig(seq_len=64, batch_size=4), TOKENIZER).train
    loader.batch(0, 40)
    (path,) = (p for p in (tmp_path / "corpus").iterdir() if p.suffix in (".bin", ".ds"))
    path.chmod(0o444)  # no change of its tokens
    loader.batch(0, 40)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=f"{path.name}: changed after it was opened"):
        loader.batch(0, 40)


@pytest.mark.parametrize("name", ["a.idx", "a.bin", "legacy.idx", "a.ds.index", "a.ds.metadata", "a.ds"])
def test_a_damaged_file_gives_documents_or_is_refused_by_name(tmp_path, name):
    kind = "datatrove" if ".ds" in name else "megatron"
    write_datatrove(tmp_path / "a.ds", DOCUMENTS, "H", "bytes|2")
    write_megatron(tmp_path / name.split(".", maxsplit=1)[0], DOCUMENTS, legacy="legacy" in name)
    path = tmp_path / name
    corpus = tmp_path / "a.ds" if kind == "datatrove" else path.with_suffix(".idx")

    @settings(max_examples=40)
    @given(damaged([path.read_bytes()]))
    def check(data):
        path.write_bytes(data)
        message, documents = str(path.with_suffix("")), []
        try:
            documents = documents_of(kind, corpus)
        except DataError as error:
            message = str(error)
        assert str(path.with_suffix("")) in message
        assert all(document[0] == END for document in documents)

    check()


@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_stats_and_verify_read_a_corpus(tmp_path, kind):
    write_texts(kind, tmp_path / "corpus", ["", *TEXTS])
    arguments = [f"data.source={kind}", f"data.paths=[{tmp_path / 'corpus'}]"]
    tokens = sum(1 + len(text.encode()) for text in TEXTS)
    shown = nsa_data("stats", *arguments)
    assert f"200 documents, {tokens:,} tokens" in shown
    assert "skipped 1 (empty)" in shown
    assert "--- sample 3 ---" in shown
    assert "wörd" in shown
    assert f"{kind}: ok, 1 file, 200 documents, {tokens:,} tokens" in nsa_data("verify", *arguments)
    (path,) = (p for p in (tmp_path / "corpus").iterdir() if p.suffix in (".bin", ".ds"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataError, match=path.name):
        nsa_data("verify", *arguments)
    with pytest.raises(ConfigError, match=r"data\.source: nothing to verify in 'python'; give a FOLDER of shards"):
        nsa_data("verify")
    with pytest.raises(ConfigError, match=f"data.source: '{kind}' has no text to read"):
        nsa_data("prepare", str(tmp_path / "out"), *arguments)
