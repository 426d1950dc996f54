"""What a corpus looks like: counts, how long documents are, and the beginnings of a few."""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from nsa.config.schema import DataConfig
from nsa.data.corpus import Counts, Tokenised, tokenise
from nsa.data.opening import open_source, tokenizer_for
from nsa.data.shards import map_tokens, read_documents, read_manifest
from nsa.data.sources.base import Skipped, Source
from nsa.data.stream import random_order
from nsa.data.tokenizers import TokenArray, Tokenizer
from nsa.errors import DataError, NSAError

SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class Statistics:
    """`histogram` counts documents by tokens, in ranges that double."""

    about: str
    documents: int
    tokens: int
    text_bytes: int
    median: int = 0
    mean: float = 0.0
    shortest: int = 0
    longest: int = 0
    histogram: list[tuple[str, int]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def of_shards(folder: Path, data: DataConfig, samples: int) -> Statistics:
    """Of every document in prepared shards. Samples need the tokenizer that they were made with."""
    manifest = read_manifest(folder)
    made_with = manifest["tokenizer"]
    entries = manifest["shards"]
    lengths = [read_documents(folder, entry)[0] for entry in entries]
    texts: list[str] = []
    if samples:
        tokenizer = _tokenizer_of(data, made_with["name"], made_with["fingerprint"])
        for entry, documents in zip(entries, lengths, strict=True):
            if tokenizer is None or len(texts) == samples or not entry.tokens:
                continue
            tokens = map_tokens(folder, entry, np.dtype(made_with["dtype"]))
            texts += _samples(tokens, documents, tokenizer, samples - len(texts))
        if tokenizer is None:
            texts = [f"(set data.tokenizer to {made_with['name']!r}, which made these shards, to see text)"]
    about = f"{folder} ({made_with['name']}, from {manifest['source']})"
    joined = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
    return _describe(about, joined, manifest["text_bytes"], manifest["skipped"], texts)


def of_source(data: DataConfig, samples: int, limit: int) -> Statistics:
    """Of the first `limit` documents of a source as it is."""
    if data.mixture:
        raise DataError("data.mixture: look at one source at a time")
    source, tokenizer = open_source(data, data.timeout_s), tokenizer_for(data)
    units = source.units()
    found, seen_all = _first(source, tokenizer, limit)
    about = f"{source.name}: {len({u.path for u in units}):,} files"
    if not seen_all:
        about += f", the first {limit:,} documents"
    texts = _samples(found.tokens, found.lengths, tokenizer, samples)
    return _describe(about, found.lengths, found.text_bytes, found.skipped.reasons, texts)


def _first(source: Source, tokenizer: Tokenizer, limit: int) -> tuple[Tokenised, bool]:
    skipped = Skipped()
    documents = (text for unit in source.units() for text in source.documents(unit, skipped))
    found = tokenise(islice(documents, limit), tokenizer, skipped)
    return found, next(documents, None) is None


def _samples(tokens: TokenArray, lengths: Counts, tokenizer: Tokenizer, count: int) -> list[str]:
    """The beginnings of a few documents, the same ones every time."""
    texts = []
    starts = np.cumsum(lengths) - lengths
    for document in sorted(random_order(len(lengths), 0, 0)[:count].tolist()):
        start, length = int(starts[document]), int(lengths[document])
        shown = tokens[start + 1 : start + min(length, SAMPLE_TOKENS)]
        texts.append(tokenizer.decode(shown.tolist()) + (" ..." if length > SAMPLE_TOKENS else ""))
    return texts


def _tokenizer_of(data: DataConfig, name: str, fingerprint: str) -> Tokenizer | None:
    """The tokenizer with that fingerprint: the configured one, or the one of that name, if it can be had."""
    for candidate in (data, data.model_copy(update={"tokenizer": name})):
        try:
            tokenizer = tokenizer_for(candidate)
        except NSAError:
            continue
        if tokenizer.fingerprint == fingerprint:
            return tokenizer
    return None


def _describe(about: str, lengths: Counts, text_bytes: int, skipped: dict[str, int], samples: list[str]) -> Statistics:
    if not len(lengths):
        return Statistics(about, 0, 0, text_bytes, skipped=skipped)
    histogram = []
    low = 1
    while low <= lengths.max():
        count = int(((lengths >= low) & (lengths < 2 * low)).sum())
        if count:
            histogram.append((f"{low:,} to {2 * low - 1:,}", count))
        low *= 2
    return Statistics(
        about,
        len(lengths),
        int(lengths.sum()),
        text_bytes,
        int(np.median(lengths)),
        float(lengths.mean()),
        int(lengths.min()),
        int(lengths.max()),
        histogram,
        skipped,
        samples,
    )
