"""Joins the parts of a preparation that several machines wrote. The result has the same bytes as a preparation on one
machine: a part contains whole shards with their final numbers, and only the manifest depends on all parts.

A merge moves nothing before it has checked all parts, and a merge that was killed can be repeated.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from nsa import faults
from nsa.data.prepare import PART, check_text, lock_shards, other_preparation
from nsa.data.token_shards import (
    AGAIN,
    MANIFEST,
    Manifest,
    PartEntry,
    check_size,
    make_manifest,
    read_manifest,
    sizes_of,
    store_manifest,
)
from nsa.data.tokenizers import TOKENIZER_FILE
from nsa.errors import DataError, reworded
from nsa.formatting import listed


def merge(folder: Path) -> Manifest:
    """Moves the shards of all parts in `folder` together, writes the manifest, and removes the folders of the parts."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    with lock_shards(folder):
        paths = sorted(path for path in folder.glob(PART.replace("{:05d}", "*")) if path.is_dir())
        parts = {path: read_manifest(path) for path in paths if (path / MANIFEST).exists()}
        if (folder / MANIFEST).exists():  # an earlier merge was killed after it wrote the manifest
            merged = read_manifest(folder)
            if any(part.plan != merged.plan for part in parts.values()):
                raise other_preparation(folder, "remove its shards")
        else:
            tasks = _check(folder, parts)
            with reworded(DataError, f"{folder}: the parts cannot be merged"):
                merged = _join(folder, parts, tasks)
        for path in paths:
            _remove(path)
        return merged


def _check(folder: Path, parts: Mapping[Path, Manifest]) -> int:
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


def _join(folder: Path, parts: Mapping[Path, Manifest], tasks: int) -> Manifest:
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
    check_text(entries)
    for source, target in moves:
        with suppress(FileNotFoundError):
            source.rename(target)
        faults.point("merge.moved")
    file = first / TOKENIZER_FILE
    merged = make_manifest(same.plan, same.source, same.tokenizer, entries)
    store_manifest(folder, merged, file.read_bytes() if file.exists() else None)
    faults.point("merge.manifest")
    return merged


def _remove(part: Path) -> None:
    """Removes the folder of a merged part, unless it contains other files."""
    for name in (MANIFEST, TOKENIZER_FILE, ".lock"):
        (part / name).unlink(missing_ok=True)
    with suppress(OSError):
        part.rmdir()
