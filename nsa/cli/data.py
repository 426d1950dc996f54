"""`nsa data prepare`, `nsa data merge`, `nsa data tokenizer`, `nsa data stats`, `nsa data verify`."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa.cli.arguments import JoinedOverrides, all_overrides, overrides_such_as
from nsa.cli.output import say
from nsa.config import load_config, parse_config
from nsa.config.load import warn_if_unlikely
from nsa.config.schema import Config, DataConfig
from nsa.errors import ConfigError, DataError
from nsa.formatting import counted

if TYPE_CHECKING:
    from nsa.data.statistics import Statistics
    from nsa.data.token_shards import Manifest

app = typer.Typer(help="Prepare, inspect and verify training data.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the shards.", show_default=False)]
OptionalFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="FOLDER", help="Folder of prepared shards; the configured source when unset.", show_default=False
    ),
]
DataOverrides = Annotated[list[str] | None, overrides_such_as("data.source=python")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="CONFIG", help="YAML file whose data section to start from.")
]


@app.command()
def prepare(
    folder: Folder,
    overrides: DataOverrides = None,
    override: JoinedOverrides = None,
    config: ConfigOption = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes that tokenize; one per usable core when unset.")
    ] = None,
    shard_mb: Annotated[int, typer.Option(metavar="MIB", min=1, help="Maximum MiB of text in a shard.")] = 64,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace shards of another preparation.")] = False,
    part: Annotated[
        str | None, typer.Option(metavar="K/N", help="Write only part K of N; `nsa data merge` joins the parts.")
    ] = None,
) -> None:
    """Write a source's documents as token shards. The same command resumes an interrupted preparation.

    For example: nsa data prepare shards data.source=text data.paths=[books] data.tokenizer=gpt2
    """
    if re.match(r"data\.\w+=", str(folder)) and not folder.is_dir():
        raise ConfigError(f"FOLDER: {folder} is an override; give the folder for the shards before the overrides")
    data = _resolve(config, overrides, override).data
    if data.mixture:
        raise ConfigError("data.mixture: prepare each source in a separate folder, then mix the folders")
    from nsa import faults
    from nsa.data.prepare import prepare as write_shards
    from nsa.data.sources.registry import open_source
    from nsa.data.tokenizers import tokenizer_for

    faults.arm(os.environ.get("NSA_FAULTS", ""))
    with _progress() as progress:
        manifest = write_shards(
            open_source(data, data.timeout_s),
            tokenizer_for(data),
            folder,
            workers=workers or _usable_cores(),
            shard_bytes=shard_mb << 20,
            fresh=fresh,
            part=_parse_part(part),
            progress=progress,
        )
    _print_prepared(folder, manifest)


@app.command()
def merge(folder: Folder) -> None:
    """Join all parts that `nsa data prepare FOLDER --part K/N` wrote. The result has the same bytes as without --part.

    The same command resumes an interrupted merge.
    """
    from nsa import faults
    from nsa.data.prepare import merge as merge_parts

    faults.arm(os.environ.get("NSA_FAULTS", ""))
    _print_prepared(folder, merge_parts(folder))


def _usable_cores() -> int:
    """The cores that this process may use. A batch system gives a job only some of its machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parse_part(part: str | None) -> tuple[int, int] | None:
    if part is None:
        return None
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--part: {part!r} is not a part; write it as K/N with K from 1 to N, for example 3/64")
    return int(found[1]), int(found[2])


def _print_prepared(folder: Path, manifest: "Manifest") -> None:
    from nsa.data.tokenizers import BUILT_IN, TOKENIZER_FILE

    part = manifest.part
    about = f"{folder}, part {part.number} of {part.of}" if part else f"{folder}"
    say(f"{about}: {_totals(manifest)} in {counted(len(manifest.shards), 'shard')}")
    _print_skipped(manifest.skipped)
    if part:
        say(f"when all {part.of} parts are prepared, join them with `nsa data merge {folder}`")
        return
    made_with, own = manifest.tokenizer, folder / TOKENIZER_FILE
    tokenizer = made_with.name
    if tokenizer not in BUILT_IN and own.is_file():
        tokenizer = f"{own}{_separator_key(own, made_with.separator)}"
    say(f"train with data.source=prepared data.paths=[{folder}] data.tokenizer={tokenizer}")


def _separator_key(file: Path, separator: int) -> str:
    """Returns the override that a tokenizer.json needs to have this separator; empty if it has it by default."""
    from tokenizers import Tokenizer

    from nsa.data.tokenizers import load_tokenizer

    with suppress(ConfigError):  # it has no separator by default
        if load_tokenizer(str(file)).separator == separator:
            return ""
    return " " + shlex.quote(f"data.separator={Tokenizer.from_file(str(file)).id_to_token(separator)}")


