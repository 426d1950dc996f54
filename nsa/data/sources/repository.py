"""A dataset repository on the hub or on disk: its README, its listing, and its files, opened by their names in it."""

import io
import os
import re
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import AliasChoices, AliasPath, BaseModel, Field, TypeAdapter, ValidationError

from nsa.data.sources.base import Entry
from nsa.data.sources.readers import file_errors, open_file
from nsa.data.sources.text import files_below
from nsa.errors import DataError

if TYPE_CHECKING:  # files on disk need no HTTP client, which takes a while to import
    from nsa.data.sources.hub import Hub

T = TypeVar("T")
CARD = "README.md"
MAX_PAGES = 1000  # of a listing, a thousand files each
TAIL_BYTES = 64 << 10  # what arrow reads first of a file; most of the time not yet the whole footer
MAX_FOOTER_BYTES = 256 << 20
# A footer of 700 row groups is 1.4 MB, half of what a row group's text is: kept compressed, so that those of 250
# files stay, rather than fetched again for every row group.
FOOTER_CACHE_BYTES = 128 << 20


class _Revision(BaseModel):
    sha: str = Field(min_length=1)


class _Item(BaseModel):
    """A file or a folder in a listing."""

    type: str
    path: str
    size: int
    content_id: str = Field("", validation_alias=AliasChoices(AliasPath("lfs", "oid"), "oid"))


class HubRepository:
    """A repository of the hub at the commit that `revision` stands for now. Footers are kept, everything else is
    fetched when it is read. `title` names it in messages."""

    kind = "hub"

    def __init__(self, hub: "Hub", revision: str):
        self.hub, self.commit, self.title = hub, revision, f"{hub.repo} at {revision}"
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            path = f"/api/datasets/{hub.repo}/revision/{quote(revision, safe='')}"
            self.commit = self._answer(_Revision, path, f"{hub.repo}, revision {revision}")[0].sha
        self._entries: dict[str, Entry] = {}  # of the files that were listed
        self._tails: dict[str, bytes] = {}
        self._tails_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.hub, self.commit)

    def card(self) -> str:
        """Its README.md; empty where there is none."""
        return self.hub.body(self._path(CARD), f"{self.hub.repo}, {CARD}")[0].decode("utf-8", errors="replace")

    def below(self, folder: str) -> list[str]:
        """The names of all files below a folder, which may not exist; of all files for an empty name."""
        path = f"/api/datasets/{self.hub.repo}/tree/{quote(self.commit, safe='')}"
        path += f"/{quote(folder, safe='')}" if folder else ""
        query = {"recursive": "True", "expand": "False"}
        what = f"{self.hub.repo}, listing of {folder or 'all files'}"
        found: dict[str, Entry] = {}
        for _ in range(MAX_PAGES):
            page, link = self._answer(list[_Item], f"{path}?{urlencode(query)}", what)
            found |= {i.path: Entry(i.path, i.size, i.content_id) for i in page if i.type == "file"}
            following = re.search(r'<([^>]*)>\s*;\s*rel="?next', link)
            if following is None:
                self._entries |= found
                return list(found)
            # Its query only: a mirror of the hub passes on links that lead to the hub itself.
            query = dict(parse_qsl(urlsplit(following[1]).query))
        raise DataError(f"{self.hub.shown}{path}: a listing of more than {MAX_PAGES} pages; check HF_ENDPOINT")

    def entry(self, name: str) -> Entry:
        """Of a file that a listing named."""
        return self._entries[name]

    def open(self, entry: Entry, what: str) -> AbstractContextManager[BinaryIO]:
        return cast(BinaryIO, RemoteFile(entry.size, self._tail(entry), partial(self._read, entry, what)))

    def _tail(self, entry: Entry) -> bytes:
        if packed := self._tails.get(entry.name):
            return zlib.decompress(packed)
        start = max(0, entry.size - TAIL_BYTES)
        tail = self._read(entry, "footer", start, entry.size)
        # The last eight bytes: the footer's length and a magic number. Arrow checks whether they make sense.
        missing = int.from_bytes(tail[-8:-4], "little") + 8 - len(tail)
        if 0 < missing <= min(start, MAX_FOOTER_BYTES) and tail.endswith(b"PAR1"):
            tail = self._read(entry, "footer", start - missing, start) + tail
        packed = zlib.compress(tail, 1)
        with self._lock:
            self._tails_bytes += len(packed) - len(self._tails.pop(entry.name, b""))
            self._tails[entry.name] = packed
            while self._tails_bytes > FOOTER_CACHE_BYTES:
                self._tails_bytes -= len(self._tails.pop(next(iter(self._tails))))
        return tail

    def _read(self, entry: Entry, what: str, start: int, stop: int) -> bytes:
        return self.hub.read(self._path(entry.name), start, stop, entry.size, f"{entry.name}, {what}")

    def _path(self, name: str) -> str:
        return f"/datasets/{self.hub.repo}/resolve/{quote(self.commit, safe='')}/{quote(name)}"

    def _answer(self, kind: type[T], path: str, what: str) -> tuple[T, str]:
        """What an API call answers, and its Link header. Of a folder that does not exist the listing is empty."""
        body, link = self.hub.body(path, what)
        try:
            return TypeAdapter(kind).validate_json(body or b"[]"), link
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            reason = " ".join(map(str, (*first["loc"], first["msg"])))
            raise DataError(
                f"{self.hub.shown}{path}: this is not what a hub answers: {reason}; check HF_ENDPOINT, and whether a "
                "proxy wants a login"
            ) from None


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
        return [path.relative_to(self.top).as_posix() for path in files_below(inside)] if inside.is_dir() else []

    def entry(self, name: str) -> Entry:
        path = self.top / name
        with file_errors(path):
            # Files of the hub's cache are links to blobs/ID, with the content id that the hub lists. What they lead to
            # may itself be a link to a store that several repositories share.
            blob = path.readlink() if path.is_symlink() else None
            content_id = blob.name if blob is not None and blob.parent.name == "blobs" else ""
            return Entry(name, path.stat().st_size, content_id)

    def open(self, entry: Entry, what: str) -> AbstractContextManager[BinaryIO]:
        return open_file(self.top / entry.name)


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
