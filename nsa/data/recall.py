"""Documents that repeat key-value pairs, to train and to measure recall. `nsa.data.tasks` has further documents.

` box37` gives the key `box` the value 37. When the pair occurs again, at any distance, the model must recall the value
after ` box`. A key is a common word of three or four letters, one token in most vocabularies, directly followed by its
value: models learn this form before others that were tried. Any tokenizer works: words, values and filler sentences are
encoded one by one. Documents are a pure function of (seed, number).

A training document has some keys and repeats all of them in every round, each time in another order. Half of the
documents consist of rounds only, with few keys as likely as many. The others have filler in between and mostly many
keys, so that recall spans long distances. Half of these have two, four or eight rounds; the rest name their keys once
and repeat all of them at the end, since rounds alone hardly ever span a whole document. Prompts of an evaluation name
their keys once and end with questions, for the only key or for some of many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nsa.data.sequences import Row, Sequences, make_phrases, random_bits
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import ConfigError

Numbers = NDArray[np.int64]
Uniform = NDArray[np.float64]

_WORDS = """
use type list size set key get data name file long code all call test node time new when log case max over base
read only back path one copy end same you add need any kind try grid loss then last top past pack pass make off
tag text line head two more item user here mode axis work root null sign term keep mean row map left info zero
full sort like form next load act cap wrap math skip look pair cast part just help fail host high byte once tree
step raw real show want out mark tick law low how done sure word most wait fast our rank body hook hash wire
free now old fake unit way rope flag side fit flat bit pool down war note view many sum too open cell even fig
date link edge due port your pin page team know take pop hold seen loop font half trim post save main drop push
own bar lead well feed exit red rest span box few foot cost auth rate core put less best crop fix leaf edit join
cute slow fill hard very meet fine move dump able task cut draw fall give area peer bind warp pick gate tool
warn seed heap bad bug nest bin lock chat cat life deal big why sock job man good far four lazy tail let jump
tell flow fact pure easy turn live much talk send win lift hit near upon pipe care fan ever late sink tie
"""
WORDS = _WORDS.split()
FILLER = [" " + phrase.decode().rstrip() for phrase in make_phrases(0, 512)]
NUM_KEYS, NUM_VALUES = len(WORDS), 100
SHORTEST = 32  # minimum tokens of a document
RAMP = 1 << 20  # training tokens after which documents of twice the length are added
PROMPTS = 1 << 63  # separates the random keys of prompts from those of training documents


def uniform(count: int, seed: int, key: int) -> Uniform:
    return random_bits(count, seed, key).astype(np.float64) / 2**64


def scaled(uniform: Uniform, count: int) -> Numbers:
    """Numbers below `count`."""
    return (uniform * count).astype(np.int64)


class Parts:
    """The tokens of all words, values, filler sentences and signs, numbered in this order, and the documents of them.

    Values are the numbers below 100 that have the most common token count. If `81` were two tokens and others one, the
    second token would be a different task: to choose among the numbers that begin with 8."""

    task = "pairs"
    version = 5  # of its training documents
    purpose = 0  # a part of the random key
    signs: Sequence[str] = ()

    def __init__(self, tokenizer: Tokenizer):
        texts = [*(f" {word}" for word in WORDS), *(f"{value:02d}" for value in range(NUM_VALUES)), *FILLER]
        encoded = tokenizer.encode_many([*texts, *self.signs])
        self.tokens = np.concatenate(encoded)
        self.lengths = np.array([len(tokens) for tokens in encoded])
        known = NUM_KEYS + NUM_VALUES
        if not self.lengths.all() or len({tokens.tobytes() for tokens in encoded[:known]}) < known:
            raise ConfigError(
                f"data.tokenizer: {tokenizer.name} cannot tell the words and numbers of recall documents apart"
            )
        self.starts = np.cumsum(self.lengths) - self.lengths
        words, values, filler, _ = np.split(self.lengths, [NUM_KEYS, NUM_KEYS + NUM_VALUES, len(texts)])
        commonest = np.bincount(values).argmax()
        self.values, values = NUM_KEYS + np.flatnonzero(values == commonest), values[values == commonest]
        self.shortest_pair, self.longest_pair = (int(f(words) + f(values)) for f in (np.min, np.max))
        self.longest_word, self.shortest_filler = int(words.max()), int(filler.min())

    @staticmethod
    def num_drawn(length: int) -> int:
        return 3 + NUM_KEYS + 3 * length

    def pairs(self, words: Uniform, values: Uniform, keys: int) -> Numbers:
        """Draws different words, each with a value [keys, 2]."""
        chosen = self.values[scaled(values[:keys], len(self.values))]
        return np.stack([np.argsort(words)[:keys], chosen], axis=1)

    def filler(self, uniform: Uniform, room: int) -> Numbers:
        """Draws as many sentences as fit into `room` tokens, and one more; none if there is no room."""
        count = room // self.shortest_filler + 1 if room > 0 else 0
        parts = NUM_KEYS + NUM_VALUES + scaled(uniform[:count], len(FILLER))
        return parts[: 1 + int(np.searchsorted(np.cumsum(self.lengths[parts]), room, side="right"))]

    def size(self, parts: Numbers) -> int:
        """The tokens of parts; -1 is none."""
        return int(self.lengths[parts[parts >= 0]].sum())

    def join(self, pairs: Numbers, filler: Numbers, is_pair: NDArray[np.bool_]) -> TokenArray:
        """Merges the tokens of pairs and filler, each in order. `is_pair` [pairs + filler] says which comes next. The
        number of parts of a pair is any; -1 is none."""
        parts = np.full((len(is_pair), pairs.shape[1]), -1)
        parts[is_pair], parts[~is_pair, 0] = pairs, filler
        parts = parts[parts >= 0]
        lengths = self.lengths[parts]
        places = np.arange(lengths.sum()) + np.repeat(self.starts[parts] - (np.cumsum(lengths) - lengths), lengths)
        tokens: TokenArray = self.tokens[places]
        return tokens

    def document(self, length: int, draw: Uniform) -> TokenArray:
        """Returns the training document that the `num_drawn(length)` random numbers in `draw` determine."""
        is_full = draw[1] < 0.5
        most = min(NUM_KEYS, max(1, length // (2 * self.longest_pair)))
        keys = int((1 + most) ** (draw[0] if is_full else draw[0] ** 0.5))
        full = 1 + length // (self.shortest_pair * keys)
        asks_last = not is_full and draw[2] < 0.5
        some = max(2, min(2 << max(0, int(6 * draw[2]) - 3), length // (self.longest_pair * keys)))
        rounds = full if is_full else some
        words, values, orders, rest = np.split(draw[3:], np.cumsum([NUM_KEYS, keys, rounds * keys]))
        pairs = self.pairs(words, values, keys)[np.argsort(orders.reshape(rounds, keys)).ravel()]
        filler = self.filler(rest, length - self.size(pairs))
        spread = len(pairs) - (keys if asks_last else 0)
        is_pair = np.ones(len(pairs) + len(filler), dtype=bool)
        is_pair[: spread + len(filler)] = np.argsort(rest[-spread - len(filler) :]) < spread
        return self.join(pairs, filler, is_pair)[:length]


class RecallSequences(Sequences):
    """Endless training sequences. All documents of a sequence have `longest` tokens, or a half, a quarter and so on of
    it, down to SHORTEST. Training starts with the shortest documents: models first learn to find one of few keys, and
    the skill transfers to many. Once all lengths are in use, the longest are the most likely: of nine lengths, 30 % of
    the sequences have the longest and 0.1 % the shortest. Until then, and in validation, all are equally likely."""

    name = "recall"

    def __init__(
        self, tokenizer: Tokenizer, seq_len: int, longest: int, seed: int, *, validation: bool = False,
        parts: type[Parts] = Parts,
    ):  # fmt: skip
        self.tokenizer, self.seq_len, self.longest, self.seed = tokenizer, seq_len, longest, seed
        self.validation = validation
        self._parts = parts(tokenizer)

    def row(self, number: int) -> Row:
        key = number << 20 | self._parts.purpose << 17 | self.validation
        all_kinds = max(1, (self.longest // SHORTEST).bit_length())
        kinds = all_kinds if self.validation else min(all_kinds, 1 + number * self.seq_len // RAMP)
        drawn = uniform(1, self.seed, key | 1 << 19)[0]
        is_ramp = self.validation or kinds < all_kinds
        length = self.longest >> (all_kinds - 1 - int(kinds * (drawn if is_ramp else drawn ** (1 / 3))))
        starts = np.arange(0, self.seq_len, length)
        tokens = np.full(len(starts) * length + 1, self.tokenizer.separator, dtype=self.tokenizer.dtype)
        draws = uniform(len(starts) * self._parts.num_drawn(length), self.seed, key).reshape(len(starts), -1)
        for start, draw in zip(starts.tolist(), draws, strict=True):
            tokens[start + 1 : start + length] = self._parts.document(length - 1, draw)
        return self._row_of(tokens[: self.seq_len + 1], starts)


@dataclass(frozen=True)
class Prompt:
    """`tokens` start with a separator and end with questions and their answers. The answer for the key at `depths[a]`
    is tokens[spans[a][0] : spans[a][1]]. `places` pairs and sentences precede the questions."""

    tokens: TokenArray
    depths: Sequence[int]
    spans: Sequence[tuple[int, int]]
    places: int = 0


class Prompts:
    """Prompts of as many tokens as fit into `length`. A depth is one of `num_depths` equal parts of the text before the
    questions. A prompt has one key in filler, or with `several` as many keys as fill half of it, at most NUM_KEYS."""

    def __init__(self, tokenizer: Tokenizer, length: int, num_depths: int, *, several: bool):
        self.tokenizer, self.length, self.num_depths, self.several = tokenizer, length, num_depths, several
        self._parts = Parts(tokenizer)

    def questions(self, samples: int) -> list[list[int]]:
        """Returns the depths that each prompt asks for. Every depth is asked for `samples` times."""
        depths = list(range(self.num_depths))
        return [depths] * samples if self.several else [[depth] for _ in range(samples) for depth in depths]

    def has_room(self) -> bool:
        """Whether there are two places for every depth, so that prompts with longer filler fit too. Raises ConfigError
        if no prompt fits."""
        return self.make(self.questions(1)[0], 0).places >= 2 * self.num_depths

    def make(self, depths: Sequence[int], number: int) -> Prompt:
        """Creates a prompt with a question for a key at each of these depths, one depth unless `several`."""
        parts, purpose = self._parts, PROMPTS | self.length << 2 | self.several << 1
        draw = uniform(2 * len(depths) + 2 * NUM_KEYS + self.length, number, purpose)
        inside, order, words, values, rest = np.split(draw, np.cumsum([len(depths), len(depths), NUM_KEYS, NUM_KEYS]))
        most = min(NUM_KEYS, self.length // (2 * parts.longest_pair))
        pairs = parts.pairs(words, values, max(self.num_depths, most) if self.several else 1)
        asked = parts.longest_pair * len(depths)
        filler = parts.filler(rest, self.length - 1 - asked - parts.size(pairs))[:-1]
        count = len(pairs) + len(filler)
        total = len(pairs) if self.several else count
        starts = [depth * total // self.num_depths for depth in range(self.num_depths + 1)]
        chosen = [starts[d] + int(u * (starts[d + 1] - starts[d])) for d, u in zip(depths, inside, strict=True)]
        is_pair = np.zeros(count, dtype=bool)
        is_pair[np.arange(len(pairs)) * count // len(pairs) if self.several else chosen] = True
        tokens = [np.array([self.tokenizer.separator], dtype=self.tokenizer.dtype), parts.join(pairs, filler, is_pair)]
        end, spans = sum(map(len, tokens)), [(0, 0)] * len(depths)
        if count < self.num_depths or end + asked > self.length:
            raise ConfigError(
                f"--lengths: {self.length} tokens are too few for a prompt with keys at {self.num_depths} depths; "
                "choose a longer one"
            )
        for question in np.argsort(order).tolist():
            pair = pairs[[chosen[question] if self.several else 0]]
            tokens.append(parts.join(pair, filler[:0], np.array([True])))
            end += len(tokens[-1])
            spans[question] = (end - int(parts.lengths[pair[0, 1]]), end)
        return Prompt(np.concatenate(tokens), depths, spans, count)
