"""How much memory of a GPU a configuration will need, before it is started: `estimate`, and `Planner` for what-ifs.

One training pass is traced without allocating it (`memory_trace`); what the optimizer and the strategy hold is
arithmetic on numbers of parameters, stated in `_State`. An estimate is the highest moment of a step after the first,
as `torch.cuda.max_memory_allocated` counts it. It needs no GPU and lies within 15 % of every peak in bench/results.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from nsa.checks.memory_trace import Moment, Pass, Trace, trace
from nsa.checks.memory_workspaces import BLAS_BYTES
from nsa.config import Config
from nsa.data.tokenizers import load_tokenizer
from nsa.errors import ConfigError
from nsa.parallel.ddp import effective
from nsa.parallel.launch import choose_strategy
from nsa.parallel.recompute import Granularity
from nsa.train.state import micro_batch_size

GIB = 2**30
# From the most memory to the least, as a rule.
GRANULARITIES: tuple[Granularity, ...] = ("none", "branch", "selective", "block")
# What a card needs beside the estimate: CUDA's context with its kernels and NCCL, and gaps between tensors.
CONTEXT_GIB, GAPS = 1.0, 0.05
# GiB that PyTorch sees on each.
CARDS = {"24gb": 23.5, "a100-40gb": 39.4, "l40s": 44.4, "a100-80gb": 79.1, "h100": 79.1, "h200": 139.8, "b200": 178.3}
COMMON_CARDS = ("24gb", "a100-40gb", "a100-80gb", "h200")
GPT2_VOCABULARY = 50_257

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOAT32 = 4  # bytes of what weights, gradients and both moments of AdamW are kept in
_MOST_SEQUENCES = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank at its highest moment, by what they are for.

    `temporaries` are what backward makes for a while: recomputed activations and gradients of activations.
    `workspaces` are the kernels' own; `strategy` is what DDP or FSDP hold beside the model. At the highest moment few
    gradients may be there: `all_gradients` is what they come to when backward is over and activations are gone.
    """

    micro_batch: int
    checkpointing: Granularity
    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    workspaces: float
    strategy: float
    all_gradients: float
    moment: str  # where in a step it is highest

    @property
    def peak(self) -> float:
        kinds = (self.weights, self.gradients, self.optimizer, self.activations, self.temporaries)
        return sum(kinds) + self.workspaces + self.strategy

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB

    @property
    def needed_gib(self) -> float:
        """What a card must have for it."""
        return self.peak_gib * (1 + GAPS) + CONTEXT_GIB

    def as_json(self) -> dict[str, Any]:
        values = {name: round(v) if isinstance(v, float) else v for name, v in asdict(self).items()}
        return values | {"peak_gib": self.peak_gib, "needed_gib": self.needed_gib}


@dataclass(frozen=True)
class Card:
    name: str
    gib: float


@dataclass(frozen=True)
class Fit:
    """What a card has room for; a micro-batch of 0 says that not one sequence fits.

    `largest` counts sequences alone; `usable` also divides what a rank has to do in a step. `estimate` is of `usable`.
    """

    card: Card
    configured_fits: bool
    largest: int
    usable: int
    estimate: Estimate | None

    @property
    def left_gib(self) -> float | None:
        return None if self.estimate is None else self.card.gib - self.estimate.needed_gib


def estimate(config: Config, nproc: int = 1, *, torch_version: str = torch.__version__) -> Estimate:
    """What each of `nproc` ranks will need on its GPU under this configuration and version of PyTorch."""
    return Planner(config, nproc, torch_version=torch_version).estimate()


