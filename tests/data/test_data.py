"""What a run reads: whole, split without overlap, and the same every time."""

import gzip
import hashlib
import json

import numpy as np
import pytest
import torch

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.corpus import BATCH, tokenise
from nsa.data.prepare import prepare
from nsa.data.sequences import Concat, SyntheticSequences
from nsa.data.sources.base import Skipped
from nsa.data.sources.text import PythonSource, TextSource
from nsa.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa.data.waiting import Activity
from nsa.errors import DataError

TOKENIZER = ByteTokenizer()


def numbered(count, length=40):
    return [f"document {i} " + chr(97 + i % 26) * (length + i % 7) for i in range(count)]


def documents_of(source, skipped):
    return [text for unit in source.units() for text in source.documents(unit, skipped)]


def corpora(documents, fraction):
    return tokenise(documents, TOKENIZER).split(fraction)


def data_of(tmp_path, documents, *, seq_len=32, seed=0, **options):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    config = DataConfig(source="text", paths=[str(path)], **{"validation_fraction": 0.2, **options})
    return build_data(config, TrainConfig(seq_len=seq_len, seed=seed), TOKENIZER)


@pytest.mark.parametrize("text", ["", "plain", "naïve ☃ 😀", "\x00 and \x7f", "\ufeffmark"])
def test_any_text_survives_the_byte_tokenizer(text):
    ids = TOKENIZER.encode(text).tolist()
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.separator not in ids
    assert sum(TOKENIZER.byte_lengths[i] for i in ids) == len(text.encode())


def test_an_epoch_holds_every_training_document_once_and_whole():
    documents = numbered(30)
    training, _ = corpora(documents, 0.0)
    stream = Concat(training, seq_len=32, seed=1)
    for epoch in range(3):
        tokens, borders = stream.read(epoch * stream.length, stream.length)
        assert (tokens[borders] == TOKENIZER.separator).all()
        ends = [*borders[1:], stream.length]
        read = [TOKENIZER.decode(tokens[a:b].tolist()) for a, b in zip(borders, ends, strict=True)]
        assert sorted(read) == sorted(documents)
        assert read != documents


def test_reading_in_pieces_equals_reading_at_once():
    training, _ = corpora(numbered(9), 0.0)
    stream = Concat(training, seq_len=32, seed=1)
    count = 2 * stream.length + 17
    whole, borders = stream.read(0, count)
    pieces = [stream.read(start, min(13, count - start)) for start in range(0, count, 13)]
    assert np.array_equal(whole, np.concatenate([tokens for tokens, _ in pieces]))
    moved = [b + 13 * i for i, (_, inside) in enumerate(pieces) for b in inside]
    assert borders.tolist() == moved


def test_the_split_follows_the_text_and_never_overlaps():
    documents = numbered(200) + numbered(50)  # fifty come twice
    training, validation = corpora(documents, 0.2)

    def texts(corpus):
        found = []
        for document in range(corpus.num_documents):
            tokens = np.empty(corpus.lengths[document], dtype=corpus.dtype)
            corpus.read(document, 0, tokens)
            found.append(TOKENIZER.decode(tokens.tolist()))
        return found

    train_texts, validation_texts = texts(training), texts(validation)
    assert not set(train_texts) & set(validation_texts)
    assert sorted(train_texts + validation_texts) == sorted(documents)
    assert 0.1 < len(validation_texts) / len(documents) < 0.3
    grown, _ = corpora([*numbered(300, length=60), *documents], 0.2)
    assert set(train_texts) <= set(texts(grown)), "new documents must not move old ones"


def test_few_documents_still_give_a_validation_document():
    training, validation = corpora(["one " * 9, "two " * 9, "one " * 9], 0.001)
    assert {training.num_documents, validation.num_documents} == {1, 2}


def test_a_batch_is_a_pure_function_of_seed_and_position(tmp_path):
    first = data_of(tmp_path, numbered(40)).train
    second = data_of(tmp_path, numbered(40)).train
    backwards = [second.batch(n, 3) for n in (90, 0, 33)][::-1]
    for n, other in zip((33, 0, 90), backwards, strict=True):
        batch = first.batch(n, 3)
        assert torch.equal(batch.inputs, other.inputs)
        assert torch.equal(batch.targets, other.targets)
        assert torch.equal(batch.cu_seqlens, other.cu_seqlens)
    whole = first.batch(0, 6)
    parts = [first.batch(0, 2), first.batch(2, 4)]
    assert torch.equal(whole.inputs, torch.cat([p.inputs for p in parts], dim=1))
    reseeded = data_of(tmp_path, numbered(40), seed=1).train
    assert not torch.equal(whole.inputs, reseeded.batch(0, 6).inputs)


def test_an_epoch_of_sequences_covers_the_stream_once_in_mixed_order(tmp_path):
    loader = data_of(tmp_path, numbered(60)).train
    cut = loader.sequences
    starts = [cut.first_token(n) for n in range(cut.count)]
    assert sorted(starts) == [i * 32 for i in range(cut.count)]
    assert starts != sorted(starts)
    assert cut.first_token(cut.count) >= cut.length


