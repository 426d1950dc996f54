"""Continues a batch of prompts token by token with a cache; on a GPU a step is the replay of a CUDA graph.

Legend: B rows, one for each prompt; C channels, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nsa.errors import ArgumentError, NumericsError, OutOfMemoryError, reworded
from nsa.generate.sampling import Sampling, draw, uniform
from nsa.nn.cache import KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.model import Decoder

FIRST_ROOM = 4096  # new tokens per prompt that the cache has room for at first; the room doubles


class TokenBatch:
    """Continues prompts of any lengths, independently of each other. The cache grows with the text, so that a large
    `max_tokens` alone uses no memory.

    `next()` returns a new token for every row in `rows`, `end(row)` removes a row. On a CPU the model runs inside
    `next`. On a GPU a step and its sampling are one CUDA graph; the tokens stay on the GPU for the next step, which
    starts before the host has read them. At most one computed step is never read.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
    ):
        _check_prompts(model, prompts)
        self.rows = list(range(len(prompts)))
        self._model, self._sampling, self._max_tokens = model, sampling, max_tokens
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._lengths = [len(prompt) for prompt in prompts]
        self._room = min(max_tokens, FIRST_ROOM)
        max_length, tokens = self._limits()
        self._cache = KVCache(model, sequences=len(prompts), max_length=max_length, tokens=tokens)
        self._sequences = [self._cache.add() for _ in prompts]
        is_cuda = self._cache.device.type == "cuda"
        logits_BV = self._read(prompts)
        self._graphs = DecodeGraphs(model, self._cache, self._sequences, sampling) if is_cuda else None
        tokens_B = draw(logits_BV, sampling, uniform(self._generators))
        if self._graphs is not None:
            self._graphs.feed(tokens_B)
        self._drawn: dict[int, int] = {}  # the tokens that `next` returned last
        self._count = 1  # tokens drawn for each prompt
        self._pending: Pending | None = Pending(self.rows, tokens_B)

    def next(self) -> dict[int, int]:
        """The next token of every row, by row."""
        pending = self._pending or self._draw()
        is_ahead = self._graphs is not None and self._count < self._max_tokens
        self._pending = self._draw() if is_ahead else None
        self._drawn = pending.read(self.rows)
        return self._drawn

    def end(self, row: int) -> None:
        self.rows.remove(row)
        self._cache.free(self._sequences[row])

    def _limits(self) -> tuple[int, int]:
        """`max_length` and `tokens` of a cache with room for `_room` new tokens per prompt."""
        return max(self._lengths) + self._room, sum(self._lengths) + len(self._lengths) * self._room

    def _grow(self) -> None:
        written, self._room = self._room, min(2 * self._room, self._max_tokens)
        problem = f"no memory for more than {written} new tokens of each prompt"
        with reworded(OutOfMemoryError, problem, caught=(ArgumentError, torch.OutOfMemoryError)):
            self._cache.grow(*self._limits())
            if self._graphs is not None:
                self._graphs.capture()

    @torch.no_grad()
    def _read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fills the cache and returns the logits [B, V] after every prompt."""
        tokens_BS = pad_sequence([torch.tensor(prompt, device="cpu") for prompt in prompts], batch_first=True)
        step = self._cache.append(self._lengths, self._sequences)
        hidden_BSC = self._model.hidden(tokens_BS.to(self._cache.device), cache=step)
        logits_BV: Tensor = self._model.head(
            torch.stack([hidden_BSC[row, length - 1] for row, length in enumerate(self._lengths)])
        )
        return logits_BV

    @torch.inference_mode()
    def _draw(self) -> "Pending":
        """Starts computing one more token for every row in `rows`."""
        self._count += 1
        if self._count > self._room:
            self._grow()
        numbers = uniform([self._generators[row] for row in self.rows])
        if self._graphs is not None:
            return Pending(range(len(self._sequences)), self._graphs.run(self.rows, numbers))
        step = self._cache.append(1, [self._sequences[row] for row in self.rows])
        tokens_B1 = torch.tensor([self._drawn[row] for row in self.rows], device=self._cache.device)[:, None]
        logits_BV: Tensor = self._model.head(self._model.hidden(tokens_B1, cache=step)[:, 0])
        return Pending(self.rows, draw(logits_BV, self._sampling, numbers))


class Pending:
    """Tokens of some rows that are being copied from the device."""

    def __init__(self, rows: Iterable[int], tokens_B: Tensor):
        self._rows, self._tokens_B = list(rows), tokens_B.to("cpu", non_blocking=True, copy=True)
        self._arrived = torch.cuda.Event() if tokens_B.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tokens_B.device))

    def read(self, rows: Iterable[int]) -> dict[int, int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = dict(zip(self._rows, self._tokens_B.tolist(), strict=True))
        for row in rows:
            if tokens[row] < 0:
                raise NumericsError(f"the model's logits are not finite, in prompt {row}")
        return {row: tokens[row] for row in rows}


class DecodeGraphs:
    """A decoding step and the sampling of the next token as CUDA graphs over all rows; ended rows are padding.

    There are two graphs: most steps complete no compressed block, and one graph omits compression. `logits_BV` are the
    logits of the last step.
    """

    def __init__(self, model: Decoder, cache: KVCache, sequences: list[int], sampling: Sampling):
        self._model, self._cache, self._sequences, self._sampling = model, cache, sequences, sampling
        self._slots_B = torch.tensor(sequences, dtype=torch.int32, device=cache.device)
        self._count_B = torch.zeros_like(self._slots_B)
        self._tokens_B1 = torch.zeros(len(sequences), 1, dtype=torch.int64, device=cache.device)
        self._uniform_B1 = torch.zeros_like(self._tokens_B1, dtype=torch.float64)
        self._drawn_B = torch.zeros_like(self._tokens_B1[:, 0])
        # Deterministic sums run on the CPU, which a graph cannot capture.
        self._draws_inside = not torch.are_deterministic_algorithms_enabled()
        self.capture()

    def capture(self) -> None:
        """Captures the graphs; call it again after the cache has grown, since graphs read its tensors. Keeps the tokens
        that the next step reads."""
        tokens_B1 = self._tokens_B1.clone()
        self._count_B.zero_()
        self._rows: list[int] = []
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # frees earlier graphs and their pool
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = {completes: self._capture(completes) for completes in (True, False)}
        self._tokens_B1.copy_(tokens_B1)

    def feed(self, tokens_B: Tensor) -> None:
        """Sets the tokens that the next step reads, instead of the tokens that the last step drew."""
        self._tokens_B1.copy_(tokens_B.clamp(min=0)[:, None], non_blocking=True)

    def run(self, rows: list[int], uniform_B1: Tensor) -> Tensor:
        """Runs a step for the given rows and draws their next tokens with a uniform number each. Returns [B] for all
        rows, valid until the next call."""
        counts = [1] * len(rows)
        starts = self._cache.reserve(counts, [self._sequences[row] for row in rows])
        at = torch.tensor(rows, device="cpu")
        if rows != self._rows:
            self._rows = list(rows)
            self._count_B.copy_(torch.zeros_like(self._count_B, device="cpu").index_fill_(0, at, 1), non_blocking=True)
        padded = torch.zeros_like(self._uniform_B1, device="cpu").index_copy_(0, at, uniform_B1)
        self._uniform_B1.copy_(padded, non_blocking=True)
        graph, self.logits_BV = self._graphs[self._cache.completes(starts, counts)]
        graph.replay()
        if not self._draws_inside:
            self._draw(self.logits_BV)
        return self._drawn_B

    def _draw(self, logits_BV: Tensor) -> None:
        self._drawn_B.copy_(draw(logits_BV, self._sampling, self._uniform_B1))
        self.feed(self._drawn_B)

    def _capture(self, completes: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures one graph. All rows are padding meanwhile, so that warm-up does not change the cache."""
        # Autocast frees its casts of the weights with its context, and a replay would still read them.
        kind, dtype = "cuda", torch.get_autocast_dtype("cuda")
        with (
            torch.cuda.device(self._cache.device),
            torch.autocast(kind, dtype, torch.is_autocast_enabled(kind), cache_enabled=False),
        ):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(completes)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits_BV = self._compute(completes)
        return graph, logits_BV

    @torch.no_grad()
    def _compute(self, completes: bool) -> Tensor:
        cache = self._cache
        step = CacheStep(cache, self._slots_B, self._count_B, 1, cache.width, is_fresh=False, completes=completes)
        logits_BV: Tensor = self._model.head(self._model.hidden(self._tokens_B1, cache=step)[:, 0])
        if self._draws_inside:
            self._draw(logits_BV)
        return logits_BV


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ArgumentError("prompts", "must hold at least one prompt")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ArgumentError("prompts", f"prompt {number} must hold at least one token")
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ArgumentError("prompts", f"prompt {number} has a token that is not below {model.vocab_size}")