@app.command()
def tokenizer(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tokenizer.json to write.", show_default=False)],
    overrides: DataOverrides = None,
    override: JoinedOverrides = None,
    config: ConfigOption = None,
    vocab_size: Annotated[
        int, typer.Option(metavar="N", min=257, help="Tokens, including 256 bytes and the separator.")
    ] = 32768,
    max_mb: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="MiB of text to learn from, from the first document on.")
    ] = 256,
) -> None:
    """Train a byte-level BPE vocabulary on a source's documents.

    For example: nsa data tokenizer tokenizer.json data.source=text data.paths=[books]
    """
    data = _resolve(config, overrides, override).data
    if data.mixture:
        raise ConfigError("data.mixture: learn a vocabulary from one source; name it with data.source")
    from nsa.data.sources.registry import open_source
    from nsa.data.vocabulary import train_bpe

    source, skipped = open_source(data, data.timeout_s), Counter[str]()
    documents = (text for unit in source.units() for text in source.documents(unit, skipped))
    size, read = train_bpe(documents, file, vocab_size=vocab_size, max_bytes=max_mb << 20)
    say(f"{file}: {size:,} tokens from {read / 2**20:,.1f} MiB of text")
    _print_skipped(skipped)
    if size < vocab_size:
        say(f"only {size:,} tokens could be learned from this text; more text gives more tokens")
    say(f"train with data.tokenizer={file}")


@app.command()
def stats(
    folder: OptionalFolder = None,
    overrides: DataOverrides = None,
    override: JoinedOverrides = None,
    config: ConfigOption = None,
    samples: Annotated[int, typer.Option(metavar="N", min=0, help="Number of documents whose beginning is shown.")] = 3,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of documents to read from a source.")
    ] = 10_000,
) -> None:
    """Print statistics of prepared shards or of a source: documents, tokens, lengths, and some samples."""
    from nsa.data.statistics import of_shards, of_source

    folder, overrides = _folder_and_overrides(folder, overrides)
    resolved = _resolve(config, overrides, override)
    if folder is not None:
        _print(of_shards(folder, resolved.data, samples))
    else:
        _print(of_source(resolved.data, samples, limit))


@app.command()
def verify(
    folder: OptionalFolder = None,
    overrides: DataOverrides = None,
    override: JoinedOverrides = None,
    config: ConfigOption = None,
) -> None:
    """Compare every byte of prepared shards with the manifest, or check every token of a Megatron or datatrove corpus.

    Exit code 3 if a file is damaged. For example: nsa data verify data.source=megatron data.paths=[corpus]
    """
    folder, overrides = _folder_and_overrides(folder, overrides)
    data = _resolve(config, overrides, override).data
    if folder is None:
        _verify_corpus(data)
        return
    from nsa.data.token_shards import verify as verify_shards

    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    manifest = verify_shards(folder)
    say(f"{folder}: ok, {counted(len(manifest.shards), 'shard')}, {_totals(manifest)}")


def _verify_corpus(data: DataConfig) -> None:
    from nsa.data.sources.token_files import FORMATS
    from nsa.data.token_corpora import open_corpora
    from nsa.data.tokenizers import tokenizer_for

    if data.mixture or data.source not in FORMATS:
        source = "a mixture" if data.mixture else repr(data.source)
        raise ConfigError(
            f"data.source: nothing to verify in {source}; give a FOLDER of shards, or data.source=megatron or datatrove"
        )
    corpus, _ = open_corpora(data.source, data.paths, tokenizer_for(data), data.workers)
    counts = f"{counted(len(corpus.lengths), 'document')}, {corpus.lengths.sum():,} tokens"
    say(f"{data.source}: ok, {counted(len(corpus.pieces), 'file')}, {counts}")
    _print_skipped(corpus.skipped)


def _folder_and_overrides(folder: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str] | None]:
    """Takes the optional first argument for an override if it looks like one."""
    if folder is not None and "=" in str(folder) and not folder.is_dir():
        return None, [str(folder), *(overrides or [])]
    return folder, overrides


def _resolve(config: Path | None, overrides: list[str] | None, override: list[str] | None) -> Config:
    given, origin = all_overrides(overrides, override), str(config or "the command line")
    resolved = parse_config({}, origin, given) if config is None else load_config(config, given, os.environ)
    warn_if_unlikely(resolved, origin)
    return resolved


def _totals(manifest: "Manifest") -> str:
    text_mib = manifest.text_bytes / 2**20
    return f"{counted(manifest.documents, 'document')}, {manifest.tokens:,} tokens of {text_mib:,.1f} MiB text"


def _print_skipped(skipped: Mapping[str, int]) -> None:
    for reason, count in sorted(skipped.items()):
        say(f"skipped {count:,} ({reason})")


def _print(found: "Statistics") -> None:
    import numpy as np

    lengths = found.lengths
    size = f", {found.text_bytes:,} bytes of text" if found.text_bytes else ""
    say(f"{found.about}: {counted(len(lengths), 'document')}, {lengths.sum():,} tokens{size}")
    if len(lengths):
        say(
            f"tokens in a document: median {int(np.median(lengths)):,}, mean {lengths.mean():,.1f}, "
            f"shortest {lengths.min():,}, longest {lengths.max():,}"
        )
    histogram = found.histogram()
    largest = max((count for _, count in histogram), default=0)
    for bounds, count in histogram:
        say(f"{bounds:>24} {count:>12,} {'#' * max(1, round(40 * count / largest))}")
    _print_skipped(found.skipped)
    for number, text in enumerate(found.samples, start=1):
        say(f"--- sample {number} ---\n{text}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Shows the progress in bytes: a bar on a terminal, elsewhere a line for every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, console=console) as bar:
            task = bar.add_task("prepare", total=None)
            yield lambda done, total, text_bytes: bar.update(task, completed=done, total=total)
        return
    shown = -1

    def show(done: int, total: int, text_bytes: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(1, total)
        if tenth > shown:
            shown = tenth
            say(f"prepare {10 * tenth:3d} % | {text_bytes / 2**20:,.0f} MiB of text")

    yield show
