"""Estimates the GPU memory of a configuration before it runs: `estimate`, and `Planner` for other settings.

`memory_trace` traces one training pass on fake tensors. The memory of optimizer and strategy follows from the number of
parameters (`Planner._parts`). An estimate is the peak of a step after the first, as `torch.cuda.max_memory_allocated`
reports it, of a model that is not compiled. The savings of torch.compile are not modelled: `COMPILED_SHARES` is the
measured range.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nsa.checks.memory_trace import Moment, muon_bytes, trace
from nsa.checks.memory_workspaces import BLAS_BYTES
from nsa.config import Config
from nsa.config.schema import COMPILED_IN_PARTS
from nsa.data.tokenizers import tokenizer_for
from nsa.errors import ConfigError
from nsa.nn.attention import attention_layers
from nsa.nn.cache import LONGEST, KVCache
from nsa.nn.loss import LONG_PASS, logits_at_once
from nsa.nn.model import build_model
from nsa.parallel.context import data_ranks
from nsa.parallel.numerics import DTYPES
from nsa.parallel.strategy import effective
from nsa.parallel.transform import Granularity
from nsa.parallel.world import choose_strategy
from nsa.train.optimizer import hidden_matrices
from nsa.train.state import freeze, micro_batch_size

GIB = 2**30
# Usually from the most memory to the least.
GRANULARITIES: tuple[Granularity, ...] = ("none", "branch", "selective", "block")
# Activations and temporaries of compiled blocks as a share of the estimate: lowest and highest measurement (the 125M
# model with NSA or dense attention on an H200; bench/results). Not measured: "branch", and context parallelism, whose
# blocks are compiled in two parts.
COMPILED_SHARES = {"none": (0.75, 0.78), "selective": (0.90, 0.99), "block": (0.90, 0.99)}
# The same shares if the MLP of a recomputed pass runs in chunks, which compiling does not reduce.
LONG_COMPILED_SHARES = {"none": COMPILED_SHARES["none"], "selective": (1.03, 1.05)}
# The same shares with runtime.float8: two measurements of the 1B model with NSA when gate and up were one product, none
# with recomputation.
FLOAT8_COMPILED_SHARES = {"none": (0.57, 0.60)}
# Memory besides the estimate: the CUDA context with its kernels and NCCL, and fragmentation as a share.
CONTEXT_GIB, GAPS = 1.0, 0.05
# GiB that PyTorch reports for each card.
CARDS = {"24gb": 23.5, "a100-40gb": 39.4, "l40s": 44.4, "a100-80gb": 79.1, "h100": 79.1, "h200": 139.8, "b200": 178.3}
MAX_GIB = 1024.0  # of a card; more is probably a number of MiB
COMMON_CARDS = ("24gb", "a100-40gb", "a100-80gb", "h200")
GPT2_VOCABULARY = 50_257

_FLOAT32 = 4  # bytes of each weight, gradient and AdamW moment


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one rank.

    `parts`, in bytes, add up to the peak: weights, gradients, optimizer, the kinds of `memory_trace.Moment`, and
    `strategy`, the buffers of DDP or FSDP. Few gradients may exist at the peak; `all_gradients` is their size when
    backward ends and activations are freed.
    """

    micro_batch: int
    checkpointing: Granularity
    moment: str  # the phase of a step with the peak
    parts: dict[str, float]
    all_gradients: float
    compiled_gib: tuple[float, float] | None  # range of the expected peak with torch.compile; None if not measured
    planned_gib: float  # upper end of the expected peak with the configured runtime.compile

    @property
    def peak_gib(self) -> float:
        """The peak without torch.compile."""
        return _peak_gib(self.parts)

    @property
    def needed_gib(self) -> float:
        """The memory that a card must have."""
        return self.planned_gib * (1 + GAPS) + CONTEXT_GIB


@dataclass(frozen=True)
class Card:
    name: str
    gib: float


def estimate(config: Config, nproc: int = 1) -> Estimate:
    """Estimates the memory of each of `nproc` ranks under this configuration."""
    return Planner(config, nproc).estimate()


