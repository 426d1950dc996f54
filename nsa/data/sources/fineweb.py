"""FineWeb-Edu: parquet files on the Hugging Face hub, in its local cache, or in a mirror on disk.

From the hub only footers and the text column of the row groups that are read are fetched, as byte ranges, at the
commit that the revision stood for at the first contact.
"""

import hashlib
import io
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from nsa.data.sources.base import Entry, Progress, Skipped, Unit
from nsa.data.sources.readers import file_errors, open_file, parquet_documents, parquet_units
from nsa.data.sources.text import files_below
from nsa.errors import DataError, DataUnavailableError

if TYPE_CHECKING:  # a mirror needs no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

REPO = "HuggingFaceFW/fineweb-edu"
FOOTER_THREADS = 16
TAIL_BYTES = 64 << 10  # what arrow reads first of a file; most of the time not yet the whole footer
MAX_FOOTER_BYTES = 256 << 20
# A footer of 700 row groups is 1.4 MB, half of what a row group's text is: kept compressed, so that those of 250
# files stay, rather than fetched again for every row group.
FOOTER_CACHE_BYTES = 128 << 20


class FineWebEdu:
    """A document per row. Units are row groups, in the order of file names.

    `paths` are files or folders of a mirror to read instead of the hub. `deadline_s` is how long an operation on the
    hub may go without any success before it is a `DataUnavailableError`.
    """

    name = "fineweb_edu"

    def __init__(
        self,
        subset: str = "sample-10BT",
        revision: str = "main",
        paths: Sequence[str] = (),
        text_field: str = "text",
        deadline_s: float = 60.0,
    ):
        self.subset = subset
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

    def _units_of(self, files: "LocalFiles | HubFiles", name: str) -> list[Unit]:
        with files.open(name, "footer") as file:
            return parquet_units(name, file, self.text_field)

    def _listed(self) -> "LocalFiles | HubFiles":
        files = self._files
        if files is not None:  # without the lock, which a thread that reads footers holds
            return files
        with self._lock:
            if self._files is None:
                if self.paths:
                    self._files = LocalFiles(_mirrored(self.paths, self.subset))
                    return self._files
                from nsa.data.sources.hub import Hub, is_offline

                if is_offline():
                    self._files = _cached(self.subset, self.revision)
                else:
                    self._hub = self._hub or Hub(REPO, self.deadline_s)
                    self._files = _on_hub(self._hub, self.subset, self.revision)
            return self._files


class LocalFiles:
    """Files on disk, by the names they have in the source."""

    def __init__(self, paths: dict[str, Path], commit: str | None = None):
        self.commit = commit
        self.paths = paths
        self.entries = {}
        for name, path in paths.items():
            with file_errors(path):
                self.entries[name] = Entry(name, path.stat().st_size, _cached_content_id(path))

    def open(self, name: str, what: str) -> AbstractContextManager[BinaryIO]:
        if name not in self.paths:
            raise _no_such_file(name)
        return open_file(self.paths[name])


class HubFiles:
    """Files of the hub at one commit. Footers are kept, everything else is fetched when it is read."""

    def __init__(self, hub: "Hub", commit: str, entries: dict[str, Entry]):
        self.hub = hub
        self.commit: str | None = commit
        self.entries = entries
        self._tails: OrderedDict[str, bytes] = OrderedDict()
        self._tails_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.hub, self.commit, self.entries)

    @contextmanager
    def open(self, name: str, what: str) -> Iterator[BinaryIO]:
        if name not in self.entries:
            raise _no_such_file(name)
        entry, tail = self.entries[name], self._tail(name)

        def fetch(start: int, stop: int) -> bytes:
            return self._fetch(entry, start, stop, what)

        yield cast(BinaryIO, RemoteFile(entry.size, tail, fetch))

    def _tail(self, name: str) -> bytes:
        with self._lock:
            packed = self._tails.get(name)
            if packed is not None:
                self._tails.move_to_end(name)
        if packed is not None:
            return zlib.decompress(packed)
        entry = self.entries[name]
        tail = self._fetch(entry, max(0, entry.size - TAIL_BYTES), entry.size, "footer")
        # The last eight bytes: the footer's length and a magic number. Arrow checks whether they make sense.
        missing = int.from_bytes(tail[-8:-4], "little") + 8 - len(tail)
        if 0 < missing <= min(entry.size - len(tail), MAX_FOOTER_BYTES) and tail.endswith(b"PAR1"):
            start = entry.size - len(tail)
            tail = self._fetch(entry, start - missing, start, "footer") + tail
        self._keep(name, zlib.compress(tail, 1))
        return tail

    def _keep(self, name: str, packed: bytes) -> None:
        with self._lock:
            self._tails_bytes += len(packed) - len(self._tails.pop(name, b""))
            self._tails[name] = packed
            while self._tails_bytes > FOOTER_CACHE_BYTES:
                self._tails_bytes -= len(self._tails.popitem(last=False)[1])

    def _fetch(self, entry: Entry, start: int, stop: int, what: str) -> bytes:
        assert self.commit is not None
        return self.hub.read(self.commit, entry.name, start, stop, entry.size, f"{entry.name}, {what}")


