"""`data.source: recall`: documents that ask for what they said, for any tokenizer, the same ones after every stop."""

import numpy as np
import pytest

from nsa.config import parse_config
from nsa.data.build import build_data
from nsa.data.recall import Prompts, RecallSequences, make_text
from nsa.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa.data.vocabulary import train_bpe
from nsa.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["the key of a document is asked again = 17 or 23 or 99\n" * 20], path, vocab_size=300, max_bytes=1 << 20)
    return {"bytes": ByteTokenizer(), "bpe": load_tokenizer(str(path))}


def pairs_of(text):
    return [tuple(line.split("=")) for line in text.splitlines() if "=" in line]


def test_every_question_has_the_answer_its_document_gave_at_any_distance():
    distances, repeated = [], 0
    for key in range(40):
        lines = make_text(4096, 0, key).splitlines()
        seen = {}
        for place, line in enumerate(lines):
            if "=" not in line:
                continue
            name, value = line.split("=")
            if name in seen:
                first, known = seen[name]
                assert known == value
                distances.append((place - first) / place)
                repeated += 1
            seen.setdefault(name, (place, value))
    shares = np.histogram(distances, bins=4, range=(0, 1))[0] / repeated
    assert repeated > 40 * 60
    assert shares.min() > 0.2  # from right before to the whole document, all alike


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_sequence_is_a_pure_function_of_its_number(name, tokenizers):
    tokenizer = tokenizers[name]

    def make():
        return RecallSequences(tokenizer, 512, 512, 7)

    rows = [make().row(number) for number in (3, 0, 3)]
    assert np.array_equal(rows[0].inputs, rows[2].inputs)
    assert not np.array_equal(rows[0].inputs, rows[1].inputs)
    lengths = set()
    for number in range(40):
        row = make().row(number)
        assert len(row.inputs) == len(row.targets) == 512
        assert np.array_equal(row.inputs[1:], row.targets[:-1])
        assert np.array_equal(np.flatnonzero(row.inputs == tokenizer.separator), row.starts)
        lengths.add(512 // len(row.starts))
    assert lengths == {512, 256, 128, 64}
    assert tokenizer.decode(make().row(3).inputs.tolist()).count("=") > 20
    held_out = RecallSequences(tokenizer, 512, 512, 7, validation=True).row(3)
    assert not np.array_equal(held_out.inputs, rows[0].inputs)


def data_of(*overrides):
    config = parse_config({"data": {"source": "recall"}, "train": {"seq_len": 128}}, "test", overrides)
    return build_data(config.data, config.train, ByteTokenizer())


def test_documents_are_no_longer_than_configured():
    built = data_of("data.document_tokens=64")
    assert np.diff(built.train.batch(0, 4).cu_seqlens.numpy()).tolist() == [64] * 8
    assert built.validation is not None
    assert not built.validation.batch(0, 1).inputs.equal(built.train.batch(0, 1).inputs)
    assert data_of().fingerprint != built.fingerprint
    with pytest.raises(ConfigError, match=r"data\.document_tokens: a sequence has 128 tokens"):
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
        lines = text.splitlines()
        body = lines[: -len(depths)]
        assert all("=" in line for line in body) == several
        assert len({key for key, _ in pairs_of("\n".join(body))}) == (len(body) if several else 1)
        for depth, (first, stop) in zip(depths, prompt.spans, strict=True):
            asked = tokenizer.decode(prompt.tokens[:first].tolist()).splitlines()[-1]
            answer = tokenizer.decode(prompt.tokens[first:stop].tolist())
            place = body.index(asked + answer.strip())
            assert depth <= 5 * (place + 1) / len(body)
            assert 5 * place / len(body) <= depth + 1


def test_a_length_without_room_for_every_depth_is_refused():
    with pytest.raises(ConfigError, match="--lengths: 60 tokens are too few for a prompt with keys at 10 depths"):
        Prompts(ByteTokenizer(), 60, 10, several=True).make([0], 0)


def test_recall_has_no_documents_to_prepare():
    from nsa.config.schema import SourceConfig
    from nsa.data.sources.registry import open_source

    with pytest.raises((ConfigError, DataError), match="'recall' has no documents to read"):
        open_source(SourceConfig(source="recall"), 1.0)
