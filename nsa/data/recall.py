"""Documents that ask for what they said before, to train and to measure recall.

A line `kavo=37` gives a key its value. The same line, met again at any distance, asks for it: after `kavo=` a model
must look the value up. Documents are plain text, so every tokenizer works, and a pure function of (seed, number).

Training documents mix lines that define a key with lines that ask for one of the keys so far, each equally likely, so
that questions stand everywhere and reach back to any place before. In a quarter of the documents lines of filler stand
between, up to 255 for each. Prompts of an evaluation ask at their end, either for the one key in filler, or for some of
the keys that all lines define.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nsa.data.sequences import Row, Sequences, make_phrases, random_bits, random_order
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import ConfigError

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]
NUM_KEYS = len(SYLLABLES) ** 2
VALUE_LENGTH = 2  # digits
LINE = len("kavo=37\n")  # no line is shorter
SPARSEST = 1 / 256  # lowest share of lines that are no filler
SHORTEST = 64  # tokens of a document
PROMPTS = 1 << 63  # sets the keys of prompts apart from those of training documents
FILLER = [phrase.decode().rstrip() + "\n" for phrase in make_phrases(0, 512)]


def _uniform(count: int, seed: int, key: int) -> NDArray[np.float64]:
    return random_bits(count, seed, key).astype(np.float64) / 2**64


def _line(key: int, uniform: float) -> str:
    first, second = divmod(key, len(SYLLABLES))
    return f"{SYLLABLES[first]}{SYLLABLES[second]}={int(uniform * 10**VALUE_LENGTH):0{VALUE_LENGTH}d}\n"


def make_text(characters: int, seed: int, key: int) -> str:
    """A training document of at least that length."""
    count = characters // LINE + 1
    draw = _uniform(1 + 5 * count, seed, key)
    words, values, kind, which, pick = draw[1:].reshape(5, count)
    keys = dict.fromkeys((words * NUM_KEYS).astype(np.int64).tolist())  # all different
    pairs = list(zip(keys, values.tolist(), strict=False))
    is_filler = kind >= SPARSEST ** max(0.0, 4 * draw[0] - 3)
    defined = 0
    lines = []
    for filler, asks, chosen in zip(is_filler.tolist(), (which < 0.5).tolist(), pick.tolist(), strict=True):
        if filler:
            lines.append(FILLER[int(chosen * len(FILLER))])
        elif defined and (asks or defined == len(pairs)):
            lines.append(_line(*pairs[int(chosen * defined)]))
        else:
            lines.append(_line(*pairs[defined]))
            defined += 1
    return "".join(lines)


class RecallSequences(Sequences):
    """Training sequences without end. The documents of one are all of `longest` tokens, or of half, a quarter and so on
    of it down to SHORTEST, each equally likely: to find one of few keys is learned first, and what it takes is the same
    among many."""

    name = "recall"

    def __init__(self, tokenizer: Tokenizer, seq_len: int, longest: int, seed: int, *, validation: bool = False):
        self.tokenizer, self.seq_len, self.longest, self.seed = tokenizer, seq_len, longest, seed
        self.validation = validation

    def row(self, number: int) -> Row:
        key = number << 20 | self.validation
        kinds = max(1, (self.longest // SHORTEST).bit_length())
        length = self.longest >> int(kinds * _uniform(1, self.seed, key | 1 << 19)[0])
        starts = np.arange(0, self.seq_len, length)
        documents = [self._document(length, key | place << 1) for place in range(len(starts))]
        end = np.array([self.tokenizer.separator], dtype=self.tokenizer.dtype)
        return self._row_of(np.concatenate([*documents, end])[: self.seq_len + 1], starts)

    def _document(self, length: int, key: int) -> TokenArray:
        """A separator and the tokens of a text, `length` together."""
        characters = int(1.1 * self._characters_per_token * length) + 8 * LINE
        while len(tokens := self.tokenizer.encode(make_text(characters, self.seed, key))) < length:
            characters *= 2
        return np.concatenate([[self.tokenizer.separator], tokens[: length - 1]]).astype(self.tokenizer.dtype)

    @cached_property
    def _characters_per_token(self) -> float:
        text = make_text(4096, 0, 0)
        return len(text) / len(self.tokenizer.encode(text))


@dataclass(frozen=True)
class Prompt:
    """`tokens`, a separator in front, end with questions and their answers. The answer with the key at `depths[a]` is
    the tokens from `spans[a][0]` to before `spans[a][1]`."""

    tokens: TokenArray
    depths: Sequence[int]
    spans: Sequence[tuple[int, int]]


class Prompts:
    """Prompts of as many tokens as fit into `length`. A depth is one of `num_depths` equal parts of what stands before
    the questions. With `several`, every line defines a key; otherwise one line does, and the others are filler."""

    def __init__(self, tokenizer: Tokenizer, length: int, num_depths: int, *, several: bool):
        self.tokenizer, self.length, self.num_depths, self.several = tokenizer, length, num_depths, several
        self._lines = length // 2 + 1  # more than fit: the first prompt finds out

    def questions(self, samples: int) -> list[list[int]]:
        """The depths that each prompt asks for, so that every depth is asked for `samples` times."""
        depths = list(range(self.num_depths))
        return [depths] * samples if self.several else [[depth] for _ in range(samples) for depth in depths]

    def has_room(self) -> bool:
        """Whether there are two lines for every depth, so that prompts with longer lines fit too. Raises ConfigError
        where not even one prompt fits."""
        self.make(self.questions(1)[0], 0)
        return self._lines >= 2 * self.num_depths

    def make(self, depths: Sequence[int], number: int) -> Prompt:
        """A question for a key at each of these depths, which are one where the prompt has one key."""
        while self._lines >= self.num_depths:
            text, answers = self._text(depths, number)
            tokens = self.tokenizer.encode(text)
            if 1 + len(tokens) <= self.length:
                separator = np.array([self.tokenizer.separator], dtype=self.tokenizer.dtype)
                spans = [self._span(tokens, len(text) - answer) for answer in answers]
                return Prompt(np.concatenate([separator, tokens]), depths, spans)
            self._lines = min(self._lines - 1, self._lines * self.length // (1 + len(tokens)))
        raise ConfigError(
            f"--lengths: {self.length} tokens are too few for a prompt with keys at {self.num_depths} depths; "
            "choose a longer one"
        )

    def _text(self, depths: Sequence[int], number: int) -> tuple[str, list[int]]:
        """The prompt, and where in it the value of each answer starts."""
        count, purpose = self._lines, PROMPTS | self.length << 2 | self.several << 1
        draw = _uniform(2 * len(depths) + 2 * count, number, purpose)
        inside, order, values, filler = np.split(draw, np.cumsum([len(depths), len(depths), count]))
        lines = [FILLER[int(chosen * len(FILLER))] for chosen in filler.tolist()]
        keys = min(count, NUM_KEYS) if self.several else 1
        words = random_order(NUM_KEYS, number, purpose | 1)[:keys].tolist()
        pairs = list(zip(words, values.tolist(), strict=False))
        total = keys if self.several else count
        starts = [depth * total // self.num_depths for depth in range(self.num_depths + 1)]
        chosen = [starts[d] + int(u * (starts[d + 1] - starts[d])) for d, u in zip(depths, inside, strict=True)]
        places = [key * count // keys for key in range(keys)] if self.several else chosen
        for key, place in enumerate(places):
            lines[place] = _line(*pairs[key])
        text, answers = "".join(lines), [0] * len(depths)
        for question in np.argsort(order).tolist():
            line = _line(*pairs[chosen[question] if self.several else 0])
            answers[question] = len(text) + line.index("=") + 1
            text += line
        return text, answers

    def _span(self, tokens: TokenArray, before_end: int) -> tuple[int, int]:
        """The tokens, a separator in front, of a value that starts so many characters before the end."""
        # From the end, since some tokenizers put a space in front of the text.
        until_end = np.cumsum(self.tokenizer.byte_lengths[tokens][::-1])[::-1]  # characters from each token's start
        return int(np.sum(until_end >= before_end)), 1 + int(np.sum(until_end > before_end - VALUE_LENGTH))