@dataclass(frozen=True)
class CacheEstimate:
    """Memory of generation with a cache (`nsa.nn.KVCache`) in the compute dtype, in bytes.

    parts     memory of one sequence of `tokens` tokens, by part of the cache
    weights   memory of the model's weights
    """

    tokens: int
    dtype: str
    parts: dict[str, int]
    weights: int

    def most_sequences(self, card: Card) -> int:
        """Returns how many sequences fit a card besides the weights, without the memory for processing a prompt."""
        free = (card.gib - CONTEXT_GIB) / (1 + GAPS) * GIB - self.weights
        return max(0, int(free / sum(self.parts.values())))


def find_card(text: str) -> Card:
    """Finds a card by its name, or creates one from its memory in GiB."""
    wanted = text.strip().lower()
    if wanted in CARDS:
        return Card(wanted, CARDS[wanted])
    try:
        gib = float(wanted.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = 0.0
    if not 0.0 < gib < MAX_GIB:
        raise ConfigError(f"--card: unknown card {text!r}; use {', '.join(CARDS)}, or GiB such as 40")
    return Card(f"{gib:g} GiB", gib)


def present_card() -> Card | None:
    """Returns the first GPU of this machine, if there is one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, properties.total_memory / GIB)


class Planner:
    """Estimates the memory of one configuration for any micro-batch and granularity of checkpointing."""

    def __init__(self, config: Config, nproc: int = 1):
        if nproc < 1:
            raise ConfigError(f"--nproc: must be at least 1, got {nproc}")
        self.config, self.nproc = config, nproc
        self.strategy = choose_strategy(config.parallel.strategy, nproc)
        self.precision = "bf16" if config.runtime.precision == "auto" else config.runtime.precision
        groups = data_ranks(config.parallel.context, nproc)
        self.micro_batch = micro_batch_size(config, groups)
        self.share = config.train.batch_size // groups  # sequences per step of a rank or a context group
        self._shards = nproc if self.strategy == "fsdp" else 1
        wanted = config.parallel.fsdp.param_dtype if self.strategy == "fsdp" else "fp32"
        self.param_dtype = DTYPES[self.precision if wanted == "auto" else wanted]  # in forward and backward
        self._vocab_size = vocabulary_size(config)
        with torch.device("meta"):
            self._model = build_model(config, self._vocab_size, seed=0)
        for _, layer in attention_layers(self._model):
            layer.prepare(config.train.seq_len)
        freeze(self._model, config.train.freeze)
        self._parameters = self._model.num_parameters()
        self._trainable = self._model.num_parameters(trainable_only=True)
        self._traces: dict[tuple[Granularity, int], dict[str, Moment]] = {}

    @property
    def not_counted(self) -> list[str]:
        teacher, graphs = self.config.train.teacher, self.config.runtime.cuda_graphs
        return [
            *(["train.teacher, whose weights every rank stores in float32, and its forward pass"] if teacher else []),
            *(["runtime.cuda_graphs=true, which needs the memory of a pass twice"] if graphs is True else []),
            *(["that train.freeze keeps fewer activations"] if self.config.train.freeze else []),
        ]

    def estimate(self, micro_batch: int | None = None, checkpointing: Granularity | None = None) -> Estimate:
        size = micro_batch or self.micro_batch
        granularity = checkpointing or self.config.runtime.gradient_checkpointing
        phases = self._trace(granularity, size)
        found = {name: self._parts(moment, size < self.share) for name, moment in phases.items()}
        found["optimizer step"] = self._step_parts(size < self.share)
        highest = max(found, key=lambda name: _peak_gib(found[name]))
        planned, compiled = _peak_gib(found[highest]), None
        is_long = size * self.config.train.seq_len >= LONG_PASS
        measured = LONG_COMPILED_SHARES if is_long else COMPILED_SHARES
        shares = (measured if self.config.runtime.float8 == "none" else FLOAT8_COMPILED_SHARES).get(granularity)
        if shares is not None and self.config.parallel.context == 1:
            # In the head, a loss has three float32 copies of the logits. A compiled one has the logits and their
            # gradient in the dtype of the products.
            logits = logits_at_once(size * self.config.train.seq_len, self._vocab_size)
            joined = (3 * _FLOAT32 - 2 * DTYPES[self.precision].itemsize) * logits / GIB
            low, high = (
                max(_peak_gib(parts, share) - joined * name.startswith("head") for name, parts in found.items())
                for share in shares
            )
            compiled, planned = (low, high), high if self.config.runtime.compile else planned
        gradients = _FLOAT32 * self._trainable / self._shards
        return Estimate(size, granularity, highest, found[highest], gradients, compiled, planned)

    def estimate_cache(self, tokens: int) -> CacheEstimate:
        """Estimates the cache of one sequence without allocating it."""
        if not 1 <= tokens <= LONGEST:
            raise ConfigError(f"--cache: must be from 1 to {LONGEST} tokens, got {tokens}")
        dtype = DTYPES[self.precision]

        def cache(sequences: int, max_length: int) -> KVCache:
            return KVCache(self._model, sequences=sequences, max_length=max_length, dtype=dtype)

        # All pages have the same size, so the pages of a long sequence need not be created to count them.
        page = cache(1, 1).page_size
        one, two, longer = (cache(*sizes).memory() for sizes in ((1, page), (2, page), (1, 2 * page)))
        more_pages = -(-tokens // page) - 1
        parts = {part: two[part] - one[part] + more_pages * (longer[part] - one[part]) for part in one}
        return CacheEstimate(tokens, self.precision, parts, self._parameters * dtype.itemsize)

    def fit(self, card: Card) -> tuple[int, int]:
        """Returns the largest micro-batch that fits a card, to 1 %, and the largest that also divides the sequences of
        a rank in a step; 0 if no sequence fits."""

        def excess(size: int) -> float:
            return self.estimate(size).needed_gib - card.gib

        if excess(1) > 0:
            return 0, 0
        largest, larger = 1, max(2, self.micro_batch)  # the first fits, the second may fit
        while (fits := excess(larger) <= 0) or larger - largest > max(1, largest // 100):
            rise = max(1e-9, excess(larger) - excess(largest))
            reached = largest + int((larger - largest) * -excess(largest) / rise)  # if memory grows linearly
            if fits:  # tracing a pass far larger than the card is slow
                largest, larger = larger, min(8 * larger, max(larger, reached) + 1 + reached // 200)
            else:
                size = min(max(largest + 1, reached), larger - 1)
                largest, larger = (size, larger) if excess(size) <= 0 else (largest, size)
        divisors = (n for n in range(self.share, 0, -1) if self.share % n == 0)
        return largest, next(n for n in divisors if n <= largest and excess(n) <= 0)

    def advice(self, card: Card) -> list[str]:
        """Returns settings, each sufficient alone, with which the configuration fits the card; empty if it fits."""
        if self.estimate().needed_gib <= card.gib:
            return []
        more = GRANULARITIES.index(self.config.runtime.gradient_checkpointing) + 1
        in_parts = self.config.runtime.compile and self.config.parallel.context > 1
        kinds = [g for g in GRANULARITIES[more:] if g in COMPILED_IN_PARTS or not in_parts]
        options = {f"runtime.gradient_checkpointing={g}": self.estimate(None, g) for g in kinds}
        ddp = self.config.parallel.ddp
        has_passes = ddp.safe_mode or not ddp.static_graph  # a static graph needs one pass a step
        usable = self.fit(card)[1] if has_passes else 0
        if usable:
            options[f"train.micro_batch={usable}"] = self.estimate(usable)
        if self.strategy == "ddp":
            sharded = _replace(self.config, "parallel", strategy="fsdp")
            options["parallel.strategy=fsdp"] = estimate(sharded, self.nproc)
        fitting = {setting: found for setting, found in options.items() if found.needed_gib <= card.gib}
        if not fitting:
            setting = "train.micro_batch=1 " * has_passes + "runtime.gradient_checkpointing=block"
            smallest = self.estimate(1 if has_passes else None, "block")
            if smallest.needed_gib > card.gib:
                needed = f"even {setting} needs {smallest.needed_gib:.1f} GiB"
                return [f"a larger card, more GPUs with parallel.strategy=fsdp, or a shorter train.seq_len: {needed}"]
            fitting = {setting: smallest}
        return [f"{setting} ({found.planned_gib:.1f} GiB)" for setting, found in fitting.items()]

    def _trace(self, granularity: Granularity, micro_batch: int) -> dict[str, Moment]:
        key = granularity, micro_batch
        if key not in self._traces:
            config = _replace(self.config, "model", vocab_size=self._vocab_size)
            config = _replace(config, "train", micro_batch=micro_batch)
            config = _replace(config, "runtime", precision=self.precision, gradient_checkpointing=granularity)
            self._traces[key] = trace(config, self.param_dtype)
        return self._traces[key]

    def _parts(self, moment: Moment, accumulates: bool) -> dict[str, float]:
        """Returns the bytes of a rank at a moment, for P parameters, of which T are trained, and N ranks.

        single   weights 4P, AdamW moments 8T (Muon: 4 per parameter that it updates), gradients up to 4T as backward
                 creates them
        ddp      as single, and buckets of 4T; gradients are views of the buckets unless `bucket_view` is off. While a
                 step accumulates, gradients are stored outside the buckets
        fsdp     weights, moments and gradients divided by N, plus `_fsdp_bytes`. While a step accumulates, full
                 gradients

        With several passes in a step, all gradients exist from the start of the last pass, which has the peak.
        """
        trained = _FLOAT32 * self._trainable
        # The share of gradients that backward has created so far; the trace freezes no parameter.
        created = moment.gradients / (self.param_dtype.itemsize * self._parameters)
        gradients = created * trained / self._shards
        strategy = {"single": 0.0, "ddp": trained, "fsdp": self._fsdp_bytes}[self.strategy]
        if self.strategy == "fsdp" and accumulates:
            gradients += DTYPES[self.config.parallel.fsdp.reduce_dtype].itemsize * self._trainable
        elif accumulates:
            gradients = trained
        elif self.strategy == "ddp" and effective(self.config.parallel.ddp).bucket_view:
            gradients = 0.0
        moments = 2 * trained - _FLOAT32 * sum(matrix.numel() for matrix in self._muon_matrices)
        weights, optimizer = _FLOAT32 * self._parameters / self._shards, moments / self._shards
        traced_kinds = {kind: max(0.0, size) for kind, size in vars(moment).items() if kind != "gradients"}
        traced_kinds["workspaces"] += BLAS_BYTES
        state = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        return state | traced_kinds | {"strategy": strategy}

    def _step_parts(self, accumulates: bool) -> dict[str, float]:
        """Returns the bytes of a rank in the optimizer step, when all gradients exist, and neither activations nor
        FSDP's buffers."""
        after = Moment(gradients=self.param_dtype.itemsize * self._parameters, workspaces=self._muon_bytes)
        is_sharded = self.strategy == "fsdp"
        return self._parts(after, accumulates and not is_sharded) | ({"strategy": 0.0} if is_sharded else {})

    @cached_property
    def _muon_matrices(self) -> list[nn.Parameter]:
        return hidden_matrices(self._model) if self.config.train.optimizer == "muon" else []

    @cached_property
    def _muon_bytes(self) -> float:
        return muon_bytes(self._muon_matrices, self._shards) if self._muon_matrices else 0.0

    @cached_property
    def _fsdp_bytes(self) -> float:
        """Returns the bytes of FSDP's buffers. Gathered in the parameter dtype: the model outside the blocks, two
        units, one in use and one being prefetched (with `grad_op` all units), and the message of a third. Also the
        gradients of one unit, and the message that reduces them."""
        options, layers = self.config.parallel.fsdp, self.config.model.n_layers
        largest = max(sum(p.numel() for p in block.parameters()) for block in self._model.blocks)
        unit = largest * min(options.blocks_per_unit, layers)
        released = 0 if options.sharding == "grad_op" else max(0, layers * largest - 2 * unit)
        gathered = self._parameters - released
        message = unit if self.nproc > 1 else 0
        return self.param_dtype.itemsize * (gathered + message + unit) + DTYPES[options.reduce_dtype].itemsize * unit


def _peak_gib(parts: dict[str, float], compiled_share: float = 1.0) -> float:
    return (sum(parts.values()) - (1 - compiled_share) * (parts["activations"] + parts["temporaries"])) / GIB


def vocabulary_size(config: Config) -> int:
    """The vocabulary size of a configuration, without a download."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    # The size of GPT-2's vocabulary is known without a download.
    return GPT2_VOCABULARY if config.data.tokenizer == "gpt2" else tokenizer_for(config.data).vocab_size


def _replace(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
