"""`data.source: recall`: documents that ask for what they said, for any tokenizer, the same ones after every stop."""

import re
from itertools import pairwise

import numpy as np
import pytest

from nsa.config import parse_config
from nsa.data.build import build_data
from nsa.data.recall import FILLER, RAMP, WORDS, Parts, Prompts, RecallSequences
from nsa.data.sequences import random_bits
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError, DataError


def pairs_of(text):
    return re.findall(r" ([a-z]+)([0-9]{2})(?![0-9])", text)


def test_every_question_has_the_answer_its_document_gave_at_any_distance(tokenizers):
    parts, distances, far, num_keys, has_filler = Parts(tokenizers["bytes"]), [], [], [], []
    for number in range(80):
        text = bytes(parts.document(4096, random_bits(Parts.num_drawn(4096), 0, number) / 2**64).tolist()).decode()
        assert len(text) == 4096
        values, places = {}, {}
        for found in re.finditer(r" ([a-z]+)([0-9]{2})", text):
            word, value = found.groups()
            assert values.setdefault(word, value) == value
            distances += [(found.start() - place) / len(text) for place in places.get(word, [])]
            places.setdefault(word, []).append(found.start())
        times = sorted(len(each) for each in places.values())
        assert times[-1] - times[0] <= 1  # only the last round may be cut
        assert set(places) <= set(WORDS)
        num_keys.append(len(places))
        has_filler.append("." in text)
        far += [(b - a) / len(text) for each in places.values() for a, b in pairwise(each) if has_filler[-1]]
        assert has_filler[-1] or len(pairs_of(text)) > 4096 / 7 - 8
        assert not has_filler[-1] or times[-1] <= 8
    shares = np.histogram(distances, bins=4, range=(0, 1))[0] / len(distances)
    assert shares.min() > 0.05  # from right before to the whole document
    assert np.mean(np.array(far) > 0.9) > 0.01  # the last naming of the key, almost a document away
    assert min(num_keys) == 1
    assert 4 < np.median(num_keys) < 40
    assert max(num_keys) > 100
    assert 20 < sum(has_filler) < 60


def test_no_question_is_harder_than_the_others(tokenizers):
    assert len(set(WORDS)) == 256
    assert not [word for word in WORDS if any(f" {word}" in sentence for sentence in FILLER)]
    for name, fewest in (("bytes", 100), ("bpe", 95)):
        parts = Parts(tokenizers[name])
        values = parts.lengths[parts.values]
        assert len(values) >= fewest
        assert values.min() == values.max()
    # A vocabulary that has some numbers as one token: `17` is not asked for where `18` is two.
    assert len(tokenizers["bpe"].encode("17")) == 1
    assert len(tokenizers["bpe"].encode("18")) == 2
    assert len(values) < 100


