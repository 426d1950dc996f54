"""Packing and mixing: every document once, exact shares, nothing wasted unseen."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.corpus import tokenise
from nsa.data.loader import Loader
from nsa.data.sequences import IGNORED, BestFit, Concat, Mixture, SyntheticSequences, fit
from nsa.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
SEPARATOR = TOKENIZER.separator


def corpus_of(lengths):
    """Documents with so many tokens each, the separator included."""
    texts = [(f"{n}:" + "abcdefghij" * 50)[: length - 1] for n, length in enumerate(lengths)]
    return whole_corpus(texts), texts


def whole_corpus(texts):
    return tokenise(texts, TOKENIZER).split(0.0)[0]


def documents_of(rows):
    """Put together again what best fit took apart: text by text, from inputs alone."""
    pieces = []
    for row in rows:
        ends = [*row.starts[1:].tolist(), len(row.inputs)]
        for start, end in zip(row.starts.tolist(), ends, strict=True):
            if row.targets[start] != IGNORED:
                pieces.append((row.inputs[start:end], row.targets[start:end]))
    return pieces


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(2, 200), min_size=3, max_size=60), st.sampled_from([16, 32, 100]), st.integers(0, 3))
def test_best_fit_reads_every_token_of_every_document_once_an_epoch(lengths, seq_len, epoch):
    corpus, texts = corpus_of(lengths)
    packed = BestFit(corpus, seq_len, seed=5, separator=SEPARATOR)
    rows = [packed.row(epoch * packed.count + n) for n in range(packed.count)]
    pieces = documents_of(rows)
    assert sum(len(inputs) for inputs, _ in pieces) == sum(lengths)
    assert sum(packed.num_targets(range(n, n + 1)) for n in range(packed.count)) == sum(lengths)
    # Every token's target is its successor in the document, the separator behind the last: as pairs, each once.
    expected = Counter()
    for text in texts:
        tokens = [SEPARATOR, *TOKENIZER.encode(text).tolist(), SEPARATOR]
        expected.update(pairwise(tokens))
    found = Counter()
    for inputs, targets in pieces:
        found.update(zip(inputs.tolist(), targets.tolist(), strict=True))
        piece = TOKENIZER.decode(inputs.tolist())
        assert any(piece in text for text in texts)
    assert found == expected
    assert sum(inputs[0] == SEPARATOR for inputs, _ in pieces) == len(lengths)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_best_fit_never_overfills_a_sequence_and_needs_few(lengths):
    lengths = np.array(lengths)
    chosen, count = fit(lengths, 64)
    filled = np.bincount(chosen, weights=lengths, minlength=count)
    assert filled.max() <= 64
    assert filled.min() > 0
    assert count <= np.ceil(11 / 9 * np.ceil(lengths.sum() / 64)) + 1  # the bound of best fit, longest first


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 24), max_size=200))
def test_best_fit_places_documents_as_one_after_the_other(lengths):
    """Longest first, each into the fullest sequence with room; of equally full ones, into the one that was filled last.
    Runs resume with the order of earlier versions."""
    bins: list[tuple[int, int]] = []  # the room left, and minus the time of the last document
    expected = np.empty(len(lengths), dtype=np.int64)
    for time, item in enumerate(sorted(range(len(lengths)), key=lambda item: -lengths[item])):
        _, number = min(
            ((place, n) for n, place in enumerate(bins) if place[0] >= lengths[item]), default=(None, len(bins))
        )
        if number == len(bins):
            bins.append((24, 0))
        expected[item], bins[number] = number, (bins[number][0] - lengths[item], -time)
    chosen, count = fit(np.array(lengths, dtype=np.int64), 24)
    assert (chosen.tolist(), count) == (expected.tolist(), len(bins))


def test_best_fit_cuts_no_document_that_fits_and_reports_its_padding():
    corpus, _ = corpus_of([20, 30, 12, 64, 40, 24, 33] * 9)
    packed = BestFit(corpus, 64, seed=0, separator=SEPARATOR)
    for n in range(packed.count):
        row = packed.row(n)
        real = row.targets != IGNORED
        assert real.sum() == packed.num_targets(range(n, n + 1))
        starts = row.starts[row.starts < real.sum()]
        assert (row.inputs[starts] == SEPARATOR).all(), "a piece that does not begin a document was cut"
    expected = 1 - 63 * (20 + 30 + 12 + 64 + 40 + 24 + 33) / 7 / (packed.count * 64)
    assert packed.waste == pytest.approx(expected)
    assert 0 <= packed.waste < 0.15


def test_best_fit_is_the_same_every_time_and_another_in_every_epoch():
    corpus, _ = corpus_of([20, 30, 12, 64, 40, 24, 33] * 9)
    first, second = (BestFit(corpus, 64, seed=0, separator=SEPARATOR) for _ in range(2))
    order = [n * 7 % (2 * first.count) for n in range(2 * first.count)]
    backwards = {n: second.row(n) for n in reversed(order)}
    for n in order:
        assert np.array_equal(first.row(n).inputs, backwards[n].inputs)
        assert np.array_equal(first.row(n).targets, backwards[n].targets)
    epochs = [[first.row(e * first.count + n).inputs.tobytes() for n in range(first.count)] for e in range(2)]
    assert epochs[0] != epochs[1]


def cut(name, seed, seq_len=16):
    sequences = SyntheticSequences(seq_len, seed, SEPARATOR)
    sequences.name = name
    return sequences


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_mixture_reads_every_source_in_order_and_in_its_share(weights, first):
    parts = [cut(f"s{n}", n) for n in range(len(weights))]
    mixture = Mixture(parts, weights, seed=3)
    seen = mixture.shares(first)
    for number in range(first, first + 50):
        which, inner = mixture.place(number)
        assert inner == seen[f"s{which}"], "sources are read without gaps and repeats"
        seen[f"s{which}"] += 1
    assert mixture.shares(first + 50) == seen
    assert sum(seen.values()) == first + 50
    total = mixture.shares(10_000)
    for n, weight in enumerate(weights):
        assert abs(total[f"s{n}"] - 10_000 * weight / sum(weights)) <= 10 * len(weights)


def test_a_mixture_of_files_trains_on_all_of_them(tmp_path):
    for name, word in (("a", "alpha "), ("b", "beta ")):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"text": "{i} {word * 30}"}}\n' for i in range(40)), encoding="utf-8"
        )
    config = DataConfig.model_validate(
        {
            "mixture": [
                {"source": "text", "paths": [str(tmp_path / "a.jsonl")], "weight": 3.0},
                {"source": "text", "paths": [str(tmp_path / "b.jsonl")], "weight": 1.0},
            ],
            "validation_fraction": 0.2,
        }
    )
    data = build_data(config, TrainConfig(seq_len=32, batch_size=4), TOKENIZER)
    texts = [TOKENIZER.decode(data.train.batch(n, 1).inputs[0].tolist()) for n in range(1000)]
    alpha, beta = sum("alpha" in t for t in texts), sum("beta" in t for t in texts)
    assert (alpha, beta) == (750, 250)
    assert data.validation is not None
    assert "75.0%" in data.summary
    assert "25.0%" in data.summary


def test_reading_by_stride_gives_the_sequences_between():
    sequences = Concat(whole_corpus([f"{i} " * 40 for i in range(60)]), 32, 1)
    whole = [sequences.row(n).inputs.tolist() for n in range(12)]
    assert len({*map(tuple, whole)}) == 12
    loader = Loader(lambda: sequences, 32, isolate_documents=False)
    for size in (1, 2, 3, 4):
        for rank in range(size):
            assert loader.batch(rank, 12 // size, size).inputs.tolist() == whole[rank::size]


def test_a_sequence_of_a_million_tokens_is_packed_from_thousands_of_documents():
    """Every sequence follows from its number alone, and reads the documents of its place in the epoch, in order."""
    length = 1 << 20
    corpus, _ = corpus_of([500] * 4500)
    sequences = Concat(corpus, length, seed=3)
    assert sequences.count == 2
    rows = [sequences.row(number) for number in (0, 1)]
    for row in rows:
        assert (len(row.inputs), len(row.targets)) == (length, length)
        assert np.array_equal(row.inputs[1:], row.targets[:-1])
        assert np.array_equal(np.union1d([0], np.flatnonzero(row.inputs == SEPARATOR)), row.starts)
        assert 2097 <= len(row.starts) <= 2099
    assert not np.array_equal(rows[0].inputs, rows[1].inputs)
    again = Concat(corpus, length, seed=3).row(1)
    assert np.array_equal(again.inputs, rows[1].inputs)
