"""Batches as a pure function of (seed, global position).

An epoch's stream is cut into sequences of S inputs and, one further, S targets; the sequences come in an order
drawn from (seed, epoch), so that a batch mixes documents. What is left at an epoch's end, fewer than S tokens, is
read in another epoch's order or not at all. A separator stands before every document, so the last target of a
document is "it ends here" and every target counts.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.corpus import Corpus, build_corpora
from nsa.data.sources import Skipped, python_documents, text_documents
from nsa.data.stream import PackedStream, SyntheticStream, TokenStream, random_order
from nsa.data.tokenizers import Tokenizer
from nsa.errors import ConfigError, DataError

_SEQUENCE_KEYS = 1 << 63  # sets the keys of sequence orders apart from those of document orders
_VALIDATION_SEED = 0  # validation reads the same sequences whatever the run's seed


@dataclass(frozen=True)
class Batch:
    """inputs and targets [B, S] int64. With document borders: B = 1, sequences back to back, `cu_seqlens` int32."""

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None

    def to(self, device: torch.device) -> "Batch":
        borders = None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True)
        return Batch(self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), borders)


class Loader:
    """Cuts a stream into sequences and sequences into batches."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int, *, isolate_documents: bool):
        self.stream = stream
        self.seq_len = seq_len
        self.seed = seed
        self.isolate_documents = isolate_documents
        self._epoch_order = lru_cache(maxsize=2)(self._compute_epoch_order)

    @property
    def num_sequences(self) -> int | None:
        """Sequences in one epoch; None for an endless stream."""
        return None if self.stream.length is None else self.stream.length // self.seq_len

    def first_token(self, sequence: int) -> int:
        """Where in the stream sequence number `sequence` of the run starts."""
        if self.stream.length is None or self.num_sequences is None:
            return sequence * self.seq_len
        epoch, place = divmod(sequence, self.num_sequences)
        return epoch * self.stream.length + int(self._epoch_order(epoch)[place]) * self.seq_len

    def _compute_epoch_order(self, epoch: int) -> NDArray[np.int64]:
        assert self.num_sequences is not None
        return random_order(self.num_sequences, self.seed, epoch + _SEQUENCE_KEYS)

    def batch(self, first_sequence: int, count: int) -> Batch:
        rows, starts = [], []
        for row in range(count):
            tokens, borders = self.stream.read(self.first_token(first_sequence + row), self.seq_len + 1)
            rows.append(tokens.astype(np.int64))
            inside = borders[(borders > 0) & (borders < self.seq_len)]
            starts.append(np.concatenate([[0], inside]) + row * self.seq_len)
        joined = torch.from_numpy(np.stack(rows))
        inputs, targets = joined[:, :-1].contiguous(), joined[:, 1:].contiguous()
        if not self.isolate_documents:
            return Batch(inputs, targets, None)
        cu_seqlens = np.concatenate([*starts, [count * self.seq_len]]).astype(np.int32)
        return Batch(inputs.view(1, -1), targets.view(1, -1), torch.from_numpy(cu_seqlens))


@dataclass(frozen=True)
class Data:
    """What a run reads: training batches, validation batches (None without a split), and a line about both."""

    train: Loader
    validation: Loader | None
    summary: str


def build_data(data: DataConfig, train: TrainConfig, tokenizer: Tokenizer) -> Data:
    if data.source == "synthetic":
        return _synthetic(data, train, tokenizer)
    skipped = Skipped()
    if data.source == "python":
        documents = python_documents(skipped)
    elif data.source == "text":
        documents = text_documents(data.paths, data.text_field, skipped)
    else:
        raise ConfigError(
            f"data.source: {data.source!r} is not available in this version; use python, text or synthetic"
        )
    training, validation = build_corpora(documents, tokenizer, data.validation_fraction)
    _check_length(training, train.seq_len, "training", "use more text or a smaller train.seq_len")
    train_loader = _loader(PackedStream(training, train.seed), train.seed, data, train)
    validation_loader = None
    if validation is not None:
        remedy = "use more text, a larger data.validation_fraction (0 for no validation) or a smaller train.seq_len"
        _check_length(validation, train.seq_len, "validation", remedy)
        validation_loader = _loader(PackedStream(validation, _VALIDATION_SEED), _VALIDATION_SEED, data, train)
    return Data(train_loader, validation_loader, _summary(data.source, training, validation, skipped))


def _loader(stream: TokenStream, seed: int, data: DataConfig, train: TrainConfig) -> Loader:
    return Loader(stream, train.seq_len, seed, isolate_documents=data.isolate_documents)


def _synthetic(data: DataConfig, train: TrainConfig, tokenizer: Tokenizer) -> Data:
    def loader(validation: bool) -> Loader:
        stream = SyntheticStream(train.seed, train.seq_len, tokenizer.separator, validation=validation)
        return _loader(stream, train.seed, data, train)

    validation = loader(True) if data.validation_fraction else None
    return Data(loader(False), validation, "synthetic: invented phrases without end")


def _check_length(corpus: Corpus, seq_len: int, side: str, remedy: str) -> None:
    tokens = len(corpus.tokens)
    if tokens <= seq_len:
        raise DataError(
            f"train.seq_len: a sequence needs {seq_len + 1} tokens and the {side} documents hold {tokens}; {remedy}"
        )


def _summary(source: str, training: Corpus, validation: Corpus | None, skipped: Skipped) -> str:
    parts = [f"{training.num_documents:,} training documents, {len(training.tokens):,} tokens"]
    if validation is not None:
        parts.append(f"{validation.num_documents:,} validation documents, {len(validation.tokens):,} tokens")
    parts += [f"skipped {count:,} ({reason})" for reason, count in sorted(skipped.reasons.items())]
    return f"{source}: " + "; ".join(parts)
