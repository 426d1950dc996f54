"""Builds the training and validation loaders of a run from its configuration."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from nsa.config.schema import DataConfig, SourceConfig, TrainConfig
from nsa.data.chat import ChatTokenizer, chat_template_of
from nsa.data.corpus import Corpus, TokenFile, Tokenised, join, tokenise_unit
from nsa.data.lanes import LengthIndex, StreamedSequences, UnitReader, choose_lanes, collect_validation
from nsa.data.loader import Loader
from nsa.data.recall import SHORTEST, Parts, RecallSequences
from nsa.data.sequences import BestFit, Concat, MaskedSequences, Mixture, Sequences, SyntheticSequences
from nsa.data.sources.base import Skipped, Source
from nsa.data.sources.chat import ChatSource
from nsa.data.sources.dataset import HubDataset
from nsa.data.sources.registry import open_source
from nsa.data.sources.token_files import FORMATS
from nsa.data.tasks import TASKS
from nsa.data.threads import Progress, in_threads
from nsa.data.token_corpora import open_corpora
from nsa.data.token_shards import ShardTokens, open_shards
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.data.waiting import Activity
from nsa.errors import ConfigError, DataError, reworded
from nsa.files import make_folder
from nsa.formatting import counted

_VALIDATION_SEED = 0  # validation reads the same sequences for every seed of the run
CORPUS_INDEX = "data_index.docs"  # the hash and the length of every document of a tokenised corpus
IN_MEMORY_BYTES = 4 << 30  # maximum size of the tokens of a corpus that is not in shards


@dataclass(frozen=True)
class Data:
    """The loaders of one source or a mixture (`validation` is None without a split), and a summary of both.

    `fingerprint` changes with the documents, the tokenizer and the split. `streams` are read during training.
    """

    train: Loader
    validation: Loader | None
    summary: str
    fingerprint: str
    streams: tuple[UnitReader, ...] = ()

    @property
    def commits(self) -> list[str]:
        """The commits of the repositories that the streams read."""
        return [stream.source.commit for stream in self.streams if stream.source.commit is not None]

    @property
    def skipped(self) -> Skipped:
        """The documents that the streams of this rank have skipped so far, by reason."""
        return sum((stream.skipped for stream in self.streams), Skipped())

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def build_data(
    data: DataConfig,
    train: TrainConfig,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    rank: int = 0,
    activity: Activity | None = None,
    checked: slice = slice(None),
) -> Data:
    """Opens the configured sources. `activity` reports the progress to other threads.

    A file of this rank in `folder`, the run folder, stores the lengths of streamed units. `checked` selects the
    prepared shards whose hashes are compared.
    """
    builder = _Builder(data, train, tokenizer, rank, checked, activity or Activity())
    folder = folder and folder.resolve()  # its path may contain links; the files in it must not be links
    built = builder.mixture(folder) if data.mixture else builder.part(data, folder)
    fingerprint = _digest(built.fingerprint, tokenizer.fingerprint, str(data.validation_fraction))
    return replace(built, fingerprint=fingerprint)


@dataclass(frozen=True)
class _Builder:
    data: DataConfig
    train: TrainConfig
    tokenizer: Tokenizer
    rank: int
    checked: slice
    activity: Activity

    def mixture(self, folder: Path | None) -> Data:
        sources = self.data.mixture
        parts = []
        for n, source in enumerate(sources):
            with _naming(n, source):
                parts.append(self.part(source, folder and folder / f"data_index_{n}"))
        weights = [source.weight for source in sources]
        shares = [f"{weight / sum(weights):.1%} {part.summary}" for weight, part in zip(weights, parts, strict=True)]

        def mix(loaders: Iterable[Loader | None], seed: int) -> Sequences:
            opened = []
            for n, loader in enumerate(loaders):
                with _naming(n, sources[n]):
                    opened += [] if loader is None else [loader.sequences]
            return Mixture(opened, weights, seed)

        return self._data(
            lambda: mix((part.train for part in parts), self.train.seed),
            lambda: mix((part.validation for part in parts), _VALIDATION_SEED),
            "mixture: " + " | ".join(shares),
            _digest(*(f"{weight} {part.fingerprint}" for weight, part in zip(weights, parts, strict=True))),
            tuple(stream for part in parts for stream in part.streams),
        )

    def part(self, source: SourceConfig, folder: Path | None) -> Data:
        if source.source == "synthetic":
            ids = self.tokenizer.separator, self.tokenizer.vocab_size
            make = partial(SyntheticSequences, self.train.seq_len, self.train.seed, *ids)
            summary = "synthetic: endless generated phrases"
            return self._data(make, partial(make, validation=True), summary, "synthetic 1")
        if source.source == "recall":
            return self._recall(source)
        if source.source == "prepared":
            shards, fingerprint = open_shards(source.paths, self.tokenizer)
            progress = self.activity.add("prepared", Progress("shards checked"))
            list(in_threads(ShardTokens.check, shards.pieces[self.checked], self.data.workers, progress))
            return self._from_documents("prepared", shards, fingerprint)
        if source.source in FORMATS:
            return self._corpus(source, folder)
        if source.source == "chat":
            return self._chat(source)
        opened = open_source(source, self.data.timeout_s)
        if source.source in ("fineweb_edu", "hub"):
            return self._streamed(cast(HubDataset, opened), folder)
        return self._in_memory(opened, self.tokenizer)

    def _in_memory(self, source: Source, tokenizer: Tokenizer) -> Data:
        progress = self.activity.add(source.name, Progress("parts tokenised"))
        read = partial(tokenise_unit, source, tokenizer=tokenizer, progress=progress)
        parts = in_threads(read, source.units(), self.data.workers, progress)
        everything = join(parts, tokenizer, IN_MEMORY_BYTES)
        fingerprint = _digest(everything.keys.tobytes().hex(), everything.lengths.tobytes().hex())
        return self._from_documents(source.name, everything, fingerprint)

    def _chat(self, source: SourceConfig) -> Data:
        template = chat_template_of(self.data)
        assert template is not None
        with closing(ChatTokenizer(self.tokenizer, template)) as tokenizer:
            return self._in_memory(tokenizer.source(source.paths), tokenizer)

    def _data(
        self,
        training: Callable[[], Sequences],
        validation: Callable[[], Sequences],
        summary: str,
        fingerprint: str,
        streams: tuple[UnitReader, ...] = (),
    ) -> Data:
        loader = partial(Loader, seq_len=self.train.seq_len, isolate_documents=self.data.isolate_documents)
        held_out = loader(validation) if self.data.validation_fraction else None
        return Data(loader(training), held_out, summary, fingerprint, streams)

    def _recall(self, source: SourceConfig) -> Data:
        seq_len = self.train.seq_len
        longest = source.document_tokens or seq_len
        if longest > seq_len:
            raise ConfigError(
                f"data.document_tokens: {longest} is more than the {seq_len} tokens of a sequence (train.seq_len); "
                f"choose at most {seq_len}, or leave it unset"
            )
        if source.task != "pairs" and longest < SHORTEST:
            raise ConfigError(
                f"data.document_tokens: {longest} tokens are too few for data.task={source.task}; "
                f"choose at least {SHORTEST}"
            )
        parts = TASKS.get(source.task, Parts)
        make = partial(RecallSequences, self.tokenizer, seq_len, longest, parts=parts)
        held_out = partial(make, _VALIDATION_SEED, validation=True)
        task = "" if source.task == "pairs" else f" {source.task}"
        summary = f"recall: endless generated{task} documents of up to {longest:,} tokens"
        identity = f"recall {parts.version} {longest}{task}"
        return self._data(partial(make, self.train.seed), held_out, summary, identity)

    def _corpus(self, source: SourceConfig, folder: Path | None) -> Data:
        cache = _made(folder) / CORPUS_INDEX if folder else None
        progress = self.activity.add(source.source, Progress("blocks checked"))
        arguments = (source.source, source.paths, self.tokenizer, self.data.workers, progress, cache)
        return self._from_documents(source.source, *open_corpora(*arguments, may_write=self.rank == 0))

    def _from_documents(self, name: str, documents: Tokenised[TokenArray | TokenFile], fingerprint: str) -> Data:
        training, validation = documents.split(self.data.validation_fraction, is_only=len(self.data.mixture) < 2)
        self._check_length(training, "training", "use more text or a smaller train.seq_len")
        parts = [f"{counted(training.num_documents, 'training document')}, {training.num_tokens:,} tokens"]
        if self.data.validation_fraction:
            remedy = "use more text, a larger data.validation_fraction (0 for no validation) or a smaller train.seq_len"
            self._check_length(validation, "validation", remedy)
            parts.append(
                f"{counted(validation.num_documents, 'validation document')}, {validation.num_tokens:,} tokens"
            )
        parts += [f"skipped {count:,} ({reason})" for reason, count in sorted(documents.skipped.items())]
        sequences = self._sequences(name, training, self.train.seed)
        packed = sequences.marked if isinstance(sequences, MaskedSequences) else sequences
        if isinstance(packed, BestFit):
            parts.append(f"best fit in {counted(packed.count, 'sequence')}, {packed.waste:.2%} padding")
        if packed is not sequences:
            cut = int((training.lengths > self.train.seq_len).sum())
            parts.append(f"only answers are targets; {cut:,} conversations are longer than a sequence and are cut")
        held_out = partial(self._held_out, name, validation)
        return self._data(lambda: sequences, held_out, f"{name}: " + "; ".join(parts), fingerprint)

    def _sequences(self, name: str, corpus: Corpus, seed: int) -> Sequences:
        packed: Concat | BestFit
        if self.data.packing == "best_fit":
            packed = BestFit(corpus, self.train.seq_len, seed, self.tokenizer.separator, name)
        else:
            packed = Concat(corpus, self.train.seq_len, seed, name)
        return MaskedSequences(packed) if name == ChatSource.name else packed

    def _held_out(self, name: str, corpus: Corpus) -> Sequences:
        sequences = self._sequences(name, corpus, _VALIDATION_SEED)
        first = min(self.train.eval_sequences, sequences.count or 0)
        if not sequences.num_targets(range(first)):
            raise DataError(
                f"data.validation_fraction: the first {first} validation sequences contain no answer of an assistant; "
                "use a larger fraction (0 for no validation) or a larger train.eval_sequences"
            )
        return sequences

    def _streamed(self, source: HubDataset, folder: Path | None) -> Data:
        if self.data.packing == "best_fit":
            raise ConfigError(
                "data.packing: best_fit needs the lengths of all documents, which a stream does not have; "
                "write shards with `nsa data prepare` first, or choose concat"
            )
        self.activity.watch(source)
        fingerprint, fraction = source.fingerprint(), self.data.validation_fraction
        if folder is not None:
            _made(folder)
        index = LengthIndex(folder, self.rank, _digest(fingerprint, self.tokenizer.fingerprint, str(fraction)))
        reader = UnitReader(source, self.tokenizer, fraction, self.data.workers, index)
        self.activity.add(source.name, reader.tokenised)
        if not reader.units:
            raise DataError(f"data.source: {source.name} contains no rows; give files that contain text")
        lanes = choose_lanes(self.train.batch_size, len(reader.units))
        sequences = StreamedSequences(reader, self.train.seq_len, self.train.seed, lanes)
        rows = sum(unit.stop - unit.start for unit in reader.units)
        files = len({unit.path for unit in reader.units})
        sizes = f"{counted(files, 'file')}, {counted(len(reader.units), 'row group')}, {counted(rows, 'row')}"
        summary = f"{source.name}: {sizes}, streamed"
        if source.commit is not None:
            summary += f", commit {source.commit}"
        validation = partial(self._collect_validation, reader)
        return self._data(lambda: sequences, validation, summary, fingerprint, (reader,))

    def _collect_validation(self, reader: UnitReader) -> Sequences:
        corpus = collect_validation(reader, self.train.eval_sequences * self.train.seq_len + 1)
        remedy = "use a larger data.validation_fraction or 0 for no validation"
        self._check_length(corpus, "validation", remedy)
        return Concat(corpus, self.train.seq_len, _VALIDATION_SEED, reader.source.name)

    def _check_length(self, corpus: Corpus, side: str, remedy: str) -> None:
        if corpus.num_tokens <= self.train.seq_len:
            raise DataError(
                f"train.seq_len: a sequence needs {self.train.seq_len + 1} tokens and the {side} documents have "
                f"{corpus.num_tokens}; {remedy}"
            )


@contextmanager
def _naming(number: int, source: SourceConfig) -> Iterator[None]:
    """Adds the entry of the mixture to the message of an error."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data.mixture: entry {number + 1} ({source.source}): {error}") from None


def _made(folder: Path) -> Path:
    """Creates the folder of a source in the run folder."""
    with reworded(DataError, f"{folder}: cannot be used", "remove it"):
        make_folder(folder)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
