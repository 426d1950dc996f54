"""Writes the documents of any source as token shards, in parallel processes, resumable after a kill.

The plan groups units by their sizes before the first unit is read. The text of a group goes into one shard, or into
several if it is larger than `shard_bytes`. So the result does not depend on the number of processes or of restarts. A
finished shard is never written again.

Several machines can each write one part of the groups, in a folder of its own with a manifest. `merge` joins the parts:
the result has the same bytes as a preparation on one machine, since a part contains whole shards with their final
numbers, and only the manifest depends on all parts. A merge moves nothing before it has checked all parts, and one that
was killed can be repeated.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from nsa import faults
from nsa.data.corpus import BATCH_CHARS, Tokenised, tokenise
from nsa.data.sources.base import Skipped, Source, Unit, groups
from nsa.data.token_shards import (
    AGAIN,
    MANIFEST,
    Manifest,
    PartEntry,
    ShardEntry,
    check_size,
    has_sizes,
    make_manifest,
    read_entries,
    read_manifest,
    shard_path,
    sizes_of,
    store_manifest,
    write_entries,
    write_manifest,
    write_shard,
)
from nsa.data.tokenizers import TOKENIZER_FILE, TokenArray, Tokenizer
from nsa.errors import DataError, reworded
from nsa.files import locked
from nsa.formatting import listed

PART = "part-{:05d}-of-{:05d}"  # the folder of a part
LOCK = ".lock"
SHARD_BYTES = 64 << 20  # of text
_size = attrgetter("size")


@dataclass(frozen=True)
class Plan:
    """The groups of units that are written together, and a name that changes with source, tokenizer and groups."""

    tasks: Sequence[Sequence[Unit]]
    name: str


def make_plan(source: Source, tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES) -> Plan:
    tasks = list(groups(source.units(), _size, shard_bytes))
    digest = hashlib.sha256(f"{source.fingerprint()}\n{tokenizer.fingerprint}\n".encode())
    for units in tasks:
        digest.update(f"{[(u.path, u.part, u.start, u.stop) for u in units]}\n".encode())
    return Plan(tasks, digest.hexdigest())


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int,
    shard_bytes: int = SHARD_BYTES,
    fresh: bool = False,
    part: tuple[int, int] | None = None,
    progress: Callable[[int, int, int], None] = lambda done, of, text_bytes: None,
) -> Manifest:
    """Writes the shards that `folder` lacks, then the manifest, and returns the manifest.

    `part` = (3, 64) writes only part 3 of 64, into a folder inside `folder`. `progress` is called with the bytes done,
    the total (both approximate) and the text bytes written.
    """
    plan = make_plan(source, tokenizer, shard_bytes)
    if not plan.tasks:
        raise DataError("data.source: there is nothing to prepare; give data.paths that contain text")
    chosen = None
    if part is not None:
        chosen = PartEntry(number=part[0], of=part[1], tasks=len(plan.tasks))
        if (folder / MANIFEST).exists():  # the parts are merged
            if (merged := read_manifest(folder)).plan != plan.name:
                raise _other_preparation(folder, "remove it")
            if fresh:
                raise DataError(f"{folder}: the parts are merged already; remove the folder to prepare them again")
            return _checked(folder, merged)
        folder /= PART.format(*part)
    with _locked(folder):
        if fresh:
            _remove(folder)
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
        found = [] if manifest else read_entries(folder)
        plans = {(manifest.plan, manifest.part)} if manifest else {(entry.plan, chosen) for entry in chain(*found)}
        if not plans <= {(plan.name, chosen)}:
            raise _other_preparation(folder)
        if manifest:
            return _checked(folder, manifest)
        tasks = {task: plan.tasks[task] for task in (chosen.groups if chosen else range(len(plan.tasks)))}
        itemsize = tokenizer.dtype.itemsize
        done = {of[0].number: of for of in found if all(has_sizes(folder, entry, itemsize) for entry in of)}
        sizes = {task: sum(unit.size for unit in units) for task, units in tasks.items()}

        def report() -> None:
            text_bytes = sum(entry.text_bytes for entry in chain(*done.values()))
            progress(sum(sizes.get(task, 0) for task in done), sum(sizes.values()), text_bytes)

        report()
        missing = {task: units for task, units in tasks.items() if task not in done}
        job = _Job(source, tokenizer, folder, plan.name, len(plan.tasks), shard_bytes)
        for written in _write_all(job, missing, workers):
            done[written[0].number] = written
            report()
        entries = [entry for task in tasks for entry in done[task]]
        if chosen is None:
            _check_text(entries)
        with reworded(DataError, f"{folder / MANIFEST}: cannot be written"):
            write_manifest(folder, plan.name, source.name, tokenizer, entries, chosen)
        return read_manifest(folder)


def _checked(folder: Path, manifest: Manifest) -> Manifest:
    itemsize = np.dtype(manifest.tokenizer.dtype).itemsize
    if damaged := [entry.number for entry in manifest.shards if not has_sizes(folder, entry, itemsize)]:
        path = shard_path(folder, damaged[0], "tokens")
        remedy = f"if a merge was interrupted, repeat `nsa data merge {folder.parent}`; else " if manifest.part else ""
        raise DataError(f"{path}: is missing or has another size than the manifest says; {remedy}{AGAIN}")
    return manifest


def _check_text(entries: Sequence[ShardEntry]) -> None:
    if not sum(entry.documents for entry in entries):
        raise DataError("data.source: no document contains text; give data.paths that contain text")


def _other_preparation(folder: Path, remedy: str = "--fresh to replace them") -> DataError:
    return DataError(
        f"{folder}: contains shards of another preparation (other files, text field, tokenizer or shard size); choose "
        f"another folder, or {remedy}"
    )


@dataclass(frozen=True)
class _Job:
    """The settings that a worker needs to write any shard of a plan."""

    source: Source
    tokenizer: Tokenizer
    folder: Path
    plan: str
    num_tasks: int
    shard_bytes: int

    def write(self, task: int, units: Sequence[Unit]) -> list[ShardEntry]:
        """Writes shard number `task`. Text beyond `shard_bytes` goes into shards `task + num_tasks`, `task + 2 *
        num_tasks` and so on, numbers that no other task uses."""
        filled = shards = 0

        def number_of(part: Tokenised[TokenArray]) -> int:
            nonlocal filled, shards
            if filled and part.text_bytes and filled + part.text_bytes > self.shard_bytes:
                filled, shards = 0, shards + 1
            filled += part.text_bytes
            return task + shards * self.num_tasks

        written = []
        for number, parts in groupby(self._parts(units), number_of):
            with reworded(DataError, f"{shard_path(self.folder, number, 'tokens')}: cannot be written"):
                written.append(write_shard(self.folder, number, self.plan, parts, self.tokenizer))
        with reworded(DataError, f"{shard_path(self.folder, task, 'json')}: cannot be written"):
            write_entries(self.folder, written)
        return written

    def _parts(self, units: Sequence[Unit]) -> Iterator[Tokenised[TokenArray]]:
        """Yields tokenised batches. The last one is empty and has the counts of skipped documents."""
        skipped = Skipped()
        documents = (text for unit in units for text in self.source.documents(unit, skipped))
        for texts in groups(documents, len, BATCH_CHARS):
            yield tokenise(texts, self.tokenizer)
        yield tokenise([], self.tokenizer, skipped)


def _write_all(job: _Job, tasks: dict[int, Sequence[Unit]], workers: int) -> Iterator[list[ShardEntry]]:
    if workers <= 1 or len(tasks) <= 1:
        for task, units in tasks.items():
            yield job.write(task, units)
        return
    # Spawn instead of fork: a fork copies locks that threads of libraries hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (job,))
    try:
        for future in as_completed([pool.submit(_write, task, units) for task, units in tasks.items()]):
            yield future.result()
    except BrokenProcessPool:
        raise DataError(
            f"{job.folder}: a worker process died (out of memory, or killed); finished shards are kept, "
            "the same command resumes; fewer --workers need less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_job: _Job | None = None  # set in worker processes


def _start_worker(job: _Job) -> None:
    global _worker_job
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all processes at once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faults.arm(os.environ.get("NSA_FAULTS", ""))
    _worker_job = job


def _end_with_parent() -> None:
    """A worker that goes on after its parent was killed would write beside the preparation that resumes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(task: int, units: Sequence[Unit]) -> list[ShardEntry]:
    assert _worker_job is not None
    return _worker_job.write(task, units)


