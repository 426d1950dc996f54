"""Any source to token shards, in parallel processes, to be started again after a kill.

Which units make up which shard is decided before the first is read, from their sizes, so the result does not depend on
the number of processes or on how often the work was stopped. A shard that is done is never made again.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa import faults
from nsa.data.corpus import tokenise_units
from nsa.data.shards import (
    MANIFEST,
    ShardEntry,
    read_entry,
    read_manifest,
    stem_of,
    write_manifest,
    write_shard,
)
from nsa.data.sources.base import Source, Unit
from nsa.data.tokenizers import Tokenizer
from nsa.errors import DataError

SHARD_BYTES = 64 << 20  # of text
GROUP_BYTES = 1 << 20  # of small units that are tokenised at once


@dataclass(frozen=True)
class Plan:
    """The units of every shard, and a name that any change of source, tokenizer or division changes."""

    shards: Sequence[Sequence[Unit]]
    name: str

    def size(self, shard: int) -> int:
        return sum(unit.size for unit in self.shards[shard])


def make_plan(source: Source, tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES) -> Plan:
    shards: list[list[Unit]] = []
    filled = 0
    for unit in source.units():
        if not shards or filled + unit.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.size
    digest = hashlib.sha256(f"{source.fingerprint()}\n{tokenizer.fingerprint}\n".encode())
    for shard in shards:
        digest.update(f"{[(u.path, u.part, u.start, u.stop) for u in shard]}\n".encode())
    return Plan(shards, digest.hexdigest())


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int,
    shard_bytes: int = SHARD_BYTES,
    fresh: bool = False,
    progress: Callable[[int, int, int], None] = lambda done, of, text_bytes: None,
) -> dict[str, Any]:
    """Writes the shards that `folder` does not have yet, then the manifest, which is returned.

    `progress` is told bytes done, bytes in all (both about) and text bytes written.
    """
    with _claimed(folder):
        if fresh:
            _remove(folder)
        plan = make_plan(source, tokenizer, shard_bytes)
        if not plan.shards:
            raise DataError("data.source: there is nothing to prepare; give data.paths with text in them")
        _refuse_another(folder, plan)
        if (folder / MANIFEST).exists():
            return read_manifest(folder)
        done: dict[int, ShardEntry] = {}
        for number in range(len(plan.shards)):
            entry = read_entry(folder, number, plan.name, tokenizer.dtype.itemsize)
            if entry is not None:
                done[number] = entry

        def report() -> None:
            total = sum(map(plan.size, range(len(plan.shards))))
            progress(sum(map(plan.size, done)), total, sum(entry.text_bytes for entry in done.values()))

        report()
        missing = [number for number in range(len(plan.shards)) if number not in done]
        for entry in _make(source, tokenizer, folder, plan, missing, workers):
            done[entry.number] = entry
            report()
        entries = [done[number] for number in range(len(plan.shards))]
        if not sum(entry.documents for entry in entries):
            raise DataError("data.source: no document has any text; give data.paths with text in them")
        write_manifest(folder, plan.name, source.name, tokenizer, entries)
        return read_manifest(folder)


def _make(
    source: Source, tokenizer: Tokenizer, folder: Path, plan: Plan, numbers: Sequence[int], workers: int
) -> Iterator[ShardEntry]:
    if workers <= 1 or len(numbers) <= 1:
        for number in numbers:
            yield _make_shard(source, tokenizer, folder, plan.name, number, plan.shards[number])
        return
    # Started anew rather than forked: a fork copies locks that threads of libraries hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(source, tokenizer, folder, plan.name),
    )
    try:
        tasks = [pool.submit(_work, number, plan.shards[number]) for number in numbers]
        for task in as_completed(tasks):
            yield task.result()
    except BrokenProcessPool:
        raise DataError(
            f"{folder}: a worker process died (out of memory, or killed); finished shards are kept, "
            "the same command goes on; fewer --workers need less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: tuple[Source, Tokenizer, Path, str] | None = None  # of this worker process


def _start_worker(source: Source, tokenizer: Tokenizer, folder: Path, plan: str) -> None:
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent decides
    faults.arm(os.environ.get("NSA_FAULTS", ""))
    _job = (source, tokenizer, folder, plan)


def _work(number: int, units: Sequence[Unit]) -> ShardEntry:
    assert _job is not None
    source, tokenizer, folder, plan = _job
    return _make_shard(source, tokenizer, folder, plan, number, units)


def _make_shard(
    source: Source, tokenizer: Tokenizer, folder: Path, plan: str, number: int, units: Sequence[Unit]
) -> ShardEntry:
    try:
        parts = (tokenise_units(source, *group, tokenizer=tokenizer) for group in _groups(units))
        return write_shard(folder, number, plan, parts, tokenizer)
    except OSError as error:
        raise DataError(f"{folder / stem_of(number)}: cannot be written: {error}") from None


def _groups(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units that are tokenised at once: one, or as many small ones as make up GROUP_BYTES."""
    group: list[Unit] = []
    filled = 0
    for unit in units:
        if group and filled + unit.size > GROUP_BYTES:
            yield group
            group, filled = [], 0
        group.append(unit)
        filled += unit.size
    if group:
        yield group


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be used: {error}; choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{folder}: another preparation is writing into it; wait for it") from None
        yield


def _refuse_another(folder: Path, plan: Plan) -> None:
    """What lies here must come from the same source, tokenizer and division."""
    found: str | None = None
    if (folder / MANIFEST).exists():
        found = str(read_manifest(folder).get("plan"))
    else:
        for path in sorted(folder.glob("shard-*.json")):
            entry = _plan_of(path)
            found = entry or found
    if found is not None and found != plan.name:
        raise DataError(
            f"{folder}: holds shards of another preparation (other files, tokenizer or division); "
            "choose another folder, or --fresh to replace them"
        )


def _plan_of(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    for pattern in ("shard-*.json", "shard-*.tokens", "shard-*.docs", "shard-*.part"):
        for path in folder.glob(pattern):
            path.unlink()
