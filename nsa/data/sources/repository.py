"""A dataset repository on the hub or on disk: its README, its listing, and its files, opened by their names in it."""

import io
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, cast

from nsa.data.sources.base import Entry
from nsa.data.sources.readers import file_errors, open_file
from nsa.data.sources.text import files_below
from nsa.errors import DataError

if TYPE_CHECKING:  # files on disk need no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

Kind = Literal["hub", "cache", "mirror"]
CARD = "README.md"
TAIL_BYTES = 64 << 10  # what arrow reads first of a file; most of the time not yet the whole footer
MAX_FOOTER_BYTES = 256 << 20
# A footer of 700 row groups is 1.4 MB, half of what a row group's text is: kept compressed, so that those of 250
# files stay, rather than fetched again for every row group.
FOOTER_CACHE_BYTES = 128 << 20


class Repository(Protocol):
    """What is known of a repository before any of its files is chosen. `title` names it in messages."""

    kind: Kind
    title: str

    def card(self) -> str:
        """Its README.md; empty where there is none."""
        ...

    def below(self, folder: str) -> list[str]:
        """The names of all files below a folder, which may not exist; of all files for an empty name."""
        ...


class OnHub:
    """A repository of the hub at the commit that a revision stands for now."""

    kind: Kind = "hub"

    def __init__(self, hub: "Hub", revision: str):
        self.hub = hub
        self.title = f"{hub.repo} at {revision}"
        self.commit = revision if re.fullmatch(r"[0-9a-f]{40}", revision) else hub.commit(revision)
        self._entries: dict[str, Entry] = {}

    def card(self) -> str:
        return self.hub.text(self.commit, CARD)

    def below(self, folder: str) -> list[str]:
        found = {e.name: e for e in self.hub.tree(self.commit, folder, recursive=True) if not e.is_folder}
        self._entries |= found
        return list(found)

    def files(self, names: Sequence[str]) -> "HubFiles":
        """Of those that a listing named."""
        return HubFiles(self.hub, self.commit, {name: self._entries[name] for name in names})


class OnDisk:
    """A folder that holds a repository, or a part of one."""

    def __init__(self, top: Path, kind: Kind, title: str):
        self.top, self.kind, self.title = top, kind, title

    def card(self) -> str:
        path = self.top / CARD
        if not path.is_file():
            return ""
        with open_file(path) as file:
            return file.read().decode("utf-8", errors="replace")

    def below(self, folder: str) -> list[str]:
        inside = self.top / folder
        if ".." in Path(folder).parts or not inside.is_dir():  # a README may name anything
            return []
        return [path.relative_to(self.top).as_posix() for path in files_below(inside)]


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


def _cached_content_id(path: Path) -> str:
    """The content id that the hub lists for a file of its local cache; empty for a file that is not in one.

    Files of the cache are links to `blobs/ID`, which may itself be a link to a store that several repositories share.
    """
    if not path.is_symlink():
        return ""
    blob = path.readlink()
    return blob.name if blob.parent.name == "blobs" else ""


def _no_such_file(name: str) -> DataError:
    return DataError(f"{name}: is not among the files of this source; did data.paths or data.subset change?")
