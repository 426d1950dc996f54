"""`data.task`: variable tracking and counting, whose answers follow from the document and from nothing else."""

import re
from collections import Counter

import numpy as np
import pytest

from nsa.data.recall import RAMP, WORDS, RecallSequences
from nsa.data.sequences import random_bits
from nsa.data.tasks import TASKS, TaskPrompts, Tracking
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError
from tests.data.test_recall import data_of


def documents(task, tokenizer, seq_len, count):
    """The texts of the documents of `count` sequences, of all lengths."""
    sequences = RecallSequences(tokenizer, seq_len, seq_len, 3, parts=TASKS[task])
    for number in range(10 * RAMP // seq_len, 10 * RAMP // seq_len + count):
        row = sequences.row(number)
        for first, stop in zip(row.starts, [*row.starts[1:], seq_len], strict=True):
            tokens = row.inputs[first:stop].tolist()
            assert tokens[0] == tokenizer.separator
            assert tokenizer.separator not in tokens[1:]
            yield tokenizer.decode(tokens[1:])


def follow(text):
    """Runs the assignments of a text. Returns the value, the number of copies and the chain of every variable, chains
    numbered in the order of their values; and the variables that are asked for."""
    values, copies, roots, asked = {}, {}, {}, []
    for word, source, value in re.findall(r" ([a-z]+)(?:= ([a-z]+)|([0-9]{2}))", text):
        assert word in WORDS
        if word in values:  # a question
            assert value == values[word]
            assert word not in asked
            asked.append(word)
        else:
            assert not asked, "assignments come before questions"
            values[word] = values[source] if source else value
            copies[word] = copies[source] + 1 if source else 0
            roots[word] = roots[source] if source else len(set(roots.values()))
    assert len(set(values.values())) == len(set(roots.values())), "chains have different values"
    return values, copies, roots, asked


def count(text):
    """The number of occurrences of every word before the question, and the answers."""
    body, answers = text.split("?")
    counts = Counter(word for word in re.findall(r" ([a-z]+)(?![a-z])", body) if word in WORDS)
    return counts, answers.split()


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_every_question_of_tracking_asks_for_the_end_of_a_chain(name, tokenizers):
    lengths, chains = Counter(), []
    for text in documents("tracking", tokenizers[name], 512, 60):
        values, copies, roots, asked = follow(text)
        assert text.endswith(f" {asked[-1]}{values[asked[-1]]}")
        ends = {root: word for word, root in roots.items()}
        assert sorted(ends.values()) == sorted(asked)
        lengths.update(copies[word] for word in asked)
        chains.append(len(asked))
    assert set(lengths) == {0, 1, 2, 3, 4}
    assert min(lengths.values()) > 20
    assert min(chains) == 1
    assert max(chains) > 4


@pytest.mark.parametrize("length", [256, 2048])
def test_tracking_is_trained_with_the_chains_that_prompts_have(length):
    tracking, trained = Tracking(ByteTokenizer()), Counter()
    for number in range(200):
        draw = random_bits(Tracking.num_drawn(length - 1), 0, number) / 2**64
        _, copies, _, asked = follow(bytes(tracking.document(length - 1, draw).tolist()).decode())
        assert len({copies[word] for word in asked}) == 1
        trained[copies[asked[0]]] = max(trained[copies[asked[0]]], len(asked))
    prompts = TaskPrompts(ByteTokenizer(), "tracking", length, length)
    for number, level in enumerate(prompts.levels):
        prompt = bytes(prompts.make([number], number).tokens.tolist()[1:]).decode()
        assert trained[level] >= 1 + max(follow(prompt)[2].values())


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_every_question_of_counting_is_answered_by_the_words_from_the_most_frequent_on(name, tokenizers):
    words, most = Counter(), []
    for text in documents("counting", tokenizers[name], 512, 60):
        counts, answers = count(text)
        assert answers == [word for word, _ in counts.most_common()]
        assert len(set(counts.values())) == len(counts), "no two words are equally frequent"
        words[len(answers)] += 1
        most.append(counts[answers[0]] // len(answers))
    assert set(words) == set(range(2, 9))
    assert min(most) == 1
    assert max(most) > 8


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_prompt_of_tracking_does_not_tell_its_answer_apart(name, tokenizers):
    prompts = TaskPrompts(tokenizers[name], "tracking", 1000, 1000)
    assert prompts.levels == [1, 2, 3, 4]
    rank, is_last = [], []
    for number, (level,) in enumerate(prompts.questions(40)):
        prompt = prompts.make([level], number)
        text = tokenizers[name].decode(prompt.tokens.tolist()[1:])
        values, copies, roots, (asked,) = follow(text)
        [(start, stop)] = prompt.spans
        assert (len(prompt.tokens), stop) == (1000, 1000)
        assert tokenizers[name].decode(prompt.tokens[start:].tolist()) == values[asked]
        assert tokenizers[name].decode(prompt.tokens[:start].tolist()).endswith(f" {asked}")
        assert copies[asked] == prompts.levels[level]
        chains = 1 + max(roots.values())
        assert chains >= 5
        assert Counter(copies.values()) == dict.fromkeys(range(copies[asked] + 1), chains), "chains are alike"
        rank.append((roots[asked] + 0.5) / chains)
        is_last.append([*values][-1] == asked)
    assert np.histogram(rank, bins=4, range=(0, 1))[0].min() > 20, "any chain may be asked for"
    assert np.mean(is_last) < 0.3


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_prompt_of_counting_does_not_tell_its_answer_apart(name, tokenizers):
    prompts = TaskPrompts(tokenizers[name], "counting", 600, 600)
    assert prompts.levels == [2, 4, 8]
    guesses = {level: Counter() for level in range(3)}
    for number, (level,) in enumerate(prompts.questions(100)):
        prompt = prompts.make([level], number)
        text = tokenizers[name].decode(prompt.tokens.tolist()[1:])
        counts, [answer] = count(text)
        [(start, stop)] = prompt.spans
        assert (len(prompt.tokens), stop) == (600, 600)
        assert tokenizers[name].decode(prompt.tokens[start:].tolist()) == f" {answer}"
        assert sorted(counts.values()) == list(range(1, 1 + prompts.levels[level]))
        assert answer == max(counts, key=counts.get)
        places = [found.start() for found in re.finditer(rf" ({'|'.join(counts)})(?![a-z])", text[: text.index("?")])]
        guesses[level]["first"] += text.startswith(f" {answer}", places[0])
        guesses[level]["last"] += text.startswith(f" {answer}", places[-1])
        guesses[level]["alphabet"] += answer == min(counts)
    for level, words in enumerate(prompts.levels):
        by_chance = 2 / (words + 1)  # the share of the most frequent word in all occurrences
        for name in ("first", "last"):
            assert guesses[level][name] / 100 == pytest.approx(by_chance, abs=0.13)
        assert guesses[level]["alphabet"] / 100 == pytest.approx(1 / words, abs=0.13)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@pytest.mark.parametrize("task", TASKS)
def test_a_sequence_of_a_task_is_a_pure_function_of_its_number(task, name, tokenizers):
    def row(number, seed=7, **settings):
        return RecallSequences(tokenizers[name], 300, 300, seed, parts=TASKS[task], **settings).row(number)

    later = 10 * RAMP // 300
    again = row(later)
    assert np.array_equal(row(later).inputs, again.inputs)
    assert len(again.inputs) == len(again.targets) == 300
    for other in (row(later + 1), row(later, seed=8), row(later, validation=True)):
        assert not np.array_equal(other.inputs, again.inputs)
    prompts = TaskPrompts(tokenizers[name], task, 100, 100)
    assert np.array_equal(prompts.make([0], 5).tokens, prompts.make([0], 5).tokens)
    assert not np.array_equal(prompts.make([0], 5).tokens, prompts.make([0], 6).tokens)


def test_levels_that_do_not_fit_into_the_shortest_prompt_are_left_out():
    levels = {
        length: [TaskPrompts(ByteTokenizer(), task, 500, length).levels for task in TASKS] for length in (50, 100)
    }
    assert levels == {50: [[1], [2]], 100: [[1, 2, 3], [2, 4]]}
    with pytest.raises(ConfigError, match="--lengths: 43 tokens are too few for a prompt of tracking"):
        TaskPrompts(ByteTokenizer(), "tracking", 500, 43)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_shortest_prompts_of_tracking_have_two_values(name, tokenizers):
    """With one, the answer would be the only number of the prompt, whatever its chain."""
    for level in Tracking.levels:
        length = Tracking(tokenizers[name]).most_tokens(level) + 1
        prompts = TaskPrompts(tokenizers[name], "tracking", length, length)
        for number in range(20):
            tokens = prompts.make([prompts.levels.index(level)], number).tokens
            values, *_ = follow(tokenizers[name].decode(tokens.tolist()[1:]))
            assert (len(tokens), len(set(values.values()))) == (length, 2)


def test_a_configuration_names_the_task():
    built = [data_of(f"data.task={task}") for task in ("pairs", *TASKS)]
    assert built[0].fingerprint == data_of().fingerprint
    assert len({data.fingerprint for data in built}) == 3
    for loaders in zip(*((data.train, data.validation) for data in built), strict=True):
        texts = [bytes(loader.batch(0, 1).inputs.flatten().tolist()) for loader in loaders]
        assert [(b"=" in text, b"?" in text) for text in texts] == [(False, False), (True, False), (False, True)]
    with pytest.raises(ConfigError, match=r"data\.document_tokens: 31 tokens are too few for data\.task=counting"):
        data_of("data.task=counting", "data.document_tokens=31")
