"""Two measures of a trained model. Neither needs the logits of a whole sequence at once.

Loss by position: the validation loss by the number of tokens of context, in buckets that double.

Recall: the share of answers that greedy decoding would give exactly, by the depth of the key. Prompts contain their
answers, so one forward pass decides: decoding is exact if and only if every token of the answer is the most likely one
after the tokens before it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa.data.build import build_data
from nsa.data.loader import Batch, Loader
from nsa.data.recall import Prompt, Prompts
from nsa.data.tasks import TaskPrompts
from nsa.errors import ConfigError, DataError
from nsa.nn.model import Decoder
from nsa.parallel.numerics import compute_precision, numerics
from nsa.train.state import AUTOCAST_TYPES
from nsa.train.trained import TrainedRun

TOKENS_PER_PASS = {"cuda": 1 << 16, "cpu": 1 << 12}  # the time of the reference is quadratic
TOKENS_PER_HEAD = 1 << 11  # tokens whose logits exist at once


@dataclass(frozen=True)
class Bucket:
    """The mean loss in nats of the `tokens` targets that have `first` to `last` tokens of context."""

    first: int
    last: int
    tokens: int
    loss: float


@contextmanager
def inference(run: TrainedRun) -> Iterator[None]:
    """A context in which the model computes as in the run, without gradients."""
    device = run.model.head.weight.device
    dtype = AUTOCAST_TYPES.get(compute_precision(run.config.runtime.precision, device))
    autocast = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    with numerics(run.config.runtime), torch.no_grad(), autocast:
        yield


def loss_by_position(
    run: TrainedRun, length: int, *, check: bool = True, named: Callable[[str], None] = lambda data: None
) -> list[Bucket]:
    """Measures the loss on as many tokens as a validation of the run, in sequences of `length`. Call it in `inference`.

    `check` compares prepared shards with their hashes, which is needed only once. `named` is called with a summary of
    the data.
    """
    train = run.config.train
    wanted = max(1, train.eval_sequences * train.seq_len // length)
    try:
        changed = train.model_copy(update={"seq_len": length, "eval_sequences": wanted})
        checked = slice(None if check else 0)
        data = build_data(run.config.data, changed, run.tokenizer, checked=checked)
    except (ConfigError, DataError) as error:
        if "train.seq_len" not in str(error):
            raise
        problem = str(error).partition(";")[0]  # what follows is advice for training
        remedy = "choose another length, or name other text with data.* overrides"
        raise type(error)(f"--lengths: {length} does not fit the data: {problem}; {remedy}") from None
    try:
        if data.validation is None:
            raise ConfigError(
                "data.validation_fraction: is 0, and only documents for validation are measured; name text that "
                "the run did not train on with data.* overrides, with data.validation_fraction=0.5 for half of it"
            )
        named(data.summary)
        found = data.validation.sequences.count
        buckets = _loss_of(run.model, data.validation, wanted if found is None else min(wanted, found))
        if not buckets:
            raise DataError("train.eval_sequences: no validation sequence has a token that counts; raise it")
        return buckets
    finally:
        data.close()


def _loss_of(model: Decoder, loader: Loader, sequences: int) -> list[Bucket]:
    device = model.head.weight.device
    last = (loader.seq_len - 1).bit_length() - 1  # the last bucket includes the full length
    sums = torch.zeros(2, last + 1, dtype=torch.float64, device=device)
    at_once = max(1, TOKENS_PER_PASS[device.type] // loader.seq_len)
    for first in range(0, sequences, at_once):
        batch = loader.batch(first, min(at_once, sequences - first)).to(device)
        hidden = model.hidden(batch.inputs, batch.cu_seqlens, batch.max_seqlen).flatten(0, 1)
        targets, bucket = batch.targets.flatten(), _buckets(batch).clamp(max=last)
        for some in torch.arange(len(targets), device=device).split(TOKENS_PER_HEAD):
            nats = cross_entropy(model.head(hidden[some]).float(), targets[some], reduction="none").double()
            sums[0].index_add_(0, bucket[some], nats)
            sums[1].index_add_(0, bucket[some], (targets[some] >= 0).double())
    return [
        Bucket(1 << n, loader.seq_len if n == last else (2 << n) - 1, int(tokens), nats / tokens)
        for n, (nats, tokens) in enumerate(zip(*sums.tolist(), strict=True))
        if tokens
    ]


def _buckets(batch: Batch) -> Tensor:
    """Returns the bucket of every target: floor(log2(tokens of context))."""
    rows, tokens = batch.inputs.shape
    place = torch.arange(tokens, dtype=torch.int32, device=batch.inputs.device)
    if batch.cu_seqlens is not None:
        place = place - batch.cu_seqlens[torch.searchsorted(batch.cu_seqlens, place, right=True) - 1]
    return torch.frexp((place + 1).double()).exponent.long().sub(1).repeat(rows)


def recall_by_depth(run: TrainedRun, prompts: Prompts | TaskPrompts, samples: int) -> list[float]:
    """Returns the share of exact answers at every depth, or level of a task, from `samples` each. Call it in
    `inference`."""
    asked, at_once = prompts.questions(samples), TOKENS_PER_PASS[run.model.head.weight.device.type]
    exact = np.zeros(prompts.num_depths)
    waiting: list[Prompt] = []
    for number, depths in enumerate(asked):
        waiting.append(prompts.make(depths, number))
        if number + 1 == len(asked) or (len(waiting) + 1) * prompts.length > at_once:
            for prompt, answers in zip(waiting, exact_answers(run.model, waiting), strict=True):
                exact[prompt.depths] += answers
            waiting = []
    return [float(share) for share in exact / samples]


def exact_answers(model: Decoder, prompts: Sequence[Prompt]) -> list[list[bool]]:
    """Returns for every prompt whether greedy decoding gives each of its answers, after the correct earlier answers."""
    device = model.head.weight.device
    starts = np.cumsum([0, *(len(prompt.tokens) for prompt in prompts)])
    tokens = torch.from_numpy(np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int64)).to(device)
    borders = torch.from_numpy(starts.astype(np.int32)).to(device)
    hidden = model.hidden(tokens[None], borders, max(len(prompt.tokens) for prompt in prompts))[0]
    places = torch.tensor(
        [
            start + place
            for start, prompt in zip(starts[:-1].tolist(), prompts, strict=True)
            for span in prompt.spans
            for place in range(*span)
        ],
        device=device,
    )
    right = iter((model.head(hidden[places - 1]).argmax(-1) == tokens[places]).tolist())
    return [[all(list(islice(right, len(range(*span))))) for span in prompt.spans] for prompt in prompts]