class RemoteFile(io.RawIOBase):
    """A seekable file of `size` bytes that holds its last ones; others come from `fetch(start, stop)` at each read."""

    def __init__(self, size: int, tail: bytes, fetch: Callable[[int, int], bytes]):
        self._size = size
        self._tail = tail
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = min(self._position, self._size)
        stop = min(start + len(buffer), self._size)
        tail_start = self._size - len(self._tail)
        data = self._fetch(start, min(stop, tail_start)) if start < min(stop, tail_start) else b""
        data += self._tail[max(start - tail_start, 0) : max(stop - tail_start, 0)]
        buffer[: len(data)] = data
        self._position = stop
        return len(data)


def subset_folder(subset: str) -> str | None:
    """The repository's folder for a subset; None for a name that no subset can have."""
    if subset == "default":
        return "data"
    if sample := re.fullmatch(r"sample-(\w+)", subset):
        return f"sample/{sample[1]}"
    return f"data/{subset}" if re.fullmatch(r"CC-MAIN-[\w-]+", subset) else None


def _on_hub(hub: "Hub", subset: str, revision: str) -> HubFiles:
    commit = revision if re.fullmatch(r"[0-9a-f]{40}", revision) else hub.commit(revision)
    folder = subset_folder(subset)
    entries = hub.tree(commit, folder, recursive=True) if folder else []
    found = {entry.name: entry for entry in entries if _is_parquet(entry.name) and not entry.is_folder}
    if not found:
        folders = [e.name for top in ("sample", "data") for e in hub.tree(commit, top, recursive=False) if e.is_folder]
        raise _unknown_subset(subset, f"{REPO} at {revision}", folders)
    return HubFiles(hub, commit, found)


def _cached(subset: str, revision: str) -> LocalFiles:
    folder = subset_folder(subset)
    if folder is None:
        raise DataError(
            f"data.subset: {subset!r} is not a subset of {REPO}; name sample-10BT, sample-100BT, sample-350BT, a crawl "
            "such as CC-MAIN-2024-10, or default for all"
        )
    from nsa.data.sources.hub import cached_snapshot

    snapshot = cached_snapshot(REPO, revision, folder)
    found = _parquet_below(snapshot / folder) if snapshot is not None else []
    if snapshot is None or not found:
        raise DataUnavailableError(
            f"{REPO}, {subset}: offline mode is on and the local cache does not hold all of it at {revision}; unset "
            f"HF_HUB_OFFLINE, or download it with `hf download {REPO} --repo-type dataset --include "
            f'"{folder}/*"`, or set data.paths to a mirror'
        )
    return LocalFiles({path.relative_to(snapshot).as_posix(): path for path in found}, commit=snapshot.name)


def _cached_content_id(path: Path) -> str:
    """The content id that the hub lists for a file of its local cache; empty for a file that is not in one.

    Files of the cache are links to `blobs/ID`, which may itself be a link to a store that several repositories share.
    """
    if not path.is_symlink():
        return ""
    blob = path.readlink()
    return blob.name if blob.parent.name == "blobs" else ""


def _mirrored(paths: Sequence[str], subset: str) -> dict[str, Path]:
    """The files that `data.paths` names, each once. Names are relative to the folder that was named."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    for number, given in enumerate(paths):
        top = Path(os.path.expanduser(given))  # noqa: PTH111  (Path.expanduser fails at a user that does not exist)
        with file_errors(top):
            inside = _in_folder(top, subset) if top.is_dir() else [top] if top.is_file() else []
        if not top.exists():
            raise DataError(f"data.paths: no such file or folder: {given}; relative paths start at {Path.cwd()}")
        if not any(_is_parquet(path.name) for path in inside):
            raise DataError(f"data.paths: {given} holds no .parquet file; name a mirror of {REPO}, or a folder of it")
        for path in inside:
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                name = path.relative_to(top).as_posix() if path != top else path.name
                found[name if name not in found else f"{number}/{name}"] = path
    return found


def _in_folder(top: Path, subset: str) -> list[Path]:
    folder = subset_folder(subset)
    if folder is not None and (top / folder).is_dir():
        return _parquet_below(top / folder)
    # In a mirror of the repository another subset must not be mistaken for the one that is configured.
    others = [p for pattern in ("sample/*BT", "data/CC-MAIN-*") for p in top.glob(pattern) if p.is_dir()]
    if others:
        raise _unknown_subset(subset, f"the mirror {top}", [p.relative_to(top).as_posix() for p in others])
    return _parquet_below(top)


def _parquet_below(folder: Path) -> list[Path]:
    return sorted(path for path in files_below(folder) if _is_parquet(path.name))


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def _unknown_subset(subset: str, where: str, folders: Sequence[str]) -> DataError:
    samples = sorted(f.replace("sample/", "sample-") for f in folders if f.startswith("sample/"))
    crawls = sorted(f.removeprefix("data/") for f in folders if f.startswith("data/"))
    shown = crawls if len(crawls) <= 8 else [*crawls[:3], f"{len(crawls) - 6} more crawls", *crawls[-3:]]
    names = ", ".join([*samples, *shown, *(["default (all crawls)"] if crawls else [])])
    return DataError(f"data.subset: {where} has no {subset!r}; it has {names or 'no subsets at all'}")


def _no_such_file(name: str) -> DataError:
    return DataError(f"{name}: is not among the files of this source; did data.paths or data.subset change?")
