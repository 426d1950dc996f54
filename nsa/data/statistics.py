"""Statistics of a corpus: counts, document lengths, and the beginnings of some documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from nsa.config.schema import DataConfig
from nsa.data.chat import ChatTokenizer, chat_template_of
from nsa.data.corpus import BATCH_CHARS, Counts, TokenFile, Tokenised, tokenise
from nsa.data.sequences import random_order
from nsa.data.sources.base import Skipped, Source, groups
from nsa.data.sources.chat import ChatSource
from nsa.data.sources.registry import open_source
from nsa.data.sources.token_files import FORMATS
from nsa.data.token_corpora import open_corpora
from nsa.data.token_shards import open_shards, read_documents, read_manifest
from nsa.data.tokenizers import TokenArray, Tokenizer, tokenizer_for
from nsa.errors import DataError, NSAError
from nsa.formatting import counted

SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class Statistics:
    """`lengths` has the number of tokens of every document."""

    about: str
    lengths: Counts
    text_bytes: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    def histogram(self) -> list[tuple[str, int]]:
        """Counts documents by their number of tokens, in ranges that double."""
        counts = np.bincount(np.log2(self.lengths).astype(np.int64)).tolist()
        return [(f"{1 << n:,} to {(2 << n) - 1:,}", count) for n, count in enumerate(counts) if count]


def of_shards(folder: Path, data: DataConfig, samples: int) -> Statistics:
    """Computes the statistics of all documents in prepared shards. Samples need the tokenizer of the shards."""
    manifest = read_manifest(folder)
    made_with = manifest.tokenizer
    lengths = np.concatenate([np.empty(0, np.int64), *(read_documents(folder, entry)[0] for entry in manifest.shards)])
    tokenizer = _tokenizer_of(data, made_with.name, made_with.fingerprint) if samples else None
    if tokenizer is not None:
        texts = _samples_of_corpus(open_shards([folder], tokenizer)[0], tokenizer, samples)
    else:
        texts = [f"(to see text, set data.tokenizer to {made_with.name!r}, as for these shards)"] if samples else []
    about = f"{folder} ({made_with.name}, from {manifest.source})"
    return Statistics(about, lengths, manifest.text_bytes, manifest.skipped, texts)


def of_source(data: DataConfig, samples: int, limit: int) -> Statistics:
    """Computes the statistics of the first `limit` documents of a source, or of all documents of a tokenised corpus."""
    if data.mixture:
        raise DataError("data.mixture: look at one source at a time")
    if data.source == "prepared":
        raise DataError("data.source: name the folder of the shards instead: nsa data stats FOLDER")
    tokenizer = tokenizer_for(data)
    if data.source in FORMATS:
        corpus, _ = open_corpora(data.source, data.paths, tokenizer, data.workers)
        texts = _samples_of_corpus(corpus, tokenizer, samples)
        about = f"{data.source}: {counted(len(corpus.pieces), 'file')}"
        return Statistics(about, corpus.lengths, 0, corpus.skipped, texts)
    source: Source
    if data.source == ChatSource.name and (template := chat_template_of(data)) is not None:
        tokenizer = chat = ChatTokenizer(tokenizer, template)
        source = chat.source(data.paths)
    else:
        source = open_source(data, data.timeout_s)
    units, skipped = source.units(), Skipped()
    documents = (text for unit in units for text in source.documents(unit, skipped))
    lengths, beginnings, text_bytes = [], [], 0
    for texts in groups(islice(documents, limit), len, BATCH_CHARS):
        part = tokenise(texts, tokenizer)
        text_bytes += part.text_bytes
        for tokens in np.split(part.pieces[0], np.cumsum(part.lengths)[:-1]):
            lengths.append(len(tokens))
            beginnings.append(tokens[:SAMPLE_TOKENS].copy())  # a copy, so that the part is freed
    about = f"{source.name}: {counted(len({u.path for u in units}), 'file')}"
    if next(documents, None) is not None:
        about += f", the first {counted(limit, 'document')}"
    if isinstance(tokenizer, ChatTokenizer):
        tokenizer.close()
    counts = np.array(lengths, dtype=np.int64)
    texts = _samples(counts, beginnings.__getitem__, tokenizer, samples)
    return Statistics(about, counts, text_bytes, skipped, texts)


def _samples_of_corpus(documents: Tokenised[TokenFile], tokenizer: Tokenizer, count: int) -> list[str]:
    lengths = documents.lengths
    if not len(lengths):
        return []
    corpus = documents.select(np.ones(len(lengths), dtype=bool))

    def beginning_of(document: int) -> TokenArray:
        tokens = np.empty(min(int(lengths[document]), SAMPLE_TOKENS), dtype=corpus.dtype)
        corpus.read(document, 0, tokens)
        return tokens

    return _samples(lengths, beginning_of, tokenizer, count)


def _samples(lengths: Counts, beginning_of: Callable[[int], TokenArray], tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns the beginnings of `count` documents, the same documents in every call."""
    chosen = sorted(random_order(len(lengths), 0, 0)[:count].tolist())
    return [tokenizer.decode(beginning_of(i).tolist()) + (" ..." if lengths[i] > SAMPLE_TOKENS else "") for i in chosen]


def _tokenizer_of(data: DataConfig, name: str, fingerprint: str) -> Tokenizer | None:
    """Returns the tokenizer with this fingerprint: the configured one, or the one called `name`; None if neither is."""
    for candidate in (data, data.model_copy(update={"tokenizer": name})):
        try:
            tokenizer = tokenizer_for(candidate)
        except NSAError:
            continue
        if tokenizer.fingerprint == fingerprint:
            return tokenizer
    return None
