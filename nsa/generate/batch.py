"""A batch of prompts that is continued token by token, with a cache; on a GPU a step is the replay of a CUDA graph.

Legend: B rows, one for each prompt; C channels, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.errors import ArgumentError
from nsa.generate.sampling import Sampling, draw
from nsa.nn.cache import CacheStep, KVCache
from nsa.nn.model import Decoder


class TokenBatch:
    """Continues prompts of any lengths, each as if it were alone.

    `next()` gives a new token for every row in `rows`, `end(row)` takes a row out. The model runs when tokens are asked
    for, so nothing is computed that nobody reads.
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
        self._model, self._sampling = model, sampling
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        lengths = [len(prompt) for prompt in prompts]
        total = sum(lengths) + len(prompts) * max_tokens
        self._cache = KVCache(model, sequences=len(prompts), max_length=max(lengths) + max_tokens, tokens=total)
        self._sequences = [self._cache.add() for _ in prompts]
        self._logits = self._read(prompts, lengths)  # a row for each of `rows`
        self._drawn: dict[int, int] = {}  # the tokens that the model has not read yet
        is_cuda = self._cache.device.type == "cuda"
        self._graphs = DecodeGraphs(model, self._cache, self._sequences) if is_cuda else None

    def next(self) -> dict[int, int]:
        """The next token of every row, by row."""
        if self._drawn:
            self._logits = self._step([self._drawn[row] for row in self.rows])
        drawn = draw(self._logits, self._sampling, [self._generators[row] for row in self.rows])
        self._drawn = dict(zip(self.rows, drawn.tolist(), strict=True))
        return self._drawn

    def end(self, row: int) -> None:
        self.rows.remove(row)
        self._cache.free(self._sequences[row])

    @torch.no_grad()
    def _read(self, prompts: Sequence[Sequence[int]], lengths: list[int]) -> Tensor:
        """Fills the cache; logits [B, V] after every prompt."""
        tokens_BS = torch.zeros(len(prompts), max(lengths), dtype=torch.int64, device="cpu")
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)] = torch.tensor(prompt, device="cpu")
        step = self._cache.append(lengths, self._sequences)
        hidden_BSC = self._model.hidden(tokens_BS.to(self._cache.device), cache=step)
        logits_BV: Tensor = self._model.head(
            torch.stack([hidden_BSC[row, length - 1] for row, length in enumerate(lengths)])
        )
        return logits_BV

    @torch.inference_mode()
    def _step(self, tokens: list[int]) -> Tensor:
        """Logits after one more token of every row in `rows`."""
        if self._graphs is not None:
            return self._graphs.run(tokens, self.rows)
        step = self._cache.append(1, [self._sequences[row] for row in self.rows])
        tokens_B1 = torch.tensor(tokens, device=self._cache.device)[:, None]
        logits_BV: Tensor = self._model.head(self._model.hidden(tokens_B1, cache=step)[:, 0])
        return logits_BV


class DecodeGraphs:
    """The step of one token as CUDA graphs over all rows; those that have ended take part as padding.

    There are two: most steps complete no compressed block, and one graph leaves compression out.
    """

    def __init__(self, model: Decoder, cache: KVCache, sequences: list[int]):
        self._model, self._cache, self._sequences = model, cache, sequences
        self._slots_B = torch.tensor(sequences, dtype=torch.int32, device=cache.device)
        self._count_B = torch.zeros_like(self._slots_B)
        self._tokens_B1 = torch.zeros(len(sequences), 1, dtype=torch.int64, device=cache.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = {completes: self._capture(completes) for completes in (True, False)}
        self._rows: list[int] = []

    def run(self, tokens: list[int], rows: list[int]) -> Tensor:
        """Logits of the given rows after their tokens. Valid until the next call."""
        counts = [1] * len(rows)
        starts = self._cache.reserve(counts, [self._sequences[row] for row in rows])
        at = torch.tensor(rows, device="cpu")
        if rows != self._rows:
            self._rows = list(rows)
            self._count_B.copy_(torch.zeros_like(self._count_B, device="cpu").index_fill_(0, at, 1), non_blocking=True)
        padded = torch.zeros(len(self._sequences), 1, dtype=torch.int64, device="cpu")
        padded[at, 0] = torch.tensor(tokens, device="cpu")
        self._tokens_B1.copy_(padded, non_blocking=True)
        graph, logits_BV = self._graphs[self._cache.completes(starts, counts)]
        graph.replay()
        return logits_BV if len(rows) == len(self._sequences) else logits_BV[rows]

    def _capture(self, completes: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """All rows are padding here: kernels are compiled and memory is found, and the cache stays as it is."""
        # Autocast's copies of the weights would be freed with its context, and a replay would still read them.
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
        return logits_BV


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ArgumentError("prompts", "must hold at least one prompt")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ArgumentError("prompts", f"prompt {number} must hold at least one token")
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ArgumentError("prompts", f"prompt {number} has a token that is not below {model.vocab_size}")
