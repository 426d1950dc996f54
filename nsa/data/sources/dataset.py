"""A dataset of parquet files: in a repository of the Hugging Face hub, in its local cache, or in a mirror on disk.

From the hub only footers and the text column of the row groups that are read are fetched, as byte ranges, at the
commit that the revision stood for at the first contact.
"""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nsa.data.sources.base import Progress, Skipped, Unit
from nsa.data.sources.layout import Chosen, is_parquet
from nsa.data.sources.readers import file_errors, parquet_documents, parquet_units
from nsa.data.sources.repository import HubFiles, LocalFiles, OnDisk, OnHub, Repository
from nsa.errors import DataError, DataUnavailableError

if TYPE_CHECKING:  # a mirror needs no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

FOOTER_THREADS = 16


class Layout(Protocol):
    """How a subset's files are found. `needs` are patterns of files that the choice itself depends on."""

    subset: str

    @property
    def needs(self) -> Sequence[str]: ...

    def choose(self, repository: Repository) -> Chosen:
        """Raises a `DataError` that lists what there is to choose from."""
        ...


class HubDataset:
    """A document per row. Units are row groups, in the order of file names.

    `paths` are files or folders of a mirror to read instead of the hub. `deadline_s` is how long an operation on the
    hub may go without any success before it is a `DataUnavailableError`.
    """

    def __init__(
        self,
        name: str,
        repo: str,
        layout: Layout,
        revision: str = "main",
        paths: Sequence[str] = (),
        text_field: str = "text",
        deadline_s: float = 60.0,
    ):
        self.name = name
        self.repo = repo
        self.layout = layout
        self.revision = revision
        self.paths = tuple(paths)
        self.text_field = text_field
        self.deadline_s = deadline_s
        self.listed = Progress("footers read")
        self._hub: Hub | None = None
        self._files: LocalFiles | HubFiles | None = None
        self._units: list[Unit] | None = None
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_units": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    @property
    def commit(self) -> str | None:
        """The commit that is read, from the first contact on; None for a mirror, which has none."""
        return self._listed().commit

    def units(self) -> Sequence[Unit]:
        with self._lock:
            if self._units is None:
                files = self._listed()
                with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footer") as pool:
                    footers = [pool.submit(self._units_of, files, name) for name in sorted(files.entries)]
                    self.listed.done, self.listed.total = 0, len(footers)
                    try:
                        for footer in as_completed(footers):
                            footer.result()
                            self.listed.done += 1
                        self._units = [unit for footer in footers for unit in footer.result()]
                    except BaseException:
                        # After a Ctrl-C the other files would keep the process for a whole deadline.
                        pool.shutdown(wait=False, cancel_futures=True)
                        self.cancel()
                        raise
            return self._units

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        with self._listed().open(unit.path, f"row group {unit.part}") as file:
            yield from parquet_documents(unit.path, file, unit.part, self.text_field, skipped)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, entry in sorted(self._listed().entries.items()):
            digest.update(f"{name}\0{entry.size}\0{entry.content_id}\n".encode())
        return digest.hexdigest()

    def waiting_for(self) -> str | None:
        """As "FILE, row group 3: try 4, 12 s, last: HTTP 503"."""
        return None if self._hub is None else self._hub.waiting_for()

    def set_deadline(self, deadline_s: float) -> None:
        """A run that is under way waits longer than one that has not started."""
        self.deadline_s = deadline_s
        if self._hub is not None:
            self._hub.deadline_s = deadline_s

    def cancel(self) -> None:
        if self._hub is not None:
            self._hub.cancel()

    def _units_of(self, files: LocalFiles | HubFiles, name: str) -> list[Unit]:
        with files.open(name, "footer") as file:
            return parquet_units(name, file, self.text_field)

    def _listed(self) -> LocalFiles | HubFiles:
        files = self._files
        if files is not None:  # without the lock, which a thread that reads footers holds
            return files
        with self._lock:
            if self._files is None:
                self._files = LocalFiles(self._mirrored()) if self.paths else self._from_hub()
            return self._files

    def _from_hub(self) -> LocalFiles | HubFiles:
        from nsa.data.sources.hub import Hub, is_offline

        if is_offline():
            return self._cached()
        self._hub = self._hub or Hub(self.repo, self.deadline_s)
        repository = OnHub(self._hub, self.revision)
        return repository.files(self.layout.choose(repository).names)

    def _cached(self) -> LocalFiles:
        """From the hub's local cache, if it holds all of them."""
        from nsa.data.sources.hub import cached_snapshot

        include = self.layout.needs
        snapshot = cached_snapshot(self.repo, self.revision, include)
        if snapshot is not None:
            chosen = self.layout.choose(OnDisk(snapshot, "cache", f"the local cache of {self.repo}"))
            if chosen.names and cached_snapshot(self.repo, self.revision, chosen.include) is not None:
                return LocalFiles({name: snapshot / name for name in chosen.names}, commit=snapshot.name)
            include = [*include, *chosen.include]
        patterns = " ".join(f'"{pattern}"' for pattern in dict.fromkeys(include))
        raise DataUnavailableError(
            f"{self.repo}, {self.layout.subset}: offline mode is on and the local cache does not hold all of it at "
            f"{self.revision}; unset HF_HUB_OFFLINE, or download it with `hf download {self.repo} --repo-type dataset "
            f"--include {patterns}`, or set data.paths to a mirror"
        )

    def _mirrored(self) -> dict[str, Path]:
        """The files that `data.paths` names, each once. Names are relative to the folder that was named."""
        found: dict[str, Path] = {}
        seen: set[str] = set()
        for number, given in enumerate(self.paths):
            top = Path(os.path.expanduser(given))  # noqa: PTH111  (Path.expanduser fails at a user that does not exist)
            with file_errors(top):
                names = self._names_at(top, given)
            for name in names:
                path = top / name if top.is_dir() else top
                real = os.path.realpath(path)
                if real not in seen:
                    seen.add(real)
                    found[name if name not in found else f"{number}/{name}"] = path
        return found

    def _names_at(self, top: Path, given: str) -> list[str]:
        if not top.exists():
            raise DataError(f"data.paths: no such file or folder: {given}; relative paths start at {Path.cwd()}")
        names = self.layout.choose(OnDisk(top, "mirror", f"the mirror {top}")).names if top.is_dir() else [top.name]
        if not any(map(is_parquet, names)):
            raise DataError(
                f"data.paths: {given} holds no .parquet file; name a mirror of {self.repo}, or a folder of it"
            )
        return sorted(names)
