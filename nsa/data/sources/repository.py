"""A dataset repository on the hub or on disk: its README, its listing, and its files, opened by their names in it."""

import io
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from nsa.data.sources.base import Entry
from nsa.data.sources.readers import file_errors, open_file
from nsa.data.sources.text import files_below

if TYPE_CHECKING:  # files on disk need no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

CARD = "README.md"
TAIL_BYTES = 64 << 10  # what arrow reads first of a file; most of the time not yet the whole footer
MAX_FOOTER_BYTES = 256 << 20
# A footer of 700 row groups is 1.4 MB, half of what a row group's text is: kept compressed, so that those of 250
# files stay, rather than fetched again for every row group.
FOOTER_CACHE_BYTES = 128 << 20


class HubRepository:
    """A repository of the hub at one commit. Footers are kept, everything else is fetched when it is read.

    `title` names it in messages; `entries` has the files that were listed.
    """

    kind = "hub"

    def __init__(self, hub: "Hub", commit: str, title: str, entries: dict[str, Entry] | None = None):
        self.hub, self.commit, self.title = hub, commit, title
        self.entries = entries or {}
        self._tails: OrderedDict[str, bytes] = OrderedDict()
        self._tails_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.hub, self.commit, self.title, self.entries)

    def card(self) -> str:
        """Its README.md; empty where there is none."""
        return self.hub.text(self.commit, CARD)

    def below(self, folder: str) -> list[str]:
        """The names of all files below a folder, which may not exist; of all files for an empty name."""
        found = {entry.name: entry for entry in self.hub.tree(self.commit, folder)}
        self.entries |= found
        return list(found)

    def entry(self, name: str) -> Entry:
        """Of a file that a listing named."""
        return self.entries[name]

    def open(self, name: str, what: str) -> AbstractContextManager[BinaryIO]:
        entry = self.entries[name]
        return cast(BinaryIO, RemoteFile(entry.size, self._tail(entry), self._reader(entry, what)))

    def _tail(self, entry: Entry) -> bytes:
        with self._lock:
            packed = self._tails.get(entry.name)
            if packed is not None:
                self._tails.move_to_end(entry.name)
        if packed is not None:
            return zlib.decompress(packed)
        fetch = self._reader(entry, "footer")
        start = max(0, entry.size - TAIL_BYTES)
        tail = fetch(start, entry.size)
        # The last eight bytes: the footer's length and a magic number. Arrow checks whether they make sense.
        missing = int.from_bytes(tail[-8:-4], "little") + 8 - len(tail)
        if 0 < missing <= min(start, MAX_FOOTER_BYTES) and tail.endswith(b"PAR1"):
            tail = fetch(start - missing, start) + tail
        self._keep(entry.name, zlib.compress(tail, 1))
        return tail

    def _keep(self, name: str, packed: bytes) -> None:
        with self._lock:
            self._tails_bytes += len(packed) - len(self._tails.pop(name, b""))
            self._tails[name] = packed
            while self._tails_bytes > FOOTER_CACHE_BYTES:
                self._tails_bytes -= len(self._tails.popitem(last=False)[1])

    def _reader(self, entry: Entry, what: str) -> Callable[[int, int], bytes]:
        """Gives the bytes from one place of a file to another."""
        where = f"{entry.name}, {what}"
        return lambda start, stop: self.hub.read(self.commit, entry.name, start, stop, entry.size, where)


class LocalRepository:
    """A folder that holds a repository or a part of one, in the hub's cache or elsewhere. See `HubRepository`."""

    def __init__(self, top: Path, kind: Literal["cache", "mirror"], title: str, commit: str | None = None):
        self.top, self.kind, self.title, self.commit = top, kind, title, commit

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

    def entry(self, name: str) -> Entry:
        path = self.top / name
        with file_errors(path):
            return Entry(name, path.stat().st_size, _cached_content_id(path))

    def open(self, name: str, what: str) -> AbstractContextManager[BinaryIO]:
        return open_file(self.top / name)


Repository = HubRepository | LocalRepository


class RemoteFile(io.RawIOBase):
    """A seekable file of `size` bytes that holds its last ones; others come from `fetch(start, stop)` at each read."""

    def __init__(self, size: int, tail: bytes, fetch: Callable[[int, int], bytes]):
        self._size, self._tail, self._fetch, self._position = size, tail, fetch, 0

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