def test_targets_are_the_next_tokens_and_borders_are_where_documents_begin(tmp_path):
    batch = data_of(tmp_path, numbered(40)).train.batch(0, 8)
    inputs, targets = batch.inputs.view(8, 32), batch.targets.view(8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    separators = (batch.inputs[0] == TOKENIZER.separator).nonzero().flatten().tolist()
    expected = sorted({*separators, *range(0, 257, 32)})
    assert batch.cu_seqlens.tolist() == expected
    assert batch.cu_seqlens.dtype == torch.int32


def test_without_isolation_a_batch_has_no_borders(tmp_path):
    isolated = data_of(tmp_path, numbered(40)).train.batch(5, 4)
    batch = data_of(tmp_path, numbered(40), isolate_documents=False).train.batch(5, 4)
    assert batch.cu_seqlens is None
    assert torch.equal(batch.inputs, isolated.inputs.view(4, 32))


def test_synthetic_text_repeats_with_its_seed_and_splits_without_overlap():
    def documents(seed, validation, count=60):
        sequences = SyntheticSequences(256, seed, TOKENIZER.separator, validation=validation)
        rows = [sequences.row(number) for number in range(count)]
        for row in rows:
            assert row.starts.tolist() == [0]
            assert row.inputs[0] == row.targets[-1] == TOKENIZER.separator
            assert np.array_equal(row.inputs[1:], row.targets[:-1])
        return [hashlib.sha256(row.inputs.tobytes()).digest() for row in rows]

    assert documents(0, False) == documents(0, False)
    assert documents(0, False) != documents(1, False)
    assert len(set(documents(0, False))) == 60
    assert not set(documents(0, False)) & set(documents(0, True))


def test_synthetic_tokens_are_ids_of_a_vocabulary_without_letters(tmp_path):
    """`nsa doctor` and `nsa ready` train on them with the tokenizer of any run."""
    model = {"type": "BPE", "vocab": {"A": 0, "C": 1, "G": 2, "T": 3, "<|endoftext|>": 4}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    data = build_data(DataConfig(source="synthetic"), TrainConfig(seq_len=64), tokenizer)
    for loader in (data.train, data.validation):
        assert set(loader.batch(0, 4).inputs.flatten().tolist()) == set(range(5))


def test_the_standard_library_is_a_corpus_of_real_text():
    skipped = Skipped()
    documents = documents_of(PythonSource(), skipped)
    assert len(documents) > 300
    assert sum(map(len, documents)) > 5_000_000
    assert any("def dedent(" in d for d in documents)


def test_text_files_folders_globs_and_jsonl_are_read_once_each(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "b.txt").write_text("second")
    (tmp_path / "sub" / "c.jsonl").write_text('{"body": "third"}\n\n{"body": "  "}\n{"body": "fourth"}\n')
    (tmp_path / "sub" / "ignored.bin").write_bytes(b"\xff")
    skipped = Skipped()
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "*.txt"), str(tmp_path / "sub")]
    assert documents_of(TextSource(paths, "body"), skipped) == ["first", "second", "third", "fourth"]
    assert skipped == {"empty": 1}


def test_a_bad_file_is_named_with_the_place(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: field 'text' must be a text, got int"):
        documents_of(TextSource([str(bad)]), Skipped())
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"ab\xffcd")
    with pytest.raises(DataError, match=r"broken\.txt: byte 2 is not valid UTF-8"):
        documents_of(TextSource([str(broken)]), Skipped())


def test_ids_that_no_token_has_are_left_out_of_the_text():
    assert TOKENIZER.decode([104, 105, 255, 256, 319]) == "hi"


def test_a_small_source_of_a_mixture_holds_nothing_out_that_another_trains_on():
    documents = tokenise(numbered(5), TOKENIZER)
    training, validation = documents.split(1e-9)
    assert (training.num_documents, validation.num_documents) == (4, 1)
    with pytest.raises(DataError, match=r"none of the 5 documents falls into validation"):
        documents.split(1e-9, is_only=False)


def test_every_source_of_a_mixture_is_split_by_hashes_alone(tmp_path):
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    for path, count in ((few, 3), (many, 60)):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered(count)))
    parts = [{"source": "text", "paths": [str(path)]} for path in (few, many)]
    data = DataConfig(mixture=parts, validation_fraction=0.02)
    with pytest.raises(
        DataError, match=r"mixture: entry 1 \(text\): data\.validation_fraction: none of the 3 documents"
    ):
        build_data(data, TrainConfig(seq_len=32), TOKENIZER)


def test_a_file_that_takes_long_shows_that_it_advances(tmp_path):
    """A watchdog or a timeout that sees no progress would end the run while it tokenizes one large file."""
    activity, seen = Activity(), []

    class Recorded(ByteTokenizer):
        def encode_documents(self, texts):
            seen.append(activity.arrived())
            return super().encode_documents(texts)

    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in numbered(3 * BATCH))
    config = DataConfig(source="text", paths=[str(tmp_path / "a.jsonl.gz")])
    build_data(config, TrainConfig(seq_len=32), Recorded(), activity=activity)
    assert seen[:3] == [0, 1, 2]


def test_a_prepared_folder_is_found_below_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one document " * 20)
    prepare(TextSource([str(tmp_path / "a.txt")]), TOKENIZER, tmp_path / "shards", workers=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = DataConfig(source="prepared", paths=["~/shards"], validation_fraction=0.0)
    assert "1 training document, " in build_data(config, TrainConfig(seq_len=32), TOKENIZER).summary