def _locked(folder: Path) -> AbstractContextManager[object]:
    busy = f"{folder}: another preparation is writing to it; wait until it ends"
    return locked(folder / LOCK, DataError, f"{folder}:", busy)


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    for pattern in ("shard-*.json", "shard-*.tokens", "shard-*.docs"):
        for path in folder.glob(pattern):
            path.unlink()


def merge(folder: Path) -> Manifest:
    """Moves the shards of all parts in `folder` together, writes the manifest, and removes the folders of the parts."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    with _locked(folder):
        paths = sorted(path for path in folder.glob(PART.replace("{:05d}", "*")) if path.is_dir())
        parts = {path: read_manifest(path) for path in paths if (path / MANIFEST).exists()}
        if (folder / MANIFEST).exists():  # an earlier merge was killed after it wrote the manifest
            merged = read_manifest(folder)
            if any(part.plan != merged.plan for part in parts.values()):
                raise _other_preparation(folder, "remove its shards")
        else:
            tasks = _check_parts(folder, parts)
            with reworded(DataError, f"{folder}: the parts cannot be merged"):
                merged = _join_parts(folder, parts, tasks)
        for path in paths:
            _remove_part(path)
        return merged


def _check_parts(folder: Path, parts: Mapping[Path, Manifest]) -> int:
    """Raises DataError unless these are all parts of one preparation. Returns its number of groups of units."""
    if not parts:
        raise DataError(f"{folder}: contains no finished part; `nsa data prepare {folder} --part 1/N ...` writes one")
    (first, same), *_ = parts.items()
    found: dict[int, PartEntry] = {}
    for path, manifest in parts.items():
        part = manifest.part
        if part is None or same.part is None or (manifest.plan, part.of) != (same.plan, same.part.of):
            raise DataError(
                f"{path}: is not a part of the same preparation as {first} (other files, text field, tokenizer, shard "
                "size or number of parts); prepare it again with --fresh, or remove it"
            )
        if {entry.number % part.tasks for entry in manifest.shards} != set(part.groups):
            raise DataError(f"{path / MANIFEST}: is damaged: its shards are not those of part {part.number}; {AGAIN}")
        found[part.number] = part
    *_, last = found.values()
    if missing := [number for number in range(1, last.of + 1) if number not in found]:
        shown = listed(missing, 8)
        raise DataError(f"{folder}: {len(missing)} parts are missing or not finished: {shown}; run their commands")
    return last.tasks


def _join_parts(folder: Path, parts: Mapping[Path, Manifest], tasks: int) -> Manifest:
    moves = []
    for path, manifest in parts.items():
        for entry in manifest.shards:
            for name, size in sizes_of(entry, np.dtype(manifest.tokenizer.dtype).itemsize).items():
                moves.append((path / name, folder / name))
                found = path / name if (path / name).exists() else folder / name  # an earlier merge moved it
                check_size(found, size, found.stat().st_size)
    (first, same), *_ = parts.items()
    entries = [entry for manifest in parts.values() for entry in manifest.shards]
    entries.sort(key=lambda entry: (entry.number % tasks, entry.number))
    _check_text(entries)
    for source, target in moves:
        with suppress(FileNotFoundError):
            source.rename(target)
        faults.point("merge.moved")
    file = first / TOKENIZER_FILE
    merged = make_manifest(same.plan, same.source, same.tokenizer, entries)
    store_manifest(folder, merged, file.read_bytes() if file.exists() else None)
    faults.point("merge.manifest")
    return merged


def _remove_part(part: Path) -> None:
    """Removes the folder of a merged part, unless it contains other files."""
    for name in (MANIFEST, TOKENIZER_FILE, LOCK):
        (part / name).unlink(missing_ok=True)
    with suppress(OSError):
        part.rmdir()