def find_card(text: str) -> Card:
    """A card by its name, or by its memory in GiB."""
    wanted = text.strip().lower()
    if wanted in CARDS:
        return Card(wanted, CARDS[wanted])
    try:
        gib = float(wanted.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = 0.0
    if not 0.0 < gib < float("inf"):
        raise ConfigError(f"--card: {text!r} is no card; use {', '.join(CARDS)}, or GiB such as 40")
    return Card(f"{gib:g} GiB", gib)


def present_card() -> Card | None:
    """The GPU of this machine."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, properties.total_memory / GIB)


class Planner:
    """Estimates of one configuration at any micro-batch and granularity of checkpointing.

    At the configured micro-batch they are traced; at another, each phase of the pass is drawn as a line through that
    trace and one at four times the micro-batch.
    """

    def __init__(self, config: Config, nproc: int = 1, *, torch_version: str = torch.__version__):
        if nproc < 1:
            raise ConfigError(f"--nproc: {nproc} processes cannot run; use 1 or more")
        self.config, self.nproc = config, nproc
        self.strategy = choose_strategy(config.parallel.strategy, nproc)
        self.precision = "bf16" if config.runtime.precision == "auto" else config.runtime.precision
        self.micro_batch = micro_batch_size(config, nproc)
        self.share = config.train.batch_size // nproc  # sequences of a rank in a step
        self.torch_version = torch_version
        major, minor = torch_version.split(".")[:2]
        self._norms_in_float32 = (int(major), int(minor)) >= (2, 12)  # what autocast does since then
        self._traces: dict[tuple[Granularity, int], Trace] = {}

    def estimate(self, micro_batch: int | None = None, checkpointing: Granularity | None = None) -> Estimate:
        size = micro_batch or self.micro_batch
        granularity = checkpointing or self.config.runtime.gradient_checkpointing
        moments = self._moments(size, granularity)
        state = _State(self, self._trace(granularity, self.micro_batch), accumulates=size < self.share)
        return max((state.at(name, moment, size, granularity) for name, moment in moments.items()), key=_peak)

    def fit(self, card: Card) -> Fit:
        def fits(micro_batch: int) -> bool:
            return self.estimate(micro_batch).needed_gib <= card.gib

        largest = 0
        step = _MOST_SEQUENCES
        while step:
            if largest + step <= _MOST_SEQUENCES and fits(largest + step):
                largest += step
            step //= 2
        usable = max((n for n in range(1, self.share + 1) if self.share % n == 0 and n <= largest), default=0)
        return Fit(card, fits(self.micro_batch), largest, usable, self.estimate(usable) if usable else None)

    def advice(self, card: Card) -> list[str]:
        """Settings with which the configuration fits the card, each by itself; empty where it fits as it is."""
        if self.estimate().needed_gib <= card.gib:
            return []
        found = []
        more = GRANULARITIES.index(self.config.runtime.gradient_checkpointing) + 1
        for granularity in GRANULARITIES[more:]:
            changed = self.estimate(checkpointing=granularity)
            if changed.needed_gib <= card.gib:
                found.append(f"runtime.gradient_checkpointing={granularity} ({changed.peak_gib:.1f} GiB)")
        fit = self.fit(card)
        if fit.estimate is not None:
            found.append(f"train.micro_batch={fit.usable} ({fit.estimate.peak_gib:.1f} GiB)")
        if self.strategy == "ddp":
            sharded = Planner(_with_fsdp(self.config), self.nproc, torch_version=self.torch_version).estimate()
            if sharded.needed_gib <= card.gib:
                found.append(f"parallel.strategy=fsdp ({sharded.peak_gib:.1f} GiB)")
        return found or [self._last_resort(card)]

    def _last_resort(self, card: Card) -> str:
        smallest = self.estimate(1, "block")
        change = "train.micro_batch=1 runtime.gradient_checkpointing=block"
        if smallest.needed_gib <= card.gib:
            return f"{change} ({smallest.peak_gib:.1f} GiB)"
        return (
            "a larger card, more GPUs with parallel.strategy=fsdp, or a shorter train.seq_len: "
            f"even {change} needs {smallest.needed_gib:.1f} GiB"
        )

    @cached_property
    def param_dtype(self) -> torch.dtype:
        """Type of the parameters that forward and backward see."""
        if self.strategy != "fsdp":
            return torch.float32
        wanted = self.config.parallel.fsdp.param_dtype
        return _DTYPES[self.precision if wanted == "auto" else wanted]

    @cached_property
    def vocab_size(self) -> int:
        data = self.config.data
        if self.config.model.vocab_size is not None:
            return self.config.model.vocab_size
        if data.tokenizer == "gpt2":  # known without a download
            return GPT2_VOCABULARY
        return load_tokenizer(data.tokenizer, path=data.tokenizer_path, separator=data.separator).vocab_size

    def _trace(self, granularity: Granularity, micro_batch: int) -> Trace:
        key = granularity, micro_batch
        if key not in self._traces:
            self._traces[key] = trace(
                Pass(
                    self.config,
                    self.vocab_size,
                    self.precision,
                    micro_batch,
                    granularity,
                    self.param_dtype,
                    self._norms_in_float32,
                )
            )
        return self._traces[key]

    def _moments(self, micro_batch: int, granularity: Granularity) -> dict[str, Moment]:
        here = self._trace(granularity, self.micro_batch).moments()
        if micro_batch == self.micro_batch:
            return here
        there = self._trace(granularity, 4 * self.micro_batch).moments()
        along = (micro_batch - self.micro_batch) / (3 * self.micro_batch)
        return {name: _between(moment, there[name], along) for name, moment in here.items()}


def _between(here: Moment, there: Moment, along: float) -> Moment:
    """The moment on the line through both: `here` at 0, `there` at 1."""
    start, end = asdict(here), asdict(there)
    return Moment(**{kind: max(0.0, start[kind] + along * (end[kind] - start[kind])) for kind in start})


def _peak(found: Estimate) -> float:
    return found.peak


def _with_fsdp(config: Config) -> Config:
    parallel = config.parallel.model_copy(update={"strategy": "fsdp"})
    return config.model_copy(update={"parallel": parallel})


class _State:
    """What a rank holds beside activations, of a model with P parameters of which T are trained, over N ranks.

    single   weights 4P, both moments 8T, gradients up to 4T as backward makes them
    ddp      the same and buckets of 4T; gradients are views of them unless `bucket_view` is off. While a step
             accumulates, gradients wait outside the buckets
    fsdp     weights, moments and gradients by N; gathered in the parameters' type, the rest of the model and two
             units, one in use and one on its way (with `grad_op` all of them), a third as the message it comes from;
             one unit's gradients, and again as the message that is reduced. While a step accumulates, whole gradients

    With several passes in a step all gradients live from the start of the one that is highest.
    """

    def __init__(self, planner: Planner, traced: Trace, *, accumulates: bool):
        self.planner, self.accumulates = planner, accumulates
        self.ranks = planner.nproc if planner.strategy == "fsdp" else 1
        self.weights = _FLOAT32 * traced.parameters / self.ranks
        self.trained = _FLOAT32 * traced.trainable
        self.traced_gradients = planner.param_dtype.itemsize * traced.trainable
        self.strategy = self._strategy_bytes(traced)

    def at(self, name: str, moment: Moment, micro_batch: int, granularity: Granularity) -> Estimate:
        return Estimate(
            micro_batch,
            granularity,
            weights=self.weights,
            gradients=self._gradient_bytes(moment.gradients / self.traced_gradients),
            optimizer=2 * self.trained / self.ranks,
            activations=moment.activations,
            temporaries=moment.temporaries,
            workspaces=moment.workspaces + BLAS_BYTES,
            strategy=self.strategy,
            all_gradients=self.trained / self.ranks,
            moment=name,
        )

    def _gradient_bytes(self, there: float) -> float:
        """`there`: the share of the gradients that backward has made."""
        if self.planner.strategy == "fsdp":
            whole = _DTYPES[self.planner.config.parallel.fsdp.reduce_dtype].itemsize * self.trained / _FLOAT32
            return (whole if self.accumulates else 0.0) + there * self.trained / self.ranks
        if self.accumulates:
            return self.trained
        viewed = self.planner.strategy == "ddp" and effective(self.planner.config.parallel.ddp).bucket_view
        return 0.0 if viewed else there * self.trained

    def _strategy_bytes(self, traced: Trace) -> float:
        if self.planner.strategy == "single":
            return 0.0
        if self.planner.strategy == "ddp":
            return self.trained
        options = self.planner.config.parallel.fsdp
        element, reduced = self.planner.param_dtype.itemsize, _DTYPES[options.reduce_dtype].itemsize
        unit = traced.block_parameters * min(options.blocks_per_unit, traced.layers)
        gathered = traced.other_parameters + min(2 * unit, traced.layers * traced.block_parameters)
        if options.sharding == "grad_op":
            gathered = traced.parameters
        message = unit if self.ranks > 1 else 0
        return element * (gathered + message + unit) + reduced * unit
