"""Any source to token shards, in parallel processes, resumable after a kill.

Which units make up which shard is decided before the first is read, from their sizes, so the result does not depend on
the number of processes or on how often the work was stopped. A shard that is done is never written again.
"""

import fcntl
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from nsa import faults
from nsa.data.corpus import tokenise_units
from nsa.data.sources.base import Source, Unit, groups
from nsa.data.token_shards import (
    MANIFEST,
    Manifest,
    ShardEntry,
    has_sizes,
    read_entries,
    read_manifest,
    shard_path,
    write_manifest,
    write_shard,
)
from nsa.data.tokenizers import Tokenizer
from nsa.errors import DataError, reworded
from nsa.files import regular, remove_unfinished

SHARD_BYTES = 64 << 20  # of text
GROUP_BYTES = 1 << 20  # of small units that are tokenised at once
_size = attrgetter("size")


@dataclass(frozen=True)
class Plan:
    """The units of every shard, and a name that changes with source, tokenizer and division."""

    shards: Sequence[Sequence[Unit]]
    name: str


def make_plan(source: Source, tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES) -> Plan:
    shards = list(groups(source.units(), _size, shard_bytes))
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
) -> Manifest:
    """Writes the shards that `folder` does not have yet, then the manifest, which is returned.

    `progress` gets the bytes done, the total (both approximate) and the text bytes written.
    """
    with _claimed(folder):
        plan = make_plan(source, tokenizer, shard_bytes)
        if not plan.shards:
            raise DataError("data.source: there is nothing to prepare; give data.paths with text in them")
        if fresh:
            _remove(folder)
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
        entries = [] if manifest else read_entries(folder)
        if any(found.plan != plan.name for found in ([manifest] if manifest else entries)):
            raise DataError(
                f"{folder}: holds shards of another preparation (other files, text field, tokenizer or division); "
                "choose another folder, or --fresh to replace them"
            )
        if manifest:
            return manifest
        done = {entry.number: entry for entry in entries if has_sizes(folder, entry, tokenizer.dtype.itemsize)}
        sizes = [sum(unit.size for unit in shard) for shard in plan.shards]

        def report() -> None:
            progress(sum(sizes[n] for n in done), sum(sizes), sum(entry.text_bytes for entry in done.values()))

        report()
        missing = {number: units for number, units in enumerate(plan.shards) if number not in done}
        for entry in _write_all(_Job(source, tokenizer, folder, plan.name), missing, workers):
            done[entry.number] = entry
            report()
        entries = [done[number] for number in range(len(plan.shards))]
        if not sum(entry.documents for entry in entries):
            raise DataError("data.source: no document has any text; give data.paths with text in them")
        with reworded(DataError, f"{folder / MANIFEST}: cannot be written"):
            write_manifest(folder, plan.name, source.name, tokenizer, entries)
        return read_manifest(folder)


@dataclass(frozen=True)
class _Job:
    """What the workers need to write any shard of a plan."""

    source: Source
    tokenizer: Tokenizer
    folder: Path
    plan: str

    def write(self, number: int, units: Sequence[Unit]) -> ShardEntry:
        small = groups(units, _size, GROUP_BYTES)
        parts = (tokenise_units(self.source, *group, tokenizer=self.tokenizer) for group in small)
        shard = shard_path(self.folder, number, "tokens").with_suffix("")
        with reworded(DataError, f"{shard}: cannot be written"):
            return write_shard(self.folder, number, self.plan, parts, self.tokenizer)


def _write_all(job: _Job, shards: dict[int, Sequence[Unit]], workers: int) -> Iterator[ShardEntry]:
    if workers <= 1 or len(shards) <= 1:
        for number, units in shards.items():
            yield job.write(number, units)
        return
    # Spawned rather than forked: a fork copies locks that threads of libraries hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(shards)), context, _start_worker, (job,))
    try:
        tasks = [pool.submit(_write_shard, number, units) for number, units in shards.items()]
        for task in as_completed(tasks):
            yield task.result()
    except BrokenProcessPool:
        raise DataError(
            f"{job.folder}: a worker process died (out of memory, or killed); finished shards are kept, "
            "the same command resumes; fewer --workers need less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_job: _Job | None = None  # of this worker process


def _start_worker(job: _Job) -> None:
    global _worker_job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent decides
    faults.arm(os.environ.get("NSA_FAULTS", ""))
    _worker_job = job


def _write_shard(number: int, units: Sequence[Unit]) -> ShardEntry:
    assert _worker_job is not None
    return _worker_job.write(number, units)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    with reworded(DataError, f"{folder}: cannot be used", "choose another folder", (OSError, ValueError)):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a", opener=regular)  # noqa: SIM115  (held below)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{folder}: another preparation is writing to it; wait until it ends") from None
        remove_unfinished(folder)
        yield


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    for pattern in ("shard-*.json", "shard-*.tokens", "shard-*.docs", "shard-*.part"):
        for path in folder.glob(pattern):
            path.unlink()
