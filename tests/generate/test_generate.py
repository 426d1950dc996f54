"""Generated tokens: those of the whole sequence, of each prompt alone, of a seed; and what a caller gets of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nsa
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ArgumentError, NumericsError, OutOfMemoryError
from nsa.generate import batch
from nsa.generate.sampling import Sampling, draw, uniform
from tests.nn.test_cache import VARIANTS, VOCABULARY, small


def tokens_of(generated, prompt=0):
    return [piece.token for piece in generated if piece.prompt == prompt and piece.token is not None]


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def run():
    """Weights of no training, with a vocabulary of bytes."""
    from nsa.config.load import parse_config
    from nsa.nn.model import build_model

    config = parse_config(
        {}, "test", ["model.dim=32", "model.n_layers=1", "model.head_dim_k=16", "model.head_dim_v=16"]
    )
    return SimpleNamespace(model=build_model(config, 256, 0).eval(), tokenizer=ByteTokenizer())


@pytest.mark.parametrize("variant", ["pattern", "shared mlp"])
def test_greedy_generation_equals_the_one_without_a_cache(variant):
    model = small(*VARIANTS[variant])
    prompt = torch.randint(0, VOCABULARY, (1, 21))
    got = tokens_of(nsa.generate_tokens(model, prompt.tolist(), max_tokens=60, temperature=0.0))
    whole = prompt
    for _ in range(60):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], dim=1)
    assert got == whole[0, 21:].tolist()


def test_a_prompt_draws_the_same_alone_and_in_any_batch(model):
    prompts = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in (1, 40, 7)]
    options = {"max_tokens": 12, "temperature": 1.5, "seed": 3, "top_p": 0.9}
    batch = list(nsa.generate_tokens(model, prompts, **options))
    for number, prompt in enumerate(prompts):
        assert tokens_of(batch, number) == tokens_of(nsa.generate_tokens(model, [prompt], **options))
    again = list(nsa.generate_tokens(model, prompts[::-1], **options))
    assert tokens_of(again, 0) == tokens_of(batch, 2)
    seeds = list(nsa.generate_tokens(model, [prompts[1]] * 2, **(options | {"seed": [3, 4]})))
    assert tokens_of(seeds, 0) == tokens_of(batch, 1) != tokens_of(seeds, 1)


def test_rows_end_at_their_own_stop_token_and_the_others_go_on(model):
    prompts = [[1, 2, 3], [9]]
    free = list(nsa.generate_tokens(model, prompts, max_tokens=20, seed=1))
    stop = tokens_of(free, 0)[3]
    pieces = list(nsa.generate_tokens(model, prompts, max_tokens=20, seed=1, stop=[stop]))
    for number in range(2):
        want = tokens_of(free, number)
        ended = want.index(stop) if stop in want else None
        assert tokens_of(pieces, number) == want[:ended]
        (last,) = [piece for piece in pieces if piece.prompt == number and piece.end is not None]
        assert (last.end, last.token is None) == (("length", False) if ended is None else ("stop", True))
    assert tokens_of(pieces, 0) == tokens_of(free, 0)[: tokens_of(free, 0).index(stop)]


def test_stop_tokens_may_be_numbers_of_numpy_and_torch(model):
    free = tokens_of(nsa.generate_tokens(model, [[1, 2, 3]], max_tokens=20, seed=1))
    for stop in (np.array(free[3:4]), torch.tensor(free[3:4]), [np.int64(free[3])]):
        assert tokens_of(nsa.generate_tokens(model, [[1, 2, 3]], max_tokens=20, seed=1, stop=stop)) == free[:3]
    with pytest.raises(ArgumentError, match="stop: must be a list of texts"):
        nsa.generate_tokens(model, [[1, 2, 3]], stop=[1.5])


def test_the_first_token_comes_before_the_last_is_computed(model, monkeypatch):
    calls = []
    original = type(model).hidden
    monkeypatch.setattr(type(model), "hidden", lambda *args, **options: calls.append(1) or original(*args, **options))
    stream = nsa.generate_tokens(model, [[1, 2]], max_tokens=9)
    for expected in range(1, 10):
        next(stream)
        assert len(calls) == expected  # the prompt, then one step before each further token
    assert list(stream) == []


def test_texts_in_texts_out(run):
    prompts = ["def", "a longer prompt é"]
    pieces = list(nsa.generate_tokens(run, prompts, max_tokens=30, seed=2))
    for number in range(2):
        ids = tokens_of(pieces, number)
        text = "".join(piece.text for piece in pieces if piece.prompt == number)
        assert text == run.tokenizer.decode(ids)
        assert run.tokenizer.separator not in ids


@pytest.mark.parametrize(
    ("prompts", "options", "argument"),
    [
        ([], {}, "prompts"),
        ([[]], {}, "prompts"),
        ([[VOCABULARY]], {}, "prompts"),
        ([[-1]], {}, "prompts"),
        (["text"], {}, "prompts"),
        ("text", {}, "prompts"),
        *((prompts, {}, "prompts") for prompts in (None, 5, [5], [None], [[None]], [["a"]], [[1.5]], [[1], "text"])),
        *(
            ([[1]], {name: value}, name)
            for name in ("max_tokens", "temperature", "top_p", "seed", "stop")
            for value in (None, "text", [None], [1.5], object())
        ),
        *(([[1]], {name: 1.5}, name) for name in ("max_tokens", "top_k", "seed", "stop")),
        *(([[1]], {"top_k": value}, "top_k") for value in ("text", [1])),
        *(([[1]], {"seed": value}, "seed") for value in (2**64, [2**64], -(2**63) - 1)),
        ([[1]], {"temperature": 10**400}, "temperature"),
        ([[1]], {"max_tokens": 2**31 - 1}, "max_tokens"),  # positions are int32
        ([[1]], {"max_tokens": 0}, "max_tokens"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": float("nan")}, "temperature"),
        ([[1]], {"top_k": 0}, "top_k"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"top_p": 1.1}, "top_p"),
        ([[1]], {"seed": [1, 2]}, "seed"),
        ([[1]], {"stop": ["text"]}, "stop"),
        ([[1]], {"stop": "text"}, "stop"),
    ],
)
def test_invalid_arguments_of_generation_are_refused_at_the_call(model, prompts, options, argument):
    with pytest.raises(ArgumentError) as refused:
        nsa.generate_tokens(model, prompts, **options)
    assert refused.value.argument == argument


@pytest.mark.parametrize("source", [None, "run", 5])
def test_a_source_that_is_neither_a_run_nor_a_model_is_refused(source):
    with pytest.raises(ArgumentError, match="source: must be the result of `load_run` or a Decoder; got"):
        nsa.generate_tokens(source, [[1]])


def test_numbers_of_other_libraries_are_accepted(model):
    own = {"max_tokens": 3, "temperature": 1.5, "top_k": 9, "top_p": 0.5, "seed": 7}
    other = {name: np.array(value)[()] for name, value in own.items()} | {"temperature": torch.tensor(1.5)}
    want = list(nsa.generate_tokens(model, [[1, 2]], **own))
    assert list(nsa.generate_tokens(model, np.array([[1, 2]]), **other)) == want
    assert list(nsa.generate_tokens(model, torch.tensor([[1, 2]]), **(other | {"seed": np.array([7])}))) == want


def test_temperature_top_k_and_top_p_cut_the_distribution():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()

    def counts(**options):
        generator = torch.Generator().manual_seed(0)
        drawn = draw(logits.expand(2000, -1), Sampling(**options), uniform([generator] * 2000))
        return drawn.bincount(minlength=4) / 2000

    torch.testing.assert_close(counts(), logits[0].exp(), rtol=0.0, atol=0.03)
    torch.testing.assert_close(counts(temperature=0.5), (2 * logits[0]).softmax(-1), rtol=0.0, atol=0.03)

    def seen(**options):
        return set(counts(**options).nonzero().flatten().tolist())

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {1, 2}
    assert seen(top_k=9) == {0, 1, 2, 3}
    assert seen(top_p=0.6) == {1, 2}
    assert seen(top_k=2, top_p=0.5) == {1}
    assert seen(top_p=0.01) == {1}
    assert seen(temperature=0.0) == {1}
    for tiny in (0.01, 1e-29, 1e-40, 1e-300):
        assert seen(temperature=tiny) == {1}
    for tiny in (1e-29, 1e-46, 1e-300):
        assert seen(top_p=tiny) == {1}, "the likeliest token always stays"


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"top_k": 3}], ids=str)
def test_a_token_without_a_share_is_never_drawn(options):
    nothing = -float("inf")
    logits = torch.tensor([[nothing, 0.0, nothing, 1.0, nothing]])
    numbers = torch.tensor([[0.0], [0.2], [0.9], [1.0 - 2.0**-53]], dtype=torch.float64)
    drawn = draw(logits.expand(4, -1), Sampling(**options), numbers).tolist()
    assert set(drawn) == {1, 3}
    assert draw(torch.full_like(logits, nothing), Sampling(**options), numbers[:1]).tolist() == [-1]


class Replayed(batch.DecodeGraphs):
    """Computes on the CPU what a GPU would replay, into the same tensors."""

    def _capture(self, completes):
        self._compute(completes)  # as before a capture
        kept = torch.zeros(len(self._sequences), self._model.vocab_size)
        return SimpleNamespace(replay=lambda: kept.copy_(self._compute(completes))), kept


@pytest.fixture
def replaying(monkeypatch):
    """From the call on, generation uses such graphs. Returns a list that starts and reads of steps are added to."""

    def start():
        events, run, read, build = [], Replayed.run, batch.Pending.read, batch.TokenBatch.__init__

        def with_graphs(self, *arguments):
            build(self, *arguments)
            self._graphs = Replayed(self._model, self._cache, self._sequences, self._sampling)
            self._graphs.feed(self._pending._tokens_B)

        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(batch.TokenBatch, "__init__", with_graphs)
        monkeypatch.setattr(Replayed, "run", lambda *x: events.append("start") or run(*x))
        monkeypatch.setattr(batch.Pending, "read", lambda *x: events.append("read") or read(*x))
        return events

    return start


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_steps_that_are_started_ahead_draw_the_same_tokens(model, replaying, temperature, is_deterministic):
    """Rows that end early, and pages that others get while a step of theirs is under way."""
    prompts, options = (
        [[1, 2, 3], [9], list(range(40))],
        {"max_tokens": 90, "temperature": temperature, "seed": [1, 2, 3]},
    )
    free = list(nsa.generate_tokens(model, prompts, **options))
    options["stop"] = [tokens_of(free, 0)[5], tokens_of(free, 1)[70]]
    want = list(nsa.generate_tokens(model, prompts, **options))
    assert len({len(tokens_of(want, prompt)) for prompt in range(3)}) > 1
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        replaying()
        assert list(nsa.generate_tokens(model, prompts, **options)) == want
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_cache_grows_with_the_text_and_not_with_max_tokens(model, replaying, monkeypatch, is_ahead):
    """Over the end of a page, while rows end; and with a limit that no memory could hold."""
    prompts, options = [[1, 2, 3], [9], list(range(40))], {"max_tokens": 45, "seed": [1, 2, 3], "stop": [0]}
    want = list(nsa.generate_tokens(model, prompts, **options))
    assert min(len(tokens_of(want, number)) for number in range(3)) < 40
    rooms, grow = [], batch.KVCache.grow
    monkeypatch.setattr(batch.KVCache, "grow", lambda self, *to: grow(self, *to) or rooms.append(self.max_length - 40))
    monkeypatch.setattr(batch, "FIRST_ROOM", 5)
    if is_ahead:
        replaying()
    assert list(nsa.generate_tokens(model, prompts, **options)) == want
    assert rooms == [10, 20, 40, 45], "in few steps, and not beyond the limit"
    endless = nsa.generate_tokens(model, prompts, **(options | {"max_tokens": 2**31 - 41}))
    assert [next(endless)[:2] for _ in range(20)] == [piece[:2] for piece in want[:20]]


def test_text_that_outgrows_the_memory_ends_with_an_error_that_says_so(model, monkeypatch):
    monkeypatch.setattr(batch, "FIRST_ROOM", 5)
    generated, pieces = nsa.generate_tokens(model, [[1]], max_tokens=10**6), []
    monkeypatch.setattr("nsa.nn.cache.device_memory", lambda device: 2.0**10)
    with pytest.raises(OutOfMemoryError, match=r"no memory for more than 5 new tokens of each prompt: .*cpu has 0;"):
        pieces.extend(generated)
    assert len(pieces) == 5


def test_the_next_step_starts_before_tokens_are_read_and_none_after_the_end(model, replaying):
    events = replaying()
    generated = nsa.generate_tokens(model, [[1, 2]], max_tokens=3, temperature=0.0)
    assert events == []
    next(generated)
    assert events == ["start", "read"]
    assert len(list(generated)) == 2
    assert events == ["start", "read", "start", "read", "read"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_logits_that_are_not_finite_are_an_error(replaying, temperature, is_ahead):
    model = small()
    generated = (replaying() if is_ahead else None, nsa.generate_tokens(model, [[1], [2]], temperature=temperature))[1]
    next(generated), next(generated)
    with torch.no_grad():
        model.head.weight[3] = float("nan")
    with pytest.raises(NumericsError, match="not finite, in prompt 0"):
        list(generated)