def test_the_shortest_documents_come_first_and_longer_ones_are_added(tokenizers):
    sequences = RecallSequences(tokenizers["bytes"], 1024, 1024, 0)

    def lengths(first, count):
        return {1024 // len(sequences.row(number).starts) for number in range(first, first + count)}

    per_kind = RAMP // 1024
    assert lengths(0, 20) == lengths(per_kind - 1, 1) == {32}
    assert lengths(2 * per_kind, 40) == {32, 64, 128}
    later = [len(sequences.row(number).starts) for number in range(100 * per_kind, 100 * per_kind + 400)]
    assert 0.3 < later.count(1) / 400 < 0.5  # 42 %: the longest are the likeliest
    assert later.count(1) > later.count(2) > later.count(4) > later.count(8) > later.count(16) > 0


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_sequence_is_a_pure_function_of_its_number(name, tokenizers):
    tokenizer = tokenizers[name]

    def make():
        return RecallSequences(tokenizer, 512, 512, 7)

    later = 10 * RAMP // 512
    rows = [make().row(number) for number in (3, 0, 3)]
    assert np.array_equal(rows[0].inputs, rows[2].inputs)
    assert not np.array_equal(rows[0].inputs, rows[1].inputs)
    lengths = set()
    for number in range(later, later + 100):
        row = make().row(number)
        assert len(row.inputs) == len(row.targets) == 512
        assert np.array_equal(row.inputs[1:], row.targets[:-1])
        assert np.array_equal(np.flatnonzero(row.inputs == tokenizer.separator), row.starts)
        lengths.add(512 // len(row.starts))
    assert lengths - {32} == {512, 256, 128, 64}  # 32 is one of 125
    assert len(pairs_of(tokenizer.decode(make().row(3).inputs.tolist()))) > 20
    held_out = RecallSequences(tokenizer, 512, 512, 7, validation=True).row(3)
    assert not np.array_equal(held_out.inputs, rows[0].inputs)


def data_of(*overrides):
    config = parse_config({"data": {"source": "recall"}, "train": {"seq_len": 128}}, "test", overrides)
    return build_data(config.data, config.train, ByteTokenizer())


def test_documents_are_no_longer_than_configured():
    built = data_of("data.document_tokens=32")
    assert np.diff(built.train.batch(0, 4).cu_seqlens.numpy()).tolist() == [32] * 16
    assert built.validation is not None
    assert not built.validation.batch(0, 1).inputs.equal(built.train.batch(0, 1).inputs)
    assert data_of().fingerprint != built.fingerprint
    with pytest.raises(ConfigError, match=r"data\.document_tokens: .* is more than the 128 tokens of a sequence"):
        data_of("data.document_tokens=129")


def test_recall_is_a_part_of_mixtures(tmp_path):
    (tmp_path / "a.txt").write_text("words without numbers " * 40)
    mixture = [{"source": "text", "paths": [str(tmp_path)]}, {"source": "recall", "weight": 3.0}]
    config = parse_config({"data": {"mixture": mixture, "validation_fraction": 0.0}, "train": {"seq_len": 64}}, "test")
    built = build_data(config.data, config.train, ByteTokenizer())
    assert built.train.sequences.shares(1000) == {"text": 250, "recall": 750}


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@pytest.mark.parametrize("several", [True, False])
def test_a_prompt_asks_for_keys_at_the_depths_it_names(name, several, tokenizers):
    tokenizer = tokenizers[name]
    prompts = Prompts(tokenizer, 600, 5, several=several)
    for number in range(20):
        depths = [0, 2, 4] if several else [number % 5]
        prompt = prompts.make(depths, number)
        assert 480 < len(prompt.tokens) <= 600
        assert prompt.tokens[0] == tokenizer.separator
        text = tokenizer.decode(prompt.tokens.tolist())
        body, asked = pairs_of(text)[: -len(depths)], pairs_of(text)[-len(depths) :]
        assert len({word for word, _ in body}) == len(body) == (max(5, len(body)) if several else 1)
        assert set(asked) <= set(body)
        size = text.rindex(f" {asked[0][0]}")
        for depth, (first, stop) in zip(depths, prompt.spans, strict=True):
            word, value = pairs_of(tokenizer.decode(prompt.tokens[:stop].tolist()))[-1]
            assert tokenizer.decode(prompt.tokens[first:stop].tolist()) == value
            place = text.index(f" {word}{value}") / size
            assert depth - 0.5 <= 5 * place <= depth + 1.5  # parts differ in length


def test_a_length_without_room_for_every_depth_is_refused():
    with pytest.raises(ConfigError, match="--lengths: 60 tokens are too few for a prompt with keys at 10 depths"):
        Prompts(ByteTokenizer(), 60, 10, several=True).make([0], 0)


def test_recall_has_no_documents_to_prepare():
    from nsa.config.schema import SourceConfig
    from nsa.data.sources.registry import open_source

    with pytest.raises((ConfigError, DataError), match="'recall' has no text to read"):
        open_source(SourceConfig(source="recall"), 1.0)
