"""Statistics of a corpus: counts, document lengths, and the beginnings of some documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from nsa.config.schema import DataConfig
from nsa.data.chat import ChatTokenizer, chat_template_of
from nsa.data.corpus import BATCH_CHARS, Counts, TokenFile, Tokenised, join, tokenise
from nsa.data.sequences import random_order
from nsa.data.sources.base import Skipped, Source, groups
from nsa.data.sources.chat import ChatSource
from nsa.data.sources.registry import open_source
from nsa.data.sources.token_files import FORMATS
from nsa.data.token_corpora import open_corpora
from nsa.data.token_shards import open_shards, read_documents, read_manifest
from nsa.data.tokenizers import TOKENIZER_FILE, TokenArray, Tokenizer, tokenizer_for
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
    names = [made_with.name, str(folder / TOKENIZER_FILE)]
    tokenizer = _tokenizer_of(data, names, made_with.fingerprint) if samples else None
    if tokenizer is not None:
        texts = _samples(open_shards([folder], tokenizer)[0], tokenizer, samples)
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
        texts = _samples(corpus, tokenizer, samples)
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
    batches = groups(islice(documents, limit), len, BATCH_CHARS)
    found = join((tokenise(texts, tokenizer) for texts in batches), tokenizer)
    about = f"{source.name}: {counted(len({u.path for u in units}), 'file')}"
    if next(documents, None) is not None:
        about += f", the first {counted(limit, 'document')}"
    if isinstance(tokenizer, ChatTokenizer):
        tokenizer.close()
    return Statistics(about, found.lengths, found.text_bytes, skipped, _samples(found, tokenizer, samples))


def _samples(documents: Tokenised[TokenArray | TokenFile], tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns the beginnings of `count` documents, the same documents in every call."""
    if not len(documents.lengths):
        return []
    corpus = documents.select(np.ones(len(documents.lengths), dtype=bool))
    texts = []
    for document in sorted(random_order(corpus.num_documents, 0, 0)[:count].tolist()):
        tokens = np.empty(min(int(corpus.lengths[document]), SAMPLE_TOKENS), dtype=corpus.dtype)
        corpus.read(document, 0, tokens)
        texts.append(tokenizer.decode(tokens.tolist()) + (" ..." if corpus.lengths[document] > SAMPLE_TOKENS else ""))
    return texts


def _tokenizer_of(data: DataConfig, names: list[str], fingerprint: str) -> Tokenizer | None:
    """Returns the tokenizer with this fingerprint: the configured one, or one of `names`; None if none has it."""
    for candidate in (data, *(data.model_copy(update={"tokenizer": name}) for name in names)):
        try:
            tokenizer = tokenizer_for(candidate)
        except NSAError:
            continue
        if tokenizer.fingerprint == fingerprint:
            return tokenizer
    return None
