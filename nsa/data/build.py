"""From a configuration to what a run reads: tokenizer, sources, training and validation batches."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar, cast

from nsa.config.schema import DataConfig, SourceConfig, TrainConfig
from nsa.data.corpus import Corpus, Tokenised, build_corpora, join, split_corpus, tokenise_units
from nsa.data.lanes import LengthIndex, StreamedSequences, UnitReader, choose_lanes, collect_validation
from nsa.data.loader import Loader
from nsa.data.opening import open_source, tokenizer_for
from nsa.data.sequences import BestFit, Cut, Mixture, Row, Sequences
from nsa.data.shards import open_shards
from nsa.data.sources.base import RemoteSource, Skipped, Source, Tally
from nsa.data.stream import PackedStream, SyntheticStream
from nsa.data.tokenizers import Tokenizer
from nsa.data.waiting import Activity
from nsa.errors import ConfigError, DataError

__all__ = ["Data", "Place", "build_data", "open_source", "tokenizer_for"]

T = TypeVar("T")
_VALIDATION_SEED = 0  # validation reads the same sequences whatever the run's seed
IN_MEMORY_BYTES = 4 << 30  # of tokens; more belong into shards


@dataclass(frozen=True)
class Opened(Generic[T]):
    """Training and validation (None without a split), ready to be read, and a line about both.

    `fingerprint` is another one when the documents, the tokenizer or the split are; `commits` are the states of
    repositories that are read; `activity` tells what the sources are at; `started` is called when the first batch is
    there, `close` at the end.
    """

    train: T
    validation: T | None
    summary: str
    fingerprint: str
    commits: tuple[str, ...] = ()
    activity: Activity = field(default_factory=Activity)
    started: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None

    def waiting_for(self) -> str | None:
        return self.activity.waiting_for()


@dataclass(frozen=True)
class Place:
    """Where the run keeps what it learns about streamed units, and which rank writes it."""

    folder: Path | None = None
    rank: int = 0


Data = Opened[Loader]  # what a run reads
_Part = Opened[Sequences]  # one source of it


def build_data(
    data: DataConfig,
    train: TrainConfig,
    tokenizer: Tokenizer,
    place: Place | None = None,
    activity: Activity | None = None,
) -> Data:
    """Opens everything that is configured. Another thread can see in `activity` how far that has come."""
    place, activity = place or Place(), activity or Activity()
    if not data.mixture:
        part = _build_part(data, data, train, tokenizer, place, activity)
    else:
        part = _build_mixture(data, train, tokenizer, place, activity)
    loader = partial(Loader, seq_len=train.seq_len, isolate_documents=data.isolate_documents)
    validation = None if part.validation is None else loader(part.validation)
    return Data(
        loader(part.train),
        validation,
        part.summary,
        _digest(part.fingerprint, tokenizer.fingerprint, str(data.validation_fraction)),
        part.commits,
        activity,
        part.started,
        part.close,
    )


def _build_mixture(
    data: DataConfig, train: TrainConfig, tokenizer: Tokenizer, place: Place, activity: Activity
) -> _Part:
    parts = []
    for number, source in enumerate(data.mixture):
        folder = None if place.folder is None else place.folder / f"data_index_{number}"
        parts.append(_build_part(source, data, train, tokenizer, replace(place, folder=folder), activity))
    weights = [source.weight for source in data.mixture]
    validations = [part.validation for part in parts if part.validation is not None]
    shares = [f"{weight / sum(weights):.1%} {part.summary}" for weight, part in zip(weights, parts, strict=True)]
    return _Part(
        Mixture([part.train for part in parts], weights, train.seed),
        Mixture(validations, weights, _VALIDATION_SEED) if validations else None,
        "mixture: " + " | ".join(shares),
        _digest(*(f"{weight} {part.fingerprint}" for weight, part in zip(weights, parts, strict=True))),
        tuple(commit for part in parts for commit in part.commits),
        started=partial(_call_all, [part.started for part in parts]),
        close=partial(_call_all, [part.close for part in parts]),
    )


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _build_part(
    source: SourceConfig,
    data: DataConfig,
    train: TrainConfig,
    tokenizer: Tokenizer,
    place: Place,
    activity: Activity,
) -> _Part:
    if source.source == "synthetic":
        return _synthetic(data, train, tokenizer)
    if source.source == "prepared":
        shards = open_shards([Path(path) for path in source.paths], tokenizer)
        corpora = split_corpus(shards.pieces, shards.lengths, shards.keys, data.validation_fraction)
        return _from_corpora("prepared", *corpora, Skipped(), shards.fingerprint, data, train, tokenizer)
    opened = open_source(source, data.first_batch_s)
    if source.source == "fineweb_edu":
        return _streamed(cast(RemoteSource, opened), data, train, tokenizer, place, activity)
    tally = Tally("parts tokenised")
    activity.count(opened.name, tally)
    everything = join(_tokenise_all(opened, tokenizer, data.workers, tally), tokenizer, IN_MEMORY_BYTES)
    corpora = build_corpora(everything, data.validation_fraction)
    fingerprint = _digest(everything.keys.tobytes().hex(), everything.lengths.tobytes().hex())
    return _from_corpora(source.source, *corpora, everything.skipped, fingerprint, data, train, tokenizer)


def _tokenise_all(source: Source, tokenizer: Tokenizer, workers: int, tally: Tally) -> Iterator[Tokenised]:
    """Every unit in order; threads are a few units ahead, which helps where the tokenizer lets them run."""
    found = source.units()
    tally.of = len(found)
    units = iter(found)
    pool = ThreadPoolExecutor(max(1, workers))
    waiting: deque[Future[Tokenised]] = deque()
    try:
        while True:
            for unit in islice(units, 4 * max(1, workers) - len(waiting)):
                waiting.append(pool.submit(partial(tokenise_units, source, unit, tokenizer=tokenizer)))
            if not waiting:
                return
            yield waiting.popleft().result()
            tally.done += 1
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _from_corpora(
    name: str,
    training: Corpus,
    validation: Corpus | None,
    skipped: Skipped,
    fingerprint: str,
    data: DataConfig,
    train: TrainConfig,
    tokenizer: Tokenizer,
) -> _Part:
    _check_length(training, train.seq_len, "training", "use more text or a smaller train.seq_len")
    sequences = _sequences(name, training, train.seed, data, train, tokenizer)
    validation_sequences = None
    if validation is not None:
        remedy = "use more text, a larger data.validation_fraction (0 for no validation) or a smaller train.seq_len"
        _check_length(validation, train.seq_len, "validation", remedy)
        validation_sequences = _sequences(name, validation, _VALIDATION_SEED, data, train, tokenizer)
    parts = [f"{training.num_documents:,} training documents, {training.num_tokens:,} tokens"]
    if validation is not None:
        parts.append(f"{validation.num_documents:,} validation documents, {validation.num_tokens:,} tokens")
    parts += [f"skipped {count:,} ({reason})" for reason, count in sorted(skipped.reasons.items())]
    if isinstance(sequences, BestFit):
        parts.append(f"best fit in {sequences.count:,} sequences, {sequences.waste:.2%} padding")
    return _Part(sequences, validation_sequences, f"{name}: " + "; ".join(parts), fingerprint)


def _sequences(
    name: str, corpus: Corpus, seed: int, data: DataConfig, train: TrainConfig, tokenizer: Tokenizer
) -> Sequences:
    if data.packing == "best_fit":
        return BestFit(corpus, train.seq_len, seed, tokenizer.separator, name)
    return Cut(PackedStream(corpus, seed), train.seq_len, seed, name)


def _streamed(
    source: RemoteSource, data: DataConfig, train: TrainConfig, tokenizer: Tokenizer, place: Place, activity: Activity
) -> _Part:
    if data.packing == "best_fit":
        raise ConfigError(
            "data.packing: best_fit needs the lengths of all documents, which a stream does not have; "
            "write shards with `nsa data prepare` first, or choose concat"
        )
    activity.watch(source)
    fingerprint = source.fingerprint()
    known = _digest(fingerprint, tokenizer.fingerprint, str(data.validation_fraction))
    if place.folder is not None:
        place.folder.mkdir(parents=True, exist_ok=True)
    index = LengthIndex(place.folder, place.rank, known)
    reader = UnitReader(source, tokenizer, data.validation_fraction, data.workers, index)
    activity.count(source.name, reader.tokenised)
    lanes = choose_lanes(train.batch_size, len(reader.units))
    sequences = StreamedSequences(reader, train.seq_len, train.seed, lanes)
    validation = None
    if data.validation_fraction:
        tokens = train.eval_sequences * train.seq_len + 1
        validation = Lazy(lambda: _collected(source.name, reader, tokens, train))
    rows = sum(unit.stop - unit.start for unit in reader.units)
    files = len({unit.path for unit in reader.units})
    summary = f"{source.name}: {files:,} files, {len(reader.units):,} row groups, {rows:,} rows, streamed"
    commits = () if source.commit is None else (source.commit,)
    if commits:
        summary += f", commit {source.commit}"

    def close() -> None:
        reader.close()
        source.give_up()

    started = partial(source.be_patient, data.timeout_s)
    return _Part(sequences, validation, summary, fingerprint, commits, started=started, close=close)


def _collected(name: str, reader: UnitReader, tokens: int, train: TrainConfig) -> Sequences:
    corpus = collect_validation(reader, tokens)
    _check_length(corpus, train.seq_len, "validation", "use a larger data.validation_fraction or 0 for no validation")
    return Cut(PackedStream(corpus, _VALIDATION_SEED), train.seq_len, _VALIDATION_SEED, name)


class Lazy:
    """Sequences that are put together when they are first asked for."""

    def __init__(self, make: Callable[[], Sequences]):
        self._make = make
        self._made: Sequences | None = None

    @property
    def made(self) -> Sequences:
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def count(self) -> int | None:
        return self.made.count

    def row(self, number: int) -> Row:
        return self.made.row(number)

    def num_targets(self, numbers: range) -> int:
        return self.made.num_targets(numbers)

    def expect(self, numbers: Iterable[int]) -> None:
        self.made.expect(numbers)

    def shares(self, number: int) -> dict[str, int]:
        return self.made.shares(number)


def _synthetic(data: DataConfig, train: TrainConfig, tokenizer: Tokenizer) -> _Part:
    def sequences(validation: bool) -> Sequences:
        stream = SyntheticStream(train.seed, train.seq_len, tokenizer.separator, validation=validation)
        return Cut(stream, train.seq_len, train.seed, "synthetic")

    validation = sequences(True) if data.validation_fraction else None
    return _Part(sequences(False), validation, "synthetic: invented phrases without end", "synthetic 1")


def _check_length(corpus: Corpus, seq_len: int, side: str, remedy: str) -> None:
    if corpus.num_tokens <= seq_len:
        raise DataError(
            f"train.seq_len: a sequence needs {seq_len + 1} tokens and the {side} documents hold "
            f"{corpus.num_tokens}; {remedy}"
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
