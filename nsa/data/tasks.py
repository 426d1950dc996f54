"""Documents of the source `recall` that ask for more than a repeated pair (`data.task`).

Words, values and filler are those of `nsa.data.recall`. A document spreads statements over filler, ends with questions
and is a pure function of (seed, number).

Tracking: ` box37` gives a variable a value, ` cat= box` copies it, and ` cat37` asks for the variable at the end of a
chain of copies. The chains of a document have different values, and their assignments are mixed.

Counting: n words occur n, n - 1, ... 1 times, or a multiple of that. A training document ends with `?` and all of its
words, the most frequent first. A prompt asks for the most frequent word alone.
"""

from collections.abc import Sequence

import numpy as np

from nsa.data.recall import NUM_KEYS, PROMPTS, Numbers, Parts, Prompt, Uniform, uniform
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import ConfigError


class Task(Parts):
    """Statements and questions are rows of parts, -1 for none. The last part of a question is the answer."""

    levels: Sequence[int] = ()  # of difficulty, in prompts
    unit = ""  # of the levels

    @staticmethod
    def num_drawn(length: int) -> int:
        return Parts.num_drawn(length) + 3 * NUM_KEYS

    def most_tokens(self, level: int) -> int:
        """Of the statements and the question of a prompt."""
        raise NotImplementedError

    def training(self, length: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """Draws the statements and questions of a document of `length` tokens."""
        raise NotImplementedError

    def prompt(self, length: int, level: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """Draws the statements and the question of a prompt of `length` tokens."""
        raise NotImplementedError

    def document(self, length: int, draw: Uniform) -> TokenArray:
        return self.spread(*self.training(length, draw), length, draw)

    def spread(self, statements: Numbers, questions: Numbers, length: int, draw: Uniform) -> TokenArray:
        """Fills `length` tokens. The sentence that does not fit comes first, where it is cut."""
        rest = draw[-2 * length :]
        filler = np.roll(self.filler(rest, length - self.size(statements) - self.size(questions)), 1)
        mixed, first = len(statements) + len(filler), min(1, len(filler))
        is_statement = np.ones(mixed + len(questions), dtype=bool)
        is_statement[:first] = False
        is_statement[first:mixed] = np.argsort(rest[len(rest) - mixed + first :]) < len(statements)
        return self.join(np.concatenate([statements, questions]), filler, is_statement)[-length:]


class Tracking(Task):
    task, version, purpose, signs = "tracking", 6, 1, "="
    levels, unit = (1, 2, 3, 4), "copies"

    def most_tokens(self, level: int) -> int:
        """Of two chains and a question. In a prompt with one chain, the answer would be the only value."""
        return 2 * self._chain_tokens(level) - self.longest_pair

    def _chain_tokens(self, copies: int) -> int:
        """Of a chain and its question."""
        return 2 * self.longest_pair + copies * (2 * self.longest_word + int(self.lengths[-1]))

    def training(self, length: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """All chains have the same number of copies, as in a prompt. Without copies, a model learns to recall pairs
        first."""
        longest = max((level for level in self.levels if self._chain_tokens(level) <= length), default=0)
        copies = int(draw[1] * (longest + 1))
        chains = int((1 + self._most_chains(copies, length)) ** draw[0] ** 0.5)
        return self._draw(np.full(chains, copies), draw[NUM_KEYS:])

    def prompt(self, length: int, level: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """As many chains as fill half of the prompt, at least two."""
        chains = max(2, self._most_chains(level, length // 2))
        statements, questions = self._draw(np.full(chains, level), draw)
        return statements, questions[:1]

    def _most_chains(self, copies: int, length: int) -> int:
        return min(NUM_KEYS // (copies + 1), len(self.values), max(1, length // self._chain_tokens(copies)))

    def _draw(self, copies: Numbers, draw: Uniform) -> tuple[Numbers, Numbers]:
        """Returns chains with so many copies each, mixed, and a question for the end of every chain."""
        words, values, order = np.split(draw[: 3 * NUM_KEYS], 3)
        total, sign = len(copies) + copies.sum(), len(self.lengths) - 1
        word = np.argsort(words)[:total]
        chain = np.repeat(np.arange(len(copies)), copies + 1)[np.argsort(order[:total])]
        value = self.values[np.argsort(values[: len(self.values)])][chain]
        pairs = np.stack([np.full(total, -1), word, value], axis=1)
        by_chain = np.argsort(chain, kind="stable")
        is_copy = np.diff(chain[by_chain], prepend=-1) == 0
        later, earlier = by_chain[is_copy], by_chain[np.flatnonzero(is_copy) - 1]
        statements = pairs.copy()
        statements[later] = np.stack([word[later], np.full(len(later), sign), word[earlier]], axis=1)
        return statements, pairs[by_chain[np.cumsum(copies + 1) - 1]]


class Counting(Task):
    task, purpose, signs = "counting", 3, "?"
    levels, unit = (2, 4, 8), "words"

    def most_tokens(self, level: int) -> int:
        return self._tokens(level, 1, 1)

    def training(self, length: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        most = max((n for n in range(2, self.levels[-1] + 1) if self._tokens(n, 1, n) <= length), default=2)
        words = int(2 + draw[0] * (most - 1))
        times = (length - self._tokens(words, 0, words)) // (self.longest_word * words * (words + 1) // 2)
        return self._draw(words, int((1 + max(1, times)) ** draw[1]), draw[NUM_KEYS:])

    def prompt(self, length: int, level: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """The occurrences are the same number at every length."""
        statements, questions = self._draw(level, 1, draw)
        return statements, questions[:1]

    def _tokens(self, words: int, times: int, answers: int) -> int:
        return self.longest_word * (times * words * (words + 1) // 2 + answers) + int(self.lengths[-1])

    def _draw(self, words: int, times: int, draw: Uniform) -> tuple[Numbers, Numbers]:
        """Returns the occurrences, mixed, and a question for the word of every rank."""
        word = np.argsort(draw[:NUM_KEYS])[:words]
        each = np.repeat(word, times * np.arange(words, 0, -1))
        statements = each[np.argsort(draw[NUM_KEYS : NUM_KEYS + len(each)])]
        questions = np.stack([np.full(words, -1), word], axis=1)
        questions[0, 0] = len(self.lengths) - 1
        return np.stack([statements, np.full(len(each), -1)], axis=1), questions


TASKS: dict[str, type[Task]] = {task.task: task for task in (Tracking, Counting)}


class TaskPrompts:
    """Prompts of `length` tokens that end with a question, of the levels of a task that fit into `shortest` tokens. The
    number of a level takes the place of a depth."""

    def __init__(self, tokenizer: Tokenizer, task: str, length: int, shortest: int):
        self.tokenizer, self.length, self._task = tokenizer, length, TASKS[task](tokenizer)
        self.levels = [level for level in self._task.levels if self._task.most_tokens(level) < shortest]
        if not self.levels:
            raise ConfigError(f"--lengths: {shortest} tokens are too few for a prompt of {task}; choose a longer one")
        self.num_depths = len(self.levels)

    def questions(self, samples: int) -> list[list[int]]:
        return [[number] for _ in range(samples) for number in range(self.num_depths)]

    def make(self, depths: Sequence[int], number: int) -> Prompt:
        draw = uniform(self._task.num_drawn(self.length), number, PROMPTS | self.length << 2 | self._task.purpose)
        statements, question = self._task.prompt(self.length, self.levels[depths[0]], draw)
        text = self._task.spread(statements, question, self.length - 1, draw)
        separator = np.array([self.tokenizer.separator], dtype=text.dtype)
        answer = self.length - int(self._task.lengths[question[0, -1]]), self.length
        return Prompt(np.concatenate([separator, text]), depths, [answer])
