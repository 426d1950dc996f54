"""A dataset of parquet files: in a repository of the Hugging Face hub, in its local cache, or in a mirror on disk.

From the hub, only footers and the text columns of the row groups in use are fetched, as byte ranges, at the commit that
the revision named when the files were listed.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from nsa.config.schema import SourceConfig
from nsa.data.sources.base import Entry, Skipped, Unit, is_offline
from nsa.data.sources.readers import file_errors, open_file, parquet_documents, parquet_units
from nsa.data.sources.subsets import CARD, Chosen, choose, choose_fineweb, is_parquet
from nsa.data.sources.text import files_below, no_such_path
from nsa.data.threads import Progress, in_threads
from nsa.errors import DataError, DataUnavailableError
from nsa.files import expand_home

if TYPE_CHECKING:  # imports an HTTP client, which is slow and not needed for a mirror
    from nsa.data.sources.hub import HubRepository

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FOOTER_THREADS = 16
Files = dict[str, tuple[Entry, Path | None]]  # by name in the source; the path is None for files on the hub


class HubDataset:
    """One document per row. Units are row groups, in the order of file names. The first call lists the files; after it
    threads may share the dataset and other processes may use copies.

    `repo` is None for FineWeb-Edu. `paths` are files or folders of a mirror to read instead of the hub. Requests to the
    hub are retried for about `deadline_s`, then they raise `DataUnavailableError`.
    """

    def __init__(self, source: SourceConfig, deadline_s: float) -> None:
        self.name = "fineweb_edu"
        self.repo: str | None = None
        self.subset, self.split, self.revision = source.subset, source.split, source.revision
        self.paths, self.text_field, self.deadline_s = source.paths, source.text_field, deadline_s
        if source.source == "hub":
            self.repo = source.repo or "the repository"
            self.name = " ".join([source.repo or "hub", *([source.subset] if source.subset != "default" else [])])
        self.listed = Progress("footers read")
        self._hub: HubRepository | None = None
        self.commit: str | None = None  # set when the files are listed; stays None for a mirror
        self._files: Files = {}

    def units(self) -> Sequence[Unit]:
        footers = in_threads(self._units_of, sorted(self._listed()), FOOTER_THREADS, self.listed)
        return [unit for units in footers for unit in units]

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        with self._open(unit.path, f"row group {unit.part}") as file:
            yield from parquet_documents(unit.path, file, unit.part, self.text_field, skipped)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"" if self.text_field == "text" else self.text_field.encode())
        for name, (entry, _) in sorted(self._listed().items()):
            digest.update(f"{name}\0{entry.size}\0{entry.content_id}\n".encode())
        return digest.hexdigest()

    def answered(self) -> int:
        """Returns the number of requests that the hub has answered."""
        return 0 if self._hub is None else self._hub.answered

    def waiting_for(self) -> str | None:
        return None if self._hub is None else self._hub.waiting_for()

    def _units_of(self, name: str) -> list[Unit]:
        with self._open(name, "footer") as file:
            return parquet_units(name, file, self.text_field)

    def _open(self, name: str, what: str) -> AbstractContextManager[BinaryIO]:
        if name not in (files := self._listed()):
            raise DataError(f"{name}: is not among the files of this source; did data.paths or data.subset change?")
        entry, path = files[name]
        return open_file(path) if path else cast("HubRepository", self._hub).open(entry, what)

    def _listed(self) -> Files:
        if not self._files:
            self._files = self._mirrored() if self.paths else self._cached() if is_offline() else self._from_hub()
        return self._files

    def _choose(self, names: Sequence[str], read_card: Callable[[], str], title: str) -> Chosen:
        if self.repo is None:
            return choose_fineweb(names, title, self.subset)
        return choose(names, read_card, title, self.subset, self.split)

    def _from_hub(self) -> Files:
        from nsa.data.sources.hub import HubRepository

        self._hub = HubRepository(self.repo or FINEWEB_EDU, self.revision, self.deadline_s)
        entries, title = dict[str, Entry](), f"{self._hub.repo} at {self.revision}"
        for entry in self._hub.files():
            entries[entry.name] = entry
            self.listed.done += 1
        self.commit = self._hub.commit
        names, include = self._choose(list(entries), self._hub.card, title)
        if not names:
            remedy = "try data.revision=refs/convert/parquet, or download the files and set data.source=text"
            raise DataError(f"{title}: no .parquet file matches {', '.join(include)}; {remedy}")
        return {name: (entries[name], None) for name in names}

    def _cached(self) -> Files:
        """Lists the files in the hub's local cache, if all are there."""
        from huggingface_hub import snapshot_download

        repo, include = self.repo or FINEWEB_EDU, [CARD] if self.repo else choose_fineweb([], "", self.subset)[1]
        find = partial(snapshot_download, repo, repo_type="dataset", revision=self.revision, local_files_only=True)
        try:
            top = Path(find(allow_patterns=include))
            cached = [name for name in _names(top) if self.repo or fnmatch(name, include[0])]
            names, needed = self._choose(cached, partial(_card, top), f"the local cache of {repo}")
            include = [*dict.fromkeys([*include, *needed])]
            find(allow_patterns=include)  # newer versions of huggingface_hub know which files are missing
            if names:
                self.commit = top.name
                return {name: (_entry(top, name), top / name) for name in names}
        except FileNotFoundError:
            pass
        patterns = " ".join(f'"{pattern}"' for pattern in include)
        raise DataUnavailableError(
            f"{repo}, {self.subset}: offline mode is on and the local cache lacks files of "
            f"{self.revision}; unset HF_HUB_OFFLINE, or download it with `hf download {repo} --repo-type dataset "
            f"--include {patterns}`, or set data.paths to a mirror"
        )

    def _mirrored(self) -> Files:
        """Lists the files in `data.paths`, each once. Names are relative to the folder in `data.paths`."""
        found, seen = Files(), set[str]()
        for number, given in enumerate(self.paths):
            top = expand_home(given)
            folder, names = top.parent, [top.name]
            with file_errors(top):
                if not top.exists():
                    raise no_such_path(given)
                if top.is_dir():
                    folder, names = top, self._choose(_names(top), partial(_card, top), f"the mirror {top}")[0]
            if not any(map(is_parquet, names)):
                raise DataError(f"data.paths: {given} contains no .parquet file; name a mirror, or a folder in it")
            for name in sorted(names):
                if (real := os.path.realpath(folder / name)) not in seen:
                    seen.add(real)
                    found[name if name not in found else f"{number}/{name}"] = _entry(folder, name), folder / name
        return found


def _names(top: Path) -> list[str]:
    return [path.relative_to(top).as_posix() for path in files_below(top)]


def _card(top: Path) -> str:
    with open_file(top / CARD) as file:
        return file.read().decode("utf-8", errors="replace")


def _entry(top: Path, name: str) -> Entry:
    path = top / name
    with file_errors(path):
        # Files in the hub's cache are links to blobs/ID, where ID is the content id that the hub lists.
        blob = path.readlink() if path.is_symlink() else None
        content_id = blob.name if blob is not None and blob.parent.name == "blobs" else ""
        return Entry(name, path.stat().st_size, content_id)
