"""A dataset of parquet files: in a repository of the Hugging Face hub, in its local cache, or in a mirror on disk.

From the hub only footers and the text column of the row groups that are read are fetched, as byte ranges, at the
commit that the revision stood for at the first contact.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nsa.data.sources.base import Entry, Progress, Skipped, Unit, is_offline
from nsa.data.sources.layout import HubLayout, is_parquet
from nsa.data.sources.readers import file_errors, parquet_documents, parquet_units
from nsa.data.sources.repository import HubRepository, LocalRepository, Repository
from nsa.data.sources.text import no_such_path
from nsa.errors import DataError, DataUnavailableError

if TYPE_CHECKING:  # a mirror needs no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

FOOTER_THREADS = 16


@dataclass(eq=False)
class HubDataset:
    """A document per row. Units are row groups, in the order of file names.

    `paths` are files or folders of a mirror to read instead of the hub. `deadline_s` is how long an operation on the
    hub may go without any success before it is a `DataUnavailableError`. The first call lists the files; from then on
    threads and copies in other processes may share it.
    """

    name: str
    repo: str
    layout: HubLayout
    revision: str
    paths: Sequence[str]
    text_field: str
    deadline_s: float

    def __post_init__(self) -> None:
        self.listed = Progress("footers read")
        self._hub: Hub | None = None
        self._files: dict[str, tuple[Repository, Entry]] = {}  # never empty once they are listed

    @property
    def commit(self) -> str | None:
        """The commit that is read, from the first contact on; None for a mirror, which has none."""
        return next(repository.commit for repository, _ in self._listed().values())

    def units(self) -> Sequence[Unit]:
        names = sorted(self._listed())
        with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footer") as pool:
            footers = [pool.submit(self._units_of, name) for name in names]
            self.listed.done, self.listed.total = 0, len(footers)
            try:
                for footer in as_completed(footers):
                    footer.result()
                    self.listed.done += 1
            except BaseException:
                # After a Ctrl-C the other files would keep the process for a whole deadline.
                pool.shutdown(wait=False, cancel_futures=True)
                self.cancel()
                raise
        return [unit for footer in footers for unit in footer.result()]

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        with self._open(unit.path, f"row group {unit.part}") as file:
            yield from parquet_documents(unit.path, file, unit.part, self.text_field, skipped)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"" if self.text_field == "text" else self.text_field.encode())
        for name, (_, entry) in sorted(self._listed().items()):
            digest.update(f"{name}\0{entry.size}\0{entry.content_id}\n".encode())
        return digest.hexdigest()

    def waiting_for(self) -> str | None:
        """The slowest operation and its last failure, as "FILE, row group 3: try 4, 12 s, last: HTTP 503"; None when
        nothing is slow."""
        return None if self._hub is None else self._hub.waiting_for()

    def set_deadline(self, deadline_s: float) -> None:
        """Sets how long an operation may go without any success, from now on: a run that is under way waits longer
        than one that has not started."""
        self.deadline_s = deadline_s
        if self._hub is not None:
            self._hub.deadline_s = deadline_s

    def cancel(self) -> None:
        """Operations in other threads end soon, with an error."""
        if self._hub is not None:
            self._hub.cancel()

    def _units_of(self, name: str) -> list[Unit]:
        with self._open(name, "footer") as file:
            return parquet_units(name, file, self.text_field)

    def _open(self, name: str, what: str) -> AbstractContextManager[BinaryIO]:
        if name not in (files := self._listed()):
            raise DataError(f"{name}: is not among the files of this source; did data.paths or data.subset change?")
        repository, entry = files[name]
        return repository.open(entry, what)

    def _listed(self) -> dict[str, tuple[Repository, Entry]]:
        """The files that are read, by their names in the source: where each lies, and as what."""
        if not self._files:
            self._files = self._mirrored() if self.paths else self._from_hub()
        return self._files

    def _from_hub(self) -> dict[str, tuple[Repository, Entry]]:
        from nsa.data.sources.hub import Hub

        if is_offline():
            return self._cached()
        self._hub = Hub(self.repo, self.deadline_s)
        repository = HubRepository(self._hub, self.revision)
        return {name: (repository, repository.entry(name)) for name in self.layout.choose(repository).names}

    def _cached(self) -> dict[str, tuple[Repository, Entry]]:
        """From the hub's local cache, if it holds all of them."""
        from nsa.data.sources.hub import cached_snapshot

        include = self.layout.needs
        snapshot = cached_snapshot(self.repo, self.revision, include)
        if snapshot is not None:
            repository = LocalRepository(snapshot, "cache", f"the local cache of {self.repo}", snapshot.name)
            chosen = self.layout.choose(repository)
            if chosen.names and cached_snapshot(self.repo, self.revision, chosen.include) is not None:
                return {name: (repository, repository.entry(name)) for name in chosen.names}
            include = [*include, *chosen.include]
        patterns = " ".join(f'"{pattern}"' for pattern in dict.fromkeys(include))
        raise DataUnavailableError(
            f"{self.repo}, {self.layout.subset}: offline mode is on and the local cache does not hold all of it at "
            f"{self.revision}; unset HF_HUB_OFFLINE, or download it with `hf download {self.repo} --repo-type dataset "
            f"--include {patterns}`, or set data.paths to a mirror"
        )

    def _mirrored(self) -> dict[str, tuple[Repository, Entry]]:
        """The files that `data.paths` names, each once. Names are relative to the folder that was named."""
        found: dict[str, tuple[Repository, Entry]] = {}
        seen: set[str] = set()
        for number, given in enumerate(self.paths):
            top = Path(os.path.expanduser(given))  # noqa: PTH111  (Path.expanduser fails at a user that does not exist)
            with file_errors(top):
                if not top.exists():
                    raise no_such_path(given)
                is_folder = top.is_dir()
                repository = LocalRepository(top if is_folder else top.parent, "mirror", f"the mirror {top}")
                names = self.layout.choose(repository).names if is_folder else [top.name]
            if not any(map(is_parquet, names)):
                raise DataError(
                    f"data.paths: {given} holds no .parquet file; name a mirror of {self.repo}, or a folder of it"
                )
            for name in sorted(names):
                real = os.path.realpath(repository.top / name)
                if real not in seen:
                    seen.add(real)
                    found[name if name not in found else f"{number}/{name}"] = repository, repository.entry(name)
        return found
