"""A dataset repository of the Hugging Face hub: its listing at one commit, and byte ranges of its files.

huggingface_hub gives the token and finds its cache. The requests are made here, because that library cannot keep a
deadline: its listing waits without a time limit, its retries sleep for 23 s or for whatever a Retry-After says, and
neither can be set from outside. The token is sent to the endpoint alone, never to the hosts it redirects to.
"""

import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urljoin, urlsplit

from nsa.data.sources.transport import (
    CHUNK_BYTES,
    Answer,
    Attempts,
    Connections,
    Failure,
    Wait,
    origin_of,
    retry_after,
)
from nsa.errors import DataError

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_REDIRECTS = 5
MAX_JSON_BYTES = 64 << 20  # of one page of a listing; a thousand files are 0.3 MB


@dataclass(frozen=True)
class Entry:
    """A file, or a folder without size and content id, by its name in the repository."""

    name: str
    size: int = 0
    content_id: str = ""
    is_folder: bool = False


class _NoEntryError(DataError):
    """The repository has no such file or folder."""


class Hub:
    """One dataset repository. Thread-safe; a pickled copy opens its own connections."""

    def __init__(self, repo: str, deadline_s: float, endpoint: str | None = None):
        self.repo = repo
        self.deadline_s = deadline_s
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        try:
            self._origin = origin_of(self.endpoint)
        except Failure as error:
            raise DataError(f"HF_ENDPOINT: {error}; unset it, or give the hub's address with https://") from None
        self._attempts = Attempts(self.endpoint, deadline_s)
        self._connections = Connections()
        self._signed: dict[str, str] = {}  # where a file's bytes were found last; good until refused

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.repo, self.deadline_s, self.endpoint)

    def waiting_for(self) -> str | None:
        """The operation that waits longest, if one failed before or is slow."""
        return self._attempts.waiting_for()

    def be_patient(self, deadline_s: float) -> None:
        self.deadline_s = self._attempts.deadline_s = deadline_s

    def give_up(self) -> None:
        """Operations under way in other threads end soon, with an error."""
        self._attempts.give_up()

    def commit(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit stands for now."""
        url = f"{self.endpoint}/api/datasets/{self.repo}/revision/{quote(revision, safe='')}"
        info, _ = self._json(url, f"{self.repo}, revision {revision}")
        commit = info.get("sha") if isinstance(info, dict) else None
        if not isinstance(commit, str) or not commit:
            raise DataError(f"{url}: names no commit; check HF_ENDPOINT")
        return commit

    def tree(self, commit: str, folder: str, *, recursive: bool) -> list[Entry]:
        """What a folder holds at a commit, over all pages of the listing; nothing when there is no such folder."""
        url = f"{self.endpoint}/api/datasets/{self.repo}/tree/{quote(commit, safe='')}/{quote(folder, safe='')}"
        query = {"recursive": str(recursive), "expand": "False"}
        entries: list[Entry] = []
        while True:
            try:
                page, link = self._json(f"{url}?{urlencode(query)}", f"{self.repo}, listing of {folder}")
                entries += [_entry(item) for item in page]
            except _NoEntryError:
                return []
            except (TypeError, KeyError, AttributeError, ValueError):
                raise DataError(f"{url}: is no listing of files; check HF_ENDPOINT") from None
            following = re.search(r'<([^>]*)>\s*;\s*rel="?next', link)
            if following is None:
                return entries
            # Its query only: a mirror of the hub passes on links that lead to the hub itself.
            query = dict(parse_qsl(urlsplit(following[1]).query))

    def read(self, commit: str, name: str, start: int, stop: int, size: int, what: str) -> bytes:
        """Bytes [start, stop) of a file of `size` bytes. What arrived before a connection was cut is kept."""
        buffer = bytearray()
        if start < stop:
            self._attempts.run(what, lambda wait: self._go_on(commit, name, start, stop, size, buffer, wait))
        return bytes(buffer)

    def _json(self, url: str, what: str) -> tuple[Any, str]:
        """What an API call answers, and its Link header."""

        def attempt(wait: Wait) -> tuple[bytes, str]:
            answer = self._open(url, {}, wait.limit())
            try:
                if answer.response.status != 200:
                    raise self._refusal(answer, what)
                body = bytearray()
                if answer.receive(body, MAX_JSON_BYTES, wait.limit(), lambda: None):
                    raise DataError(f"{url}: answers more than {MAX_JSON_BYTES >> 20} MiB; check HF_ENDPOINT")
                if answer.response.length:
                    raise Failure("the connection was cut")
                return bytes(body), answer.response.getheader("Link", "")
            finally:
                self._connections.give_back(answer)

        body, link = self._attempts.run(what, attempt)
        try:
            return json.loads(body), link
        except ValueError:
            raise DataError(
                f"{url}: answers something that is no JSON; check HF_ENDPOINT, and whether a proxy wants a login"
            ) from None

    def _go_on(self, commit: str, name: str, start: int, stop: int, size: int, buffer: bytearray, wait: Wait) -> None:
        """One attempt at what the buffer still lacks."""
        key = f"{commit}/{name}"
        url = f"{self.endpoint}/datasets/{self.repo}/resolve/{quote(commit, safe='')}/{quote(name)}"
        first = start + len(buffer)
        answer = None
        try:
            answer = self._open(self._signed.get(key, url), {"Range": f"bytes={first}-{stop - 1}"}, wait.limit())
            if answer.response.status != 206:
                raise self._refusal(answer, wait.what)
            given = answer.response.getheader("Content-Range", "")
            if given != f"bytes {first}-{stop - 1}/{size}":
                raise DataError(
                    f"{wait.what}: asked for bytes {first}-{stop - 1} of {size} and got {given!r}; check HF_ENDPOINT, "
                    "or set data.paths to a local mirror"
                )
            if not answer.receive(buffer, stop - start, wait.limit(), wait.progress):
                raise Failure(f"the connection was cut, {stop - start - len(buffer)} bytes are missing")
        except BaseException:
            # A signature ran out, or a host is down: the hub is asked again where the bytes are.
            self._signed.pop(key, None)
            raise
        finally:
            if answer is not None:
                self._connections.give_back(answer)
        if origin_of(answer.url) != self._origin:
            self._signed[key] = answer.url

    def _open(self, url: str, headers: Mapping[str, str], limit: float) -> Answer:
        """The first answer that is no redirect."""
        stop = time.monotonic() + limit
        for _ in range(MAX_REDIRECTS + 1):
            known = {"User-Agent": "nsa", **headers}
            if origin_of(url) == self._origin and (token := _token()):
                known["Authorization"] = f"Bearer {token}"
            answer = self._connections.get(url, known, stop)
            location = answer.response.getheader("Location")
            if answer.response.status not in (301, 302, 303, 307, 308) or not location:
                return answer
            try:
                answer.response.read(CHUNK_BYTES)
            finally:
                self._connections.give_back(answer)
            url = urljoin(url, location)
        raise Failure(f"more than {MAX_REDIRECTS} redirects")

    def _refusal(self, answer: Answer, what: str) -> Exception:
        """What a status other than success means: a failure that may pass, or an error with a remedy."""
        status, headers = answer.response.status, answer.response.headers
        if status in (408, 425, 429) or status >= 500:
            return Failure(f"HTTP {status}", retry_after(headers))
        if origin_of(answer.url) != self._origin and status in (401, 403, 404, 410):
            return Failure(f"HTTP {status} from {urlsplit(answer.url).hostname}")
        said, code = headers.get("X-Error-Message"), headers.get("X-Error-Code")
        reason = f"{what}: {self.endpoint} answers HTTP {status}" + (f" ({said})" if said else "")
        if code == "RevisionNotFound":
            return DataError(f"data.revision: {reason}; name a branch, a tag or a commit of {self.repo}")
        if code == "EntryNotFound":
            return _NoEntryError(f"{reason}; check data.revision and data.subset")
        if status in (401, 403):
            return DataError(
                f"{reason}; set HF_TOKEN to a token that may read {self.repo} (or log in with `hf auth login`, and "
                "accept the terms on its page where it has some), or unset one that is out of date"
            )
        if status == 404:
            return DataError(f"{reason}; there is no {self.repo}: check HF_ENDPOINT, and HF_TOKEN where it is private")
        if status == 200:
            return DataError(f"{reason} with a whole file to a request for a part; set data.paths to a local mirror")
        return DataError(f"{reason}, which is not expected; check HF_ENDPOINT, or set data.paths to a local mirror")


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

    def read(self, size: int | None = -1) -> bytes:
        start = min(self._position, self._size)
        stop = self._size if size is None or size < 0 else min(start + size, self._size)
        border = max(start, min(stop, self._size - len(self._tail)))
        data = self._fetch(start, border) if start < border else b""
        if border < stop:
            offset = len(self._tail) - self._size
            data += self._tail[border + offset : stop + offset]
        self._position = stop
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(memoryview(buffer)))
        memoryview(buffer)[: len(data)] = data
        return len(data)


def is_offline() -> bool:
    """Whether the user wants no network, as huggingface_hub understands it."""
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def cached_snapshot(repo: str, revision: str, folder: str) -> Path | None:
    """Where a download into the hub's local cache left a revision; None without one, or when files of it are missing.

    Uses no network. Only newer versions of huggingface_hub know which files are missing.
    """
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or (home and f"{home}/hub")
    try:
        found = _library().snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            cache_dir=cache or None,
            local_files_only=True,
            allow_patterns=[f"{folder}/*"],
        )
    except FileNotFoundError:
        return None
    return Path(found)


def cached_content_id(path: Path) -> str:
    """The content id that the hub lists for a file of its local cache; empty for a file that is not in one.

    Files of the cache are links to `blobs/ID`, which may itself be a link to a store that several repositories share.
    """
    if not path.is_symlink():
        return ""
    blob = path.readlink()
    return blob.name if blob.parent.name == "blobs" else ""


def _entry(item: dict[str, Any]) -> Entry:
    if item["type"] != "file":
        return Entry(item["path"], is_folder=True)
    lfs = item.get("lfs") or {}
    return Entry(item["path"], int(item["size"]), str(lfs.get("oid") or item.get("oid") or ""))


def _token() -> str | None:
    """As huggingface_hub finds it: HF_TOKEN, or the file that a login left. Asked anew each time: tokens expire."""
    if _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    token: str | None = _library().get_token()
    return token


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise DataError("data.source: fineweb_edu needs huggingface_hub; pip install huggingface-hub") from None
    return huggingface_hub
